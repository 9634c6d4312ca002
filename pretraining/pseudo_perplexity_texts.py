"""Texts of `neobert pseudo-perplexity`: read from files or the Hub, and cut to the lengths at which they are evaluated."""

import hashlib
import itertools
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import UserError, one_line, require


logger = logging.getLogger("neobert.pseudo_perplexity")


def read_texts(recipe):
    """Yields texts in the order of the data, from at most `max_documents` rows; rows without text are counted, and named at the end.

    Raises:
        UserError: no such file or data set, one that cannot be read, or no row with text in the column.
    """
    texts, broken, columns = 0, 0, {}
    for row in _rows(recipe):
        value = row.get(recipe.column) if isinstance(row, dict) else None
        if isinstance(value, str) and value.strip():
            texts += 1
            yield value
            continue
        broken += 1
        columns.update(row if isinstance(row, dict) else {})
    if not texts:
        found = f"; it has {', '.join(map(str, columns))}" if columns else ""
        raise UserError(f"{recipe.text} has no row with text in the column {recipe.column!r}{found}")
    if broken:
        logger.warning("%s: %d of %d rows are broken or empty and were skipped", recipe.text, broken, texts + broken)


def _rows(recipe):
    """At most `max_documents` rows: dicts, or None for one that is broken."""
    path = Path(recipe.text)
    if path.is_dir():
        rows = ({recipe.column: p.read_text(encoding="utf-8", errors="replace")} for p in sorted(path.glob("*.txt")))
    elif not path.is_file():
        rows = _hub_rows(recipe)
    elif path.suffix == ".parquet":
        rows = _parquet_rows(path)
    elif path.suffix == ".jsonl":
        rows = _json_rows(path)
    elif path.suffix == ".txt":
        texts = re.split(r"\r?\n[ \t]*\r?\n", path.read_bytes().decode("utf-8", errors="replace"))
        rows = ({recipe.column: text} for text in texts if text.strip())
    else:
        raise UserError(f"{path} is no .txt, .jsonl or .parquet file")
    return itertools.islice(rows, recipe.max_documents)


def _json_rows(path):
    with path.open("rb") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def _parquet_rows(path):
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(256):
            yield from batch.to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def _hub_rows(recipe):
    require("train", "datasets")
    from datasets import load_dataset

    try:
        rows = iter(load_dataset(recipe.text, recipe.config, split=recipe.split, streaming=True).take(recipe.max_documents))
        first = next(rows, None)
    except Exception as error:  # datasets raises its own, OSError, ValueError, ConnectionError, ... for one cause: no data
        reason = one_line(error)
        raise UserError(f"{recipe.text!r} is no local file, and was not loaded from the Hub: {reason}") from error
    if first is not None:
        yield first
        yield from rows


@dataclass(frozen=True)
class Unit:
    """One text at one length: `text` is its digest, `ids` its tokens between the special ones, `length` its bucket."""

    text: str
    length: int
    ids: tuple


def make_units(recipe, tokenizer, limit):
    """Texts at the lengths where they are evaluated, shortest first.

    Lengths count the special tokens. "cut": the first tokens of every text, at each length that it reaches. "own": every text whole (cut at the
    largest length), in the smallest bucket that holds it.

    Args:
        limit: longest input that the model takes, or None.
    Returns:
        the units, and the set of digests (`Unit.text`) of all texts that were looked at.
    Raises:
        UserError: no text is long enough.
    """
    special = tokenizer.num_special_tokens_to_add()
    lengths = [length for length in recipe.length_list if limit is None or length <= limit]
    if len(lengths) < len(recipe.length_list):
        logger.warning("%s takes at most %d tokens; longer buckets are left out", recipe.name, limit)
    lengths = [length for length in lengths if length > special]
    if not lengths:
        raise UserError(f"no length of {recipe.lengths} fits {recipe.name}, which takes at most {limit} tokens, {special} of them special")
    longest = lengths[-1] - special
    tokenised = {}
    for text in read_texts(recipe):
        ids = tokenizer(text, add_special_tokens=False, truncation=True, max_length=longest)["input_ids"]
        tokenised[hashlib.sha256(text.encode()).hexdigest()[:12]] = tuple(ids)
    # The same texts at every length, as far as they reach: lengths then differ in length alone.
    chosen = sorted(tokenised.items(), key=lambda item: len(item[1]), reverse=True)[: recipe.texts]
    units = []
    for name, ids in chosen:
        if recipe.bucketing == "cut":
            units += [Unit(name, length, ids[: length - special]) for length in lengths if length <= len(ids) + special]
        elif ids:
            units.append(Unit(name, next(length for length in lengths if len(ids) + special <= length), ids))
    if not units:
        reach = f"the longest has {len(chosen[0][1]) + special} tokens" if chosen else "there is no text"
        raise UserError(f"no text of {recipe.text} reaches {lengths[0]} tokens: {reach}")
    return sorted(units, key=lambda unit: (len(unit.ids), unit.text)), set(tokenised)
