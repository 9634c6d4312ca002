"""What `neobert encode` writes: the plan of a corpus' windows, one part for each window, and one
file made of all parts."""

import base64
import itertools
import json
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..common.errors import UserError
from ..common.files import new_file, new_path, write_json, write_safetensors
from ..common.rows import Place, check_characters, open_parquet, read_rows, row_files, row_format


# Windows that a reader goes through to reach one further on, rather than enter the file anew.
_AHEAD = 32


PLAN = "plan.json"
MARK = {"neobert": "encode"}  # in the metadata of every part and output file
# Keys there: of a `Cut`, and of the number of texts, which windows make several vectors of.
CUT, TEXTS = "neobert_cut", "neobert_texts"
PLACES = ("row", "start", "end")  # columns of windows: number of the text, characters in it


class Cut(NamedTuple):
    """What the limit on the tokens of a text cost."""

    texts: int  # that are longer than the limit
    tokens: int  # of theirs that were not read
    longest: int  # tokens of the longest text

    @classmethod
    def of(cls, tokens, lengths):
        """Of texts that have these tokens left of so many."""
        lost = [length - len(ids) for ids, length in zip(tokens, lengths)]
        return cls(sum(count > 0 for count in lost), sum(lost), max(lengths))

    @classmethod
    def read(cls, metadata):
        """Of a part or an output file."""
        return cls(*json.loads(metadata[CUT]))

    @classmethod
    def total(cls, parts):
        texts, tokens, longest = zip(*parts)
        return cls(sum(texts), sum(tokens), max(longest))

    def text(self):
        return json.dumps(self)


class Window(NamedTuple):
    """Neighbouring rows of a corpus that become one part."""

    start: Place
    rows: int
    characters: int


@dataclass(frozen=True)
class Plan:
    """The windows of a corpus, and the Arrow schema of the columns that are copied from it."""

    windows: list
    schema: pyarrow.Schema

    @property
    def rows(self):
        return sum(window.rows for window in self.windows)

    def save(self, path):
        names = list(dict.fromkeys(window.start.path.name for window in self.windows))
        numbers = {name: number for number, name in enumerate(names)}
        windows = [
            [numbers[start.path.name], start.number, start.offset, *sizes]
            for start, *sizes in self.windows
        ]
        schema = base64.b64encode(self.schema.serialize()).decode()
        write_json(path, {"files": names, "schema": schema, "windows": windows})

    @classmethod
    def load(cls, path, source):
        """The plan that `save` wrote to `path`, of the file or folder `source`; None where there is
        none."""
        if not is_regular(path):
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        files = [source / name if source.is_dir() else source for name in data["files"]]
        windows = [
            Window(Place(files[file], number, offset), rows, characters)
            for file, number, offset, rows, characters in data["windows"]
        ]
        return cls(
            windows, pyarrow.ipc.read_schema(pyarrow.BufferReader(base64.b64decode(data["schema"])))
        )


def make_plan(source, text_column, keep, shard_rows, shard_characters, alike=None):
    """Reads the corpus once, from its first to its last row, and so checks it.

    Args:
        source: file or folder of `common.rows`.
        keep: columns to copy.
        shard_rows, shard_characters: most of a window; a longer text is a window of its own.
        alike: of `read_rows`.
    Raises:
        UserError: a broken row, by its place; no rows; parquet files whose copied columns differ in
            type.
    """
    windows = []
    start, rows, characters = None, 0, 0
    for place, row in read_rows(
        source, dict.fromkeys([text_column, *keep]), [text_column], alike=alike
    ):
        length = len(row[text_column])
        if rows and (rows == shard_rows or characters + length > shard_characters):
            windows.append(Window(start, rows, characters))
            rows = characters = 0
        start = start if rows else place
        rows, characters = rows + 1, characters + length
        for column in keep:
            if isinstance(row[column], str):
                check_characters(place, column, row[column])
    return Plan([*windows, Window(start, rows, characters)], _schema(source, keep))


def _schema(source, columns):
    """The Arrow schema of copied columns: their own of parquet files, and text of any other."""
    types = {}
    for file in row_files(source):
        for field in open_parquet(file).schema_arrow if row_format(file) == ".parquet" else ():
            if field.name in columns and types.setdefault(field.name, field.type) != field.type:
                raise UserError(
                    f"{file}: {field.name!r} is {field.type}, but {types[field.name]} in the files "
                    "before it"
                )
    return pyarrow.schema([(column, types.get(column, pyarrow.string())) for column in columns])


def _copied(values, kind):
    """An Arrow array of a copied column; what is not text is written as JSON where the column is
    text."""
    if kind == pyarrow.string():
        values = [
            value if value is None or isinstance(value, str) else json.dumps(value)
            for value in values
        ]
    return pyarrow.array(values, kind)


class WindowReader:
    """Reads windows by their numbers; one that comes a little after the last is read on to, any
    other is entered at its start."""

    def __init__(self, source, columns, windows):
        self.source, self.columns, self.windows = source, columns, windows
        self._rows, self._next = None, None

    def read(self, number):
        """[(Place, row), ...] of one window."""
        if self._rows is None or not 0 <= number - self._next <= _AHEAD:
            self._rows = read_rows(self.source, self.columns, start=self.windows[number].start)
            self._next = number
        passed = sum(window.rows for window in self.windows[self._next : number])
        self._next = number + 1
        rows = list(itertools.islice(self._rows, passed, passed + self.windows[number].rows))
        if len(rows) < self.windows[number].rows:
            raise UserError(
                f"{self.source} has fewer rows than when the run began; begin anew with --overwrite"
            )
        return rows


# ------------------------------------------------------------------------------------------------
# files


def part_path(folder, number, format):
    return folder / f"part-{number:06d}.{format}"


def part_columns(rows, schema, windows, first):
    """{name: Arrow array}: what a part has beside its vectors.

    Args:
        rows: [(Place, row), ...].
        schema: of the columns to copy.
        windows: `Windows` of the rows; those of cut texts have no places.
        first: number of the first row.
    """
    columns = {
        field.name: _copied([row[field.name] for _, row in rows], field.type) for field in schema
    }
    if windows.rows is None:
        return columns
    places = (windows.rows + first, windows.starts, windows.ends)
    return {name: column.take(pyarrow.array(windows.rows)) for name, column in columns.items()} | {
        name: pyarrow.array(values) for name, values in zip(PLACES, places)
    }


def write_part(path, columns, vectors, mark):
    """Writes one part completely or not at all.

    Args:
        path: ends in .parquet or .safetensors.
        columns: of `part_columns`; in safetensors, arrays of numbers.
        vectors: (N, width).
        mark: {name: text} in the file's own metadata, by which `is_part` knows it again.
    """
    with new_file(path) as file:
        if path.suffix == ".safetensors":
            tensors = {name: column.to_numpy() for name, column in columns.items()}
            tensors["embeddings"] = np.ascontiguousarray(vectors)
            mark = {**mark, "neobert_shape": _shape_text(len(vectors), sorted(tensors))}
            file.write(save(tensors, metadata=mark))
            return
        embedding = pyarrow.FixedSizeListArray.from_arrays(
            pyarrow.array(vectors.reshape(-1)), vectors.shape[1]
        )
        columns = {**columns, "embedding": embedding}
        mark = {**mark, "neobert_shape": _shape_text(len(vectors), list(columns))}
        # Vectors of floats do not compress.
        pyarrow.parquet.write_table(
            pyarrow.table(columns, metadata=mark), file, compression="none", use_dictionary=False
        )


def is_regular(path):
    """Whether a file is neither a link nor a pipe, whose reading may never end."""
    return path.is_file() and not path.is_symlink()


def read_mark(path):
    """(rows, metadata) of a part or of an output file; None for a damaged file or one of another
    kind."""
    if not is_regular(path):
        return None
    try:
        if path.suffix == ".parquet":
            metadata = pyarrow.parquet.read_metadata(path)
            return metadata.num_rows, {
                key.decode(): value.decode() for key, value in (metadata.metadata or {}).items()
            }
        with safe_open(path, framework="numpy") as file:
            return file.get_slice("embeddings").get_shape()[0], file.metadata() or {}
    except (OSError, ValueError, SafetensorError):
        return None


def is_part(path, mark):
    """Whether a file carries this mark."""
    found = read_mark(path)
    return found is not None and mark.items() <= found[1].items()


def is_output(path, mark):
    """Whether a file is as it was written here: tables that others make of one keep its mark, but
    not its rows and columns."""
    found = read_mark(path)
    return is_part(path, mark) and found[1].get("neobert_shape") == _shape_text(
        found[0], _columns(path)
    )


def _columns(path):
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_schema(path).names
    with safe_open(path, framework="numpy") as file:
        return sorted(file.keys())


def _shape_text(rows, columns):
    return json.dumps({"rows": rows, "columns": columns})


def merge_parts(parts, output, mark, check=None):
    """One file from its parts, piece by piece, completely or not at all; rows keep their order.
    `check` is that of `new_path`."""
    mark = {
        **mark,
        "neobert_shape": _shape_text(sum(read_mark(part)[0] for part in parts), _columns(parts[0])),
    }
    with new_path(output, check) as path:
        (_merge_safetensors if output.suffix == ".safetensors" else _merge_parquet)(
            parts, path, mark
        )


def _merge_parquet(parts, path, mark):
    schema = pyarrow.parquet.read_schema(parts[0]).with_metadata(mark)
    with pyarrow.parquet.ParquetWriter(
        path, schema, compression="none", use_dictionary=False
    ) as writer:
        for part in parts:
            with pyarrow.parquet.ParquetFile(part) as file:
                for group in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(group).cast(schema))


_BLOCK = 1 << 16  # rows of a tensor in memory


def _merge_safetensors(parts, path, mark):
    def pieces(name):
        for part in parts:
            with safe_open(part, framework="numpy") as opened:
                tensor = opened.get_slice(name)
                count = tensor.get_shape()[0]
                for start in range(0, count, _BLOCK):
                    yield tensor[start : min(start + _BLOCK, count)]

    layout, rows = {}, sum(read_mark(part)[0] for part in parts)
    with safe_open(parts[0], framework="numpy") as opened:
        for name in opened.keys():
            tensor = opened.get_slice(name)
            layout[name] = (tensor.get_dtype(), (rows, *tensor.get_shape()[1:]))
    write_safetensors(path, layout, pieces, mark)
