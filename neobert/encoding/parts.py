"""A part of `neobert encode`: a range of the rows of one input file, its texts tokenized, sorted by
length and packed into batches, its vectors written in the order of the rows."""

import base64
import functools
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet

from ..common import __version__
from ..common.data import File, numbered_rows
from ..common.errors import UserError
from .columns import PLACES, column_array
from ..embeddings.packed_encoder import NotFinite, PackedEncoder
from ..embeddings.windows import Windows, WindowSettings, tokenize_windows
from .folder import ABOUT, PART, Cut, new_file, part_name, schema_of


_CHARACTERS = 32_000_000  # of the texts in memory, where they are longer than usual
_FIRST = 1000  # texts of a corpus, and vectors of them, that tell the ranges of int8
_FIRST_CHARACTERS = 10_000  # of each of these texts
_NUMBERS = {
    "float32": pyarrow.float32(),
    "float16": pyarrow.float16(),
    "int8": pyarrow.int8(),
    "binary": pyarrow.int8(),
}


class Loaded(NamedTuple):
    """A `PackedEncoder` as the arguments use it.

    Attributes:
        encoder: `PackedEncoder`.
        prompt: text before each text.
        windows: `WindowSettings` where texts are not cut.
        width: dimensions that are kept.
        normalize: whether the vectors are scaled to length 1 after that.
    """

    encoder: PackedEncoder
    prompt: str
    windows: WindowSettings | None
    width: int
    normalize: bool

    @classmethod
    def of(cls, arguments, dtype, device, encoder=None):
        encoder = encoder or PackedEncoder.from_arguments(arguments, device, dtype)
        for name, most in (("max_length", encoder.max_length), ("truncate_dim", encoder.width)):
            if (value := getattr(arguments, name) or 0) > (most or np.inf):
                raise UserError(
                    f"{name} must be at most the {most:,} of the model, but {value:,} was given"
                )
        prompt, windows = arguments.prompt, None
        if prompt is None:
            prompt = encoder.prompt(arguments.prompt_name)
        if arguments.long_texts == "windows":
            windows = WindowSettings.of(encoder, prompt, arguments.window, arguments.overlap)
        # A part of a vector of length 1 is shorter.
        normalize = arguments.normalize or bool(arguments.truncate_dim and encoder.normalizes)
        return cls(encoder, prompt, windows, arguments.truncate_dim or encoder.width, normalize)

    def described(self, arguments, settings, digest, columns, files):
        """What makes the vectors, in JSON types.

        Args:
            settings: that all parts share, and with which a run goes on.
            digest: of the model.
            columns: Arrow schema of the columns to copy.
            files: of the input, on whose first texts the ranges of int8 are found.
        """
        encoder, folder = self.encoder, Path(arguments.model)
        config = getattr(encoder.sentence_transformer[0].auto_model, "config", None)
        fields, output_dtype = list(columns), arguments.output_dtype
        if self.windows is not None:
            kinds = (pyarrow.string(), *[pyarrow.int64()] * 3)
            fields += [pyarrow.field(name, kind) for name, kind in zip(PLACES, kinds)]
        size = -(-self.width // 8) if output_dtype == "binary" else self.width
        vector = pyarrow.list_(_NUMBERS[output_dtype], size)
        schema = pyarrow.schema([*fields, pyarrow.field("embedding", vector)])
        return {
            "model": folder.resolve().name if folder.exists() else arguments.model,
            "revision": None if folder.exists() else getattr(config, "_commit_hash", None),
            "digest": digest,
            "pooling": encoder.pooling,
            "normalized": self.normalize or encoder.normalizes,
            "prompt": self.prompt,
            "max_length": encoder.max_length,
            "long_texts": "cut" if self.windows is None else asdict(self.windows),
            "dtype": encoder.dtype_name,
            "output_dtype": output_dtype,
            "width": self.width,
            "version": __version__,
            "settings": settings,
            "ranges": self.ranges(files, arguments) if output_dtype == "int8" else None,
            "schema": base64.b64encode(schema.serialize()).decode(),
        }

    def tokenize(self, texts):
        """(`Windows`, `Cut`) of texts."""
        lengths = []
        if self.windows is None:
            tokens = self.encoder.tokenize(texts, self.prompt, lengths)
            return Windows(tokens, np.arange(len(texts))), Cut.of(tokens, lengths)
        windows = tokenize_windows(self.encoder, texts, self.prompt, self.windows, lengths)
        return windows, Cut(0, 0, max(lengths, default=0))

    def embed(self, tokens, progress=None):
        """Vectors, (N, width) float32; see `PackedEncoder.embed`."""
        vectors = self.encoder.embed(tokens, progress, self.prompt)[:, : self.width]
        if self.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def ranges(self, files, arguments):
        """[smallest, largest number of each dimension] in the first vectors of a corpus, for int8.
        They depend on its first texts alone, so that all shards find the same."""
        column = arguments.text_column
        rows = (row for file in files for _, row in numbered_rows(file, [column], [column]))
        texts = [row[column][:_FIRST_CHARACTERS] for row in itertools.islice(rows, _FIRST)]
        windows, _ = self.tokenize(texts)
        vectors = self.embed(windows.tokens[:_FIRST])
        return [vectors.min(axis=0).tolist(), vectors.max(axis=0).tolist()]


class Block(NamedTuple):
    """Rows of a part, all of them where they are not very long.

    Attributes:
        file, part: the input file and the number of the part in it.
        rows: {number in the file: row}.
        last: whether the file ends with them.
    """

    file: File
    part: int
    rows: dict
    last: bool


def read_blocks(file, size, wanted, columns, text_column):
    """Yields the `Block`s of the wanted parts of a file, read once from its beginning. A file
    without rows is one part without rows.

    Args:
        size: most rows of a part.
        wanted: called with the number of a part.
        columns: of a row.
    """
    number, part, rows, characters = -1, 0, {}, 0
    for number, row in numbered_rows(file, columns, [text_column], lambda n: wanted(n // size)):
        if rows and (number // size != part or characters > _CHARACTERS):
            yield Block(file, part, rows, False)
            rows, characters = {}, 0
        part = number // size
        if wanted(part):
            rows[number] = row
            characters += len(row[text_column])
    if rows or (number < 0 and wanted(0)):
        yield Block(file, part, rows, True)


def encode_files(loaded, arguments, vectors, folder, files, wanted, progress):
    """Encodes and writes the wanted parts of `files`, and yields (texts, tokens) of what is done.
    The next block is read and tokenized while one is embedded.

    Args:
        loaded: `Loaded`.
        vectors: what makes them, of `Loaded.described`.
        folder: `Folder` of the parts.
        wanted: called with a file and the number of a part of it.
        progress: called with the number of texts that are done after each batch.
    """
    schema = schema_of(vectors)
    made = {"embedding", *(PLACES if loaded.windows else ())}
    columns = [arguments.text_column, *(name for name in schema.names if name not in made)]
    columns = list(dict.fromkeys(columns))

    def tokenized():
        for file in files:
            mine = functools.partial(wanted, file)
            for block in read_blocks(file, arguments.rows, mine, columns, arguments.text_column):
                texts = [row[arguments.text_column] for row in block.rows.values()]
                yield block, *loaded.tokenize(texts)

    for (file, part), blocks in itertools.groupby(_ahead(tokenized()), lambda item: item[0][:2]):
        cuts, texts = [], 0
        with (
            new_file(folder.filesystem, folder.place(part_name(file, part))) as output,
            # Vectors of floats do not compress.
            pyarrow.parquet.ParquetWriter(
                output, schema, compression="none", use_dictionary=False
            ) as writer,
        ):
            for block, windows, cut in blocks:
                embedded = _embedded(loaded, block, windows, vectors, progress)
                writer.write_table(_table(schema, block, windows, embedded))
                cuts.append(cut)
                texts += len(block.rows)
                yield len(block.rows), sum(map(len, windows.tokens))
            about = {"file": file.name, "size": file.size, "number": part, "last": block.last}
            about |= {"texts": texts, "cut": Cut.total(cuts)}
            writer.add_key_value_metadata({ABOUT: json.dumps(vectors), PART: json.dumps(about)})


def _ahead(items):
    """The items of a generator, each made in a thread while the one before it is used."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


def _embedded(loaded, block, windows, vectors, progress):
    """The vectors of a block as they are written, (N, width), of bits (N, width / 8)."""
    try:
        from sentence_transformers.util.quantization import quantize_embeddings
    except ImportError:  # before sentence-transformers 5.2
        from sentence_transformers.quantization import quantize_embeddings

    # Batches contain vectors, and the progress is that of the texts, which may have several.
    vector_count = text_count = 0

    def advance(count: int) -> None:
        nonlocal vector_count, text_count
        vector_count += count
        before, text_count = text_count, len(block.rows) * vector_count // len(windows.tokens)
        progress(text_count - before)

    try:
        embedded = loaded.embed(windows.tokens, advance)
    except NotFinite as error:
        row = list(block.rows)[windows.rows[error.index]] + 1
        raise UserError(f"{block.file.url}, row {row:,}: {error}") from None
    if vectors["output_dtype"] == "float16":
        return embedded.astype(np.float16)
    ranges = np.array(vectors["ranges"], np.float32) if vectors["ranges"] else None
    return quantize_embeddings(embedded, vectors["output_dtype"], ranges)


def _table(schema, block, windows, vectors):
    """The rows of a block with their vectors, a table of `schema`; those of windows with their
    places."""
    rows, numbers = list(block.rows.values()), pyarrow.array(vectors.reshape(-1))
    columns = {"embedding": pyarrow.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])}
    if windows.starts is not None:
        names = np.full(len(windows.rows), block.file.name)
        places = (names, np.array(list(block.rows))[windows.rows], windows.starts, windows.ends)
        columns |= dict(zip(PLACES, map(pyarrow.array, places)))
    for field in schema:
        if field.name not in columns:
            values = column_array([row[field.name] for row in rows], field, block.file)
            columns[field.name] = values.take(pyarrow.array(windows.rows))
    return pyarrow.table({name: columns[name] for name in schema.names}, schema=schema)
