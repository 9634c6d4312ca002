"""torch.distributed.checkpoint folders, as FSDP writes them: `.metadata` says which part of which
tensor is where in the `.distcp` files. torch reads them, but for `.metadata`, which its own reader
would run code of."""

import io
import math
import pickle
import warnings
from pathlib import PurePosixPath

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import filesystem, metadata

from ..common.errors import UserError, listed
from .weight_files import check_archive, foreign_class, is_file_in, unreadable


def _member(owner, name):
    """`getattr`, by which pickles name members of enumerations, for the one that is needed."""
    return metadata._MEM_FORMAT_ENCODING[name]


# What `.metadata` consists of.
_CLASSES = {
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **{
        f"{module}.{name}Path": PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("Posix", "Windows")
    },
    "builtins.getattr": _member,
    "collections.OrderedDict": dict,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
}
for _module, _names in (
    (metadata, "Metadata MetadataIndex StorageMeta TensorStorageMetadata BytesStorageMetadata"),
    (metadata, "ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING"),
    (filesystem, "_StorageInfo _StoragePrefix"),
):
    for _name in _names.split():
        _CLASSES[f"{_module.__name__}.{_name}"] = getattr(_module, _name)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file):
        super().__init__(file)
        self._where = file.name

    def find_class(self, module, name):
        if f"{module}.{name}" not in _CLASSES:
            raise foreign_class(self._where, f"{module}.{name}")
        return _CLASSES[f"{module}.{name}"]


class _Reader(checkpoint.FileSystemReader):
    def read_metadata(self):
        with open(self.path / ".metadata", "rb") as file:
            return _Unpickler(file).load()


def read_distributed(folder):
    """Tensors, format in words, and notes of a torch.distributed.checkpoint folder; optimizer
    states are left out.

    Raises:
        UserError: parts missing, doubled or truncated, or an object of an unknown class in the
            metadata.
    """
    try:
        tensors = _read(folder, _Reader(folder))
    except UserError:
        raise
    except checkpoint.CheckpointException as error:  # {rank: (error, traceback)}
        raise unreadable(folder, error.failures[0][0]) from None
    except Exception as error:  # whatever a damaged pickle leads to
        raise unreadable(folder, error) from None
    return tensors, "torch.distributed.checkpoint (FSDP)", []


def _read(folder, reader):
    content = reader.read_metadata()
    optimizer = ("optim", "lr_scheduler", "scheduler")
    dtypes = {
        name: entry.properties.dtype
        for name, entry in content.state_dict_metadata.items()
        if isinstance(entry, metadata.TensorStorageMetadata) and not name.startswith(optimizer)
    }
    for index, place in content.storage_data.items():
        if not is_file_in(folder, place.relative_path):
            raise UserError(f"{folder} is incomplete: {place.relative_path} is missing.")
        if index.fqn in dtypes:
            with open(folder / place.relative_path, "rb") as file:
                file.seek(place.offset)
                check_archive(io.BytesIO(file.read(place.length)), file.name)
    # Numbers that no part holds stay NaN.
    tensors = {
        name: torch.full(content.state_dict_metadata[name].size, math.nan, dtype=dtype)
        for name, dtype in dtypes.items()
        if dtype.is_floating_point
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a process group, it reads alone
        checkpoint.load(tensors, storage_reader=reader)
    if holes := [name for name, tensor in tensors.items() if tensor.isnan().any()]:
        raise UserError(f"{folder} lacks numbers, or holds NaN, for: {listed(holes)}.")
    return tensors
