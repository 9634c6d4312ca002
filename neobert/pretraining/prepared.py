"""Prepared sets: text tokenised once into an Arrow file that is memory-mapped.

A prepared set is a folder: `texts.arrow` (column input_ids, without special tokens, never cut) and
`prepared.json` (source, tokenizer, counts). It appears complete, or not at all.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset, concatenate_datasets
from tqdm import tqdm

from ..common.errors import UserError
from ..common.files import read_json, redacted, write_json
from ..common.folders import new_folder
from ..common.output import differences
from .sources import load_rows, shares_of, source_key


ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class TokenisedTexts:
    """Tokenised texts: `rows` is a `datasets.Dataset` with input_ids, `lengths` (texts,) int32
    counts the two special tokens too. Of weighted sources, one after another, `sizes` are the
    numbers of their texts and `shares` their weights, which sum to 1."""

    rows: Dataset
    lengths: np.ndarray
    sizes: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    @classmethod
    def of(cls, rows):
        """The texts of one set."""
        lengths = pyarrow.compute.list_value_length(rows.data.column("input_ids"))
        return cls(rows, lengths.to_numpy() + np.int32(2))

    @classmethod
    def joined(cls, tokens, shares):
        """Several as one of weighted sources, with these shares."""
        return cls(
            concatenate_datasets([each.rows for each in tokens]),
            np.concatenate([each.lengths for each in tokens]),
            tuple(len(each.lengths) for each in tokens),
            tuple(shares),
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
    subset, split, column, tokenizer and shares."""
    key = _key(sources, tokenizer)
    shares = [f"{share:.6g}" for share in shares_of(sources)]
    digest = hashlib.sha1(json.dumps([key, shares], sort_keys=True).encode()).hexdigest()[:12]
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
    tokens = kept = rows = 0
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # until something may fork again
    with (
        new_folder(out) as folder,
        tqdm(desc=f"tokenising {key['dataset']}", unit=" rows") as bar,
        pyarrow.ipc.new_stream(folder / "texts.arrow", schema) as writer,
    ):
        for batch in load_rows(sources).iter(ROWS_AT_ONCE):
            texts = [text for text in batch["text"] if text]
            ids = [row for row in token_ids(tokenizer, texts) if row] if texts else []
            writer.write(pyarrow.record_batch([pyarrow.array(ids, schema.types[0])], schema=schema))
            tokens, kept = tokens + sum(map(len, ids)), kept + len(ids)
            rows += len(batch["text"])
            bar.update(len(batch["text"]))
        if not kept:
            raise UserError(
                f"dataset {key['dataset']}: none of its {rows} rows has text in column "
                f"{sources[0].column!r}"
            )
        summary = {**key, "rows": rows, "kept": kept, "tokens": tokens + 2 * kept}
        write_json(folder / "prepared.json", summary)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return summary


def load_prepared(folder):
    """`TokenisedTexts` of a prepared set, memory-mapped."""
    return TokenisedTexts.of(Dataset.from_file(str(Path(folder) / "texts.arrow")))
