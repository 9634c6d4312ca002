"""Models of the server: tokenization of requests, and batches without padding."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from sentence_transformers import CrossEncoder
from starlette.exceptions import HTTPException

from ..common.errors import UserError, one_line, require
from ..common.loading import (
    check_all_weights_stored,
    check_model,
    choose_device,
    dtype_name,
    load_tokenizer,
    text_limit,
)
from ..common.packing import FLOAT32_ROW_GROUP, pack
from ..common.task_file import TOKENS, read_task_file
from ..embeddings.cpu_forward import CpuClassifier, try_fast_forward
from ..embeddings.options import check_limit
from ..embeddings.packed_encoder import PackedEncoder
from ..prediction.loading import default_activation, default_length, load_classifier
from ..quantization.int8 import quantize_int8
from .options import MAX_CHARACTERS, MAX_TOTAL_CHARACTERS, ServeOptions


# Text, or token ids.
Item = str | list[int]


def public_name(model: str) -> str:
    """Return the name of a model in the API: the last part of a path, or a name on the Hub."""
    # A link, such as `current`, keeps its name when its target changes.
    return os.path.basename(os.path.abspath(model)) if os.path.exists(model) else model


@dataclass(frozen=True)
class Tokens:
    """Tokens of one text.

    Attributes:
        ids: Token ids, (L,) int32.
        prompt: Prompt at the start of the text, if the pooling excludes its tokens.
    """

    ids: np.ndarray
    prompt: str = ""

    def __len__(self) -> int:
        return len(self.ids)


class Encoder:
    """Sentence encoder of the server.

    Args:
        options: Options of the server.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.packed_encoder = PackedEncoder(
            options.models.model,
            options.models.dtype,
            options.models.device,
            options.requests.batch_tokens,
            **options.encoder.settings(),
        )
        # The encoder silently reduces a length above the limit of the model.
        check_limit("max_length", options.encoder.max_length, self.packed_encoder.max_length)

        self.name = public_name(options.models.model)
        self.dimensions: int = self.packed_encoder.embedding_dimension
        self.max_length = self.packed_encoder.max_length
        transformer = self.packed_encoder.sentence_transformer[0].auto_model
        self.vocabulary_size: int = transformer.get_input_embeddings().num_embeddings
        # Special tokens at the start and the end of a text, [CLS] and [SEP]. Token IDs with these
        # special tokens are those of this model.
        empty = self.packed_encoder.tokenize([""])[0]
        self._ends = (empty[0], empty[-1]) if len(empty) > 1 else None

        self._encoding = _load_encoding(options.requests.tiktoken_encoding)

    def tokenize(
        self, items: Sequence[Item], prompt_name: str | None, truncate: bool
    ) -> list[Tokens]:
        """Return the tokens of texts or token ids.

        Raises:
            HTTPException: If an item cannot be tokenized, or is too long and not truncated.
        """
        try:
            prompt = self.packed_encoder.prompt(prompt_name)
        except UserError as error:
            raise HTTPException(400, str(error)) from error
        # Another thread runs the model, and must not use the tokenizer.
        self.packed_encoder.excluded_prompt_length(prompt)

        # All values by the index of the item, because texts and token IDs are processed separately.
        ids: dict[int, np.ndarray] = {}
        lengths: dict[int, int] = {}
        texts: dict[int, str] = {}
        # Token ids without the special tokens of the model are decoded, and tokenized as text.
        for index, item in enumerate(items):
            if isinstance(item, str):
                texts[index] = item
            elif self._has_special_tokens(item):
                self._check_ids(index, item, prompt)
                ids[index] = np.asarray(self._truncated(item), dtype=np.int32)
                lengths[index] = len(item)
            else:
                texts[index] = self._decode(index, item)
        check_characters(sum(map(len, texts.values())))

        # The tokenizer truncates, and appends the complete lengths to `text_lengths`. They are only
        # requested to refuse long texts, because long texts are tokenized a second time for them.
        text_lengths: list[int] = []
        text_ids = self.packed_encoder.tokenize(
            list(texts.values()), prompt, None if truncate else text_lengths
        )
        ids.update(zip(texts, text_ids))
        if not truncate:
            lengths.update(zip(texts, text_lengths))
            check_lengths([lengths[index] for index in range(len(items))], self.max_length)

        excluded_prompt = "" if self.packed_encoder.packs else prompt
        return [Tokens(ids[index], excluded_prompt) for index in range(len(items))]

    def _truncated(self, ids: list[int]) -> list[int]:
        """Return the first token ids, up to the limit of the model."""
        kept = ids[: self.max_length]
        # A tokenizer that truncates keeps the special token at the end, too.
        if len(kept) < len(ids) and self._ends is not None:
            kept[-1] = ids[-1]
        return kept

    def _has_special_tokens(self, ids: list[int]) -> bool:
        # Without special tokens at both ends, the option alone determines the tokenizer of the IDs.
        if self._ends is None:
            return self._encoding is None
        return (ids[0], ids[-1]) == self._ends

    def _check_ids(self, index: int, ids: list[int], prompt: str) -> None:
        if prompt:
            raise HTTPException(
                400, f"`prompt_name` requires text, got token IDs of this model as text {index}."
            )
        if max(ids) >= self.vocabulary_size:
            raise HTTPException(
                400,
                f"the token IDs of text {index} must be below {self.vocabulary_size}, got "
                f"{max(ids)}. Send IDs of the tokenizer of this model, or text.",
            )

    def _decode(self, index: int, ids: list[int]) -> str:
        """Return the text of token ids of `--tiktoken-encoding`."""
        if self._encoding is None:
            raise HTTPException(
                400,
                f"the token IDs of text {index} must start and end with the special tokens of this "
                "model. Send text instead, or start the server with the --tiktoken-encoding of the "
                "client (LangChain: cl100k_base).",
            )

        try:
            text = self._encoding.decode(ids)
        except (KeyError, OverflowError) as error:
            raise HTTPException(
                400,
                f"the token IDs of text {index} must be of the encoding {self._encoding.name}, got "
                f"{one_line(error)}.",
            ) from error

        # A token ID may stand for a hundred spaces, so a text can be much longer than its IDs.
        if len(text) > MAX_CHARACTERS:
            raise HTTPException(
                400,
                f"text {index} must have at most {MAX_CHARACTERS} characters, got {len(text)}. "
                "Shorten the text.",
            )
        return text

    def embed(self, batch: Sequence[Tokens]) -> list[np.ndarray]:
        """Return the embeddings of tokenized texts, (D,) float32 arrays."""
        embeddings: dict[int, np.ndarray] = {}
        # Requests may have different prompts, and a call of the encoder excludes one prompt.
        for prompt in {tokens.prompt for tokens in batch}:
            indices = [i for i, tokens in enumerate(batch) if tokens.prompt == prompt]
            rows = self.packed_encoder.embed([batch[i].ids for i in indices], prompt=prompt)
            embeddings.update(zip(indices, rows))
        return [embeddings[index] for index in range(len(batch))]

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise HTTPException if the model has fewer dimensions."""
        if dimensions is not None and dimensions > self.dimensions:
            raise HTTPException(
                400, f"`dimensions` must be at most {self.dimensions}, got {dimensions}."
            )

    def truncate_and_normalize(
        self, embeddings: list[np.ndarray], dimensions: int | None, normalize: bool = False
    ) -> list[np.ndarray]:
        """Return the first `dimensions` values of each embedding, normalized again.

        Args:
            embeddings: Embeddings of the model.
            dimensions: Number of values to keep; None for all.
            normalize: Whether to normalize embeddings of a model that does not.
        """
        is_normalized = self.packed_encoder.normalizes
        if dimensions is None and (is_normalized or not normalize):
            # The bits of the model's own normalization are kept.
            return embeddings

        # A truncated embedding has another length than 1.
        embeddings = [embedding[:dimensions] for embedding in embeddings]
        if not (is_normalized or normalize):
            return embeddings
        # An embedding of zeros stays zero.
        min_norm = np.finfo(np.float32).tiny
        return [embedding / max(np.linalg.norm(embedding), min_norm) for embedding in embeddings]


class Classifier:
    """Sequence classifier or reranker, which runs packed.

    Args:
        name: Name of the model in the API.
        model: NeoBERTForSequenceClassification.
        tokenizer: Tokenizer of the model.
        max_length: Maximum number of tokens of a text or pair.
        activation: Function that a CrossEncoder applies to its logits.
        prompt: Prompt that a CrossEncoder adds before the query.
        temperature: Number that the logits of a classifier are divided by for probabilities.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        max_length: int | None,
        activation: Any = None,
        prompt: str = "",
        temperature: float = 1.0,
    ) -> None:
        self.name = name
        self.model = model
        self.max_length = max_length
        self.prompt = prompt
        self.temperature = temperature
        self._tokenizer = tokenizer
        self._activation = activation

        self._forward = CpuClassifier.from_model(model)
        self.labels: list[str] = [model.config.id2label[i] for i in range(model.num_labels)]

    @classmethod
    def load_reranker(cls, folder: str, dtype: torch.dtype, options: ServeOptions) -> "Classifier":
        """Load a CrossEncoder.

        Raises:
            UserError: If it cannot be loaded, or is no NeoBERT with one trained score per pair.
        """
        check_model(folder)
        device = choose_device(options.models.device)
        try:
            encoder = CrossEncoder(
                folder,
                device=str(device),
                model_kwargs={"dtype": _weights_dtype(dtype)},
                trust_remote_code=options.encoder.trust_remote_code,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise _not_loadable(folder, error) from error

        # Only a NeoBERT runs packed, and documents are sorted by a single score.
        if encoder.model.config.model_type != "neobert" or encoder.num_labels != 1:
            raise UserError(
                f"`reranker` must be a NeoBERT CrossEncoder with one score per pair, got {folder}."
            )
        # A CrossEncoder does not return the names of the weights that it initialized randomly.
        check_all_weights_stored(folder, encoder.model)

        # sentence-transformers before 5.4 has no prompts here.
        prompt = ""
        if getattr(encoder, "default_prompt_name", None) is not None:
            prompt = encoder.prompts.get(encoder.default_prompt_name) or ""

        _quantize(encoder.model, dtype)
        return cls(
            public_name(folder),
            encoder.model.eval(),
            encoder.tokenizer,
            # sentence-transformers before 5.4 has no `max_seq_length` here.
            getattr(encoder, "max_seq_length", None)
            or text_limit(encoder.model, encoder.tokenizer),
            activation=encoder.activation_fn,
            prompt=prompt,
        )

    @classmethod
    def load_classifier(
        cls, folder: str, dtype: torch.dtype, options: ServeOptions
    ) -> "Classifier":
        """Load a sequence classifier, with the temperature and the length of `neobert finetune`.

        Raises:
            UserError: If it cannot be loaded, or is no NeoBERT classifier of texts.
        """
        check_model(folder)
        # `neobert finetune` stores the task, the length and the temperature in task.json.
        task = read_task_file(folder)
        if task is not None and task["task"] == TOKENS:
            raise UserError(
                f"`classifier` must predict labels or values of texts, got {folder}, which "
                "predicts labels of words. Use neobert predict."
            )

        model = load_classifier(
            folder,
            task["task"] if task else None,
            dtype_name(dtype),
            choose_device(options.models.device),
            options.encoder.trust_remote_code,
        )
        if model.config.model_type != "neobert":
            raise UserError(f"`classifier` must be a NeoBERT sequence classifier, got {folder}.")

        tokenizer = load_tokenizer(folder, options.encoder.trust_remote_code)
        max_length = default_length(model, tokenizer, task["max_length"] if task else None)
        temperature = task["temperature"] if task else 1.0
        return cls(public_name(folder), model, tokenizer, max_length, temperature=temperature)

    def tokenize(self, texts: Sequence[tuple[str, ...]], truncate: bool) -> list[np.ndarray]:
        """Return the token ids of texts and pairs.

        Args:
            texts: Tuples of one text or two texts.
            truncate: Whether to truncate long texts.

        Raises:
            HTTPException: If a text is too long and `truncate` is False.
        """
        ids: dict[int, list[int]] = {}
        # As in CrossEncoder, the prompt precedes the first text of a pair.
        texts = [(self.prompt + text[0], *text[1:]) for text in texts]
        # The tokenizer takes either texts or pairs in one call.
        for size in {len(text) for text in texts}:
            indices = [index for index, text in enumerate(texts) if len(text) == size]
            columns = zip(*(texts[index] for index in indices))
            rows = self._tokenizer(
                *map(list, columns),
                truncation=truncate,
                max_length=self.max_length if truncate else None,
                verbose=False,
                return_attention_mask=False,
            )
            ids.update(zip(indices, rows["input_ids"]))

        if not truncate:
            check_lengths([len(ids[index]) for index in range(len(texts))], self.max_length)
        return [np.asarray(ids[index], dtype=np.int32) for index in range(len(texts))]

    @torch.inference_mode()
    def logits(self, batch: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the logits of tokenized texts, (C,) float32 arrays."""
        logits = try_fast_forward(self._forward, batch)
        # The model itself runs on a GPU, and if the fast forward pass does not support it.
        if logits is None:
            packed = pack([*batch, *self._fillers(batch)], self.model.device)
            logits = self.model(**packed).logits[: len(batch)]

        logits = logits.float()
        if not logits.isfinite().all():
            raise UserError(
                f"the logits must be finite, got infinite or NaN values in "
                f"{dtype_name(self.model.dtype)}. Use `--dtype float32`, unless the weights are "
                "damaged."
            )
        return list(logits.cpu().numpy())

    def _fillers(self, batch: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return unused sequences after a batch on the CPU.

        They complete a group of `FLOAT32_ROW_GROUP` tokens for the encoder, and one of texts for
        the head. For example, 3 texts of 20 tokens each have 12 fillers of 1 token and one of 8, so
        that there are 16 texts and 80 tokens.
        """
        if self.model.device.type != "cpu":
            return []
        # Fillers of one token complete the texts. If the texts are complete, but the tokens are
        # not, the fillers are a group of texts of their own.
        num_tokens = sum(map(len, batch))
        num_fillers = -len(batch) % FLOAT32_ROW_GROUP
        if num_fillers == 0 and num_tokens % FLOAT32_ROW_GROUP:
            num_fillers = FLOAT32_ROW_GROUP
        fillers = [np.zeros(1, np.int32) for _ in range(num_fillers)]
        # The last filler is longer, to complete the tokens.
        if fillers:
            missing_tokens = -(num_tokens + num_fillers) % FLOAT32_ROW_GROUP
            fillers[-1] = np.zeros(1 + missing_tokens, np.int32)
        return fillers

    def scores(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        """Return the scores of a reranker as its CrossEncoder does, (N,)."""
        return self._activation(torch.from_numpy(np.stack(logits)))[:, 0].numpy()

    def probabilities(
        self, logits: Sequence[np.ndarray], function: str | None = None
    ) -> np.ndarray:
        """Return the calibrated probabilities of the labels, (N, C); the values of a regression.

        Args:
            logits: Logits of the model.
            function: "none", "sigmoid" or "softmax"; by default that of the model's task.
        """
        values = torch.from_numpy(np.stack(logits))
        function = function or default_activation(self.model.config)
        if function == "sigmoid":
            values = (values / self.temperature).sigmoid()
        elif function == "softmax":
            values = (values / self.temperature).softmax(dim=1)
        return values.numpy()


def check_characters(count: int) -> None:
    """Raise HTTPException if the texts of a request have too many characters to be tokenized."""
    # The queue counts tokens, so this size is checked before the texts are tokenized.
    if count > MAX_TOTAL_CHARACTERS:
        raise HTTPException(
            413,
            f"the texts of a request must have at most {MAX_TOTAL_CHARACTERS} characters in total, "
            f"got {count}. Send fewer or shorter texts per request.",
        )


def check_lengths(lengths: Sequence[int], limit: int | None) -> None:
    """Raise HTTPException if a text has more tokens than the limit of the model."""
    for index, length in enumerate(lengths):
        if limit is not None and length > limit:
            raise HTTPException(
                400,
                f"text {index} must have at most {limit} tokens, got {length}. Shorten the text, "
                "or start the server with --truncate.",
            )


def _load_encoding(name: str | None) -> Any:
    """Load an encoding of tiktoken, which downloads its file once.

    Raises:
        UserError: If there is no such encoding, or its file cannot be downloaded.
    """
    if name is None:
        return None
    require("serve", "tiktoken")
    import tiktoken

    try:
        return tiktoken.get_encoding(name)
    except (ValueError, OSError) as error:
        raise UserError(
            f"`tiktoken_encoding` must be an encoding that tiktoken can load, got {name!r}: "
            f"{one_line(error)}. TIKTOKEN_CACHE_DIR names a directory with its files."
        ) from error


def _weights_dtype(dtype: torch.dtype) -> torch.dtype:
    # int8 layers are computed from float32 weights after loading.
    return torch.float32 if dtype == torch.int8 else dtype


def _quantize(model: Any, dtype: torch.dtype) -> None:
    if dtype == torch.int8:
        quantize_int8(model)


def _not_loadable(folder: str, error: Exception) -> UserError:
    return UserError(f"the model {folder} cannot be loaded: {one_line(error)}.")
