"""Windows of long texts: each window is a sequence of the model with its own embedding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..common.errors import UserError
from .spans import spans


# Default window size in tokens.
_WINDOW = 256
# Maximum number of characters per call of the tokenizer. Offsets take much more memory than text.
_CHARACTERS = 1_000_000


class Windows(NamedTuple):
    """N windows of texts as input sequences of the model.

    Attributes:
        tokens: N int32 arrays, the sequences of the model.
        rows: (N,) index of the text of each window.
        starts: (N,) first character of each window; None if each text is one sequence.
        ends: (N,) character after the last one of each window; None if each text is one sequence.
        offsets: N arrays (T, 2) with the characters of each token of a window, which are (0, 0) for
            special tokens and the prompt; None unless requested.
    """

    tokens: list[np.ndarray]
    rows: np.ndarray
    starts: np.ndarray | None = None
    ends: np.ndarray | None = None
    offsets: list[np.ndarray] | None = None


@dataclass(frozen=True)
class WindowSettings:
    """Size and overlap of windows.

    Attributes:
        window: Maximum number of tokens of the text, without the prompt, [CLS] and [SEP].
        overlap: Maximum number of tokens that two neighboring windows share.
    """

    window: int
    overlap: int

    @classmethod
    def from_model(
        cls,
        tokenizer: Any,
        max_length: int | None,
        prompt: str = "",
        window: int | None = None,
        overlap: int | None = None,
    ) -> "WindowSettings":
        """Return the settings for a model.

        Args:
            tokenizer: Tokenizer of the model.
            max_length: Maximum sequence length of the model in tokens.
            prompt: Text before each window.
            window: Window size; by default 256, or the limit of the model if it is lower.
            overlap: Overlap; by default one eighth of the window.

        Raises:
            UserError: If the model cannot encode such windows.
        """
        if not tokenizer.is_fast:
            raise UserError(
                "windows require a tokenizer with character offsets (a tokenizer.json), got a "
                "tokenizer written in Python."
            )
        if max_length is None:
            raise UserError("the model has no maximum length. Set it with `--max-length`.")

        # The tokens of an empty text are those of the prompt and the special tokens.
        empty = next(_tokenize(tokenizer, prompt, [""]))
        room = max_length - len(empty.before) - len(empty.after)
        if (window or 1) > room:
            raise UserError(
                f"`window` must be at most {max(0, room)}, the model's {max_length} tokens "
                f"without the prompt and the special tokens, got {window or 1}."
            )

        window = window or min(_WINDOW, room)
        overlap = window // 8 if overlap is None else overlap
        if overlap >= window:
            raise UserError(f"`overlap` must be less than `window`, {window}, got {overlap}.")
        return cls(window, overlap)


def text_windows(
    tokenizer: Any,
    max_length: int,
    texts: Sequence[str],
    prompt: str,
    settings: WindowSettings,
    lengths: list[int] | None = None,
    with_offsets: bool = False,
) -> Windows:
    """Return the windows of texts, which contain every token.

    Each window has the prompt and the special tokens, like a separate text. A text is tokenized
    once and its tokens are divided: tokenizing each window would give other tokens at the ends of
    windows that divide a word.

    Args:
        tokenizer: Tokenizer with character offsets.
        max_length: Maximum number of tokens of a window with its prompt and special tokens.
        texts: Texts.
        prompt: Text before each window.
        settings: Size and overlap of the windows.
        lengths: List to which the length of each text with its prompt is appended.
        with_offsets: Whether to return the characters of each token.
    """
    tokens: list[np.ndarray] = []
    rows: list[int] = []
    bounds: list[tuple[int, int]] = []
    window_offsets: list[np.ndarray] = []

    for group in text_groups(list(map(len, texts))):
        tokenized = _tokenize(tokenizer, prompt, texts[group])
        for row, text in enumerate(tokenized, group.start):
            before, ids, after = text.before, text.ids, text.after

            # The prompt and the special tokens are repeated in every window. The prompt may have
            # another number of tokens than before an empty text, so the limit is checked again.
            room = max(1, max_length - len(before) - len(after))
            window = min(settings.window, room)
            overlap = min(settings.overlap, window - 1)

            for span in spans(texts[row], text.offsets, window, overlap):
                tokens.append(np.concatenate([before, ids[span.first : span.stop], after]))
                rows.append(row)
                bounds.append((span.start, span.end))
                if with_offsets:
                    # Tokens that are not of the text have the empty span (0, 0).
                    padding = ((len(before), len(after)), (0, 0))
                    window_offsets.append(np.pad(text.offsets[span.first : span.stop], padding))
            # The length counts the prompt and the special tokens once, as in a single sequence.
            if lengths is not None:
                lengths.append(len(before) + len(ids) + len(after))

    starts, ends = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
    return Windows(
        tokens=tokens,
        rows=np.array(rows, dtype=np.int64),
        starts=starts,
        ends=ends,
        offsets=window_offsets if with_offsets else None,
    )


def text_groups(lengths: Sequence[int]) -> Iterator[slice]:
    """Yield slices of neighboring texts that are tokenized together.

    Args:
        lengths: Number of characters of each text.
    """
    # A text that is longer than `_CHARACTERS` is a group of its own.
    start = 0
    size = 0
    for number, length in enumerate(lengths):
        if number > start and size + length > _CHARACTERS:
            yield slice(start, number)
            start = number
            size = 0
        size += length
    if lengths:
        yield slice(start, len(lengths))


@dataclass(frozen=True)
class _TokenizedText:
    """Tokens of a prompt and a text.

    Attributes:
        before: Special tokens and those of the prompt, before the text.
        ids: (T,) tokens of the text.
        offsets: (T, 2) characters of each token in the text without the prompt.
        after: Special tokens after the text.
    """

    before: np.ndarray
    ids: np.ndarray
    offsets: np.ndarray
    after: np.ndarray


def _tokenize(tokenizer: Any, prompt: str, texts: Sequence[str]) -> Iterator[_TokenizedText]:
    """Yield the tokens of each text."""
    # The prompt is tokenized together with the text, because the tokens at their border may differ.
    # `verbose=False` suppresses the warning that a sequence is longer than the model allows.
    encoding = tokenizer(
        [prompt + text for text in texts],
        truncation=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    sequences = zip(
        encoding["input_ids"], encoding["offset_mapping"], encoding["special_tokens_mask"]
    )
    for row, pairs, special in sequences:
        ids = np.array(row, dtype=np.int32)
        offsets = np.array(pairs, dtype=np.int64).reshape(-1, 2)

        # Special tokens of the template are at the ends; a "[SEP]" inside the text has characters.
        with_characters = np.flatnonzero(offsets[:, 0] < offsets[:, 1])
        if len(with_characters):
            first = with_characters[0]
            stop = with_characters[-1] + 1
        else:
            # Without characters, the range of the text is empty and follows the special tokens.
            first = stop = np.argmin(np.append(special, 0))

        # Tokens that end within the prompt belong to it. A token with characters of both counts as
        # one of the text, and its offset is clipped to the start of the text.
        offsets = offsets - len(prompt)
        start = first + int((offsets[first:stop, 1] <= 0).sum())
        text_offsets = offsets[start:stop].clip(0)
        yield _TokenizedText(ids[:start], ids[start:stop], text_offsets, ids[stop:])
