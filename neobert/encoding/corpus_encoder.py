"""`CorpusEncoder`: embeddings of texts in the form that the options of `neobert encode` request."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from ..common import __version__
from ..common.data import File, numbered_rows
from ..embeddings.options import check_limit
from ..embeddings.packed_encoder import PackedEncoder
from ..embeddings.windows import Windows, WindowSettings, text_windows
from .columns import WINDOW_COLUMNS
from .manifest import Manifest, Truncation, encode_schema
from .options import EmbeddingOptions, LongTextOptions, ModelOptions


# The ranges of int8 are computed from the embeddings of this many texts. Each text is truncated to
# this many characters.
_RANGE_TEXTS = 1000
_RANGE_CHARACTERS = 10_000
# Types of the values of a stored embedding. Each value of "binary" packs eight dimensions.
_ARROW_TYPES = {
    "float32": pyarrow.float32(),
    "float16": pyarrow.float16(),
    "int8": pyarrow.int8(),
    "binary": pyarrow.int8(),
}


class CorpusEncoder:
    """Encoder with the prompt, the windows and the form of the embeddings from the options.

    Args:
        encoder: Loaded encoder.
        model: Name of the model, and the prompt.
        long_texts: Treatment of long texts.
        embeddings: Form of the embeddings.

    Raises:
        UserError: If the model cannot be used with the options.
    """

    def __init__(
        self,
        encoder: PackedEncoder,
        model: ModelOptions,
        long_texts: LongTextOptions,
        embeddings: EmbeddingOptions,
    ) -> None:
        dimension = embeddings.truncate_dim
        check_limit("truncate_dim", dimension, encoder.embedding_dimension)

        self.encoder = encoder
        self.model = model.model
        self.output_dtype = embeddings.output_dtype
        self.dimension = dimension or encoder.embedding_dimension
        # The leading dimensions of an embedding of unit length have a smaller norm.
        is_shortened = bool(dimension and encoder.normalizes)
        self.normalize = embeddings.normalize or is_shortened

        # An empty `--prompt ""` disables the default prompt of the model.
        default_name = encoder.sentence_transformer.default_prompt_name
        if model.prompt is None:
            self.prompt = encoder.prompt(model.prompt_name or default_name)
        else:
            self.prompt = model.prompt
        # A thread tokenizes texts while the model runs, so the prompt is tokenized before.
        encoder.excluded_prompt_length(self.prompt)

        self.windows: WindowSettings | None = None
        if long_texts.long_texts == "windows":
            self.windows = WindowSettings.from_model(
                encoder.sentence_transformer.tokenizer,
                encoder.max_length,
                self.prompt,
                long_texts.window,
                long_texts.overlap,
            )

    def manifest(
        self,
        settings: Mapping[str, Any],
        digest: str,
        columns: pyarrow.Schema,
        ranges: list[list[float]] | None,
    ) -> Manifest:
        """Return the manifest of a new output.

        Args:
            settings: Options that affect results.
            digest: Digest of the model.
            columns: Columns to copy.
            ranges: Minimum and maximum of each dimension, for int8.
        """
        # The manifest contains no local path: a directory is described by its name and the digest.
        folder = Path(self.model)
        config = getattr(self.encoder.sentence_transformer[0].auto_model, "config", None)

        # The columns of a part: those of the input, those of windows, and the embedding, a list of
        # fixed size. Bits are packed into bytes.
        fields = list(columns)
        if self.windows is not None:
            fields += list(pyarrow.schema(WINDOW_COLUMNS))
        size = -(-self.dimension // 8) if self.output_dtype == "binary" else self.dimension
        embedding_type = pyarrow.list_(_ARROW_TYPES[self.output_dtype], size)
        fields.append(pyarrow.field("embedding", embedding_type))

        return Manifest(
            model=folder.resolve().name if folder.exists() else self.model,
            revision=None if folder.exists() else getattr(config, "_commit_hash", None),
            digest=digest,
            pooling=self.encoder.pooling,
            normalized=self.normalize or self.encoder.normalizes,
            prompt=self.prompt,
            max_length=self.encoder.max_length,
            long_texts="truncate" if self.windows is None else asdict(self.windows),
            dtype=self.encoder.dtype_name,
            output_dtype=self.output_dtype,
            dimension=self.dimension,
            version=__version__,
            settings=dict(settings),
            ranges=ranges,
            schema=encode_schema(pyarrow.schema(fields)),
        )

    def tokenize(self, texts: list[str]) -> tuple[Windows, Truncation]:
        """Return the sequences of texts, and the truncation statistics."""
        # Both tokenizers append the complete lengths of the texts to this list.
        lengths: list[int] = []
        if self.windows is None:
            tokens = self.encoder.tokenize(texts, self.prompt, lengths)
            truncation = Truncation.from_lengths(list(map(len, tokens)), lengths)
            return Windows(tokens, np.arange(len(texts))), truncation

        # `WindowSettings.from_model` refuses models without a maximum length.
        max_length = self.encoder.max_length
        assert max_length is not None
        tokenizer = self.encoder.sentence_transformer.tokenizer
        windows = text_windows(tokenizer, max_length, texts, self.prompt, self.windows, lengths)
        # Windows contain all tokens of a text, so nothing is truncated.
        return windows, Truncation.from_lengths(lengths, lengths)

    def embed(
        self, tokens: Sequence[np.ndarray], progress: Callable[[int], object] | None = None
    ) -> np.ndarray:
        """Return embeddings, (N, dimension) float32; see `PackedEncoder.embed`."""
        embeddings = self.encoder.embed(tokens, progress, self.prompt)[:, : self.dimension]
        # As in torch, the norm has a minimum, so zeros stay zeros.
        if self.normalize:
            norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
            embeddings = embeddings / np.maximum(norms, 1e-12)
        return embeddings

    def ranges(self, files: Sequence[File], text_column: str) -> list[list[float]]:
        """Return the minima and maxima of the dimensions in the first embeddings of a corpus.

        The ranges depend on the first texts only, so all shards compute the same ranges.

        Args:
            files: Input files.
            text_column: Column that contains the texts.
        """
        columns = [text_column]
        rows = (
            row for file in files for _, row in numbered_rows(file, columns, text_columns=columns)
        )
        first = itertools.islice(rows, _RANGE_TEXTS)
        # The first texts may have many windows, of which a limited number is encoded.
        windows, _ = self.tokenize([row[text_column][:_RANGE_CHARACTERS] for row in first])
        embeddings = self.embed(windows.tokens[:_RANGE_TEXTS])
        return [embeddings.min(axis=0).tolist(), embeddings.max(axis=0).tolist()]
