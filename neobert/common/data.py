"""Reader of rows: jsonl, csv, tsv, parquet or txt in a file, a folder, a glob or a URL.

    for row in rows("s3://bucket/pairs/*.jsonl.gz", ["anchor", "positive"]):
        ...

A jsonl file contains one JSON object per line, a csv or tsv file the names of its columns in the
first line, and a txt file one text per line, which becomes the column "text". Blank lines are
skipped. All formats but parquet may be compressed (.gz, .bz2, .xz, .zst). URLs are those of fsspec:
s3:// requires s3fs, gs:// gcsfs, and hf:// nothing more.

Memory use is constant. Nothing is cached, so changes to a file are always seen.
"""

import contextlib
import csv
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, overload

import fsspec
import pyarrow
import pyarrow.parquet
from fsspec.utils import glob_translate

from .errors import UserError, listed, one_line, shortened


FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
# Formats in which each row has its own columns.
JSON_FORMATS = (".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# JSON files that the method `save_to_disk` of `datasets` writes beside Arrow files, one of them for
# every dataset. They contain no rows.
SAVED_DATASET_FILES = ("dataset_info.json", "dataset_dict.json")
_SURROGATE = re.compile("[\ud800-\udfff]")
# A quoted cell of a csv file that contains a quote, up to its end or that of its first line.
_QUOTED_CELL = re.compile('"[^"]*""([^"]|"")*"?')
_NOT_AN_OBJECT = (
    "a row must be an object {...} on a line of its own. Convert a JSON array with `jq -c '.[]'`"
)


# ------------------------------------------------------------------------------------------------
# files


class File(NamedTuple):
    """A file of rows.

    Attributes:
        url: Path or URL.
        name: Path relative to the source that contains the file.
        size: Size in bytes.
    """

    url: str
    name: str
    size: int

    @property
    def format(self) -> str | None:
        """Format of the file, one of FORMATS."""
        return file_format(self.name)


def file_format(name: str) -> str | None:
    """Return the format of a file, one of FORMATS, or None: `a.jsonl.gz` is ".jsonl"."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def files(source: str | Path) -> list[File]:
    """Return the files of a source, sorted by name.

    Files and folders whose name begins with "." or "_" are ignored.

    Args:
        source: A file, a folder with files at any depth, or a glob.

    Raises:
        UserError: If there are no files, the files have several formats, or the source cannot be
            read.
    """
    source = with_slashes(str(source)).rstrip("/")
    # A pipe exists and is neither a file nor a directory. A glob or a URL does not exist.
    is_stored = os.path.isfile(source) or os.path.isdir(source)
    if source in ("-", "/dev/stdin") or (os.path.exists(source) and not is_stored):
        raise UserError(
            f"the source must be a file, a folder, a glob or a URL, got the stream {source}. Write "
            "its content to a file first: streams can be read only once."
        )
    # Each file system of fsspec raises its own exceptions.
    try:
        matches = _find_files(source)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source} cannot be read ({one_line(error)}).") from error

    if not matches:
        raise UserError(
            f"there is no file of rows at {source}. Supported formats: {', '.join(FORMATS)}."
        )
    formats = {file.format for file in matches}
    if len(formats) > 1:
        names = listed([file.name for file in matches], 5)
        raise UserError(
            f"{source} contains files of several formats ({listed(sorted(map(str, formats)))}): "
            f"{names}. Select the files of one format with a glob."
        )
    if any(PurePosixPath(file.name).name in SAVED_DATASET_FILES for file in matches):
        raise UserError(
            f"{source} is a dataset that `save_to_disk` has written. Its Arrow files are not read: "
            "write its rows with `to_parquet` first."
        )
    return matches


def _find_files(source: str) -> list[File]:
    """Return the files of a source with a known format, sorted by name."""
    filesystem, path = fsspec.url_to_fs(source)
    # fsspec caches listings of directories: files that were added since would be missing.
    filesystem.invalidate_cache()

    # `base` is the folder of the source as the user wrote it, and `path` the same folder in the
    # notation of the file system, which has no protocol such as s3://.
    base = source
    is_named = filesystem.isfile(path)
    if is_named:
        infos = {path: filesystem.info(path)}
        base = source.rpartition("/")[0]
        path = path.rpartition("/")[0]
    elif is_glob(source):
        infos = filesystem.glob(filesystem._strip_protocol(source), detail=True)
        base = _before_wildcards(source)
        path = _before_wildcards(path)
    else:
        infos = filesystem.find(path, detail=True)

    matches = []
    for full_path, info in sorted(infos.items()):
        name = full_path[len(path) :].lstrip("/")
        # Hidden files of a directory are skipped, but a file that the user names is not.
        if _is_hidden(name) and not is_named:
            continue
        # fsspec does not follow links to directories, whose files would be missing silently. The
        # type of a link is "link" or "other", depending on the version. A pattern without ** does
        # not search directories.
        is_searched = not is_glob(source) or "**" in source
        is_link = info["type"] not in ("file", "directory")
        if is_searched and is_link and filesystem.isdir(full_path):
            raise UserError(
                f"{full_path} is a link to a directory, which is not followed. Replace the link by "
                "the directory."
            )
        if not file_format(name):
            continue
        # A link may point to a file.
        if info["type"] == "file" or filesystem.isfile(full_path):
            url = f"{base}/{name}" if base or source.startswith("/") else name
            matches.append(File(url, name, info["size"]))
    return matches


def with_slashes(path: str, separator: str = os.sep) -> str:
    """Return a path with slashes, as fsspec writes it, also where the separator is a backslash.

    Args:
        path: Path or URL. URLs are not changed.
        separator: Separator of paths of the operating system.
    """
    return path if "://" in path else path.replace(separator, "/")


def check_not_matched(source: str, *outputs: str) -> None:
    """Check that a source is no glob that matches files of an output.

    The next run would read such files as input.

    Args:
        source: A file, a folder, a glob or a URL.
        *outputs: Paths or URLs of files, which need not exist.

    Raises:
        UserError: If the source is a glob and matches one of the files.
    """
    if not is_glob(source):
        return

    filesystem, pattern = fsspec.url_to_fs(with_slashes(source))
    matches = re.compile(glob_translate(pattern)).match
    folder = _before_wildcards(pattern)
    for output in outputs:
        output_filesystem, path = fsspec.url_to_fs(with_slashes(output))
        # Files of another file system, and hidden ones, are never read.
        if output_filesystem != filesystem or not matches(path):
            continue
        if not _is_hidden(path[len(folder) :].lstrip("/")):
            raise UserError(
                f"`output` must not contain files that the glob {source} matches, got {output}. "
                "Choose another output."
            )


def is_glob(source: str) -> bool:
    """Return whether a path or URL has wildcards and is not the name of an existing file."""
    if not any(sign in source for sign in "*?["):
        return False
    filesystem, path = fsspec.url_to_fs(with_slashes(source))
    return not filesystem.exists(path)


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _before_wildcards(path: str) -> str:
    """Return the folder of a glob that contains no wildcard."""
    return re.split(r"[*?[]", path)[0].rpartition("/")[0]


# ------------------------------------------------------------------------------------------------
# rows


def rows(
    source: str | Path,
    columns: Sequence[str] | None = None,
    *,
    text_columns: Sequence[str] = (),
    optional_columns: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the rows of all files of a source, in the order of the files.

    Args:
        source: A file, a folder, a glob or a URL.
        columns: Columns that every row must have. Other columns are dropped. By default all
            columns are returned.
        text_columns: Columns that must contain text.
        optional_columns: Columns that are returned with `columns` if a row has them.

    Raises:
        UserError: If the source has no files or several formats, or if a file is damaged or lacks a
            column. The message names the file and the row.
    """
    for file in files(source):
        numbered = numbered_rows(
            file, columns, text_columns=text_columns, optional_columns=optional_columns
        )
        for _, row in numbered:
            yield row


@overload
def numbered_rows(
    file: File,
    columns: Sequence[str] | None = None,
    *,
    text_columns: Sequence[str] = (),
    optional_columns: Sequence[str] = (),
    is_wanted: None = None,
) -> Iterator[tuple[int, dict[str, Any]]]: ...


@overload
def numbered_rows(
    file: File,
    columns: Sequence[str] | None = None,
    *,
    text_columns: Sequence[str] = (),
    optional_columns: Sequence[str] = (),
    is_wanted: Callable[[int], bool],
) -> Iterator[tuple[int, dict[str, Any] | None]]: ...


def numbered_rows(
    file: File,
    columns: Sequence[str] | None = None,
    *,
    text_columns: Sequence[str] = (),
    optional_columns: Sequence[str] = (),
    is_wanted: Callable[[int], bool] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield the rows of one file with their number, counted from 0.

    Args:
        file: File to read.
        columns: Columns that every row must have, see `rows`.
        text_columns: Columns that must contain text.
        optional_columns: Columns that are returned with `columns` if a row has them.
        is_wanted: Function that returns whether the row with a number is decoded. Other rows are
            yielded as None.

    Raises:
        UserError: If the file is damaged or lacks a column.
    """
    # Parquet files are decoded in blocks by Arrow, all other formats row by row.
    read = _parquet_rows if file.format == ".parquet" else _text_rows
    parse = _PARSERS.get(file.format, _unchanged)

    number = -1
    try:
        for number, raw in enumerate(read(file, columns, optional_columns, is_wanted)):
            if is_wanted is not None and not is_wanted(number):
                yield number, None
                continue
            try:
                row = _checked(parse(raw), columns, text_columns, optional_columns)
            except ValueError as error:
                reason = one_line(getattr(error, "msg", error))
                raise UserError(f"{file.url}, row {number + 1:,}: {reason}.") from error
            yield number, row

    except UserError:
        raise
    # The file system, the decompression and the format raise their own exceptions.
    except Exception as error:
        where = f"after row {number + 1:,}: " if number >= 0 else ""
        remedy = ""
        if isinstance(error, UnicodeDecodeError):
            remedy = " Convert the file to UTF-8."
        elif isinstance(error, csv.Error) and "end of data" in str(error):
            remedy = " A quote is not closed; a quote in a quoted text must be doubled."
        raise UserError(f"{file.url} cannot be read ({where}{one_line(error)}).{remedy}") from error


def schema(file: File) -> pyarrow.Schema:
    """Return the Arrow schema of a file.

    For formats other than parquet, the columns are those of the first row, and their type is text.
    """
    if file.format == ".parquet":
        with _parquet(file) as table:
            return table.schema_arrow
    _, row = next(numbered_rows(file), (0, {}))
    return pyarrow.schema([(name, pyarrow.string()) for name in row])


def is_empty(file: File) -> bool:
    """Return whether a file has no rows."""
    if file.format == ".parquet":
        return count_rows(file) == 0
    return next(numbered_rows(file), None) is None


def count_rows(file: File) -> int:
    """Return the number of rows of a file."""
    if file.format == ".parquet":
        with _parquet(file) as table:
            return table.metadata.num_rows
    # Rows are separated, but not decoded.
    return sum(1 for _ in numbered_rows(file, is_wanted=lambda number: False))


def _checked(
    row: Any,
    columns: Sequence[str] | None,
    text_columns: Sequence[str],
    optional_columns: Sequence[str],
) -> dict[str, Any]:
    """Return a row with the columns that are read.

    Raises:
        ValueError: If the row is not an object, lacks a column, or a text is not text.
    """
    if not isinstance(row, dict):
        raise ValueError(_NOT_AN_OBJECT)
    # csv.DictReader collects the values beyond the header under None.
    if None in row:
        raise ValueError(
            "the row has more columns than the header. Enclose texts that contain the separator in "
            "quotes"
        )
    missing = [name for name in (text_columns if columns is None else columns) if name not in row]
    if missing:
        names = listed_columns(row) or "none"
        raise ValueError(f"there is no column {missing[0]!r}. Columns: {names}")

    # Values of csv files are always text, those of jsonl and parquet may be numbers or null.
    for name in text_columns:
        if not isinstance(row[name], str):
            raise ValueError(not_text(name, row[name]))
        row[name] = replace_surrogates(row[name])
    for name in optional_columns:
        if isinstance(row.get(name), str):
            row[name] = replace_surrogates(row[name])

    if columns is None:
        return row
    return {name: row[name] for name in (*columns, *optional_columns) if name in row}


def listed_columns(names: Iterable[object]) -> str:
    """Return the names of columns for a message. White space at the ends of a name is visible."""
    texts = [str(name) for name in names]
    return listed(text if text == text.strip() else repr(text) for text in texts)


def separator_remedy(names: Sequence[str]) -> str | None:
    """Return what to do if a table with other separators was read as a single column, or None."""
    if len(names) == 1 and ";" in names[0]:
        return "Separate the columns by commas instead of ';', or by tabs in a .tsv file."
    return None


def not_text(column: str, value: Any) -> str:
    """Return the message about a value that is not text, without a full stop."""
    return f"{column!r} must be text, got {shortened(json.dumps(value, default=str), 60)}"


def _unchanged(row: dict[str, Any]) -> dict[str, Any]:
    return row


def _line_of_text(line: str) -> dict[str, str]:
    return {"text": line.rstrip("\r\n")}


def _json_row(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        # The first line of an array or an object over several lines.
        if line.lstrip().startswith("[") or line.strip() == "{":
            raise ValueError(_NOT_AN_OBJECT) from error
        raise


def _tsv_row(row: dict[str | None, Any]) -> dict[str | None, Any]:
    """Return a row of a tsv file, in which a quote is a character like any other.

    Raises:
        ValueError: If a cell was written with the quotes of csv files, which would become a part of
            the text.
    """
    # csv.DictReader fills a short row with None, and collects further cells in a list under None.
    is_ragged = None in row or None in row.values()
    for cell in row.values():
        if not isinstance(cell, str) or '"' not in cell:
            continue
        # Tabs and line ends in a quoted cell divide it.
        is_divided = is_ragged and (cell[0] == '"' or cell[-1] == '"')
        if is_divided or _QUOTED_CELL.fullmatch(cell):
            raise ValueError(
                "the cells of a .tsv file must not be enclosed in quotes, got "
                f"{shortened(cell, 40)}. Convert the file to .csv, or write it without quotes "
                "(`quoting=3`)"
            )
    if None in row:
        raise ValueError(
            "the row has more columns than the header. A text of a .tsv file must not contain "
            "tabs: convert the file to .csv, or replace the tabs in its texts"
        )
    return row


_PARSERS: dict[str | None, Callable[[Any], Any]] = {
    ".jsonl": _json_row,
    ".ndjson": _json_row,
    ".json": _json_row,
    ".tsv": _tsv_row,
    ".txt": _line_of_text,
}


class _ZstdReader(io.RawIOBase):
    """Content of a .zst file, which may have several frames.

    The reader of zstandard ends without an error if the last frame is incomplete.

    Args:
        file: Compressed file.

    Raises:
        EOFError: When a read reaches the end of an incomplete frame.
    """

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file = file
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            # Bytes after the end of a frame are the start of the next one.
            is_complete = self._frame is None or self._frame.eof
            compressed = self._frame.unused_data if self._frame and is_complete else b""
            compressed = compressed or self._file.read(io.DEFAULT_BUFFER_SIZE)
            if not compressed:
                if is_complete:
                    return 0
                raise EOFError("compressed file ended before the end-of-stream marker was reached")
            if is_complete:
                self._frame = self._new_frame()
            self._content = memoryview(self._frame.decompress(compressed))

        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count


@contextlib.contextmanager
def _open_text(file: File, newline: str) -> Iterator[io.TextIOWrapper]:
    """Open a text file, which may be compressed."""
    is_zstd = file.name.lower().endswith(".zst")
    compression = None if is_zstd else "infer"
    with fsspec.open(file.url, "rb", compression=compression) as binary:
        if is_zstd:
            binary = io.BufferedReader(_ZstdReader(binary))
        # utf-8-sig removes the byte order mark that Excel writes.
        with io.TextIOWrapper(binary, "utf-8-sig", newline=newline) as lines:
            yield lines


def _text_rows(
    file: File,
    columns: Sequence[str] | None,
    optional_columns: Sequence[str],
    is_wanted: Callable[[int], bool] | None,
) -> Iterator[Any]:
    """Yield the lines that are not blank, or the rows of a table.

    Lines cannot be skipped or reduced to some columns before they are parsed. The last three
    parameters are those of `_parquet_rows`, and are not used.
    """
    is_table = file.format in (".csv", ".tsv")
    # The csv module finds line ends itself, because quoted texts may contain them.
    with _open_text(file, newline="" if file.format == ".csv" else "\n") as lines:
        if not is_table:
            yield from (line for line in lines if not line.isspace())
            return

        # The default limit of 128 KiB is shorter than many documents.
        csv.field_size_limit(2**30)
        # csv.DictReader reads a blank line as a header without columns.
        table = itertools.dropwhile(str.isspace, lines)
        if file.format == ".csv":
            reader = csv.DictReader(table, strict=True)
        else:
            # In a tsv file a quote is a character like any other. The csv module would end a row at
            # a carriage return inside of a cell.
            cells = (line.rstrip("\r\n").replace("\r", " ") for line in table)
            reader = csv.DictReader(cells, delimiter="\t", quoting=csv.QUOTE_NONE)

        _check_header(file, reader.fieldnames or ())
        yield from reader


def _check_header(file: File, names: Sequence[str]) -> None:
    """Raise UserError if two columns have the same name, of which one would be lost."""
    # Spreadsheets write empty columns without a name.
    duplicates = [name for name in names if name and names.count(name) > 1]
    if duplicates:
        raise UserError(
            f"the columns of {file.url} must have different names, got {duplicates[0]!r} "
            f"{names.count(duplicates[0])} times. Rename or remove a column."
        )


def _parquet(file: File) -> pyarrow.parquet.ParquetFile:
    filesystem, path = fsspec.url_to_fs(file.url)
    return pyarrow.parquet.ParquetFile(path, filesystem=filesystem)


def _parquet_rows(
    file: File,
    columns: Sequence[str] | None,
    optional_columns: Sequence[str],
    is_wanted: Callable[[int], bool] | None,
) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a parquet file. A row group without a wanted row is yielded as None."""
    with _parquet(file) as table:
        available = table.schema_arrow.names
        _check_header(file, available)
        # The check of the rows reports missing columns.
        names = None
        if columns is not None and {*columns} <= {*available}:
            names = [*columns, *(name for name in optional_columns if name in available)]

        start = 0
        for group in range(table.num_row_groups):
            stop = start + table.metadata.row_group(group).num_rows
            # Row groups are compressed as a whole: one without a wanted row is not read at all.
            if is_wanted is None or any(map(is_wanted, range(start, stop))):
                for batch in table.iter_batches(1024, row_groups=[group], columns=names):
                    yield from batch.to_pylist()
            else:
                yield from itertools.repeat(None, stop - start)
            start = stop


# ------------------------------------------------------------------------------------------------
# texts


def replace_surrogates(text: str) -> str:
    """Return a text with U+FFFD instead of lone surrogates, which tokenizers cannot encode.

    JSON can contain one half of a surrogate pair as an escape. The length does not change.
    """
    return _SURROGATE.sub("\ufffd", text)


def normalized_text(text: str) -> str:
    """Return a text that is the same for copies with other spaces or capital letters.

    An uncased model reads such copies as the same tokens.
    """
    return " ".join(text.lower().split())


# ------------------------------------------------------------------------------------------------
# sampling by hash


def hash_fraction(key: str) -> float:
    """Map a text to a reproducible number in [0, 1), identical on every machine."""
    # The hash of Python differs between processes, so a resumed run would hold out other rows.
    digest = hashlib.sha1(key.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_held_out(key: str, percent: float) -> bool:
    """Return whether a row belongs to the validation set of `percent` % of the rows.

    The decision depends on the SHA-1 of the row's key, and not on the order of the rows.
    """
    return hash_fraction(key) < percent / 100
