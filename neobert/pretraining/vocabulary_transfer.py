"""Vocabulary transfer: initialize the token embeddings of a new tokenizer from those of an old one.

The blocks of the model are kept. The row of a new token is

1. a copy of the row of the old token with the same text, at the start of a word or within a word,
2. or else the mean of the rows of the old tokens into which its text is tokenized,
3. or else the mean of all old rows.

Source: Gee et al. 2022, Fast Vocabulary Transfer (arXiv 2402.09977).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..common.loading import vocabulary_size
from ..modeling_neobert import NeoBERTForMaskedLM


# Origins of a row, which are keys in result.json.
COPIED = "copied"
MEAN = "mean of old tokens"
REST = "mean of all tokens"

# Attributes of a tokenizer that contain its special tokens.
_ROLES = (
    "pad_token",
    "unk_token",
    "cls_token",
    "sep_token",
    "mask_token",
    "bos_token",
    "eos_token",
)
_UNUSED = re.compile(r"\[unused\d+\]")

# Marks of tokens at the start of a word, in byte-level BPE and in SentencePiece, and a space.
_WORD_STARTS = ("\u0120", "\u2581", " ")


@dataclass(frozen=True)
class RowSources:
    """Origin of each row of a new vocabulary.

    Attributes:
        sources: For each new id, the old ids whose mean it is; an empty list stands for the mean of
            all ordinary rows.
        ordinary: Ids of the old tokens other than special and unused tokens.
        counts: Number of new tokens by origin, {COPIED, MEAN or REST: tokens}.
    """

    sources: list[list[int]]
    ordinary: list[int]
    counts: dict[str, int]

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {origin}" for origin, count in self.counts.items())


class _TokenText(NamedTuple):
    """Text that a token stands for, and whether the text starts a word."""

    text: str
    starts_word: bool


def find_rows(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> RowSources:
    """Find the old rows that the rows of a new vocabulary are initialized from.

    Special tokens are matched by their role: [MASK] corresponds to the mask token of the other
    tokenizer. The text of a new token is normalized like a text of the old tokenizer, so
    "Haus" corresponds to "haus" if the old tokenizer is uncased. A token of an uncased new
    tokenizer corresponds to the capitalized token if a cased old tokenizer has no other.

    Args:
        old: Fast tokenizer of the model.
        new: Fast tokenizer that replaces it.
    """
    old_tokens = _TokenReader(old)
    new_tokens = _TokenReader(new)
    roles = _matching_roles(old, new)

    sources: list[list[int]] = [[] for _ in range(vocabulary_size(new))]
    counts = dict.fromkeys((COPIED, MEAN, REST), 0)
    for token, token_id in new_tokens.vocabulary.items():
        if token in roles:
            sources[token_id] = [roles[token]]
            origin = COPIED
        else:
            sources[token_id], origin = _find_row(token, old_tokens, new_tokens)
        counts[origin] += 1

    # Rows of special and unused tokens would distort the mean of all rows.
    ordinary = [
        token_id
        for token, token_id in old_tokens.vocabulary.items()
        if old_tokens.text_of(token) is not None
    ]
    return RowSources(sources, sorted(ordinary), counts)


def mean_rows(weight: torch.Tensor, rows: RowSources, count: int) -> torch.Tensor:
    """Compute the new rows of a matrix with one row per token.

    Args:
        weight: Old rows, (old vocabulary size, D).
        rows: Origin of each new row.
        count: Number of new rows. Rows after the vocabulary are padding, and are the mean of all
            ordinary rows.

    Returns:
        New rows, (count, D). A row with a single source is a bit-identical copy.
    """
    # Padding rows have no sources, like tokens that correspond to no old token.
    padding: list[list[int]] = [[] for _ in range(count - len(rows.sources))]
    sources = [*rows.sources, *padding]
    lengths = torch.tensor([len(ids) for ids in sources])
    flat_ids = torch.tensor([i for ids in sources for i in ids], dtype=torch.long)

    # embedding_bag averages the rows of all tokens in one call. Its mean over no rows is 0, which
    # the last line replaces.
    offsets = lengths.cumsum(0) - lengths
    new = F.embedding_bag(flat_ids, weight, offsets, mode="mean")
    new[lengths == 0] = weight[rows.ordinary].mean(0)
    return new


@torch.no_grad()
def replace_vocabulary(
    model: NeoBERTForMaskedLM, rows: RowSources, count: int, pad_token_id: int | None
) -> None:
    """Replace the vocabulary of a masked language model in place.

    The embedding, the decoder, its bias and the configuration are replaced.

    Args:
        model: Model with tied or untied embeddings, and all weights on one device.
        rows: Origin of each new row.
        count: Number of new rows.
        pad_token_id: Id of the padding token of the new tokenizer, or None.
    """
    config = model.config
    old_embedding = model.get_input_embeddings().get_parameter("weight")
    old_decoder = model.decoder.get_parameter("weight")
    old_bias = model.decoder.get_parameter("bias")
    config.vocab_size = count
    config.pad_token_id = pad_token_id

    # The bias is averaged as a matrix with one column. If the embeddings are tied, the new decoder
    # equals the new embedding, and `tie_weights` lets both share one tensor again.
    embedding = nn.Embedding(count, config.hidden_size, padding_idx=pad_token_id)
    head = nn.Linear(config.hidden_size, count)
    embedding.weight.copy_(mean_rows(old_embedding, rows, count))
    head.weight.copy_(mean_rows(old_decoder, rows, count))
    head.bias.copy_(mean_rows(old_bias[:, None], rows, count)[:, 0])

    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)
    model.tie_weights()


# ------------------------------------------------------------------------------------------------
# tokens and their texts


def wordpieces(
    text: str, starts_word: bool, vocabulary: Mapping[str, int], prefix: str = "##"
) -> tuple[list[int], bool]:
    """Tokenize text into the longest matching tokens from left to right, like WordPiece.

    This function also accepts text within a word, which a WordPiece tokenizer does not. Characters
    without a token are omitted, whereas WordPiece replaces the whole word by [UNK].

    Args:
        text: Word or part of a word, without `prefix`.
        starts_word: Whether the text starts a word.
        vocabulary: Ids of the tokens.
        prefix: Mark of the tokens within words.

    Returns:
        Token ids, and whether they cover the whole text.
    """
    ids = []
    is_covered = bool(text)
    position = 0
    while position < len(text):
        # Try the longest token first. A character that no token starts with is skipped.
        mark = "" if starts_word and position == 0 else prefix
        for end in range(len(text), position, -1):
            token_id = vocabulary.get(mark + text[position:end])
            if token_id is not None:
                ids.append(token_id)
                position = end
                break
        else:
            is_covered = False
            position += 1
    return ids, is_covered


class _TokenReader:
    """Texts of the tokens of a tokenizer, and tokenization of text that may be within a word."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = tokenizer.backend_tokenizer
        self.tokenizer = tokenizer
        self.vocabulary = tokenizer.get_vocab()
        self.special_tokens = set(tokenizer.all_special_tokens)
        self.model_type = type(backend.model).__name__
        self.normalizer = backend.normalizer
        self.prefix = getattr(backend.model, "continuing_subword_prefix", None) or "##"

    def normalize(self, text: str) -> str:
        """Return normalized text, such as text in lower case."""
        return text if self.normalizer is None else self.normalizer.normalize_str(text).strip()

    def text_of(self, token: str) -> _TokenText | None:
        """Return the text that a token stands for; None for special and unused tokens."""
        if token in self.special_tokens or _UNUSED.fullmatch(token):
            return None

        # WordPiece marks tokens within words. The other types mark tokens at the start of words,
        # and their byte and space symbols must be decoded.
        if self.model_type == "WordPiece":
            return _TokenText(token.removeprefix(self.prefix), not token.startswith(self.prefix))
        text = self.tokenizer.convert_tokens_to_string([token])
        return _TokenText(text.strip(" "), token.startswith(_WORD_STARTS))

    def tokenize(self, text: str, starts_word: bool) -> tuple[list[int], bool]:
        """Tokenize text with a tokenizer of any type.

        Args:
            text: Word or part of a word.
            starts_word: Whether the text starts a word.

        Returns:
            Token ids, and whether they cover the whole text.
        """
        text = self.normalize(text)
        # WordPiece tokenizers take every input for the start of a word. The other types represent
        # the start of a word by the space before the word.
        if self.model_type == "WordPiece":
            return wordpieces(text, starts_word, self.vocabulary, self.prefix)
        space = " " if starts_word else ""
        ids = self.tokenizer(space + text, add_special_tokens=False)["input_ids"]

        # The row of [UNK] contains nothing about the text.
        known_ids = [i for i in ids if i != self.tokenizer.unk_token_id]
        return known_ids, len(known_ids) == len(ids) > 0


def _matching_roles(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the old id of each special token whose role both tokenizers have, {new token: id}."""
    roles = {}
    for role in _ROLES:
        token = getattr(new, role)
        old_id = getattr(old, f"{role}_id")
        if token is not None and old_id is not None:
            roles[token] = old_id
    return roles


def _find_row(token: str, old: _TokenReader, new: _TokenReader) -> tuple[list[int], str]:
    """Return the old ids whose mean is the row of a new token, and their origin."""
    # Tokenizers of one type mark the position in a word in the same way, so equal strings are
    # equal tokens.
    if old.model_type == new.model_type and token in old.vocabulary:
        return [old.vocabulary[token]], COPIED

    # Special tokens whose role the old tokenizer does not have stand for no text.
    token_text = new.text_of(token)
    if token_text is None:
        return [], REST

    # A token of an uncased tokenizer also stands for the capitalized word.
    text, starts_word = token_text
    spellings = [text]
    if starts_word and new.normalize("A") == "a":
        spellings += [text.capitalize(), text.upper()]
    for spelling in spellings:
        ids, is_covered = old.tokenize(spelling, starts_word)
        if is_covered and len(ids) == 1:
            return ids, COPIED

    # The position of the text in a word is less important than the text: the row of "\u00df" is a
    # better start for "##\u00df" than the mean of all rows.
    ids, is_covered = old.tokenize(text, starts_word)
    other_ids, other_is_covered = old.tokenize(text, not starts_word)
    if not is_covered and (other_is_covered or not ids):
        ids = other_ids
    return ids, MEAN if ids else REST
