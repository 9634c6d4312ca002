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
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import distributed
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy, TrainOutput

from .errors import Stopped, UserError, is_disk_full, one_line, printable
from .files import TEXT_LIMIT, read_json, settle, sha256, write_json
from .memory import keep_freed_memory
from .runs import remove_empty


# of a checkpoint: begun before everything else, and completed last with the size and digest of
# every file
MANIFEST = "complete.json"
_REMOVING = "removing.json"  # what the manifest is called while the checkpoint is removed
# Whole names: `checkpoint-best` or `damaged-checkpoint-8-copy` is a user's own.
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_DAMAGED = re.compile(r"damaged-checkpoint-(\d+)(?:\.\d+)?")
# One of these holds the optimizer's state: of Trainer, DeepSpeed, FSDP.
_OPTIMIZER = re.compile(r"optimizer\.(pt|bin)|optimizer_\d+/.+|global_step\d+/.*optim_states\.pt")


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
                remove(folder)
            run.begin()
        if highest(int(run.state == "finished")):
            run.state = "finished"
        yield


# ------------------------------------------------------------------------------------------------
# which are complete


def _numbered(folder, name):
    """(step, folder) of the folders in `folder` that are called so."""
    found = [
        (name.fullmatch(path.name), path)
        for path in Path(folder).glob("*checkpoint-*")
        if path.is_dir()
    ]
    return sorted((int(match[1]), path) for match, path in found if match)


def checkpoints(folder):
    """{step: folder} of a run's checkpoints in order, complete or not."""
    return dict(_numbered(folder, _CHECKPOINT))


def complete(folder):
    """Those of `checkpoints` that were written to their end."""
    return {
        step: path for step, path in checkpoints(folder).items() if _read_manifest(path) is not None
    }


def _digest(path):
    """Size and SHA-256 of a file that is on the disk by then, not in memory alone."""
    settle(path)
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def write_manifest(checkpoint, step, spent=None):
    """Marks a checkpoint as complete.

    Args:
        spent: {"seconds", "cpu_seconds"} of the training so far, to go on counting from.
    """
    files = sorted(
        path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST
    )
    with ThreadPoolExecutor(4) as pool:
        digests = dict(
            zip(
                (path.relative_to(checkpoint).as_posix() for path in files),
                pool.map(_digest, files),
            )
        )
    write_json(checkpoint / MANIFEST, {"step": step, **(spent or {}), "files": digests})


def damage(checkpoint):
    """What keeps a checkpoint from being continued from, in a few words, or None for a complete
    one."""
    manifest = _read_manifest(checkpoint)
    if manifest is None:
        whole = (checkpoint / MANIFEST).exists() and _read_manifest(
            checkpoint, complete=False
        ) is None
        return f"{MANIFEST} is damaged" if whole else "it was not written to its end"
    files = manifest["files"]
    if not any(_OPTIMIZER.fullmatch(name) for name in files):
        return "it has no state of the optimizer"
    for name, file in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{printable(name)} is missing"
        if path.stat().st_size != file["size"]:
            return (
                f"{printable(name)} has {path.stat().st_size:,} bytes in place of {file['size']:,}"
            )
    with ThreadPoolExecutor(4) as pool:
        for name, digest in zip(files, pool.map(sha256, (checkpoint / name for name in files))):
            if digest != files[name]["sha256"]:
                return f"{printable(name)} has changed since it was written"
    return None


def _read_manifest(checkpoint, complete=True, name=MANIFEST):
    """The manifest of a checkpoint; with `complete` None for one that is not written to its end."""
    try:
        manifest = read_json(checkpoint / name, 16 * TEXT_LIMIT)
        files = manifest["files"] if complete else manifest.get("files", {})
        good = all(
            isinstance(file["size"], int) and isinstance(file["sha256"], str)
            for file in files.values()
        )
    except (UserError, KeyError, TypeError, AttributeError):
        return None
    return manifest if good else None


def _remove(checkpoint):
    """Removes what the run wrote of a checkpoint, as its manifest says, and the folder where
    nothing else is in it."""
    begun, going = _read_manifest(checkpoint, complete=False), checkpoint / _REMOVING
    if checkpoint.is_symlink():
        return
    if (
        begun is not None and "files" not in begun
    ):  # it was being written when the run was killed, or the disk was full
        shutil.rmtree(checkpoint, ignore_errors=True)
        return
    if begun is not None:
        os.replace(
            checkpoint / MANIFEST, going
        )  # first, so that what is half removed is never taken
    if (manifest := _read_manifest(checkpoint, name=_REMOVING)) is not None:
        place = Path(os.path.realpath(checkpoint))
        for path in (
            Path(os.path.normpath(place / name)) for name in (*manifest["files"], _REMOVING)
        ):
            if place in path.parents and Path(os.path.realpath(path.parent)).is_relative_to(place):
                path.unlink(missing_ok=True)
                remove_empty(path.parent, place)


def newest_complete(folder):
    """The newest checkpoint of a run that can be continued from, or None. Changes nothing.

    Each one is verified, from the newest down; one line on stderr names what is damaged and what is
    taken in its place.
    """
    damaged = []
    chosen = None
    for path in reversed(checkpoints(folder).values()):
        problem = damage(path)
        if problem is None:
            chosen = path
            break
        damaged.append(f"{path.name} ({problem})")
    if damaged:
        place = (
            f"going on from {chosen.name}"
            if chosen
            else "there is no complete checkpoint, beginning anew"
        )
        print(f"{folder}: damaged: {', '.join(damaged)}; {place}", file=sys.stderr, flush=True)
    return chosen


def _set_aside(folder, step):
    """Renames the checkpoints after `step`, which are damaged, so that new ones may take their
    names; half ones go. `_forget` removes them."""
    for number, path in checkpoints(folder).items():
        if number > step:
            if _read_manifest(path) is None:
                _remove(path)
            if path.exists():
                names = (
                    Path(folder) / f"damaged-{path.name}{suffix}"
                    for suffix in ("", *(f".{i}" for i in range(1, 1000)))
                )
                path.rename(next(name for name in names if not name.exists()))


def _forget(folder, limit, keep_every, best=None, keep=()):
    """Keeps the newest `limit` complete checkpoints (all if None), every `keep_every`-th step's,
    those of the steps `keep` and the best; removes the others.

    What `_set_aside` kept goes as soon as the run has come as far again.
    """
    finished = complete(folder)
    newest = max(finished, default=-1)
    for step, path in (*_numbered(folder, _DAMAGED), *checkpoints(folder).items()):
        if step <= newest and path not in finished.values():  # the latter: half removed
            _remove(path)
    for step in list(finished)[:-limit] if limit else []:
        path = finished[step]
        kept = step in keep or (keep_every and step % keep_every == 0)
        if not kept and path.name != Path(best or "").name:
            _remove(path)


def remove(folder):
    """Removes the checkpoints of a finished run, and their folder where nothing else is in it."""
    for _, path in (*_numbered(folder, _CHECKPOINT), *_numbered(folder, _DAMAGED)):
        _remove(path)
    for path in (*Path(folder).glob("*/"), Path(folder)):  # evaluators make an empty folder
        with contextlib.suppress(OSError):
            path.rmdir()


def _begin(trainer):
    """Marks the checkpoint that is going to be written as this run's.

    Raises:
        UserError: there is a folder of its name that the run did not make.
    """
    path = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    if is_main():
        if os.path.lexists(path) and (
            path.is_symlink() or _read_manifest(path, complete=False) is None
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
        before = _read_manifest(checkpoint) if checkpoint else {}
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
        seconds, cpu_seconds = (
            time.perf_counter() - self._begun[0],
            time.process_time() - self._begun[1],
        )
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
            _forget(args.output_dir, 1, self.keep_every, state.best_model_checkpoint, self.keep)

    def on_save(self, args, state, control, **kwargs):
        args.distributed_state.wait_for_everyone()
        if args.should_save:
            write_manifest(
                Path(args.output_dir) / f"checkpoint-{state.global_step}",
                state.global_step,
                self.spent(),
            )
            best = state.best_model_checkpoint
            _forget(args.output_dir, self._limit, self.keep_every, best, self.keep)
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
        step = int(_CHECKPOINT.fullmatch(chosen.name)[1]) if chosen else -1
        _set_aside(folder, step)
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
        if trainer.args.should_save and _read_manifest(half) is None:
            _remove(half)
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
