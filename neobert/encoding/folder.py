"""Output directory of `neobert encode`, on a disk or in an object store.

The directory contains the parts and `_metadata.json`, the manifest of their embeddings. A part
appears complete or not at all, so a listing of the directory shows any process which parts are
missing. The names of all other files start with "_" or ".", which readers of parquet directories
skip.
"""

import contextlib
import errno
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import fsspec
import pyarrow
import pyarrow.parquet

from ..common.data import File
from ..common.errors import UserError, one_line
from .manifest import Manifest, Truncation


MANIFEST = "_metadata.json"
# Keys in the metadata of parquet files: the manifest, and the description of a `Part`.
MANIFEST_KEY = "neobert_vectors"
PART_KEY = "neobert_part"


@dataclass(frozen=True)
class Part:
    """Description of a part, stored in its metadata.

    Attributes:
        file: Name of the input file, relative to the source.
        size: Size of the input file in bytes.
        number: Index of the part in the input file.
        last: Whether the input file ends with the part.
        texts: Number of texts.
        truncation: Truncation statistics.
        embeddings: Number of embeddings, which is larger than that of texts for windows.
    """

    file: str
    size: int
    number: int
    last: bool
    texts: int
    truncation: Truncation
    embeddings: int


# Parts by input file and index in the file.
Parts = dict[tuple[File, int], Part]


def part_stem(file: File) -> str:
    """Return the name of the parts of an input file, without their numbers."""
    # Parts are in one directory, so the directories of the input become a part of the name.
    return file.name[: file.name.lower().rindex(file.format or "")].replace("/", "-")


def part_name(file: File, number: int) -> str:
    """Return the file name of a part."""
    return f"{part_stem(file)}-{number:05d}.parquet"


@contextlib.contextmanager
def create_file_once(filesystem: Any, path: str) -> Iterator[IO[bytes]]:
    """Write a file that appears at `path` unless another process has written it first.

    The file appears with its complete content when the block has ended without an error, by a hard
    link on a disk and by one upload in an object store.

    Args:
        filesystem: File system of fsspec.
        path: Path of the file in the file system.
    """
    local = is_local(filesystem)
    if local:
        # A link to a file that does not exist yet is kept.
        path = os.path.realpath(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
    folder, name = os.path.split(path)

    # A hard link requires a temporary file on the same disk.
    with tempfile.TemporaryDirectory(".tmp", f".{name}.", folder if local else None) as work:
        temporary = os.path.join(work, name)
        try:
            with open(temporary, "wb") as file:
                yield file
                # The content must be on the disk before the name appears.
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # The error of a write to a full disk has no path.
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
                error.filename = path
            raise

        # A hard link fails if the name exists. A rename would replace the file of another process.
        if local:
            try:
                os.link(temporary, path)
            except OSError:
                # The file exists, or the disk has no hard links.
                if not os.path.exists(path):
                    os.replace(temporary, path)
        else:
            # Object stores that support it refuse to replace an object in this mode.
            with contextlib.suppress(FileExistsError):
                filesystem.put_file(temporary, path, mode="create")


def remove_stale_temporary_files(filesystem: Any, path: str) -> None:
    """Remove temporary files whose final file already exists.

    Other temporary files are kept, because a running process may still be writing them.

    Args:
        filesystem: File system of fsspec.
        path: Path of a file, or "FOLDER/" for all files of a directory.
    """
    # In an object store, an upload that was interrupted leaves no object.
    if is_local(filesystem):
        folder, name = map(glob.escape, os.path.split(path))
        for temporary in glob.glob(f"{folder}/.{name}*.tmp"):
            # The name is that of the file between a dot and a random suffix.
            parent, temporary_name = os.path.split(temporary)
            target = temporary_name[1:].rsplit(".", 2)[0]
            if os.path.exists(os.path.join(parent, target)):
                shutil.rmtree(temporary, ignore_errors=True)


def is_local(filesystem: Any) -> bool:
    """Return whether a file system is that of this machine."""
    return "file" in filesystem.protocol


def read_metadata(filesystem: Any, path: str, *keys: str) -> tuple[Any, ...]:
    """Return the number of rows of a parquet file and the JSON values of its metadata keys.

    Args:
        filesystem: File system of fsspec.
        path: Path of the file in the file system.
        *keys: Keys of the metadata.

    Raises:
        UserError: If the file is damaged or has no such keys.
    """
    try:
        with filesystem.open(path, "rb") as file:
            metadata = pyarrow.parquet.read_metadata(file)
        values = [json.loads(metadata.metadata[key.encode()]) for key in keys]
    except (OSError, KeyError, ValueError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{path} must be an output of neobert encode, got a file that is not, or is damaged "
            f"({one_line(error)}). Remove the file, or choose another output."
        ) from error
    return metadata.num_rows, *values


class Folder:
    """Output directory at a path or URL, which may not exist yet."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.filesystem, self.path = fsspec.url_to_fs(self.url)

    def names(self) -> list[str]:
        """Return the names of the files in the directory."""
        # fsspec caches listings, and other processes may have written files since then.
        self.filesystem.invalidate_cache()
        if not self.filesystem.isdir(self.path):
            return []
        return [path.rpartition("/")[2] for path in self.filesystem.ls(self.path, detail=False)]

    def path_of(self, name: str) -> str:
        """Return the path of a file in the directory."""
        return f"{self.path}/{name}"

    def read_manifest(self) -> Manifest | None:
        """Return the manifest, or None for a new directory.

        Raises:
            UserError: If the directory contains files that neobert encode has not written.
        """
        names = self.names()
        if MANIFEST in names:
            content = json.loads(self.filesystem.cat_file(self.path_of(MANIFEST)))
            return Manifest.from_json(content, self.url)

        # Hidden and temporary files may exist before the manifest.
        if not all(name.startswith((".", "_")) for name in names):
            raise UserError(
                f"{self.url} must be new or an output of neobert encode, got a directory with "
                f"files and without {MANIFEST}. Choose another output."
            )
        if self.filesystem.isfile(self.path):
            raise UserError(f"{self.url} must be a directory, got a file. Choose another output.")
        return None

    def write_manifest(self, manifest: Manifest) -> Manifest:
        """Write the manifest unless another process has, and return that of the directory."""
        with create_file_once(self.filesystem, self.path_of(MANIFEST)) as file:
            file.write(manifest.to_json().encode())
        # Another process may have written its manifest first.
        written = self.read_manifest()
        assert written is not None
        return written

    def parts(self, files: Sequence[File], settings: Mapping[str, Any]) -> Parts:
        """Return the finished parts of input files.

        Args:
            files: Input files.
            settings: Settings that the parts must have.

        Raises:
            UserError: If a part has other settings or another input, or cannot be read.
        """
        # Parts of input files that no longer exist are ignored.
        stems = {part_stem(file): file for file in files}
        keys = []
        for name in self.names():
            match = re.fullmatch(r"(.+)-(\d{5,})\.parquet", name)
            if match and match[1] in stems:
                keys.append((stems[match[1]], int(match[2])))

        # Reading the metadata of a part is a request to the storage. Threads run them in parallel.
        with ThreadPoolExecutor(16) as pool:
            return dict(
                zip(keys, pool.map(lambda key: self._read_part(key[0], key[1], settings), keys))
            )

    def _read_part(self, file: File, number: int, settings: Mapping[str, Any]) -> Part:
        """Read the description of a part, and check its settings and input."""
        path = self.path_of(part_name(file, number))
        rows, manifest, part = read_metadata(self.filesystem, path, MANIFEST_KEY, PART_KEY)
        Manifest.from_json(manifest, path).check_settings(settings, path)
        # A file of another size is another input.
        if (part["file"], part["size"]) != (file.name, file.size):
            raise UserError(
                f"{file.url} has {file.size:,} bytes, but {part['file']} had {part['size']:,} when "
                f"{path} was written. Remove the parts of the input file from the output, or put "
                "new texts into a new file."
            )
        truncation = Truncation(**part.pop("truncation"))
        return Part(**part, truncation=truncation, embeddings=rows)

    def join(
        self,
        names: Sequence[str],
        output: str,
        schema: pyarrow.Schema,
        metadata: Mapping[str, str],
    ) -> None:
        """Write parts as one file, in bounded memory.

        Args:
            names: File names of the parts, in the order of the rows.
            output: Path or URL of the file.
            schema: Schema of the parts.
            metadata: Metadata of the file.
        """
        with (
            create_file_once(*fsspec.url_to_fs(output)) as file,
            pyarrow.parquet.ParquetWriter(
                file, schema, compression="none", use_dictionary=False
            ) as writer,
        ):
            for name in names:
                with self.filesystem.open(self.path_of(name), "rb") as opened:
                    part = pyarrow.parquet.ParquetFile(opened)
                    # A row group is the smallest unit that can be read.
                    for group in range(part.num_row_groups):
                        writer.write_table(part.read_row_group(group).cast(schema))
            writer.add_key_value_metadata(metadata)

    def remove(self, output: str) -> None:
        """Remove the directory, whose parts were joined, and temporary files of `output`."""
        if self.names():
            self.filesystem.rm(self.path, recursive=True)
        remove_stale_temporary_files(*fsspec.url_to_fs(output))
