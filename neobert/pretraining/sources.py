"""Sources of pre-training texts: Hub datasets, files, and datasets saved by `save_to_disk`.

All of them are read as a stream of rows with the column "text".
"""

import functools
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from datasets import (
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)

from ..common.data import (
    SAVED_DATASET_FILES,
    File,
    file_format,
    files,
    is_glob,
    not_text,
    numbered_rows,
    replace_surrogates,
)
from ..common.errors import UserError, one_line
from ..common.options import convert


# Type hints of an entry of `dataset` in a recipe.
_ENTRY = {"name": str, "weight": float, "split": str, "column": str}

# Blocks of a file that `content_hash` reads, and their size in bytes.
_BLOCKS = 16
_BLOCK_SIZE = 1 << 16


@dataclass(frozen=True)
class Source:
    """Source of texts.

    Attributes:
        name: Hub dataset, file, directory, glob, URL or saved dataset.
        subset: Subset of a Hub dataset.
        revision: Revision of a Hub dataset.
        split: Split of a Hub dataset or a saved dataset.
        column: Column that contains the texts; not used for files of plain text.
        weight: Sampling weight relative to those of the other sources. If None, the texts of all
            sources are used equally often.
    """

    name: str
    subset: str | None = None
    revision: str | None = None
    split: str = "train"
    column: str = "text"
    weight: float | None = None

    @functools.cached_property
    def source_type(self) -> Literal["saved", "files", "hub"]:
        """Type of the source."""
        path = Path(self.name)
        if any((path / name).is_file() for name in SAVED_DATASET_FILES):
            return "saved"

        # Names that can only be paths are not looked up on the Hub.
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
    def files(self) -> list[File]:
        """Files of a source of the type "files".

        Raises:
            UserError: If there are none.
        """
        return files(self.name)

    @functools.cached_property
    def paths(self) -> list[Path]:
        """Local files that contain the texts; empty for Hub datasets and URLs."""
        if self.source_type == "hub":
            return []
        if self.source_type == "files":
            return [Path(file.url) for file in self.files if "://" not in file.url]

        folder = Path(self.name)
        if (folder / "dataset_dict.json").is_file():
            folder = folder / self.split
        # The cache files of `datasets` are called cache-*.arrow.
        return sorted(folder.rglob("data*.arrow"))


def parse_sources(
    dataset: Any,
    split: str = "train",
    column: str = "text",
    option: str = "dataset",
) -> tuple[Source, ...]:
    """Return the sources of the option `dataset`, or of another option of the same form.

    Args:
        dataset: Name, mapping with the keys name, weight, split and column, or a list of names and
            mappings. The name of a Hub dataset may be "name:subset@revision".
        split: Split of sources that do not specify one.
        column: Column of sources that do not specify one.
        option: Name of the option in messages.

    Raises:
        UserError: If there is no entry, an entry has no name or other keys, or the weights are not
            valid.
    """
    entries = dataset if isinstance(dataset, (list, tuple)) else [dataset]
    if not entries:
        raise UserError(f"`{option}` must contain at least one source, got an empty list.")
    sources = [_parse_entry(entry, split, column, option) for entry in entries]

    weights = [source.weight for source in sources if source.weight is not None]
    are_valid = all(0 < weight < math.inf for weight in weights)
    if weights and (len(weights) < len(sources) or not are_valid):
        raise UserError(
            f"every source of `{option}` must have a weight greater than 0, or none must have a "
            f"weight, got {[source.weight for source in sources]}."
        )
    # A single source needs no sampling.
    return tuple(sources if len(sources) > 1 else [replace(sources[0], weight=None)])


def _parse_entry(entry: str | dict[str, Any], split: str, column: str, option: str) -> Source:
    """Return the source of an entry of an option such as `dataset`."""
    fields: dict[str, Any] = {"split": split, "column": column}
    fields |= convert(
        entry if isinstance(entry, dict) else {"name": entry},
        _ENTRY,
        f" in `{option}`",
        fallback=f"The keys are {', '.join(_ENTRY)}.",
    )

    name = fields.pop("name", "").strip()
    if not name:
        raise UserError(f"every entry of `{option}` must have a name. Pass a Hub name or a path.")

    # A shell expands ~ only at the start of a word, and not in a recipe.
    name = os.path.expanduser(name)
    # An @ or a colon in a path, a glob or a URL has no special meaning.
    subset = ""
    revision = ""
    is_path = (
        os.path.exists(name) or "://" in name or is_glob(name) or name.startswith((".", "/", "~"))
    )
    if not is_path:
        name, _, revision = name.partition("@")
        name, _, subset = name.partition(":")
    return Source(name, subset=subset or None, revision=revision or None, **fields)


def normalized_weights(sources: Sequence[Source]) -> list[float]:
    """Return the sampling weights of sources, which sum to 1; [] for sources without weights."""
    weights = [source.weight for source in sources if source.weight is not None]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


# ------------------------------------------------------------------------------------------------
# reading


def load_rows(sources: Iterable[Source]) -> IterableDataset:
    """Return the rows of all sources, one source after another, with the column "text".

    The shards of the dataset are the files.

    Raises:
        UserError: If a source, its split or its column does not exist, or contains no text.
    """
    parts = [_open(source) for source in sources]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def _open(source: Source) -> IterableDataset:
    """Return the rows of a source with the column "text"."""
    if source.source_type == "files":
        # The lines of a plain text file are the texts, and have no columns.
        is_plain_text = source.files[0].format == ".txt"
        return IterableDataset.from_generator(
            _text_rows,
            features=Features({"text": Value("string")}),
            gen_kwargs={
                "files": source.files,
                "column": "text" if is_plain_text else source.column,
            },
        )

    # `datasets`, pyarrow and the file system raise several types of errors for one cause.
    try:
        rows = _open_dataset(source)
        names = rows.column_names or list(next(iter(rows), {}))
    except Exception as error:
        reason = one_line(error.__cause__ or error)
        raise UserError(f"the dataset {source.name} cannot be read: {reason}.") from error

    column = source.column
    if column not in names:
        raise UserError(
            f"the dataset {source.name} has no column {column!r}, only {', '.join(names)}. Name "
            "the column with --column."
        )

    rows = rows.select_columns([column])
    feature = (rows.features or {}).get(column)
    dtype = "string" if feature is None else getattr(feature, "dtype", type(feature).__name__)
    if dtype not in ("string", "large_string", "string_view"):
        raise UserError(
            f"the column {column!r} of the dataset {source.name} must contain text, got {dtype}. "
            "Name another column with --column."
        )
    if column != "text":
        rows = rows.rename_column(column, "text")
    if dtype in ("large_string", "string_view"):
        # A cast would not convert the Arrow tables of the stream, which then could not be
        # concatenated with tables of another type.
        rows = rows.map(dict, features=Features({"text": Value("string")}))
    return rows


def _open_dataset(source: Source) -> IterableDataset:
    """Return all columns of a Hub dataset or a saved dataset."""
    if source.source_type == "hub":
        return load_dataset(
            source.name,
            source.subset,
            streaming=True,
            split=source.split,
            revision=source.revision,
        )
    saved = load_from_disk(source.name)
    if not isinstance(saved, dict):
        return saved.to_iterable_dataset()
    if source.split not in saved:
        raise UserError(f"it has no split {source.split!r}, only {', '.join(saved)}")
    return saved[source.split].to_iterable_dataset()


def _text_rows(files: Iterable[File], column: str) -> Iterator[dict[str, Any]]:
    """Yield {"text": text} for each row. The text of an empty cell is None, as in Hub datasets.

    Raises:
        UserError: If a file is damaged, lacks the column, or contains another value than text.
    """
    for file in files:
        for number, row in numbered_rows(file, [column]):
            text = row[column]
            if text is None:
                yield {"text": None}
            elif isinstance(text, str):
                yield {"text": replace_surrogates(text)}
            else:
                raise UserError(f"{file.url}, row {number + 1:,}: {not_text(column, text)}.")


# ------------------------------------------------------------------------------------------------
# identity


def source_key(sources: Sequence[Source]) -> dict[str, Any]:
    """Return the values that identify sources, in JSON types.

    Local files are identified by their content. Names do not contain directories.
    """
    # Directories are omitted from the names, so the key remains valid when files are moved.
    # Remote files are not downloaded: their names and sizes identify them.
    names = []
    paths: list[Path] = []
    urls = []
    hub = []
    for source in sources:
        names.append(source.name if source.source_type == "hub" else Path(source.name).name)
        paths += source.paths
        if source.source_type == "hub":
            hub.append([source.subset, source.revision])
        elif source.source_type == "files":
            urls += [[file.name, file.size] for file in source.files if "://" in file.url]

    return {
        "dataset": ", ".join(names),
        "content": content_hash(paths) if paths else None,
        "urls": urls or None,
        "hub": hub or None,
        "split": _joined([source.split for source in sources]),
        "column": _joined([source.column for source in sources]),
    }


def _joined(values: Sequence[str]) -> str:
    """Return one value per source as text; a value that all sources share is written once."""
    return values[0] if len(set(values)) == 1 else ", ".join(values)


def source_digest(sources: Sequence[Source]) -> str:
    """Return a line that identifies sources and their sampling weights.

    The line contains the names without directories, and a digest of the result of `source_key` and
    of the sampling weights.
    """
    key = source_key(sources)
    weights = [f"{weight:.6g}" for weight in normalized_weights(sources)]
    content = json.dumps([key, weights], sort_keys=True)
    digest = hashlib.sha1(content.encode()).hexdigest()[:12]
    return f"{key['dataset']} ({digest})"


def content_hash(paths: Iterable[Path]) -> str:
    """Return twelve hex digits that identify local files.

    Files may be very large, so the digest is computed from their names without directories, their
    sizes, and 16 blocks of 64 KiB between the start and the end of each file.
    """
    digest = hashlib.sha1()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        # The distance between blocks is rounded up, so the last block reaches the end of the
        # file. The blocks of small files are adjacent.
        step = max(_BLOCK_SIZE, -(-(size - _BLOCK_SIZE) // (_BLOCKS - 1)))
        with open(path, "rb") as file:
            for i in range(_BLOCKS):
                file.seek(i * step)
                digest.update(file.read(_BLOCK_SIZE))
    return digest.hexdigest()[:12]
