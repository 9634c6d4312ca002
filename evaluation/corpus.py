"""Reads jsonl and parquet files row by row, in constant memory, and names the place of a broken row."""

import json
from pathlib import Path

from ..recipe import UserError


FORMATS = (".jsonl", ".parquet")


def check_corpus(path, columns, text_columns=()):
    """Reads the whole file once, before any work is done with it.

    Args:
        path: .jsonl (a JSON object a line) or .parquet.
        columns: columns that every row must have.
        text_columns: those of them that must hold text.
    Returns:
        the number of rows.
    Raises:
        UserError: no such file, another format, no rows, or a row that is broken; the sentence names its line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    if path.suffix not in FORMATS:
        raise UserError(f"{path} must end in {' or '.join(FORMATS)}, but {path.suffix or 'no suffix'} was given")
    count = 0
    for number, row in _rows(path, columns):
        for column in text_columns:
            if not isinstance(row[column], str):
                raise UserError(f"{_place(path, number)}: {column!r} must be text, but is {_short(row[column])}")
        count += 1
    if not count:
        raise UserError(f"{path} has no rows")
    return count


def read_corpus(path, columns):
    """Yields dicts with `columns`, in file order."""
    for _, row in _rows(Path(path), columns):
        yield row


def corpus_columns(path):
    """Column names: of the schema (parquet) or of the first row (jsonl); [] where there is nothing to read."""
    path = Path(path)
    if path.suffix == ".parquet":
        return _parquet(path).schema_arrow.names
    with path.open("rb") as lines:
        line = next((line for line in lines if line.strip()), b"{}")
    try:
        row = json.loads(line)
    except ValueError:
        return []
    return list(row) if isinstance(row, dict) else []


def _rows(path, columns):
    return _parquet_rows(path, columns) if path.suffix == ".parquet" else _jsonl_rows(path, columns)


def _jsonl_rows(path, columns):
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else "it is not UTF-8"
                raise UserError(f"{_place(path, number)} is not JSON ({reason})") from None
            if not isinstance(row, dict):
                raise UserError(f"{_place(path, number)} must be an object {{...}}, but is {_short(row)}")
            for column in columns:
                if column not in row:
                    raise UserError(f"{_place(path, number)} has no {column!r}; it has: {', '.join(map(repr, row)) or 'nothing'}")
            yield number, {column: row[column] for column in columns}


def _parquet(path):
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is not a parquet file ({str(error).split('.')[0]})") from None


def _parquet_rows(path, columns):
    file = _parquet(path)
    for column in columns:
        if column not in file.schema_arrow.names:
            raise UserError(f"{path} has no column {column!r}; it has: {', '.join(map(repr, file.schema_arrow.names))}")
    number = 0
    for batch in file.iter_batches(batch_size=1024, columns=list(columns)):
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _place(path, number):
    return f"{path}, {'row' if Path(path).suffix == '.parquet' else 'line'} {number:,}"


def _short(value):
    text = "null" if value is None else f"{value!r}"
    return text if len(text) <= 60 else text[:57] + "..."
