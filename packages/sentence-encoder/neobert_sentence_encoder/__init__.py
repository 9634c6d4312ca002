"""Sentence embeddings for English on the CPU, with the model in the package.

Examples:
    >>> from neobert_sentence_encoder import encode
    >>> encode(["an eagle", "a violin"]).shape
    (2, 384)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from onnxruntime import InferenceSession
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer

__all__ = ["DIMENSION", "MAX_LENGTH", "MODEL_FOLDER", "encode", "load"]

# Directory of the model in the format of sentence-transformers, with an int8 ONNX graph.
MODEL_FOLDER = Path(__file__).parent / "model"
DIMENSION = 384
# Maximum number of tokens of a text; the rest is ignored.
MAX_LENGTH = 256
# Number of texts per call of the tokenizer, which bounds the memory of its encodings.
_TOKENIZER_BATCH = 1024


def encode(
    sentences: str | Sequence[str], batch_size: int = 32, normalize: bool = True
) -> np.ndarray:
    """Compute the embeddings of texts with ONNX Runtime.

    Args:
        sentences: A text or several texts.
        batch_size: Maximum number of texts that are computed at once.
        normalize: Scale the embeddings to length 1, as the model of `load` does. Otherwise they
            are the means of the last hidden states.

    Returns:
        Embeddings as float32, of shape (len(sentences), 384), or (384,) for one text.

    Raises:
        TypeError: If `sentences` is neither a text nor a sequence of texts.
        ValueError: If a text contains a lone surrogate, or `batch_size` is less than 1.
    """
    if isinstance(sentences, str):
        return encode([sentences], batch_size, normalize)[0]
    if not isinstance(sentences, Iterable):
        raise TypeError(
            f"`sentences` must be a string or a list of strings, got {type(sentences).__name__}."
        )

    texts = list(sentences)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(
                f"`sentences` must contain strings, got {type(text).__name__} as text {index}."
            )
        # The tokenizer refuses such a text with a message that does not name the reason.
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"`sentences` must be valid Unicode, got a lone surrogate in text {index}. Replace "
                'it with `text.encode(errors="replace").decode()`.'
            ) from error
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")

    text_ids = _tokenize(texts)
    embeddings = np.empty((len(texts), DIMENSION), np.float32)

    # Texts of similar length are computed together, so little padding is needed.
    order = sorted(range(len(texts)), key=lambda number: len(text_ids[number]))
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        # The last text of a batch is its longest one.
        length = len(text_ids[numbers[-1]])
        token_ids = np.zeros((len(numbers), length), np.int64)
        mask = np.zeros_like(token_ids)
        for row, number in enumerate(numbers):
            ids = text_ids[number]
            token_ids[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1

        inputs: dict[str, Any] = {"input_ids": token_ids, "attention_mask": mask}
        if normalize:
            (embeddings[numbers],) = _session().run(["sentence_embedding"], inputs)
        else:
            # Padding does not count in the mean.
            (tokens,) = _session().run(["last_hidden_state"], inputs)
            weights = mask[:, :, None].astype(np.float32)
            embeddings[numbers] = (tokens * weights).sum(1) / weights.sum(1)
    return embeddings


def load(device: str = "cpu") -> SentenceTransformer:
    """Load the model with sentence-transformers; it runs the model code in this package.

    Args:
        device: Device of the model.

    Raises:
        ImportError: If sentence-transformers is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            "`load` needs sentence-transformers. Run `pip install "
            "'neobert-sentence-encoder[torch]'`, or use `encode`."
        ) from error

    # The code is a file of this package, so trusting it needs no download.
    return SentenceTransformer(
        str(MODEL_FOLDER), device=device, trust_remote_code=True, local_files_only=True
    )


def _tokenize(texts: list[str]) -> list[np.ndarray]:
    """Return the token ids of each text."""
    token_ids: list[np.ndarray] = []
    for start in range(0, len(texts), _TOKENIZER_BATCH):
        encodings = _tokenizer().encode_batch(texts[start : start + _TOKENIZER_BATCH])
        # An encoding also contains the tokens, their offsets, and the truncated part of the text.
        token_ids.extend(np.array(encoding.ids, np.int32) for encoding in encodings)
    return token_ids


@functools.cache
def _tokenizer() -> Tokenizer:
    """Return the tokenizer, which truncates texts and does not pad them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_LENGTH)
    tokenizer.no_padding()
    return tokenizer


@functools.cache
def _session() -> InferenceSession:
    """Return the session of ONNX Runtime."""
    from onnxruntime import InferenceSession

    graph = MODEL_FOLDER / "model_int8.onnx"
    return InferenceSession(str(graph), providers=["CPUExecutionProvider"])
