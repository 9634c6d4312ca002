"""Texts of `neobert pseudo-perplexity`: read from files or the Hub, and cut to the lengths at which they are evaluated."""

import hashlib
import itertools
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import UserError, listed, one_line, require
from ..common.rows import read_rows
from .sources import is_path


logger = logging.getLogger("neobert.pseudo_perplexity")


def read_texts(given):
    """Yields texts in the order of the data, from at most `max_documents` rows; rows without text are counted, and named at the end.

    Raises:
        UserError: no such file or data set, one that cannot be read, or no row with text in the column.
    """
    texts, broken, columns = 0, 0, {}
    for row in _rows(given):
        value = row.get(given.column) if isinstance(row, dict) else None
        if _is_text(value):
            texts += 1
            yield value
            continue
        broken += 1
        columns.update(row if isinstance(row, dict) else {})
    if not texts:
        found = f"; it has {', '.join(map(str, columns))}" if columns else ""
        raise UserError(f"{given.text} has no row with text in the column {given.column!r}{found}")
    if broken:
        logger.warning("%s: %d of %d rows are broken or empty and were skipped", given.text, broken, texts + broken)


def _is_text(value):
    """Whether a value is text that is not blank and not broken: no tokenizer takes half a surrogate pair."""
    try:
        return isinstance(value, str) and bool(value.strip().encode())
    except UnicodeEncodeError:
        return False


def _rows(given):
    """At most `max_documents` rows: dicts, or None for one that is broken."""
    path = Path(given.text)
    broken = []
    if path.is_dir() and any(path.glob("*.txt")):
        rows = ({given.column: p.read_text(encoding="utf-8", errors="replace")} for p in sorted(path.glob("*.txt")))
    elif path.suffix == ".txt" and path.is_file():
        texts = re.split(r"\r?\n[ \t]*\r?\n", path.read_bytes().decode("utf-8", errors="replace"))
        rows = ({given.column: text} for text in texts if text.strip())
    elif path.exists():
        rows = (row for _, row in read_rows(path, broken=broken.append))
    elif is_path(given.text):
        raise UserError(f"there is no file or folder {given.text}")
    else:
        rows = _hub_rows(given)
    for row in itertools.islice(rows, given.max_documents):
        yield from [None] * len(broken)
        broken.clear()
        yield row
    yield from [None] * len(broken)


def _hub_rows(given):
    require("train", "datasets")
    from datasets import load_dataset

    try:
        rows = iter(load_dataset(given.text, given.subset, split=given.split, streaming=True).take(given.max_documents))
        first = next(rows, None)
    except Exception as error:  # datasets raises its own, OSError, ValueError, ConnectionError, ... for one cause: no data
        raise UserError(f"{given.text!r} is not a local file, and was not loaded from the Hub: {one_line(error)}") from error
    if first is not None:
        yield first
        yield from rows


@dataclass(frozen=True)
class Unit:
    """One text at one length: `text` is its digest, `ids` its tokens between the special ones, `length` its bucket."""

    text: str
    length: int
    ids: tuple


def make_units(given, tokenizer, limit):
    """Texts at the lengths where they are evaluated, shortest first.

    Lengths count the special tokens. "cut": the first tokens of every text, at each length that it reaches. "own": every text in full (cut at the
    largest length), in the smallest bucket that holds it.

    Args:
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
    for text in read_texts(given):
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
