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
from ..common.errors import UserError, one_line
from .encode_folder import ABOUT, PART, Cut, new_file, part_name, schema_of
from .long_texts import Windows, WindowSettings, tokenize_windows
from .packed_encoder import NotFinite, PackedEncoder


PLACES = ("file", "row", "start", "end")  # columns of windows: which text, characters in it
_CHARACTERS = 32_000_000  # of the texts in memory, where they are longer than usual


class Loaded(NamedTuple):
    """A `PackedEncoder` as the arguments use it: the text of its prompt, and `WindowSettings` where
    texts are not cut."""

    encoder: PackedEncoder
    prompt: str
    windows: WindowSettings | None

    @classmethod
    def of(cls, arguments, dtype, device, encoder=None):
        encoder = encoder or PackedEncoder.from_arguments(arguments, device, dtype)
        if (arguments.max_length or 0) > (encoder.max_length or np.inf):
            raise UserError(
                f"max_length must be at most the {encoder.max_length:,} tokens that the model "
                f"reads, but {arguments.max_length:,} was given"
            )
        prompt, windows = arguments.prompt, None
        if prompt is None:
            prompt = encoder.prompt(arguments.prompt_name)
        if arguments.long_texts == "windows":
            windows = WindowSettings.of(encoder, prompt, arguments.window, arguments.overlap)
        return cls(encoder, prompt, windows)

    def described(self, arguments, settings, digest, columns):
        """What makes the vectors, in JSON types.

        Args:
            settings: that all parts share, and with which a run goes on.
            digest: of the model.
            columns: Arrow schema of the columns to copy.
        """
        encoder, folder = self.encoder, Path(arguments.model)
        config = getattr(encoder.sentence_transformer[0].auto_model, "config", None)
        numbers = pyarrow.float16() if arguments.output_dtype == "float16" else pyarrow.float32()
        fields = list(columns)
        if self.windows is not None:
            kinds = (pyarrow.string(), *[pyarrow.int64()] * 3)
            fields += [pyarrow.field(name, kind) for name, kind in zip(PLACES, kinds)]
        fields.append(pyarrow.field("embedding", pyarrow.list_(numbers, encoder.width)))
        return {
            "model": folder.resolve().name if folder.exists() else arguments.model,
            "revision": None if folder.exists() else getattr(config, "_commit_hash", None),
            "digest": digest,
            "pooling": encoder.pooling,
            "normalized": arguments.normalize or encoder.normalizes,
            "prompt": self.prompt,
            "max_length": encoder.max_length,
            "long_texts": "cut" if self.windows is None else asdict(self.windows),
            "dtype": encoder.dtype_name,
            "output_dtype": arguments.output_dtype,
            "width": encoder.width,
            "version": __version__,
            "settings": settings,
            "schema": base64.b64encode(pyarrow.schema(fields).serialize()).decode(),
        }

    def tokenize(self, texts):
        """(`Windows`, `Cut`) of texts."""
        lengths = []
        if self.windows is None:
            tokens = self.encoder.tokenize(texts, self.prompt, lengths)
            return Windows(tokens), Cut.of(tokens, lengths)
        windows = tokenize_windows(self.encoder, texts, self.prompt, self.windows, lengths)
        return windows, Cut(0, 0, max(lengths, default=0))


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
    """Encodes and writes the wanted parts of `files`. The next block is read and tokenized while
    one is embedded.

    Args:
        loaded: `Loaded`.
        vectors: what makes them, of `Loaded.described`.
        folder: `Folder` of the parts.
        wanted: called with a file and the number of a part of it.
        progress: called with (texts, tokens) that are done.
    """
    schema = schema_of(vectors)
    own = {"embedding", *(PLACES if loaded.windows else ())}
    columns = [arguments.text_column, *(name for name in schema.names if name not in own)]
    columns = list(dict.fromkeys(columns))

    def tokenized():
        for file in files:
            mine = functools.partial(wanted, file)
            for block in read_blocks(file, arguments.rows, mine, columns, arguments.text_column):
                texts = [row[arguments.text_column] for row in block.rows.values()]
                yield block, *loaded.tokenize(texts)

    for (file, part), blocks in itertools.groupby(_ahead(tokenized()), lambda item: item[0][:2]):
        cuts, texts, last = [], 0, False
        with new_file(folder.filesystem, folder.place(part_name(file, part))) as output:
            # Vectors of floats do not compress.
            with pyarrow.parquet.ParquetWriter(
                output, schema, compression="none", use_dictionary=False
            ) as writer:
                for block, windows, cut in blocks:
                    embedded = _embedded(loaded, arguments, block, windows, progress)
                    writer.write_table(_table(schema, block, windows, embedded))
                    cuts.append(cut)
                    texts, last = texts + len(block.rows), block.last
                about = {"file": file.name, "size": file.size, "number": part, "last": last}
                about |= {"texts": texts, "cut": Cut.total(cuts)}
                writer.add_key_value_metadata({ABOUT: json.dumps(vectors), PART: json.dumps(about)})


def _ahead(items):
    """The items of a generator, each made in a thread while the one before it is used."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


def _embedded(loaded, arguments, block, windows, progress):
    """The vectors of a block, (N, width)."""
    done, sequences, tokens = 0, len(windows.tokens), sum(map(len, windows.tokens))

    def report(count):
        nonlocal done
        previous, done = done, done + count
        share = [len(block.rows) * number // sequences for number in (previous, done)]
        progress(share[1] - share[0], 0)

    try:
        vectors = loaded.encoder.embed(windows.tokens, report, loaded.prompt)
    except NotFinite as error:
        place = error.index if windows.rows is None else windows.rows[error.index]
        raise UserError(f"{block.file.url}, row {list(block.rows)[place] + 1:,}: {error}") from None
    if arguments.normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    progress(0, tokens)
    return vectors.astype(arguments.output_dtype, copy=False)


def _table(schema, block, windows, vectors):
    """The rows of a block with their vectors, a table of `schema`; those of windows with their
    places."""
    rows, columns = list(block.rows.values()), {}
    index = None if windows.rows is None else pyarrow.array(windows.rows)
    for field in schema:
        if field.name == "embedding":
            numbers = pyarrow.array(vectors.reshape(-1))
            columns["embedding"] = pyarrow.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])
        elif index is not None and field.name in PLACES:
            numbers = np.array(list(block.rows), dtype=np.int64)[windows.rows]
            names = np.full(len(numbers), block.file.name)
            places = dict(zip(PLACES, (names, numbers, windows.starts, windows.ends)))
            columns[field.name] = pyarrow.array(places[field.name], field.type)
        else:
            column = _copied([row[field.name] for row in rows], field, block.file)
            columns[field.name] = column if index is None else column.take(index)
    return pyarrow.table(columns, schema=schema)


def _copied(values, field, file):
    """An Arrow array of a copied column; what is not text is written as JSON where the column is
    text."""
    if field.type == pyarrow.string():
        values = [
            value if value is None or isinstance(value, str) else json.dumps(value, default=str)
            for value in values
        ]
    try:
        return pyarrow.array(values, field.type)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise UserError(
            f"{file.url}: the column {field.name!r} does not fit those that are there, "
            f"{field.type} ({one_line(error)}); leave it out with --keep"
        ) from error
