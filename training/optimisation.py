"""What the paper's optimisation has beside Trainer's own: which parameters decay, and its
warm-up."""

import warnings

from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType


def decay_parameter_names(model):
    """Names of the parameters that weight decay applies to: the matrices; not norms, not biases."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]


def make_schedule(kind, optimizer, warmup_steps, max_steps, kwargs=None):
    """transformers' schedule, to be stepped once an optimizer step; the warm-up of
    warmup_stable_decay rises from 0, as the paper's.

    transformers' own rises from `min_lr_ratio`.

    Args:
        kind, kwargs: Trainer's lr_scheduler_type and lr_scheduler_kwargs.
    Raises:
        TypeError, ValueError: what transformers says of kinds and kwargs that it does not take.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Both num_training_steps and num_stable_steps")
        scheduler = get_scheduler(kind, optimizer, warmup_steps, max_steps, dict(kwargs or {}))
    if kind != SchedulerType.WARMUP_STABLE_DECAY:
        return scheduler
    (factor, *_) = scheduler.lr_lambdas
    return LambdaLR(
        optimizer, lambda step: step / warmup_steps if step < warmup_steps else factor(step)
    )
