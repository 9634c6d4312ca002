"""Texts that are longer than a vector should stand for: several vectors a text, each of a window of
it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..common.errors import UserError
from .spans import spans


_WINDOW = 256  # tokens of a window, where nobody says so
_CHARACTERS = 1_000_000  # tokenized at a time


class Windows(NamedTuple):
    """N windows of texts, and what the model reads for them.

    Attributes:
        tokens: list of N int32 arrays, the sequences of the model.
        rows: (N,) number of the text of each window.
        starts, ends: (N,) its first character in the text, and the one after its last; None where
            each text is one sequence.
    """

    tokens: list
    rows: np.ndarray
    starts: np.ndarray | None = None
    ends: np.ndarray | None = None


@dataclass(frozen=True)
class WindowSettings:
    """How texts are divided.

    Attributes:
        window: most tokens of the text in a window, without the prompt and [CLS] and [SEP].
        overlap: most tokens that neighbours share.
    """

    window: int
    overlap: int

    @classmethod
    def for_encoder(cls, encoder, prompt, window=None, overlap=None):
        """Checked for an encoder: by default windows of 256 tokens, or as many as it reads if that
        is less, of which neighbours share at most an eighth.

        Raises:
            UserError: the model cannot do it, or does not read so many tokens.
        """
        if not encoder.sentence_transformer.tokenizer.is_fast:
            raise UserError(
                "windows need a tokenizer that tells the place of each token (a tokenizer.json), "
                "but the model's does not"
            )
        if encoder.max_length is None:
            raise UserError("the model names no limit of tokens; give max_length")
        before, _, after = next(_parts(encoder, prompt, [""]))
        room = encoder.max_length - len(before) - len(after)
        if (window or 1) > room:
            raise UserError(
                f"window must be at most the {max(0, room)} tokens that the model's "
                f"{encoder.max_length} leave beside the prompt and special tokens, but "
                f"{window or 1} was given"
            )
        window = window or min(_WINDOW, room)
        overlap = window // 8 if overlap is None else overlap
        if overlap >= window:
            raise UserError(f"overlap must be below window, {window}, but {overlap} was given")
        return cls(window, overlap)


def tokenize_windows(encoder, texts, prompt, settings, lengths=None):
    """The `Windows` of texts. No token of a text is left out. A window has the prompt and the
    special tokens of a text of its own.

    Args:
        encoder: `PackedEncoder`.
        texts: list of texts.
        prompt: text before each window.
        settings: `WindowSettings`.
        lengths: a list that gets the number of tokens of each text with its prompt.
    """
    tokens, rows, places = [], [], []
    for start, batch in _batches(texts):
        for row, (text, parts) in enumerate(zip(batch, _parts(encoder, prompt, batch)), start):
            before, (ids, offsets), after = parts
            room = max(1, encoder.max_length - len(before) - len(after))
            window = min(settings.window, room)
            for span in spans(text, offsets, window, min(settings.overlap, window - 1)):
                tokens.append(np.concatenate([before, ids[span.first : span.stop], after]))
                rows.append(row)
                places.append((span.start, span.end))
            if lengths is not None:
                lengths.append(len(before) + len(ids) + len(after))
    starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
    return Windows(tokens, np.array(rows, dtype=np.int64), starts, ends)


def _batches(texts):
    """(number of the first, texts) of neighbours that are tokenized together."""
    start, size = 0, 0
    for number, text in enumerate(texts):
        if number > start and size + len(text) > _CHARACTERS:
            yield start, texts[start:number]
            start, size = number, 0
        size += len(text)
    if texts:
        yield start, texts[start:]


def _parts(encoder, prompt, texts):
    """Of each text: tokens before it (special ones and the prompt's), (its own, their places in
    it), tokens after it."""
    stripped = [(prompt + text).strip() for text in texts]  # as `PackedEncoder.tokenize`
    found = encoder.sentence_transformer.tokenizer(
        stripped,
        truncation=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    for text, ids, offsets, special in zip(
        texts, found["input_ids"], found["offset_mapping"], found["special_tokens_mask"]
    ):
        ids, offsets = np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64)
        offsets = offsets.reshape(-1, 2)
        # What the template adds is at the ends; a "[SEP]" that somebody wrote is text.
        own = np.flatnonzero(offsets[:, 0] < offsets[:, 1])
        first = own[0] if len(own) else np.argmin(np.append(special, 0))
        stop = own[-1] + 1 if len(own) else first
        moved = len(prompt + text) - len((prompt + text).lstrip())
        offsets = offsets + moved - len(prompt)
        first += int((offsets[first:stop, 1] <= 0).sum())
        yield ids[:first], (ids[first:stop], offsets[first:stop].clip(0)), ids[stop:]
