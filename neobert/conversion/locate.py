"""Reader of training checkpoints: location, format, and the published names of the tensors.

Reads `state_dict.pt`, DeepSpeed and torch.distributed.checkpoint directories, accelerate's
`save_state`, Trainer's checkpoints, safetensors and Hub folders.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..common.errors import UserError, listed
from ..common.files import check_file, read_text
from .deepspeed import is_deepspeed, read_deepspeed
from .distributed import read_distributed
from .heads import HEAD_PREFIXES
from .weight_files import Weights, read_file


@dataclass
class Checkpoint:
    """Tensors of one checkpoint, by the names of the masked language model.

    Attributes:
        path: Directory or file of the step.
        format: Format of the checkpoint, in words.
        tensors: Tensors by published name (`model.encoder.weight`, `decoder.weight`, ...).
        folders: Directories that may contain a configuration or a tokenizer: that of the step, and
            those above it that belong to the run.
        notes: Sentences for the user about how the checkpoint was read.
    """

    path: Path
    format: str
    tensors: dict[str, torch.Tensor]
    folders: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def open_checkpoint(path: str | Path, step: int | None = None) -> Checkpoint:
    """Find the step, recognize the format and read the tensors.

    Tensors of torch.save and safetensors stay memory-mapped.

    Args:
        path: File, directory of a step, or directory of a run.
        step: Step of a run, or None for the latest.

    Raises:
        UserError: If there is no checkpoint, or the checkpoint is incomplete or damaged, or
            contains an object of a class that is not allowed.
    """
    step_path = find_step(path, step)
    reader = _find_reader(step_path)
    weights = reader.read() if reader else None
    if weights is None or not weights.tensors:
        raise UserError(f"{step_path} must contain tensors, got none.")

    # The configuration is beside the path that the user has passed, or where a link leads to.
    folders = _run_folders(Path(os.path.abspath(step_path)), Path(os.path.abspath(path)))
    targets = _run_folders(Path(os.path.realpath(step_path)), Path(os.path.realpath(path)))
    folders += [folder for folder in targets if folder not in folders]
    tensors = canonical_names(weights.tensors, step_path)
    return Checkpoint(step_path, weights.format, tensors, folders, weights.notes)


# ------------------------------------------------------------------------------------------------
# Format and step


# Directory of a step: 1000, step_1000, global_step1000, checkpoint-1000, ... More than 18 digits
# are not a number of steps.
_STEP = re.compile(r"(?:(?:checkpoint|step|global_step|epoch|iter)[_-]?)?([0-9]{1,18})")
# Directories of a run that contain those of the steps.
_RUN_FOLDERS = ("model_checkpoints", "checkpoints")
# Files of weights in order of preference.
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model_fsdp.bin",
    "state_dict.pt",
)
# accelerate's save_state writes the directory of the engine into that of the step.
_ENGINE_FOLDERS = ("pytorch_model", "pytorch_model_fsdp_0")


@dataclass(frozen=True)
class _Reader:
    """Reader of a format, and the file or directory to read."""

    function: Callable[[Path], Weights]
    path: Path

    def read(self) -> Weights:
        """Read the weights."""
        return self.function(self.path)


def _find_reader(path: Path) -> _Reader | None:
    """Return the reader of a file or directory with weights, or None if there are no weights."""
    if path.is_file():
        return _Reader(read_file, path)

    # Master weights take precedence over the weight files beside them.
    for folder in (path, *(path / name for name in _ENGINE_FOLDERS)):
        if folder.is_dir() and is_deepspeed(folder):
            return _Reader(read_deepspeed, folder)
        if (folder / ".metadata").is_file():
            return _Reader(read_distributed, folder)

    # Trainer with DeepSpeed: checkpoint-10/latest names checkpoint-10/global_step10.
    latest = _read_latest(path)
    is_step = latest is not None and latest.name.startswith("global_step") and latest.is_dir()
    if latest is not None and is_step and is_deepspeed(latest):
        return _Reader(read_deepspeed, latest)

    for name in _WEIGHT_FILES:
        if (path / name).is_file():
            return _Reader(read_file, path / name)
    return None


def _read_latest(folder: Path) -> Path | None:
    """Return the directory that the file or link `latest` names, or None if there is neither.

    DeepSpeed writes a file. A link must lead to a directory beside it.

    Raises:
        UserError: If the file contains anything but a name.
    """
    file = folder / "latest"
    if file.is_symlink() and file.is_dir():
        target = Path(os.path.realpath(file))
        return folder / target.name if target.parent == Path(os.path.realpath(folder)) else None
    if not file.is_file():
        return None
    # The file may be untrusted, and must not name a path outside its directory.
    name = read_text(file).strip()
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise UserError(
            f"{file} must contain the name of a directory beside it, got {name[:80]!r}."
        )
    return folder / name


def find_step(path: str | Path, step: int | None = None) -> Path:
    """Return the file or directory that contains the weights.

    Args:
        path: File, directory of a step, or directory of a run.
        step: Step of a run. By default the step that `latest` names, else the highest.

    Raises:
        UserError: If there is no checkpoint, or not this step.
    """
    path = Path(path)
    if not path.is_dir():
        check_file(path)
        if step is not None:
            raise UserError(
                f"CHECKPOINT must be the directory of a run with `--step {step}`, got the file "
                f"{path}."
            )
        return path

    # Several names may have one number: step_1000 and checkpoint-1000.
    steps: dict[int, list[Path]] = {}
    for folder in sorted(path.iterdir()):
        match = _STEP.fullmatch(folder.name)
        if match and folder.is_dir():
            steps.setdefault(int(match[1]), []).append(folder)

    # The directory may be that of the step itself.
    path_step = _STEP.fullmatch(Path(os.path.realpath(path)).name)
    is_step = step not in steps and path_step is not None and int(path_step[1]) == step
    if (step is None or is_step) and _find_reader(path):
        return path

    # The highest step is not always the latest: a run may have been resumed from an earlier step.
    latest = _read_latest(path) if step is None else None
    if latest is None and not steps:
        for name in _RUN_FOLDERS:
            if (path / name).is_dir():
                return find_step(path / name, step)
        raise UserError(
            f"{path} must contain a checkpoint: {', '.join(_WEIGHT_FILES)}, DeepSpeed's "
            "*_states.pt, a torch.distributed.checkpoint directory, or directories of steps."
        )
    step_path = latest or _choose_step(path, steps, step)
    if not step_path.is_dir() or not _find_reader(step_path):
        raise UserError(
            f"{step_path} must be a directory with weights in a known format. Choose another step "
            "with `--step`."
        )
    return step_path


def _choose_step(path: Path, steps: Mapping[int, list[Path]], step: int | None) -> Path:
    """Return the directory of a step, by default of the highest one.

    Raises:
        UserError: If there is no directory of this step, or several.
    """
    number = max(steps) if step is None else step
    if number not in steps:
        raise UserError(f"`--step` must be one of {listed(sorted(steps))} in {path}, got {number}.")
    if len(steps[number]) > 1:
        names = listed(folder.name for folder in steps[number])
        raise UserError(
            f"{path} must have one directory of step {number}, got {names}. Pass one of them as "
            "CHECKPOINT."
        )
    return steps[number][0]


def _run_folders(path: Path, start: Path) -> list[Path]:
    """Return the directory of the step, and those above it that belong to the same run.

    Args:
        path: Absolute path of the step.
        start: Absolute path of CHECKPOINT, up to which all directories belong to the run.
    """
    top = start if start.is_dir() else start.parent
    step_folder = path if path.is_dir() else path.parent

    # Above CHECKPOINT, only directories with usual names belong to the run. A common parent
    # directory may contain the configuration of another run.
    folders = []
    for folder in (step_folder, *step_folder.parents):
        folders.append(folder)
        is_inside = folder != top and top in folder.parents
        is_usual = _STEP.fullmatch(folder.name) or folder.name in (*_RUN_FOLDERS, *_ENGINE_FOLDERS)
        if not is_inside and not is_usual:
            break
    return folders


# ------------------------------------------------------------------------------------------------
# Names


# Prefixes that DDP, DeepSpeed, torch.compile, FSDP and activation checkpointing add at any depth.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Tables that old model code stored as buffers. They are computed, not learned.
_COMPUTED = re.compile(r"(?:^|\.)(?:freqs_cis|inv_freq|position_ids)$")


def canonical_names(tensors: Mapping[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors under the published names of the masked language model.

    The prefixes of DDP, torch.compile and FSDP are removed.

    Args:
        tensors: Tensors by their names in the checkpoint.
        path: Path of the checkpoint, for messages.

    Raises:
        UserError: If two tensors have the same name without prefixes.
    """
    new_names = {name: _WRAPPERS.sub("", name) for name in tensors}
    distinct = set(new_names.values())

    # torch.distributed.checkpoint stores a complete state dict below one key.
    # There, `model.` is such a key only if it occurs twice: it is also the name of the backbone.
    nested_prefixes = tuple(f"model.{prefix}" for prefix in ("model.", *HEAD_PREFIXES))
    for prefix in ("app.", "model."):
        is_nested = all(name.startswith(prefix) for name in distinct)
        if prefix == "model.":
            is_nested = is_nested and any(name.startswith(nested_prefixes) for name in distinct)
        if is_nested:
            new_names = {name: new.removeprefix(prefix) for name, new in new_names.items()}
            distinct = set(new_names.values())

    # The names of a backbone without a head have no `model.`.
    is_backbone = not any(name.startswith("model.") for name in distinct)
    renamed: dict[str, torch.Tensor] = {}
    for name, new_name in new_names.items():
        if _COMPUTED.search(new_name):
            continue
        if is_backbone and not new_name.startswith(HEAD_PREFIXES):
            new_name = f"model.{new_name}"
        if new_name in renamed:
            raise UserError(f"{path} contains {new_name} twice under different names.")
        renamed[new_name] = tensors[name]
    return renamed
