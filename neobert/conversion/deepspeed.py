"""DeepSpeed checkpoints of any ZeRO stage.

The float32 master weights are assembled from the optimizer shards of all ranks. Shards of different
steps or stages must not be combined; they are recognized by the counters in every file.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..common.errors import UserError, listed
from .weight_files import StandIn, Weights, load_torch_file, plain_tensors, unreadable


# {name of a parameter: its shape}, for each parameter group.
Groups = Sequence[Mapping[str, Sequence[int]]]
State = Mapping[str, Any]

_MODEL_STATES = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
_OPTIM_STATES = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt"
)
# Names of DeepSpeed's ZeroStageEnum.
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


def is_deepspeed(folder: Path) -> bool:
    """Return whether a directory contains files of DeepSpeed."""
    names = [path.name for path in folder.iterdir()]
    return any(_MODEL_STATES.fullmatch(name) or _OPTIM_STATES.fullmatch(name) for name in names)


def read_deepspeed(folder: Path) -> Weights:
    """Read a DeepSpeed checkpoint of any ZeRO stage.

    Returns:
        The float32 master weights; without ZeRO, the weights of the model.

    Raises:
        UserError: If shards are missing, truncated or mixed, or tensor parallelism was used.
    """
    try:
        return _read(folder)
    except UserError:
        raise
    except Exception as error:  # A damaged file, or one of another layout.
        raise unreadable(folder, error) from None


def _read(folder: Path) -> Weights:
    """Read a DeepSpeed checkpoint; damaged files raise any exception."""
    # Files *_model_states.pt contain the weights in the precision of training. With ZeRO there is
    # also one file *_optim_states.pt per rank, with a part of the float32 weights.
    model_files = _files_by_rank(folder, _MODEL_STATES)
    shard_files = _files_by_rank(folder, _OPTIM_STATES)
    if 0 not in model_files:
        raise UserError(
            f"{folder} is incomplete: mp_rank_00_model_states.pt (or "
            "zero_pp_rank_0_mp_rank_00_model_states.pt) is missing."
        )
    model = load_torch_file(model_files[0])
    module = plain_tensors(model["module"], model_files[0])
    groups = model.get("param_shapes")

    # Only checkpoints of ZeRO list the shapes of the parameters.
    if not shard_files:
        if groups:
            raise UserError(
                f"{folder} is incomplete: the ZeRO shards (*zero_pp_rank_*_optim_states.pt) are "
                "missing."
            )
        note = (
            "weights in the precision of the model: without ZeRO, DeepSpeed does not name its "
            "master weights"
        )
        return Weights(module, "DeepSpeed without ZeRO", [note])

    shards = _load_shards(folder, shard_files)
    # The layout of the values, not the number of the stage, decides how to assemble them.
    stage = _plain(shards[0].get("zero_stage", 1))
    if "fp32_flat_groups" in shards[0]:
        stage = 3
        models = [model, *_load_other_models(folder, model_files, len(shards))]
        _check_models(folder, models)
        tensors = _assemble_stage_3(folder, models, groups, shards)
        # In stage 3 the model file contains empty tensors for the sharded weights.
        module = {name: tensor for name, tensor in module.items() if tensor.numel()}
    elif "single_partition_of_fp32_groups" in shards[0]:
        tensors = _assemble_stages_1_and_2(folder, model, groups, shards)
    else:
        raise UserError(f"the ZeRO shards in {folder} must contain float32 master weights.")

    # Add buffers, and frozen parameters that are in no shard.
    sharded = {name for shapes in groups for name in shapes}
    for name, tensor in module.items():
        if name not in sharded and name not in tensors:
            tensors[name] = tensor

    # A parameter with two names is stored once.
    for alias, original in (model.get("shared_params") or {}).items():
        if original in tensors:
            tensors[alias] = tensors[original]

    plural = "s" if len(shards) > 1 else ""
    checkpoint_format = f"DeepSpeed ZeRO {stage}, {len(shards)} shard{plural}"
    return Weights(tensors, checkpoint_format, ["float32 master weights from the optimizer shards"])


# ------------------------------------------------------------------------------------------------
# Files


def _files_by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return the files whose names match, by rank.

    Raises:
        UserError: If tensor parallelism was used, or there are two files of one rank.
    """
    files: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if not match:
            continue
        # mp_rank is the rank of tensor parallelism, which splits single matrices.
        if int(match[2]):
            raise UserError(
                f"{folder} was written with tensor parallelism ({path.name}), which is not "
                "supported."
            )

        rank = int(match[1] or 0)
        if rank in files:
            raise UserError(
                f"{folder} must have one file of each rank, got {files[rank].name} and {path.name} "
                f"of rank {rank}. Keep the files of one run."
            )
        files[rank] = path
    return files


def _load_shards(folder: Path, files: Mapping[int, Path]) -> list[State]:
    """Return the optimizer states of all ranks in order.

    Raises:
        UserError: If ranks are missing, or the shards are of different steps or stages.
    """
    states = {rank: load_torch_file(files[rank])["optimizer_state_dict"] for rank in sorted(files)}
    # DeepSpeed stores one count, or one per parameter group.
    count = states[min(states)]["partition_count"]
    world_size = max(count) if isinstance(count, (list, tuple)) else count
    if len(states) != world_size or max(states) >= world_size:
        raise UserError(
            f"{folder} must have the ZeRO optimizer shards of {world_size!r:.80} ranks, got those "
            f"of rank {listed(states)}. Keep all files of one run, and no others."
        )

    shards = list(states.values())
    # These values are equal on all ranks of one step. Between steps or stages one of them differs.
    counters = [
        {
            "zero_stage": _plain(shard.get("zero_stage")),
            "partition_count": shard.get("partition_count"),
            "step": _steps(shard),
        }
        for shard in shards
    ]
    _check_equal(folder, counters, "ZeRO shards")
    return shards


def _load_other_models(folder: Path, files: Mapping[int, Path], world_size: int) -> list[State]:
    """Return the model states of the ranks 1, 2, ... of ZeRO 3.

    Raises:
        UserError: If a rank is missing.
    """
    missing = [rank for rank in range(world_size) if rank not in files]
    if missing:
        raise UserError(
            f"{folder} is incomplete: it has {len(files)} of {world_size} model-states files, and "
            f"those of rank {listed(missing)} are missing."
        )
    return [load_torch_file(files[rank]) for rank in range(1, world_size)]


def _check_models(folder: Path, models: Sequence[State]) -> None:
    """Check that the model states of all ranks are of one step.

    Raises:
        UserError: If the steps differ.
    """
    names = ("global_steps", "global_samples", "skipped_steps", "dp_world_size")
    counters = [{name: _plain(model.get(name)) for name in names} for model in models]
    _check_equal(folder, counters, "model files")


def _plain(value: Any) -> bool | int | float | str | None:
    """Return a number, a text, the value of an enum or of a tensor of one element, else None."""
    if isinstance(value, StandIn):
        # The arguments are those of ZeroStageEnum(2), or before Python 3.11.4 those of
        # getattr(ZeroStageEnum, "gradients").
        value = value.args[-1] if value.args else None
        value = _STAGES.get(value, value) if isinstance(value, str) else value
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, (bool, int, float, str)) else None


def _steps(state: Any) -> list[Any]:
    """Return all values of the key "step" in nested lists and dictionaries."""
    if isinstance(state, dict):
        # Optimizers store the step at different depths, per parameter or per group.
        if "step" in state:
            return [_plain(state["step"])]
        children = list(state.values())
    elif isinstance(state, (list, tuple)):
        children = list(state)
    else:
        return []

    steps = []
    for child in children:
        steps += _steps(child)
    return steps


def _check_equal(folder: Path, counters: Sequence[State], files: str) -> None:
    """Check that the counters of all ranks are equal.

    Args:
        folder: Directory, for the message.
        counters: Values by name, one mapping per rank.
        files: Name of the files that contain the counters, for the message.

    Raises:
        UserError: If a counter differs between two ranks.
    """
    for rank, other in enumerate(counters):
        for name, first in counters[0].items():
            if first != other[name]:
                raise UserError(
                    f"the {files} in {folder} must be of one step, but {name} is {first!r:.60} on "
                    f"rank 0 and {other[name]!r:.60} on rank {rank}. Keep the files of one step."
                )


# ------------------------------------------------------------------------------------------------
# Values


def _join(
    pieces: Collection[torch.Tensor], shape: Sequence[int], name: str, folder: Path
) -> torch.Tensor:
    """Return the tensor that consists of the pieces, without the padding at the end.

    Args:
        pieces: Vectors, joined in this order.
        shape: Shape of the tensor.
        name: Name of the parameter, for the message.
        folder: Directory, for the message.

    Raises:
        UserError: If the pieces have too few elements.
    """
    needed = math.prod(shape)
    available = sum(map(len, pieces))
    if available < needed:
        raise UserError(
            f"the ZeRO shards in {folder} have {available} of the {needed} values of {name}: they "
            "are truncated, or of another run."
        )
    return torch.cat(list(pieces))[:needed].view(shape)


def _assemble_stages_1_and_2(
    folder: Path, model: State, groups: Groups, shards: Sequence[State]
) -> dict[str, torch.Tensor]:
    """Assemble the weights of ZeRO 1 and 2.

    Each rank has one slice of every flat parameter group. Within a group, the parameters are in the
    order of `param_shapes`. (`param_slice_mappings` contains the positions too, but it is wrong in
    files that were written with round_robin_gradients.)
    """
    tensors: dict[str, torch.Tensor] = {}
    paddings = shards[0].get("param_alignment_paddings")
    for number, shapes in enumerate(groups):
        # In the order of the ranks, the slices join to one vector of all parameters of the group.
        slices = [shard["single_partition_of_fp32_groups"][number] for shard in shards]
        flat = torch.cat(slices).detach()
        offset = 0
        group_paddings = paddings[number] if paddings else [0] * len(shapes)
        for (name, shape), padding in zip(shapes.items(), group_paddings, strict=True):
            piece = flat[offset : offset + math.prod(shape)]
            tensors[name] = _join([piece], shape, name, folder)
            offset += math.prod(shape) + padding

        # The remaining values align the slices of the ranks and the parameters. More of them would
        # be parameters that `param_shapes` does not list.
        if not offset <= len(flat) <= offset + 4 * len(shards) + 16 * len(shapes):
            raise UserError(
                f"group {number} of the ZeRO shards in {folder} must have {offset} values and "
                f"padding, got {len(flat)}."
            )
    return tensors | _join_frozen(folder, [model])


def _assemble_stage_3(
    folder: Path, models: Sequence[State], groups: Groups, shards: Sequence[State]
) -> dict[str, torch.Tensor]:
    """Assemble the weights of ZeRO 3: each rank has an equal, padded slice of every parameter."""
    tensors: dict[str, torch.Tensor] = {}
    offset = 0
    flats = [torch.cat(shard["fp32_flat_groups"]).detach() for shard in shards]
    # The offset is the same on all ranks, and continues through the groups.
    for shapes in groups:
        for name, shape in shapes.items():
            # Each slice has the size of the parameter divided by the ranks, rounded up.
            slice_size = -(-math.prod(shape) // len(shards))
            pieces = [flat[offset : offset + slice_size] for flat in flats]
            tensors[name] = _join(pieces, shape, name, folder)
            offset += slice_size

    if any(len(flat) != offset for flat in flats):
        raise UserError(
            f"each ZeRO 3 shard in {folder} must have {offset} values, got "
            f"{listed(map(len, flats))}."
        )
    return tensors | _join_frozen(folder, models)


def _join_frozen(folder: Path, models: Sequence[State]) -> dict[str, torch.Tensor]:
    """Return the frozen parameters, from their fragments in the model states of all ranks."""
    tensors = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        # In stages 1 and 2 the parameter is complete in the one model file.
        fragments = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
        pieces = [fragment.flatten() for fragment in fragments if fragment is not None]
        tensors[name] = _join(pieces, shape, name, folder)
    return tensors
