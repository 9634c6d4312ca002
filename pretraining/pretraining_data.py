"""Pre-training text: read from the Hub or from local files, tokenised once into shards that carry their lengths.

A prepared set is a folder: `shard-00000-of-00008/` ... (saved `datasets`, columns input_ids without special tokens, and length with the
two special tokens) and `prepared.json` (source, tokenizer, counts), written last. A run that is stopped while preparing continues with
the missing shards.
"""

import codecs
import glob
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, IterableDataset, Sequence, Value, concatenate_datasets, load_dataset, load_from_disk
from datasets.utils.logging import disable_progress_bar, enable_progress_bar
from tqdm import tqdm

from ..common.errors import UserError, one_line
from ..common.files import write_json


# What a row became: a token count, or one of these.
EMPTY, BROKEN = 0, -1
# Bytes that are no UTF-8 become this code point, which no text may hold, so that their row alone is broken and not its file.
_UNDECODABLE = "\ufdd0"
codecs.register_error("neobert.undecodable", lambda error: (_UNDECODABLE, error.end))
_TEXT_ENDINGS = {".txt": "text", ".text": "text", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


def is_local(dataset):
    """Whether every source is local."""
    return all(local_files(name) is not None for name, *_ in _sources(dataset, None))


def local_files(dataset):
    """(kind, files) of a local source, or None for a Hub name. Kinds: text (a text a line), jsonl, parquet, saved, prepared."""
    path = Path(dataset)
    if path.is_dir():
        if (path / "prepared.json").is_file():
            return "prepared", [path]
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return "saved", [path]
        files = sorted(file for file in path.rglob("*") if _ending(file) in _TEXT_ENDINGS)
    elif path.is_file():
        files = [path]
    elif any(sign in dataset for sign in "*?["):
        files = sorted(file for file in map(Path, glob.glob(dataset, recursive=True)) if file.is_file())
    elif path.suffix or dataset.startswith((".", "/", "~")) or dataset.count("/") > 1:
        files = []
    else:
        return None
    kinds = {_TEXT_ENDINGS.get(_ending(file)) for file in files}
    if not files or len(kinds) > 1 or None in kinds:
        found = "nothing" if not files else ", ".join(sorted({file.suffix or "no ending" for file in files}))
        raise UserError(f"dataset {dataset}: expected files of one kind among {', '.join(_TEXT_ENDINGS)} (or a saved set), found {found}")
    return kinds.pop(), files


def _ending(path):
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".bz2", ".xz", ".zst")]
    return suffixes[-1] if suffixes else ""


def _sources(dataset, config):
    """[(name, subset, revision)] of "name:subset@revision, other name"; a plain name takes `config`."""
    names = [name.strip() for name in dataset.split(",") if name.strip()]
    if not names:
        raise UserError("dataset is empty; give a Hub name or a path")
    found = []
    for name in names:
        subset, revision = config, None
        if not Path(name).exists():
            name, _, revision = name.partition("@")
            name, _, own = name.partition(":")
            subset = own or config
        found.append((name, subset, revision or None))
    return found


def load_rows(dataset, config=None, split="train", text_column="content", streaming=False):
    """Rows of one or several sources ("name:subset@revision, other name"), one after another, with one text column named "text".

    Returns:
        a `datasets.Dataset` or, when streaming, `IterableDataset`, and the kind of the sources (jsonl: the text is undecoded lines).
    Raises:
        UserError: a source, its split or its column is not there or holds no text, a file cannot be read, or jsonl is mixed with other kinds.
    """
    parts = [_load_source(*source, split, text_column, streaming) for source in _sources(dataset, config)]
    kinds = {kind for _, kind in parts}
    if len(kinds) > 1 and "jsonl" in kinds:
        raise UserError(f"dataset {dataset}: jsonl files cannot be mixed with other kinds of source")
    return (parts[0][0] if len(parts) == 1 else concatenate_datasets([rows for rows, _ in parts])), kinds.pop()


def _load_source(dataset, config=None, revision=None, split="train", text_column="content", streaming=False):
    local = local_files(dataset)
    kind = local[0] if local else "hub"
    try:
        rows = _open_source(dataset, config, revision, split, streaming, kind, local)
        column = "text" if kind in ("text", "jsonl") else text_column
        names = rows.column_names
        if names is None:
            names = list(next(iter(rows), {}))
        if column not in names:
            found = f"only {', '.join(names)}" if names else "nor any row"
            raise UserError(f"dataset {dataset} has no column {column!r}, {found}; name the text column with text_column")
        rows = _as_strings(rows.select_columns([column]), column, dataset)
        if kind == "jsonl":
            _check_json_column(dataset, rows, text_column)
    except UserError:
        raise
    except Exception as error:  # pyarrow's, gzip's, datasets' own, OSError, ... for one cause: the source cannot be read
        reason = one_line(error.__cause__ or error)
        reason = "it has no rows" if "corresponds to no data" in reason else reason
        place = "from the Hub " if kind == "hub" else ""
        raise UserError(f"dataset {dataset} cannot be read {place}({reason or type(error).__name__})") from error
    return (rows if column == "text" else rows.rename_column(column, "text")), kind


def _open_source(dataset, config, revision, split, streaming, kind, local):
    """Rows of one source with all of its columns."""
    if kind == "hub":
        return load_dataset(dataset, config, split=split, revision=revision, streaming=streaming)
    if kind == "prepared":
        raise UserError(f"dataset {dataset} is a prepared set; give it alone, and not streaming")
    if kind == "saved":
        rows = load_from_disk(str(local[1][0]))
        if isinstance(rows, dict):
            if split not in rows:
                raise UserError(f"dataset {dataset} has no split {split!r}, only {', '.join(rows)}")
            rows = rows[split]
        return rows.to_iterable_dataset() if streaming else rows
    files = {"train": [str(file) for file in local[1]]}
    if kind == "parquet":
        # Without a size, the first row group's is taken, which may be 0.
        return load_dataset("parquet", data_files=files, split="train", streaming=streaming, batch_size=1000)
    lines = {"encoding": "utf-8-sig", "encoding_errors": "neobert.undecodable", "features": Features({"text": Value("string")})}
    return load_dataset("text", data_files=files, split="train", streaming=streaming, **lines)


def _as_strings(rows, column, dataset):
    """The column as one type, so that sources can be joined; UserError where it holds something else than text."""
    feature = rows.features[column] if rows.features is not None else Value("string")
    name = getattr(feature, "dtype", type(feature).__name__)
    if name not in ("string", "large_string", "string_view"):
        raise UserError(f"dataset {dataset}: column {column!r} holds {name}, not text; name the text column with text_column")
    if name == "string":
        return rows
    if isinstance(rows, IterableDataset):
        # A cast would leave the stream's Arrow tables as they are, which do not join tables of another type.
        return rows.map(dict, features=Features({column: Value("string")}))
    return rows.cast_column(column, Value("string"))


def _check_json_column(dataset, rows, column):
    """The column must be in one of the first 100 objects."""
    seen, objects = set(), 0
    for row in rows:
        if objects == 100:
            break
        try:
            record = json.loads(row["text"])
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            if column in record:
                return
            seen.update(record)
            objects += 1
    found = f"only {', '.join(sorted(seen))}" if seen else "nor any row of JSON"
    raise UserError(f"dataset {dataset} has no column {column!r}, {found}; name the text column with text_column")


class Tokenise:
    """Batched `map` function: texts to input_ids (no special tokens, never cut) and length (with the two special tokens).

    A row that is empty gets length EMPTY, one that is no text (broken JSON, wrong type) BROKEN.
    """

    def __init__(self, tokenizer, kind, text_column):
        self.tokenizer, self.json_column = tokenizer, text_column if kind == "jsonl" else None

    def text(self, value):
        """The row's text, or None for a broken row."""
        if self.json_column is not None:
            if not value.strip():
                return ""
            try:
                value = json.loads(value)[self.json_column]
            except (ValueError, KeyError, TypeError, RecursionError):
                return None
        if not isinstance(value, str) or _UNDECODABLE in value:
            return None
        try:
            value.encode()  # half of a surrogate pair, which JSON can name, is no text
        except UnicodeEncodeError:
            return None
        return value

    def __call__(self, batch):
        texts = [self.text(value) for value in batch["text"]]
        ids = self.tokenizer(
            [text or "" for text in texts],
            add_special_tokens=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        lengths = [BROKEN if text is None else len(row) + 2 if row else EMPTY for text, row in zip(texts, ids)]
        return {"input_ids": ids, "length": lengths}


def tokenizer_fingerprint(tokenizer):
    """Short hash of a tokenizer: its vocabulary and how it tokenises a probe sentence."""
    probe = tokenizer("Ünïcode, CamelCase and 3.14 numbers!", add_special_tokens=True)["input_ids"]
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha1(json.dumps([vocabulary, probe]).encode()).hexdigest()[:16]


def _content(files):
    """Count, bytes and a hash of local files: names without folders, and of each file 16 blocks of 64 KiB from its start to its end."""
    digest, total, block = hashlib.sha1(), 0, 1 << 16
    for path in files:
        size = path.stat().st_size
        total += size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for i in range(16):
                file.seek(i * max(block, -(-(size - block) // 15)))
                digest.update(file.read(block))
    return f"files: {len(files)}, bytes: {total}, hash: {digest.hexdigest()[:12]}"


def _text_files(local, split):
    """The files that hold a local source's text: of a saved or prepared set its tables, in `split` where it has splits."""
    kind, files = local
    if kind not in ("saved", "prepared"):
        return files
    folder = files[0] / split if (files[0] / "dataset_dict.json").is_file() else files[0]
    return sorted(folder.rglob("data*.arrow"))  # cache-*.arrow is what datasets made of them


def _source_key(dataset, config, split, text_column, tokenizer):
    sources = _sources(dataset, config)
    found = [(name, local_files(name)) for name, *_ in sources]
    files = [file for _, local in found if local for file in _text_files(local, split)]
    revisions = [revision for *_, revision in sources]
    return {
        "dataset": ", ".join(Path(name).name if local else name for name, local in found),
        "content": _content(files) if files else None,
        "config": config,
        "revisions": revisions if any(revisions) else None,
        "split": split,
        "text_column": text_column,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "vocab_size": len(tokenizer),
    }


def source_digest(dataset, config, split, text_column, tokenizer):
    """One line that tells sources apart: names without folders, and a hash of the files' content, subset, split, column and tokenizer."""
    key = _source_key(dataset, config, split, text_column, tokenizer)
    return f"{key['dataset']} ({hashlib.sha1(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]})"


def prepare(dataset, out, tokenizer, config=None, split="train", text_column="content", workers=1, shards=None):
    """Tokenises a source into a prepared set at `out`, or continues doing so; nothing to do when it is there already.

    Args:
        workers: processes.
        shards: parts that are saved one by one; by default one for every 200,000 rows.
    Returns:
        the contents of prepared.json.
    Raises:
        UserError: `out` holds another source's set, or no row has text.
    """
    if workers < 1:
        raise UserError(f"workers must be at least 1, but {workers} was given")
    out = Path(out)
    key = _source_key(dataset, config, split, text_column, tokenizer)
    begun = out / "source.json"
    if begun.is_file():
        other = json.loads(begun.read_text())
        different = [name for name in key if other.get(name) != key[name]]
        if different:
            raise UserError(
                f"{out} was prepared with another {different[0]} ({other.get(different[0])}, now {key[different[0]]}); choose another prepared_dir"
            )
    if (out / "prepared.json").is_file():
        return json.loads((out / "prepared.json").read_text())
    rows, kind = load_rows(dataset, config, split, text_column)
    if not len(rows):
        raise UserError(f"dataset {dataset} has no rows")
    write_json(begun, key)
    shards = shards or -(-len(rows) // 200_000)
    id_type = "uint16" if len(tokenizer) <= 2**16 else "int32"
    features = Features({"input_ids": Sequence(Value(id_type)), "length": Value("int64")})
    totals = {"rows": 0, "kept": 0, "empty": 0, "broken": 0, "tokens": 0}
    for number in tqdm(range(shards), desc=f"tokenising {dataset}", unit="shard", disable=shards == 1):
        counts = _prepare_shard(rows, number, shards, out, Tokenise(tokenizer, kind, text_column), features, workers)
        for name, count in counts.items():
            totals[name] += count
    if not totals["kept"]:
        raise UserError(f"dataset {dataset}: none of its {totals['rows']} rows has text in column {text_column!r}")
    summary = {**key, "shards": shards, **totals}
    write_json(out / "prepared.json", summary)
    return summary


def _prepare_shard(rows, number, shards, out, tokenise, features, workers):
    """Tokenises and saves one shard, unless it is there; returns its counts."""
    folder = out / f"shard-{number:05d}-of-{shards:05d}"
    if folder.is_dir():
        return json.loads((folder / "counts.json").read_text())
    for left in out.glob(f".{folder.name}.*"):  # of a run that was killed here
        shutil.rmtree(left, ignore_errors=True)
    shard = rows.shard(num_shards=shards, index=number, contiguous=True)
    workers = min(workers, len(shard))
    scratch = out / f".{folder.name}.map"  # the library's cache of the result, which the saved shard replaces
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
    lengths = np.asarray(tokens.with_format("numpy")["length"])
    counts = {
        "rows": len(lengths),
        "kept": int((lengths > 0).sum()),
        "empty": int((lengths == EMPTY).sum()),
        "broken": int((lengths == BROKEN).sum()),
        "tokens": int(lengths[lengths > 0].sum()),
    }
    temporary = out / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    disable_progress_bar()
    try:
        tokens.select(np.flatnonzero(lengths > 0)).save_to_disk(str(temporary))
    finally:
        enable_progress_bar()
    write_json(temporary / "counts.json", counts)
    del tokens
    shutil.rmtree(scratch, ignore_errors=True)
    os.replace(temporary, folder)
    return counts


def load_prepared(folder, tokenizer):
    """The tokens of a prepared set.

    Returns:
        `datasets.Dataset` (input_ids, length) and the contents of prepared.json.
    Raises:
        UserError: it is not whole, or was made with another tokenizer.
    """
    folder = Path(folder)
    if not (folder / "prepared.json").is_file():
        raise UserError(f"{folder} is not a whole prepared set; finish it with: neobert pretrain <recipe> --prepare")
    summary = json.loads((folder / "prepared.json").read_text())
    if summary["tokenizer"] != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"{folder} was tokenised with another tokenizer ({summary['vocab_size']} tokens; this one has {len(tokenizer)}); prepare it again"
        )
    shards = [folder / f"shard-{number:05d}-of-{summary['shards']:05d}" for number in range(summary["shards"])]
    return concatenate_datasets([load_from_disk(str(shard)) for shard in shards if (shard / "state.json").is_file()]), summary


def tokens_from_texts(texts, tokenizer):
    """A small tokenised set in memory, for evaluation and tests."""
    rows = Tokenise(tokenizer, "text", None)({"text": list(texts)})
    kept = [i for i, length in enumerate(rows["length"]) if length > 0]
    return Dataset.from_dict({name: [values[i] for i in kept] for name, values in rows.items()})


def describe(summary):
    """One line on what was read, what was skipped among it."""
    skipped = f"{summary['empty']:,} empty and {summary['broken']:,} broken rows skipped"
    return f"{summary['kept']:,} of {summary['rows']:,} rows, {summary['tokens']:,} tokens; {skipped}"
