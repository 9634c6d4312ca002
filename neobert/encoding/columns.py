"""Columns that `neobert encode` copies from its input, with their types.

The types of parquet columns are those of the file. The types of JSON and CSV columns are inferred
before the first text is encoded. All parts and shards of an output have the same types, which the
manifest stores.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import pyarrow

from ..common import data
from ..common.errors import UserError, listed, one_line, shortened
from .options import CorpusOptions


# Columns of windows: the file and row of the text, and the range of characters in the text.
WINDOW_COLUMNS = {
    "file": pyarrow.string(),
    "row": pyarrow.int64(),
    "start": pyarrow.int64(),
    "end": pyarrow.int64(),
}
# Minimum number of rows from which types are inferred, if the input has as many.
_INFERENCE_ROWS = 100_000
# Integers as Python writes them. "007", "+7" and "1e3" stay text, because they would be changed.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
# Arrow types that are inferred, in order of preference, and the JSON types that each represents
# exactly.
_JSON_TYPES = {
    pyarrow.bool_(): {"boolean"},
    pyarrow.int64(): {"integer", "large integer"},
    pyarrow.float64(): {"float", "integer"},
}
# Types of views, as Rust libraries write them, and the types with the same values. Arrow cannot
# `take` values of a view.
_VIEWS = {"string_view": pyarrow.string(), "binary_view": pyarrow.binary()}


def copied_columns(
    corpus: CorpusOptions, files: Sequence[data.File], has_windows: bool
) -> pyarrow.Schema:
    """Return the Arrow schema of the columns to copy.

    Args:
        corpus: Options of the input.
        files: Input files.
        has_windows: Whether the output has the columns of windows.

    Raises:
        UserError: If there are no rows, or if an option names a column that cannot be used.
    """
    first = next((file for file in files if not data.is_empty(file)), None)
    if first is None:
        raise UserError(f"{corpus.source} must contain at least one text, got no rows.")

    # All files must have the columns of the first one that has rows.
    schema = data.schema(first)
    if corpus.text_column not in schema.names:
        remedy = data.separator_remedy(schema.names) or "Name the column with --text-column."
        raise UserError(
            f"{first.url} has no column {corpus.text_column!r}, only "
            f"{data.listed_columns(schema.names)}. {remedy}"
        )

    # The command line may separate names by commas or by spaces.
    names = ["id"] if "id" in schema.names else []
    if corpus.keep is not None:
        names = [name.strip() for name in ",".join(corpus.keep).split(",")]

    # The suffix :text requests a string, unless it is part of a column's name. Texts of JSON and
    # CSV files are always strings, so a text such as "42" does not become a number. A type of None
    # is still unknown.
    is_typed = first.format == ".parquet"
    types = {}
    for name in filter(None, names):
        is_text = name.endswith(":text") and name not in schema.names
        column = name.removesuffix(":text") if is_text else name
        is_text = is_text or (name == corpus.text_column and not is_typed)
        types[column] = pyarrow.string() if is_text else None

    reserved = ["embedding", *(WINDOW_COLUMNS if has_windows else ())]
    if taken := [name for name in types if name in reserved]:
        raise UserError(
            f"`keep` must not contain the output's own columns ({listed(reserved)}), got "
            f"{listed(taken)}. Rename the column of the input, or omit it."
        )
    if missing := [name for name in types if name not in schema.names]:
        raise UserError(
            f"{first.url} has no column {missing[0]!r}, only {data.listed_columns(schema.names)}. "
            "Correct --keep."
        )

    if is_typed:
        input_types = {field.name: without_views(field.type) for field in schema}
    else:
        untyped = [name for name, arrow_type in types.items() if arrow_type is None]
        input_types = inferred_types(files, untyped)
    return pyarrow.schema(
        [(name, arrow_type or input_types[name]) for name, arrow_type in types.items()]
    )


def without_views(arrow_type: pyarrow.DataType) -> pyarrow.DataType:
    """Return a type with the same values and without views, also in lists and structs."""
    if pyarrow.types.is_list(arrow_type) or pyarrow.types.is_large_list(arrow_type):
        item = arrow_type.value_field.with_type(without_views(arrow_type.value_type))
        is_large = pyarrow.types.is_large_list(arrow_type)
        return pyarrow.large_list(item) if is_large else pyarrow.list_(item)
    if pyarrow.types.is_struct(arrow_type):
        return pyarrow.struct([field.with_type(without_views(field.type)) for field in arrow_type])
    # Older versions of pyarrow have no function that recognizes a view.
    return _VIEWS.get(str(arrow_type), arrow_type)


def column_array(
    values: list[Any], field: pyarrow.Field, file: data.File, remedy: str
) -> pyarrow.Array:
    """Return the values of a copied column as an Arrow array of the type of `field`.

    In a column of strings, all values are written as text, see `_as_text`.

    Args:
        values: Values of the column.
        field: Name and type of the column.
        file: Input file.
        remedy: Last sentence of the error.

    Raises:
        UserError: If a value cannot be represented exactly.
    """
    try:
        # `pyarrow.array` would refuse numbers in a column of strings.
        if field.type == pyarrow.string():
            values = [None if value is None else _as_text(value) for value in values]
        elif file.format != ".parquet":
            # The types were inferred from the first rows. `pyarrow.array` would silently convert
            # some later values of another type, such as 1.5 to the integer 1.
            values = [_parsed(value, file) for value in values]
            allowed = _JSON_TYPES.get(field.type)
            for value in values:
                if allowed and value is not None and _json_type(value) not in allowed:
                    raise ValueError(_got(value))

        array = pyarrow.array(values, field.type)
        if file.format == ".parquet":
            _check_exact(values, array, field.name, file)
        return array
    except (ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{file.url}: all values of {field.name!r} must have the type {field.type} "
            f"({one_line(error)}). {remedy}"
        ) from error


def _as_text(value: object) -> str:
    """Return a value as text: lists, mappings, booleans and numbers as JSON, others as by `str`.

    Raises:
        UnicodeDecodeError: If bytes are not UTF-8.
    """
    # Parquet files cannot contain lone surrogates.
    if isinstance(value, str):
        return data.replace_surrogates(value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (dict, list, bool, int, float)):
        return json.dumps(value, default=_as_text)
    return str(value)


def _check_exact(values: Sequence[Any], array: pyarrow.Array, name: str, file: data.File) -> None:
    """Raise ValueError if an array differs from the values of a parquet column of another type."""
    # `pyarrow.array` silently converts 1.5 to the integer 1. A NaN differs from itself, also inside
    # of a list, so the types are compared, too.
    stored_values = array.to_pylist()
    changed = [
        value for value, stored in zip(values, stored_values) if stored != value and value == value
    ]
    if changed and data.schema(file).field(name).type != array.type:
        raise ValueError(_got(changed[0]))


def _got(value: object) -> str:
    return f"got {shortened(json.dumps(value, default=str), 60)}"


def inferred_types(files: Sequence[data.File], names: Sequence[str]) -> dict[str, pyarrow.DataType]:
    """Return the Arrow types of columns of JSON, CSV or TSV files; string if no other type fits.

    Complete files are read in the order of their names until `_INFERENCE_ROWS` rows have been read.
    All shards therefore infer the same types.

    Args:
        files: Input files.
        names: Names of the columns.
    """
    json_types: dict[str, set[str | None]] = {name: set() for name in names}
    count = 0
    for file in files if names else ():
        for _, row in data.numbered_rows(file, names):
            count += 1
            for name, value in row.items():
                json_types[name].add(_json_type(_parsed(value, file)))
        if count >= _INFERENCE_ROWS:
            break

    types = {}
    for name, seen in json_types.items():
        # Every Arrow type has missing values. A column with nothing else is a column of strings.
        seen.discard(None)
        fitting = [
            arrow_type for arrow_type, allowed in _JSON_TYPES.items() if seen and seen <= allowed
        ]
        types[name] = fitting[0] if fitting else pyarrow.string()
    return types


def _parsed(value: object, file: data.File) -> object:
    """Return the value of a CSV cell that is an integer or empty; other values are unchanged.

    CSV files have no types: an empty cell is a missing value. Cells with decimal fractions stay
    text, because a float could not reproduce their digits.
    """
    if file.format not in (".csv", ".tsv") or not isinstance(value, str):
        return value
    return int(value) if _INTEGER.fullmatch(value) else value or None


def _json_type(value: object) -> str | None:
    """Return the type of a value as in `_JSON_TYPES`, "other", or None for a missing value."""
    if value is None:
        return None
    # In Python, a boolean is an integer, too, so this case comes first.
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "float"
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        # A float64 represents integers up to 2**53 exactly.
        return "integer" if abs(value) <= 2**53 else "large integer"
    return "other"
