"""`CorpusEncoder`: texts to embeddings as the options of `neobert encode` describe them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from ..common import __version__
from ..common.data import File, numbered_rows
from ..common.errors import UserError
from ..embeddings.packed_encoder import PackedEncoder
from ..embeddings.windows import Windows, WindowSettings, tokenize_windows
from .columns import WINDOW_COLUMNS
from .manifest import Manifest, Truncation, encode_schema
from .options import EncodeOptions


# The ranges of int8 are those of the embeddings of the first texts, of which the first characters
# are read.
_RANGE_TEXTS = 1000
_RANGE_CHARACTERS = 10_000
_ARROW_TYPES = {
    "float32": pyarrow.float32(),
    "float16": pyarrow.float16(),
    "int8": pyarrow.int8(),
    "binary": pyarrow.int8(),
}


class CorpusEncoder:
    """Encoder with the prompt, the windows and the form of the embeddings that options describe.

    Args:
        options: Options of the command.
        dtype: Precision of the model.
        device: Device of the model.
        encoder: Loaded encoder; by default that of the options.

    Raises:
        UserError: If the model cannot be used with the options.
    """

    def __init__(
        self,
        options: EncodeOptions,
        dtype: str,
        device: str,
        encoder: PackedEncoder | None = None,
    ) -> None:
        if encoder is None:
            encoder = PackedEncoder(
                options.model.model,
                dtype,
                device,
                options.inference.batch_tokens,
                **options.encoder.settings(),
            )
        dimension = options.embeddings.truncate_dim
        _check_limit("max_length", options.encoder.max_length, encoder.max_length)
        _check_limit("truncate_dim", dimension, encoder.embedding_dimension)

        self.options = options
        self.encoder = encoder
        self.dimension = dimension or encoder.embedding_dimension
        # Leading dimensions of an embedding of unit length are shorter.
        is_shortened = bool(dimension and encoder.normalizes)
        self.normalize = options.embeddings.normalize or is_shortened

        prompt = options.model.prompt
        self.prompt = encoder.prompt(options.model.prompt_name) if prompt is None else prompt

        self.windows: WindowSettings | None = None
        if options.long_texts.long_texts == "windows":
            self.windows = WindowSettings.for_encoder(
                encoder, self.prompt, options.long_texts.window, options.long_texts.overlap
            )

    def manifest(
        self,
        settings: Mapping[str, Any],
        digest: str,
        columns: pyarrow.Schema,
        files: Sequence[File],
    ) -> Manifest:
        """Return the manifest of a new output.

        Args:
            settings: Options that affect results.
            digest: Digest of the model.
            columns: Columns to copy.
            files: Input files; the ranges of int8 are those of their first texts.
        """
        folder = Path(self.options.model.model)
        config = getattr(self.encoder.sentence_transformer[0].auto_model, "config", None)
        output_dtype = self.options.embeddings.output_dtype

        fields = list(columns)
        if self.windows is not None:
            fields += [pyarrow.field(name, kind) for name, kind in WINDOW_COLUMNS.items()]
        size = -(-self.dimension // 8) if output_dtype == "binary" else self.dimension
        fields.append(pyarrow.field("embedding", pyarrow.list_(_ARROW_TYPES[output_dtype], size)))

        return Manifest(
            model=folder.resolve().name if folder.exists() else self.options.model.model,
            revision=None if folder.exists() else getattr(config, "_commit_hash", None),
            digest=digest,
            pooling=self.encoder.pooling,
            normalized=self.normalize or self.encoder.normalizes,
            prompt=self.prompt,
            max_length=self.encoder.max_length,
            long_texts="truncate" if self.windows is None else asdict(self.windows),
            dtype=self.encoder.dtype_name,
            output_dtype=output_dtype,
            dimension=self.dimension,
            version=__version__,
            settings=dict(settings),
            ranges=self.ranges(files) if output_dtype == "int8" else None,
            schema=encode_schema(pyarrow.schema(fields)),
        )

    def tokenize(self, texts: list[str]) -> tuple[Windows, Truncation]:
        """Return the sequences of texts, and how much of the texts was truncated."""
        lengths: list[int] = []
        if self.windows is None:
            tokens = self.encoder.tokenize(texts, self.prompt, lengths)
            truncation = Truncation.from_lengths(list(map(len, tokens)), lengths)
            return Windows(tokens, np.arange(len(texts))), truncation
        windows = tokenize_windows(self.encoder, texts, self.prompt, self.windows, lengths)
        return windows, Truncation.from_lengths(lengths, lengths)

    def embed(
        self, tokens: Sequence[np.ndarray], progress: Callable[[int], object] | None = None
    ) -> np.ndarray:
        """Return embeddings, (N, dimension) float32; see `PackedEncoder.embed`."""
        embeddings = self.encoder.embed(tokens, progress, self.prompt)[:, : self.dimension]
        if self.normalize:
            norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
            embeddings = embeddings / np.maximum(norms, 1e-12)
        return embeddings

    def ranges(self, files: Sequence[File]) -> list[list[float]]:
        """Return the minima and maxima of the dimensions in the first embeddings of a corpus.

        The first texts alone determine them, so all shards compute the same ranges.
        """
        column = self.options.corpus.text_column
        rows = (row for file in files for _, row in numbered_rows(file, [column], [column]))
        first = itertools.islice(rows, _RANGE_TEXTS)
        windows, _ = self.tokenize([row[column][:_RANGE_CHARACTERS] for row in first])
        embeddings = self.embed(windows.tokens[:_RANGE_TEXTS])
        return [embeddings.min(axis=0).tolist(), embeddings.max(axis=0).tolist()]


def _check_limit(name: str, value: int | None, limit: int | None) -> None:
    if value is not None and limit is not None and value > limit:
        raise UserError(
            f"`{name}` must be at most {limit:,}, the value of the model, got {value:,}. Lower "
            f"`--{name.replace('_', '-')}`."
        )
