"""Texts that are longer than a vector should stand for: several vectors a text, each of a window of
it, alone or pooled from one pass over the document."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..common.errors import UserError
from .spans import Pass, passes, spans


_WINDOW = 256  # tokens of a window, where nobody says so
_CHARACTERS = 1_000_000  # tokenized at a time


class Windows(NamedTuple):
    """N windows of texts, and what the model reads for them.

    Attributes:
        tokens: list of int32 arrays, the sequences of the model.
        ranges: (k, 2) array for each sequence, the tokens that each of its windows is the mean of;
            None where a sequence is a window.
        rows: (N,) number of the text of each window; None where each text is one sequence.
        starts, ends: (N,) its first character in the text, and the one after its last.
    """

    tokens: list
    ranges: list | None = None
    rows: np.ndarray | None = None
    starts: np.ndarray | None = None
    ends: np.ndarray | None = None


@dataclass(frozen=True)
class WindowSettings:
    """How texts are divided.

    Attributes:
        window: most tokens of the text in a window, without the prompt and [CLS] and [SEP].
        overlap: most tokens that neighbours share.
        late: whether a window is the mean over its tokens from a pass over the document (late
            chunking, arXiv 2409.04701); else it is read alone.
    """

    window: int
    overlap: int
    late: bool = False

    @classmethod
    def of(cls, encoder, prompt, window=None, overlap=None, late=False):
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
        if late and encoder.pooling != "mean":
            raise UserError(
                "late takes the mean over the tokens of a window, but this model's pooling is "
                f"{encoder.pooling!r}; leave it out"
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
        return cls(window, overlap, late)


def tokenize_windows(encoder, texts, prompt, settings, lengths=None):
    """The `Windows` of texts. No token of a text is left out.

    A window that is read alone has the prompt and the special tokens of a text of its own. Of a
    pass they belong to the windows at the document's ends: a text of one window has the same vector
    with `late` and without.

    Args:
        encoder: `PackedEncoder`.
        texts: list of texts.
        prompt: text before each window, or with `late` before each pass.
        settings: `WindowSettings`.
        lengths: a list that gets the number of tokens of each text with its prompt.
    """
    tokens, ranges, rows, places = [], [], [], []
    for start, batch in _batches(texts):
        for row, (text, parts) in enumerate(zip(batch, _parts(encoder, prompt, batch)), start):
            before, (ids, offsets), after = parts
            room = max(1, encoder.max_length - len(before) - len(after))
            window = min(settings.window, room)
            found = spans(text, offsets, window, min(settings.overlap, window - 1))
            read = [Pass(span.first, span.stop, [span]) for span in found]
            if settings.late:
                read = passes(found, len(ids), room, room // 8)
                pooled_from = len(before) if prompt and not encoder.pools_prompt else 0
                ranges += [_ranges(one, parts, pooled_from) for one in read]
            tokens += [np.concatenate([before, ids[one.first : one.stop], after]) for one in read]
            rows += [row] * len(found)
            places += [(span.start, span.end) for span in found]
            if lengths is not None:
                lengths.append(len(before) + len(ids) + len(after))
    starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
    return Windows(
        tokens, ranges if settings.late else None, np.array(rows, dtype=np.int64), starts, ends
    )


def _ranges(read, parts, pooled_from):
    """(k, 2) tokens of a pass that its spans are the mean of; what is before the text, from the
    token `pooled_from` on, and after it belongs to the spans at its ends."""
    before, (ids, _), after = parts
    moved = len(before) - read.first
    return np.array(
        [
            (
                span.first + moved if span.first else pooled_from,
                span.stop + moved + (len(after) if span.stop == len(ids) else 0),
            )
            for span in read.spans
        ]
    )


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
