"""Prepared sets: text tokenised once into shards, with the lengths of all texts in one file that is
memory-mapped.

A prepared set is a folder: `shard-00000-of-00008/` ... (saved `datasets`, column input_ids without
special tokens), `lengths.npy` (int32, with the two special tokens) and `prepared.json` (source,
tokenizer, counts), written last. A run that is stopped while preparing continues with the missing
shards.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Sequence, Value, concatenate_datasets, load_from_disk
from datasets.utils.logging import disable_progress_bar, enable_progress_bar
from tqdm import tqdm

from ..common.errors import UserError, one_line
from ..common.files import read_json, redacted, remove_left_overs, write_json
from ..common.outputs import check_folder
from ..common.runs import LOCK, changed_settings, locked
from .sources import load_rows, source_key
from .weighted import Part, shares_of


# What a row became: a token count, or one of these.
EMPTY, BROKEN = 0, -1


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


class Tokenise:
    """Batched `map` function: texts to input_ids (no special tokens, never cut) and length (with
    the two special tokens).

    A row that is empty gets length EMPTY, a broken one (None) BROKEN.

    Args:
        tokenizer: a fast tokenizer.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, batch):
        texts = batch["text"]
        ids = self.tokenizer(
            [text or "" for text in texts],
            add_special_tokens=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        lengths = [
            BROKEN if text is None else len(row) + 2 if row else EMPTY
            for text, row in zip(texts, ids)
        ]
        return {"input_ids": ids, "length": lengths}


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
    return (
        f"{key['dataset']} "
        f"({hashlib.sha1(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]})"
    )


def prepare(sources, out, tokenizer, workers=1, shards=None):
    """Tokenises sources into a prepared set at `out`, or continues doing so; nothing to do when it
    is there already.

    Args:
        sources: tuple of `Source`.
        workers: processes.
        shards: parts that are saved one by one; by default one for every 200,000 rows.
    Returns:
        the contents of prepared.json.
    Raises:
        UserError: `out` holds another source's set or other files, another process prepares it, or
            no row has text.
    """
    out, key = Path(out), redacted(_key(sources, tokenizer))
    check_folder(out, "prepared")
    remove_left_overs(out)
    begun = out / "source.json"
    if begun.exists():
        other = _read_own(begun, _KEY)
        for name in changed_settings({name: other.get(name) for name in key}, key):
            raise UserError(
                f"{out} was prepared with another {name} ({other.get(name)}, now {key[name]}); "
                "choose another --prepared"
            )
    elif out.exists():
        others = sorted({path.name for path in out.iterdir()} - {LOCK})
        if others:
            raise UserError(
                f"{out} holds {others[0]}, but no set that neobert pretrain prepared "
                "(source.json); choose another --prepared"
            )
    if (out / "prepared.json").exists():
        return _read_own(out / "prepared.json", _SUMMARY)
    rows = load_rows(sources)
    name = key["dataset"]
    if not len(rows):
        raise UserError(f"dataset {name} has no rows")
    with locked(out):
        write_json(begun, key)
        shards = shards or -(-len(rows) // 200_000)
        tokenise = Tokenise(tokenizer)
        features = Features(
            {
                "input_ids": Sequence(Value("uint16" if len(tokenizer) <= 2**16 else "int32")),
                "length": Value("int32"),
            }
        )
        totals = {"rows": 0, "kept": 0, "empty": 0, "broken": 0, "tokens": 0}
        for number in tqdm(
            range(shards), desc=f"tokenising {name}", unit="shard", disable=shards == 1
        ):
            counts = _prepare_shard(
                rows.shard(num_shards=shards, index=number, contiguous=True),
                _shard(out, number, shards),
                tokenise,
                features,
                workers,
            )
            totals = {each: totals[each] + counts[each] for each in totals}
        if not totals["kept"]:
            raise UserError(
                f"dataset {name}: none of its {totals['rows']} rows has text in column "
                f"{sources[0].column!r}"
            )
        _join_lengths(out, shards, totals["kept"])
        summary = {**key, "shards": shards, **totals}
        write_json(out / "prepared.json", summary)
    return summary


# What the files of a prepared set hold at least.
_KEY = {"dataset", "tokenizer", "vocab_size"}
_SUMMARY = _KEY | {"shards", "rows", "kept", "empty", "broken", "tokens"}


def _read_own(path, names):
    """The content of a JSON file of a prepared set; UserError for a file of another program."""
    data = read_json(path)
    if not (isinstance(data, dict) and names <= data.keys()):
        raise UserError(f"{path} was not written by neobert pretrain; give another folder")
    return data


def _shard(out, number, shards):
    return out / f"shard-{number:05d}-of-{shards:05d}"


def _prepare_shard(shard, folder, tokenise, features, workers):
    """Tokenises and saves one shard, unless it is there; returns its counts."""
    if folder.is_dir():
        return read_json(folder / "counts.json")
    for left in folder.parent.glob(f".{folder.name}.*"):  # of a run that was killed here
        shutil.rmtree(left, ignore_errors=True)
    workers = min(workers, len(shard))
    # the library's cache of the result, which the saved shard replaces
    scratch = folder.parent / f".{folder.name}.map"
    scratch.mkdir()
    tokens = shard.map(
        tokenise,
        batched=True,
        num_proc=workers if workers > 1 else None,
        remove_columns=shard.column_names,
        features=features,
        desc="rows",
        load_from_cache_file=False,
        cache_file_name=str(scratch / "rows.arrow"),
    )
    lengths = _column(tokens, "length")
    kept = lengths > 0
    counts = {
        "rows": len(lengths),
        "kept": int(kept.sum()),
        "empty": int((lengths == EMPTY).sum()),
        "broken": int((lengths == BROKEN).sum()),
        "tokens": int(lengths[kept].sum(dtype=np.int64)),
    }
    temporary = folder.parent / f".{folder.name}.{os.getpid()}"
    disable_progress_bar()
    try:
        tokens.select(np.flatnonzero(kept)).select_columns(["input_ids"]).save_to_disk(
            str(temporary)
        )
    finally:
        enable_progress_bar()
    np.save(temporary / "lengths.npy", lengths[kept])
    write_json(temporary / "counts.json", counts)
    del tokens
    shutil.rmtree(scratch, ignore_errors=True)
    os.replace(temporary, folder)
    return counts


def _column(rows, name):
    """A column of integers as int32; `datasets` gives it at once for a slice, and row by row
    without."""
    return np.asarray(rows.with_format("numpy")[name][:], dtype=np.int32)


def _join_lengths(out, shards, count):
    """lengths.npy of all shards in one file."""
    temporary, start = out / ".lengths.npy", 0
    lengths = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.int32, shape=(count,))
    for number in range(shards):
        part = np.load(_shard(out, number, shards) / "lengths.npy")
        lengths[start : start + len(part)] = part
        start += len(part)
    lengths.flush()
    os.replace(temporary, out / "lengths.npy")


def load_prepared(folder, tokenizer):
    """The tokens of a prepared set.

    Returns:
        `TokenisedTexts`, memory-mapped, and the contents of prepared.json.
    Raises:
        UserError: it is not complete or damaged, or was made with another tokenizer.
    """
    folder = Path(folder)
    if not (folder / "prepared.json").is_file():
        raise UserError(
            f"{folder} is not a complete prepared set; finish it with: neobert pretrain "
            "RECIPE.yaml --prepare"
        )
    summary = _read_own(folder / "prepared.json", _SUMMARY)
    if summary["tokenizer"] != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"{folder} was tokenised with another tokenizer ({summary['vocab_size']} tokens; this "
            f"one has {len(tokenizer)}); prepare it again"
        )
    try:
        shards = [_shard(folder, number, summary["shards"]) for number in range(summary["shards"])]
        rows = concatenate_datasets(
            [load_from_disk(str(shard)) for shard in shards if (shard / "state.json").is_file()]
        )
        lengths = np.load(folder / "lengths.npy", mmap_mode="r")
        if not len(rows) == len(lengths) == summary["kept"]:
            raise ValueError(
                f"it has {len(rows):,} rows and {len(lengths):,} lengths, and was made with "
                f"{summary['kept']:,}"
            )
        return TokenisedTexts(rows, lengths), summary
    except Exception as error:  # OSError, EOFError, pyarrow's own, ... for one cause
        raise UserError(
            f"the prepared set {folder} cannot be read ({one_line(error)}); prepare it again in "
            "another folder"
        ) from error


def tokenise_texts(texts, tokenizer):
    """`TokenisedTexts` in memory, of a list of texts; empty ones are left out. For evaluation and
    tests."""
    rows = Tokenise(tokenizer)({"text": list(texts)})
    kept = [i for i, length in enumerate(rows["length"]) if length > 0]
    lengths = np.array([rows["length"][i] for i in kept], dtype=np.int32)
    return TokenisedTexts(
        Dataset.from_dict({"input_ids": [rows["input_ids"][i] for i in kept]}), lengths
    )


def describe(summary):
    """One line on what was read, what was skipped among it."""
    skipped = f"{summary['empty']:,} empty and {summary['broken']:,} broken rows skipped"
    return (
        f"{summary['kept']:,} of {summary['rows']:,} rows, {summary['tokens']:,} tokens; {skipped}"
    )
