"""Finds a training checkpoint's step and format, and gives its tensors their published names.

Reads `state_dict.pt`, DeepSpeed and torch.distributed.checkpoint folders, accelerate's
`save_state`, Trainer's checkpoints, safetensors and Hub folders.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..common.errors import UserError, listed
from ..common.files import check_file, read_text
from .deepspeed import MODEL_STATES, OPTIM_STATES, read_deepspeed
from .distributed import read_distributed
from .heads import HEAD_PREFIXES
from .safetensors_files import safetensors_tensors, sharded_tensors
from .stored import StoredTensor, is_plain_name
from .torch_files import torch_tensors


@dataclass
class Checkpoint:
    """The tensors of one checkpoint, by the names of NeoBERT's masked LM (`model.encoder.weight`,
    `decoder.weight`, ...).

    Attributes:
        path: the folder or file of this step.
        format: what was recognised, in words.
        folders: where a configuration or tokenizer may be: the checkpoint's folder and those above
            it that belong to the run.
        notes: what the user should know about what was read.
    """

    path: Path
    format: str
    tensors: dict[str, StoredTensor]
    folders: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------
# which format, which step


_STEP = re.compile(r"(?:(?:checkpoint|step|global_step|epoch|iter)[_-]?)?([0-9]{1,18})")
_RUN_FOLDERS = ("model_checkpoints", "checkpoints")
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model_fsdp.bin",
    "state_dict.pt",
)
# accelerate's save_state puts the engine's own folder below the step.
_ENGINE_FOLDERS = ("pytorch_model", "pytorch_model_fsdp_0")


def _is_deepspeed(folder):
    return any(
        MODEL_STATES.fullmatch(path.name) or OPTIM_STATES.fullmatch(path.name)
        for path in folder.iterdir()
    )


def _reader_of(path):
    """A function that returns (tensors, format, notes) for a file or folder with weights, or
    None."""
    if path.is_file():
        if path.name.endswith(".index.json"):
            read = safetensors_tensors if "safetensors" in path.name else torch_tensors
            return lambda: (
                sharded_tensors(path, read),
                f"sharded {'safetensors' if read is safetensors_tensors else 'torch.save'}",
                [],
            )
        if path.suffix == ".safetensors":
            return lambda: (safetensors_tensors(path), "safetensors", [])
        return lambda: (torch_tensors(path), f"torch.save ({path.name})", [])
    for folder in (path, *(path / name for name in _ENGINE_FOLDERS)):
        # Master weights are preferred to what may be beside them.
        if folder.is_dir() and _is_deepspeed(folder):
            return lambda folder=folder: read_deepspeed(folder)
        if (folder / ".metadata").is_file():
            return lambda folder=folder: read_distributed(folder)
    # Trainer with DeepSpeed: checkpoint-10/latest names checkpoint-10/global_step10.
    latest = _tag(path)
    if (
        latest is not None
        and latest.name.startswith("global_step")
        and latest.is_dir()
        and _is_deepspeed(latest)
    ):
        return lambda: read_deepspeed(latest)
    for name in _WEIGHT_FILES:
        if (path / name).is_file():
            return _reader_of(path / name)
    return None


def _tag(folder):
    """The folder that DeepSpeed's file `latest` names, or None without that file."""
    file = folder / "latest"
    if not file.is_file():
        return None
    name = read_text(file, 4096).strip()
    if not is_plain_name(name):
        raise UserError(
            f"{file} should hold the name of a folder beside it, but holds {name[:80]!r}."
        )
    return folder / name


def _steps(folder):
    steps = {}
    for path in sorted(folder.iterdir()):
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            steps.setdefault(int(match.group(1)), []).append(path)
    return steps


def find_step(path, step=None):
    """The file or folder that holds the weights.

    Args:
        path: a file, a step's folder, or a run's folder.
        step: a step number; None or "latest" for what `latest` names, else the highest number.
    Raises:
        UserError: nothing there, or no such step.
    """
    path = Path(path)
    if not path.is_dir():
        check_file(path)
    wanted = None if step in (None, "latest") else int(step)
    if path.is_file():
        if wanted is not None:
            raise UserError(f"--step {wanted} needs the folder of a run, but {path} is a file.")
        return path
    own = _STEP.fullmatch(Path(os.path.realpath(path)).name)
    steps = _steps(path)
    if wanted is None and _reader_of(path):
        return path
    if (
        wanted is not None
        and wanted not in steps
        and own
        and int(own.group(1)) == wanted
        and _reader_of(path)
    ):
        return path
    tag = _tag(path) if wanted is None else None
    if tag is not None:
        if not tag.is_dir():
            raise UserError(
                f"{path / 'latest'} names {tag.name}, which is not there; choose a step with "
                "--step."
            )
        chosen = tag
    elif steps:
        number = max(steps) if wanted is None else wanted
        if number not in steps:
            raise UserError(f"{path} has no step {number}; it has {listed(sorted(steps))}.")
        if len(steps[number]) > 1:
            raise UserError(
                f"{path} has several folders of step {number}: "
                f"{listed(p.name for p in steps[number])}; name one of them."
            )
        chosen = steps[number][0]
    else:
        for name in _RUN_FOLDERS:
            if (path / name).is_dir():
                return find_step(path / name, step)
        hint = f" of step {wanted}" if wanted is not None else ""
        raise UserError(
            f"{path} holds no checkpoint{hint}: expected {', '.join(_WEIGHT_FILES)}, DeepSpeed's "
            "*_states.pt, a "
            "torch.distributed.checkpoint folder, or folders of steps."
        )
    if not _reader_of(chosen):
        raise UserError(
            f"{chosen} holds no weights in a known format; choose another step with --step."
        )
    return chosen


def _run_folders(path, start):
    """The step's folder and those above it that belong to the same run, innermost first; at least
    up to `start`."""
    folder = path if path.is_dir() else path.parent
    folders = [folder]
    top = start if start.is_dir() else start.parent
    while folder != folder.parent:
        inside = folder != top and top in folder.parents
        belongs = _STEP.fullmatch(folder.name) or folder.name in (*_RUN_FOLDERS, *_ENGINE_FOLDERS)
        if not inside and not belongs:
            break
        folder = folder.parent
        folders.append(folder)
    return folders


# ------------------------------------------------------------------------------------------------
# names


_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Tables that old model code kept as buffers; they are computed, not learned.
_COMPUTED = re.compile(r"(?:^|\.)(?:freqs_cis|inv_freq|position_ids)$")


def canonical_names(tensors, path):
    """The tensors under the published names of the masked LM, without the prefixes of training
    wrappers.

    Raises:
        UserError: two tensors that come to the same name.
    """
    origins, renamed = {}, {}
    cleaned = {name: _WRAPPERS.sub("", name) for name in tensors}
    names = set(cleaned.values())
    for prefix in ("app.", "model."):
        # A complete state dict below one key, as torch.distributed.checkpoint stores it.
        nested = all(name.startswith(prefix) for name in names) and (
            prefix == "app."
            or any(
                name.startswith(tuple(f"model.{inner}" for inner in ("model.", *HEAD_PREFIXES)))
                for name in names
            )
        )
        if nested and names:
            cleaned = {name: short.removeprefix(prefix) for name, short in cleaned.items()}
            names = set(cleaned.values())
    bare = not any(name.startswith("model.") for name in names)
    doubled = []
    for name, short in cleaned.items():
        if _COMPUTED.search(short):
            continue
        if bare and not short.startswith(HEAD_PREFIXES):
            short = f"model.{short}"
        if short in origins:
            doubled += [origins[short], name]
        origins[short], renamed[short] = name, tensors[name]
    if doubled:
        raise UserError(
            f"{path} holds tensors twice under different names: {listed(dict.fromkeys(doubled))}."
        )
    return renamed


def open_checkpoint(path, step=None):
    """Finds the step, recognises the format, and lists the tensors without reading them.

    Args:
        path: file or folder.
        step: number, "latest" or None.
    Returns:
        Checkpoint
    Raises:
        UserError: nothing readable there; incomplete, truncated, or with an object of an unknown
            class.
    """
    start = Path(path)
    found = find_step(start, step)
    tensors, kind, notes = _reader_of(found)()
    if not tensors:
        raise UserError(f"{found} holds no tensors.")
    if unnamed := [name for name in tensors if not isinstance(name, str)]:
        raise UserError(f"{found} holds a tensor whose name is not text: {unnamed[0]!r:.100}.")
    folders = _run_folders(Path(os.path.abspath(found)), Path(os.path.abspath(start)))
    return Checkpoint(found, kind, canonical_names(tensors, found), folders, notes)
