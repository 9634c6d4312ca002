"""DeepSpeed folders of any ZeRO stage: the float32 master weights, put together from the optimizer
shards of all ranks.

Shards of different steps or stages must not be joined. The counters of steps tell them apart, which
every file carries.
"""

import dataclasses
import itertools
import math
import re

import torch

from ..common.errors import UserError, listed
from .stored import StoredTensor, checked_shape, tensors_of, unreadable
from .torch_files import StandIn, load_torch_file


MODEL_STATES = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
OPTIM_STATES = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt"
)


def read_deepspeed(folder):
    """Tensors, format in words, and notes of a DeepSpeed folder of any ZeRO stage; the float32
    master weights where it names them.

    Raises:
        UserError: shards missing, truncated, mixed, or with tensor parallelism.
    """
    try:
        return _read(folder)
    except UserError:
        raise
    except Exception as error:  # files of another layout, or damaged ones
        raise unreadable(folder, error) from None


def _read(folder):
    names = sorted(folder.iterdir())
    model_files = _by_rank(names, MODEL_STATES, folder)
    shard_files = _by_rank(names, OPTIM_STATES, folder)
    if 0 not in model_files:
        raise UserError(
            f"{folder} is incomplete: mp_rank_00_model_states.pt (or "
            "zero_pp_rank_0_mp_rank_00_model_states.pt) is missing."
        )
    model = load_torch_file(model_files[0])
    module = tensors_of(_value(model, "module", model_files[0]), model_files[0])
    shapes = model.get("param_shapes")
    if not shard_files:
        if shapes:
            raise UserError(
                f"{folder} is incomplete: the ZeRO shards (*zero_pp_rank_*_optim_states.pt) are "
                "missing."
            )
        note = (
            "weights as the model held them: without ZeRO, DeepSpeed does not name its "
            "master weights"
        )
        return module, "DeepSpeed without ZeRO", [note]
    shards = _shards(folder, shard_files)
    if not shapes:
        raise UserError(
            f"{model_files[0]} does not say which parameters the ZeRO shards hold (no "
            "param_shapes)."
        )
    groups = [
        {name: checked_shape(shape, name) for name, shape in group.items()} for group in shapes
    ]

    stage = _plain(shards[0].get("zero_stage", 1))
    if "fp32_flat_groups" in shards[0]:
        absent = [rank for rank in range(len(shards)) if rank not in model_files]
        if absent:
            raise UserError(
                f"{folder} has {len(model_files)} of {len(shards)} model-states files; those of "
                f"rank {listed(absent)} are missing."
            )
        models = [model] + [load_torch_file(model_files[rank]) for rank in range(1, len(shards))]
        _check_same(folder, [_counters(each) for each in models], "model files")
        tensors, stage = _stage_3(folder, models, groups, shards), 3
        # The model's own weights are empty here.
        module = {name: stored for name, stored in module.items() if math.prod(stored.shape)}
    elif "single_partition_of_fp32_groups" in shards[0]:
        tensors = _stages_1_and_2(folder, model, groups, shards)
    else:
        raise UserError(f"{folder}: the ZeRO shards hold no float32 master weights.")

    # Buffers, and frozen parameters that no shard holds.
    sharded = set(itertools.chain.from_iterable(groups))
    tensors |= {
        name: stored
        for name, stored in module.items()
        if name not in tensors and name not in sharded
    }
    for alias, original in (model.get("shared_params") or {}).items():
        if original in tensors:
            tensors[original] = dataclasses.replace(
                tensors[original], storage=(str(folder), original)
            )
            tensors[alias] = tensors[original]
    kind = f"DeepSpeed ZeRO {stage}, {len(shards)} shard{'s' if len(shards) > 1 else ''}"
    return tensors, kind, ["float32 master weights from the optimizer shards"]


def _value(mapping, key, path):
    if not isinstance(mapping, dict) or key not in mapping:
        raise UserError(f"{path} is not a file of a DeepSpeed checkpoint: it has no {key!r}.")
    return mapping[key]


# ------------------------------------------------------------------------------------------------
# the files


def _by_rank(files, pattern, folder):
    """{rank: path} of the files that match; refuses tensor parallelism and two files of one
    rank."""
    ranks = {}
    for path in files:
        match = pattern.fullmatch(path.name)
        if not match:
            continue
        if int(match.group(2)):
            raise UserError(
                f"{folder} was written with tensor parallelism ({path.name}), which is not "
                "supported."
            )
        rank = int(match.group(1) or 0)
        if rank in ranks:
            raise UserError(
                f"{folder} holds two files of rank {rank}: {ranks[rank].name} and {path.name}; "
                "keep those of one run."
            )
        ranks[rank] = path
    return ranks


def _shards(folder, files):
    """The optimizer states of all ranks in order; refuses missing ones and those that do not belong
    together."""
    shards = {
        rank: _value(load_torch_file(path), "optimizer_state_dict", path)
        for rank, path in files.items()
    }
    first = min(shards)
    count = _value(shards[first], "partition_count", files[first])
    world = max(count) if isinstance(count, (list, tuple)) else count
    if type(world) is not int or world < 1:
        raise UserError(
            f"{files[first]} names {world!r:.80} as the number of shards, which should be a "
            "positive whole number."
        )
    if len(shards) != world or max(shards) >= world:
        absent = itertools.islice((rank for rank in range(world) if rank not in shards), 21)
        lacking = max(shards) < world
        raise UserError(
            f"{folder} has {len(shards)} of {world} ZeRO optimizer shards; "
            + (
                f"those of rank {listed(absent, 20)} are missing."
                if lacking
                else "it mixes the files of several runs."
            )
        )
    shards = [shards[rank] for rank in range(world)]
    if any(set(shard) != set(shards[0]) for shard in shards):
        raise UserError(
            f"{folder} mixes ZeRO shards of different kinds; keep the files of one run."
        )
    _check_same(folder, [_progress(shard) for shard in shards], "ZeRO shards")
    return shards


def _plain(value):
    """A number or text as itself, an enum as its value, a tensor of one number as the number, and
    anything else as None."""
    if isinstance(value, StandIn):
        value = value.args[0] if value.args else None
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, (bool, int, float, str)) else None


def _progress(shard):
    """{what: value} of an optimizer shard that is the same on all ranks of one step, and differs
    between steps or stages."""
    found = {
        "zero_stage": _plain(shard.get("zero_stage")),
        "partition_count": shard.get("partition_count"),
    }
    optimizer = shard.get("base_optimizer_state", shard.get("optimizer_state_dict"))
    states = (
        optimizer.get("state", {})
        if isinstance(optimizer, dict)
        else dict(enumerate(optimizer or ()))
    )
    groups = optimizer.get("param_groups", []) if isinstance(optimizer, dict) else []
    for number, entry in (*states.items(), *enumerate(groups)):
        if isinstance(entry, dict) and "step" in entry:
            found[f"step of parameter group {number}"] = _plain(entry["step"])
    return found


def _counters(model):
    return {
        name: _plain(model.get(name))
        for name in ("global_steps", "global_samples", "skipped_steps", "dp_world_size")
    }


def _check_same(folder, found, what):
    """Raises UserError for the first thing that two of the dictionaries, one a rank, say
    differently."""
    for rank, other in enumerate(found):
        for name in sorted(found[0].keys() & other.keys()):
            first, second = found[0][name], other[name]
            if first != second:
                raise UserError(
                    f"{folder} mixes {what} that do not belong together: {name} is {first!r:.60} "
                    f"on rank 0 and {second!r:.60} "
                    f"on rank {rank}; keep the files of one step."
                )


# ------------------------------------------------------------------------------------------------
# the numbers in them


class _Flat:
    """Several 1-D tensors as one."""

    def __init__(self, parts):
        if any(not isinstance(part, torch.Tensor) or part.dim() != 1 for part in parts):
            raise ValueError("a group of parameters that is not a flat tensor")
        self.parts = [part.detach() for part in parts]

    def __len__(self):
        return sum(map(len, self.parts))

    def pieces(self, start, length):
        """The views, in order, that hold elements `start` to `start + length`."""
        pieces = []
        for part in self.parts:
            begin, end = max(start, 0), min(max(start + length, 0), len(part))
            if begin < end:
                pieces.append(part[begin:end])
            start -= len(part)
        return pieces


def _assembled(pieces, shape, name, folder):
    """The tensor of `shape` whose elements are those of the `pieces`, and padding after them."""
    numel, have = math.prod(shape), sum(map(len, pieces))
    if have < numel:
        raise UserError(
            f"{folder}: the ZeRO shards hold {have} of the {numel} numbers of {name}; they are "
            "truncated or of another run."
        )

    def read():
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:numel].view(shape)

    return StoredTensor(shape, pieces[0].dtype if pieces else torch.float32, read)


def _stages_1_and_2(folder, model, groups, shards):
    """Every rank holds one slice of each flat parameter group; the parameters are in it in the
    order of `param_shapes`.

    (`param_slice_mappings` would say where, too, but it is wrong in files written with
    round_robin_gradients.)
    """
    tensors = {}
    paddings = shards[0].get("param_alignment_paddings")
    for number, shapes in enumerate(groups):
        flat = _Flat([shard["single_partition_of_fp32_groups"][number] for shard in shards])
        offset = 0
        padding = (
            checked_shape(list(paddings[number]), "the padding of a group")
            if paddings
            else (0,) * len(shapes)
        )
        for (name, shape), padded in zip(shapes.items(), padding, strict=True):
            tensors[name] = _assembled(flat.pieces(offset, math.prod(shape)), shape, name, folder)
            offset += math.prod(shape) + padded
        # What is left over is alignment, of the ranks and of the parameters.
        if not offset <= len(flat) <= offset + 4 * len(shards) + 16 * len(shapes):
            raise UserError(
                f"{folder}: group {number} of the ZeRO shards holds {len(flat)} numbers where "
                f"{offset} belong to parameters."
            )
    fragments = model.get("frozen_param_fragments") or {}
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        tensors[name] = _assembled(
            [fragments[name].flatten()], checked_shape(shape, name), name, folder
        )
    return tensors


def _stage_3(folder, models, groups, shards):
    """Every rank holds an equal slice, padded, of each parameter."""
    world, tensors, offset = len(shards), {}, 0
    flats = [_Flat(shard["fp32_flat_groups"]) for shard in shards]
    for shapes in groups:
        for name, shape in shapes.items():
            share = -(-math.prod(shape) // world)
            pieces = [piece for flat in flats for piece in flat.pieces(offset, share)]
            tensors[name] = _assembled(pieces, shape, name, folder)
            offset += share
    if any(len(flat) != offset for flat in flats):
        raise UserError(
            f"{folder}: the ZeRO 3 shards hold {listed(map(len, flats))} numbers each where "
            f"{offset} belong to the parameters."
        )
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
        pieces = [part.flatten() for part in parts if part is not None]
        tensors[name] = _assembled(pieces, checked_shape(shape, name), name, folder)
    return tensors
