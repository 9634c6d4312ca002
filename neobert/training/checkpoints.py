"""Runs of a transformers Trainer that go on after any interruption, with the bits of a run that was
never interrupted.

    with claim(output):          # an `Output`: no second run works in its folder
        train(trainer)           # from the newest checkpoint that can be read; Stopped on SIGTERM

Checkpoints are Trainer's own. `trainer_state.json` is the last file of each: `RunTrainer` sees to
it that by then all processes have written theirs.
"""

import contextlib
import ctypes
import functools
import json
import math
import re
import shutil
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import distributed
from transformers import TrainerCallback

from ..common.errors import Stopped, UserError, one_line
from ..common.output import Output


ValueT = TypeVar("ValueT")


# ------------------------------------------------------------------------------------------------
# agreement between the processes of a run


@functools.cache
def _gloo_group() -> "distributed.ProcessGroup":
    """Return a group of all processes whose messages do not wait for a GPU."""
    return distributed.new_group(backend="gloo")


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def is_main() -> bool:
    """Return whether this is the main process of the run."""
    return not _is_distributed() or distributed.get_rank() == 0


def highest(value: int) -> int:
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
            SystemExit, so that one message is printed.
    """
    error: Exception | None = None
    outcome: list[Any] = [None, False]
    if is_main():
        try:
            outcome[0] = function()
        except Exception as caught:
            error = caught
            outcome[1] = True

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

        on_main(enter)
        yield


# ------------------------------------------------------------------------------------------------
# checkpoints on the disk


_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"


def checkpoints(folder):
    """{step: folder} of a run's checkpoints in order."""
    matches = ((_CHECKPOINT.fullmatch(path.name), path) for path in Path(folder).glob("*/"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def check_checkpoint(checkpoint):
    """Raises OSError or ValueError for a checkpoint that was not written to its end, or cannot be
    read."""
    json.loads((checkpoint / _STATE).read_text())
    for path in checkpoint.rglob("*.safetensors"):
        try:
            safe_open(path, "pt")  # its header tells the size of the file
        except SafetensorError as error:
            raise ValueError(f"{path.name}: {one_line(error, 80)}") from None
    for path in (*checkpoint.rglob("*.pt"), *checkpoint.rglob("*.pth")):
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path.name} is cut off")
    if not any(checkpoint.glob("optimizer*")) and not any(checkpoint.glob("global_step*")):
        raise ValueError("it has no state of the optimizer")


def newest_checkpoint(folder):
    """(step, folder) of the newest checkpoint that can be read, or None; one line on stderr names
    those that cannot."""
    damaged = []
    newest = None
    for step, path in reversed(checkpoints(folder).items()):
        try:
            check_checkpoint(path)
            newest = step, path
            break
        except (OSError, ValueError) as error:
            damaged.append(f"{path.name} ({one_line(error, 80)})")
    if damaged:
        start = f"going on from {newest[1].name}" if newest else "there is no other"
        print(f"{folder}: cannot be read: {', '.join(damaged)}; {start}", file=sys.stderr)
    return newest


def _step_to_continue(folder):
    """Step of the newest checkpoint that can be read, or None. Those after it, which the run makes
    again, are removed."""
    newest = newest_checkpoint(folder)
    step = newest[0] if newest else None
    for later, path in checkpoints(folder).items():
        if step is None or later > step:
            shutil.rmtree(path)
    return step


def remove_old(folder, limit, keep_every=0, best=None):
    """Keeps the newest `limit` checkpoints (all if None), every `keep_every`-th step's and the best
    one; removes the others."""
    saved = checkpoints(folder)
    for step in list(saved)[:-limit] if limit else []:
        if not (keep_every and step % keep_every == 0) and step != best:
            shutil.rmtree(saved[step])


def remove_checkpoints(folder: Path | str) -> None:
    """Remove the checkpoint folder of a finished run, and keep its TensorBoard logs in `runs` next
    to it."""
    folder = Path(folder)
    for log in sorted(folder.glob("runs/*")):
        target = folder.parent / "runs" / log.name
        target.parent.mkdir(exist_ok=True)
        log.rename(target)
    shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------
# training


class RunTrainer:
    """Mixin for Trainers: complete checkpoints, time that goes on counting, and a run that has
    diverged ends.

    Every record with a loss gets `seconds` and `cpu_seconds` of the training so far, those before
    an interruption among them. Trainer's last record (`train_loss`, `train_runtime`, ...) is not
    logged, because its values cover the steps since the last resume only.
    """

    _last_clock = None

    def on_resume(self, checkpoint: Path) -> None:
        """Prepare to resume from a checkpoint. Called before training, in all processes."""

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # trainer_state.json comes next: by then every process has written its files.
        self.accelerator.wait_for_everyone()

    def log(self, logs, *args, **kwargs):
        if "train_runtime" in logs:
            return

        if "loss" in logs:
            if not math.isfinite(logs["loss"]):
                raise self.diverged(f"the loss at step {self.state.global_step} is not finite")
            logs.update(self._clock())
        super().log(logs, *args, **kwargs)

    def _clock(self):
        now = (time.perf_counter(), time.process_time())
        since = self._last_clock or now
        self._last_clock = now
        previous = spent(self)
        return {
            "seconds": round(previous["seconds"] + now[0] - since[0], 2),
            "cpu_seconds": round(previous["cpu_seconds"] + now[1] - since[1], 2),
        }

    def diverged(self, what):
        """The UserError of a run whose numbers are no longer finite."""
        return UserError(
            f"the run has diverged: {what}; start again in another output with a learning_rate "
            f"below {self.args.learning_rate:g}"
        )

    def save_model(self, output_dir=None, _internal_call=False):
        # A process of FSDP or ZeRO-3 looks at its own part of the weights.
        weights = (
            getattr(parameter, "to_local", parameter.detach)()
            for parameter in self.model.parameters()
        )
        if not all(torch.isfinite(weight).all() for weight in weights):
            raise self.diverged(f"the weights after step {self.state.global_step} are not finite")
        super().save_model(output_dir, _internal_call)


def spent(trainer):
    """{"seconds", "cpu_seconds"} of the training so far, as the newest record of the log says."""
    records = (record for record in reversed(trainer.state.log_history) if "cpu_seconds" in record)
    newest = next(records, {})
    return {name: newest.get(name, 0.0) for name in ("seconds", "cpu_seconds")}


class _NothingLeft(Exception):
    """The checkpoint that the training goes on from is that of its last step; Trainer would train
    one more."""


class _Run(TrainerCallback):
    """Saves and stops on SIGTERM; removes old checkpoints when all processes have written the new
    one."""

    def __init__(self, limit, keep_every):
        self.limit, self.keep_every = limit, keep_every
        self.signalled = self.stopped = False

    def on_train_begin(self, args, state, control, **kwargs):
        best = Path(args.output_dir) / f"checkpoint-{getattr(state, 'best_global_step', None)}"
        if best.is_dir():  # the state has the path as it was then: the folder may have been moved
            state.best_model_checkpoint = str(best)
        self.on_save(args, state, control)  # a run may have been killed before it removed old ones
        if 0 < state.max_steps <= state.global_step:
            raise _NothingLeft
        # Here, as Trainer's enable_jit_checkpoint has set a handler of its own by now, which would
        # end the training without telling the command that it is not finished.
        if threading.current_thread() is threading.main_thread():
            self.handler = signal.signal(signal.SIGTERM, self.note)

    def on_step_end(self, args, state, control, **kwargs):
        if highest(int(self.signalled)):
            # With save_strategy "best" an evaluation at this step decides anew whether it is saved;
            # else the run goes on from an older one.
            control.should_log = control.should_save = True
            control.should_training_stop = self.stopped = True

    def on_save(self, args, state, control, **kwargs):
        args.distributed_state.wait_for_everyone()
        if args.should_save:
            best = getattr(state, "best_global_step", None)
            remove_old(args.output_dir, self.limit, self.keep_every, best)

    def note(self, *_):
        """The handler of SIGTERM."""
        self.signalled = True


def keep_freed_memory():
    """From here on malloc keeps what this process frees, for its next tensors.

    By default glibc gives large blocks back to the system, which must clear each page when it is
    used again: in training on the CPU, where a step frees all that it kept for the backward pass,
    this took an eighth of the time. Nothing happens with another C library.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped by itself
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the top of the heap stays


def train(trainer, keep_every=0, on_resume=None):
    """`trainer.train()` from the newest checkpoint in its output folder on.

    Args:
        trainer: a `RunTrainer`; all processes of the run must call this.
        keep_every: every so many steps a checkpoint is kept for good, beside the newest
            `save_total_limit`; 0: none.
        on_resume: called with the checkpoint that is continued from, if there is one.
    Raises:
        Stopped: SIGTERM came. The caller must not write its result then.
        UserError: the run has diverged; a process does not find the checkpoint.
    """
    args = trainer.args
    step = on_main(lambda: _step_to_continue(args.output_dir))
    checkpoint = None if step is None else Path(args.output_dir) / f"checkpoint-{step}"
    if checkpoint is not None and not checkpoint.is_dir():
        raise UserError(
            f"{checkpoint} is on the machine of the run's first process, but not on this one; give "
            "a folder that all machines share"
        )
    if args.device.type == "cpu":
        keep_freed_memory()
    if checkpoint is not None:
        (on_resume or trainer.on_resume)(checkpoint)
    # Trainer itself would remove old checkpoints before all processes have written the new one.
    run = _Run(args.save_total_limit, keep_every)
    args.save_total_limit = None
    trainer.add_callback(run)
    trainer._last_clock = (time.perf_counter(), time.process_time())
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    except _NothingLeft:
        _end(trainer)
    finally:
        if signal.getsignal(signal.SIGTERM) == run.note:  # that callback may have put back its own
            signal.signal(signal.SIGTERM, run.handler)
        trainer.remove_callback(run)
        args.save_total_limit = run.limit
    if run.stopped:
        state = trainer.state
        sentence = (
            f"stopped by SIGTERM after step {state.global_step:,} of {state.max_steps:,}; the same "
            "command goes on from the last checkpoint"
        )
        raise Stopped(sentence if is_main() else "")


def _end(trainer):
    """What Trainer does after its last step, for a run whose last step was taken before."""
    trainer.is_in_train = False
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    trainer.control = trainer.callback_handler.on_train_end(
        trainer.args, trainer.state, trainer.control
    )
