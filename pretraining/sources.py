"""Where the text of a run comes from: Hub data sets, local files, sets that `datasets` saved; read
as rows with one column, "text"."""

import functools
import glob
import hashlib
import itertools
import math
import os
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from datasets import (
    Dataset,
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)

from ..common import __version__
from ..common.arguments import typed
from ..common.checkpoints import is_main
from ..common.errors import UserError, one_line, require
from ..common.rows import FORMATS, JSONL, Place, check_column, read_rows, row_format


# Endings of names that are meant as files, so that the Hub need not be asked for them.
_FILE_ENDINGS = (*FORMATS, ".gz", ".bz2", ".xz", ".zst", ".arrow", ".zip")


@dataclass(frozen=True)
class Source:
    """One place that text is read from.

    Args:
        name: of a data set on the Hub, or a file, a folder, a pattern, a saved or a prepared set.
        subset, revision, split: of a Hub data set; a saved set has splits too.
        column: with the text; files of plain text have none.
        weight: probability that a text of the run is one of this source, relative to those of the
            other sources; None: as many as it has.
    """

    name: str
    subset: str | None = None
    revision: str | None = None
    split: str = "train"
    column: str = "text"
    weight: float | None = None

    @property
    def local(self):
        """(kind, files) of a local source, None for a Hub name; see `local_files`."""
        return local_files(self.name)


def parse_sources(dataset, subset=None, split="train", column="text"):
    """The sources of a recipe's `dataset`: a name or a list; "name:subset@revision, other name" is
    a list too, unless it is a file's name. An entry of the list may be a mapping with name, weight,
    subset, split and column.

    Raises:
        UserError: there is no name; weights that cannot be.
    """
    found = []
    for entry in dataset if isinstance(dataset, (list, tuple)) else [dataset]:
        own = {"subset": subset, "split": split, "column": column}
        if isinstance(entry, dict):
            own |= _typed(entry)
            names = [own.pop("name")]
        else:
            entry = str(entry)
            names = [entry] if os.path.exists(entry) else entry.split(",")
        for name in filter(None, map(str.strip, names)):
            subset_of_name = revision = None
            if not os.path.exists(name):
                name, _, revision = name.partition("@")
                name, _, subset_of_name = name.partition(":")
            given = {**own, "subset": subset_of_name or own["subset"]}
            found.append(Source(name, revision=revision or None, **given))
    if not found:
        raise UserError("dataset is empty; give a Hub name or a path")
    _check_weights(found)
    return tuple(found if len(found) > 1 else [replace(found[0], weight=None)])


_ENTRY = {"name": str, "weight": float, "subset": str, "split": str, "column": str}


def _typed(entry):
    """A mapping of `dataset`, in the types of `Source`."""
    entry = typed(entry, _ENTRY, "of dataset", otherwise=f"an entry has {', '.join(_ENTRY)}")
    if not entry.get("name", "").strip():
        raise UserError("an entry of dataset has no name; give {name: FILE, weight: 0.9}")
    return entry


def _check_weights(sources):
    weights = [source.weight for source in sources]
    if weights == [None] * len(weights):
        return
    if None in weights:
        name = sources[weights.index(None)].name
        raise UserError(
            f"dataset {name} has no weight, but others have; give every source one, or none"
        )
    for source in sources:
        if not 0 < source.weight < math.inf:  # NaN is neither
            raise UserError(
                f"dataset {source.name}: weight must be a number above 0, but {source.weight} was "
                "given"
            )
    places = [
        (os.path.realpath(source.name), source.subset, source.revision, source.split)
        for source in sources
    ]
    for place, source in zip(places, sources):
        if places.count(place) > 1:
            raise UserError(f"dataset {source.name} is there twice; give it once, with one weight")


def is_path(name):
    """Whether a name that is not there can only be meant as a local one, so that the Hub need not
    be asked."""
    path = Path(name)
    if (
        path.suffix in _FILE_ENDINGS
        or name.startswith((".", "/", "~"))
        or name.endswith("/")
        or name.count("/") > 1
    ):
        return True
    return "/" in name and Path(path.parts[0]).is_dir()


def local_files(name):
    """(kind, files) of a local source, or None for a Hub name. Kinds: rows (of `common.rows`),
    parquet, saved, prepared.

    Raises:
        UserError: there is nothing, or files of no known format or of several.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "prepared.json").is_file():
            return "prepared", [path]
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return "saved", [path]
        files = sorted(file for file in path.rglob("*") if row_format(file))
    elif path.is_file():
        files = [path]
    elif any(sign in name for sign in "*?["):
        files = sorted(
            file for file in map(Path, glob.glob(name, recursive=True)) if file.is_file()
        )
    elif is_path(name):
        files = []
    else:
        return None
    formats = {".jsonl" if row_format(file) in JSONL else row_format(file) for file in files}
    if not files or len(formats) > 1 or None in formats:
        found = (
            "nothing"
            if not files
            else ", ".join(sorted({file.suffix or "no ending" for file in files}))
        )
        raise UserError(
            f"dataset {name}: expected files of one format among {', '.join(FORMATS)} (or a saved "
            f"set), found {found}"
        )
    if any(file.suffix == ".zst" for file in files):
        require("train", "zstandard")
    return "parquet" if formats == {".parquet"} else "rows", files


# ------------------------------------------------------------------------------------------------
# reading


def load_rows(sources, streaming=False):
    """Rows of all sources, one source after another, with one column named "text"; None where a row
    is broken.

    Returns:
        a `datasets.Dataset` or, when streaming, `IterableDataset`.
    Raises:
        UserError: a source, its split or its column is not there or holds no text, or a file cannot
            be read.
    """
    parts = [_load_source(source, streaming) for source in sources]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def _load_source(source, streaming):
    local = source.local
    try:
        if local and local[0] == "rows":
            return _open_files(source, local[1], streaming)
        rows = _open(source, local, streaming)
        names = rows.column_names
        if names is None:
            names = list(next(iter(rows), {}))
        if source.column not in names:
            raise UserError(_no_column(source, ", ".join(names)))
        rows = _as_strings(rows.select_columns([source.column]), source.column, source)
    except UserError:
        raise
    # pyarrow's, gzip's, datasets' own, OSError, ... for one cause: the source cannot be read
    except Exception as error:
        reason = one_line(error.__cause__ or error)
        reason = "it has no rows" if "corresponds to no data" in reason else reason
        place = "" if local else "from the Hub "
        raise UserError(
            f"dataset {source.name} cannot be read {place}({reason or type(error).__name__})"
        ) from error
    return rows if source.column == "text" else rows.rename_column(source.column, "text")


def _open_files(source, files, streaming):
    """Rows of text, jsonl, csv or tsv files."""
    if row_format(files[0]) == ".txt":
        column = "text"
        _warn_of_wrapped_lines(source.name, tuple(files))
    else:
        column = source.column
        check_column(files, column, "--column")
    kind = IterableDataset if streaming else Dataset
    # The library's cache goes by what the generator is given, so by the files' content and times
    # too.
    times = " ".join(str(file.stat().st_mtime_ns) for file in files)
    given = {
        "files": [str(file) for file in files],
        "column": column,
        "content": f"{_content(files)} {times} {__version__}",
    }
    return kind.from_generator(
        _texts, features=Features({"text": Value("string")}), gen_kwargs=given
    )


def _texts(files, column, content=None):
    """{"text": text, or None for a broken row} of files; `content` tells them from others of these
    names."""
    for file in map(Path, files):
        broken = []
        for _, row in read_rows(file, start=Place(file, 1), broken=broken.append):
            yield from ({"text": None} for _ in broken)
            broken.clear()
            yield {"text": _text(row.get(column))}
        yield from ({"text": None} for _ in broken)


def _text(value):
    """A value, or None where it is not text; half of a surrogate pair, which JSON can name, is
    not."""
    try:
        return value if isinstance(value, str) and value.encode() is not None else None
    except UnicodeEncodeError:
        return None


def _open(source, local, streaming):
    """Rows of a set of the Hub, of parquet files or of a saved set, with all columns."""
    if local is None:
        return load_dataset(
            source.name,
            source.subset,
            split=source.split,
            revision=source.revision,
            streaming=streaming,
        )
    kind, files = local
    if kind == "prepared":
        raise UserError(
            f"dataset {source.name} is a prepared set; give it alone, and not streaming"
        )
    if kind == "parquet":
        # Without a size, the first row group's is taken, which may be 0.
        given = {"train": [str(file) for file in files]}
        return load_dataset(
            "parquet", data_files=given, split="train", streaming=streaming, batch_size=1000
        )
    rows = load_from_disk(str(files[0]))
    if isinstance(rows, dict):
        if source.split not in rows:
            raise UserError(
                f"dataset {source.name} has no split {source.split!r}, only {', '.join(rows)}"
            )
        rows = rows[source.split]
    return rows.to_iterable_dataset() if streaming else rows


def _no_column(source, names):
    return (
        f"dataset {source.name} has no column {source.column!r}, "
        f"{f'only {names}' if names else 'nor any row'}; name it with --column"
    )


def _as_strings(rows, column, source):
    """The column as one type, so that sources can be joined; UserError where it holds something
    else than text."""
    feature = rows.features[column] if rows.features is not None else Value("string")
    name = getattr(feature, "dtype", type(feature).__name__)
    if name not in ("string", "large_string", "string_view"):
        raise UserError(
            f"dataset {source.name}: column {column!r} holds {name}, not text; name the text "
            "column with --column"
        )
    if name == "string":
        return rows
    if isinstance(rows, IterableDataset):
        # A cast would leave the stream's Arrow tables as they are, which do not join tables of
        # another type.
        return rows.map(dict, features=Features({column: Value("string")}))
    return rows.cast_column(column, Value("string"))


@functools.lru_cache
def _warn_of_wrapped_lines(name, files):
    """A book or an article whose lines are broken at a width is not one text a line."""
    rows = itertools.islice(_texts(files, "text"), 1000)
    lines = [line for row in rows if (line := (row["text"] or "").strip())]
    if len(lines) < 20 or not is_main():
        return
    longest = statistics.quantiles(map(len, lines), n=10)[-1]
    ends = sum(
        line.endswith((".", "!", "?", '"', "'", ":", "\u201d", "\u2019")) for line in lines
    ) / len(lines)
    if 40 < longest <= 100 and ends < 0.5:
        print(
            f"dataset {name}: its lines look broken at a width ({100 * ends:.0f} % of them end a "
            "sentence), but every line is taken as "
            "one text; if they belong together, give jsonl with one text a row",
            file=sys.stderr,
        )


# ------------------------------------------------------------------------------------------------
# telling sources apart


def _content(files):
    """Count, bytes and a hash of local files: names without folders, and of each file 16 blocks of
    64 KiB from its start to its end."""
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


def text_files(local, split):
    """The files that hold a local source's text: of a saved or prepared set its tables, in `split`
    where it has splits."""
    kind, files = local
    if kind not in ("saved", "prepared"):
        return files
    folder = files[0] / split if (files[0] / "dataset_dict.json").is_file() else files[0]
    return sorted(folder.rglob("data*.arrow"))  # cache-*.arrow is what datasets made of them


def source_key(sources):
    """What sources are known by, as a dict of JSON types: names without folders, and the content of
    local files."""
    local = [source.local for source in sources]
    files = [
        file
        for found, source in zip(local, sources)
        if found
        for file in text_files(found, source.split)
    ]
    revisions = [source.revision for source in sources]
    return {
        "dataset": ", ".join(
            Path(source.name).name if found else source.name
            for source, found in zip(sources, local)
        ),
        "content": _content(files) if files else None,
        "subset": [source.subset for source in sources]
        if any(source.subset for source in sources)
        else None,
        "revisions": revisions if any(revisions) else None,
        "split": sources[0].split,
        "column": sources[0].column,
    }
