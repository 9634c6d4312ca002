"""Words, tags and entities of token classification.

A text is divided into words. The first token of a word carries the tag of the word. Tags are those
of the BIO scheme (`B-PER`, `I-PER`, `O`), or one plain tag per word, such as parts of speech.
Characters are counted from 0, and `end` is the character after the last one.
"""

import bisect
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


Bounds = list[tuple[int, int]]

OUTSIDE = "O"
# In scripts without spaces every character is a word.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Marks, such as the vowel signs of Hindi and combining accents, and joiners are parts of words, but
# not of \w.
_MARKS = "\u200c\u200d" + "".join(
    chr(code) for code in range(0x10000) if unicodedata.category(chr(code)).startswith("M")
)
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}](?:[^\W{_CJK}]|[{_MARKS}])*|[^\w\s]")
# Prefixes of the BIOES and BILOU schemes, and those of BIO.
_PREFIXES = {"B": "B", "I": "I", "E": "I", "L": "I", "S": "B", "U": "B"}
_SINGLE = ("S", "U")


@dataclass(frozen=True)
class Entity:
    """Entity in a text.

    Attributes:
        start: First character.
        end: Character after the last one.
        label: Type of the entity, or the tag of a plain scheme.
        first: Index of the first word.
        stop: Index after the last word.
    """

    start: int
    end: int
    label: str
    first: int
    stop: int


def split_words(text: str) -> Bounds:
    """Return the bounds of the words of a text: runs of letters and digits, and single symbols."""
    return [match.span() for match in _WORD.finditer(text)]


def split_at_spaces(text: str) -> Bounds:
    """Return the bounds of the words of a text that are separated by spaces."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def join_words(words: Sequence[str]) -> tuple[str, Bounds]:
    """Return words as one text with spaces between them, and their bounds."""
    bounds = []
    start = 0
    for word in words:
        bounds.append((start, start + len(word)))
        start += len(word) + 1
    return " ".join(words), bounds


def is_bio(tags: Iterable[str]) -> bool:
    """Return whether all tags have the form `B-TYPE`, or are `O`."""
    return all(tag == OUTSIDE or (tag[:1] in _PREFIXES and tag[1:2] == "-") for tag in tags)


def to_bio(tags: Sequence[str]) -> list[str]:
    """Return tags of BIO, BIOES or BILOU in the BIO scheme; an entity always starts with `B-`."""
    # `previous` is the type of the entity that the word before belongs to.
    converted = []
    previous = OUTSIDE
    for tag in tags:
        if tag == OUTSIDE:
            converted.append(tag)
            previous = OUTSIDE
            continue
        prefix = _PREFIXES[tag[0]]
        label = tag[2:]
        # The IOB1 scheme starts an entity with I-, unless it directly follows another one of its
        # type.
        if prefix == "I" and label != previous:
            prefix = "B"
        converted.append(f"{prefix}-{label}")
        # An entity of one word ends with this word.
        previous = OUTSIDE if tag[0] in _SINGLE else label
    return converted


def bio_names(labels: Iterable[str]) -> list[str]:
    """Return the tags of entity types: `O`, then `B-` and `I-` of every type."""
    names = [OUTSIDE]
    for label in labels:
        names += [f"B-{label}", f"I-{label}"]
    return names


def tags_from_spans(spans: Sequence[Mapping[str, Any]], words: Bounds) -> tuple[list[str], int]:
    """Return the BIO tags of words from labeled spans of characters.

    A word belongs to a span that contains one of its characters. If spans overlap, the one that
    starts first is used, and the longest of those that start together.

    Args:
        spans: Spans with "start", "end" and "label".
        words: Bounds of the words.

    Returns:
        The tags, and the number of spans that are not used.
    """
    # Longer spans come first, so nested spans lose against the span around them.
    tags = [OUTSIDE] * len(words)
    # Words do not overlap, so their starts and ends are sorted.
    starts = [start for start, _ in words]
    ends = [end for _, end in words]
    lost = 0
    for span in sorted(spans, key=lambda item: (item["start"], -item["end"])):
        first = bisect.bisect_right(ends, span["start"])
        inside = range(first, bisect.bisect_left(starts, span["end"]))
        if not inside or any(tags[index] != OUTSIDE for index in inside):
            lost += 1
            continue
        for index in inside:
            tags[index] = f"I-{span['label']}"
        tags[inside[0]] = f"B-{span['label']}"
    return tags, lost


def token_positions(
    words: Bounds | np.ndarray, offsets: Sequence[tuple[int, int]] | np.ndarray
) -> np.ndarray:
    """Return the index of the first token of each word, -1 for a word without a token, (W,).

    Args:
        words: (W, 2) bounds of the words.
        offsets: (N, 2) bounds of the tokens; those of special tokens are empty.
    """
    # Special tokens have no characters, and cannot be the token of a word.
    bounds = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    kept = np.flatnonzero(bounds[:, 0] < bounds[:, 1])
    if not len(words) or not len(kept):
        return np.full(len(words), -1)

    word_bounds = np.asarray(words, dtype=np.int64)
    # The first token that ends after the start of the word.
    candidates = np.searchsorted(bounds[kept, 1], word_bounds[:, 0], side="right")
    is_inside = candidates < len(kept)
    candidates = np.minimum(candidates, len(kept) - 1)
    # This token belongs to the word unless it starts after the end of the word.
    is_inside &= bounds[kept[candidates], 0] < word_bounds[:, 1]
    return np.where(is_inside, kept[candidates], -1)


def predicted_tags(labels: Sequence[str], logits: np.ndarray, has_logits: np.ndarray) -> list[str]:
    """Return the tag of each word; `O` for a word that was truncated, even if `O` is no label.

    Args:
        labels: Tags in the order of their numbers.
        logits: (W, C) logits or probabilities of the words.
        has_logits: (W,) whether the model has seen each word.
    """
    return [
        labels[number] if seen else OUTSIDE
        for number, seen in zip(logits.argmax(axis=-1), has_logits)
    ]


def find_entities(tags: Sequence[str], words: Bounds, bio: bool = True) -> list[Entity]:
    """Return the entities of a tagged text.

    With plain tags, every word that is not tagged `O` is an entity.

    Args:
        tags: Tags of the words.
        words: Bounds of the words.
        bio: Whether the tags are those of the BIO scheme.
    """
    entities: list[Entity] = []
    for index, tag in enumerate(tags):
        if tag == OUTSIDE:
            continue
        # An I- tag continues an entity of its label right before it; otherwise it begins one.
        label = tag[2:] if bio else tag
        start, end = words[index]
        last = entities[-1] if entities else None
        continues = bio and tag[0] == "I" and last is not None
        if continues and last is not None and (last.stop, last.label) == (index, label):
            entities[-1] = Entity(last.start, end, label, last.first, index + 1)
        else:
            entities.append(Entity(start, end, label, index, index + 1))
    return entities


def tag_counts(truth: Sequence[str], predicted: Sequence[str], bio: bool) -> tuple[int, int, int]:
    """Return the numbers of correct, predicted and true entities of a text.

    With plain tags, words are counted instead of entities.

    Args:
        truth: True tags of the words, (W,).
        predicted: Predicted tags of the words, (W,).
        bio: Whether the tags are those of the BIO scheme.
    """
    if not bio:
        correct = sum(a == b for a, b in zip(truth, predicted))
        return correct, len(predicted), len(truth)
    # Entities are equal if they have the same words and the same type.
    bounds = [(index, index + 1) for index in range(len(truth))]
    true_entities = set(find_entities(truth, bounds))
    predicted_entities = set(find_entities(predicted, bounds))
    return len(true_entities & predicted_entities), len(predicted_entities), len(true_entities)
