"""Division of a long text into windows that end at sentence ends.

Pure functions of a text and of the character offsets of its tokens.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


# Boundaries at which a text may be divided, from the worst to the best: between two tokens of a
# word (level 0), at white space, at the end of a line, at the end of a sentence or paragraph.
_BREAKS = (
    re.compile(r"\s+"),
    re.compile(r"[ \t]*[\n\u2028]\s*"),
    # A full stop before a lowercase letter, as in "e.g. a", is no sentence end.
    re.compile(
        r"[.!?\u2026\u061f\u06d4]+[\"'\u2019\u201d\u00bb)\]]*(?=\s+[^\sa-z])"
        r"|[\u3002\uff01\uff1f\uff0e\uff61\u0964\u0965]+[\u300d\u300f\u201d\u2019\uff09)]*"
        r"|\n[ \t\r]*\n|\u2029"
    ),
)
_WHITE_SPACE = 1
_SENTENCE = len(_BREAKS)


class Span(NamedTuple):
    """Window of a text.

    Attributes:
        first: Index of the first token.
        stop: Index after the last token.
        start: Index of the first character.
        end: Index after the last character.
    """

    first: int
    stop: int
    start: int
    end: int


def spans(
    text: str, offsets: Sequence[tuple[int, int]] | np.ndarray, window: int, overlap: int
) -> list[Span]:
    """Divide a text into windows.

    A window ends at the last sentence end within its size; without one, at the last line end, else
    at the last white space, else after its last token. The next window starts with the sentences
    before that end that fit in `overlap`. If none fits, it starts at that end if a sentence ends
    there, and `overlap` tokens before it otherwise.

    Args:
        text: Text.
        offsets: (N, 2) first character of each token, and the character after its last one.
        window: Maximum number of tokens of a window, at least 1.
        overlap: Maximum number of tokens that neighboring windows share, less than `window`.

    Returns:
        Windows whose `first` and `stop` both increase, and that contain every token; one empty
        window for a text without tokens.
    """
    bounds = _trimmed(text, np.asarray(offsets, dtype=np.int64).reshape(-1, 2))
    levels = _levels(text, bounds)
    count = len(bounds)

    windows: list[Span] = []
    first = 0
    stop = 0
    while stop < count:
        reach = first + window
        # A window ends at the last paragraph, sentence or word within its reach.
        end = count if reach >= count else _last_best(levels, stop + 1, reach)
        start = int(bounds[first, 0])
        last = int(bounds[first:end, 1].max())
        windows.append(Span(first, end, start, last))

        # The next window begins within the overlap, again at the best boundary.
        first = _next_first(levels, first, end, overlap)
        stop = end
    return windows or [Span(0, 0, 0, 0)]


def _trimmed(text: str, offsets: np.ndarray) -> np.ndarray:
    """Return the offsets in order and without white space at the start of a token.

    Some tokenizers include the white space before a word in its token.
    """
    offsets = np.maximum.accumulate(offsets, axis=0)
    spaces = [match.start() for match in re.finditer(r"\s", text)]
    for index in np.flatnonzero(np.isin(offsets[:, 0], spaces)):
        start, end = offsets[index]
        offsets[index, 0] = end - len(text[start:end].lstrip())
    return offsets


def _levels(text: str, offsets: np.ndarray) -> np.ndarray:
    """Return the level of the boundary before each token and after the last one, (N + 1,).

    The level is -1 inside a character, 0 inside a word, and 1 + the index in `_BREAKS` otherwise.
    """
    levels = np.zeros(len(offsets) + 1, dtype=np.int8)
    for level, pattern in enumerate(_BREAKS, 1):
        ends = [match.end() for match in pattern.finditer(text)]
        levels[np.searchsorted(offsets[:, 0], ends)] = level
    shared = offsets[1:, 0] < offsets[:-1, 1]
    levels[1:-1][shared] = -1
    return levels


def _last_best(levels: np.ndarray, least: int, most: int) -> int:
    """Return the last of the best boundaries from `least` to `most`."""
    candidates = levels[least : most + 1]
    return int(least + np.flatnonzero(candidates == candidates.max())[-1])


def _next_first(levels: np.ndarray, first: int, end: int, overlap: int) -> int:
    """Return the first token of the window after the one from `first` to `end`."""
    least = max(first + 1, end - overlap)
    sentences = np.flatnonzero(levels[least : end + 1] == _SENTENCE)
    if len(sentences):
        return int(least + sentences[0])
    if least == end:
        return end

    # The first boundary at white space or better; without one, the first of the best.
    candidates = levels[least:end]
    level = min(_WHITE_SPACE, candidates.max())
    return int(least + np.flatnonzero(candidates >= level)[0])
