"""Where the text of a run comes from: Hub data sets, files, sets that `datasets` saved; read as a
stream of rows with one column, "text"."""

import functools
import hashlib
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from datasets import (
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)

from ..common.arguments import typed
from ..common.data import file_format, files, numbered_rows
from ..common.errors import UserError, one_line


@dataclass(frozen=True)
class Source:
    """One place that text is read from.

    Args:
        name: of a data set on the Hub, or a file, a folder, a pattern, a URL, a saved set.
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

    @functools.cached_property
    def kind(self):
        """ "saved", "files", or "hub"."""
        path = Path(self.name)
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return "saved"
        # What can only be meant as a path: the Hub need not be asked for it.
        is_path = (
            path.exists()
            or "://" in self.name
            or file_format(self.name)
            or any(sign in self.name for sign in "*?[~")
            or self.name.startswith((".", "/"))
            or self.name.count("/") > 1
        )
        return "files" if is_path else "hub"

    @functools.cached_property
    def files(self):
        """The `File`s of a source of this kind; UserError where there are none."""
        return files(self.name)

    @functools.cached_property
    def paths(self):
        """The local files that hold its text, none of other sources."""
        if self.kind == "hub":
            return []
        if self.kind == "files":
            return [Path(file.url) for file in self.files if "://" not in file.url]
        folder = Path(self.name)
        if (folder / "dataset_dict.json").is_file():
            folder = folder / self.split
        return sorted(folder.rglob("data*.arrow"))  # cache-*.arrow is what datasets made of them


def parse_sources(dataset, split="train", column="text"):
    """The sources of a recipe's `dataset`: a name or a list; of the Hub it may be
    "name:subset@revision". An entry of the list may be a mapping with name, weight, split and
    column.

    Raises:
        UserError: there is no name; weights that cannot be.
    """
    sources = []
    for entry in dataset if isinstance(dataset, (list, tuple)) else [dataset]:
        fields = {"split": split, "column": column}
        allowed = {"name": str, "weight": float, "split": str, "column": str}
        given = entry if isinstance(entry, dict) else {"name": entry}
        fields |= typed(given, allowed, "of dataset", f"an entry has {', '.join(allowed)}")
        name, subset, revision = fields.pop("name", "").strip(), None, None
        if not name:
            raise UserError("dataset has an entry without a name; give a Hub name or a path")
        if not os.path.exists(name) and "://" not in name:
            name, _, revision = name.partition("@")
            name, _, subset = name.partition(":")
        sources.append(Source(name, subset or None, revision or None, **fields))
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and (len(weights) < len(sources) or not 0 < min(weights) <= max(weights) < math.inf):
        raise UserError("give every source of dataset a weight, a number above 0, or none")
    return tuple(sources if len(sources) > 1 else [replace(sources[0], weight=None)])


def shares_of(sources):
    """Shares of the texts of weighted `Source`s, which sum to 1; [] of others."""
    if sources[0].weight is None:
        return []
    total = math.fsum(source.weight for source in sources)
    return [source.weight / total for source in sources]


# ------------------------------------------------------------------------------------------------
# reading


def load_rows(sources):
    """Rows of all sources, one source after another, with one column named "text".

    Returns:
        `datasets.IterableDataset`; its shards are the files.
    Raises:
        UserError: a source, its split or its column is not there or holds no text.
    """
    parts = [_open(source) for source in sources]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def _open(source):
    column = source.column
    if source.kind == "files":
        if source.files[0].format == ".txt":
            column = "text"
        return IterableDataset.from_generator(
            _texts,
            features=Features({"text": Value("string")}),
            gen_kwargs={"files": source.files, "column": column},
        )
    try:
        if source.kind == "hub":
            place = {"split": source.split, "revision": source.revision}
            rows = load_dataset(source.name, source.subset, streaming=True, **place)
        else:
            saved = load_from_disk(source.name)
            saved = saved[source.split] if isinstance(saved, dict) else saved
            rows = saved.to_iterable_dataset()
        names = rows.column_names or list(next(iter(rows), {}))
    except Exception as error:  # datasets' own, pyarrow's, OSError, ... for one cause
        reason = one_line(error.__cause__ or error)
        raise UserError(f"dataset {source.name} cannot be read ({reason})") from error
    if column not in names:
        raise UserError(
            f"dataset {source.name} has no column {column!r}, only {', '.join(names)}; name it "
            "with --column"
        )
    rows = rows.select_columns([column])
    kind = getattr((rows.features or {}).get(column), "dtype", "string")
    if column != "text":
        rows = rows.rename_column(column, "text")
    if kind in ("large_string", "string_view"):
        # A cast would leave the stream's Arrow tables as they are, which do not join tables of
        # another type.
        rows = rows.map(dict, features=Features({"text": Value("string")}))
    return rows


def _texts(files, column):
    """{"text": text} of each row."""
    for file in files:
        for _, row in numbered_rows(file, [column], [column]):
            yield {"text": row[column]}


# ------------------------------------------------------------------------------------------------
# telling sources apart


def source_key(sources):
    """What sources are known by, as a dict of JSON types: names without folders, and the content of
    local files."""
    paths = [path for source in sources for path in source.paths]
    hub = [source for source in sources if source.kind == "hub"]
    urls = [
        [file.name, file.size]
        for source in sources
        if source.kind == "files"
        for file in source.files
        if "://" in file.url
    ]
    names = (source.name if source.kind == "hub" else Path(source.name).name for source in sources)
    return {
        "dataset": ", ".join(names),
        "content": content_hash(paths) if paths else None,
        "urls": urls or None,
        "hub": [[source.subset, source.revision] for source in hub] or None,
        "split": ", ".join(dict.fromkeys(source.split for source in sources)),
        "column": ", ".join(dict.fromkeys(source.column for source in sources)),
    }


def content_hash(paths):
    """Twelve hex digits of local files: names without folders, sizes, and of each file 16 blocks of
    64 KiB from its start to its end, as they may be very large."""
    digest, block = hashlib.sha1(), 1 << 16
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for i in range(16):
                file.seek(i * max(block, -(-(size - block) // 15)))
                digest.update(file.read(block))
    return digest.hexdigest()[:12]
