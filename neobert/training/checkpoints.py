"""Checkpoints of transformers' Trainer: resume a run exactly, and stop on SIGTERM.

A resumed run ends with the same bits as a run that was never interrupted.

    with claim(output):          # no other run uses the directory of this `Output`
        train(trainer)           # from the newest readable checkpoint; Stopped on SIGTERM

Checkpoints are written by Trainer. `trainer_state.json` is the last file of a checkpoint:
`RunTrainer` waits until all processes have written their files.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import logging
import math
import re
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import distributed
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..common.constants import WAIT_SECONDS
from ..common.errors import Stopped, UserError, listed, one_line
from ..common.files import difference_from_type
from ..common.output import Output


logger = logging.getLogger("neobert.training")

ValueT = TypeVar("ValueT")

# For mypy, `RunTrainer` is a Trainer. At run time it is a mixin for any of its subclasses.
if TYPE_CHECKING:
    _Trainer = Trainer
else:
    _Trainer = object


# ------------------------------------------------------------------------------------------------
# communication between the processes of a run


@functools.cache
def _gloo_group() -> "distributed.ProcessGroup":
    """Return a group of all processes whose messages do not wait for a GPU."""
    # All processes must create a group together, which takes time, so there is only one.
    return distributed.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_SECONDS))


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def is_main() -> bool:
    """Return whether this is the main process of the run."""
    return not _is_distributed() or distributed.get_rank() == 0


def max_over_processes(value: int) -> int:
    """Return the maximum of an integer over all processes. All of them must call this function."""
    if not _is_distributed():
        return value
    number = torch.tensor(value)
    distributed.all_reduce(number, op=distributed.ReduceOp.MAX, group=_gloo_group())
    return int(number)


def on_main(function: Callable[[], ValueT]) -> ValueT:
    """Call a function in the main process and return its result in all processes.

    Args:
        function: Function whose result can be pickled.

    Raises:
        Exception: The exception of the function, in the main process. The other processes raise
            SystemExit, so one message is printed.
    """
    error: Exception | None = None
    # Result of the function, and whether the function has failed. A list, because
    # broadcast_object_list replaces the items of a list.
    outcome: list[Any] = [None, False]
    if is_main():
        try:
            outcome[0] = function()
        except Exception as exception:
            # Python deletes the name after `as` at the end of the block.
            error = exception
            outcome[1] = True

    # The other processes wait here, and receive an error instead of waiting forever.
    if _is_distributed():
        distributed.broadcast_object_list(outcome, src=0, group=_gloo_group())
    value, has_failed = outcome
    if has_failed:
        raise error or SystemExit(2)
    return value


@contextlib.contextmanager
def claim(output: Output) -> Iterator[None]:
    """Claim an output directory for all processes of a run.

    Raises:
        UserError: If another run uses the directory, or its content does not belong to this run.
    """
    with contextlib.ExitStack() as stack:

        def enter() -> None:
            stack.enter_context(output.claim())

        # The main process holds the lock until the end of the block.
        on_main(enter)
        yield


# ------------------------------------------------------------------------------------------------
# checkpoint files


_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"


class _CallbackStates(TypedDict):
    TrainerControl: dict[str, Any]


class _StateContent(TypedDict):
    """Keys of trainer_state.json without which Trainer cannot resume."""

    global_step: int
    max_steps: int
    train_batch_size: int
    best_metric: float | None
    log_history: list[dict[str, Any]]
    stateful_callbacks: _CallbackStates


def checkpoint_folder(args: TrainingArguments) -> Path:
    """Return the directory that a Trainer writes its checkpoints to."""
    if args.output_dir is None:
        raise ValueError("`output_dir` must be set.")
    return Path(args.output_dir)


def checkpoints(folder: Path | str) -> dict[int, Path]:
    """Return the checkpoints of a run in the order of their steps, {step: directory}."""
    paths = {}
    for path in Path(folder).glob("*/"):
        match = _CHECKPOINT.fullmatch(path.name)
        if match:
            paths[int(match[1])] = path
    return dict(sorted(paths.items()))


def check_checkpoint(checkpoint: Path) -> None:
    """Check that a checkpoint is complete and readable.

    Raises:
        OSError: If a file is missing or cannot be read.
        ValueError: If a file is damaged or truncated.
    """
    # The state of Trainer, and the read positions of a stream.
    for path in {checkpoint / _STATE, *checkpoint.glob("*.json")}:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path.name}: {one_line(error, 80)}") from None
        difference = _state_difference(content) if path.name == _STATE else None
        if difference:
            raise ValueError(f"{path.name}: {difference}")

    for path in checkpoint.rglob("*.safetensors"):
        try:
            # The header contains the size of the file, which is compared when the file is opened.
            safe_open(path, "pt")
        except SafetensorError as error:
            raise ValueError(f"{path.name}: {one_line(error, 80)}") from None

    # PyTorch writes ZIP archives, whose directory is at the end of the file.
    for path in (*checkpoint.rglob("*.pt"), *checkpoint.rglob("*.pth")):
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path.name} is truncated")

    # FSDP and DeepSpeed have other files of weights than Trainer.
    weights = ("*.safetensors", "pytorch_model*", "global_step*")
    if not any(any(checkpoint.rglob(pattern)) for pattern in weights):
        raise ValueError("the weights are missing")
    # DeepSpeed writes the state of the optimizer to a directory global_step*.
    if not any(checkpoint.glob("optimizer*")) and not any(checkpoint.glob("global_step*")):
        raise ValueError("the state of the optimizer is missing")


def _state_difference(content: Any) -> str | None:
    """Return why Trainer cannot resume from the content of trainer_state.json, or None."""
    difference = difference_from_type(content, _StateContent)
    if difference is None:
        known = {item.name for item in dataclasses.fields(TrainerState)}
        unknown = [name for name in content if name not in known]
        # A later version of transformers may write further keys.
        if unknown:
            difference = f"this version of transformers has no key {unknown[0]!r}"
    return difference


def _has_state(checkpoint: Path) -> bool:
    """Return whether the last file of a checkpoint was written, so the others were, too."""
    try:
        json.loads((checkpoint / _STATE).read_text())
    except (OSError, ValueError):
        return False
    return True


def _damage(checkpoint: Path) -> str | None:
    """Return why a checkpoint is not readable, or None if it is readable.

    Raises:
        OSError: If the checkpoint cannot be read now.
    """
    try:
        check_checkpoint(checkpoint)
    # Other errors of the system, such as those of a network file system, may not occur again.
    except (FileNotFoundError, ValueError) as error:
        return one_line(error, 120)
    return None


def newest_checkpoint(folder: Path | str) -> tuple[int, Path] | None:
    """Return the newest readable checkpoint and its step, or None.

    One warning names newer checkpoints that are damaged.

    Raises:
        OSError: If a checkpoint cannot be read now.
    """
    # A process that is killed while it writes leaves an incomplete checkpoint behind.
    damaged = []
    newest: tuple[int, Path] | None = None
    for step, path in reversed(checkpoints(folder).items()):
        damage = _damage(path)
        if damage is None:
            newest = (step, path)
            break
        damaged.append(f"{path.name} ({damage})")

    if damaged:
        logger.warning(
            "%s: cannot read %s. %s",
            folder,
            ", ".join(damaged),
            f"Resuming from {newest[1].name}." if newest else "There is no other checkpoint.",
        )
    return newest


def _step_to_resume(folder: Path | str) -> int | None:
    """Return the step of the newest readable checkpoint, or None, and remove later checkpoints.

    The run writes later checkpoints again.

    Raises:
        UserError: If no checkpoint is readable, although one was written completely.
    """
    newest = newest_checkpoint(folder)
    step = newest[0] if newest else None
    # Without a readable checkpoint all of them would be removed. Only those that a killed process
    # has left behind may be.
    complete = [path for path in checkpoints(folder).values() if _has_state(path)]
    if newest is None and complete:
        damaged = listed(f"{path.name} ({_damage(path)})" for path in complete)
        raise UserError(
            f"at least one checkpoint of {folder} must be readable, got {damaged}. Restore their "
            "files, or remove the checkpoints to start from the beginning."
        )
    for later, path in checkpoints(folder).items():
        if step is None or later > step:
            shutil.rmtree(path)
    return step


def remove_old(
    folder: Path | str, limit: int | None, keep_every: int = 0, best: int | None = None
) -> None:
    """Remove old checkpoints.

    Args:
        folder: Directory of the checkpoints.
        limit: Number of newest checkpoints to keep. None, 0 and negative numbers keep all, as in
            Trainer.
        keep_every: Number of steps between two checkpoints that are kept; 0 for none.
        best: Step of the best checkpoint, which is kept.
    """
    # Steps are in ascending order, so the last ones are the newest.
    saved = checkpoints(folder)
    for step in list(saved)[:-limit] if limit and limit > 0 else []:
        is_kept = bool(keep_every) and step % keep_every == 0
        if not is_kept and step != best:
            shutil.rmtree(saved[step])


def remove_checkpoints(folder: Path | str) -> None:
    """Remove the checkpoints of a finished run. TensorBoard logs are moved to `runs` next to it."""
    folder = Path(folder)
    # Trainer writes TensorBoard logs into the directory of the checkpoints.
    for log in sorted(folder.glob("runs/*")):
        target = folder.parent / "runs" / log.name
        target.parent.mkdir(exist_ok=True)
        log.rename(target)
    shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------
# training


class RunTrainer(_Trainer):
    """Trainer mixin that writes complete checkpoints, and stops if the training diverges.

    Every log record with a loss gets `seconds` and `cpu_seconds` of the training so far, including
    the time before interruptions. Trainer's last record (`train_loss`, `train_runtime`, ...) is not
    logged, because its values cover the steps since the last resume only.
    """

    # Whether the final files can be written if every process has only a part of the weights.
    saves_sharded_weights = False
    _last_clock: tuple[float, float] | None = None

    def on_resume(self, checkpoint: Path) -> None:
        """Prepare to resume from a checkpoint. Called before training, in all processes."""

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # trainer_state.json comes next: by then every process has written its files.
        self.accelerator.wait_for_everyone()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log a record with the training time.

        Raises:
            UserError: If the loss is not finite.
        """
        if "train_runtime" in logs:
            return

        if "loss" in logs:
            if not math.isfinite(logs["loss"]):
                raise self.diverged(f"the loss at step {self.state.global_step} is not finite")
            logs.update(self._clock())
        super().log(logs, *args, **kwargs)

    def _clock(self) -> dict[str, float]:
        """Return the training time so far, and restart the clock."""
        now = (time.perf_counter(), time.process_time())
        since = self._last_clock or now
        self._last_clock = now
        previous = training_time(self)
        return {
            "seconds": round(previous["seconds"] + now[0] - since[0], 2),
            "cpu_seconds": round(previous["cpu_seconds"] + now[1] - since[1], 2),
        }

    def diverged(self, reason: str) -> UserError:
        """Return the error for a run with values that are not finite."""
        return UserError(
            f"the run has diverged: {reason}. Start again in another output directory with a "
            f"learning_rate below {self.args.learning_rate:g}."
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as Trainer does.

        Raises:
            UserError: If a weight is not finite.
        """
        # Under FSDP and ZeRO-3 a process checks its own shard of the weights.
        parameters = self.model.parameters() if self.model is not None else ()
        for parameter in parameters:
            weight = getattr(parameter, "to_local", parameter.detach)()
            if not torch.isfinite(weight).all():
                raise self.diverged(
                    f"the weights after step {self.state.global_step} are not finite"
                )
        super().save_model(output_dir, _internal_call)


def training_time(trainer: Trainer) -> dict[str, float]:
    """Return the training time so far, "seconds" and "cpu_seconds", from the newest log record."""
    for record in reversed(trainer.state.log_history):
        if "cpu_seconds" in record:
            return {name: record.get(name, 0.0) for name in ("seconds", "cpu_seconds")}
    return {"seconds": 0.0, "cpu_seconds": 0.0}


class _AlreadyTrained(Exception):
    """Raised if a run resumes after its last step or after early stopping.

    Trainer would train further steps.
    """


class _RunCallback(TrainerCallback):
    """Callback that saves and stops on SIGTERM, and removes old checkpoints.

    Old checkpoints are removed after all processes have written the new one.
    """

    def __init__(self, limit: int | None, keep_every: int) -> None:
        self.limit = limit
        self.keep_every = keep_every
        self.received_signal = False
        self.stopped = False
        self.previous_handler: Any = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        step = getattr(state, "best_global_step", None)
        best = checkpoint_folder(args) / f"checkpoint-{step}"
        if best.is_dir():
            # The path in the state is outdated if the directory was moved.
            state.best_model_checkpoint = str(best)
        # A previous process may have been killed before it removed old checkpoints.
        self.on_save(args, state, control)
        if 0 < state.max_steps <= state.global_step or _has_stopped_early(state):
            raise _AlreadyTrained

        # The handler of Trainer's enable_jit_checkpoint would end the training as if the run were
        # finished, so it is replaced. Python sets signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self.previous_handler = signal.signal(signal.SIGTERM, self.handle_signal)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        # Processes receive the signal at different times, but must stop after the same step.
        if max_over_processes(int(self.received_signal)):
            # With save_strategy "best" an evaluation at this step decides whether it is saved;
            # otherwise the run resumes from an older one.
            control.should_log = True
            control.should_save = True
            control.should_training_stop = True
            self.stopped = True

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        # After a stop inside an epoch, Trainer evaluates and saves as at the end of the epoch. An
        # uninterrupted run has no evaluation at this step.
        is_complete = float(state.epoch or 0).is_integer() or state.global_step >= state.max_steps
        if self.stopped and not is_complete:
            control.should_log = False
            control.should_evaluate = False
            control.should_save = False

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        args.distributed_state.wait_for_everyone()
        if args.should_save:
            best = getattr(state, "best_global_step", None)
            remove_old(checkpoint_folder(args), self.limit, self.keep_every, best)

    def handle_signal(self, *_: Any) -> None:
        """Record that SIGTERM was received; the run stops at the end of the step."""
        self.received_signal = True


def _has_stopped_early(state: TrainerState) -> bool:
    """Return whether `EarlyStoppingCallback` has ended a run.

    A checkpoint contains the counter of the callback, but not that the training has stopped.
    """
    # Before the first step, this is a list of callbacks without a state.
    callbacks: Any = state.stateful_callbacks
    early_stopping = callbacks.get("EarlyStoppingCallback") if isinstance(callbacks, dict) else None
    if not isinstance(early_stopping, dict):
        return False
    counter: int = early_stopping["attributes"]["early_stopping_patience_counter"]
    patience: int = early_stopping["args"]["early_stopping_patience"]
    return counter >= patience


def keep_freed_memory() -> None:
    """Let malloc keep freed memory for the next tensors of this process.

    By default glibc returns large blocks to the system, which must clear each page when it is used
    again. In training on the CPU, where a step frees the activations of the backward pass, this
    took an eighth of the time. Other C libraries are not changed.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        # M_MMAP_MAX is -4: large blocks come from the heap, and not from mappings of their own.
        mallopt(-4, 0)
        # M_TRIM_THRESHOLD is -1: the top of the heap is never returned to the system.
        mallopt(-1, -1)


def train(trainer: RunTrainer, keep_every: int = 0) -> None:
    """Train from the newest readable checkpoint in the trainer's output directory.

    All processes of the run must call this function.

    Args:
        trainer: Trainer of the run.
        keep_every: Number of steps between two checkpoints that are kept beside the newest
            `save_total_limit`; 0 for none.

    Raises:
        Stopped: If SIGTERM was received. The caller must not write its result.
        UserError: If the run has diverged, or the checkpoint does not exist on every machine.
    """
    args = trainer.args
    output_dir = checkpoint_folder(args)
    # One process selects the checkpoint, so all of them resume from the same step.
    step = on_main(lambda: _step_to_resume(output_dir))
    checkpoint = None if step is None else output_dir / f"checkpoint-{step}"
    if checkpoint is not None and not checkpoint.is_dir():
        raise UserError(
            f"{checkpoint} is on the machine of the run's main process, but not on this one. "
            "Choose an output directory that all machines share."
        )
    if args.device.type == "cpu":
        keep_freed_memory()
    if checkpoint is not None:
        trainer.on_resume(checkpoint)

    # Trainer itself would remove old checkpoints before all processes have written the new one.
    callback = _RunCallback(args.save_total_limit, keep_every)
    args.save_total_limit = None
    trainer.add_callback(callback)
    trainer._last_clock = (time.perf_counter(), time.process_time())
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except _AlreadyTrained:
        _finish_training(trainer)
    finally:
        # A callback of Trainer may have restored its own handler.
        if signal.getsignal(signal.SIGTERM) == callback.handle_signal:
            signal.signal(signal.SIGTERM, callback.previous_handler)
        trainer.remove_callback(callback)
        args.save_total_limit = callback.limit

    if callback.stopped:
        state = trainer.state
        message = (
            f"stopped by SIGTERM after step {state.global_step:,} of {state.max_steps:,}. Run the "
            "same command again to resume from the last checkpoint."
        )
        raise Stopped(message if is_main() else "")


def _finish_training(trainer: RunTrainer) -> None:
    """Finish a run that was interrupted after its last step, as Trainer finishes its training."""
    trainer.is_in_train = False
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    trainer.control = trainer.callback_handler.on_train_end(
        trainer.args, trainer.state, trainer.control
    )
