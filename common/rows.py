"""Reads jsonl and parquet files row by row, in constant memory, and names the place of a broken row."""

import io
import json
from pathlib import Path

from .errors import UserError


FORMATS = (".jsonl", ".parquet")


def check_corpus(path, columns, text_columns=(), kept=(), uniform=None):
    """Reads the whole file once, before any work is done with it.

    Args:
        path: .jsonl (a JSON object a line) or .parquet.
        columns: columns that every row must have.
        text_columns: those of them that must hold text.
        kept: those of them that are copied to a parquet file; each must hold one type of values.
        uniform: called with a column name; True for columns that every row of a jsonl file has, or none.
    Returns:
        the number of rows, and {column: Arrow type} of `kept`.
    Raises:
        UserError: no such file, another format, no rows, or a row that is broken; the sentence names its line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    if path.suffix not in FORMATS:
        raise UserError(f"{path} must end in {' or '.join(FORMATS)}, but {path.suffix or 'no suffix'} was given")
    count, types = 0, _ColumnTypes(path, kept)
    for number, row in _rows(path, columns, uniform):
        for column in text_columns:
            if not isinstance(row[column], str):
                raise UserError(f"{_place(path, number)}: {column!r} must be text, but is {_short(row[column])}")
            _check_characters(path, number, column, row[column])
        types.add(number, row)
        count += 1
    if not count:
        raise UserError(f"{path} has no rows")
    return count, types.found()


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


class _ColumnTypes:
    """The Arrow type of each of `columns` over all rows: of the schema (parquet), or from the values, 1,024 rows at a time (jsonl)."""

    def __init__(self, path, columns):
        self.path, self.numbers, self.values = path, [], {}
        if path.suffix == ".parquet":
            self.types = {field.name: field.type for field in _parquet(path).schema_arrow if field.name in columns}
        else:
            self.types = dict.fromkeys(columns)
            self.values = {column: [] for column in columns}

    def add(self, number, row):
        if not self.values:
            return
        for column, values in self.values.items():
            value = row[column]
            if isinstance(value, str):
                _check_characters(self.path, number, column, value)
                value = value[:60]  # a long text has no other type
            values.append(value)
        self.numbers.append(number)
        if len(self.numbers) == 1024:
            self._merge()

    def _merge(self):
        for column, values in self.values.items():
            try:
                self.types[column] = _merged_type(self.types[column], values)
            except _arrow_errors():
                self._refuse(column, values)
            values.clear()
        self.numbers.clear()

    def _refuse(self, column, values):
        """Raises UserError for the first of `values` that does not go with those before it."""
        kind = self.types[column]
        for number, value, end in zip(self.numbers, values, range(1, len(values) + 1)):
            try:
                kind = _merged_type(self.types[column], values[:end])
            except _arrow_errors():
                before = "" if kind is None else f" after values of type {kind}"
                raise UserError(
                    f"{_place(self.path, number)}: {column!r} is {_short(value)}{before}; all values of a column that is copied must have "
                    "one type (integers: 64 bits): make them text, or give --keep without this column"
                ) from None

    def found(self):
        """{column: Arrow type}; UserError for a type that parquet does not know."""
        if self.numbers:
            self._merge()
        for column, kind in self.types.items() if self.values else ():
            import pyarrow.parquet

            try:
                pyarrow.parquet.write_table(pyarrow.table({column: pyarrow.array([], kind)}), io.BytesIO())
            except _arrow_errors():
                raise UserError(f"{self.path}: parquet cannot hold {column!r} ({kind}); give --keep without it") from None
        return self.types


def _merged_type(known, values):
    """Arrow type of a column with values of type `known` (or None) and then `values`; one of `_arrow_errors` where there is none."""
    import pyarrow

    found = pyarrow.array(values).type
    if known is None or found == known:
        return found
    schemas = [pyarrow.schema([("", kind)]) for kind in (known, found)]
    merged = pyarrow.unify_schemas(schemas, promote_options="permissive").field(0).type
    pyarrow.array(values, merged)  # an integer above 2^53 has no float64
    return merged


def _arrow_errors():
    import pyarrow

    return pyarrow.ArrowException, OverflowError, UnicodeEncodeError


def _check_characters(path, number, column, text):
    """JSON can write half of a character of two UTF-16 units ("\\ud800"), which no tokenizer and no file takes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{_place(path, number)}: {column!r} has half a surrogate pair, {text[error.start]!r}, which is no character; remove it"
            ) from None


def _rows(path, columns, uniform=None):
    return _parquet_rows(path, columns) if path.suffix == ".parquet" else _jsonl_rows(path, columns, uniform)


def _jsonl_rows(path, columns, uniform):
    first = None
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
            if uniform is not None:
                names = {name for name in row if uniform(name)}
                first = names if first is None else first
                for name in sorted(names ^ first):
                    has = "has" if name in names else "has no"
                    raise UserError(f"{_place(path, number)} {has} {name!r}, unlike the first row; give it to every row or to none")
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
