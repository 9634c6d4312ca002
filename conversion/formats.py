"""The file formats of training checkpoints, read without ever running code from them: torch.save files, safetensors, DeepSpeed ZeRO 0 to 3
(float32 master weights) and torch.distributed.checkpoint (FSDP). Tensors are memory-mapped: nothing is read before `StoredTensor.read`.
"""

import io
import json
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..common.errors import UserError, listed


@dataclass
class StoredTensor:
    """A tensor that is still in its file.

    Attributes:
        shape, dtype: known without reading it.
        read: returns the tensor, on the CPU.
        storage: equal for tensors that share their memory (tied weights), None where the format cannot say.
    """

    shape: tuple
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    storage: Hashable = None


# ------------------------------------------------------------------------------------------------------ restricted unpickling


class _StandIn:
    """Takes the place of a class in a pickle: keeps what it is given, does nothing."""

    def __init__(self, *args, **kwargs):
        self.args = args

    def __setstate__(self, state):
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


def _stand_in(path):
    module, _, name = path.rpartition(".")
    return type(name, (_StandIn,), {"__module__": module})


# Classes of DeepSpeed's files that say nothing about the weights, or only where they lie.
_DEEPSPEED_CLASSES = [
    _stand_in(path)
    for path in (
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
]

_METADATA_CLASSES = {
    path: _stand_in(path)
    for path in (
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
    )
}


class _MetadataUnpickler(pickle.Unpickler):
    """For the `.metadata` of torch.distributed.checkpoint, which torch itself reads with plain pickle."""

    def find_class(self, module, name):
        path = f"{module}.{name}"
        if path in _METADATA_CLASSES:
            return _METADATA_CLASSES[path]
        if path == "torch.Size":
            return tuple
        if path == "collections.OrderedDict":
            return OrderedDict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _unknown_class(path, "the metadata")

    def persistent_load(self, pid):
        raise UserError("the metadata of this checkpoint refers to outside objects, which are not read.")


def _unknown_class(name, where):
    return UserError(f"{where} holds an object of class {name}, which no checkpoint of a NeoBERT needs; nothing of it was run or loaded.")


def _require_safe_torch():
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 6):
        raise UserError(f"torch {torch.__version__} cannot read .pt files safely; torch 2.6 or newer is needed.")


def load_torch_file(path):
    """`torch.load` of tensors and plain containers only; zip files are memory-mapped.

    Raises:
        UserError: a truncated or foreign file, or one with an object of an unknown class (named).
    """
    _require_safe_torch()
    path = Path(path)
    try:
        with open(path, "rb") as file:
            mapped = file.read(4) == b"PK\x03\x04"
        with torch.serialization.safe_globals(_DEEPSPEED_CLASSES):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        unknown = re.search(r"GLOBAL ([\w.]+\w)", str(error))
        if unknown:
            raise _unknown_class(unknown.group(1), str(path)) from None
        raise _unreadable(path, error) from None
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except Exception as error:  # whatever a damaged file makes torch raise
        raise _unreadable(path, error) from None


def _unreadable(path, error):
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return UserError(f"{path} cannot be read, it is truncated or not a file of weights ({reason[:200]}).")


# ------------------------------------------------------------------------------------------------------------- torch.save files


def _stored(tensor, key):
    storage = (key, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape)) if tensor.numel() else None
    return StoredTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor, storage)


def _state_dict_of(data, path):
    """The state dict in what a torch file holds: itself, or below a key that training loops use."""
    if isinstance(data, dict):
        if any(isinstance(value, torch.Tensor) for value in data.values()):
            return data
        for key in ("state_dict", "model_state_dict", "model", "module"):
            if isinstance(data.get(key), dict):
                return _state_dict_of(data[key], path)
    raise UserError(f"{path} holds no state dict: expected a mapping of names to tensors, or one below 'model' or 'state_dict'.")


def torch_tensors(path):
    """All tensors of the state dict in a torch.save file."""
    state = _state_dict_of(load_torch_file(path), path)
    return {name: _stored(value, str(path)) for name, value in state.items() if isinstance(value, torch.Tensor)}


# --------------------------------------------------------------------------------------------------------------------- safetensors


_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def safetensors_tensors(path):
    """All tensors of a safetensors file."""
    try:
        handle = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None
    tensors = {}
    for name in handle.keys():  # noqa: SIM118 (no mapping)
        part = handle.get_slice(name)
        dtype = _SAFETENSORS_DTYPES.get(part.get_dtype())
        if dtype is None:
            raise UserError(f"{path}: tensor {name} is stored as {part.get_dtype()}, which is not a dtype of training weights.")
        tensors[name] = StoredTensor(tuple(part.get_shape()), dtype, lambda name=name: handle.get_tensor(name))
    return tensors


def sharded_tensors(index, read):
    """Tensors of all files that an index names."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(index, error) from None
    absent = [name for name in files if not (index.parent / name).is_file()]
    if absent:
        raise UserError(f"{index} names files that are not there: {listed(absent)}.")
    tensors = {}
    for name in files:
        part = read(index.parent / name)
        doubled = sorted(tensors.keys() & part.keys())
        if doubled:
            raise UserError(f"{index.parent} holds these tensors twice, in several shards: {listed(doubled)}.")
        tensors.update(part)
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise UserError(f"the shards of {index} lack tensors that it names: {listed(absent)}.")
    return tensors


# ----------------------------------------------------------------------------------------------------------------------- DeepSpeed


MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class _Flat:
    """Several 1-D tensors as one."""

    def __init__(self, parts):
        self.parts = parts

    def __len__(self):
        return sum(len(part) for part in self.parts)

    def pieces(self, start, length):
        """Views that hold elements `start` to `start + length` in order."""
        views = []
        for part in self.parts:
            taken = part[max(start, 0) : max(start + length, 0)]
            if len(taken):
                views.append(taken)
            start -= len(part)
        return views


def _assembled(pieces, shape, name, folder):
    """The tensor of `shape` whose elements are those of the 1-D `pieces`, and padding after them."""
    numel = math.prod(shape)
    have = sum(len(piece) for piece in pieces)
    if have < numel:
        raise UserError(f"{folder}: the ZeRO shards hold {have} of the {numel} numbers of {name}; they are truncated or of another run.")
    dtype = pieces[0].dtype if pieces else torch.float32
    return StoredTensor(shape, dtype, lambda: (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:numel].view(shape))


def _per_rank(files, pattern, folder):
    """{rank: path} of the files that match; refuses tensor parallelism and two files of one rank."""
    ranks = {}
    for path in files:
        match = pattern.fullmatch(path.name)
        if not match:
            continue
        if int(match.group(2)):
            raise UserError(f"{folder} was written with tensor parallelism ({path.name}), which is not supported.")
        rank = int(match.group(1) or 0)
        if rank in ranks:
            raise UserError(f"{folder} holds two files of rank {rank}: {ranks[rank].name} and {path.name}; keep those of one run.")
        ranks[rank] = path
    return ranks


def _expected_value(mapping, key, path):
    if not isinstance(mapping, dict) or key not in mapping:
        raise UserError(f"{path} is no DeepSpeed checkpoint file: it has no {key!r}.")
    return mapping[key]


def read_deepspeed(folder):
    """Tensors, format in words, and notes of a DeepSpeed folder of any ZeRO stage; the float32 master weights where it names them.

    Raises:
        UserError: shards missing, truncated, mixed, or with tensor parallelism.
    """
    try:
        return _read_deepspeed(folder)
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # files of another layout
        raise _unreadable(folder, error) from None


def _read_deepspeed(folder):
    files = sorted(folder.iterdir())
    model_files = _per_rank(files, MODEL_STATES, folder)
    shard_files = _per_rank(files, OPTIM_STATES, folder)
    if 0 not in model_files:
        raise UserError(f"{folder} is incomplete: mp_rank_00_model_states.pt (or zero_pp_rank_0_mp_rank_00_model_states.pt) is missing.")
    model = load_torch_file(model_files[0])
    module = _expected_value(model, "module", model_files[0])
    shapes = model.get("param_shapes")
    if not shard_files:
        if shapes:
            raise UserError(f"{folder} is incomplete: the ZeRO shards (*zero_pp_rank_*_optim_states.pt) are missing.")
        tensors = {name: _stored(value, str(folder)) for name, value in module.items() if isinstance(value, torch.Tensor)}
        note = "weights as the model held them: without ZeRO, DeepSpeed does not name its master weights"
        return tensors, "DeepSpeed without ZeRO", [note]

    shards = {}
    for rank, path in shard_files.items():
        shards[rank] = _expected_value(load_torch_file(path), "optimizer_state_dict", path)
    count = _expected_value(shards[min(shards)], "partition_count", shard_files[min(shards)])
    world = max(count) if isinstance(count, (list, tuple)) else count
    absent = [rank for rank in range(world) if rank not in shards]
    if absent or len(shards) != world:
        raise UserError(
            f"{folder} has {len(shards)} of {world} ZeRO optimizer shards; "
            + (f"those of rank {listed(absent)} are missing." if absent else "it mixes the files of several runs.")
        )
    shards = [shards[rank] for rank in range(world)]
    if any(set(shard) != set(shards[0]) for shard in shards):
        raise UserError(f"{folder} mixes ZeRO shards of different kinds; keep the files of one run.")
    if not shapes:
        raise UserError(f"{model_files[0]} does not say which parameters the ZeRO shards hold (no param_shapes).")

    if "fp32_flat_groups" in shards[0]:
        absent = [rank for rank in range(world) if rank not in model_files]
        if absent:
            raise UserError(f"{folder} has {len(model_files)} of {world} model-states files; those of rank {listed(absent)} are missing.")
        models = [model] + [load_torch_file(model_files[rank]) for rank in range(1, world)]
        tensors, kind = _zero_3(folder, models, shards), "DeepSpeed ZeRO 3"
    elif "single_partition_of_fp32_groups" in shards[0]:
        stage = shards[0].get("zero_stage", 1)
        tensors, kind = _zero_1_2(folder, model, shards), f"DeepSpeed ZeRO {stage.args[0] if isinstance(stage, _StandIn) else stage}"
    else:
        raise UserError(f"{folder}: the ZeRO shards hold no float32 master weights.")

    # Buffers, and frozen parameters that no shard holds.
    sharded = {name for group in shapes for name in group}
    for name, value in module.items():
        if isinstance(value, torch.Tensor) and name not in tensors and name not in sharded and (value.numel() or "ZeRO 3" not in kind):
            tensors[name] = _stored(value, str(folder))
    for alias, original in (model.get("shared_params") or {}).items():
        if original in tensors:
            tensors[original].storage = (str(folder), original)
            tensors[alias] = tensors[original]
    return tensors, f"{kind}, {world} shard{'s' if world > 1 else ''}", ["float32 master weights from the optimizer shards"]


def _zero_1_2(folder, model, shards):
    """Every rank holds one slice of each flat parameter group; the parameters lie in it in the order of `param_shapes`.

    (`param_slice_mappings` would say where, too, but it is wrong in files written with round_robin_gradients.)
    """
    tensors = {}
    paddings = shards[0].get("param_alignment_paddings")
    for group, shapes in enumerate(model["param_shapes"]):
        flat, offset = _Flat([shard["single_partition_of_fp32_groups"][group] for shard in shards]), 0
        for (name, shape), padding in zip(shapes.items(), paddings[group] if paddings else [0] * len(shapes)):
            tensors[name] = _assembled(flat.pieces(offset, math.prod(shape)), tuple(shape), name, folder)
            offset += math.prod(shape) + padding
        # What is left over is alignment, of the ranks and of the parameters.
        if not offset <= len(flat) <= offset + 4 * len(shards) + 16 * len(shapes):
            raise UserError(f"{folder}: group {group} of the ZeRO shards holds {len(flat)} numbers where {offset} belong to parameters.")
    fragments = model.get("frozen_param_fragments") or {}
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        tensors[name] = _assembled([fragments[name].flatten()], tuple(shape), name, folder)
    return tensors


def _zero_3(folder, models, shards):
    """Every rank holds an equal slice, padded, of each parameter."""
    world, tensors, offset = len(shards), {}, 0
    flats = [_Flat(shard["fp32_flat_groups"]) for shard in shards]
    for shapes in models[0]["param_shapes"]:
        for name, shape in shapes.items():
            share = -(-math.prod(shape) // world)
            pieces = [piece for flat in flats for piece in flat.pieces(offset, share)]
            tensors[name] = _assembled(pieces, tuple(shape), name, folder)
            offset += share
    if any(len(flat) != offset for flat in flats):
        raise UserError(f"{folder}: the ZeRO 3 shards hold {listed(map(len, flats))} numbers each where {offset} belong to the parameters.")
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        pieces = [(model.get("frozen_param_fragments") or {}).get(name, torch.empty(0)).flatten() for model in models]
        tensors[name] = _assembled(pieces, tuple(shape), name, folder)
    return tensors


# ---------------------------------------------------------------------------------------------------- torch.distributed.checkpoint


def read_distributed(folder):
    """Tensors, format in words, and notes of a torch.distributed.checkpoint folder; optimizer states are left out.

    Raises:
        UserError: parts missing or truncated, or an object of an unknown class in the metadata.
    """
    path = folder / ".metadata"
    try:
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        entries = {name: entry for name, entry in metadata.state_dict_metadata.items() if type(entry).__name__ == "TensorStorageMetadata"}
        chunks = {}
        for index, info in metadata.storage_data.items():
            chunks.setdefault(index.fqn, {})[tuple(getattr(index, "offset", None) or ())] = info
        tensors = {
            name: _distributed_tensor(folder, name, entry, chunks.get(name, {}))
            for name, entry in entries.items()
            if not name.startswith(("optim", "lr_scheduler", "scheduler"))
        }
    except UserError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise _unreadable(path, error) from None
    return tensors, "torch.distributed.checkpoint (FSDP)", []


def _distributed_tensor(folder, name, entry, infos):
    shape, dtype = tuple(entry.size), entry.properties.state[0]
    parts = []
    for chunk in entry.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if not math.prod(sizes):
            continue
        info = infos.get(offsets) or (infos.get(()) if not any(offsets) else None)
        if info is None:
            raise UserError(f"{folder} does not say where a part of {name} lies; it is incomplete.")
        if getattr(info, "transform_descriptors", None):
            raise UserError(f"{folder} is stored compressed, which is not supported; save it without stream transforms.")
        file = folder / info.relative_path
        if Path(info.relative_path).name != info.relative_path or not file.is_file():
            raise UserError(f"{folder} is incomplete: {info.relative_path} is missing.")
        if file.stat().st_size < info.offset + info.length:
            raise UserError(f"{file} is truncated: {file.stat().st_size} bytes where at least {info.offset + info.length} belong.")
        parts.append((offsets, sizes, file, info))
    if sum(math.prod(sizes) for _, sizes, _, _ in parts) != math.prod(shape):
        raise UserError(f"{folder} is incomplete: its parts of {name} do not add up to {shape}.")

    def read():
        if len(parts) == 1:
            return _distributed_chunk(*parts[0][1:])
        whole = torch.empty(shape, dtype=dtype)
        for offsets, sizes, file, info in parts:
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))] = _distributed_chunk(sizes, file, info)
        return whole

    return StoredTensor(shape, dtype, read)


def _distributed_chunk(sizes, file, info):
    with open(file, "rb") as stream:
        stream.seek(info.offset)
        data = io.BytesIO(stream.read(info.length))
    try:
        tensor = torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes torch raise
        raise _unreadable(file, error) from None
    if tuple(tensor.shape) != sizes:
        raise UserError(f"{file} holds a part of shape {tuple(tensor.shape)} where the metadata says {sizes}.")
    return tensor.detach()
