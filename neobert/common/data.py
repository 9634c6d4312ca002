"""The one reader of rows: jsonl, csv, tsv, parquet or txt in a file, a folder, a glob or a URL, in
constant memory.

    for row in rows("s3://bucket/pairs/*.jsonl.gz", ["anchor", "positive"]):
        ...

A jsonl file has one JSON object a line, a csv or tsv file the names of its columns in the first
line, a txt file one text a line, in the column "text". Blank lines are no rows. All but parquet may
be compressed (.gz, .bz2, .xz, .zst). URLs are those of fsspec: s3:// needs s3fs, gs:// gcsfs, hf://
nothing more. Nothing is kept between two readings, so that a changed file is never read as it was.
"""

import csv
import hashlib
import io
import itertools
import json
import os
import re
from pathlib import PurePosixPath
from typing import NamedTuple

import fsspec
import pyarrow
import pyarrow.parquet

from .errors import UserError, listed, one_line, shortened


FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


class File(NamedTuple):
    """A file of rows.

    Attributes:
        url: its path or URL.
        name: its path below the source that it was found in.
        size: bytes.
    """

    url: str
    name: str
    size: int

    @property
    def format(self):
        return file_format(self.name)


def file_format(name):
    """The format of a file by its name, one of FORMATS, or None: `a.jsonl.gz` is ".jsonl"."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def files(source):
    """The `File`s of a source in the order of their names: a file itself, those below a folder, or
    those that a glob matches. Names that begin with "." or "_" are passed over.

    Raises:
        UserError: there are none, they have several formats, or the place cannot be read.
    """
    source = str(source).rstrip("/")
    is_stored = os.path.isfile(source) or os.path.isdir(source)
    if source in ("-", "/dev/stdin") or (os.path.exists(source) and not is_stored):
        raise UserError(
            f"the source must be a file, a folder, a glob or a URL, got the stream {source}. Write "
            "its content to a file first: streams can be read only once."
        )
    try:
        filesystem, path = fsspec.url_to_fs(source)
        filesystem.invalidate_cache()
        base = source
        if filesystem.isfile(path):
            base, infos = source.rpartition("/")[0], {path: filesystem.info(path)}
            path = path.rpartition("/")[0]
        elif "*" in source or "?" in source or "[" in source:
            base, path = (re.split(r"[*?[]", text)[0].rpartition("/")[0] for text in (source, path))
            infos = filesystem.glob(filesystem._strip_protocol(source), detail=True)
        else:
            infos = filesystem.find(path, detail=True)
    except Exception as error:  # each file system has its own
        raise UserError(f"{source} cannot be read ({one_line(error)})") from error
    matches = []
    for place, info in sorted(infos.items()):
        name = place[len(path) :].lstrip("/")
        hidden = any(part.startswith((".", "_")) for part in name.split("/"))
        if hidden or not file_format(name):
            continue
        if info["type"] == "file" or filesystem.isfile(place):  # of a link
            url = f"{base}/{name}" if base or source.startswith("/") else name
            matches.append(File(url, name, info["size"]))
    kinds = {file.format for file in matches}
    if not matches:
        raise UserError(f"there is no file of rows at {source} ({', '.join(FORMATS)})")
    if len(kinds) > 1:
        names = listed([file.name for file in matches], 5)
        raise UserError(
            f"{source} has files of several formats ({listed(sorted(kinds))}): {names}; give those "
            "of one, with a glob"
        )
    return matches


def rows(source, columns=None, texts=()):
    """Yields the rows of all files of a source, dicts, in their order.

    Args:
        columns: those that every row must have and that it is cut to; by default all.
        texts: those of them that must hold text.
    Raises:
        UserError: of `files`; a file that is broken or lacks a column, by its name and its row.
    """
    for file in files(source):
        for _, row in numbered_rows(file, columns, texts):
            yield row


def numbered_rows(file, columns=None, texts=(), wanted=None):
    """Yields (number from 0, row) of one `File`; see `rows`.

    Args:
        wanted: called with the number of a row; where it is false, None may stand in place of the
            row, which is then not decoded.
    """
    read = _parquet_rows if file.format == ".parquet" else _text_rows
    parse = _PARSERS.get(file.format, lambda row: row)
    number = -1
    try:
        for number, raw in enumerate(read(file, columns, wanted)):
            if wanted is None or wanted(number):
                try:
                    row = _checked(parse(raw), columns, texts)
                except ValueError as error:
                    reason = one_line(getattr(error, "msg", error))
                    raise UserError(f"{file.url}, row {number + 1:,}: {reason}") from error
                yield number, row
            else:
                yield number, None
    except UserError:
        raise
    except Exception as error:  # of the file system, the compression, the format
        where = f"after row {number + 1:,}: " if number >= 0 else ""
        raise UserError(f"{file.url} cannot be read ({where}{one_line(error)})") from error


def schema(file):
    """The Arrow schema of a `File`: its own where it is parquet, else the columns of the first row,
    as text."""
    if file.format == ".parquet":
        with _parquet(file) as table:
            return table.schema_arrow
    _, row = next(numbered_rows(file), (0, {}))
    return pyarrow.schema([(name, pyarrow.string()) for name in row])


def is_empty(file: File) -> bool:
    """Return whether a `File` has no rows."""
    if file.format == ".parquet":
        return count_rows(file) == 0
    return next(numbered_rows(file), None) is None


def count_rows(file):
    """Number of the rows of a `File`."""
    if file.format == ".parquet":
        with _parquet(file) as table:
            return table.metadata.num_rows
    return sum(1 for _ in numbered_rows(file, wanted=lambda number: False))


def _checked(row, columns, texts):
    if not isinstance(row, dict):
        raise ValueError("a row must be an object {...}, one a line")
    if None in row:  # of a table
        raise ValueError("it has more columns than the first line; a separator in a text?")
    if missing := [name for name in (texts if columns is None else columns) if name not in row]:
        has = listed(map(str, row)) or "nothing"
        raise ValueError(f"there is no column {missing[0]!r}; there is: {has}")
    for name in texts:
        if not isinstance(row[name], str):
            value = shortened(json.dumps(row[name], default=str), 60)
            raise ValueError(f"{name!r} must be text, but is {value}")
    return row if columns is None else {name: row[name] for name in columns}


_PARSERS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), json.loads),
    ".txt": lambda line: {"text": line.rstrip("\r\n")},
}


def _text_rows(file, columns, wanted):
    """Lines that are not blank, or the rows of a table."""
    with fsspec.open(file.url, "rb", compression="infer") as binary:
        table = file.format in (".csv", ".tsv")
        with io.TextIOWrapper(binary, "utf-8-sig", newline="" if table else "\n") as lines:
            if not table:
                yield from (line for line in lines if not line.isspace())
                return
            csv.field_size_limit(2**30)
            if file.format == ".csv":
                yield from csv.DictReader(lines, strict=True)
            else:  # where a quote is a character as any other
                yield from csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)


def _parquet(file):
    filesystem, path = fsspec.url_to_fs(file.url)
    return pyarrow.parquet.ParquetFile(path, filesystem=filesystem)


def _parquet_rows(file, columns, wanted):
    """Rows; of a row group in which none is wanted, None in place of each."""
    with _parquet(file) as table:
        # One that is not there is named by the check of the rows.
        known = columns if {*(columns or ())} <= {*table.schema_arrow.names} else None
        start = 0
        for group in range(table.num_row_groups):
            stop = start + table.metadata.row_group(group).num_rows
            if wanted is None or any(map(wanted, range(start, stop))):
                for batch in table.iter_batches(1024, row_groups=[group], columns=known):
                    yield from batch.to_pylist()
            else:
                yield from itertools.repeat(None, stop - start)
            start = stop


# ------------------------------------------------------------------------------------------------
# which rows are kept out of training


def fraction(key):
    """A number from 0 to 1 that is a fixed function of a text, the same on every machine."""
    digest = hashlib.sha1(key.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_held_out(key, percent):
    """Whether a row belongs to the held-out part of `percent`, by the SHA-1 of its key: the same
    whatever the order."""
    return fraction(key) < percent / 100
