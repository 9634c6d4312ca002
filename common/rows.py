"""The one reader of local rows: jsonl, parquet, csv, tsv and txt, in constant memory, from any
place on, each row with its place for messages.

    for place, row in read_rows("pairs.jsonl", ["anchor", "positive"], texts=["anchor"]):
        if not row["positive"]:
            raise UserError(f"{place}: 'positive' is empty")  # "pairs.jsonl, line 3: ..."

A jsonl file has one JSON object a line, a csv or tsv file the names of its columns in the first
line, a txt file one text a line, in the column "text". Blank lines do not count as rows. All but
parquet may be compressed (.gz, .bz2, .xz, .zst). A folder is read file by file, in order of names;
its files must have one format.
"""

import bz2
import csv
import functools
import gzip
import io
import itertools
import json
import lzma
import zlib
from pathlib import Path
from typing import NamedTuple

from .errors import UserError, listed, one_line, require


JSONL = (".jsonl", ".ndjson", ".json")
FORMATS = (*JSONL, ".parquet", ".csv", ".tsv", ".txt")
LINE_LIMIT = (
    2**30
    # bytes of a line, or characters of a csv file's: a small compressed file can have one that no
    # memory holds
)
_COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": None}
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError)


class Place(NamedTuple):
    """A row's place: `pairs.jsonl, line 3`. `read_rows` can start there.

    Attributes:
        path: the file.
        number: the row's line, or its row in a parquet file, from 1.
        offset: the row's first byte; 0 where a file cannot be entered in its middle.
    """

    path: Path
    number: int
    offset: int = 0

    def __str__(self):
        return f"{self.path}, {'row' if self.path.suffix == '.parquet' else 'line'} {self.number:,}"


def row_format(path):
    """The format of a file by its name, one of FORMATS, or None: `a.jsonl.gz` is ".jsonl"."""
    endings = [ending.lower() for ending in Path(path).suffixes]
    if endings and endings[-1] in _COMPRESSED:
        endings.pop()
    return endings[-1] if endings and endings[-1] in FORMATS else None


def row_files(path):
    """The files of a file or folder, a list.

    Raises:
        UserError: nothing is there, no file has a known format, or a folder's files have several.
    """
    path = Path(path)
    if path.is_file():
        if row_format(path) is None:
            raise UserError(
                f"{path} must end in {', '.join(FORMATS)}, but {path.suffix or 'no suffix'} was "
                "given"
            )
        return [path]
    if not path.is_dir():
        raise UserError(f"there is no file {path}")
    files = sorted(
        file
        for file in path.iterdir()
        if file.is_file() and row_format(file) and not file.name.startswith((".", "_"))
    )
    if len({row_format(file) for file in files}) != 1:
        found = listed(file.name for file in files) if files else "none"
        raise UserError(
            f"{path} must hold files of one format among {', '.join(FORMATS)}, but {found} was "
            "found"
        )
    return files


def read_rows(path, columns=None, texts=(), start=None, broken=None, alike=None):
    """Yields (Place, row) in the order of the file.

    Args:
        path: a file, or a folder of files.
        columns: the columns that every row must have and that a row is cut to; by default all.
        texts: those of them that must hold text.
        start: the `Place` of the row to start with.
        broken: called with the UserError of a broken row, which is then left out; by default it is
            raised.
        alike: called with a column name; True for columns that every row has, or none.
    Raises:
        UserError: no such file, another format, no rows, or a broken row; the sentence names its
            place.
    """
    seen, first = False, None
    for file in row_files(path):
        if start is not None and file < start.path:
            continue
        read, parse = _READERS[row_format(file)]
        try:
            for place, raw in read(
                file, columns, start if start is not None and start.path == file else Place(file, 1)
            ):
                seen = True
                try:
                    row = parse(place, raw)
                    if alike is not None:
                        names = set(filter(alike, row))
                        first = names if first is None else first
                        _check_alike(place, names, first)
                    row = _checked(place, row, columns, texts)
                except UserError as error:
                    if broken is None:
                        raise
                    broken(error)
                    continue
                yield place, row
        except _READ_ERRORS as error:
            raise UserError(f"{file} cannot be read ({one_line(error)})") from error
    if not seen and start is None:
        raise UserError(f"{path} has no rows")


def row_columns(path):
    """Column names: of a parquet file's schema, else of the first row; [] where there is nothing to
    read."""
    for file in row_files(path):
        if row_format(file) == ".parquet":
            return open_parquet(file).schema_arrow.names
        for _, row in read_rows(file, broken=lambda error: None):
            return list(row)
    return []


def check_column(files, column, option):
    """Raises UserError unless one of the first 100 rows, or a parquet file's schema, has a column,
    whose name is the value of `option`."""
    broken = []
    seen = (
        dict.fromkeys(open_parquet(files[0]).schema_arrow.names)
        if row_format(files[0]) == ".parquet"
        else {}
    )
    rows = itertools.chain.from_iterable(
        read_rows(file, start=Place(file, 1), broken=broken.append) for file in files
    )
    for _, row in itertools.islice(rows, 0 if seen else 100):
        seen.update(row)
        if column in row:
            break
    if broken and (not seen or _ARRAY in str(broken[0])):
        raise broken[0]
    if column in seen:
        return
    found = f"only {listed(seen)}" if seen else "nor any row"
    raise UserError(f"{files[0]} has no column {column!r}, {found}; name it with {option}")


def open_parquet(path):
    """A `pyarrow.parquet.ParquetFile`; UserError for another kind of file."""
    require("train", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a parquet file ({str(error).split('.')[0]})") from None


def check_characters(place, column, text):
    """Raises UserError for half a surrogate pair, which JSON can write ("\\ud800") and no tokenizer
    and no file takes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise UserError(
                f"{place}: {column!r} has half a surrogate pair, {half!r}, which is not a "
                "character; remove it"
            ) from None


def short(value):
    """A value for a message, at most 60 characters."""
    text = "null" if value is None else f"{value!r}"
    return text if len(text) <= 60 else text[:57] + "..."


def _check_alike(place, names, first):
    for name in sorted(names ^ first):
        raise UserError(
            f"{place} has {'' if name in names else 'no '}{name!r}, unlike the first row; give it "
            "to every row or to none"
        )


def _checked(place, row, columns, texts):
    if columns is not None:
        for column in columns:
            if column not in row:
                raise UserError(
                    f"{place} has no {column!r}; it has: {listed(map(repr, row)) or 'nothing'}"
                )
        row = {column: row[column] for column in columns}
    for column in texts:
        if not isinstance(row.get(column), str):
            raise UserError(f"{place}: {column!r} must be text, but is {short(row.get(column))}")
        check_characters(place, column, row[column])
    return row


# ------------------------------------------------------------------------------------------------
# formats


def _open(path):
    if path.suffix.lower() != ".zst":
        return _COMPRESSED.get(path.suffix.lower(), open)(path, "rb")
    try:
        from compression import zstd  # Python 3.14

        return zstd.open(path, "rb")
    except ImportError:
        require("train", "zstandard")
        import zstandard

        return io.BufferedReader(zstandard.open(path, "rb"))


def _bounded(file, path, first=1):
    """Lines of an open file. UserError for one above LINE_LIMIT."""
    for number, line in enumerate(
        iter(functools.partial(file.readline, LINE_LIMIT), file.read(0)), first
    ):
        if len(line) == LINE_LIMIT and not line.endswith("\n" if isinstance(line, str) else b"\n"):
            raise UserError(
                f"{path}, line {number:,} has {LINE_LIMIT:,} bytes or more; give each row a line "
                "of its own"
            )
        yield line


def _lines(path, columns, start):
    """(Place, line) of the lines that are not blank."""
    with _open(path) as lines:
        enters = path.suffix.lower() not in _COMPRESSED
        offset, first = (start.offset, start.number) if enters else (0, 1)
        if offset:
            lines.seek(offset)
        for number, line in enumerate(_bounded(lines, path, first), first):
            if line.strip() and number >= start.number:
                yield Place(path, number, offset if enters else 0), line
            offset += len(line)


_ARRAY = "; of an array make such lines: jq -c '.[]' FILE.json > FILE.jsonl"


def _json_object(place, line):
    hint = _ARRAY if line.strip()[:2].replace(b" ", b"") in (b"[", b"[{") else ""
    try:
        row = json.loads(line)
    except RecursionError:
        raise UserError(f"{place} is not JSON (too deeply nested)") from None
    except ValueError as error:
        reason = (
            error.msg
            if isinstance(error, json.JSONDecodeError)
            else one_line(error)
            if line.isascii()
            else "it is not UTF-8"
        )
        raise UserError(f"{place} is not JSON ({reason}){hint}") from None
    if not isinstance(row, dict):
        raise UserError(f"{place} must be an object {{...}}, one a line, but is {short(row)}{hint}")
    return row


def _text_line(place, line):
    try:
        return {"text": line.decode("utf-8-sig" if place.number == 1 else "utf-8").rstrip("\r\n")}
    except UnicodeDecodeError:
        raise UserError(f"{place} is not UTF-8") from None


def _table(path, columns, start):
    """Rows of a csv file with its standard quotes, or of a tsv file, where a quote is a character
    as any other."""
    tabs = row_format(path) == ".tsv"
    csv.field_size_limit(LINE_LIMIT)
    with _open(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(
            _bounded(lines, path),
            **({"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}),
        )
        try:
            names = reader.fieldnames or []
            if len(set(names)) < len(names):
                raise UserError(f"{path}, line 1 names a column twice: {listed(names)}")
            for row in reader:
                if reader.line_num >= start.number:
                    yield Place(path, reader.line_num), row
        except csv.Error as error:
            raise UserError(
                f"{path}, line {reader.line_num + 1} is broken ({error}); are its quotes closed?"
            ) from error


def _table_row(place, row):
    if None in row:
        raise UserError(
            f"{place} has more columns than the first line, {len(row) - 1}; a separator in a text?"
        )
    return row


def _parquet_rows(path, columns, start):
    file = open_parquet(path)
    names = file.schema_arrow.names
    for column in columns or ():
        if column not in names:
            raise UserError(f"{path} has no column {column!r}; it has: {listed(map(repr, names))}")
    before = 0
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if before + count < start.number:  # a group that ends before the start is not decoded
            before += count
            continue
        for batch in file.iter_batches(
            1024, row_groups=[group], columns=None if columns is None else list(columns)
        ):
            skipped = min(max(start.number - 1 - before, 0), len(batch))
            for number, row in enumerate(batch.slice(skipped).to_pylist(), before + skipped + 1):
                yield Place(path, number), row
            before += len(batch)


_READERS = {
    **dict.fromkeys(JSONL, (_lines, _json_object)),
    ".txt": (_lines, _text_line),
    ".csv": (_table, _table_row),
    ".tsv": (_table, _table_row),
    ".parquet": (_parquet_rows, lambda place, row: row),
}
