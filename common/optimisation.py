"""Learning-rate schedules and optimizers of the paper (sections 3 and 4; ablation M0) and which parameters decay."""

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from .errors import UserError


SCHEDULES = ("cosine", "linear", "constant")
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}


def learning_rate_factor(step, warmup_steps, max_steps, schedule="cosine", decay_share=0.9, floor=0.1):
    """Learning rate of one step over the peak.

    "cosine": linear warm-up, then floor + (1 - floor) (1 + cos(pi t)) / 2 with t from 0 to 1 until decay_share * max_steps, then floor.
    "linear": linear warm-up, then a straight line to 0 at max_steps. "constant": linear warm-up, then 1.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    end = max_steps if schedule == "linear" else decay_share * max_steps
    progress = min(1.0, (step - warmup_steps) / max(1e-9, end - warmup_steps))
    if schedule == "linear":
        return 1.0 - progress
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def check_schedule(schedule, warmup_steps, max_steps, decay_share, floor):
    """Raises UserError for a schedule that cannot be."""
    if schedule not in SCHEDULES:
        raise UserError(f"schedule must be one of {', '.join(SCHEDULES)}, but {schedule!r} was given")
    if max_steps < 1:
        raise UserError(f"max_steps must be at least 1, but {max_steps} was given")
    if not 0 <= floor <= 1 or not 0 < decay_share <= 1:
        raise UserError(f"decay_share and lr_floor must be shares of 1, but {decay_share} and {floor} were given")
    end = max_steps * (decay_share if schedule == "cosine" else 1)
    if warmup_steps < 0 or warmup_steps >= end:
        raise UserError(f"warmup_steps {warmup_steps} must be below the {end:g} steps after which the learning rate has decayed")


def make_schedule(optimizer, warmup_steps, max_steps, schedule="cosine", decay_share=0.9, floor=0.1):
    """The schedule as a torch scheduler, to be stepped once an optimizer step."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup_steps, max_steps, schedule, decay_share, floor))


def decay_parameter_names(model):
    """Names of the parameters that weight decay applies to: the matrices; no norm, no bias."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]


def parameter_groups(model, weight_decay):
    """Two optimizer groups: matrices with `weight_decay`, norms and biases without."""
    decayed = set(decay_parameter_names(model))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in named if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]


def make_optimizer(model, name, learning_rate, betas, eps, weight_decay):
    """AdamW (decoupled decay) or Adam (decay added to the gradient) over `parameter_groups`."""
    if name not in OPTIMIZERS:
        raise UserError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, but {name!r} was given")
    groups = parameter_groups(model, weight_decay)
    fused = all(parameter.device.type in ("cpu", "cuda") for group in groups for parameter in group["params"])
    return OPTIMIZERS[name](groups, lr=learning_rate, betas=betas, eps=eps, fused=True if fused else None)
