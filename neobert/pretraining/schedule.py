"""Trainer's options of a pre-training run: the paper's schedule, and what goes together."""

import math
import os

import torch
from transformers.utils import is_torch_bf16_gpu_available

from ..common.errors import UserError
from ..training.options import BLOCKS_ONLY, training_arguments


# An item of the data is a complete micro-batch, and a loss that is not finite must be seen.
_FIXED = {
    "per_device_train_batch_size": 1,
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,
    "label_smoothing_factor": 0.0,
    "auto_find_batch_size": False,
    **BLOCKS_ONLY,
}


def paper_schedule(max_steps, warmup_steps):
    """Trainer's options for the paper's schedule: after the warm-up a cosine to 10 % of the peak at
    90 % of the steps, then constant."""
    decay = max(1, round(0.9 * max_steps) - int(warmup_steps))
    return {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {
            "num_stable_steps": 0,
            "num_decay_steps": decay,
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
    return 3e-4 * max(1.0, 768 / hidden_size)


def steps_of_epochs(
    epochs: float, sizes: list[int], shares: list[float], global_batch_size: int
) -> int:
    """Return the number of optimizer steps of `epochs` epochs, rounded up.

    Args:
        epochs: Number of epochs. An epoch of weighted sources ends when the first source does.
        sizes: Size of each source, in the unit of `global_batch_size`.
        shares: Sampling weight of each source; empty without weights.
        global_batch_size: Texts or tokens of an optimizer step on all devices.
    """
    epoch = sum(sizes)
    if shares:
        epoch = min(size / share for size, share in zip(sizes, shares, strict=True))
    return max(1, math.ceil(epochs * epoch / global_batch_size))


def make_training_arguments(run, batch, given):
    """transformers' TrainingArguments of a run.

    Args:
        run: RunArguments. batch: BatchArguments.
        given: Trainer's options as `read_arguments` returns them.
    Raises:
        UserError: as of `training_arguments`; values that do not go together.
    """
    given, fixed, steps = dict(given), dict(_FIXED), given["max_steps"]
    given["bf16"] = run.bf16
    if run.bf16 == "auto":
        given["bf16"] = supports_bf16() and not given.get("fp16") and not given.get("use_cpu")
    # `auto` is replaced when the model is known.
    given["learning_rate"] = 6e-4 if run.learning_rate == "auto" else run.learning_rate
    warmup = given.get("warmup_steps", min(2000, steps // 20))
    if 0 < warmup < 1:  # a share of the steps
        warmup = min(math.ceil(warmup * steps), steps - 1)
    if not 0 <= warmup < steps:
        raise UserError(f"warmup_steps {warmup:g} must be at least 0 and below max_steps {steps}")
    given["warmup_steps"] = warmup
    if not {"lr_scheduler_type", "lr_scheduler_kwargs"} & given.keys():
        given |= paper_schedule(steps, warmup)
    accumulation = batch.accumulation(int(os.environ.get("WORLD_SIZE", 1)))
    if accumulation is not None:
        fixed["gradient_accumulation_steps"] = accumulation
    accelerated = torch.accelerator.is_available()
    if given.get("bf16") and not (given.get("use_cpu") or accelerated):
        raise UserError(
            "bf16 is on, but there is no GPU or other accelerator, and most CPUs are slow in it; "
            "give --bf16 false or auto, or --use-cpu true"
        )
    given.setdefault("dataloader_pin_memory", accelerated)
    training = training_arguments(run.output, given, fixed)
    if training.n_gpu > 1:
        raise UserError(
            f"there are {training.n_gpu} GPUs: start one process for each, with accelerate launch "
            "or torchrun"
        )
    return training
