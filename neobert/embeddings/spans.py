"""Division of a long text into windows that end at sentence ends.

Pure functions of a text and of the character offsets of its tokens.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


# Boundaries at which a text may be divided, from the worst to the best: at white space (level 1),
# at the end of a line (2), at the end of a sentence or paragraph (3). Level 0 is a boundary between
# two tokens of a word.
_BREAKS = (
    re.compile(r"\s+"),
    re.compile(r"[\n\u2028]\s*"),
    # The lookbehind keeps the time linear: a long run of dots is tried once, at its first dot.
    # A full stop before a lowercase letter, as in "e.g. a", is no sentence end. Chinese, Japanese
    # and Indic sentence ends need no white space after them. A blank line ends a paragraph.
    re.compile(
        r"(?<![.!?\u2026\u061f\u06d4])"
        r"[.!?\u2026\u061f\u06d4]+[\"'\u2019\u201d\u00bb)\]]*(?=\s+[^\sa-z])"
        r"|[\u3002\uff01\uff1f\uff0e\uff61\u0964\u0965]+[\u300d\u300f\u201d\u2019\uff09)]*"
        r"|\n[ \t\r]*\n|\u2029"
    ),
)
_WHITE_SPACE = 1
_SENTENCE = len(_BREAKS)


class Span(NamedTuple):
    """Window of a text: a range of its tokens and the range of their characters.

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
    before this end that fit into `overlap`. If none fits, the next window starts at this end if a
    sentence ends there, and `overlap` tokens before it otherwise.

    Args:
        text: Text.
        offsets: (N, 2) first character of each token, and the character after its last one.
        window: Maximum number of tokens of a window, at least 1.
        overlap: Maximum number of tokens that two neighboring windows share, less than `window`.

    Returns:
        Windows whose `first` and `stop` both increase, and which contain every token. A text
        without tokens has one empty window.
    """
    # `reshape` gives an empty list two columns, too.
    bounds = _trimmed(text, np.asarray(offsets, dtype=np.int64).reshape(-1, 2))
    levels = _levels(text, bounds)
    count = len(bounds)

    windows: list[Span] = []
    first = 0
    stop = 0
    while stop < count:
        # A window ends at the last of the best boundaries within its size, and always contains a
        # token that the window before it does not contain.
        limit = first + window
        end = count if limit >= count else _last_best_boundary(levels, stop + 1, limit)

        # Tokens may overlap in characters, so the last token need not end last.
        start = int(bounds[first, 0])
        last = int(bounds[first:end, 1].max())
        windows.append(Span(first, end, start, last))

        # The next window starts within the overlap, again at the best boundary.
        first = _next_first_token(levels, first, end, overlap)
        stop = end
    return windows or [Span(0, 0, 0, 0)]


def _trimmed(text: str, offsets: np.ndarray) -> np.ndarray:
    """Return the offsets in ascending order and without white space at the start of a token.

    Some tokenizers include the white space before a word in its token.
    """
    # Offsets that decrease would break the binary search for boundaries.
    offsets = np.maximum.accumulate(offsets, axis=0)

    # Only tokens that start with white space are inspected, because a loop over all is slow.
    spaces = [match.start() for match in re.finditer(r"\s", text)]
    for index in np.flatnonzero(np.isin(offsets[:, 0], spaces)):
        start, end = offsets[index]
        offsets[index, 0] = end - len(text[start:end].lstrip())
    return offsets


def _levels(text: str, offsets: np.ndarray) -> np.ndarray:
    """Return the level of the boundary before each token and after the last one, (N + 1,).

    The level is -1 inside a character, 0 inside a word, and 1 + the index in `_BREAKS` otherwise.
    """
    # A break belongs to the boundary before the next token. Better breaks overwrite worse ones.
    levels = np.zeros(len(offsets) + 1, dtype=np.int8)
    for level, pattern in enumerate(_BREAKS, 1):
        ends = [match.end() for match in pattern.finditer(text)]
        levels[np.searchsorted(offsets[:, 0], ends)] = level

    # Byte-level tokenizers divide a character, such as an emoji, into several tokens.
    shared = offsets[1:, 0] < offsets[:-1, 1]
    levels[1:-1][shared] = -1
    return levels


def _last_best_boundary(levels: np.ndarray, earliest: int, latest: int) -> int:
    """Return the last of the best boundaries from `earliest` to `latest`."""
    candidates = levels[earliest : latest + 1]
    return int(earliest + np.flatnonzero(candidates == candidates.max())[-1])


def _next_first_token(levels: np.ndarray, first: int, end: int, overlap: int) -> int:
    """Return the first token of the window after the one from `first` to `end`."""
    # The overlap may be as large as a short window, but the next window must start later.
    earliest = max(first + 1, end - overlap)

    # The overlap contains as many complete sentences as fit. None fit if the only sentence end is
    # that of the window, at which the next window then starts.
    sentences = np.flatnonzero(levels[earliest : end + 1] == _SENTENCE)
    if len(sentences):
        return int(earliest + sentences[0])
    if earliest == end:
        return end

    # Without a sentence end, the overlap is as large as possible: it starts at the first boundary
    # that does not divide a word, or else at the first that does not divide a character.
    candidates = levels[earliest:end]
    level = min(_WHITE_SPACE, candidates.max())
    return int(earliest + np.flatnonzero(candidates >= level)[0])
