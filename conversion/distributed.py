"""torch.distributed.checkpoint folders, as FSDP writes them: `.metadata` says which part of which tensor is where in the `.distcp` files.

A tensor is taken only if its parts cover each of its numbers once.
"""

import math
import mmap

import torch

from ..common.errors import UserError
from ..common.files import check_file
from .safe_pickle import LIMIT, stand_ins, unpickle
from .stored import StoredTensor, checked_shape, is_plain_name, unreadable
from .torch_files import read_torch


_CHECKPOINT = "torch.distributed.checkpoint"
_NAMES = {
    "torch.Size": lambda sizes=(): tuple(sizes),
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **stand_ins(
        *(f"{_CHECKPOINT}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
        *(f"{_CHECKPOINT}.metadata.{name}" for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
        *(f"{_CHECKPOINT}.metadata._MEM_FORMAT_ENCODING", "builtins.getattr", "torch.serialization._get_layout"),
        *(f"{_CHECKPOINT}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *(f"{module}.{name}Path" for module in ("pathlib", "pathlib._local") for name in ("Posix", "Windows")),
        "collections.OrderedDict",
    ),
}


def read_distributed(folder):
    """Tensors, format in words, and notes of a torch.distributed.checkpoint folder; optimizer states are left out.

    Raises:
        UserError: parts missing, doubled or truncated, or an object of an unknown class in the metadata.
    """
    path = folder / ".metadata"
    check_file(path)
    try:
        with open(path, "rb") as file:
            metadata = unpickle(file.read(LIMIT + 1), _NAMES, path)
        places = {}
        for index, info in metadata.fields["storage_data"].items():
            places.setdefault(index.fields["fqn"], {})[tuple(index.fields.get("offset") or ())] = info.fields
        tensors, taken = {}, {}
        for name, entry in metadata.fields["state_dict_metadata"].items():
            if not isinstance(name, str):
                raise UserError(f"{path} holds a tensor whose name is not text: {name!r:.100}.")
            if type(entry).__name__ == "TensorStorageMetadata" and not name.startswith(("optim", "lr_scheduler", "scheduler")):
                tensors[name] = _tensor(folder, name, entry.fields, places.get(name, {}), taken)
        _check_apart(folder, taken)
    except UserError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise unreadable(path, error) from None
    return tensors, "torch.distributed.checkpoint (FSDP)", []


def _tensor(folder, name, entry, places, taken):
    """One tensor of the metadata.

    Args:
        entry: its size, dtype and chunks.
        places: {offsets: where that chunk is}.
        taken: {file: list of (first byte, length)}, to which this adds.
    """
    properties, parts = entry["properties"], []
    shape, dtype = checked_shape(entry["size"], name), properties.fields.get("dtype") or properties.state[0]
    for chunk in entry["chunks"]:
        offsets, sizes = checked_shape(chunk.fields["offsets"], name), checked_shape(chunk.fields["sizes"], name)
        if len(offsets) != len(shape) or len(sizes) != len(shape) or any(o + n > m for o, n, m in zip(offsets, sizes, shape)):
            raise UserError(f"{folder} is damaged: a part of {name} is outside of it.")
        if not math.prod(sizes):
            continue
        place = places.get(offsets) or (places.get(()) if not any(offsets) else None)
        if place is None:
            raise UserError(f"{folder} does not say where a part of {name} is; it is incomplete.")
        if place.get("transform_descriptors"):
            raise UserError(f"{folder} is stored compressed, which is not supported; save it without stream transforms.")
        first, length = place["offset"], place["length"]
        if not all(type(number) is int and number >= 0 for number in (first, length)):
            raise UserError(f"{folder} is damaged: a part of {name} is at byte {first!r:.40} and has {length!r:.40} bytes.")
        file = folder / str(place["relative_path"])
        if not is_plain_name(place["relative_path"]) or not file.is_file():
            raise UserError(f"{folder} is incomplete: {place['relative_path']} is missing.")
        if file.stat().st_size < first + length:
            raise UserError(f"{file} is truncated: {file.stat().st_size} bytes where at least {first + length} belong.")
        taken.setdefault(file, []).append((first, length))
        parts.append((offsets, sizes, file, first, length))
    have, numel = sum(math.prod(sizes) for _, sizes, *_ in parts), math.prod(shape)
    if have != numel:
        raise UserError(f"{folder} is damaged or incomplete: its parts of {name} hold {have} numbers, but {shape} has {numel}.")

    def read():
        if len(parts) == 1:
            return _part(*parts[0][1:], dtype)
        tensor, covered = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for offsets, sizes, *place in parts:
            region = tuple(slice(o, o + n) for o, n in zip(offsets, sizes))
            tensor[region], covered[region] = _part(sizes, *place, dtype), True
        if not covered.all():
            raise UserError(f"{folder} is damaged: its parts of {name} overlap and leave {int((~covered).sum())} numbers out.")
        return tensor

    return StoredTensor(shape, dtype, read)


def _check_apart(folder, taken):
    """Refuses parts that are at one place: a small file must not be a large tensor many times over."""
    for file, places in taken.items():
        end = 0
        for first, length in sorted(places):
            if first < end:
                raise UserError(f"{folder} is damaged: two parts are at one place of {file.name}.")
            end = first + length


def _part(sizes, file, first, length, dtype):
    with open(file, "rb") as stream:
        view = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))[first : first + length]
    stored = read_torch(view, file)
    if not isinstance(stored, StoredTensor) or stored.shape != sizes or stored.dtype != dtype:
        found = f"{stored.dtype} of shape {stored.shape}" if isinstance(stored, StoredTensor) else type(stored).__name__
        raise UserError(f"{file} holds {found} where the metadata says {dtype} of shape {sizes}.")
    return stored.read()
