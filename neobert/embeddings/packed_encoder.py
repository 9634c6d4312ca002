"""Sentence embeddings in batches of a token budget; NeoBERT runs without padding.

`PackedEncoder` loads what `SentenceTransformer(...)` loads and returns the same embeddings as its
`encode`. All commands that compute embeddings use it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from tqdm.auto import tqdm

from ..attention_neobert import Packing
from ..common.constants import DTYPES, POOLINGS, TOKENIZER
from ..common.environment import processor_units
from ..common.errors import UserError, one_line, require
from ..common.loading import (
    check_all_weights_stored,
    check_model,
    choose_device,
    choose_dtype,
    default_batch_tokens,
    dtype_name,
    position_limit,
)
from ..common.packing import FLOAT32_ROW_GROUP, pack
from ..quantization.int8 import is_int8, quantize_int8
from .cpu_forward import CpuForward, pool_texts, try_fast_forward


if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

# Names of the prompts of queries and documents, as in sentence-transformers, the preferred first.
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# Precisions of embeddings, as in sentence-transformers.
Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]

# Number of texts per call of the tokenizer, which bounds the memory of its encodings.
_TOKENIZER_BATCH = 1024


class NotFinite(UserError):
    """Error for an embedding with infinite or NaN values; `index` is the index of its text."""

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
    pooling: str | None = None,
    tokenizer: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> "SentenceTransformer":
    """Load a SentenceTransformer, or build one from an encoder without a pooling module.

    Args:
        model: Directory or Hub name. Weights of task heads are not loaded.
        device: Device of the model.
        dtype: Precision of the weights.
        max_length: Maximum sequence length in tokens; longer texts are truncated. By default the
            limit of the model, and never more than its positions.
        pooling: "mean" or "cls", for an encoder without a pooling module; "mean" by default.
        tokenizer: Directory or Hub name, for an encoder whose directory has no tokenizer. NeoBERT
            falls back to the packaged one.
        attn_implementation: Attention implementation of transformers.
        trust_remote_code: Whether to run the Python code in the repository of the model.

    Raises:
        UserError: If the model does not exist or cannot be read, or if a sentence-transformers
            model has another pooling or another tokenizer than the arguments.
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
            if tokenizer is not None:
                raise UserError(
                    "`tokenizer` cannot replace the tokenizer of a sentence-transformers model, "
                    f"got {tokenizer} for {model}. Omit `--tokenizer`."
                )
            encoder = SentenceTransformer(
                model,
                device=str(device),
                model_kwargs=model_kwargs,
                trust_remote_code=trust_remote_code,
            )
        else:
            # SentenceTransformer(model) would always add mean pooling.
            transformer = modules.Transformer(
                model,
                model_kwargs={**model_kwargs, "trust_remote_code": trust_remote_code},
                config_kwargs={"trust_remote_code": trust_remote_code},
                tokenizer_name_or_path=tokenizer or _packaged_tokenizer(Path(model)),
            )
            hidden_size = transformer.auto_model.config.hidden_size
            encoder = SentenceTransformer(
                modules=[transformer, modules.Pooling(hidden_size, pooling or "mean")],
                device=str(device),
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the model {model} cannot be loaded: {one_line(error)}.") from error

    _check_transformer(encoder)
    auto_model: Any = encoder[0].auto_model
    check_all_weights_stored(model, auto_model)
    model_pooling, _ = _pooling(list(encoder.children()))
    if pooling is not None and pooling != model_pooling:
        raise UserError(
            f"`pooling` must be {model_pooling}, that of the sentence-transformers model {model}, "
            f"got {pooling}."
        )
    # More tokens than the model has positions would fail, or give wrong embeddings.
    limits = [max_length or encoder.max_seq_length, position_limit(auto_model)]
    encoder.max_seq_length = min((limit for limit in limits if limit), default=None)
    return encoder.eval()


def _check_transformer(encoder: "SentenceTransformer") -> None:
    """Raise UserError if the first module of a SentenceTransformer is not a transformer."""
    if not hasattr(encoder[0], "auto_model"):
        raise UserError(f"`model` must start with a transformer, got {type(encoder[0]).__name__}.")


def _load(
    model: str, device: torch.device, dtype: torch.dtype, settings: Mapping[str, Any]
) -> "SentenceTransformer":
    """Load a SentenceTransformer in any precision, including int8.

    In int8, the layers that are not quantized are in bfloat16 on a processor with AMX, and in
    float32 elsewhere. A measurement could differ between the processes of a machine, which must
    compute the same bits.
    """
    if dtype != torch.int8:
        return load_sentence_transformer(model, device, dtype, **settings)
    # Weights are quantized from float32, because bfloat16 would round them twice.
    encoder = load_sentence_transformer(model, device, torch.float32, **settings)
    quantize_int8(encoder)
    return encoder.to(torch.bfloat16) if "AMX-BF16" in processor_units() else encoder


def _dtype(model: Any) -> torch.dtype:
    """Return the precision of a SentenceTransformer whose first module is a transformer."""
    return torch.int8 if is_int8(model) else model[0].auto_model.dtype


def _check_arguments(model: "SentenceTransformer", dtype: str, settings: Mapping[str, Any]) -> None:
    """Raise UserError if an argument of `PackedEncoder` does not apply to a loaded model."""
    # The defaults of these arguments are None and False.
    changes = {
        name: value for name, value in settings.items() if value is not None and value is not False
    }
    if dtype not in ("auto", dtype_name(_dtype(model))):
        changes["dtype"] = dtype
    if changes:
        name, value = next(iter(changes.items()))
        raise UserError(
            f"`{name}` cannot change a SentenceTransformer that is already loaded, got {value!r}. "
            "Set it when you load the SentenceTransformer, or pass the directory of the model."
        )


def _check_settings(dtype: str, settings: Mapping[str, Any]) -> None:
    """Raise UserError if a model cannot be loaded with these arguments of `PackedEncoder`."""
    if dtype not in DTYPES:
        raise UserError(f"`dtype` must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {dtype!r}.")
    # A shorter sequence would contain special tokens only.
    max_length = settings.get("max_length")
    if max_length is not None and max_length < 3:
        raise UserError(f"`max_length` must be at least 3, got {max_length}.")


def _packaged_tokenizer(folder: Path) -> str | None:
    """Return the packaged tokenizer for a NeoBERT directory without one, None in other cases."""
    names = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
    # A model on the Hub has its own tokenizer, and so has a directory with one of these files.
    if not folder.exists() or any((folder / name).is_file() for name in names):
        return None

    from transformers import AutoConfig

    # Ids of the packaged tokenizer, which has 30,522 tokens, are wrong for any other vocabulary.
    config = AutoConfig.from_pretrained(folder)
    if config.model_type != "neobert" or config.vocab_size != 30522 or not TOKENIZER.exists():
        raise UserError(f"{folder} has no tokenizer. Name one with `--tokenizer`.")
    return str(TOKENIZER)


class PackedEncoder:
    """Sentence encoder that runs on batches of at most `batch_tokens` tokens.

    `encode`, `encode_query`, `encode_document` and `similarity` return the embeddings and
    similarities of the methods of `SentenceTransformer`, as NumPy arrays and a tensor. They accept
    the arguments in their signatures only; `batch_tokens` replaces `batch_size`.

    NeoBERT with mean or first-token pooling runs packed: (1, T) tokens with `cu_seq_lens`, pooled
    per text in float32. Any other model or pooling runs through SentenceTransformer's own modules
    on padded batches of texts of similar length; the token budget then includes padding.

    Args:
        model: Directory, Hub name, or SentenceTransformer.
        dtype: "auto", "float32", "float16", "bfloat16" or, for NeoBERT on a CPU, "int8". In int8
            and float32 on a CPU, the embeddings of a NeoBERT that runs packed do not depend on the
            other texts of the batch. A SentenceTransformer keeps its dtype.
        device: Device of the model; by default CUDA if it is available.
        batch_tokens: Maximum number of tokens per batch; by default 65,536 on CUDA, and
            3,072 elsewhere.
        max_length: Maximum sequence length in tokens; longer texts are truncated. By default the
            limit of the model.
        pooling: "mean" or "cls", for an encoder without a pooling module; "mean" by default.
        tokenizer: Directory or Hub name, for an encoder whose directory has no tokenizer.
        attn_implementation: Attention implementation of transformers.
        trust_remote_code: Whether to run the Python code in the repository of the model.

    Raises:
        UserError: If the model cannot be loaded, `batch_tokens` is not positive, or an argument
            does not apply to a SentenceTransformer.

    Attributes:
        sentence_transformer: SentenceTransformer that computes the embeddings.
        device: Device of the model.
        dtype: Precision of the weights.
        batch_tokens: Maximum number of tokens per batch.
        prompts: Prompts of the model that are not empty, {name: text}.
        pooling: Name of the pooling.
        packs: Whether the model runs without padding.
        embedding_dimension: Number of values of an embedding.

    Example:
        >>> from neobert import PackedEncoder
        >>> encoder = PackedEncoder("examples/sentence-encoder", dtype="float32", device="cpu")
        >>> queries = encoder.encode_query(["a bird of prey"])
        >>> documents = encoder.encode_document(["a violin", "an eagle", "a recipe for soup"])
        >>> documents.shape
        (3, 384)
        >>> encoder.similarity(queries, documents).argmax().item()
        1
    """

    def __init__(
        self,
        model: "str | Path | SentenceTransformer",
        dtype: str = "auto",
        device: str | torch.device | None = None,
        batch_tokens: int | None = None,
        *,
        max_length: int | None = None,
        pooling: str | None = None,
        tokenizer: str | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if batch_tokens is not None and batch_tokens < 1:
            raise UserError(f"`batch_tokens` must be at least 1, got {batch_tokens}.")
        self.device = choose_device(device)
        settings = {
            "max_length": max_length,
            "pooling": pooling,
            "tokenizer": tokenizer,
            "attn_implementation": attn_implementation,
            "trust_remote_code": trust_remote_code,
        }
        if isinstance(model, (str, Path)):
            # A missing model is reported before "auto" measures the speed of the dtypes.
            check_model(str(model))
            _check_settings(dtype, settings)
            model = _load(str(model), self.device, choose_dtype(dtype, self.device), settings)
        else:
            _check_transformer(model)
            _check_arguments(model, dtype, settings)
        self.sentence_transformer: Any = model.to(self.device).eval()

        # The first module of a pipeline is the transformer, and the second is usually the pooling.
        modules: list[Any] = list(model.children())
        transformer = modules[0].auto_model
        self.dtype = _dtype(model)
        self.batch_tokens = batch_tokens or default_batch_tokens(self.device)
        self.prompts = {name: text for name, text in (model.prompts or {}).items() if text}

        # Packed batches are pooled by this class, which implements the mean and the first token,
        # both including the prompt. Other poolings run in their own module on padded batches.
        self.pooling, self._pools_prompt = _pooling(modules)
        config = getattr(transformer, "config", None)
        self.packs = (
            getattr(config, "model_type", None) == "neobert"
            and self.pooling in POOLINGS
            and self._pools_prompt
        )
        self._prompt_lengths: dict[str, int] = {}

        # The fast forward pass copies the weights, so later changes of the model have no effect.
        self._forward = self._make_forward()
        self._tokenizer: Any = model.tokenizer
        # Modules after the pooling, such as Dense and Normalize, run on the pooled embeddings.
        self._post_pooling_modules = modules[2:]

        # Modules may change the dimension. Encoding a text is the only reliable way to measure it.
        with torch.inference_mode():
            embed = self._embed_packed if self.packs else self._embed_padded
            dimension = embed(self.tokenize(["A short text."])).shape[1]
        # `truncate_dim` of a sentence-transformers model: only the first values are used.
        truncate_dim = getattr(model, "truncate_dim", None)
        self.embedding_dimension: int = min(dimension, truncate_dim or dimension)

    def _make_forward(self) -> CpuForward | None:
        """Return the fast forward pass of the CPU, or None if it does not support the model."""
        transformer = self.sentence_transformer[0].auto_model
        if not (self.packs and CpuForward.supports(transformer)):
            return None
        with torch.no_grad():
            return CpuForward(transformer)

    # pickle and `copy.deepcopy` cannot copy the weights of the fast forward pass, whose memory
    # layout is that of this processor. The copy prepares its own from the model.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_forward": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forward = self._make_forward()

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, such as "float32"."""
        return dtype_name(self.dtype)

    @property
    def normalizes(self) -> bool:
        """Whether the model normalizes its embeddings to unit length."""
        return any(type(module).__name__ == "Normalize" for module in self._post_pooling_modules)

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length in tokens, None without a limit."""
        return self.sentence_transformer.max_seq_length

    @property
    def default_prompt(self) -> str:
        """Default prompt of the model, "" without one."""
        return self.prompt(self.sentence_transformer.default_prompt_name)

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

    # --------------------------------------------------------------------------------------------
    # texts

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        precision: Precision = "float32",
        show_progress_bar: bool = False,
    ) -> np.ndarray:
        """Return the embeddings of texts, as `SentenceTransformer.encode`.

        Args:
            texts: Texts, or one text.
            prompt_name: Name of the prompt before each text; by default the default prompt of the
                model.
            prompt: Prompt before each text; takes precedence over `prompt_name`.
            normalize_embeddings: Whether to normalize the embeddings to unit length.
            truncate_dim: Number of values to keep of each embedding.
            precision: Precision of the embeddings. The ranges of "int8" and "uint8" are those of
                these texts.
            show_progress_bar: Whether to show a progress bar.

        Returns:
            (N, D) array of N texts, (D,) of one text.

        Raises:
            UserError: If the model has no such prompt, or the embeddings cannot be truncated.
            NotFinite: If a value is too large for the dtype: float16 ends at 65,504.

        Example:
            >>> from neobert import PackedEncoder
            >>> encoder = PackedEncoder("examples/sentence-encoder", dtype="float32", device="cpu")
            >>> encoder.encode("a bird of prey").shape
            (384,)
            >>> encoder.encode(["an eagle", "a violin"], precision="binary").shape
            (2, 48)
        """
        # An empty prompt is a prompt, too: it disables the default prompt of the model.
        if prompt is None:
            name = prompt_name or self.sentence_transformer.default_prompt_name
            prompt = self.prompt(name)
        if truncate_dim is not None and not 1 <= truncate_dim <= self.embedding_dimension:
            raise UserError(
                f"`truncate_dim` must be between 1 and {self.embedding_dimension}, got "
                f"{truncate_dim}."
            )

        batch = [texts] if isinstance(texts, str) else list(texts)
        _check_texts(batch)
        with tqdm(total=len(batch), desc="texts", disable=not show_progress_bar) as bar:
            embeddings = self.embed(self.tokenize(batch, prompt), bar.update, prompt)

        # As in sentence-transformers: truncated first, then normalized, then quantized.
        embeddings = embeddings[:, :truncate_dim]
        if normalize_embeddings:
            embeddings = F.normalize(torch.from_numpy(embeddings), dim=1).numpy()
        if precision != "float32":
            embeddings = quantize_embeddings(embeddings, precision)
        return embeddings[0] if isinstance(texts, str) else embeddings

    def encode_query(
        self,
        texts: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        precision: Precision = "float32",
        show_progress_bar: bool = False,
    ) -> np.ndarray:
        """Return the embeddings of queries: `encode` with the prompt "query" of the model, if any.

        The arguments, the result and the errors are those of `encode`.

        Example:
            >>> from neobert import PackedEncoder
            >>> encoder = PackedEncoder("examples/sentence-encoder", dtype="float32", device="cpu")
            >>> encoder.encode_query("a bird of prey").shape
            (384,)
        """
        if prompt_name is None:
            prompt_name = first_prompt_name(self.sentence_transformer, QUERY_PROMPTS)
        return self.encode(
            texts,
            prompt_name=prompt_name,
            prompt=prompt,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
            precision=precision,
            show_progress_bar=show_progress_bar,
        )

    def encode_document(
        self,
        texts: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        precision: Precision = "float32",
        show_progress_bar: bool = False,
    ) -> np.ndarray:
        """Return the embeddings of documents: `encode` with the document prompt, if any.

        The document prompt is the first of "document", "passage" and "corpus" that the model has.
        The arguments, the result and the errors are those of `encode`.

        Example:
            >>> from neobert import PackedEncoder
            >>> encoder = PackedEncoder("examples/sentence-encoder", dtype="float32", device="cpu")
            >>> encoder.encode_document(["an eagle", "a violin"]).shape
            (2, 384)
        """
        if prompt_name is None:
            prompt_name = first_prompt_name(self.sentence_transformer, DOCUMENT_PROMPTS)
        return self.encode(
            texts,
            prompt_name=prompt_name,
            prompt=prompt,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
            precision=precision,
            show_progress_bar=show_progress_bar,
        )

    def similarity(
        self, embeddings1: np.ndarray | torch.Tensor, embeddings2: np.ndarray | torch.Tensor
    ) -> torch.Tensor:
        """Return the similarities of all pairs of embeddings, by the function of the model.

        Args:
            embeddings1: (N, D) or (D,) embeddings.
            embeddings2: (M, D) or (D,) embeddings.

        Returns:
            (N, M) similarities; cosine similarities unless the model has another function.

        Example:
            >>> from neobert import PackedEncoder
            >>> encoder = PackedEncoder("examples/sentence-encoder", dtype="float32", device="cpu")
            >>> embeddings = encoder.encode(["an eagle", "a bird of prey", "a violin"])
            >>> similarities = encoder.similarity(embeddings, embeddings)
            >>> bool(similarities[0, 1] > similarities[0, 2])
            True
        """
        return self.sentence_transformer.similarity(embeddings1, embeddings2)

    # --------------------------------------------------------------------------------------------
    # tokens

    def tokenize(
        self, texts: Sequence[str], prompt: str = "", lengths: list[int] | None = None
    ) -> list[np.ndarray]:
        """Return the token ids of each text, int32 arrays of at most `max_length` tokens.

        Args:
            texts: Texts.
            prompt: Text before each text.
            lengths: List to which the length of each text before truncation is appended.
        """
        tokens: list[np.ndarray] = []
        for start in range(0, len(texts), _TOKENIZER_BATCH):
            batch = [prompt + text for text in texts[start : start + _TOKENIZER_BATCH]]
            encoding = self._tokenizer(
                batch, truncation=True, max_length=self.max_length, return_attention_mask=False
            )
            # Arrays take a fraction of the memory of lists of Python integers.
            tokens.extend(np.asarray(row, dtype=np.int32) for row in encoding["input_ids"])
            if lengths is not None:
                lengths += self._full_lengths(batch, encoding["input_ids"])
        return tokens

    def _full_lengths(self, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> list[int]:
        """Return the lengths of texts before truncation; `rows` are the truncated token IDs."""
        lengths = [len(row) for row in rows]
        # Only texts of the maximum length can have been truncated. They are tokenized again,
        # because tokenizers 0.23.1 and 0.23.2 return only a part of the truncated tokens.
        longest = [index for index, length in enumerate(lengths) if length == self.max_length]
        if longest:
            encoding = self._tokenizer([texts[index] for index in longest], verbose=False)
            for index, row in zip(longest, encoding["input_ids"]):
                lengths[index] = len(row)
        return lengths

    def batches(self, lengths: Sequence[int] | np.ndarray) -> Iterator[np.ndarray]:
        """Yield index arrays that cover all texts, shortest first.

        Each batch contains at most `batch_tokens` tokens, or one text.

        Args:
            lengths: Sequence length of each text.
        """
        return token_batches(lengths, self.batch_tokens, is_padded=not self.packs)

    @torch.inference_mode()
    def embed(
        self,
        tokens: Sequence[np.ndarray],
        progress: Callable[[int], object] | None = None,
        prompt: str = "",
    ) -> np.ndarray:
        """Return the embeddings of tokenized texts, (N, D) float32, in their order.

        Args:
            tokens: Token ids, N integer arrays.
            progress: Function that is called with the number of texts of each finished batch.
            prompt: Prompt of the texts; some models exclude its tokens from the pooling.

        Raises:
            NotFinite: If a value is too large for the dtype: float16 ends at 65,504.
        """
        output = torch.empty(len(tokens), self.embedding_dimension, device=self.device)
        prompt_length = self.excluded_prompt_length(prompt)

        for index in self.batches(np.array([len(ids) for ids in tokens])):
            batch = [tokens[i] for i in index]
            if self.packs:
                embeddings = self._embed_packed(batch)
            else:
                embeddings = self._embed_padded(batch, prompt_length)

            # The model may return more values than it uses.
            embeddings = embeddings[:, : self.embedding_dimension]
            # Batches are sorted by length. The index restores the order of the texts.
            output[torch.from_numpy(index).to(self.device)] = embeddings.float()
            if progress is not None:
                progress(len(index))

        # A check in every batch would wait for the GPU each time.
        finite = output.isfinite().all(dim=1)
        if not finite.all():
            raise NotFinite(int((~finite).nonzero()[0]), self.dtype_name)
        return output.cpu().numpy()

    def _embed_packed(self, batch: Sequence[np.ndarray]) -> torch.Tensor:
        """Return the embeddings of one packed batch, (N, D)."""
        # The fast pass of the CPU takes precedence over the forward of the model.
        hidden = try_fast_forward(self._forward, batch)
        if hidden is None:
            pooled = self._pool_packed(batch)
        else:
            pooled = pool_texts(hidden, [len(ids) for ids in batch], self.pooling)

        # The modules of sentence-transformers pass a dictionary of features to one another.
        features = {"sentence_embedding": pooled}
        for module in self._post_pooling_modules:
            features = module(features)
        return features["sentence_embedding"]

    def _pool_packed(self, batch: Sequence[np.ndarray]) -> torch.Tensor:
        """Run the model on one packed batch and return the pooled hidden states, (N, D)."""
        total = sum(map(len, batch))
        num_fillers = self._num_filler_tokens(total)
        sequences = list(batch)
        # The filler tokens are a sequence of their own, so no text attends to them.
        if num_fillers:
            sequences.append(np.zeros(num_fillers, np.int32))
        packed = pack(sequences, self.device)
        hidden = self.sentence_transformer[0].auto_model(**packed).last_hidden_state[:, :total]

        # The bounds of the texts do not include that of the filler tokens.
        bounds = packed["cu_seq_lens_q"][: len(batch) + 1]
        if self.pooling == "cls":
            return hidden[0, bounds[:-1].long()]
        return Packing(bounds, max(map(len, batch))).mean_per_sequence(hidden)

    def _num_filler_tokens(self, total: int) -> int:
        """Return the number of unused tokens that follow a batch of `total` tokens on a CPU.

        In float32, they complete a group of `FLOAT32_ROW_GROUP` tokens. oneDNN builds a kernel for
        every number of tokens of a 16-bit matrix product, so large batches have a multiple of 64.
        """
        # int8 layers pad the rows of their products themselves.
        if self.device.type != "cpu" or self.dtype == torch.int8:
            return 0
        if self.dtype == torch.float32:
            step = FLOAT32_ROW_GROUP
        else:
            step = 64 if total >= 1024 else 1
        return -total % step

    def excluded_prompt_length(self, prompt: str) -> int:
        """Return the number of tokens that the pooling excludes from a text with a prompt.

        As in SentenceTransformer, the prompt is tokenized alone, and its last [SEP] is not counted.

        A prompt is tokenized in the first call only. This call must not overlap with another use of
        the tokenizer: a fast tokenizer stores truncation as mutable state.
        """
        if self._pools_prompt or not prompt:
            return 0

        if prompt not in self._prompt_lengths:
            # Some tokenizers end no sequence with a special token.
            ids = self._tokenizer(prompt, truncation=True, max_length=self.max_length)["input_ids"]
            if ids[-1] in self._tokenizer.all_special_ids:
                ids = ids[:-1]
            self._prompt_lengths[prompt] = len(ids)
        return self._prompt_lengths[prompt]

    def _embed_padded(self, batch: Sequence[np.ndarray], prompt_length: int = 0) -> torch.Tensor:
        """Return the embeddings of one padded batch, (N, D)."""
        # `pad` also returns the attention mask, which the modules need.
        padded = self._tokenizer.pad(
            {"input_ids": [ids.tolist() for ids in batch]}, return_tensors="pt"
        )
        features = {name: value.to(self.device) for name, value in padded.items()}
        if prompt_length:
            # A pooling that excludes the prompt reads this value.
            features["prompt_length"] = prompt_length
        return self.sentence_transformer(features)["sentence_embedding"]


def token_batches(
    lengths: Sequence[int] | np.ndarray, batch_tokens: int, is_padded: bool
) -> Iterator[np.ndarray]:
    """Yield index arrays that cover all sequences, shortest first.

    Args:
        lengths: Length of each sequence in tokens.
        batch_tokens: Maximum number of tokens per batch. A longer sequence is a batch of its own.
        is_padded: Whether padding counts toward the number of tokens.
    """
    batch: list[int] = []
    total = 0
    for index in np.argsort(lengths, kind="stable"):
        length = int(lengths[index])
        # Sequences are sorted, so this one would be the longest of a batch that is padded to it.
        cost = (len(batch) + 1) * length if is_padded else total + length
        if batch and cost > batch_tokens:
            yield np.array(batch)
            batch = []
            total = 0
        batch.append(index)
        total += length
    if batch:
        yield np.array(batch)


def _check_texts(texts: Sequence[Any]) -> None:
    """Raise UserError if a text is not a string, or cannot be encoded in UTF-8."""
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(
                f"`texts` must contain strings, got {type(text).__name__} as text {index}."
            )
        # Tokenizers refuse such a text with a message that does not name the reason.
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"`texts` must be valid Unicode, got a lone surrogate in text {index}. Replace it "
                'with `text.encode(errors="replace").decode()`.'
            ) from error


def first_prompt_name(model: "SentenceTransformer", names: Sequence[str]) -> str | None:
    """Return the first of `names` that is a prompt of the model, or None."""
    prompts = model.prompts or {}
    return next((name for name in names if name in prompts), None)


def quantize_embeddings(
    embeddings: np.ndarray, precision: Precision, ranges: np.ndarray | None = None
) -> np.ndarray:
    """Quantize embeddings as sentence-transformers 6 does.

    Version 5 does not clip values outside of the ranges, which then change their sign, and cannot
    pack the bits of a dimension that is not a multiple of 8.

    Args:
        embeddings: (N, D) float32.
        precision: Precision of the result.
        ranges: (2, D) minimum and maximum of each dimension for "int8" and "uint8"; by default
            those of the embeddings. Values outside of the ranges are clipped.

    Returns:
        (N, D) array; (N, ceil(D / 8)) for "binary" and "ubinary".

    Raises:
        UserError: If the precision is unknown, or the ranges would be those of a single embedding.
    """
    if precision not in get_args(Precision):
        raise UserError(
            f"`precision` must be one of {', '.join(get_args(Precision))}, got {precision!r}."
        )
    if precision == "float32":
        return embeddings

    # The sign of each value is one bit.
    if precision in ("binary", "ubinary"):
        bits = np.packbits(embeddings > 0, axis=1)
        return (bits - 128).astype(np.int8) if precision == "binary" else bits

    # An empty array has no ranges.
    if len(embeddings) == 0:
        return np.empty(embeddings.shape, precision)
    if ranges is None:
        if len(embeddings) < 2:
            raise UserError(
                f"the ranges of {precision} must come from at least 2 embeddings, got "
                f"{len(embeddings)}. Encode several texts at once."
            )
        ranges = np.stack([embeddings.min(axis=0), embeddings.max(axis=0)])

    low, high = ranges.astype(np.float32)
    steps = (high - low) / 255
    steps = np.where(steps == 0, 1, steps)
    codes = np.clip(np.floor((embeddings - low) / steps), 0, 255)
    return (codes - 128).astype(np.int8) if precision == "int8" else codes.astype(np.uint8)


def _pooling(modules: Sequence[Any]) -> tuple[str, bool]:
    """Return the name of a pipeline's pooling mode, and whether the pooling includes the prompt.

    A pipeline without a pooling module is named after its modules, which may exclude the prompt.
    """
    from sentence_transformers import models  # type: ignore[attr-defined]

    pooling = modules[1] if len(modules) > 1 else None
    if not isinstance(pooling, models.Pooling):
        return "+".join(type(module).__name__ for module in modules), False
    mode = getattr(pooling, "pooling_mode", None)
    if mode is None:
        # Versions of sentence-transformers before 6 have no such attribute.
        mode = pooling.get_pooling_mode_str()
    # A pooling may concatenate several modes.
    return mode if isinstance(mode, str) else "+".join(mode), pooling.include_prompt
