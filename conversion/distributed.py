"""torch.distributed.checkpoint folders, as FSDP writes them: `.metadata` says which part of which
tensor is where in the `.distcp` files.

A tensor is taken only if its parts cover each of its numbers once.
"""

import math
import pickle

import torch

from ..common.errors import UserError
from ..common.files import check_file
from .stored import StoredTensor, checked_shape, is_plain_name, tensors_of, unreadable
from .torch_files import StandIn, foreign_class, load_torch_file


_CHECKPOINT = "torch.distributed.checkpoint"
# What `.metadata` consists of.
_STAND_INS = [
    *(
        f"{_CHECKPOINT}.metadata.{name}"
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")
    ),
    *(
        f"{_CHECKPOINT}.metadata.{name}"
        for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")
    ),
    *(
        f"{_CHECKPOINT}.metadata._MEM_FORMAT_ENCODING",
        "builtins.getattr",
        "torch.serialization._get_layout",
    ),
    *(f"{_CHECKPOINT}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
    *(
        f"{module}.{name}Path"
        for module in ("pathlib", "pathlib._local")
        for name in ("Posix", "Windows")
    ),
]
_CLASSES = {
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **{path: type(path.rpartition(".")[2], (StandIn,), {}) for path in _STAND_INS},
    **{"torch.Size": torch.Size, "collections.OrderedDict": dict},
}


class _Unpickler(pickle.Unpickler):
    """Reads `.metadata`, for which torch itself has a reader only that runs code."""

    def __init__(self, file):
        super().__init__(file)
        self.where = file.name

    def find_class(self, module, name):
        path = f"{module}.{name}"
        if path not in _CLASSES:
            raise foreign_class(self.where, path)
        return _CLASSES[path]


def _fields(made):
    """{name: value} of a StandIn; objects with __slots__ have a pair."""
    parts = made.state if isinstance(made.state, tuple) else (made.state,)
    return next(part for part in parts if isinstance(part, dict))


def read_distributed(folder):
    """Tensors, format in words, and notes of a torch.distributed.checkpoint folder; optimizer
    states are left out.

    Raises:
        UserError: parts missing, doubled or truncated, or an object of an unknown class in the
            metadata.
    """
    path = folder / ".metadata"
    check_file(path)
    try:
        with open(path, "rb") as file:
            metadata = _fields(_Unpickler(file).load())
        places, tensors = {}, {}
        for index, info in metadata["storage_data"].items():
            index = _fields(index)
            places.setdefault(index["fqn"], {})[tuple(index.get("offset") or ())] = _fields(info)
        for name, entry in metadata["state_dict_metadata"].items():
            if type(entry).__name__ == "TensorStorageMetadata" and not str(name).startswith(
                ("optim", "lr_scheduler", "scheduler")
            ):
                tensors[name] = _tensor(folder, name, _fields(entry), places.get(name, {}))
    except UserError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise unreadable(path, error) from None
    return tensors, "torch.distributed.checkpoint (FSDP)", []


def _tensor(folder, name, entry, places):
    """One tensor of the metadata.

    Args:
        entry: its size, dtype and chunks.
        places: {offsets: where that chunk is}.
    """
    properties, parts = entry["properties"], []
    # TensorProperties pickles itself as a tuple that begins with the dtype.
    shape, dtype = checked_shape(entry["size"], name), properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{folder} is damaged: the dtype of {name} is {dtype!r:.80}.")
    for chunk in map(_fields, entry["chunks"]):
        offsets, sizes = checked_shape(chunk["offsets"], name), checked_shape(chunk["sizes"], name)
        if (
            len(offsets) != len(shape)
            or len(sizes) != len(shape)
            or any(o + n > m for o, n, m in zip(offsets, sizes, shape))
        ):
            raise UserError(f"{folder} is damaged: a part of {name} is outside of it.")
        if not math.prod(sizes):
            continue
        place = places.get(offsets) or (places.get(()) if not any(offsets) else None)
        if place is None:
            raise UserError(f"{folder} does not say where a part of {name} is; it is incomplete.")
        if place.get("transform_descriptors"):
            raise UserError(
                f"{folder} is stored compressed, which is not supported; save it without stream "
                "transforms."
            )
        first, length = place["offset"], place["length"]
        if not all(type(number) is int and number >= 0 for number in (first, length)):
            raise UserError(
                f"{folder} is damaged: a part of {name} is at byte {first!r:.40} and has "
                f"{length!r:.40} bytes."
            )
        file = folder / str(place["relative_path"])
        if not is_plain_name(place["relative_path"]) or not file.is_file():
            raise UserError(f"{folder} is incomplete: {place['relative_path']} is missing.")
        if file.stat().st_size < first + length:
            raise UserError(
                f"{file} is truncated: {file.stat().st_size} bytes where at least {first + length} "
                "belong."
            )
        parts.append((offsets, sizes, file, first, length))
    have, numel = sum(math.prod(sizes) for _, sizes, *_ in parts), math.prod(shape)
    if have != numel:
        raise UserError(
            f"{folder} is damaged or incomplete: its parts of {name} hold {have} numbers, but "
            f"{shape} has {numel}."
        )

    def read():
        if len(parts) == 1:
            return _part(name, *parts[0][1:], dtype)
        tensor, covered = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for offsets, sizes, *place in parts:
            region = tuple(slice(o, o + n) for o, n in zip(offsets, sizes))
            tensor[region], covered[region] = _part(name, sizes, *place, dtype), True
        if not covered.all():
            raise UserError(
                f"{folder} is damaged: its parts of {name} overlap and leave "
                f"{int((~covered).sum())} numbers out."
            )
        return tensor

    return StoredTensor(shape, dtype, read)


def _part(name, sizes, file, first, length, dtype):
    with open(file, "rb") as stream:
        stream.seek(first)
        found = tensors_of({name: load_torch_file(file, stream.read(length))}, file).get(name)
    if found is None or (found.shape, found.dtype) != (sizes, dtype):
        raise UserError(
            f"{file} does not hold what the metadata says: a part of {name}, {dtype} of shape "
            f"{sizes}."
        )
    return found.read()
