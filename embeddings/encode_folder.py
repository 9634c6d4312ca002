"""The folder that `neobert encode` writes, on a disk or in an object store: parts, each complete or
not there, and `_vectors.json`, which says what made their vectors.

A part that is there is done: whoever comes lists the folder and knows what is missing. The names
of all else begin with "_" or ".", which readers of parquet folders pass over.
"""

import base64
import contextlib
import glob
import json
import os
import re
import secrets
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
    """A binary file that becomes `path` when the block ends well: a rename, in an object store
    one upload. Several processes may make it at once: one of theirs stays."""
    if not is_local(filesystem):
        with tempfile.TemporaryDirectory() as folder:
            temporary = os.path.join(folder, "file")
            with open(temporary, "wb") as file:
                yield file
            filesystem.put_file(temporary, path)
        return
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        # Else another process had made it too, and cleared what it took for left over.
        if not (isinstance(error, FileNotFoundError) and os.path.exists(path)):
            raise


def clear(filesystem, path):
    """Removes what killed processes left of a file, or with "FOLDER/" of all files of a folder."""
    folder, name = os.path.split(path)
    if is_local(filesystem):
        for left in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}*.tmp")):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(left)


def is_local(filesystem):
    return "file" in filesystem.protocol


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
        content = json.dumps(vectors, ensure_ascii=False, indent=1).encode()
        place = self.place(VECTORS)
        with contextlib.suppress(FileExistsError):
            if is_local(self.filesystem):
                temporary = self.place(f".{VECTORS}.{secrets.token_hex(4)}.tmp")
                with new_file(self.filesystem, temporary) as file:
                    file.write(content)
                try:
                    os.link(temporary, place)  # which replaces nothing
                except FileExistsError:
                    pass
                except OSError:  # a disk without such links
                    os.replace(temporary, place)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
            else:
                self.filesystem.pipe_file(place, content, mode="create")
        return self.vectors()

    def parts(self, files, vectors, known=()):
        """{(File, number): Part} of the parts of `files` that are there.

        Args:
            vectors: what made those that are looked for.
            known: such a dict, of parts that need not be read again.
        Raises:
            UserError: a part is of another input or of other vectors, or cannot be read.
        """
        names = {part_stem(file): file for file in files}
        found = [re.fullmatch(r"(.+)-(\d{5,})\.parquet", name) for name in self.names()]
        keys = [(names[match[1]], int(match[2])) for match in found if match and match[1] in names]
        new = [key for key in keys if key not in known]
        with ThreadPoolExecutor(16) as pool:
            parts = dict(zip(new, pool.map(lambda key: self._part(*key, vectors), new)))
        return {**dict(known), **parts}

    def _part(self, file, number, vectors):
        place = f"{self.url}/{part_name(file, number)}"
        try:
            with self.filesystem.open(self.place(part_name(file, number)), "rb") as opened:
                read = pyarrow.parquet.read_metadata(opened)
            about, part = (json.loads(read.metadata[key.encode()]) for key in (ABOUT, PART))
        except (OSError, KeyError, ValueError, TypeError, pyarrow.ArrowException) as error:
            raise UserError(
                f"{place} is not a part of neobert encode, or is damaged ({one_line(error)}); "
                "remove it"
            ) from error
        check_same(about, vectors["settings"], place)
        if (part["file"], part["size"]) != (file.name, file.size):
            raise UserError(
                f"{place} was made of {part['file']} of {part['size']:,} bytes, but {file.url} has "
                f"{file.size:,}; remove the parts of this file, or put new texts into a file of "
                "their own"
            )
        return Part(**{**part, "cut": Cut(*part["cut"])}, vectors=read.num_rows)

    def join(self, names, output, schema, metadata):
        """Writes parts as one file.

        Args:
            names: of the parts, in the order of the file.
            output: path or URL of the file.
            schema: of the parts.
            metadata: {key: text} of the file.
        """
        filesystem, path = fsspec.url_to_fs(output)
        with new_file(filesystem, path) as file:
            with pyarrow.parquet.ParquetWriter(
                file, schema, compression="none", use_dictionary=False
            ) as writer:
                for name in names:
                    with self.filesystem.open(self.place(name), "rb") as opened:
                        part = pyarrow.parquet.ParquetFile(opened)
                        for group in range(part.num_row_groups):
                            writer.write_table(part.read_row_group(group).cast(schema))
                writer.add_key_value_metadata(metadata)
        clear(filesystem, path)

    def remove(self):
        """Removes the folder."""
        if self.names():
            self.filesystem.rm(self.path, recursive=True)


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
