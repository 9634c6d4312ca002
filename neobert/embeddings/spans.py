"""Windows of a long text, at sentence ends where there are any. Pure functions of a text and of the
places of its tokens."""

import re
from typing import NamedTuple

import numpy as np


# Where a text may be divided, from the worst place to the best: between two tokens of a word, at
# white space, at the end of a line, at the end of a sentence or paragraph.
_BREAKS = (
    re.compile(r"\s+"),
    re.compile(r"[ \t]*[\n\u2028]\s*"),
    re.compile(
        r"[.!?\u2026\u061f\u06d4]+[\"'\u2019\u201d\u00bb)\]]*(?=\s+[^\sa-z])"  # not after "e.g. a"
        r"|[\u3002\uff01\uff1f\uff0e\uff61\u0964\u0965]+[\u300d\u300f\u201d\u2019\uff09)]*"
        r"|\n[ \t\r]*\n|\u2029"
    ),
)


class Span(NamedTuple):
    """A window of a text: its tokens from `first` to before `stop`, its characters from `start` to
    before `end`."""

    first: int
    stop: int
    start: int
    end: int


def spans(text, offsets, window, overlap):
    """The windows that a text is divided into.

    A window ends at the last sentence end that it reaches; where it reaches none, at the last line
    end, else at the last white space, else after its last token. The next one begins with the
    sentences before that end that fit in `overlap`; where there are none, at the end itself if a
    sentence ends there, else `overlap` tokens before it.

    Args:
        text: the text.
        offsets: (N, 2) first character of each token, and the one after its last.
        window: most tokens of a window, at least 1.
        overlap: most tokens that neighbours share, less than `window`.
    Returns:
        list of `Span`. `first` and `stop` both increase, and every token is in at least one; of a
        text without tokens, one empty span.
    """
    offsets = _trimmed(text, np.asarray(offsets, dtype=np.int64).reshape(-1, 2))
    count = len(offsets)
    levels = _levels(text, offsets)
    found, first, stop = [], 0, 0
    while stop < count:
        reach = first + window
        end = count if reach >= count else _last_best(levels, stop + 1, reach)
        start, last = offsets[first, 0], offsets[first:end, 1].max()
        found.append(Span(first, end, int(start), int(last)))
        first, stop = _next(levels, first, end, overlap), end
    return found or [Span(0, 0, 0, 0)]


def _trimmed(text, offsets):
    """`offsets` in order, without white space at the beginning of a token, which some tokenizers
    count to it."""
    offsets = np.maximum.accumulate(offsets, axis=0)
    spaces = [match.start() for match in re.finditer(r"\s", text)]
    for place in np.flatnonzero(np.isin(offsets[:, 0], spaces)):
        start, end = offsets[place]
        offsets[place, 0] = end - len(text[start:end].lstrip())
    return offsets


def _levels(text, offsets):
    """(N + 1,) how good a place it is to divide a text before each token: -1 inside of a character,
    0 inside of a word, and so on as `_BREAKS`."""
    levels = np.zeros(len(offsets) + 1, dtype=np.int8)
    for level, pattern in enumerate(_BREAKS, 1):
        ends = [match.end() for match in pattern.finditer(text)]
        levels[np.searchsorted(offsets[:, 0], ends)] = level
    shared = offsets[1:, 0] < offsets[:-1, 1]
    levels[1:-1][shared] = -1
    return levels


def _last_best(levels, least, most):
    """The last of the best places from `least` to `most`."""
    among = levels[least : most + 1]
    return int(least + np.flatnonzero(among == among.max())[-1])


def _next(levels, first, end, overlap):
    """Where the window after one from `first` to `end` begins."""
    least = max(first + 1, end - overlap)
    sentences = np.flatnonzero(levels[least : end + 1] == len(_BREAKS))
    if len(sentences):
        return int(least + sentences[0])
    if least == end:
        return end
    among = levels[least:end]
    # The first place that is no worse than white space; where there is none, the first of the best.
    return int(least + np.flatnonzero(among >= min(1, among.max()))[0])
