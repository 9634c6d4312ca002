"""Report the size of a training run, and an estimate of its duration.

    trainer.add_callback(RunReport())

The lines are logged at level INFO by the logger "neobert", in the main process only.
"""

import logging
import math
import time
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length


logger = logging.getLogger("neobert")


class RunReport(TrainerCallback):
    """Callback that logs the size of a run before the first step, and an estimate of its duration.

    The callback uses no random numbers and does not wait for the device, so the run is unchanged.

    Args:
        sequences: Number of training sequences. By default the length of the training dataset;
            omitted from the report if the dataset has no length.
        epochs: Number of epochs. By default the ratio of the run's steps to the length of the
            dataloader; required where the dataset holds all batches of a run.
        measured_steps: Number of optimizer steps that are timed for the estimate. The first step
            of the process is not timed, as it may compile or allocate.
    """

    def __init__(
        self,
        sequences: int | None = None,
        epochs: float | None = None,
        measured_steps: int = 10,
    ) -> None:
        self.sequences = sequences
        self.epochs = epochs
        self.measured_steps = measured_steps
        self.first_step = 0
        self.start_time = 0.0
        self.evaluated = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader | None = None,
        **kwargs: Any,
    ) -> None:
        """Log steps, epochs, sequences, batch size and learning rate."""
        # A resumed run may run on another machine, so it is timed again.
        self.first_step = state.global_step + 1
        self.evaluated = False
        if state.is_world_process_zero and state.global_step < state.max_steps:
            logger.info(describe_run(args, state, train_dataloader, self.sequences, self.epochs))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Log the estimated time once `measured_steps` steps have been timed."""
        if state.global_step == self.first_step:
            self.start_time = time.monotonic()
        if state.global_step != self.first_step + self.measured_steps:
            return

        # The timed steps begin after the first step, which compiles, allocates and fills caches.
        remaining_steps = state.max_steps - state.global_step
        if state.is_world_process_zero and remaining_steps > 0:
            step_seconds = (time.monotonic() - self.start_time) / self.measured_steps
            # Without an evaluation among the timed steps, the duration of evaluations is unknown.
            excluded = args.eval_strategy != "no" and not self.evaluated
            logger.info(
                "Estimated time for the remaining %s steps%s: %s",
                f"{remaining_steps:,}",
                ", without evaluation" if excluded else "",
                format_duration(step_seconds * remaining_steps),
            )

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Record that the timed steps include an evaluation."""
        self.evaluated = True


def describe_run(
    args: TrainingArguments,
    state: TrainerState,
    train_dataloader: DataLoader | None = None,
    sequences: int | None = None,
    epochs: float | None = None,
) -> str:
    """Return one line with the steps, epochs, sequences, batch size and learning rate of a run."""
    parts = [f"{state.max_steps:,} steps"]

    if epochs is None and train_dataloader is not None and has_length(train_dataloader):
        # The last step of an epoch may have fewer micro-batches than the others.
        steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
        epochs = state.max_steps / steps_per_epoch
    if epochs is not None:
        count = f"{epochs:.3g}"
        parts.append(f"{count} epoch" if count == "1" else f"{count} epochs")

    # A stream has no length.
    dataset = getattr(train_dataloader, "dataset", None)
    if sequences is None and dataset is not None and has_length(dataset):
        sequences = len(dataset)
    if sequences is not None:
        parts.append(f"{sequences:,} sequences")

    parts.append(f"learning rate {args.learning_rate:g}")
    # The warmup may be set as a number of steps or as a fraction.
    warmup_steps = args.get_warmup_steps(state.max_steps)
    if warmup_steps > 0:
        parts.append(f"warmup {warmup_steps:,} steps")

    resumed = f", resuming after step {state.global_step:,}" if state.global_step else ""
    return f"Training: {', '.join(parts)}{resumed}"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units: "2 h 5 min", "3 min 20 s" or "45 s"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {seconds} s"
    return f"{seconds} s"
