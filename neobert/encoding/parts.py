"""Parts of an output of `neobert encode`.

A part contains the embeddings of a range of rows of one input file. The texts are tokenized, sorted
by length and packed into batches. The embeddings are written in the order of the rows.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow
import pyarrow.parquet

from ..common.data import File, numbered_rows
from ..common.errors import UserError
from ..embeddings.packed_encoder import NotFinite, quantize_embeddings
from ..embeddings.windows import Windows
from .columns import WINDOW_COLUMNS, column_array
from .corpus_encoder import CorpusEncoder
from .folder import MANIFEST_KEY, PART_KEY, Folder, create_file_once, part_name
from .manifest import Manifest, Truncation
from .options import CorpusOptions


# Maximum number of characters of a block, which bounds the memory if texts are very long. The last
# text of a block may exceed it.
_BLOCK_CHARACTERS = 32_000_000
# Approximate number of bytes of the copied columns that are written together.
_TABLE_BYTES = 64_000_000
# What a user can do if a column cannot be copied.
_COPY_AS_TEXT = "Use --keep {}:text and another output to copy the column as text."
_OMIT_COLUMN = "Omit {} from --keep, and use another output."

T = TypeVar("T")


class Block(NamedTuple):
    """Rows of a part that are encoded together: all of them, unless the texts are very long.

    Attributes:
        file: Input file.
        part: Index of the part in the file.
        rows: Rows, {index in the file: row}.
        last: Whether the block is the last one of the file.
    """

    file: File
    part: int
    rows: dict[int, dict[str, Any]]
    last: bool


def read_blocks(
    file: File,
    size: int,
    is_wanted: Callable[[int], bool],
    columns: Sequence[str],
    text_column: str,
) -> Iterator[Block]:
    """Yield the blocks of the selected parts of a file, which is read once from its beginning.

    A file without rows has one part without rows.

    Args:
        file: Input file.
        size: Maximum number of rows of a part.
        is_wanted: Function that returns whether the part with an index is selected.
        columns: Columns of a row.
        text_column: Column that contains the text.
    """
    # After the loop, -1 identifies a file without rows.
    number = -1
    part = 0
    rows: dict[int, dict[str, Any]] = {}
    characters = 0
    numbered = numbered_rows(
        file,
        columns,
        text_columns=[text_column],
        is_wanted=lambda number: is_wanted(number // size),
    )
    for number, row in numbered:
        # The first row of the next part, or a row after many characters, completes a block. Only
        # this loop shows whether another row follows, so a block is yielded one row later.
        if rows and (number // size != part or characters > _BLOCK_CHARACTERS):
            yield Block(file, part, rows, False)
            rows = {}
            characters = 0

        # Rows of other parts are None, because they are not decoded. The reader may still decode
        # some of them.
        part = number // size
        if row is not None and is_wanted(part):
            rows[number] = row
            characters += len(row[text_column])

    # The last block may be empty if the file has no rows.
    if rows or (number < 0 and is_wanted(0)):
        yield Block(file, part, rows, True)


def encode_files(
    encoder: CorpusEncoder,
    manifest: Manifest,
    folder: Folder,
    files: Iterable[File],
    corpus: CorpusOptions,
    is_wanted: Callable[[File, int], bool],
    progress: Callable[[int], object],
) -> Iterator[tuple[int, int]]:
    """Encode the selected parts of files, write them, and yield (texts, tokens) after each block.

    A block is encoded while a thread reads and tokenizes the next block.

    Args:
        encoder: Encoder of the corpus.
        manifest: Manifest of the output.
        folder: Directory of the parts.
        files: Input files.
        corpus: Text column and number of rows of a part.
        is_wanted: Function that returns whether the part of a file with an index is selected.
        progress: Function that is called with the number of finished texts after each batch.
    """
    # All parts have the schema of the manifest, which the first process has written. Columns that
    # the encoder does not compute are read from the input.
    schema = manifest.arrow_schema
    new_columns = {"embedding", *(WINDOW_COLUMNS if encoder.windows else ())}
    copied = [name for name in schema.names if name not in new_columns]
    columns = list(dict.fromkeys([corpus.text_column, *copied]))

    def tokenized() -> Iterator[tuple[Block, Windows, Truncation]]:
        for file in files:
            wanted = functools.partial(is_wanted, file)
            for block in read_blocks(file, corpus.rows, wanted, columns, corpus.text_column):
                texts = [row[corpus.text_column] for row in block.rows.values()]
                yield block, *encoder.tokenize(texts)

    def part_of(item: tuple[Block, Windows, Truncation]) -> tuple[File, int]:
        block, _, _ = item
        return block.file, block.part

    # The blocks of a part follow one another.
    for (file, number), blocks in itertools.groupby(_ahead(tokenized()), part_of):
        truncation = Truncation()
        texts = 0
        with (
            create_file_once(folder.filesystem, folder.path_of(part_name(file, number))) as output,
            # Embeddings in floating point do not compress.
            pyarrow.parquet.ParquetWriter(
                output, schema, compression="none", use_dictionary=False
            ) as writer,
        ):
            for block, windows, block_truncation in blocks:
                embeddings = _embed(encoder, block, windows, manifest, progress)
                for table in _tables(schema, block, windows, embeddings):
                    writer.write_table(table)
                truncation += block_truncation
                texts += len(block.rows)
                yield len(block.rows), sum(map(len, windows.tokens))

            # The statistics are known only now, so they are written to the end of the file.
            part = {
                "file": file.name,
                "size": file.size,
                "number": number,
                "last": block.last,
                "texts": texts,
                "truncation": asdict(truncation),
            }
            writer.add_key_value_metadata(
                {MANIFEST_KEY: manifest.to_json(), PART_KEY: json.dumps(part)}
            )


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items of an iterator while a thread computes the next item.

    None ends the iteration, so it must not be among the items.
    """
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


def _embed(
    encoder: CorpusEncoder,
    block: Block,
    windows: Windows,
    manifest: Manifest,
    progress: Callable[[int], object],
) -> np.ndarray:
    """Return the embeddings of a block in their stored form.

    Returns:
        (N, dimension) array in the precision of the output. In "binary" precision, a value of the
        (N, ceil(dimension / 8)) array contains the bits of eight dimensions.

    Raises:
        UserError: If an embedding is not finite, or too large for float16.
    """
    # The encoder reports finished windows, of which a text may have several, and the progress bar
    # counts texts. The number of finished texts is estimated from the fraction of finished windows.
    embedding_count = 0
    text_count = 0

    def advance(count: int) -> None:
        nonlocal embedding_count, text_count
        embedding_count += count
        before = text_count
        text_count = len(block.rows) * embedding_count // len(windows.tokens)
        progress(text_count - before)

    def row_error(index: Any, message: str) -> UserError:
        # The message names the row of the input, counted from 1.
        row = list(block.rows)[windows.rows[index]] + 1
        return UserError(f"{block.file.url}, row {row:,}: {message}")

    try:
        embeddings = encoder.embed(windows.tokens, advance)
    except NotFinite as error:
        raise row_error(error.index, str(error)) from None

    if manifest.output_dtype == "float16":
        with np.errstate(over="ignore"):
            stored = embeddings.astype(np.float16)
        infinite = np.flatnonzero(np.isinf(stored).any(axis=1))
        if len(infinite):
            raise row_error(
                infinite[0],
                "the values of an embedding must be at most 65,504 in float16, got larger ones. "
                "Use `--output-dtype float32` or `--normalize`, and another output.",
            )
        return stored

    # Ranges of the manifest are those of the whole output.
    ranges = np.array(manifest.ranges, np.float32) if manifest.ranges else None
    precision: Any = manifest.output_dtype
    return quantize_embeddings(embeddings, precision, ranges)


def _tables(
    schema: pyarrow.Schema, block: Block, windows: Windows, embeddings: np.ndarray
) -> Iterator[pyarrow.Table]:
    """Yield the tables of a block: copied columns, positions of windows, and embeddings."""
    # A list of fixed size is a view of the flat values.
    flat = pyarrow.array(embeddings.reshape(-1))
    columns: dict[str, Any] = {
        "embedding": pyarrow.FixedSizeListArray.from_arrays(flat, embeddings.shape[1])
    }
    if windows.starts is not None:
        columns["file"] = pyarrow.array([block.file.name] * len(windows.rows), pyarrow.string())
        columns["row"] = pyarrow.array(np.array(list(block.rows))[windows.rows])
        columns["start"] = pyarrow.array(windows.starts)
        columns["end"] = pyarrow.array(windows.ends)

    rows: list[Mapping[str, Any]] = list(block.rows.values())
    copied: dict[str, pyarrow.Array] = {}
    for field in schema:
        if field.name not in columns:
            is_text = field.type == pyarrow.string()
            remedy = (_OMIT_COLUMN if is_text else _COPY_AS_TEXT).format(field.name)
            values = [row[field.name] for row in rows]
            copied[field.name] = column_array(values, field, block.file, remedy)

    # A text with several windows repeats the values of its copied columns, which may be long texts.
    bytes_per_row = sum(array.nbytes for array in copied.values()) / max(1, len(rows))
    step = max(1, int(_TABLE_BYTES / max(1, bytes_per_row)))
    for start in range(0, max(1, len(windows.rows)), step):
        part = slice(start, start + step)
        indices = pyarrow.array(windows.rows[part])
        arrays = {name: array[part] for name, array in columns.items()}
        arrays |= {name: array.take(indices) for name, array in copied.items()}
        yield pyarrow.table({name: arrays[name] for name in schema.names}, schema=schema)
