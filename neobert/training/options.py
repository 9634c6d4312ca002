"""Options of transformers' Trainer: which of them a command leaves alone, and the object made of
them."""

import os
from collections.abc import Mapping
from typing import Any

from ..common.arguments import check_values
from ..common.errors import UserError, listed, one_line


# For commands that have `compile`: Trainer's own compilation takes the complete model, whose
# kernels for packed batches it leaves out.
BLOCKS_ONLY = {"torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None}


# What Trainer takes as it comes and fails with after the work has begun.
_TRAINER_BOUNDS = {
    "num_train_epochs": {"above": 0},
    "per_device_train_batch_size": {"least": 1},
    "gradient_accumulation_steps": {"least": 1},
    "seed": {"least": 0, "below": 2**32},
}


def check_trainer_options(options):
    """Raises UserError for options of Trainer, {option: value}, whose numbers are not finite or out
    of range."""
    check_values(options, _TRAINER_BOUNDS)
    if options.get("max_steps") == 0:
        raise UserError(
            "max_steps must be at least 1, or -1 where num_train_epochs counts, but 0 was given"
        )


def check_services(options: Mapping[str, Any]) -> None:
    """Check that the experiment trackers and the Hub can be used, before any work is done.

    Args:
        options: Options of Trainer.

    Raises:
        UserError: If a tracker of `report_to` is not installed, or if `push_to_hub` is set and
            the Hub does not accept the user's token.
    """
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    trackers = options.get("report_to") or []
    trackers = [trackers] if isinstance(trackers, str) else trackers
    available = {"none", "all", *get_available_reporting_integrations()}
    if missing := [name for name in trackers if name not in available]:
        raise UserError(
            f"`report_to` names {listed(missing)}, which is not installed. Run `pip install "
            f"{missing[0]}`, or pass --report-to none."
        )

    if options.get("push_to_hub"):
        from huggingface_hub import HfApi

        try:
            HfApi().whoami()
        except Exception as error:  # huggingface_hub and httpx raise several types
            raise UserError(
                f"`push_to_hub` needs a connection to the Hub and a valid token: "
                f"{one_line(error)}. Run `hf auth login`, or omit --push-to-hub."
            ) from error


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
        UserError: one of `fixed` was given otherwise; values that transformers refuses.
    """
    import torch

    if base is None:
        from transformers import TrainingArguments as base
    given = dict(given)
    if token := given.pop("hub_token", None):
        # Where huggingface_hub looks; Trainer writes its arguments into every checkpoint.
        os.environ["HF_TOKEN"] = token
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
    check_services(options)
    try:
        return base(output_dir=str(output_dir), **options)
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        raise UserError(f"Trainer's options: {one_line(error, 400)}") from error


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
