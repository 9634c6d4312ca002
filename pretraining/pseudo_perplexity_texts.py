"""Texts of `neobert pseudo-perplexity`: read from files or the Hub, and cut to the lengths at which they are evaluated."""

import hashlib
import logging
from dataclasses import dataclass

from ..common.errors import UserError, listed
from .sources import load_rows, parse_sources


logger = logging.getLogger("neobert.pseudo_perplexity")


def open_texts(given):
    """Rows of the data as `load_rows` streams them. UserError: no such file, data set or column, or one that cannot be read."""
    return load_rows(parse_sources(given.text, given.subset, given.split, given.column), streaming=True)


def read_texts(given, rows):
    """Yields the texts of at most `max_documents` rows in their order; those without text are counted, and named at the end."""
    texts = broken = 0
    for row in rows.take(given.max_documents):
        if row["text"] and row["text"].strip():
            texts += 1
            yield row["text"]
        else:
            broken += 1
    if not texts:
        raise UserError(f"{given.text} has no row with text in the column {given.column!r}")
    if broken:
        logger.warning("%s: %d of %d rows are broken or empty and were skipped", given.text, broken, texts + broken)


@dataclass(frozen=True)
class Unit:
    """One text at one length: `text` is its digest, `ids` its tokens between the special ones, `length` its bucket."""

    text: str
    length: int
    ids: tuple


def make_units(given, rows, tokenizer, limit):
    """Texts at the lengths where they are evaluated, shortest first.

    Lengths count the special tokens. "cut": the first tokens of every text, at each length that it reaches. "own": every text in full (cut at the
    largest length), in the smallest bucket that holds it.

    Args:
        rows: of `open_texts`.
        limit: longest input that the model takes, or None.
    Returns:
        the units, and the set of digests (`Unit.text`) of all texts that were looked at.
    Raises:
        UserError: no text is long enough.
    """
    special = tokenizer.num_special_tokens_to_add()
    lengths = [length for length in given.lengths if limit is None or length <= limit]
    if len(lengths) < len(given.lengths):
        logger.warning("%s takes at most %d tokens; longer buckets are left out", given.name, limit)
    lengths = [length for length in lengths if length > special]
    if not lengths:
        raise UserError(
            f"none of the lengths {listed(given.lengths)} fits {given.name}, which takes at most {limit} tokens, {special} of them special"
        )
    longest = lengths[-1] - special
    tokenised = {}
    for text in read_texts(given, rows):
        ids = tokenizer(text, add_special_tokens=False, truncation=True, max_length=longest)["input_ids"]
        tokenised[hashlib.sha256(text.encode()).hexdigest()[:12]] = tuple(ids)
    # The same texts at every length, as far as they reach: lengths then differ in length alone.
    chosen = sorted(tokenised.items(), key=lambda item: len(item[1]), reverse=True)[: given.texts]
    short = sum(len(ids) + special < lengths[0] for _, ids in chosen) if given.bucketing == "cut" else 0
    if short:
        logger.warning("%s: %d texts are shorter than %d tokens, the shortest length, and are left out", given.text, short, lengths[0])
    units = []
    for name, ids in chosen:
        if given.bucketing == "cut":
            units += [Unit(name, length, ids[: length - special]) for length in lengths if length <= len(ids) + special]
        elif ids:
            units.append(Unit(name, next(length for length in lengths if len(ids) + special <= length), ids))
    if not units:
        reach = f"the longest has {len(chosen[0][1]) + special} tokens" if chosen else "there is no text"
        raise UserError(f"no text of {given.text} reaches {lengths[0]} tokens: {reach}")
    return sorted(units, key=lambda unit: (len(unit.ids), unit.text)), set(tokenised)
