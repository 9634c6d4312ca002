"""Rows of `neobert finetune`: texts and labels in any columns of a file, before encoding."""

import ast
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..common import data
from ..common.errors import UserError, listed, shortened


# Usual names of columns with the words of a text, and their tags.
WORD_COLUMN = "tokens"
TAG_COLUMNS = ("tags", "ner_tags")
# Usual names of columns with lists only.
LIST_COLUMNS = (*TAG_COLUMNS, "entities", "spans")
# Usual names of the columns; the first one that a file has is used.
_TEXT_COLUMNS = ("text", "sentence", "tokens")
_LABEL_COLUMNS = ("label", "labels", "tags", "ner_tags", "entities", "spans", "score")


@dataclass(frozen=True)
class RawRows:
    """Rows of a file before their labels are encoded.

    Attributes:
        source: File, directory, glob or URL.
        texts: Values of the text columns.
        labels: Values of the label columns; a single value is not in a list.
        omitted: Number of rows without a text or a label, which are left out.
        names: Class names that a parquet file stores, in the order of their numbers.
    """

    source: str
    texts: list[tuple[Any, ...]]
    labels: list[Any]
    omitted: int = 0
    names: tuple[str, ...] = ()


def find_columns(
    source: str, text_columns: Sequence[str] | None, label_columns: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the text columns and the label columns of a source.

    Args:
        source: File, directory, glob or URL.
        text_columns: Names of the text columns, or None to use the first column with a usual name.
        label_columns: Names of the label columns, or None as for `text_columns`.

    Raises:
        UserError: If the source has no rows, or a column is missing or cannot be inferred.
    """
    # The first row names the columns.
    first = next(data.rows(source), None)
    if first is None:
        raise UserError(f"{source} must contain at least one row, got none.")

    def choose(columns: Sequence[str] | None, usual: Sequence[str], name: str) -> tuple[str, ...]:
        if columns is None:
            columns = [column for column in usual if column in first][:1]
        missing = [column for column in columns if column not in first]
        if missing or not columns:
            wanted = repr(missing[0]) if missing else " or ".join(usual)
            remedy = data.separator_remedy([*first]) or f"Pass --{name}-column."
            columns_text = data.listed_columns(first)
            raise UserError(f"{source} has no column {wanted}; it has {columns_text}. {remedy}")
        if len(set(columns)) < len(columns):
            raise UserError(f"`{name}_column` must name different columns, got {listed(columns)}.")
        return tuple(columns)

    texts = choose(text_columns, _TEXT_COLUMNS, "text")
    labels = choose(label_columns, _LABEL_COLUMNS, "label")

    # Tags belong to words, even if the row also contains the text of the words.
    if text_columns is None and labels[0] in TAG_COLUMNS and WORD_COLUMN in first:
        words = parsed_list(first[WORD_COLUMN])
        count = word_count(words, first[labels[0]])
        if count is not None and (isinstance(words, list) or count > 1):
            texts = (WORD_COLUMN,)

    if both := sorted(set(texts) & set(labels)):
        raise UserError(
            f"`text_column` and `label_column` must be different columns, got {listed(both)}."
        )
    return texts, labels


def read_rows(source: str, text_columns: Sequence[str], label_columns: Sequence[str]) -> RawRows:
    """Return the rows of a source that have a text and a label.

    Args:
        source: File, directory, glob or URL.
        text_columns: Names of the columns with a text, or with the texts of a pair.
        label_columns: Names of the columns with labels.

    Raises:
        UserError: If the source cannot be read, or no row has both.
    """
    texts = []
    labels = []
    omitted = 0
    class_names = _parquet_class_names(source, label_columns)
    for row in data.rows(source, [*text_columns, *label_columns]):
        row_texts = tuple(row[name] for name in text_columns)
        values = [parsed_list(row[name]) for name in label_columns]
        # `datasets` stores a missing class label as -1.
        if class_names and isinstance(values[0], int) and values[0] < 0:
            values = [None]

        # Rows without a text or a label are counted and reported.
        if any(is_missing(value) for value in (*row_texts, *values)):
            omitted += 1
            continue
        texts.append(row_texts)
        labels.append(values if len(values) > 1 else values[0])

    if not texts:
        rule = "at least one row, got none"
        if omitted:
            rule = f"rows with a text and a label, got {omitted:,} rows without"
        raise UserError(f"{source} must contain {rule}.")
    return RawRows(source, texts, labels, omitted, class_names)


def _parquet_class_names(source: str, label_columns: Sequence[str]) -> tuple[str, ...]:
    """Return the class names that `datasets` stores in a parquet file."""
    file = data.files(source)[0]
    if file.format != ".parquet" or len(label_columns) > 1:
        return ()

    # `datasets` stores its features as JSON in the metadata of the schema.
    metadata = (data.schema(file).metadata or {}).get(b"huggingface")
    if metadata is None:
        return ()
    feature = json.loads(metadata)["info"]["features"].get(label_columns[0], {})

    # The class labels of a list, such as tags, are one level below. Versions of datasets before 4
    # write the feature of a list as a list of one feature.
    feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
    names = feature.get("names", ())
    # A struct may have a field called "names".
    return tuple(names) if isinstance(names, list) else ()


# ------------------------------------------------------------------------------------------------
# values of cells


def is_missing(value: Any) -> bool:
    """Return whether a cell is empty: None, NaN, or a string without visible characters."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def finite_number(value: Any) -> float | None:
    """Return a value as a finite number, or None if it is not a number."""
    # A bool is an int for Python, but a class here.
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    # An integer of JSON may have any number of digits.
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def parsed_list(value: Any) -> Any:
    """Return a value. A list in JSON or Python, as a cell of a table contains it, is parsed."""
    if isinstance(value, str) and value.startswith("["):
        try:
            items = json.loads(value)
        except ValueError:
            return _parsed_python_list(value)
        return items if isinstance(items, list) else value
    return value


def _parsed_python_list(cell: str) -> Any:
    """Return the list of strings or numbers that `DataFrame.to_csv` wrote, or else the cell."""
    if not cell.endswith("]"):
        return cell
    try:
        items = ast.literal_eval(cell)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return cell

    # Python joins adjacent strings: the array "['a' 'b']" of numpy would be a list of one string.
    is_same = repr(items).replace(" ", "") == cell.replace(" ", "")
    is_flat = isinstance(items, list) and all(type(item) in (str, int, float) for item in items)
    return items if is_same and is_flat else cell


def is_unparsed_list(value: Any) -> bool:
    """Return whether a cell has the brackets of a list, but is not a list in JSON or Python."""
    has_brackets = isinstance(value, str) and value.startswith("[") and value.endswith("]")
    return has_brackets and not isinstance(parsed_list(value), list)


def split_cell(value: Any) -> Any:
    """Return the items of a cell, which is a list or has its items separated by spaces."""
    items = parsed_list(value)
    return items.split() if isinstance(items, str) else items


def word_count(text: Any, tags: Any) -> int | None:
    """Return the number of words of a row, or None if it does not have one tag per word.

    Args:
        text: Cell with the words, a list or separated by spaces.
        tags: Cell with the tags of the words, in either form.
    """
    words = split_cell(text)
    word_tags = split_cell(tags)
    are_lists = isinstance(words, list) and isinstance(word_tags, list)
    return len(words) if are_lists and len(words) == len(word_tags) else None


# ------------------------------------------------------------------------------------------------
# errors


def row_error(rows: RawRows, index: int, rule: str, value: Any, remedy: str = "") -> UserError:
    """Return the error of a row.

    Args:
        rows: Rows of the file.
        index: Index of the row, counted from 0 and without the omitted rows.
        rule: Rule that the value breaks.
        value: Value, which is shortened.
        remedy: Sentences after the rule, with a space before the first one.
    """
    shown = shortened(json.dumps(value, default=str), 60)
    return UserError(f"{rows.source}, labeled row {index + 1:,}: {rule}, got {shown}.{remedy}")


def list_error(rows: RawRows, index: int, value: str, remedy: str = "") -> UserError:
    """Return the error of a cell with a list that cannot be parsed; see `row_error`."""
    rule = "a list must be in JSON"
    return row_error(rows, index, rule, value, f' Write lists such as ["a", "b"].{remedy}')
