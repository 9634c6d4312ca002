"""DeepSpeed folders of any ZeRO stage: the float32 master weights, put together from the optimizer
shards of all ranks.

Shards of different steps or stages must not be joined. The counters of steps tell them apart, which
every file carries.
"""

import math
import re

import torch

from ..common.errors import UserError, listed
from .weight_files import StandIn, load_torch_file, plain_tensors, unreadable


_MODEL_STATES = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
_OPTIM_STATES = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt"
)


def is_deepspeed(folder):
    """Whether a folder has files of DeepSpeed."""
    names = [path.name for path in folder.iterdir()]
    return any(_MODEL_STATES.fullmatch(name) or _OPTIM_STATES.fullmatch(name) for name in names)


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
    model_files = _by_rank(folder, _MODEL_STATES)
    shard_files = _by_rank(folder, _OPTIM_STATES)
    if 0 not in model_files:
        raise UserError(
            f"{folder} is incomplete: mp_rank_00_model_states.pt (or "
            "zero_pp_rank_0_mp_rank_00_model_states.pt) is missing."
        )
    model = load_torch_file(model_files[0])
    module = plain_tensors(model["module"], model_files[0])
    groups = model.get("param_shapes")
    if not shard_files:
        if groups:
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
    stage = _plain(shards[0].get("zero_stage", 1))
    if "fp32_flat_groups" in shards[0]:
        if absent := [rank for rank in range(len(shards)) if rank not in model_files]:
            raise UserError(
                f"{folder} has {len(model_files)} of {len(shards)} model-states files; those of "
                f"rank {listed(absent)} are missing."
            )
        models = [model, *(load_torch_file(model_files[rank]) for rank in range(1, len(shards)))]
        names = ("global_steps", "global_samples", "skipped_steps", "dp_world_size")
        counters = [{name: _plain(each.get(name)) for name in names} for each in models]
        _check_same(folder, counters, "model files")
        tensors, stage = _stage_3(folder, models, groups, shards), 3
        # The model's own weights are empty here.
        module = {name: tensor for name, tensor in module.items() if tensor.numel()}
    elif "single_partition_of_fp32_groups" in shards[0]:
        tensors = _stages_1_and_2(folder, model, groups, shards)
    else:
        raise UserError(f"{folder}: the ZeRO shards hold no float32 master weights.")

    # Buffers, and frozen parameters that no shard holds.
    sharded = {name for shapes in groups for name in shapes}
    beside = {name: tensor for name, tensor in module.items() if name not in sharded}
    tensors = tensors | {name: beside[name] for name in beside if name not in tensors}
    for alias, original in (model.get("shared_params") or {}).items():
        if original in tensors:
            tensors[alias] = tensors[original]
    plural = "s" if len(shards) > 1 else ""
    kind = f"DeepSpeed ZeRO {stage}, {len(shards)} shard{plural}"
    return tensors, kind, ["float32 master weights from the optimizer shards"]


# ------------------------------------------------------------------------------------------------
# the files


def _by_rank(folder, pattern):
    """{rank: path} of the files that match; refuses tensor parallelism and two files of one
    rank."""
    ranks = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if not match:
            continue
        if int(match[2]):
            raise UserError(
                f"{folder} was written with tensor parallelism ({path.name}), which is not "
                "supported."
            )
        rank = int(match[1] or 0)
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
    shards = {rank: load_torch_file(files[rank])["optimizer_state_dict"] for rank in sorted(files)}
    count = shards[min(shards)]["partition_count"]
    world = max(count) if isinstance(count, (list, tuple)) else count
    if len(shards) != world or max(shards) >= world:
        raise UserError(
            f"{folder} has the ZeRO optimizer shards of rank {listed(shards)}, of {world!r:.80} "
            "ranks: keep all files of one run, and no others."
        )
    shards = list(shards.values())
    # The same on all ranks of one step; between steps or stages one of them differs.
    counters = [
        {
            "zero_stage": _plain(shard.get("zero_stage")),
            "partition_count": shard.get("partition_count"),
            "step": _steps(shard),
        }
        for shard in shards
    ]
    _check_same(folder, counters, "ZeRO shards")
    return shards


_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


def _plain(value):
    """A number or text as itself, an enum as its value, a tensor of one number as the number, and
    anything else as None."""
    if isinstance(value, StandIn):
        # ZeroStageEnum(2), or getattr(ZeroStageEnum, "gradients") of Python before 3.11.4
        value = value.args[-1] if value.args else None
        value = _STAGES.get(value, value) if isinstance(value, str) else value
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, (bool, int, float, str)) else None


def _steps(state):
    """All numbers under the key "step" in a state of lists and dictionaries."""
    if isinstance(state, dict) and "step" in state:
        return [_plain(state["step"])]
    parts = state.values() if isinstance(state, dict) else state
    if not isinstance(state, (dict, list, tuple)):
        return []
    return [step for part in parts for step in _steps(part)]


def _check_same(folder, counters, what):
    """Raises UserError for the first thing that two of the dictionaries, one a rank, say
    differently."""
    for rank, other in enumerate(counters):
        for name, first in counters[0].items():
            if first != other[name]:
                raise UserError(
                    f"{folder} mixes {what} that do not belong together: {name} is {first!r:.60} "
                    f"on rank 0 and {other[name]!r:.60} on rank {rank}; keep the files of one step."
                )


# ------------------------------------------------------------------------------------------------
# the numbers in them


def _assembled(pieces, shape, name, folder):
    """The tensor of `shape` whose elements are those of the `pieces`, and padding after them."""
    numel, have = math.prod(shape), sum(map(len, pieces))
    if have < numel:
        raise UserError(
            f"{folder}: the ZeRO shards hold {have} of the {numel} numbers of {name}; they are "
            "truncated or of another run."
        )
    return torch.cat(pieces)[:numel].view(shape)


def _stages_1_and_2(folder, model, groups, shards):
    """Every rank holds one slice of each flat parameter group; the parameters are in it in the
    order of `param_shapes`.

    (`param_slice_mappings` would say where, too, but it is wrong in files written with
    round_robin_gradients.)
    """
    tensors = {}
    paddings = shards[0].get("param_alignment_paddings")
    for number, shapes in enumerate(groups):
        parts = [shard["single_partition_of_fp32_groups"][number] for shard in shards]
        flat, offset = torch.cat(parts).detach(), 0
        padding = paddings[number] if paddings else [0] * len(shapes)
        for (name, shape), padded in zip(shapes.items(), padding, strict=True):
            piece = flat[offset : offset + math.prod(shape)]
            tensors[name] = _assembled([piece], shape, name, folder)
            offset += math.prod(shape) + padded
        # What is left over is alignment, of the ranks and of the parameters.
        if not offset <= len(flat) <= offset + 4 * len(shards) + 16 * len(shapes):
            raise UserError(
                f"{folder}: group {number} of the ZeRO shards holds {len(flat)} numbers where "
                f"{offset} belong to parameters."
            )
    return tensors | _frozen(folder, [model])


def _stage_3(folder, models, groups, shards):
    """Every rank holds an equal slice, padded, of each parameter."""
    tensors, offset = {}, 0
    flats = [torch.cat(shard["fp32_flat_groups"]).detach() for shard in shards]
    for shapes in groups:
        for name, shape in shapes.items():
            share = -(-math.prod(shape) // len(shards))
            pieces = [flat[offset : offset + share] for flat in flats]
            tensors[name] = _assembled(pieces, shape, name, folder)
            offset += share
    if any(len(flat) != offset for flat in flats):
        raise UserError(
            f"{folder}: the ZeRO 3 shards hold {listed(map(len, flats))} numbers each where "
            f"{offset} belong to the parameters."
        )
    return tensors | _frozen(folder, models)


def _frozen(folder, models):
    """Parameters that are not trained, from their fragments in the model files of all ranks."""
    tensors = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
        pieces = [part.flatten() for part in parts if part is not None]
        tensors[name] = _assembled(pieces, shape, name, folder)
    return tensors
