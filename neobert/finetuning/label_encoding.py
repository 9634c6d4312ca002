"""Encoding of labels: class numbers, rows of 0 and 1, and values of a regression.

`tag_encoding` encodes the tags of token classification.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..common import data
from ..common.errors import UserError, listed
from ..common.task_file import CLASSIFICATION, MULTI_LABEL, REGRESSION
from .rows import RawRows, finite_number, is_missing, is_unparsed_list, list_error, row_error
from .text_tasks import Examples, TextTask


def encode_labels(
    task: TextTask, parts: Sequence[RawRows], known_labels: Mapping[str, int] | None = None
) -> tuple[TextTask, list[Examples]]:
    """Return a task with its labels, and the rows of every part with encoded labels.

    Args:
        task: Classification, multi-label classification or regression, without labels.
        parts: Rows of files. The labels are those of all files.
        known_labels: Label numbers of the model to start from. They are kept if its labels are the
            same.

    Raises:
        UserError: If a value cannot be a label or a text of the task, or there are fewer than two
            labels.
    """
    if task.name == MULTI_LABEL and len(task.label_columns) == 1:
        _check_label_names(parts[0])
    texts = [_texts(part) for part in parts]
    labels = [_parse_labels(task, part) for part in parts]
    if task.name == REGRESSION:
        return task, [Examples(rows, values, []) for rows, values in zip(texts, labels)]

    # The numbers of the labels follow from all parts, so a rare label of the test is known.
    distinct: set[str] = set()
    for part_labels in labels:
        for label in part_labels:
            distinct.update(label if task.name == MULTI_LABEL else [label])

    # Stored class names and label columns have an order. Names that do not cover all labels are
    # ignored.
    stored_names = parts[0].names
    if not stored_names and len(task.label_columns) > 1:
        stored_names = task.label_columns
    if stored_names and distinct <= set(stored_names):
        class_names = {label: label for label in distinct}
        ordered = stored_names
    else:
        class_names = _merge_equal_numbers(distinct)
        ordered = _ordered(set(class_names.values()))
    task = replace(task, labels=in_known_order(ordered, known_labels))
    _check_label_count(task, parts[0].source)

    encoded = [_encode(task, part_labels, class_names) for part_labels in labels]
    return task, [Examples(rows, values, []) for rows, values in zip(texts, encoded)]


def _check_label_names(part: RawRows) -> None:
    """Raise UserError if every list has one 0 or 1 per label, instead of the names of labels.

    The classes would be "0" and "1", and almost all rows would have both.
    """
    if part.names or not all(isinstance(value, list) for value in part.labels):
        return
    lengths = {len(value) for value in part.labels}
    has_flags = all(item in (0, 1) for value in part.labels for item in value)
    if len(lengths) == 1 and min(lengths) > 1 and has_flags:
        raise row_error(
            part,
            0,
            "a list must contain the names of the row's labels, not a 0 or 1 per label",
            part.labels[0],
            " Write the names, or a column of 0 and 1 per label, and pass the columns as "
            "--label-column.",
        )


def _check_label_count(task: TextTask, source: str) -> None:
    """Raise UserError if a classification has fewer than two labels."""
    labels = task.labels
    if not labels:
        raise UserError(
            f"{source} must contain at least one label or span, got empty lists in all rows. Add "
            "labels, or pass --label-column."
        )
    if len(labels) < 2:
        # scikit-learn treats a single column of 0 and 1 as a classification with two classes.
        remedy = ""
        if task.name == MULTI_LABEL:
            remedy = " Use a column with two values, such as yes and no, for a classification."
        raise UserError(f"{source} must have at least two labels, got {listed(labels)}.{remedy}")


def _texts(part: RawRows) -> list[tuple[str, ...]]:
    """Return the texts of rows, without lone surrogates."""
    rows = []
    for index, row in enumerate(part.texts):
        for text in row:
            if not isinstance(text, str):
                raise row_error(part, index, "a text must be a string", text)
        rows.append(tuple(map(data.replace_surrogates, row)))
    return rows


def _encode(
    task: TextTask, labels: Sequence[Any], class_names: Mapping[str, str]
) -> list[int] | list[list[float]]:
    """Return the class number of each row, or a list of 0 and 1 per row, one per class.

    Args:
        task: Classification or multi-label classification with its labels.
        labels: Label of each row, or its list of labels.
        class_names: Class name of each label.
    """
    if task.name == CLASSIFICATION:
        label2id = {name: number for number, name in enumerate(task.labels)}
        return [label2id[class_names[label]] for label in labels]

    # The loss of a multi-label task takes floats of shape (N, C).
    flags = []
    for row_labels in labels:
        row_names = {class_names[label] for label in row_labels}
        # Constants are shared, so a value takes 8 bytes instead of 32.
        flags.append([1.0 if name in row_names else 0.0 for name in task.labels])
    return flags


# ------------------------------------------------------------------------------------------------
# labels of a row


def _parse_labels(task: TextTask, part: RawRows) -> list[Any]:
    """Return a float, a class name, or a list of class names per row."""
    return [_parse_label(task, part, index, value) for index, value in enumerate(part.labels)]


def _parse_label(task: TextTask, part: RawRows, index: int, value: Any) -> Any:
    """Return a float, a class name, or a list of class names."""
    if task.name == REGRESSION:
        number = finite_number(value)
        if number is None:
            raise row_error(part, index, "the label of a regression must be a number", value)
        return number

    # A parquet file stores the numbers of classes, and their names in its schema.
    def class_name(item: Any) -> str:
        if isinstance(item, (list, dict)):
            raise row_error(part, index, "a label must be a word or a number", value)
        if part.names and isinstance(item, int):
            return class_name_of_id(part, index, item)
        return class_name_of_value(item)

    if task.name == CLASSIFICATION:
        return class_name(value)

    # The labels of a row are the names of its columns with 1.
    if len(task.label_columns) > 1:
        flags = [float(item) if isinstance(item, bool) else finite_number(item) for item in value]
        if not set(flags) <= {0.0, 1.0}:
            raise row_error(part, index, "label columns must contain 0 and 1", value)
        return [column for column, flag in zip(task.label_columns, flags) if flag]

    if not isinstance(value, list):
        if is_unparsed_list(value):
            raise list_error(part, index, value)
        raise row_error(part, index, "several labels must be a list", value)
    # A list of a parquet file may contain null values.
    return [class_name(item) for item in value if not is_missing(item)]


# ------------------------------------------------------------------------------------------------
# class names


def class_name_of_value(value: Any) -> str:
    """Return the class name of a value. The number 1.0 of a column of floats has the name "1"."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return data.replace_surrogates(str(value))


def class_name_of_id(part: RawRows, index: int, class_id: int) -> str:
    """Return the class name of a class id in a parquet file.

    Args:
        part: Rows of the file, which stores its class names.
        index: Index of the row, for the error.
        class_id: Class id in the row.

    Raises:
        UserError: If no class has the id.
    """
    if not 0 <= class_id < len(part.names):
        rule = f"a label must be from 0 to {len(part.names) - 1}, because the file names its labels"
        raise row_error(part, index, rule, class_id)
    return part.names[class_id]


def in_known_order(
    labels: Sequence[str], known_labels: Mapping[str, int] | None
) -> tuple[str, ...]:
    """Return labels in the order of a model that was trained on them, which keeps its head.

    Args:
        labels: Labels of the rows.
        known_labels: Label numbers of the model to start from. Other labels than those of the rows
            have no effect.
    """
    if known_labels is None or set(known_labels) != set(labels):
        return tuple(labels)
    return tuple(sorted(known_labels, key=lambda label: known_labels[label]))


def _merge_equal_numbers(labels: Collection[str]) -> dict[str, str]:
    """Map each label to its class name. If all labels are numbers, 1.0 and 1 are one class.

    pandas writes 1 as 1.0 if a value of the column is missing. Other numbers keep their text, so
    250.1 and 250.10 are two classes.
    """
    if any(finite_number(label) is None for label in labels):
        return {label: label for label in labels}
    # A number without a decimal point may be a code such as 007, which is kept.
    return {
        label: str(int(float(label))) if "." in label and float(label).is_integer() else label
        for label in labels
    }


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Return names in numerical order if all are numbers, otherwise in alphabetical order."""
    distinct = sorted(names)
    numbers = {name: finite_number(name) for name in distinct}
    if all(number is not None for number in numbers.values()):
        return tuple(sorted(distinct, key=lambda name: numbers[name] or 0.0))
    return tuple(distinct)
