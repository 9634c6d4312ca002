"""Files of torch.save, the zip form and the one before torch 1.6, read without torch.load: its pickle by `safe_pickle`, its numbers
memory-mapped where they are. So nothing of a stranger runs, nothing is read before it is needed, and checksums are compared.
"""

import io
import math
import mmap
import struct
import sys
import warnings
import zipfile
import zlib
from dataclasses import dataclass

import torch

from ..common.errors import UserError
from ..common.files import check_file
from .safe_pickle import LIMIT, SafeUnpickler, ordered_dict, stand_ins, unpickle
from .stored import StoredTensor, Unusable, checked_shape, tensors_of, unreadable


# ------------------------------------------------------------------------------------------------------------ storages and tensors


@dataclass(frozen=True)
class _StorageType:
    """What a pickle calls torch.FloatStorage and its kin; UntypedStorage counts bytes."""

    dtype: torch.dtype


class _Storage:
    """Numbers in a file.

    Args:
        where: the file, for messages.
        view: its bytes.
        size: of the numbers, in bytes.
        crc: their checksum, or None.
    """

    def __init__(self, where, view, size, crc=None):
        self.where, self.view, self.size, self.crc, self.start = where, view, size, crc, 0

    def place(self, start):
        """Says where in the file the numbers begin."""
        if start + self.size > len(self.view):
            raise UserError(f"{self.where} is truncated: it has {len(self.view):,} bytes, but {start + self.size:,} belong to it.")
        self.start = start
        return self

    def data(self):
        """Its bytes, as they are in the file; the checksum is compared the first time."""
        data = self.view[self.start : self.start + self.size]
        if self.crc is not None and zlib.crc32(data) != self.crc:
            raise UserError(f"{self.where} is damaged: its content does not have the checksum that was saved with it.")
        self.crc = None
        return data


@dataclass(frozen=True)
class _Typed:
    """A storage as a tensor's pickle names it: where the numbers are, and their type."""

    storage: _Storage
    dtype: torch.dtype


def _rebuild(typed, offset, size, stride, *rest):
    """Takes the place of torch._utils._rebuild_tensor and _rebuild_tensor_v2."""
    return _tensor(typed, typed.dtype, offset, size, stride)


def _rebuild_untyped(typed, offset, size, stride, requires_grad, hooks, dtype, *rest):
    """Takes the place of torch._utils._rebuild_tensor_v3."""
    return _tensor(typed, dtype, offset, size, stride)


def _tensor(typed, dtype, offset, size, stride):
    if not isinstance(typed, _Typed) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a storage")
    shape, strides = checked_shape(size, "a tensor"), checked_shape(stride, "a tensor's strides")
    if type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise ValueError("a tensor that is outside of its storage")
    numbers, storage = math.prod(shape), typed.storage
    last = offset + sum((count - 1) * step for count, step in zip(shape, strides)) if numbers else 0
    if numbers * dtype.itemsize > storage.size or (last + 1) * dtype.itemsize > max(storage.size, dtype.itemsize):
        raise ValueError(f"a tensor of shape {shape} in a storage of {storage.size} bytes")

    def read():
        if not numbers:
            return torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings():
            # What is mapped for reading cannot be written to, and is not.
            warnings.filterwarnings("ignore", message=".*not writable")
            return torch.frombuffer(storage.data(), dtype=dtype, count=storage.size // dtype.itemsize).as_strided(shape, strides, offset)

    return StoredTensor(shape, dtype, read, (id(storage), offset, shape, strides) if numbers else None)


def _rebuild_parameter(tensor, *rest):
    """Takes the place of torch._utils._rebuild_parameter and its kin."""
    return tensor


def _rebuild_of_type(rebuild, kind, arguments, *rest):
    """Takes the place of torch._tensor._rebuild_from_type_v2, which keeps attributes of a tensor."""
    if rebuild not in _REBUILDS.values():
        raise ValueError("a tensor made by what does not make tensors")
    return rebuild(*arguments)


def _unusable(kind):
    def rebuild(*arguments):
        return Unusable(kind)

    return rebuild


_REBUILDS = {
    "torch._utils._rebuild_tensor": _rebuild,
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch._utils._rebuild_tensor_v3": _rebuild_untyped,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_sparse_tensor": _unusable("a sparse tensor"),
    "torch._utils._rebuild_nested_tensor": _unusable("a nested tensor"),
    "torch._utils._rebuild_qtensor": _unusable("a quantised tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _unusable("a tensor of the meta device, without numbers"),
    "torch._utils._rebuild_wrapper_subclass": _unusable("a tensor of a class of its own"),
    "torch._utils._rebuild_device_tensor_from_numpy": _unusable("a tensor of another device"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _unusable("a tensor of another device"),
}
_STORAGES = {
    **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16},
    **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool},
    **{"ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64},
    **{"QInt8": torch.qint8, "QUInt8": torch.quint8, "QInt32": torch.qint32},
}
_NAMES = {
    **_REBUILDS,
    "torch._tensor._rebuild_from_type_v2": _rebuild_of_type,
    "collections.OrderedDict": ordered_dict,
    "torch.Size": lambda sizes=(): tuple(sizes),
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **{f"torch.{name}Storage": _StorageType(dtype) for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": _StorageType(torch.uint8),
    # What says nothing about the weights, or only where they are.
    **stand_ins(
        *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.device", "torch.serialization._get_layout", "collections.Counter"),
        *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "bytearray", "complex", "getattr")),
        *(f"torch.per_{scheme}" for scheme in ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric")),
        *("_codecs.encode", "torch.per_channel_affine_float_qparams"),
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    ),
}


# ------------------------------------------------------------------------------------------------------------------- the two forms


class _Reader(io.RawIOBase):
    """A view as a file, without a copy."""

    def __init__(self, view):
        self._view, self._position = view, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=0):
        self._position = max(0, offset + (0, self._position, len(self._view))[whence])
        return self._position

    def readinto(self, target):
        piece = self._view[self._position : self._position + len(target)]
        target[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def _records(view, where):
    """{name: (start, size, checksum or None)} of an archive, whose records must be stored as they are to be mapped."""
    with zipfile.ZipFile(io.BufferedReader(_Reader(view))) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    # torch.serialization.set_crc32_options(False) leaves all checksums zero.
    has_checksums, records = any(entry.CRC for entry in entries), {}
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
            raise UserError(f"{where} was packed anew, compressed or encrypted, which is not read: save it with torch.save.")
        name = entry.filename.partition("/")[2]
        header = bytes(view[entry.header_offset : entry.header_offset + 30])
        if name in records or len(header) < 30 or not header.startswith(b"PK\x03\x04"):
            raise ValueError(f"its record {name} is doubled, or not where it should be")
        start = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        records[name] = (start, entry.file_size, entry.CRC if has_checksums else None)
    return records


def _read_zip(view, where):
    records, storages = _records(view, where), {}

    def placed(name):
        start, size, crc = records[name]
        return _Storage(where, view, size, crc).place(start)

    def storage(said):
        _, kind, key, _, count = said
        if key not in storages:
            storages[key] = placed(f"data/{key}")
        if count * kind.dtype.itemsize != storages[key].size:
            raise ValueError(f"a storage of {storages[key].size} bytes that should hold {count} numbers of {kind.dtype}")
        return _Typed(storages[key], kind.dtype)

    if "byteorder" in records and bytes(placed("byteorder").data()).decode() != sys.byteorder:
        raise UserError(f"{where} was written on a machine with another order of bytes, which is not read.")
    return unpickle(placed("data.pkl").data(), _NAMES, where, storage)


_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


def _read_legacy(view, where):
    """Five pickles (a number, a version, the machine, the content, the storages' keys), then each storage: how many numbers, the numbers."""
    pickles, storages = io.BytesIO(view[:LIMIT]), {}

    def storage(said):
        _, kind, key, _, count, part = said
        if part is not None or count < 0:
            raise ValueError("a part of a storage, as torch wrote it before 0.4")
        storages.setdefault(key, (_Storage(where, view, count * kind.dtype.itemsize), count))
        return _Typed(storages[key][0], kind.dtype)

    def load(persistent_load=None):
        return SafeUnpickler(pickles, _NAMES, where, persistent_load).load()

    if load() != _LEGACY_MAGIC or load() != _LEGACY_PROTOCOL:
        raise ValueError("it begins as no file of torch.save does")
    if load().get("little_endian") != (sys.byteorder == "little"):
        raise UserError(f"{where} was written on a machine with another order of bytes, which is not read.")
    content, keys, position = load(storage), load(), pickles.tell()
    if len(keys) != len(storages):
        raise ValueError(f"{len(keys)} storages where its tensors have {len(storages)}")
    for key in keys:
        stored, count = storages[key]
        if struct.unpack_from(f"{'<' if sys.byteorder == 'little' else '>'}q", view, position) != (count,):
            raise ValueError(f"another number of values in a storage than the {count} of its tensors")
        stored.place(position + 8)
        position += 8 + stored.size
    return content


def read_torch(view, where):
    """The content of a file of torch.save, tensors as StoredTensor or Unusable.

    Args:
        view: memoryview of the file's bytes, mapped or read.
        where: the file, for messages.
    Raises:
        UserError: truncated, damaged or foreign, or with an object of an unknown class (named).
    """
    try:
        if view[:2] == b"PK":
            return _read_zip(view, where)
        return _read_legacy(view, where)
    except UserError:
        raise
    except Exception as error:  # whatever a damaged file leads to
        raise unreadable(where, error) from None


def load_torch_file(path):
    """`read_torch` of the file `path`, which is memory-mapped: nothing of its numbers is read before `StoredTensor.read`."""
    check_file(path)
    try:
        with open(path, "rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError as error:  # an empty file
        raise unreadable(path, error) from None
    return read_torch(view, path)


# ------------------------------------------------------------------------------------------------------------------- state dicts


def _state_dict_of(data, path):
    """The state dict in what a torch file holds: itself, or below a key that training loops use."""
    for _ in range(4):
        if not isinstance(data, dict):
            break
        below = [data[key] for key in ("state_dict", "model_state_dict", "model", "module") if isinstance(data.get(key), dict)]
        if not below and any(isinstance(value, (StoredTensor, Unusable)) for value in data.values()):
            return data
        data = below[0] if below else None
    raise UserError(f"{path} holds no state dict: expected a mapping of names to tensors, or one below 'model' or 'state_dict'.")


def torch_tensors(path):
    """All tensors of the state dict in a torch.save file."""
    return tensors_of(_state_dict_of(load_torch_file(path), path), path)
