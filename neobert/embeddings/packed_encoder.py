"""Sentence embeddings of any sentence encoder in batches of a token budget, of NeoBERT unpadded.

`neobert encode` and `neobert mteb` use `PackedEncoder`. It loads what `SentenceTransformer(...)`
loads and returns the same embeddings as its `encode`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Embedding with infinite or NaN values; `index` is that of the text."""

    def __init__(self, index: int, dtype: str) -> None:
        super().__init__(
            f"the embedding must be finite, got infinite or NaN values in {dtype}. Use `--dtype "
            "float32` or `bfloat16`, unless the weights are damaged."
        )
        self.index = index


def load_sentence_transformer(
    model: str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    max_length: int | None = None,
    pooling: str = "mean",
    tokenizer: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a SentenceTransformer, or build one from an encoder without a pooling module.

    Args:
        model: Directory or Hub name. Weights of task heads are not loaded.
        device: Device of the model.
        dtype: Precision of the weights.
        max_length: Maximum sequence length in tokens; longer texts are truncated. By default the
            limit of the model, and never more than its positions.
        pooling: "mean" or "cls", for an encoder without a pooling module.
        tokenizer: Directory or Hub name, for a model whose directory has no tokenizer. NeoBERT
            falls back to the packaged one.
        attn_implementation: Attention implementation of transformers.
        trust_remote_code: Whether to run the Python code in the repository of the model.

    Raises:
        UserError: If the model does not exist or cannot be read.
    """
    require("eval", "sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as modules  # type: ignore[attr-defined]
    from sentence_transformers.util import is_sentence_transformer_model

    check_model(model)
    model_kwargs: dict[str, Any] = {"dtype": dtype}
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
        raise UserError(f"the model {model} cannot be loaded: {one_line(error)}.") from error
    limits = [max_length or encoder.max_seq_length, position_limit(encoder[0].auto_model)]
    encoder.max_seq_length = min((limit for limit in limits if limit), default=None)
    return encoder.eval()


def _load(model: str, device: torch.device, dtype: torch.dtype, settings: Mapping[str, Any]) -> Any:
    """Load a SentenceTransformer, also in int8, whose other layers are in bfloat16 with AMX.

    No measurement decides this, because all processes on a machine must get the same bits.
    """
    if dtype != torch.int8:
        return load_sentence_transformer(model, device, dtype, **settings)
    encoder = quantize_int8(load_sentence_transformer(model, device, torch.float32, **settings))
    return encoder.to(torch.bfloat16) if "AMX-BF16" in processor_units() else encoder


def _tokenizer_of(folder: Path) -> str | None:
    """Return the packaged tokenizer for a NeoBERT directory without one, None in other cases."""
    names = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
    if not folder.exists() or any((folder / name).is_file() for name in names):
        return None
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if config.model_type != "neobert" or config.vocab_size != 30522 or not TOKENIZER.exists():
        raise UserError(f"{folder} has no tokenizer. Name one with `--tokenizer`.")
    return str(TOKENIZER)


class PackedEncoder:
    """Sentence encoder that runs on batches of `batch_tokens` tokens.

    NeoBERT with mean or first-token pooling runs packed: (1, T) tokens with `cu_seq_lens`, pooled
    per text in float32. Any other model or pooling runs through SentenceTransformer's own modules
    on padded batches of texts of similar length; the token budget then includes padding.

    Args:
        model: Directory, Hub name, or a SentenceTransformer.
        dtype: "auto", "float32", "float16", "bfloat16" or, for NeoBERT on a CPU, "int8". In int8
            and in float32 an embedding does not depend on the other texts of the batch.
        device: Device of the model; by default CUDA if it is available.
        batch_tokens: Maximum number of tokens per batch; by default `CUDA_TOKENS` on CUDA, and
            `CPU_TOKENS` elsewhere.
        settings: Further arguments of `load_sentence_transformer`.
    """

    def __init__(
        self,
        model: Any,
        dtype: str = "auto",
        device: str | torch.device | None = None,
        batch_tokens: int | None = None,
        **settings: Any,
    ) -> None:
        self.device = choose_device(device)
        if isinstance(model, (str, Path)):
            # Check the model before the processor is timed for its dtype.
            check_model(str(model))
            model = _load(str(model), self.device, choose_dtype(dtype, self.device), settings)
        self.sentence_transformer: Any = model.to(self.device).eval()
        self.dtype = torch.int8 if is_int8(model) else model[0].auto_model.dtype
        self.batch_tokens = batch_tokens or (
            CUDA_TOKENS if self.device.type == "cuda" else CPU_TOKENS
        )
        # Only prompts that change an embedding.
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

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def normalizes(self) -> bool:
        """Whether the model normalizes its embeddings to unit length."""
        return any(type(module).__name__ == "Normalize" for module in self._rest)

    @property
    def max_length(self) -> int | None:
        return self.sentence_transformer.max_seq_length

    def prompt(self, name: str | None = None) -> str:
        """Return the text of a prompt, "" for None and for an empty prompt.

        Raises:
            UserError: If the model has no such prompt.
        """
        if name is None:
            return ""
        prompts = self.sentence_transformer.prompts or {}
        if name not in prompts:
            names = ", ".join(prompts) or "none"
            raise UserError(f"`prompt_name` must be a prompt of the model ({names}), got {name!r}.")
        return prompts[name] or ""

    def tokenize(
        self, texts: list[str], prompt: str = "", lengths: list[int] | None = None
    ) -> list[np.ndarray]:
        """Return the token ids of each text, int32 arrays of at most `max_length` tokens.

        Args:
            texts: Texts.
            prompt: Text before each text.
            lengths: List to which the length of each text before truncation is appended.
        """
        tokens: list[np.ndarray] = []
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

    def _full_lengths(self, batch: list[str], found: Any) -> list[int]:
        """Return the lengths of texts before truncation; `found` is the truncated encoding."""
        if found.encodings is None:  # The tokenizer is written in Python.
            return list(map(len, self._tokenizer(batch, verbose=False)["input_ids"]))
        return [
            len(text.ids)
            + sum(len(rest.ids) - sum(rest.special_tokens_mask) for rest in text.overflowing)
            for text in found.encodings
        ]

    def batches(self, lengths: Sequence[int] | np.ndarray) -> Iterator[np.ndarray]:
        """Yield index arrays that cover all texts, shortest first.

        Each batch contains at most `batch_tokens` tokens, or one text.

        Args:
            lengths: Sequence length of each text.
        """
        order = np.argsort(lengths, kind="stable")
        batch: list[int] = []
        total = 0
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
        """Return the embeddings of tokenized texts, (N, width) float32, in their order.

        Args:
            tokens: Token ids, N integer arrays.
            progress: Function that is called with the number of texts of each finished batch.
            prompt: Prompt of the texts; some models exclude its tokens from the pooling.

        Raises:
            NotFinite: If a value is too large for the dtype: float16 ends at 65,504.
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
        """Return the embeddings of texts, (N, width) float32."""
        with tqdm(total=len(texts), desc="texts", disable=not show_progress_bar) as bar:
            return self.embed(self.tokenize(texts, prompt), bar.update, prompt)

    def _embed_packed(self, batch: Sequence[np.ndarray]) -> torch.Tensor:
        total = sum(map(len, batch))
        filler = self._filler(total)
        packed = pack([*batch, np.zeros(filler, np.int32)] if filler else batch, self.device)
        hidden = self.sentence_transformer[0].auto_model(**packed).last_hidden_state[:, :total]
        bounds = packed["cu_seq_lens_q"][: len(batch) + 1]
        if self.pooling == "cls":
            pooled = hidden[0, bounds[:-1].long()]
        else:
            pooled = Packing(bounds, max(map(len, batch))).means(hidden)
        features = {"sentence_embedding": pooled}
        for module in self._rest:
            features = module(features)
        return features["sentence_embedding"]

    def _filler(self, total: int) -> int:
        """Return the length of an unused sequence after a batch of `total` tokens on the CPU.

        oneDNN builds a 16-bit matrix product again for every number of tokens, so large batches
        have a multiple of 64. In float32 the last rows of a product are summed in another order
        than those before them, so all tokens must be in complete groups of 16.
        """
        # int8 layers fill their own products.
        if self.device.type != "cpu" or self.dtype == torch.int8:
            return 0
        step = 16 if self.dtype == torch.float32 else 64 if total >= 1024 else 1
        return -total % step

    def _prompt_length(self, prompt: str) -> int:
        """Return the number of tokens of the prompt at the start of a text.

        As in SentenceTransformer, these are the tokens of the prompt alone without its last [SEP].
        """
        if not prompt:
            return 0
        ids = self._tokenizer(prompt, truncation=True, max_length=self.max_length)["input_ids"]
        if ids[-1] in self._tokenizer.all_special_ids:
            ids = ids[:-1]
        return len(ids)

    def _embed_padded(self, batch: Sequence[np.ndarray], prompt_length: int = 0) -> torch.Tensor:
        padded = self._tokenizer.pad(
            {"input_ids": [ids.tolist() for ids in batch]}, return_tensors="pt"
        )
        features = {name: value.to(self.device) for name, value in padded.items()}
        if prompt_length:
            # A pooling that excludes the prompt reads this value.
            features["prompt_length"] = prompt_length
        return self.sentence_transformer(features)["sentence_embedding"]


def _pooling(modules: Sequence[Any]) -> tuple[str, bool]:
    """Return the name of a pipeline's pooling, and whether it includes the prompt.

    The name of a pipeline without a pooling consists of the names of its modules.
    """
    from sentence_transformers import models  # type: ignore[attr-defined]

    pooling = modules[1] if len(modules) > 1 else None
    if not isinstance(pooling, models.Pooling):
        return "+".join(type(module).__name__ for module in modules), True
    mode = getattr(pooling, "pooling_mode", None)
    if mode is None:
        # Versions before 6 have no such attribute.
        mode = pooling.get_pooling_mode_str()
    return mode if isinstance(mode, str) else "+".join(mode), pooling.include_prompt
