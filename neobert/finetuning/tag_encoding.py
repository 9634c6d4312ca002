"""Encoding of token classification: one tag per word, from spans or from words and tags."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..common import data
from ..common.errors import UserError
from .label_encoding import class_name_of_id, class_name_of_value, in_known_order
from .rows import (
    RawRows,
    is_unparsed_list,
    list_error,
    parsed_list,
    row_error,
    split_cell,
    word_count,
)
from .tagging import Bounds, bio_names, is_bio, join_words, split_words, tags_from_spans, to_bio
from .text_tasks import Examples, TextTask


logger = logging.getLogger("neobert.finetuning")


def encode_tags(
    task: TextTask, parts: Sequence[RawRows], known_labels: Mapping[str, int] | None = None
) -> tuple[TextTask, list[Examples]]:
    """Return a task of token classification with its tags, and the rows of every part.

    Args:
        task: Token classification without labels.
        parts: Rows of files. The tags are those of all files.
        known_labels: Label numbers of the model to start from. They are kept if its labels are the
            same.

    Raises:
        UserError: If a row has neither spans nor one tag per word, or no row has an entity.
    """
    # Spans and lists become one tag per word in both cases.
    encoded = []
    # `neobert predict` splits the words in the same way.
    has_spaces = False
    for part in parts:
        has_spaces |= any(
            isinstance(parsed_list(text), str) and not _has_spans(value)
            for (text,), value in zip(part.texts, part.labels)
        )
        encoded.append(_tag_part(part))

    # Tags with B- and I- are entities. Others, such as parts of speech, are tags of single words.
    tag_names: set[str] = set()
    for examples in encoded:
        tag_names.update(*examples.labels)
    bio = is_bio(tag_names)
    if bio:
        # Entities have B- and I- tags of every type, even if the rows do not contain all of them.
        for examples in encoded:
            examples.labels[:] = [to_bio(tags) for tags in examples.labels]
        types = sorted({name[2:] for name in tag_names if name[1:2] == "-"})
        if not types:
            raise UserError(f"{parts[0].source} must contain an entity, got none.")
        labels = bio_names(types)
    else:
        labels = sorted(tag_names)

    labels_in_order = in_known_order(labels, known_labels)
    return replace(task, labels=labels_in_order, bio=bio, has_spaces=has_spaces), encoded


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
    num_lost_spans: int = 0


def _tag_part(part: RawRows) -> Examples:
    """Return the rows of a file with their tags as they are, and warn about spans without a tag."""
    rows = [_tag_words(part, index) for index in range(len(part.texts))]
    if num_lost_spans := sum(row.num_lost_spans for row in rows):
        logger.warning(
            "%s: %s spans are left out, because they overlap another span or contain no word.",
            part.source,
            f"{num_lost_spans:,}",
        )
    return Examples(
        texts=[(row.text,) for row in rows],
        labels=[row.tags for row in rows],
        words=[row.words for row in rows],
    )


def _tag_words(part: RawRows, index: int) -> _TaggedText:
    """Return the text of a row with one tag per word. The row has spans, or words and tags."""
    (text,) = part.texts[index]
    value = part.labels[index]
    # An empty list is a text without a span.
    if isinstance(text, str) and _has_spans(value):
        return _tag_spans(part, index, text, value)
    return _join_tagged_words(part, index, text, value)


def _has_spans(values: Any) -> bool:
    """Return whether values are a list of spans: mappings with "start", "end" and "label"."""
    return isinstance(values, list) and all(
        isinstance(item, dict)
        and isinstance(item.get("start"), int)
        and isinstance(item.get("end"), int)
        and isinstance(item.get("label"), str)
        for item in values
    )


def _tag_spans(
    part: RawRows, index: int, text: str, spans: Sequence[Mapping[str, Any]]
) -> _TaggedText:
    """Return a text whose words have the tags of the spans around them."""
    for span in spans:
        if not 0 <= span["start"] < span["end"] <= len(text):
            raise row_error(part, index, "a span must be inside the text", span)

    text = data.replace_surrogates(text)
    words = split_words(text)
    tags, num_lost_spans = tags_from_spans(spans, words)
    return _TaggedText(text, [class_name_of_value(tag) for tag in tags], words, num_lost_spans)


def _join_tagged_words(part: RawRows, index: int, text: Any, value: Any) -> _TaggedText:
    """Return words as one text, with their tags.

    A csv file has words and tags as lists, or as texts separated by spaces.

    Args:
        part: Rows of the file.
        index: Index of the row.
        text: Value of the text column.
        value: Value of the label column.
    """
    # A text that is separated by spaces may have brackets.
    if is_unparsed_list(value):
        raise list_error(part, index, value)
    if isinstance(value, list) and is_unparsed_list(text):
        raise list_error(part, index, text)

    words = split_cell(text)
    tags = split_cell(value)
    if word_count(words, tags) is None:
        rule = "tokens and tags must be lists of the same length, or spans of a text"
        raise row_error(part, index, rule, value)
    if part.names:
        tags = [class_name_of_id(part, index, tag) if isinstance(tag, int) else tag for tag in tags]
    if not all(isinstance(item, str) for item in (*words, *tags)):
        raise row_error(part, index, "tokens and tags must be strings", value)

    joined, bounds = join_words(words)
    tags = [class_name_of_value(tag) for tag in tags]
    return _TaggedText(data.replace_surrogates(joined), tags, bounds)
