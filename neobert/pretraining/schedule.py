"""Learning rate schedule, length and Trainer options of a pre-training run."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from ..common.errors import UserError
from ..training.options import BLOCKS_ONLY, training_arguments
from .options import PretrainOptions


# Peak learning rate of the paper.
LEARNING_RATE = 6e-4

# Warmup of the paper. In runs of fewer than 40,000 steps the warmup is 5 % of the steps.
WARMUP_STEPS = 2000

# An item of the dataset is a complete micro-batch. The trainer of the command counts the tokens.
_FIXED = {
    "per_device_train_batch_size": 1,
    "remove_unused_columns": False,
    "include_num_input_tokens_seen": False,
    "label_smoothing_factor": 0.0,
    "auto_find_batch_size": False,
    "label_names": None,
    **BLOCKS_ONLY,
}


def make_training_arguments(options: PretrainOptions) -> TrainingArguments:
    """Return the TrainingArguments of a run.

    A learning rate of `auto` is replaced later, when the model is known.

    Raises:
        UserError: If options of Trainer are invalid or cannot be combined.
    """
    settings = dict(options.trainer)
    _check_strategies(settings)
    max_steps = options.optimization.max_steps
    learning_rate = options.optimization.learning_rate
    settings["max_steps"] = max_steps
    settings["bf16"] = _use_bf16(options)
    settings["learning_rate"] = LEARNING_RATE if learning_rate == "auto" else learning_rate
    settings |= _schedule_settings(settings, max_steps)

    # A global batch size determines the number of micro-batches per step. TrainingArguments do not
    # exist yet, so the number of processes is read from the environment of the launcher.
    fixed: dict[str, Any] = dict(_FIXED)
    accumulation = options.batch.gradient_accumulation_steps(int(os.environ.get("WORLD_SIZE", 1)))
    if accumulation is not None:
        fixed["gradient_accumulation_steps"] = accumulation

    # Trainer takes every metric whose name does not end with "loss" for one to maximize.
    metric = str(settings.get("metric_for_best_model"))
    if metric.endswith("bits_per_character") and settings.get("greater_is_better") is None:
        settings["greater_is_better"] = False

    # Pinned memory speeds up copies to an accelerator, and torch warns about it without one.
    settings.setdefault("dataloader_pin_memory", torch.accelerator.is_available())
    training = training_arguments(options.output.output, settings, fixed)

    if training.eval_strategy != "no" and not options.validation.validation:
        strategy = settings.get("eval_strategy")
        raise UserError(
            f"`eval_strategy` is {strategy}, but there are no validation texts. Pass --validation, "
            "or omit --eval-strategy."
        )
    return training


def _check_strategies(settings: Mapping[str, Any]) -> None:
    """Check that a run is not evaluated, saved or logged by epochs.

    The complete run is a single epoch of Trainer, so a run would save no checkpoint before its end.

    Args:
        settings: Options of Trainer.

    Raises:
        UserError: If a strategy is "epoch".
    """
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if settings.get(name) == "epoch":
            interval = f"{name.removesuffix('_strategy')}_steps"
            raise UserError(
                f"`{name}` must not be epoch, because Trainer counts the complete run as one "
                f"epoch. Set it to steps, and the interval with `{interval}`."
            )


def _use_bf16(options: PretrainOptions) -> bool:
    """Return whether a run uses bfloat16 mixed precision.

    Raises:
        UserError: If bfloat16 is set, but there is no accelerator.
    """
    bf16 = options.optimization.bf16
    use_cpu = bool(options.trainer.get("use_cpu"))
    if bf16 == "auto":
        return supports_bf16() and not options.trainer.get("fp16") and not use_cpu
    if bf16 and not use_cpu and not torch.accelerator.is_available():
        raise UserError(
            "`bf16` needs an accelerator, and there is none; most CPUs are slow in bfloat16. Pass "
            "--bf16 false or --bf16 auto, or --use-cpu to train on the CPU in bfloat16."
        )
    return bf16


def _schedule_settings(settings: Mapping[str, Any], max_steps: int) -> dict[str, Any]:
    """Return the options of Trainer for the warmup and the learning rate schedule.

    The schedule of the paper applies unless the user has selected another one.

    Args:
        settings: Options of Trainer from the recipe and the command line.
        max_steps: Number of steps of the run.

    Raises:
        UserError: If the warmup is negative or longer than the run, or `lr_scheduler_kwargs` is not
            a mapping.
    """
    # `warmup_ratio` is an option of transformers 4, which ignores the ratio if the steps are set.
    warmup = settings.get("warmup_steps")
    if not warmup and "warmup_ratio" in settings:
        warmup = settings["warmup_ratio"]
    warmup_steps = _warmup_steps(warmup, max_steps)
    if "lr_scheduler_type" in settings:
        return {"warmup_steps": warmup_steps}

    schedule = paper_schedule(max_steps, warmup_steps)
    changes = settings.get("lr_scheduler_kwargs") or {}
    if not isinstance(changes, dict):
        raise UserError(
            f"`lr_scheduler_kwargs` must be a mapping, got {changes!r}. Pass it as "
            "'{min_lr_ratio: 0.2}'."
        )
    schedule["lr_scheduler_kwargs"] |= changes
    return {"warmup_steps": warmup_steps, **schedule}


def _warmup_steps(warmup_steps: float | None, max_steps: int) -> int:
    """Return the number of warmup steps.

    Args:
        warmup_steps: Number of steps, or a fraction of all steps if below 1; None for the default.
        max_steps: Number of steps of the run.

    Raises:
        UserError: If the warmup is negative or longer than the run.
    """
    if warmup_steps is None:
        return min(WARMUP_STEPS, max_steps // 20)
    # A fraction is rounded up, but leaves at least one step after the warmup.
    if 0 < warmup_steps < 1:
        return min(math.ceil(warmup_steps * max_steps), max_steps - 1)
    if not 0 <= warmup_steps < max_steps:
        raise UserError(
            f"`warmup_steps` must be at least 0 and less than `max_steps`, {max_steps:,}, got "
            f"{warmup_steps:g}."
        )
    return int(warmup_steps)


def paper_schedule(max_steps: int, warmup_steps: float) -> dict[str, Any]:
    """Return the options of Trainer for the learning rate schedule of the paper.

    After the warmup, the learning rate follows a cosine to 10 % of its peak at 90 % of the steps,
    and is constant afterwards.

    Args:
        max_steps: Number of steps of the run.
        warmup_steps: Number of warmup steps.
    """
    # The schedule of transformers stays at `min_lr_ratio` after the decay.
    decay_steps = max(1, round(0.9 * max_steps) - int(warmup_steps))
    return {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {
            "num_stable_steps": 0,
            "num_decay_steps": decay_steps,
            "decay_type": "cosine",
            "min_lr_ratio": 0.1,
        },
    }


def supports_bf16() -> bool:
    """Return whether there is an accelerator that computes bfloat16 without emulation."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.accelerator.is_available() and is_torch_bf16_gpu_available()


def adaptation_learning_rate(hidden_size: int) -> float:
    """Return the default peak learning rate for continued pre-training.

    The rate is half of the peak of pre-training. That peak is 6e-4 for NeoBERT, with a hidden size
    of 768, and 2e-3 to 3e-3 for the bundled model, with a hidden size of 192.

    Args:
        hidden_size: Hidden size of the encoder, `config.hidden_size`.

    Returns:
        `3e-4 * 768 / hidden_size`, at least 3e-4.
    """
    return LEARNING_RATE / 2 * max(1.0, 768 / hidden_size)


def steps_of_epochs(
    epochs: float, sizes: Sequence[int], fractions: Sequence[float], global_batch_size: int
) -> int:
    """Return the number of optimizer steps of `epochs` epochs, rounded up.

    Args:
        epochs: Number of epochs, as in `epoch_size`.
        sizes: Size of each source, in the unit of `global_batch_size`.
        fractions: Fraction of each source in the batches, in the same unit; empty without weights.
        global_batch_size: Sequences or tokens per optimizer step over all devices.
    """
    return max(1, math.ceil(epochs * epoch_size(sizes, fractions) / global_batch_size))


def epoch_size(sizes: Sequence[int], fractions: Sequence[float]) -> float:
    """Return the size of an epoch: all texts, or with weights those until the first source ends.

    Args:
        sizes: Size of each source, such as its number of tokens.
        fractions: Fraction of each source in the batches, in the same unit; empty without weights.
    """
    if not fractions:
        return sum(sizes)
    # A source is exhausted after size / fraction units of the mixture.
    return min(size / fraction for size, fraction in zip(sizes, fractions, strict=True))


def token_fractions(
    window_fractions: Sequence[float], token_counts: Sequence[int], window_counts: Sequence[int]
) -> list[float]:
    """Return the fraction of each source in the tokens of a run.

    Args:
        window_fractions: Fraction of each source in the windows of the run, which sum to 1.
        token_counts: Number of tokens of each source.
        window_counts: Number of windows of each source.
    """
    # A source of longer windows has a larger fraction of the tokens.
    sources = zip(window_fractions, token_counts, window_counts, strict=True)
    weights = [fraction * tokens / windows for fraction, tokens, windows in sources]
    return [weight / sum(weights) for weight in weights]
