"""The folder that `neobert encode` writes, on a disk or in an object store: parts, each complete or
not there, and `_vectors.json`, which says what made their vectors.

A part that is there is done: whoever comes lists the folder and knows what is missing. The names
of all else begin with "_" or ".", which readers of parquet folders pass over.
"""

import base64
import contextlib
import errno
import glob
import json
import os
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import fsspec
import pyarrow
import pyarrow.parquet

from ..common.errors import UserError, one_line, shortened


VECTORS = "_vectors.json"
# Keys in the metadata of a part and of an output file: what made the vectors, and a `Part`.
ABOUT, PART = "neobert_vectors", "neobert_part"


class Cut(NamedTuple):
    """What the limit on the tokens of a text cost."""

    texts: int  # that are longer than the limit
    tokens: int  # of theirs that were not read
    longest: int  # tokens of the longest text

    @classmethod
    def of(cls, tokens, lengths):
        """Of texts that have these tokens left of so many."""
        lost = [length - len(ids) for ids, length in zip(tokens, lengths)]
        return cls(sum(count > 0 for count in lost), sum(lost), max(lengths, default=0))

    @classmethod
    def total(cls, counts):
        texts, tokens, longest = zip((0, 0, 0), *counts)
        return cls(sum(texts), sum(tokens), max(longest))


@dataclass(frozen=True)
class Part:
    """What a part says of itself.

    Attributes:
        file: name of its input file, below the source.
        size: bytes of that file.
        number: of the part in that file, from 0.
        last: whether the file ends with it.
        texts: its texts.
        cut: `Cut` of them.
        vectors: its rows, which of windows are more.
    """

    file: str
    size: int
    number: int
    last: bool
    texts: int
    cut: Cut
    vectors: int


def part_stem(file):
    """The name of the parts of a `common.data.File`, without their numbers."""
    return file.name[: file.name.lower().rindex(file.format)].replace("/", "-")


def part_name(file, number):
    return f"{part_stem(file)}-{number:05d}.parquet"


@contextlib.contextmanager
def new_file(filesystem, path):
    """A binary file that becomes `path` when the block ends well: a hard link, in an object store
    one upload. Of several processes that make it at once the file of the first one stays."""
    folder, name = os.path.split(path)
    if local := is_local(filesystem):
        os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(".tmp", f".{name}.", folder if local else None) as work:
        temporary = os.path.join(work, name)
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # The error of a write to a full disk has no path.
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
                error.filename = path
            raise
        if local:
            try:
                os.link(temporary, path)
            except OSError:  # it is there, or this is a disk without such links
                if not os.path.exists(path):
                    os.replace(temporary, path)
        else:
            with contextlib.suppress(FileExistsError):
                filesystem.put_file(temporary, path, mode="create")


def clear(filesystem, path):
    """Removes what killed processes left of a file, or with "FOLDER/" of all files of a folder."""
    if is_local(filesystem):
        folder, name = map(glob.escape, os.path.split(path))
        for left in glob.glob(f"{folder}/.{name}*.tmp"):
            shutil.rmtree(left, ignore_errors=True)


def is_local(filesystem):
    return "file" in filesystem.protocol


def read_metadata(filesystem, path, *keys):
    """(rows, the JSON under each of `keys`) of a parquet file of `neobert encode`.

    Raises:
        UserError: it is not one.
    """
    try:
        with filesystem.open(path, "rb") as file:
            read = pyarrow.parquet.read_metadata(file)
        return read.num_rows, *(json.loads(read.metadata[key.encode()]) for key in keys)
    except (OSError, KeyError, ValueError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{path} is there, and not of neobert encode or damaged ({one_line(error)}); remove it "
            "yourself, or choose another output"
        ) from error


def schema_of(vectors):
    """The Arrow schema of the parts that `vectors`, the content of `_vectors.json`, describes."""
    return pyarrow.ipc.read_schema(pyarrow.py_buffer(base64.b64decode(vectors["schema"])))


class Folder:
    """The folder at a path or URL, which need not be there yet."""

    def __init__(self, url):
        self.url = url.rstrip("/")
        self.filesystem, self.path = fsspec.url_to_fs(self.url)

    def names(self):
        """Names of what is in it, a list."""
        self.filesystem.invalidate_cache()
        if not self.filesystem.isdir(self.path):
            return []
        return [path.rpartition("/")[2] for path in self.filesystem.ls(self.path, detail=False)]

    def place(self, name):
        return f"{self.path}/{name}"

    def vectors(self):
        """What made the vectors, a dict; None in a folder that is new.

        Raises:
            UserError: the folder holds something else.
        """
        names = self.names()
        if VECTORS in names:
            return json.loads(self.filesystem.cat_file(self.place(VECTORS)))
        if not all(name.startswith((".", "_")) for name in names):
            raise UserError(
                f"{self.url} holds files and no {VECTORS}, so they are not of neobert encode; "
                "choose another folder"
            )
        if self.filesystem.isfile(self.path):
            raise UserError(f"{self.url} is a file; choose another name")
        return None

    def agreed(self, vectors):
        """`vectors`, or what another process wrote of its own before this one."""
        with new_file(self.filesystem, self.place(VECTORS)) as file:
            file.write(json.dumps(vectors, ensure_ascii=False, indent=1).encode())
        return self.vectors()

    def parts(self, files, settings):
        """{(File, number): Part} of the parts of `files` that are there.

        Args:
            settings: that they must have been made with.
        Raises:
            UserError: a part is of another input or of other vectors, or cannot be read.
        """
        names = {part_stem(file): file for file in files}
        matches = [re.fullmatch(r"(.+)-(\d{5,})\.parquet", name) for name in self.names()]
        keys = [
            (names[match[1]], int(match[2])) for match in matches if match and match[1] in names
        ]
        with ThreadPoolExecutor(16) as pool:
            return dict(zip(keys, pool.map(lambda key: self._part(*key, settings), keys)))

    def _part(self, file, number, settings):
        place = self.place(part_name(file, number))
        rows, about, part = read_metadata(self.filesystem, place, ABOUT, PART)
        check_same(about, settings, place)
        if (part["file"], part["size"]) != (file.name, file.size):
            raise UserError(
                f"{place} was made of {part['file']} of {part['size']:,} bytes, but {file.url} has "
                f"{file.size:,}; remove the parts of this file, or put new texts into a file of "
                "their own"
            )
        return Part(**{**part, "cut": Cut(*part["cut"])}, vectors=rows)

    def join(self, names, output, schema, metadata):
        """Writes parts as one file.

        Args:
            names: of the parts, in the order of the file.
            output: path or URL of the file.
            schema: of the parts.
            metadata: {key: text} of the file.
        """
        with (
            new_file(*fsspec.url_to_fs(output)) as file,
            pyarrow.parquet.ParquetWriter(
                file, schema, compression="none", use_dictionary=False
            ) as writer,
        ):
            for name in names:
                with self.filesystem.open(self.place(name), "rb") as opened:
                    part = pyarrow.parquet.ParquetFile(opened)
                    for group in range(part.num_row_groups):
                        writer.write_table(part.read_row_group(group).cast(schema))
            writer.add_key_value_metadata(metadata)

    def remove(self, output):
        """Removes the folder, whose parts are in the file `output`, and what is left of that."""
        if self.names():
            self.filesystem.rm(self.path, recursive=True)
        clear(*fsspec.url_to_fs(output))


def check_same(vectors, settings, place):
    """Raises UserError unless vectors were made with `settings`.

    Args:
        vectors: what made those that are in `place`.
    """
    for name, value in settings.items():
        if (other := vectors.get("settings", {}).get(name)) != value:
            other, value = (shortened(json.dumps(one), 200) for one in (other, value))
            raise UserError(
                f"{place} has vectors of {name.replace('_', ' ')} {other}, but {value} was given; "
                "give the same, or choose another output"
            )
