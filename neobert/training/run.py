"""Run a training job exactly once: skip a finished run and resume an interrupted one.

    result = run_once(Output("runs/mine", "contrastive", settings), build, save)

`build` loads data and models and returns the trainer, `save` writes the final files and returns the
content of result.json. Both are called only after the output directory has been claimed.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from transformers import Trainer, TrainingArguments

from ..common.environment import environment
from ..common.errors import UserError
from ..common.files import read_json
from ..common.output import Output
from .checkpoints import (
    RunTrainer,
    claim,
    is_main,
    on_main,
    remove_checkpoints,
    train,
    training_time,
)


logger = logging.getLogger("neobert.training")

TrainerT = TypeVar("TrainerT", bound=RunTrainer)


def run_once(
    output: Output,
    build: Callable[[], TrainerT],
    save: Callable[[TrainerT, Path], dict[str, Any]],
    *,
    checkpoint_folder: Path | None = None,
    keep_every: int = 0,
) -> dict[str, Any]:
    """Train a model in an output directory, unless the run has finished before.

    A run that was interrupted resumes from its newest readable checkpoint. All processes of the run
    must call this function.

    Args:
        output: Output directory of the run.
        build: Function that returns the trainer, a `RunTrainer`. The function is not called if the
            run has finished or another run uses the directory.
        save: Function that is called with the trainer and an empty directory after training, and
            returns the content of result.json. All processes call the function, because sharded
            weights are gathered from all of them. Only the main process may write files, which are
            then moved into the output directory. Return values of other processes are ignored.
        checkpoint_folder: Directory of the checkpoints, which is removed at the end of the run.
            TensorBoard logs are kept. If None, the checkpoints are kept.
        keep_every: Number of steps between two checkpoints that are never removed while the run is
            in progress; 0 for none.

    Returns:
        The content of result.json: training time, environment, and the result of `save`.

    Raises:
        UserError: If another run uses the directory, or the directory holds other files or a run
            with other settings.
        Stopped: If SIGTERM was received. A checkpoint has been written.
    """
    if on_main(output.state) == "finished":
        logger.info("%s: the run has already finished. Nothing is written.", output.folder)
    else:
        with claim(output):
            # Another process may have finished the run since the first check. Trainer and DeepSpeed
            # print their progress, but stdout is for results.
            if on_main(output.state) != "finished":
                with contextlib.redirect_stdout(sys.stderr):
                    _train_and_save(output, build, save, keep_every)

    # A process may have been killed between the last file and the removal of the checkpoints.
    if checkpoint_folder is not None and is_main():
        remove_checkpoints(checkpoint_folder)
    return on_main(lambda: read_json(output.result))


def _train_and_save(
    output: Output,
    build: Callable[[], TrainerT],
    save: Callable[[TrainerT, Path], dict[str, Any]],
    keep_every: int,
) -> None:
    """Train, write the final files and then the result."""
    trainer = build()
    check_weights_are_complete(trainer)
    train(trainer, keep_every)

    with _final_files(output, trainer) as folder:
        content = save(trainer, folder)

    # result.json is the last file: a run with this file has finished. The other processes wait, so
    # none of them returns before the file exists.
    if is_main():
        defaults = {**training_time(trainer), "environment": run_environment(trainer.args)}
        output.finish(**{**defaults, **content})
    trainer.accelerator.wait_for_everyone()


def check_weights_are_complete(trainer: RunTrainer) -> None:
    """Check that a process has all weights if its command needs them to evaluate and save a model.

    Raises:
        UserError: If ZeRO-3 or FSDP divides the weights, and the command does not gather them.
    """
    state = trainer.accelerator.state
    zero_stage = getattr(state.deepspeed_plugin, "zero_stage", 0)
    # Without FSDP the state has no such attribute.
    uses_fsdp = getattr(state, "fsdp_plugin", None) is not None
    if (uses_fsdp or zero_stage == 3) and not trainer.saves_sharded_weights:
        method = "FSDP" if uses_fsdp else "ZeRO-3"
        raise UserError(
            f"this command needs all weights in every process, but {method} divides them. Use DDP "
            "(torchrun), or ZeRO-2."
        )


@contextlib.contextmanager
def _final_files(output: Output, trainer: Trainer) -> Iterator[Path]:
    """Yield the directory for the final files, the same one in all processes."""
    with output.final_files() if is_main() else contextlib.nullcontext():
        # The main process creates the directory, and moves its files when all have saved.
        trainer.accelerator.wait_for_everyone()
        yield output.final_files_folder
        trainer.accelerator.wait_for_everyone()


def run_environment(args: TrainingArguments) -> dict[str, Any]:
    """Return the environment of a training run for its result file."""
    return environment(dtype=mixed_precision(args), processes=args.world_size)


def mixed_precision(args: TrainingArguments) -> str:
    """Return the dtype that a run computes in: "float32", or "bfloat16 autocast"."""
    if args.bf16:
        return "bfloat16 autocast"
    return "float16 autocast" if args.fp16 else "float32"
