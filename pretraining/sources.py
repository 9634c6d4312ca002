"""Where the text of a run comes from: Hub data sets, local files, sets that `datasets` saved; read as rows with one column, "text"."""

import codecs
import glob
import hashlib
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from datasets import Features, IterableDataset, Value, concatenate_datasets, load_dataset, load_from_disk

from ..common.checkpoints import is_main
from ..common.errors import UserError, one_line, require


# Bytes that are not UTF-8 become this code point, which no text may hold, so that their row alone is broken and not its file.
UNDECODABLE = "\ufdd0"
codecs.register_error("neobert.undecodable", lambda error: (UNDECODABLE, error.end))
_TEXT_ENDINGS = {".txt": "text", ".text": "text", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_FILE_ENDINGS = (*_TEXT_ENDINGS, *_COMPRESSED, ".csv", ".tsv", ".arrow", ".zip")


@dataclass(frozen=True)
class Source:
    """One place that text is read from.

    Args:
        name: of a data set on the Hub, or a file, a folder, a pattern, a saved or a prepared set.
        subset, revision, split: of a Hub data set; a saved set has splits too.
        column: with the text; files of plain text have none.
    """

    name: str
    subset: str | None = None
    revision: str | None = None
    split: str = "train"
    column: str = "content"

    @property
    def local(self):
        """(kind, files) of a local source, None for a Hub name; see `local_files`."""
        return local_files(self.name)


def parse_sources(dataset, subset=None, split="train", column="content"):
    """The sources of a recipe's `dataset`: a name or a list; "name:subset@revision, other name" is a list too, unless it is a file's name.

    Raises:
        UserError: there is no name.
    """
    given = [dataset] if isinstance(dataset, str) else list(dataset)
    parts = [[entry] if os.path.exists(entry) else entry.split(",") for entry in map(str, given)]
    names = [name.strip() for entry in parts for name in entry if name.strip()]
    if not names:
        raise UserError("dataset is empty; give a Hub name or a path")
    found = []
    for name in names:
        own = revision = None
        if not os.path.exists(name):
            name, _, revision = name.partition("@")
            name, _, own = name.partition(":")
        found.append(Source(name, own or subset, revision or None, split, column))
    return tuple(found)


def is_path(name):
    """Whether a name that is not there can only be meant as a local one, so that the Hub need not be asked."""
    path = Path(name)
    if path.suffix in _FILE_ENDINGS or name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        return True
    return "/" in name and Path(path.parts[0]).is_dir()


def local_files(name):
    """(kind, files) of a local source, or None for a Hub name. Kinds: text (one text a line), jsonl, parquet, saved, prepared.

    Raises:
        UserError: there is nothing, or files of no known kind or of several.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "prepared.json").is_file():
            return "prepared", [path]
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return "saved", [path]
        files = sorted(file for file in path.rglob("*") if _ending(file) in _TEXT_ENDINGS)
    elif path.is_file():
        files = [path]
    elif any(sign in name for sign in "*?["):
        files = sorted(file for file in map(Path, glob.glob(name, recursive=True)) if file.is_file())
    elif is_path(name):
        files = []
    else:
        return None
    kinds = {_TEXT_ENDINGS.get(_ending(file)) for file in files}
    if not files or len(kinds) > 1 or None in kinds:
        found = "nothing" if not files else ", ".join(sorted({file.suffix or "no ending" for file in files}))
        raise UserError(f"dataset {name}: expected files of one kind among {', '.join(_TEXT_ENDINGS)} (or a saved set), found {found}")
    if any(file.suffix == ".zst" for file in files):
        require("train", "zstandard")
    return kinds.pop(), files


def _ending(path):
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    return suffixes[-1] if suffixes else ""


# ------------------------------------------------------------------------------------------------------------------- reading


def load_rows(sources, streaming=False):
    """Rows of all sources, one source after another, with one column named "text".

    Returns:
        a `datasets.Dataset` or, when streaming, `IterableDataset`, and the kind of the sources (jsonl: the text is undecoded lines).
    Raises:
        UserError: a source, its split or its column is not there or holds no text, a file cannot be read, or jsonl is mixed with other kinds.
    """
    parts = [_load_source(source, streaming) for source in sources]
    kinds = {kind for _, kind in parts}
    if len(kinds) > 1 and "jsonl" in kinds:
        names = ", ".join(source.name for source in sources)
        raise UserError(f"dataset {names}: jsonl files cannot be mixed with other kinds of source")
    return (parts[0][0] if len(parts) == 1 else concatenate_datasets([rows for rows, _ in parts])), kinds.pop()


def _load_source(source, streaming):
    local = source.local
    kind = local[0] if local else "hub"
    try:
        rows = _open(source, local, streaming)
        column = "text" if kind in ("text", "jsonl") else source.column
        names = rows.column_names
        if names is None:
            names = list(next(iter(rows), {}))
        if column not in names:
            raise UserError(_no_column(source, ", ".join(names)))
        rows = _as_strings(rows.select_columns([column]), column, source)
        if kind == "jsonl":
            _check_json(source, rows)
        if kind == "text":
            _warn_of_wrapped_lines(source, rows)
    except UserError:
        raise
    except Exception as error:  # pyarrow's, gzip's, datasets' own, OSError, ... for one cause: the source cannot be read
        reason = one_line(error.__cause__ or error)
        reason = "it has no rows" if "corresponds to no data" in reason else reason
        place = "from the Hub " if kind == "hub" else ""
        raise UserError(f"dataset {source.name} cannot be read {place}({reason or type(error).__name__})") from error
    return (rows if column == "text" else rows.rename_column(column, "text")), kind


def _open(source, local, streaming):
    """Rows of one source with all of its columns."""
    if local is None:
        return load_dataset(source.name, source.subset, split=source.split, revision=source.revision, streaming=streaming)
    kind, files = local
    if kind == "prepared":
        raise UserError(f"dataset {source.name} is a prepared set; give it alone, and not streaming")
    if kind == "saved":
        rows = load_from_disk(str(files[0]))
        if isinstance(rows, dict):
            if source.split not in rows:
                raise UserError(f"dataset {source.name} has no split {source.split!r}, only {', '.join(rows)}")
            rows = rows[source.split]
        return rows.to_iterable_dataset() if streaming else rows
    given = {"train": [str(file) for file in files]}
    if kind == "parquet":
        # Without a size, the first row group's is taken, which may be 0.
        return load_dataset("parquet", data_files=given, split="train", streaming=streaming, batch_size=1000)
    lines = {"encoding": "utf-8-sig", "encoding_errors": "neobert.undecodable", "features": Features({"text": Value("string")})}
    return load_dataset("text", data_files=given, split="train", streaming=streaming, **lines)


def _no_column(source, names):
    found = f"only {names}" if names else "nor any row"
    return f"dataset {source.name} has no column {source.column!r}, {found}; name the text column with --column"


def _as_strings(rows, column, source):
    """The column as one type, so that sources can be joined; UserError where it holds something else than text."""
    feature = rows.features[column] if rows.features is not None else Value("string")
    name = getattr(feature, "dtype", type(feature).__name__)
    if name not in ("string", "large_string", "string_view"):
        raise UserError(f"dataset {source.name}: column {column!r} holds {name}, not text; name the text column with --column")
    if name == "string":
        return rows
    if isinstance(rows, IterableDataset):
        # A cast would leave the stream's Arrow tables as they are, which do not join tables of another type.
        return rows.map(dict, features=Features({column: Value("string")}))
    return rows.cast_column(column, Value("string"))


def _check_json(source, rows):
    """The column must be in one of the first 100 objects."""
    seen, objects = set(), 0
    for number, row in enumerate(rows):
        if number == 0 and row["text"].replace(" ", "")[:2] in ("[", "[{"):
            raise UserError(f"dataset {source.name} holds one JSON array; write one object a line: jq -c '.[]' FILE.json > FILE.jsonl")
        if objects == 100:
            break
        try:
            record = json.loads(row["text"])
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            if source.column in record:
                return
            seen.update(record)
            objects += 1
    raise UserError(_no_column(source, ", ".join(sorted(seen))))


def _warn_of_wrapped_lines(source, rows):
    """A book or an article whose lines are broken at a width is not one text a line."""
    lines = [line for row in rows.take(1000) if (line := (row["text"] or "").strip())]
    if len(lines) < 20 or not is_main():
        return
    longest = statistics.quantiles(map(len, lines), n=10)[-1]
    ends = sum(line.endswith((".", "!", "?", '"', "'", ":", "\u201d", "\u2019")) for line in lines) / len(lines)
    if 40 < longest <= 100 and ends < 0.5:
        print(
            f"dataset {source.name}: its lines look broken at a width ({100 * ends:.0f} % of them end a sentence), but every line is taken as "
            "one text; if they belong together, give jsonl with one text a row",
            file=sys.stderr,
        )


# ------------------------------------------------------------------------------------------------------- telling sources apart


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


def source_key(sources):
    """What sources are known by, as a dict of JSON types: names without folders, and the content of local files."""
    local = [source.local for source in sources]
    files = [file for found, source in zip(local, sources) if found for file in _text_files(found, source.split)]
    revisions = [source.revision for source in sources]
    return {
        "dataset": ", ".join(Path(source.name).name if found else source.name for source, found in zip(sources, local)),
        "content": _content(files) if files else None,
        "subset": [source.subset for source in sources] if any(source.subset for source in sources) else None,
        "revisions": revisions if any(revisions) else None,
        "split": sources[0].split,
        "column": sources[0].column,
    }
