"""Options of transformers' Trainer: which of them a command leaves alone, their ranges, and the
object made of them."""

import dataclasses
import os
import typing

from .arguments import check_values
from .errors import UserError, one_line


# For commands that have `compile`: Trainer's own compilation takes the complete model, whose
# kernels for packed batches it leaves out.
BLOCKS_ONLY = {"torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None}


# The ranges of Trainer's options that Trainer takes as they come and fails with later.
_TRAINER_BOUNDS = {
    "num_train_epochs": {"above": 0},
    "per_device_train_batch_size": {"least": 1},
    "per_device_eval_batch_size": {"least": 1},
    "gradient_accumulation_steps": {"least": 1},
    "dataloader_num_workers": {"least": 0},
    "dataloader_prefetch_factor": {"least": 1},
    "seed": {"least": 0, "below": 2**32},
    "data_seed": {"least": 0, "below": 2**32},
}


def check_trainer_options(options):
    """Raises UserError for options of Trainer whose numbers are not finite or out of range, and for
    trackers that are not there.

    Args:
        options: {option: value}.
    """
    from .trackers import check_trackers

    check_values(options, _TRAINER_BOUNDS)
    if options.get("max_steps") == 0:
        raise UserError(
            "max_steps must be at least 1, or -1 where num_train_epochs counts, but 0 was given"
        )
    check_trackers(options.get("report_to"))


def training_arguments(output_dir, given, fixed, base=None):
    """transformers' TrainingArguments from a recipe's section and what the command sets itself.

    Without an accelerator it must be said that the CPU is used: torchrun's processes would not find
    each other.

    Args:
        output_dir: where checkpoints go.
        given: Trainer's options as `read_arguments` returns them.
        fixed: {option: value} that the command needs as they are.
        base: the class, by default TrainingArguments.
    Raises:
        UserError: one of `fixed` was given otherwise; values that transformers refuses, or its
            optimizer or schedule would.
    """
    import torch

    if base is None:
        from transformers import TrainingArguments as base
    given = dict(given)
    if token := given.pop("hub_token", None):
        os.environ["HF_TOKEN"] = (
            token  # where huggingface_hub looks; Trainer writes its arguments into every checkpoint
        )
    if "output_dir" in given:
        raise UserError("output_dir is set by this command; give --output in its place")
    for name, value in fixed.items():
        if name in given and given[name] != value:
            if name in BLOCKS_ONLY:
                raise UserError(
                    f"{name} compiles the complete model, which then packs nothing; give "
                    "--compile, which compiles its blocks"
                )
            raise UserError(
                f"{name} is set to {value!r} by this command, but {given[name]!r} was given; leave "
                "it out"
            )
    options = {"use_cpu": not torch.accelerator.is_available(), **given, **fixed}
    check_trainer_options(options)
    if options.get("fp16") and (options["use_cpu"] or not torch.accelerator.is_available()):
        raise UserError(
            "fp16 needs a GPU or another accelerator, and there is none in use; leave it out, or "
            "give bf16"
        )
    try:
        training = base(output_dir=str(output_dir), **options)
        _try_out(training)
        return training
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        raise (
            error
            if isinstance(error, UserError)
            else UserError(f"Trainer's options: {one_line(error, 400)}")
        ) from error


def _try_out(training):
    """Makes the optimizer and the schedule of one parameter, so that the libraries check their
    values now."""
    import torch
    from transformers import Trainer

    from .optimisation import make_schedule

    if training.optim_target_modules is not None or "lomo" in training.optim:
        return  # made of the model itself
    kind, values = Trainer.get_optimizer_cls_and_kwargs(training)
    optimizer = kind(
        [torch.nn.Parameter(torch.zeros(1))], **{"weight_decay": training.weight_decay, **values}
    )
    steps = training.max_steps if training.max_steps > 0 else 1000
    make_schedule(
        training.lr_scheduler_type,
        optimizer,
        training.get_warmup_steps(steps),
        steps,
        training.lr_scheduler_kwargs,
    )


# What Trainer's options begin with that touch neither the numbers nor the order of the data: a
# continued run may change them.
_FREE = (
    "output_dir",
    "logging_",
    "log_",
    "include_",
    "save_",
    "enable_jit_checkpoint",
    "disable_tqdm",
    "report_to",
    "run_name",
    "project",
    "trackio_",
    "push_to_hub",
    "hub_",
    "dataloader_num",
    "dataloader_pin",
    "dataloader_persistent",
    "dataloader_prefetch",
    "ddp_",
    "local_rank",
    "use_cpu",
    "no_cuda",
    "gradient_checkpointing",
    "activation_checkpointing",
    "torch_empty_cache",
    "skip_memory_metrics",
    "do_",
    "per_device_eval_batch_size",
)


def number_options(options):
    """Those of Trainer's options that a run's numbers may depend on."""
    return {name: value for name, value in options.items() if not name.startswith(_FREE)}


def trainer_hints():
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    return {f.name: hints[f.name] for f in dataclasses.fields(TrainingArguments) if f.init}
