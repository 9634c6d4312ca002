"""Finds a training checkpoint's step and format, and reads its tensors under their published names.

Reads `state_dict.pt`, DeepSpeed and torch.distributed.checkpoint folders, accelerate's
`save_state`, Trainer's checkpoints, safetensors and Hub folders.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..common.errors import UserError, listed
from ..common.files import check_file, read_text
from .deepspeed import is_deepspeed, read_deepspeed
from .distributed import read_distributed
from .heads import HEAD_PREFIXES
from .weight_files import read_file


@dataclass
class Checkpoint:
    """The tensors of one checkpoint, by the names of NeoBERT's masked LM (`model.encoder.weight`,
    `decoder.weight`, ...).

    Attributes:
        path: the folder or file of this step.
        format: what was recognized, in words.
        folders: where a configuration or tokenizer may be: the checkpoint's folder and those above
            it that belong to the run.
        notes: what the user should know about what was read.
    """

    path: Path
    format: str
    tensors: dict[str, torch.Tensor]
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


def _reader_of(path):
    """(reader, what it reads) of a file or folder with weights, or None."""
    if path.is_file():
        return read_file, path
    for folder in (path, *(path / name for name in _ENGINE_FOLDERS)):
        # Master weights are preferred to what may be beside them.
        if folder.is_dir() and is_deepspeed(folder):
            return read_deepspeed, folder
        if (folder / ".metadata").is_file():
            return read_distributed, folder
    # Trainer with DeepSpeed: checkpoint-10/latest names checkpoint-10/global_step10.
    latest = _tag(path)
    is_step = latest is not None and latest.name.startswith("global_step") and latest.is_dir()
    if is_step and is_deepspeed(latest):
        return read_deepspeed, latest
    files = [path / name for name in _WEIGHT_FILES if (path / name).is_file()]
    return (read_file, files[0]) if files else None


def _tag(folder):
    """The folder that DeepSpeed's file `latest` names, or None without that file."""
    file = folder / "latest"
    if not file.is_file():
        return None
    name = read_text(file).strip()
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise UserError(
            f"{file} should hold the name of a folder beside it, but holds {name[:80]!r}."
        )
    return folder / name


def find_step(path, step=None):
    """The file or folder that holds the weights.

    Args:
        path: a file, a step's folder, or a run's folder.
        step: a step number; None for what the file `latest` names, else the highest number.
    Raises:
        UserError: nothing there, or no such step.
    """
    path = Path(path)
    if not path.is_dir():
        check_file(path)
        if step is not None:
            raise UserError(f"--step {step} needs the folder of a run, but {path} is a file.")
        return path
    steps = {}
    for folder in sorted(path.iterdir()):
        match = _STEP.fullmatch(folder.name)
        if match and folder.is_dir():
            steps.setdefault(int(match[1]), []).append(folder)
    own = _STEP.fullmatch(Path(os.path.realpath(path)).name)
    is_wanted = step is None or (step not in steps and own and int(own[1]) == step)
    if is_wanted and _reader_of(path):
        return path
    tag = _tag(path) if step is None else None
    if tag is None and not steps:
        for name in _RUN_FOLDERS:
            if (path / name).is_dir():
                return find_step(path / name, step)
        raise UserError(
            f"{path} holds no checkpoint: expected {', '.join(_WEIGHT_FILES)}, DeepSpeed's "
            "*_states.pt, a torch.distributed.checkpoint folder, or folders of steps."
        )
    if tag is None:
        number = max(steps) if step is None else step
        if number not in steps:
            raise UserError(f"{path} has no step {number}; it has {listed(sorted(steps))}.")
        if len(steps[number]) > 1:
            raise UserError(
                f"{path} has several folders of step {number}: "
                f"{listed(p.name for p in steps[number])}; name one of them."
            )
        tag = steps[number][0]
    if not tag.is_dir() or not _reader_of(tag):
        raise UserError(
            f"{tag} is not there, or holds no weights in a known format; choose another step with "
            "--step."
        )
    return tag


def _run_folders(path, start):
    """The step's folder and those above it that belong to the same run, innermost first; at least
    up to `start`."""
    folder = path if path.is_dir() else path.parent
    top, folders = start if start.is_dir() else start.parent, []
    for place in (folder, *folder.parents):
        folders.append(place)
        inside = place != top and top in place.parents
        belongs = _STEP.fullmatch(place.name) or place.name in (*_RUN_FOLDERS, *_ENGINE_FOLDERS)
        if not inside and not belongs:
            break
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
    renamed = {}
    cleaned = {name: _WRAPPERS.sub("", name) for name in tensors}
    names = set(cleaned.values())
    inner = tuple(f"model.{prefix}" for prefix in ("model.", *HEAD_PREFIXES))
    for prefix in ("app.", "model."):
        # A complete state dict below one key, as torch.distributed.checkpoint stores it.
        is_nested = all(name.startswith(prefix) for name in names)
        if is_nested and (prefix == "app." or any(name.startswith(inner) for name in names)):
            cleaned = {name: short.removeprefix(prefix) for name, short in cleaned.items()}
            names = set(cleaned.values())
    bare = not any(name.startswith("model.") for name in names)
    for name, short in cleaned.items():
        if _COMPUTED.search(short):
            continue
        if bare and not short.startswith(HEAD_PREFIXES):
            short = f"model.{short}"
        if short in renamed:
            raise UserError(f"{path} holds {short} twice under different names.")
        renamed[short] = tensors[name]
    return renamed


def open_checkpoint(path, step=None):
    """Finds the step, recognizes the format, and reads the tensors; those of torch.save and
    safetensors stay mapped.

    Args:
        path: file or folder.
        step: its number, or None for the latest.
    Returns:
        Checkpoint
    Raises:
        UserError: nothing readable there; incomplete, truncated, or with an object of an unknown
            class.
    """
    place = find_step(path, step)
    reader, source = _reader_of(place)
    tensors, kind, notes = reader(source)
    if not tensors:
        raise UserError(f"{place} holds no tensors.")
    folders = _run_folders(Path(os.path.abspath(place)), Path(os.path.abspath(path)))
    return Checkpoint(place, kind, canonical_names(tensors, place), folders, notes)
