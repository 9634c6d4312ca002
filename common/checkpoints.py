"""Checkpoints of a Trainer's run that lose nothing: complete or not used, verified before they are
continued from, saved on SIGTERM.

For every transformers Trainer:
    with claim(run):                           # no second run writes here
        train(trainer, keep_every=0)           # goes on from the newest complete checkpoint;
        Stopped after SIGTERM
"""

import contextlib
import functools
import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import torch
from torch import distributed
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy, TrainOutput

from .checkpoint_files import (
    CHECKPOINT,
    MANIFEST,
    complete,
    forget,
    newest_complete,
    read_manifest,
    remove_checkpoint,
    remove_checkpoints,
    set_aside,
    write_manifest,
)
from .errors import Stopped, UserError, is_disk_full, one_line
from .files import write_json
from .memory import keep_freed_memory


# --------------------------------------------------------------------------------------------
# the processes of a run agree on


@functools.cache
def _integers():
    """A group over all processes whose messages wait for no GPU."""
    return distributed.new_group(backend="gloo")


def _distributed():
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def is_main():
    """Whether this is the run's first process."""
    return not _distributed() or distributed.get_rank() == 0


def highest(value):
    """The largest of an integer over all processes; all of them must call it."""
    if not _distributed():
        return value
    number = torch.tensor(value)
    distributed.all_reduce(number, op=distributed.ReduceOp.MAX, group=_integers())
    return int(number)


@contextlib.contextmanager
def lock_run(owner):
    """Enters `owner`, a `Run`'s claim for example, in the run's first process; the others go on
    when it has.

    Raises:
        UserError: another run has the folder; in the run's other processes SystemExit, so that one
            sentence is printed.
    """
    error = None
    with contextlib.ExitStack() as stack:
        if is_main():
            try:
                stack.enter_context(owner)
            except (UserError, OSError) as refused:
                error = refused
        if highest(int(error is not None)):
            raise error or SystemExit(2)
        yield


@contextlib.contextmanager
def claim(run, overwrite=False, folder=None):
    """The claim of a `Run` for all of its processes. A new one begins without the checkpoints in
    `folder`, of the run that it replaces."""
    with lock_run(run.claim(overwrite, begin=False)):
        if is_main() and run.state == "new":
            if folder is not None:
                remove_checkpoints(folder)
            run.begin()
        if highest(int(run.state == "finished")):
            run.state = "finished"
        yield


def _begin(trainer):
    """Marks the checkpoint that is going to be written as this run's.

    Raises:
        UserError: there is a folder of its name that the run did not make.
    """
    path = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    if is_main():
        if os.path.lexists(path) and (
            path.is_symlink() or read_manifest(path, complete=False) is None
        ):
            raise UserError(
                f"{path} was not made by this run; move it, and give the same command again"
            )
        write_json(path / MANIFEST, {"step": trainer.state.global_step})
    highest(0)  # the others write after that


# ------------------------------------------------------------------------------------------------
# training


class _NothingLeft(Exception):
    """The checkpoint that the training goes on from is that of its last step; Trainer would train
    one more."""


class Checkpoints(TrainerCallback):
    """Completes every checkpoint with a manifest, and only then removes old ones; saves and stops
    on SIGTERM.

    `save_total_limit` is Trainer's own and counts complete checkpoints; Trainer itself, which
    removes old ones before all processes have written the new one, does not see it. If the disk is
    nearly full, all checkpoints but the newest are deleted before the next is saved.

    Args:
        keep_every: every so many steps a checkpoint is kept for good; 0: none.
        keep: steps whose checkpoints are kept for good too.
        checkpoint: that the run goes on from, or None.
    Attributes:
        stopped: whether the training ended because of SIGTERM.
    """

    def __init__(self, keep_every=0, checkpoint=None, keep=()):
        self.keep_every, self.keep = keep_every, keep
        before = read_manifest(checkpoint) if checkpoint else {}
        self._begun = (
            time.perf_counter() - before.get("seconds", 0),
            time.process_time() - before.get("cpu_seconds", 0),
        )
        self.stopped = False
        self._limit = self._handler = self._args = None
        self._signalled = self._postponed = False

    def spent(self):
        """Seconds and CPU seconds of the training, in this process and in those that it goes on
        from."""
        seconds = time.perf_counter() - self._begun[0]
        cpu_seconds = time.process_time() - self._begun[1]
        return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}

    def on_train_begin(self, args, state, control, **kwargs):
        self._args, self._limit, args.save_total_limit = args, args.save_total_limit, None
        best = Path(args.output_dir) / f"checkpoint-{getattr(state, 'best_global_step', None)}"
        if best.is_dir():  # the state has the path as it was then: the folder may have been moved
            state.best_model_checkpoint = str(best)
        if 0 < state.max_steps <= state.global_step:
            raise _NothingLeft
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *given):
        self._signalled = True

    def on_step_end(self, args, state, control, **kwargs):
        if highest(int(self._signalled)):
            # With save_strategy "best" the evaluation decides anew whether this step is saved: then
            # the next step is.
            if (
                control.should_evaluate
                and args.save_strategy == SaveStrategy.BEST
                and not self._postponed
            ):
                self._postponed = True
            else:
                control.should_evaluate = control.should_evaluate and not self._postponed
                control.should_log = control.should_save = control.should_training_stop = (
                    self.stopped
                ) = True
        if control.should_save and args.should_save:
            self._make_room(args, state)

    def _make_room(self, args, state):
        finished = complete(args.output_dir)
        if not finished:
            return
        need = sum(
            path.stat().st_size for path in finished[max(finished)].rglob("*") if path.is_file()
        )
        if shutil.disk_usage(args.output_dir).free < need * 1.02:
            forget(args.output_dir, 1, self.keep_every, state.best_model_checkpoint, self.keep)

    def on_save(self, args, state, control, **kwargs):
        args.distributed_state.wait_for_everyone()
        if args.should_save:
            write_manifest(
                Path(args.output_dir) / f"checkpoint-{state.global_step}",
                state.global_step,
                self.spent(),
            )
            best = state.best_model_checkpoint
            forget(args.output_dir, self._limit, self.keep_every, best, self.keep)
        args.distributed_state.wait_for_everyone()

    def on_train_end(self, args, state, control, **kwargs):
        self.close()

    def close(self):
        """Gives back what `on_train_begin` took: the handler of SIGTERM and save_total_limit."""
        if self._args is not None:
            self._args.save_total_limit, self._args = self._limit, None
        if self._handler is not None:
            # Trainer's enable_jit_checkpoint has a handler too, and may have put back what was
            # there before both.
            if signal.getsignal(signal.SIGTERM) == self._on_signal:
                signal.signal(signal.SIGTERM, self._handler)
            self._handler = None


def resume_point(folder):
    """`newest_complete` as all processes of the run see it: the first process verifies and sets
    damaged ones aside.

    Raises:
        UserError: a process of another machine does not find the checkpoint, because `folder` is
            not on a common file system.
    """
    step = -1
    if is_main():
        chosen = newest_complete(folder)
        step = int(CHECKPOINT.fullmatch(chosen.name)[1]) if chosen else -1
        set_aside(folder, step)
    step = highest(step)
    if step < 0:
        return None
    checkpoint = Path(folder) / f"checkpoint-{step}"
    if not checkpoint.is_dir():
        raise UserError(
            f"{checkpoint} is on the machine of the run's first process, but not on this one; give "
            "a folder that all machines share"
        )
    return checkpoint


def train(trainer, keep_every=0, before=None, keep=()):
    """`trainer.train()` from the newest complete checkpoint in its output folder on, with
    `Checkpoints`.

    Args:
        trainer: a transformers Trainer; all processes of the run must call this.
        keep_every, keep: of `Checkpoints`.
        before: called with the checkpoint that is continued from, if there is one, before the
            training.
    Returns:
        Trainer's TrainOutput; its training_loss is nan where no step was left to train. Its metrics
        have train_runtime and cpu_seconds of the run with all its continuations.
    Raises:
        Stopped: SIGTERM came; the step is saved. The caller must not write its result then.
        UserError: the disk is full. What was half written is removed.
    """
    folder = Path(trainer.args.output_dir)
    checkpoint = resume_point(folder)
    if trainer.args.device.type == "cpu":
        keep_freed_memory()
    if before is not None and checkpoint is not None:
        before(checkpoint)
    callback, save = Checkpoints(keep_every, checkpoint, keep), trainer._save_checkpoint
    trainer.add_callback(callback)
    trainer._save_checkpoint = lambda *given, **options: (_begin(trainer), save(*given, **options))
    try:
        output = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    except _NothingLeft:
        output = _end(trainer)
    except Exception as error:
        half = folder / f"checkpoint-{trainer.state.global_step}"
        if trainer.args.should_save and read_manifest(half) is None:
            remove_checkpoint(half)
        if not is_disk_full(error):
            raise
        kept = max(complete(folder), default=None)
        place = "from the beginning" if kept is None else f"from checkpoint-{kept}"
        raise UserError(
            f"the disk of {folder} is full ({one_line(error, 80)}); make room, and the same "
            f"command goes on {place}"
        ) from error
    finally:
        callback.close()
        trainer.remove_callback(callback)
        del trainer._save_checkpoint
    if callback.stopped:
        state = trainer.state
        sentence = (
            f"stopped by SIGTERM after step {state.global_step:,} of {state.max_steps:,}, "
            "which is saved; the same command goes on"
        )
        raise Stopped(sentence if is_main() else "")
    spent = callback.spent()
    output.metrics.update(train_runtime=spent["seconds"], cpu_seconds=spent["cpu_seconds"])
    return output


def _end(trainer):
    """What Trainer does after its last step, for a run whose last step was taken before."""
    trainer.is_in_train = False
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    trainer.control = trainer.callback_handler.on_train_end(
        trainer.args, trainer.state, trainer.control
    )
    return TrainOutput(trainer.state.global_step, math.nan, {})
