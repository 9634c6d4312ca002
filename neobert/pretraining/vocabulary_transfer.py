"""Rows of a new vocabulary out of those of an old one, so that a model takes another tokenizer and
keeps its blocks.

The row of a new piece is a copy of the old row of the same text, at the start of a word or within
one; else the mean of the rows of the old pieces that its text falls into; else the mean of all old
rows. Copies and means of pieces: Gee et al. 2022, Fast Vocabulary Transfer (arXiv 2402.09977).
"""

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


COPIED, MEAN, REST = "copied", "mean of old pieces", "mean of all"
_ROLES = tuple(f"{role}_token" for role in ("pad", "unk", "cls", "sep", "mask", "bos", "eos"))
_UNUSED = re.compile(r"\[unused\d+\]")
_WORD_STARTS = ("\u0120", "\u2581", " ")  # of byte-level BPE, of SentencePiece


@dataclass(frozen=True)
class Rows:
    """Where the rows of a vocabulary come from.

    Attributes:
        sources: of each new id the old ids whose mean it is, [] for the mean of all.
        ordinary: old ids whose mean that is: no special tokens, no [unused1].
        counts: {kind: new ids}.
    """

    sources: list
    ordinary: list
    counts: dict

    def __str__(self):
        return ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items())


def wordpieces(text, starts, vocabulary, prefix="##"):
    """The longest pieces of `vocabulary` from left to right, as WordPiece cuts a word.

    A character that no piece has is left out, where WordPiece makes [UNK] of the word.

    Args:
        text: without `prefix`.
        starts: whether it is the start of a word.
        vocabulary: {piece: id}.
    Returns:
        (ids, whether they cover all of the text).
    """
    ids, place, covered = [], 0, bool(text)
    while place < len(text):
        mark = "" if starts and place == 0 else prefix
        for end in range(len(text), place, -1):
            if (found := vocabulary.get(mark + text[place:end])) is not None:
                ids.append(found)
                break
        else:
            end, covered = place + 1, False
        place = end
    return ids, covered


class _Reader:
    """What a tokenizer's pieces say, and how it cuts a text that may lie within a word."""

    def __init__(self, tokenizer):
        backend = tokenizer.backend_tokenizer
        self.tokenizer, self.vocabulary = tokenizer, tokenizer.get_vocab()
        self.special = {*tokenizer.all_special_tokens}
        self.kind, self.normalizer = type(backend.model).__name__, backend.normalizer
        self.prefix = getattr(backend.model, "continuing_subword_prefix", None) or "##"

    def normal(self, text):
        """`text` as the tokenizer reads it: in lower case, say."""
        return text if self.normalizer is None else self.normalizer.normalize_str(text).strip()

    def spelled(self, piece):
        """(text, whether it starts a word) of a piece; None of one that stands for no text."""
        if piece in self.special or _UNUSED.fullmatch(piece):
            return None
        if self.kind == "WordPiece":
            return piece.removeprefix(self.prefix), not piece.startswith(self.prefix)
        text = self.tokenizer.convert_tokens_to_string([piece])
        return text.strip(" "), piece.startswith(_WORD_STARTS)

    def cut(self, text, starts):
        """As `wordpieces`, for a tokenizer of any kind."""
        text = self.normal(text)
        if self.kind == "WordPiece":
            return wordpieces(text, starts, self.vocabulary, self.prefix)
        ids = self.tokenizer(" " * starts + text, add_special_tokens=False)["input_ids"]
        known = [i for i in ids if i != self.tokenizer.unk_token_id]
        return known, len(known) == len(ids) > 0


def find_rows(old, new):
    """`Rows` of the vocabulary of `new` out of that of `old`, two fast tokenizers.

    Special tokens go by their role ([MASK] is the mask token of both). The text of a piece is read
    as `old` reads it: "Haus" is its "haus" where it is uncased. A piece of an uncased `new` that a
    cased `old` has only with a capital is that one.
    """
    reader, reads = _Reader(old), _Reader(new)
    alike, lowers = reader.kind == reads.kind, reads.normal("A") == "a"
    roles = {
        getattr(new, role): getattr(old, f"{role}_id")
        for role in _ROLES
        if getattr(new, role) is not None and getattr(old, f"{role}_id") is not None
    }

    def source(piece):
        if piece in roles:
            return [roles[piece]], COPIED
        if alike and piece in reader.vocabulary:
            return [reader.vocabulary[piece]], COPIED
        if (spelled := reads.spelled(piece)) is None:
            return [], REST
        text, starts = spelled
        written = [text, text.capitalize(), text.upper()] if starts and lowers else [text]
        for form in written:
            ids, covered = reader.cut(form, starts)
            if covered and len(ids) == 1:
                return ids, COPIED
        # Its place in a word first; "##\u00df" is better the row of "\u00df" than none.
        cuts = [reader.cut(text, starts), reader.cut(text, not starts)]
        ids = next((ids for ids, covered in cuts if covered), cuts[0][0] or cuts[1][0])
        return ids, MEAN if ids else REST

    sources, counts = [[] for _ in range(len(new))], dict.fromkeys((COPIED, MEAN, REST), 0)
    for piece, number in reads.vocabulary.items():
        sources[number], kind = source(piece)
        counts[kind] += 1
    ordinary = sorted(i for piece, i in reader.vocabulary.items() if reader.spelled(piece))
    return Rows(sources, ordinary, counts)


def mean_rows(weight, rows, count):
    """The new rows.

    Args:
        weight: (old rows, D).
        rows: `Rows`.
        count: of the new rows; those after the vocabulary are padding, with the mean of all.
    Returns:
        (count, D). A row with one source has its bits.
    """
    sources = [*rows.sources, *[[]] * (count - len(rows.sources))]
    lengths = torch.tensor([len(ids) for ids in sources])
    flat = torch.tensor([i for ids in sources for i in ids], dtype=torch.long)
    new = F.embedding_bag(flat, weight, lengths.cumsum(0) - lengths, mode="mean")
    new[lengths == 0] = weight[rows.ordinary].mean(0)
    return new


@torch.no_grad()
def replace_vocabulary(model, rows, count, pad_token_id):
    """Gives a masked LM a vocabulary of `count` rows, in the embedding and the decoder alike; its
    configuration follows.

    Args:
        model: `NeoBERTForMaskedLM`, tied or not, with all weights on one device.
        rows: `Rows`.
        pad_token_id: of the new tokenizer, or None.
    """
    config, decoder = model.config, model.decoder
    embedding = model.get_input_embeddings()
    config.vocab_size, config.pad_token_id = count, pad_token_id
    made = nn.Embedding(count, config.hidden_size, padding_idx=pad_token_id)
    head = nn.Linear(config.hidden_size, count)
    made.weight.copy_(mean_rows(embedding.weight, rows, count))
    head.weight.copy_(mean_rows(decoder.weight, rows, count))
    head.bias.copy_(mean_rows(decoder.bias[:, None], rows, count)[:, 0])
    model.set_input_embeddings(made)
    model.set_output_embeddings(head)
    model.tie_weights()
