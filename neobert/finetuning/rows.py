"""Rows of `neobert finetune`: texts and labels in any columns, and the task that they describe."""

import ast
import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..common import data
from ..common.errors import UserError, listed, shortened
from .tagging import (
    OUTSIDE,
    Bounds,
    bio_names,
    is_bio,
    join_words,
    split_words,
    tags_from_spans,
    to_bio,
)


logger = logging.getLogger("neobert.finetuning")

CLASSIFICATION = "classification"
MULTI_LABEL = "multi-label"
REGRESSION = "regression"
TOKENS = "tokens"

# Whole numbers with more different values than this are labels of a regression.
_MAX_NUMERIC_CLASSES = 50
# Usual names of the columns; the first one that a file has is used.
_TEXT_COLUMNS = ("text", "sentence", "tokens")
_LABEL_COLUMNS = ("label", "labels", "tags", "ner_tags", "entities", "spans", "score")
# Usual names of columns with the words of a text, and their tags.
_WORD_COLUMN = "tokens"
_TAG_COLUMNS = ("tags", "ner_tags")
# Usual names of columns with lists only.
_LIST_COLUMNS = (*_TAG_COLUMNS, "entities", "spans")
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
            remedy = f"Pass --{name}-column."
            # A table with other separators is read as a single column.
            if len(first) == 1 and ";" in next(iter(first)):
                remedy = "Separate the columns by commas instead of ';', or by tabs in a .tsv file."
            raise UserError(f"{source} has no column {wanted}; it has {listed(first)}. {remedy}")
        return tuple(columns)

    texts = choose(text_columns, _TEXT_COLUMNS, "text")
    labels = choose(label_columns, _LABEL_COLUMNS, "label")
    # Tags belong to words, even if the row also contains the text of the words.
    if text_columns is None and labels[0] in _TAG_COLUMNS and _WORD_COLUMN in first:
        words = parsed_list(first[_WORD_COLUMN])
        count = _word_count(words, first[labels[0]])
        if count is not None and (isinstance(words, list) or count > 1):
            texts = (_WORD_COLUMN,)
    if both := sorted(set(texts) & set(labels)):
        raise UserError(
            f"`text_column` and `label_column` must be different columns, got {listed(both)}."
        )
    return texts, labels


def read_rows(source: str, text_columns: Sequence[str], label_columns: Sequence[str]) -> RawRows:
    """Return the rows of a source that have a text and a label.

    Raises:
        UserError: If the source cannot be read, or no row has both.
    """
    texts = []
    labels = []
    omitted = 0
    names = _parquet_class_names(source, label_columns)
    for row in data.rows(source, [*text_columns, *label_columns]):
        row_texts = tuple(row[name] for name in text_columns)
        values = [parsed_list(row[name]) for name in label_columns]
        # `datasets` stores a missing class label as -1.
        if names and isinstance(values[0], int) and values[0] < 0:
            values = [None]
        # Rows without a text or a label are counted and reported.
        if any(_is_missing(value) for value in (*row_texts, *values)):
            omitted += 1
            continue
        texts.append(row_texts)
        labels.append(values if len(values) > 1 else values[0])
    if not texts:
        raise UserError(
            f"{source} must contain rows with a text and a label, got {omitted:,} rows without."
        )
    return RawRows(source, texts, labels, omitted, names)


def infer_task(
    raw: RawRows, text_columns: Sequence[str], label_columns: Sequence[str], name: str = "auto"
) -> TextTask:
    """Return the task that rows describe, without its labels.

    Args:
        raw: Training rows.
        text_columns: Names of the columns with a text, or with the texts of a pair.
        label_columns: Names of the columns with labels.
        name: Name of the task, or "auto" to infer the task.
    """
    if name == "auto":
        name = _infer_name(raw, text_columns, label_columns)
    if name == TOKENS and len(text_columns) > 1:
        raise UserError("token classification needs one text column, got two.")
    return TextTask(name, tuple(text_columns), tuple(label_columns))


def encode_rows(
    task: TextTask, parts: Sequence[RawRows], known_labels: Mapping[str, int] | None = None
) -> tuple[TextTask, list[Examples]]:
    """Return a task with its labels, and the rows of every part with encoded labels.

    Args:
        task: Task without labels.
        parts: Rows of files. The labels are those of all files.
        known_labels: Label numbers of the model to start from. They are kept if its labels are the
            same.

    Raises:
        UserError: If a value cannot be a label or a text of the task.
    """
    if task.name == TOKENS:
        return _encode_tags(task, parts, known_labels)

    if task.name == MULTI_LABEL and len(task.label_columns) == 1:
        _check_label_names(parts[0])

    # A value is a float, a class name, or a list of class names.
    texts = [_texts(part) for part in parts]
    values = [
        [_parse_label(task, part, number, value) for number, value in enumerate(part.labels)]
        for part in parts
    ]
    if task.name == REGRESSION:
        return task, [Examples(rows, labels, []) for rows, labels in zip(texts, values)]

    # The numbers of the labels follow from all parts, so a rare label of the test is known.
    used: Counter = Counter()
    for part_labels in values:
        for label in part_labels:
            used.update(label if task.name == MULTI_LABEL else [label])
    # Stored class names and label columns have an order. Names that do not cover all labels are
    # ignored.
    names = parts[0].names or (task.label_columns if len(task.label_columns) > 1 else ())
    if not set(used) <= set(names):
        names = ()
    class_names = {name: name for name in used} if names else _merge_equal_numbers(used)
    ordered = tuple(names) or _ordered(set(class_names.values()))
    labels = tuple(_with_known_order(ordered, known_labels))
    if not labels:
        raise UserError(
            f"{parts[0].source} must contain at least one label or span, got empty lists in all "
            "rows. Add labels, or pass --label-column."
        )
    if len(labels) < 2:
        # scikit-learn treats a single column of 0 and 1 as a classification with two classes.
        remedy = ""
        if task.name == MULTI_LABEL:
            remedy = " Use a column with two values, such as yes and no, for a classification."
        raise UserError(
            f"{parts[0].source} must have at least two labels, got {listed(labels)}.{remedy}"
        )

    # The loss of a multi-label task takes floats of shape (N, C).
    task = replace(task, labels=labels)
    label2id = {label: index for index, label in enumerate(labels)}
    encoded = []
    for rows, row_labels in zip(texts, values):
        if task.name == MULTI_LABEL:
            coded: list[Any] = []
            for row in row_labels:
                row_names = {class_names[label] for label in row}
                # Constants are shared, so a value takes 8 bytes instead of 32.
                coded.append([1.0 if name in row_names else 0.0 for name in labels])
        else:
            coded = [label2id[class_names[label]] for label in row_labels]
        encoded.append(Examples(rows, coded, []))
    return task, encoded


# ------------------------------------------------------------------------------------------------
# values


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


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


def _is_unparsed_list(value: Any) -> bool:
    """Return whether a cell has the brackets of a list, but is not a list in JSON or Python."""
    has_brackets = isinstance(value, str) and value.startswith("[") and value.endswith("]")
    return has_brackets and not isinstance(parsed_list(value), list)


def _number(value: Any) -> float | None:
    """Return a value as a finite number, or None if it is not a number."""
    # A bool is an int for Python, but a class here.
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _class_name_of_value(value: Any) -> str:
    """Return the class name of a value. The number 1.0 of a column of floats has the name "1"."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return data.replace_surrogates(str(value))


def _merge_equal_numbers(labels: Collection[str]) -> dict[str, str]:
    """Map each label to its class name. If all labels are numbers, 1.0 and 1 are one class.

    pandas writes 1 as 1.0 if a value of the column is missing. Other numbers keep their text, so
    250.1 and 250.10 are two classes.
    """
    if any(_number(label) is None for label in labels):
        return {label: label for label in labels}
    # A number without a decimal point may be a code such as 007, which is kept.
    return {
        label: str(int(float(label))) if "." in label and float(label).is_integer() else label
        for label in labels
    }


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Return names in numerical order if all are numbers, otherwise in alphabetical order."""
    distinct = sorted(names)
    numbers = {name: _number(name) for name in distinct}
    if all(number is not None for number in numbers.values()):
        return tuple(sorted(distinct, key=lambda name: numbers[name] or 0.0))
    return tuple(distinct)


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


def _infer_name(raw: RawRows, text_columns: Sequence[str], label_columns: Sequence[str]) -> str:
    if len(label_columns) > 1:
        return MULTI_LABEL
    _check_lists(raw, text_columns, label_columns[0])
    # Words and tags may be separated by spaces. Rows of a single word could have plain labels.
    if tuple(text_columns) == (_WORD_COLUMN,) and label_columns[0] in _TAG_COLUMNS:
        counts = [_word_count(text, tags) for (text,), tags in zip(raw.texts, raw.labels)]
        if None not in counts and any((count or 0) > 1 for count in counts):
            return TOKENS
    # Lists are tags if the text is a list of words, or if they contain spans. Others are sets of
    # labels.
    if all(isinstance(value, list) for value in raw.labels):
        is_split = all(isinstance(parsed_list(text), list) for (text, *_) in raw.texts)
        items = [item for value in raw.labels for item in value]
        has_spans = bool(items) and all(isinstance(item, dict) for item in items)
        return TOKENS if is_split or has_spans else MULTI_LABEL

    # Words are classes. Whole numbers are classes if there are few of them, otherwise values.
    numbers = [_number(value) for value in raw.labels]
    if raw.names:
        return CLASSIFICATION
    if None in numbers:
        _check_no_regression(raw, numbers)
        return CLASSIFICATION
    is_whole = all(float(number or 0).is_integer() for number in numbers)
    is_small = len(set(numbers)) <= _MAX_NUMERIC_CLASSES
    return CLASSIFICATION if is_whole and is_small else REGRESSION


def _check_lists(raw: RawRows, text_columns: Sequence[str], label_column: str) -> None:
    """Raise UserError if a cell contains a list that cannot be parsed."""
    remedy = " If the labels are class names, pass --task classification."
    has_lists = any(isinstance(value, list) for value in raw.labels)
    is_list_column = has_lists or label_column in _LIST_COLUMNS
    for number, value in enumerate(raw.labels):
        # In other columns, "[x]" may be a class name.
        if not _is_unparsed_list(value):
            continue
        if is_list_column or _LIST_START.match(value):
            raise _list_error(raw, number, value, remedy)

    # Lists of tags belong to lists of words.
    if tuple(text_columns) != (_WORD_COLUMN,):
        return
    for number, ((text,), value) in enumerate(zip(raw.texts, raw.labels)):
        if isinstance(value, list) and _is_unparsed_list(text):
            raise _list_error(raw, number, text)


def _list_error(part: RawRows, number: int, value: str, remedy: str = "") -> UserError:
    rule = "a list must be in JSON"
    return _row_error(part, number, rule, value, f' Write lists such as ["a", "b"].{remedy}')


def _check_no_regression(raw: RawRows, numbers: Sequence[float | None]) -> None:
    """Raise UserError if most labels are different numbers, so the others are probably errors."""
    if len(set(numbers) - {None}) > len(numbers) / 2:
        number = numbers.index(None)
        raise _row_error(
            raw,
            number,
            "the label of a regression must be a number",
            raw.labels[number],
            " Most labels are different numbers. Correct or remove the row and pass --task "
            "regression, or pass --task classification.",
        )


def _word_count(text: Any, tags: Any) -> int | None:
    """Return the number of words of a row, or None if it does not have one tag per word."""
    words = _split_cell(text)
    word_tags = _split_cell(tags)
    is_list = isinstance(words, list) and isinstance(word_tags, list)
    return len(words) if is_list and len(words) == len(word_tags) else None


def _split_cell(value: Any) -> Any:
    """Return the items of a cell, which is a list or has its items separated by spaces."""
    items = parsed_list(value)
    return items.split() if isinstance(items, str) else items


def _texts(part: RawRows) -> list[tuple[str, ...]]:
    rows = []
    for number, row in enumerate(part.texts):
        for text in row:
            if not isinstance(text, str):
                raise _row_error(part, number, "a text must be a string", text)
        rows.append(tuple(map(data.replace_surrogates, row)))
    return rows


def _row_error(part: RawRows, number: int, rule: str, value: Any, remedy: str = "") -> UserError:
    shown = shortened(json.dumps(value, default=str), 60)
    return UserError(f"{part.source}, labeled row {number + 1:,}: {rule}, got {shown}.{remedy}")


def _parse_label(task: TextTask, part: RawRows, number: int, value: Any) -> Any:
    """Return a float, a class name, or a list of class names."""
    if task.name == REGRESSION:
        label = _number(value)
        if label is None:
            raise _row_error(part, number, "the label of a regression must be a number", value)
        return label

    # A parquet file stores the numbers of classes, and their names in its schema.
    def name(item: Any) -> str:
        if isinstance(item, (list, dict)):
            raise _row_error(part, number, "a label must be a word or a number", value)
        if part.names and isinstance(item, int):
            return _class_name_of_id(part, number, item)
        return _class_name_of_value(item)

    if task.name == CLASSIFICATION:
        return name(value)
    # The labels of a row are the names of its columns with 1.
    if len(task.label_columns) > 1:
        flags = [_number(item) if not isinstance(item, bool) else float(item) for item in value]
        if not set(flags) <= {0.0, 1.0}:
            raise _row_error(part, number, "label columns must contain 0 and 1", value)
        return [column for column, flag in zip(task.label_columns, flags) if flag]
    if not isinstance(value, list):
        if _is_unparsed_list(value):
            raise _list_error(part, number, value)
        raise _row_error(part, number, "several labels must be a list", value)
    # A list of a parquet file may contain null values.
    return [name(item) for item in value if not _is_missing(item)]


def _check_label_names(part: RawRows) -> None:
    """Raise UserError if every list has one 0 or 1 per label, instead of the names of labels.

    The classes would be "0" and "1", and almost all rows would have both.
    """
    if part.names or not all(isinstance(value, list) for value in part.labels):
        return
    lengths = {len(value) for value in part.labels}
    has_flags = all(item in (0, 1) for value in part.labels for item in value)
    if len(lengths) == 1 and min(lengths) > 1 and has_flags:
        raise _row_error(
            part,
            0,
            "a list must contain the names of the row's labels, not a 0 or 1 per label",
            part.labels[0],
            " Write the names, or a column of 0 and 1 per label, and pass the columns as "
            "--label-column.",
        )


def _class_name_of_id(part: RawRows, number: int, item: int) -> str:
    """Return the class name of a class id in a parquet file."""
    if not 0 <= item < len(part.names):
        rule = f"a label must be from 0 to {len(part.names) - 1}, because the file names its labels"
        raise _row_error(part, number, rule, item)
    return part.names[item]


def _encode_tags(
    task: TextTask, parts: Sequence[RawRows], known_labels: Mapping[str, int] | None
) -> tuple[TextTask, list[Examples]]:
    """Return a task of token classification with its tags, and the rows of every part."""
    # Spans and lists become one tag per word in both cases.
    encoded = []
    # `neobert predict` splits the words in the same way.
    has_spaces = False
    for part in parts:
        has_spaces |= any(
            isinstance(parsed_list(text), str) and not _has_spans(value)
            for (text,), value in zip(part.texts, part.labels)
        )
        rows = [_tag_words(part, number) for number in range(len(part.texts))]
        encoded.append(
            Examples(
                texts=[(row.text,) for row in rows],
                labels=[row.tags for row in rows],
                words=[row.words for row in rows],
            )
        )
        if num_lost_spans := sum(row.num_lost_spans for row in rows):
            logger.warning(
                "%s: %s spans are left out, because they overlap another span or contain no word.",
                part.source,
                f"{num_lost_spans:,}",
            )

    # Tags with B- and I- are entities. Others, such as parts of speech, are tags of single words.
    names = {tag for examples in encoded for tags in examples.labels for tag in tags}
    bio = is_bio(names)
    if bio:
        # Entities have B- and I- tags of every type, even if the rows do not contain all of them.
        for examples in encoded:
            examples.labels[:] = [to_bio(tags) for tags in examples.labels]
        types = sorted({name[2:] for name in names if name[1:2] == "-"})
        if not types:
            raise UserError(f"{parts[0].source} must contain an entity, got none.")
        labels = bio_names(types)
    else:
        labels = sorted(names)
    ordered = tuple(_with_known_order(labels, known_labels))
    return replace(task, labels=ordered, bio=bio, has_spaces=has_spaces), encoded


def _with_known_order(
    labels: Sequence[str], known_labels: Mapping[str, int] | None
) -> Sequence[str]:
    """Return labels in the order of a model that was trained on them, which keeps its head."""
    if known_labels is None or set(known_labels) != set(labels):
        return labels
    return sorted(known_labels, key=lambda label: known_labels[label])


class _TaggedText(NamedTuple):
    """Text of a row with one tag per word.

    Attributes:
        text: Text.
        tags: Tags of the words.
        words: Bounds of the words.
        num_lost_spans: Number of spans that overlap another span or contain no word.
    """

    text: str
    tags: list[str]
    words: Bounds
    num_lost_spans: int


def _tag_words(part: RawRows, number: int) -> _TaggedText:
    """Return the text of a row with one tag per word. The row has spans, or words and tags."""
    (text,) = part.texts[number]
    value = part.labels[number]
    # An empty list is a text without a span.
    if isinstance(text, str) and _has_spans(value):
        for span in value:
            if not 0 <= span["start"] < span["end"] <= len(text):
                raise _row_error(part, number, "a span must be inside the text", span)
        text = data.replace_surrogates(text)
        words = split_words(text)
        tags, lost = tags_from_spans(value, words)
        return _TaggedText(text, [*map(_class_name_of_value, tags)], words, lost)

    # A csv file has tokens and tags as lists, or as texts separated by spaces. A text that is
    # separated by spaces may have brackets.
    if _is_unparsed_list(value):
        raise _list_error(part, number, value)
    if isinstance(value, list) and _is_unparsed_list(text):
        raise _list_error(part, number, text)
    tokens = _split_cell(text)
    tags = _split_cell(value)
    if _word_count(tokens, tags) is None:
        rule = "tokens and tags must be lists of the same length, or spans of a text"
        raise _row_error(part, number, rule, value)
    if part.names:
        tags = [
            _class_name_of_id(part, number, tag) if isinstance(tag, int) else tag for tag in tags
        ]
    if not all(isinstance(item, str) for item in (*tokens, *tags)):
        raise _row_error(part, number, "tokens and tags must be strings", value)
    joined, words = join_words(tokens)
    text = data.replace_surrogates(joined)
    return _TaggedText(text, [*map(_class_name_of_value, tags)], words, num_lost_spans=0)


def _has_spans(values: Any) -> bool:
    """Return whether values are a list of spans: mappings with "start", "end" and "label"."""
    return isinstance(values, list) and all(
        isinstance(item, dict)
        and isinstance(item.get("start"), int)
        and isinstance(item.get("end"), int)
        and isinstance(item.get("label"), str)
        for item in values
    )
