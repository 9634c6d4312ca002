"""Optimization beyond Trainer's options: default learning rate, decayed parameters and warmup."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType


def default_learning_rate(hidden_size: int) -> float:
    """Return the default fine-tuning learning rate for an encoder of this hidden size.

    Encoders with a hidden size of 768 or more get 2e-5, the common rate for BERT-sized models.
    Smaller encoders need a much higher one: with 2e-5, an encoder with a hidden size of 384 still
    predicts a single class after an epoch. The exponent was fitted on models with a hidden size
    of 192 and 384, which train best at 5e-4 to 2e-3.

    Args:
        hidden_size: Hidden size of the encoder, `config.hidden_size`.

    Returns:
        `2e-5 * (768 / hidden_size) ** 5`, at least 2e-5 and at most 1e-3.
    """
    return min(1e-3, 2e-5 * max(1.0, 768 / hidden_size) ** 5)


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters with weight decay: matrices, but no norms or biases."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]


def make_schedule(
    schedule: str,
    optimizer: Optimizer,
    warmup_steps: int,
    max_steps: int,
    kwargs: Mapping[str, Any] | None = None,
) -> LRScheduler:
    """Return a learning rate schedule of transformers, with the warmup of the paper.

    The warmup of "warmup_stable_decay" rises from 0 as in the paper. In transformers it rises from
    `min_lr_ratio`.

    Args:
        schedule: Trainer's `lr_scheduler_type`.
        optimizer: Optimizer; the schedule is stepped once per optimizer step.
        warmup_steps: Number of warmup steps.
        max_steps: Total number of steps.
        kwargs: Trainer's `lr_scheduler_kwargs`.

    Raises:
        TypeError: If transformers does not accept `kwargs`.
        ValueError: If transformers has no schedule of this name.
    """
    values = dict(kwargs or {})
    # `get_scheduler` passes the number of steps to every schedule, so the warning appears for each
    # explicit `num_stable_steps`.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Both num_training_steps and num_stable_steps")
        scheduler = get_scheduler(schedule, optimizer, warmup_steps, max_steps, values)
        if schedule != SchedulerType.WARMUP_STABLE_DECAY:
            return scheduler
        values["min_lr_ratio"] = 0.0
        from_zero: Any = get_scheduler(schedule, optimizer, warmup_steps, max_steps, values)

    # All parameter groups have the same schedule. The warmup is that of the schedule from 0.
    (factor, *_) = scheduler.lr_lambdas
    (warmup_factor, *_) = from_zero.lr_lambdas
    return LambdaLR(
        optimizer, lambda step: warmup_factor(step) if step < warmup_steps else factor(step)
    )
