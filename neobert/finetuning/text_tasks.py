"""Tasks of `neobert finetune`: their labels and examples, and how rows determine the task."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.errors import UserError, listed
from ..common.task_file import CLASSIFICATION, MULTI_LABEL, REGRESSION, TOKENS
from .rows import (
    LIST_COLUMNS,
    TAG_COLUMNS,
    WORD_COLUMN,
    RawRows,
    finite_number,
    is_unparsed_list,
    list_error,
    parsed_list,
    row_error,
    word_count,
)
from .tagging import OUTSIDE, Bounds


# Whole numbers with more different values than this are labels of a regression.
_MAX_NUMERIC_CLASSES = 50
# Start of a list of strings or mappings in a cell.
_LIST_START = re.compile(r"\[\s*['\"{]")
# Metrics of a task, the default one first, and its `problem_type` in a configuration.
_METRICS = {
    CLASSIFICATION: ("accuracy", "macro_f1", "matthews"),
    MULTI_LABEL: ("micro_f1", "macro_f1", "accuracy"),
    REGRESSION: ("spearman", "pearson"),
    TOKENS: ("entity_f1",),
}
_PROBLEMS = {
    CLASSIFICATION: "single_label_classification",
    MULTI_LABEL: "multi_label_classification",
    REGRESSION: "regression",
    TOKENS: None,
}


@dataclass(frozen=True)
class TextTask:
    """Task that labeled rows describe.

    Attributes:
        name: "classification", "multi-label", "regression" or "tokens".
        text_columns: Column of the text, or the two columns of a pair.
        label_columns: Column of the label, or the columns of 0 and 1.
        labels: Class or tag names in the order of their numbers; empty for regression.
        bio: Whether tags are those of the BIO scheme.
        has_spaces: Whether the words of token classification are separated by spaces in a string.
    """

    name: str
    text_columns: tuple[str, ...]
    label_columns: tuple[str, ...]
    labels: tuple[str, ...] = ()
    bio: bool = False
    has_spaces: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics, the default one first."""
        if self.name == TOKENS and not self.bio:
            return ("word_accuracy",)
        return _METRICS[self.name]

    @property
    def problem_type(self) -> str | None:
        """`problem_type` of the model's configuration."""
        return _PROBLEMS[self.name]

    def describe(self) -> str:
        """Return the task in words: "classification of pairs with 3 labels"."""
        if self.name == TOKENS:
            scheme = "entities of the types" if self.bio else "words with the tags"
            # "B-PER" and "I-PER" are of one type; plain tags are types themselves.
            types = {name.removeprefix("B-") for name in self.labels if name[:2] != "I-"}
            if self.bio:
                types.discard(OUTSIDE)
            return f"token classification: {scheme} {listed(sorted(types), 10)}"

        unit = "pairs" if len(self.text_columns) == 2 else "texts"
        if self.name == REGRESSION:
            return f"regression of {unit}"
        name = "multi-label classification" if self.name == MULTI_LABEL else "classification"
        return f"{name} of {unit} with {len(self.labels)} labels: {listed(self.labels, 10)}"


@dataclass(frozen=True)
class Examples:
    """N labeled rows of a task.

    Attributes:
        texts: One or two texts per row.
        labels: Per row a class number; a list of 0 and 1, one per class; a float; or a list of
            tags, one per word.
        words: Bounds of the words of each text, for token classification.
    """

    texts: list[tuple[str, ...]]
    labels: list[Any]
    words: list[Bounds]

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: Iterable[int]) -> "Examples":
        """Return the rows at the indices."""
        rows = list(indices)
        return Examples(
            texts=[self.texts[i] for i in rows],
            labels=[self.labels[i] for i in rows],
            words=[self.words[i] for i in rows] if self.words else [],
        )

    def digest(self) -> str:
        """Return a digest of 12 hexadecimal digits of the rows."""
        content = json.dumps([self.texts, self.labels, self.words])
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:12]


# ------------------------------------------------------------------------------------------------
# inference


def infer_task(
    raw: RawRows, text_columns: Sequence[str], label_columns: Sequence[str], name: str = "auto"
) -> TextTask:
    """Return the task that rows describe, without its labels.

    Args:
        raw: Training rows.
        text_columns: Names of the columns with a text, or with the texts of a pair.
        label_columns: Names of the columns with labels.
        name: Name of the task, or "auto" to infer the task.

    Raises:
        UserError: If the task cannot be inferred, because a list cannot be parsed or a few labels
            of a regression are not numbers, or if token classification has two text columns.
    """
    if name == "auto":
        name = _infer_name(raw, text_columns, label_columns)
    if name == TOKENS and len(text_columns) > 1:
        raise UserError("token classification needs one text column, got two.")
    return TextTask(name, tuple(text_columns), tuple(label_columns))


def _infer_name(raw: RawRows, text_columns: Sequence[str], label_columns: Sequence[str]) -> str:
    """Return the name of the task that rows describe."""
    if len(label_columns) > 1:
        return MULTI_LABEL
    _check_lists(raw, text_columns, label_columns[0])

    # Words and tags may be separated by spaces. Rows of a single word could have plain labels.
    if tuple(text_columns) == (WORD_COLUMN,) and label_columns[0] in TAG_COLUMNS:
        counts = [word_count(text, tags) for (text,), tags in zip(raw.texts, raw.labels)]
        if None not in counts and any((count or 0) > 1 for count in counts):
            return TOKENS

    # Lists are tags if the text is a list of words, or if they contain spans. Others are sets of
    # labels.
    if all(isinstance(value, list) for value in raw.labels):
        has_words = all(isinstance(parsed_list(text), list) for (text, *_) in raw.texts)
        items = [item for value in raw.labels for item in value]
        has_spans = bool(items) and all(isinstance(item, dict) for item in items)
        return TOKENS if has_words or has_spans else MULTI_LABEL

    # Words are classes, and so are the numbers of classes whose names the file stores.
    if raw.names:
        return CLASSIFICATION
    numbers = [finite_number(value) for value in raw.labels]
    if None in numbers:
        _check_no_regression(raw, numbers)
        return CLASSIFICATION

    # Whole numbers are classes if there are few of them, otherwise values.
    is_whole = all(float(number or 0).is_integer() for number in numbers)
    is_small = len(set(numbers)) <= _MAX_NUMERIC_CLASSES
    return CLASSIFICATION if is_whole and is_small else REGRESSION


def _check_lists(raw: RawRows, text_columns: Sequence[str], label_column: str) -> None:
    """Raise UserError if a cell contains a list that cannot be parsed."""
    remedy = " If the labels are class names, pass --task classification."
    has_lists = any(isinstance(value, list) for value in raw.labels)
    is_list_column = has_lists or label_column in LIST_COLUMNS
    for index, value in enumerate(raw.labels):
        # In other columns, "[x]" may be a class name.
        if not is_unparsed_list(value):
            continue
        if is_list_column or _LIST_START.match(value):
            raise list_error(raw, index, value, remedy)

    # Lists of tags belong to lists of words.
    if tuple(text_columns) != (WORD_COLUMN,):
        return
    for index, ((text,), value) in enumerate(zip(raw.texts, raw.labels)):
        if isinstance(value, list) and is_unparsed_list(text):
            raise list_error(raw, index, text)


def _check_no_regression(raw: RawRows, numbers: Sequence[float | None]) -> None:
    """Raise UserError if most labels are different numbers, so the others are probably errors.

    Args:
        raw: Training rows.
        numbers: Label of each row as a number; None for labels that are not numbers.
    """
    if len(set(numbers) - {None}) > len(numbers) / 2:
        index = numbers.index(None)
        raise row_error(
            raw,
            index,
            "the label of a regression must be a number",
            raw.labels[index],
            " Most labels are different numbers. Correct or remove the row and pass --task "
            "regression, or pass --task classification.",
        )
