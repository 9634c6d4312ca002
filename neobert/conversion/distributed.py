"""Directories of torch.distributed.checkpoint, as FSDP writes them.

`.metadata` lists the parts of every tensor and their positions in the `.distcp` files. torch reads
the `.distcp` files, but its reader of `.metadata` would execute code, so `.metadata` is read here.
"""

import io
import math
import pickle
import warnings
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import filesystem, metadata

from ..common.errors import UserError, listed
from .weight_files import Weights, check_archive, foreign_class, is_file_in, unreadable


def _format_member(owner: object, name: str) -> object:
    """Return a member of the memory format enum, to which pickles refer by `getattr`."""
    return metadata._MEM_FORMAT_ENCODING[name]


def _allowed_classes() -> dict[str, Any]:
    """Return the classes and functions that `.metadata` consists of, by their pickled names."""
    classes: dict[str, Any] = {
        "builtins.getattr": _format_member,
        "collections.OrderedDict": dict,
        "torch.Size": torch.Size,
        "torch.serialization._get_layout": torch.serialization._get_layout,
    }
    # A dtype is pickled as a global object: torch.float32.
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            classes[str(value)] = value
    # Python 3.13 moved the paths to pathlib._local. PurePosixPath does not depend on this system.
    for module_name in ("pathlib", "pathlib._local"):
        for system in ("Posix", "Windows"):
            classes[f"{module_name}.{system}Path"] = PurePosixPath

    for value in (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        filesystem._StoragePrefix,
    ):
        classes[f"{value.__module__}.{value.__name__}"] = value
    return classes


_CLASSES = _allowed_classes()


class _Unpickler(pickle.Unpickler):
    """Unpickler that only accepts the classes of `_CLASSES`."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._path = file.name

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class.

        Raises:
            UserError: If the class is not allowed.
        """
        # pickle asks this method for everything that could execute code.
        if f"{module}.{name}" not in _CLASSES:
            raise foreign_class(self._path, f"{module}.{name}")
        return _CLASSES[f"{module}.{name}"]


class _Reader(checkpoint.FileSystemReader):
    """Reader of torch that does not execute code in `.metadata`."""

    def read_metadata(self) -> metadata.Metadata:
        """Return the content of `.metadata`."""
        with open(Path(self.path) / ".metadata", "rb") as file:
            return _Unpickler(file).load()


def read_distributed(folder: Path) -> Weights:
    """Read a directory of torch.distributed.checkpoint, without the states of optimizers.

    Raises:
        UserError: If parts are missing, duplicated or truncated, or `.metadata` contains an object
            of a class that is not allowed.
    """
    try:
        tensors = _read(folder, _Reader(folder))
    except UserError:
        raise
    except checkpoint.CheckpointException as error:
        # `failures` has the form {rank: (error, traceback)}.
        raise unreadable(folder, error.failures[0][0]) from None
    except Exception as error:  # A damaged pickle can raise any exception.
        raise unreadable(folder, error) from None
    return Weights(tensors, "torch.distributed.checkpoint (FSDP)", [])


def _read(folder: Path, reader: _Reader) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint; damaged files raise any exception."""
    # Without the states of the optimizer, which take twice the memory of the weights. The wrapper
    # `AppState` of torch's tutorials adds "app." to all names.
    content = reader.read_metadata()
    optimizer_prefixes = ("optim", "lr_scheduler", "scheduler")
    entries = {
        name: entry
        for name, entry in content.state_dict_metadata.items()
        if isinstance(entry, metadata.TensorStorageMetadata)
        and not name.removeprefix("app.").startswith(optimizer_prefixes)
    }

    # Check the parts before torch reads them: their files exist, and their checksums are right.
    for index, part in content.storage_data.items():
        if not is_file_in(folder, part.relative_path):
            raise UserError(f"{folder} is incomplete: {part.relative_path} is missing.")
        if index.fqn in entries:
            with open(folder / part.relative_path, "rb") as file:
                file.seek(part.offset)
                check_archive(io.BytesIO(file.read(_stored_length(folder, part))), file.name)
    _check_sizes(folder, content, entries)

    # torch loads in place and does not notice gaps between the parts: values there remain NaN.
    tensors = {
        name: torch.full(entry.size, math.nan, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if entry.properties.dtype.is_floating_point
    }
    with warnings.catch_warnings():
        # torch warns that there is no process group: one process reads all parts.
        warnings.simplefilter("ignore")
        checkpoint.load(tensors, storage_reader=reader)

    incomplete = [name for name, tensor in tensors.items() if tensor.isnan().any()]
    if incomplete:
        raise UserError(f"{folder} lacks values, or contains NaN, for: {listed(incomplete)}.")
    return tensors


def _stored_length(folder: Path, part: filesystem._StorageInfo) -> int:
    """Return the number of bytes of a part, without those beyond the end of its file."""
    file_size = (folder / part.relative_path).stat().st_size
    return max(0, min(part.length, file_size - part.offset))


def _check_sizes(
    folder: Path,
    content: metadata.Metadata,
    entries: dict[str, metadata.TensorStorageMetadata],
) -> None:
    """Check that the files contain as many values as the tensors of `entries`.

    Otherwise a small file could allocate any amount of memory.

    Raises:
        UserError: If the parts of a tensor contain fewer values than the tensor.
    """
    stored_bytes = dict.fromkeys(entries, 0)
    for index, part in content.storage_data.items():
        if index.fqn in entries:
            stored_bytes[index.fqn] += _stored_length(folder, part)

    incomplete = []
    for name, entry in entries.items():
        value_count = math.prod(entry.size)
        chunk_values = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        byte_count = value_count * entry.properties.dtype.itemsize
        if chunk_values < value_count or stored_bytes[name] < byte_count:
            incomplete.append(name)
    if incomplete:
        raise UserError(f"{folder} lacks values of {listed(incomplete)}. Copy all of its files.")
