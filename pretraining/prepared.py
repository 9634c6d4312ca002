"""Prepared sets: text tokenised once into an Arrow file that is memory-mapped.

A prepared set is a folder: `texts.arrow` (column input_ids, without special tokens, never cut),
`lengths.npy` (int32, with the two special tokens) and `prepared.json` (source, tokenizer, counts).
It appears complete, or not at all.
"""

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
from datasets import Dataset, concatenate_datasets
from tqdm import tqdm

from ..common.errors import UserError, one_line
from ..common.files import read_json, write_json
from ..common.folders import new_folder
from ..common.output import differences
from ..common.secrets import redacted
from .sources import load_rows, shares_of, source_key


ROWS_AT_ONCE = 1000


class Part(NamedTuple):
    """A weighted source: its name in the log, how many texts it has, its share of all texts."""

    name: str
    texts: int
    share: float


@dataclass(frozen=True)
class TokenisedTexts:
    """Tokenised texts: `rows` is a `datasets.Dataset` with input_ids, `lengths` (texts,) int32
    counts the two special tokens too; `parts` are the weighted sources, one after another."""

    rows: Dataset
    lengths: np.ndarray
    parts: tuple[Part, ...] = ()

    @classmethod
    def joined(cls, tokens, shares):
        """Several as one of weighted sources.

        Args:
            tokens: list of `TokenisedTexts`.
            shares: {name in the log: share of the texts} of each.
        Raises:
            UserError: a share is less than one text in a pass over all of them.
        """
        count = sum(len(each.lengths) for each in tokens)
        for name, share in shares.items():
            if share * count < 1:
                raise UserError(
                    f"the weight of {name} is a share of {share:.1g}, less than one of all "
                    f"{count:,} texts; give it a weight of {1 / count:.1g} of the others' or "
                    "more, or leave it out"
                )
        parts = zip(shares, (len(each.lengths) for each in tokens), shares.values())
        return cls(
            concatenate_datasets([each.rows for each in tokens]),
            np.concatenate([each.lengths for each in tokens]),
            tuple(Part(*part) for part in parts),
        )


def token_ids(tokenizer, texts):
    """Ids of each text, lists without special tokens and never cut."""
    return tokenizer(
        list(texts),
        add_special_tokens=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


def tokenizer_fingerprint(tokenizer):
    """Short hash of a tokenizer: its vocabulary and how it tokenises a probe sentence."""
    probe = tokenizer("Ünïcode, CamelCase and 3.14 numbers!", add_special_tokens=True)["input_ids"]
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha1(json.dumps([vocabulary, probe]).encode()).hexdigest()[:16]


def _key(sources, tokenizer):
    return {
        **source_key(sources),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "vocab_size": len(tokenizer),
    }


def source_digest(sources, tokenizer):
    """One line that tells sources apart: names without folders, and a hash of the files' content,
    subset, split, column and tokenizer; of weighted sources their shares."""
    if shares := shares_of(sources):
        each = (source_digest((replace(source, weight=None),), tokenizer) for source in sources)
        return ", ".join(f"{share:.6g} of {one}" for share, one in zip(shares.values(), each))
    key = _key(sources, tokenizer)
    digest = hashlib.sha1(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    return f"{key['dataset']} ({digest})"


def prepare(sources, out, tokenizer):
    """Tokenises sources into a prepared set at `out`; nothing to do when it is there already.

    Args:
        sources: tuple of `Source`.
    Returns:
        the contents of prepared.json.
    Raises:
        UserError: `out` holds another source's set or other files, another process prepares it, or
            no row has text.
    """
    out, key = Path(out), redacted(_key(sources, tokenizer))
    if (out / "prepared.json").is_file():
        summary = read_json(out / "prepared.json")
        if other := differences({name: summary.get(name) for name in key}, key):
            raise UserError(f"{out} was prepared otherwise ({other}); choose another --prepared")
        return summary
    number = pyarrow.uint16() if len(tokenizer) <= 2**16 else pyarrow.int32()
    schema = pyarrow.schema({"input_ids": pyarrow.list_(number)})
    lengths, rows = [], 0
    with (
        _tokenizer_threads(),
        new_folder(out) as folder,
        tqdm(desc=f"tokenising {key['dataset']}", unit=" rows") as bar,
        pyarrow.ipc.new_stream(folder / "texts.arrow", schema) as writer,
    ):
        for batch in load_rows(sources).iter(ROWS_AT_ONCE):
            texts = [text for text in batch["text"] if text]
            ids = [row for row in token_ids(tokenizer, texts) if row] if texts else []
            writer.write(pyarrow.record_batch([pyarrow.array(ids, schema.types[0])], schema=schema))
            lengths.append(np.array([len(row) + 2 for row in ids], dtype=np.int32))
            rows += len(batch["text"])
            bar.update(len(batch["text"]))
        joined = np.concatenate([np.zeros(0, dtype=np.int32), *lengths])
        if not len(joined):
            raise UserError(
                f"dataset {key['dataset']}: none of its {rows} rows has text in column "
                f"{sources[0].column!r}"
            )
        np.save(folder / "lengths.npy", joined)
        tokens = int(joined.sum(dtype=np.int64))
        summary = {**key, "rows": rows, "kept": len(joined), "tokens": tokens}
        write_json(folder / "prepared.json", summary)
    return summary


@contextlib.contextmanager
def _tokenizer_threads():
    """Within it a tokenizer uses all cores; nothing may fork."""
    previous = os.environ.get("TOKENIZERS_PARALLELISM", "false")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = previous


def load_prepared(folder, tokenizer):
    """The tokens of a prepared set.

    Returns:
        `TokenisedTexts`, memory-mapped, and the contents of prepared.json.
    Raises:
        UserError: it is not there or cannot be read, or was made with another tokenizer.
    """
    folder = Path(folder)
    try:
        summary = read_json(folder / "prepared.json")
        rows = Dataset.from_file(str(folder / "texts.arrow"))
        lengths = np.load(folder / "lengths.npy", mmap_mode="r")
    except Exception as error:  # OSError, EOFError, pyarrow's own, ... for one cause
        raise UserError(
            f"the prepared set {folder} cannot be read ({one_line(error)}); prepare it again in "
            "another folder"
        ) from error
    if summary["tokenizer"] != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"{folder} was tokenised with another tokenizer ({summary['vocab_size']} tokens; this "
            f"one has {len(tokenizer)}); prepare it again"
        )
    return TokenisedTexts(rows, lengths), summary


def tokenise_texts(texts, tokenizer):
    """`TokenisedTexts` in memory, of a list of texts; empty ones are left out. For evaluation and
    tests."""
    ids = [row for row in token_ids(tokenizer, texts) if row]
    lengths = np.array([len(row) + 2 for row in ids], dtype=np.int32)
    return TokenisedTexts(Dataset.from_dict({"input_ids": ids}), lengths)


def describe(summary):
    """One line on what was read, what was skipped among it."""
    return (
        f"{summary['kept']:,} of {summary['rows']:,} rows, {summary['tokens']:,} tokens; "
        f"{summary['rows'] - summary['kept']:,} empty rows skipped"
    )
