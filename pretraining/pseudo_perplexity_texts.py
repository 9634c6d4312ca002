"""Which texts pseudo-perplexity is measured on, and at which lengths."""

import hashlib
import logging
from typing import NamedTuple

from ..common.errors import UserError, listed
from .options import LENGTHS


logger = logging.getLogger("neobert.pseudo_perplexity")


def usual_lengths(context):
    """`LENGTHS` up to the context of a model, which is among them."""
    longest = min(context, LENGTHS[-1])
    return [*(length for length in LENGTHS if length < longest), longest]


class Unit(NamedTuple):
    """One text at one length: `text` is its digest, `length` its bucket, `ids` its tokens between
    the special ones."""

    text: str
    length: int
    ids: tuple


def read_texts(given, rows):
    """Yields the texts of at most `max_documents` rows in their order; those without text are
    counted, and named at the end."""
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
        logger.warning(
            "%s: %d of %d rows are broken or empty and were skipped",
            given.text,
            broken,
            texts + broken,
        )


def make_units(given, rows, tokenizer, limit):
    """Texts at the lengths where they are evaluated, shortest first: a list of `Unit`.

    Lengths count the special tokens. "cut": the first tokens of every text, at each length that it
    reaches. "own": every text in full (cut at the largest length), in the smallest bucket that
    holds it, as in Figure 2.

    Args:
        rows: with a column "text".
        limit: longest input that the model takes, or None.
    Raises:
        UserError: no text is long enough.
    """
    special = tokenizer.num_special_tokens_to_add()
    if limit is not None and limit < given.lengths[-1]:
        logger.warning("%s takes at most %d tokens; longer buckets are left out", given.name, limit)
    lengths = [length for length in given.lengths if special < length <= (limit or length)]
    if not lengths:
        raise UserError(
            f"none of the lengths {listed(given.lengths)} fits {given.name}, which takes at most "
            f"{limit} tokens, {special} of them special"
        )
    longest = lengths[-1] - special
    tokenised = {}
    for text in read_texts(given, rows):
        ids = tokenizer(text, add_special_tokens=False, truncation=True, max_length=longest)[
            "input_ids"
        ]
        tokenised[hashlib.sha256(text.encode()).hexdigest()[:12]] = tuple(ids)
    # The same texts at every length, as far as they reach: lengths then differ in length alone.
    chosen = sorted(tokenised.items(), key=lambda item: len(item[1]), reverse=True)[: given.texts]
    units, short = [], 0
    for name, ids in chosen:
        size = len(ids) + special
        if given.bucketing == "cut":
            units += [
                Unit(name, length, ids[: length - special]) for length in lengths if length <= size
            ]
            short += size < lengths[0]
        elif ids:
            units.append(Unit(name, next(length for length in lengths if size <= length), ids))
    if not units:
        reach = (
            f"the longest has {len(chosen[0][1]) + special} tokens"
            if chosen
            else "there is no text"
        )
        raise UserError(f"no text of {given.text} reaches {lengths[0]} tokens: {reach}")
    if short:
        logger.warning(
            "%s: %d texts are shorter than %d tokens, the shortest length, and are left out",
            given.text,
            short,
            lengths[0],
        )
    return sorted(units, key=lambda unit: (len(unit.ids), unit.text))
