"""Sentence embeddings of any sentence encoder, batched by a token budget; NeoBERT without a single
padding token.

`neobert encode` and `neobert mteb` both embed through `PackedEncoder`. It loads what
`SentenceTransformer(...)` loads and returns the same vectors as its `encode`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from tqdm.auto import tqdm

from ..attention_neobert import Packing
from ..common.constants import CPU_TOKENS, CUDA_TOKENS, POOLINGS, TOKENIZER
from ..common.errors import UserError, one_line, require
from ..common.loading import (
    check_model,
    choose_device,
    choose_dtype,
    position_limit,
)
from ..common.packing import pack
from ..common.results import processor_units
from ..quantization.int8 import is_int8, quantize_int8


class NotFinite(UserError):
    """A vector with infinite values or none at all; `index` is that of its text."""

    def __init__(self, index, dtype):
        super().__init__(
            f"the vector is not finite in {dtype}; give --dtype float32 or bfloat16, unless the "
            "model's weights are damaged"
        )
        self.index = index


def load_sentence_transformer(
    model,
    device="cpu",
    dtype=torch.float32,
    max_length=None,
    pooling="mean",
    tokenizer=None,
    attn_implementation=None,
    trust_remote_code=False,
):
    """A SentenceTransformer from its folder or Hub name, or built with `pooling` from a bare
    encoder (pre-trained or fine-tuned).

    Args:
        model: folder or Hub name. Weights of task heads are left out.
        max_length: tokens per text; longer texts are truncated. By default the model's own limit,
            and never more than its positions.
        pooling: "mean" or "cls" for a bare encoder; a sentence encoder keeps its own.
        tokenizer: folder or Hub name, where the model's folder has none. NeoBERT falls back to the
            packaged one.
    Raises:
        UserError: there is no such model, or it cannot be read.
    """
    require("eval", "sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as modules
    from sentence_transformers.util import is_sentence_transformer_model

    check_model(model)
    model_kwargs = {"dtype": dtype}
    if attn_implementation:
        model_kwargs["attn_implementation"] = attn_implementation
    try:
        if is_sentence_transformer_model(model):
            encoder = SentenceTransformer(
                model,
                device=str(device),
                model_kwargs=model_kwargs,
                trust_remote_code=trust_remote_code,
            )
        else:
            remote = {"trust_remote_code": trust_remote_code}
            transformer = modules.Transformer(
                model,
                model_kwargs={**model_kwargs, **remote},
                config_kwargs=dict(remote),
                tokenizer_name_or_path=tokenizer or _tokenizer_of(Path(model)),
            )
            width = transformer.auto_model.config.hidden_size
            encoder = SentenceTransformer(
                modules=[transformer, modules.Pooling(width, pooling)], device=str(device)
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"the model {model} cannot be loaded: {one_line(error)}") from error
    limits = [max_length or encoder.max_seq_length, position_limit(encoder[0].auto_model)]
    encoder.max_seq_length = min((limit for limit in limits if limit), default=None)
    return encoder.eval()


def _load(model, device, dtype, settings):
    """`load_sentence_transformer`, in int8 too: the rest is then in bfloat16 on CPUs with AMX.

    Not by a measurement: all processes on one machine must get the same bits.
    """
    if dtype != torch.int8:
        return load_sentence_transformer(model, device, dtype, **settings)
    encoder = quantize_int8(load_sentence_transformer(model, device, torch.float32, **settings))
    return encoder.to(torch.bfloat16) if "AMX-BF16" in processor_units() else encoder


def _tokenizer_of(folder):
    """The packaged tokenizer for a local NeoBERT folder without one, else None (the model's
    own)."""
    names = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
    if not folder.exists() or any((folder / name).is_file() for name in names):
        return None
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if config.model_type != "neobert" or config.vocab_size != 30522 or not TOKENIZER.exists():
        raise UserError(f"{folder} has no tokenizer; name one with --tokenizer")
    return str(TOKENIZER)


class PackedEncoder:
    """Texts to vectors in batches of `batch_tokens` tokens, whatever the number of texts.

    NeoBERT with mean or first-token pooling runs packed: (1, T) tokens with `cu_seq_lens`, pooled
    per text in float32. Any other model or pooling runs through SentenceTransformer's own modules
    on padded batches, texts of similar length together; the budget then counts padding too.

    Args:
        model: folder, Hub name, or a SentenceTransformer.
        dtype: "auto", "float32", "float16", "bfloat16" or, for NeoBERT on a CPU, "int8". In int8
            and in float32 a text's vector does not depend on the texts beside it.
        batch_tokens: by default `CUDA_TOKENS` on CUDA, and `CPU_TOKENS` elsewhere.
        settings: see `load_sentence_transformer`.
    """

    def __init__(
        self,
        model: "str | Path | torch.nn.Module",
        dtype: str = "auto",
        device: str | torch.device | None = None,
        batch_tokens: int | None = None,
        **settings,
    ):
        self.device = choose_device(device)
        if isinstance(model, (str, Path)):
            check_model(str(model))  # before the processor is timed for its dtype
            model = _load(str(model), self.device, choose_dtype(dtype, self.device), settings)
        self.sentence_transformer = model.to(self.device).eval()
        self.dtype = torch.int8 if is_int8(model) else model[0].auto_model.dtype
        self.batch_tokens = batch_tokens or (
            CUDA_TOKENS if self.device.type == "cuda" else CPU_TOKENS
        )
        # those that change a vector
        self.prompts = {name: text for name, text in (model.prompts or {}).items() if text}
        self._tokenizer = model.tokenizer
        modules = list(model.children())
        self.pooling, pools_prompt = _pooling(modules)
        config = getattr(modules[0].auto_model, "config", None)
        # Whether this model runs without padding.
        self.packs = (
            getattr(config, "model_type", None) == "neobert"
            and self.pooling in POOLINGS
            and pools_prompt
        )
        self._rest = modules[2:]
        with torch.inference_mode():
            embed = self._embed_packed if self.packs else self._embed_padded
            self.width = embed(self.tokenize(["A short text."])).shape[1]

    @classmethod
    def from_arguments(
        cls, arguments: Any, device: str | torch.device, dtype: str | None = None
    ) -> "PackedEncoder":
        """Return the encoder that the flat options of a command describe."""
        return cls(
            arguments.model,
            dtype or arguments.dtype,
            device,
            arguments.tokens_per_batch,
            **arguments.loading(),
        )

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def normalizes(self) -> bool:
        """Whether the model itself scales its vectors to length 1."""
        return any(type(module).__name__ == "Normalize" for module in self._rest)

    @property
    def max_length(self) -> int | None:
        return self.sentence_transformer.max_seq_length

    def prompt(self, name: str | None = None) -> str:
        """Text of the prompt called `name`, "" for None and for a prompt without text (most models'
        "document").

        Raises:
            UserError: the model has no such prompt.
        """
        if name is None:
            return ""
        prompts = self.sentence_transformer.prompts or {}
        if name not in prompts:
            raise UserError(
                f"the model has no prompt called {name!r}; it has: {', '.join(prompts) or 'none'}"
            )
        return prompts[name] or ""

    def tokenize(
        self, texts: list[str], prompt: str = "", lengths: list[int] | None = None
    ) -> list[np.ndarray]:
        """Token ids of each text with `prompt` before it, a list of int32 arrays, at most
        `max_length` tokens each.

        Args:
            lengths: a list that gets the number of tokens of each text before it is cut.
        """
        tokens = []
        for start in range(0, len(texts), 1024):
            # Like SentenceTransformer.encode, which strips the text with its prompt.
            batch = [(prompt + text).strip() for text in texts[start : start + 1024]]
            found = self._tokenizer(
                batch, truncation=True, max_length=self.max_length, return_attention_mask=False
            )
            tokens.extend(np.asarray(row, dtype=np.int32) for row in found["input_ids"])
            if lengths is not None:
                lengths += self._full_lengths(batch, found)
        return tokens

    def _full_lengths(self, batch, found):
        """Tokens of each text without the cut; `found` is what the tokenizer made of them with
        it."""
        if found.encodings is None:  # a tokenizer in Python
            return list(map(len, self._tokenizer(batch, verbose=False)["input_ids"]))
        return [
            len(text.ids)
            + sum(len(rest.ids) - sum(rest.special_tokens_mask) for rest in text.overflowing)
            for text in found.encodings
        ]

    def batches(self, lengths: Sequence[int] | np.ndarray) -> Iterator[np.ndarray]:
        """Index arrays that cover all texts, shortest first; each batch holds at most
        `batch_tokens` tokens, or one text.

        Args:
            lengths: tokens of each text.
        """
        order = np.argsort(lengths, kind="stable")
        batch, total = [], 0
        for index in order:
            length = int(lengths[index])
            cost = total + length if self.packs else (len(batch) + 1) * length
            if batch and cost > self.batch_tokens:
                yield np.array(batch)
                batch, total = [], 0
            batch.append(index)
            total += length
        if batch:
            yield np.array(batch)

    @torch.inference_mode()
    def embed(
        self,
        tokens: Sequence[np.ndarray],
        progress: Callable[[int], object] | None = None,
        prompt: str = "",
    ) -> np.ndarray:
        """Vectors of tokenized texts, (N, width) float32, in the order given.

        Args:
            tokens: list of N integer arrays.
            progress: called with the number of texts of each finished batch.
            prompt: that the texts were tokenized with; some models leave its tokens out of the
                pooling.
        Raises:
            NotFinite: float16 ends at 65,504, and the activations of a model may be larger.
        """
        output = torch.empty(len(tokens), self.width, device=self.device)
        prompt_length = 0 if self.packs else self._prompt_length(prompt)
        for index in self.batches(np.array([len(ids) for ids in tokens])):
            batch = [tokens[i] for i in index]
            if self.packs:
                vectors = self._embed_packed(batch)
            else:
                vectors = self._embed_padded(batch, prompt_length)
            output[torch.from_numpy(index).to(self.device)] = vectors.float()
            if progress is not None:
                progress(len(index))
        finite = output.isfinite().all(dim=1)
        if not finite.all():
            raise NotFinite(int((~finite).nonzero()[0]), self.dtype_name)
        return output.cpu().numpy()

    def encode(
        self, texts: list[str], prompt: str = "", show_progress_bar: bool = False
    ) -> np.ndarray:
        """Vectors of `texts`, (N, width) float32."""
        with tqdm(total=len(texts), desc="texts", disable=not show_progress_bar) as bar:
            return self.embed(self.tokenize(texts, prompt), bar.update, prompt)

    def _embed_packed(self, batch):
        total = sum(map(len, batch))
        filler = self._filler(total)
        packed = pack([*batch, np.zeros(filler, np.int32)] if filler else batch, self.device)
        hidden = self.sentence_transformer[0].auto_model(**packed).last_hidden_state[:, :total]
        bounds = packed["cu_seq_lens_q"][: len(batch) + 1]
        if self.pooling == "cls":
            pooled = hidden[0, bounds[:-1].long()]
        else:
            pooled = Packing(bounds, None).means(hidden)
        features = {"sentence_embedding": pooled}
        for module in self._rest:
            features = module(features)
        return features["sentence_embedding"]

    def _filler(self, total):
        """Tokens of a sequence that nobody reads, after a batch of `total` tokens on the CPU.

        oneDNN builds a 16-bit matrix product anew for every number of tokens, so large batches get
        a multiple of 64. In float32 the last rows of a product are added up in another order than
        those before them, so that all tokens are in complete groups of 16.
        """
        if self.device.type != "cpu" or self.dtype == torch.int8:  # int8 fills its own products
            return 0
        step = 16 if self.dtype == torch.float32 else 64 if total >= 1024 else 1
        return -total % step

    def _prompt_length(self, prompt):
        """Tokens at a text's start that are the prompt's, by SentenceTransformer's rule: those of
        the prompt alone without its last [SEP]."""
        if not prompt:
            return 0
        ids = self._tokenizer(prompt, truncation=True, max_length=self.max_length)["input_ids"]
        if ids[-1] in self._tokenizer.all_special_ids:
            ids = ids[:-1]
        return len(ids)

    def _embed_padded(self, batch, prompt_length=0):
        padded = self._tokenizer.pad(
            {"input_ids": [ids.tolist() for ids in batch]}, return_tensors="pt"
        )
        features = {name: value.to(self.device) for name, value in padded.items()}
        if prompt_length:
            features["prompt_length"] = prompt_length  # read by a pooling that leaves it out
        return self.sentence_transformer(features)["sentence_embedding"]


def _pooling(modules):
    """(name of the pooling of a pipeline, whether the tokens of a prompt count in it); of a
    pipeline without one, the names of its modules."""
    from sentence_transformers import models

    pooling = modules[1] if len(modules) > 1 else None
    if not isinstance(pooling, models.Pooling):
        return "+".join(type(module).__name__ for module in modules), True
    mode = getattr(pooling, "pooling_mode", None)
    if mode is None:
        mode = pooling.get_pooling_mode_str()  # before version 6
    return mode if isinstance(mode, str) else "+".join(mode), pooling.include_prompt
