"""Options of transformers' Trainer: checks, defaults of the commands, and identity of a run."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, overload

from msgspec import Meta

from ..common.constants import WAIT_SECONDS
from ..common.errors import UserError, listed, one_line
from ..common.options import convert


if TYPE_CHECKING:
    from transformers import TrainingArguments

ArgumentsT = TypeVar("ArgumentsT", bound="TrainingArguments")

# For commands with `--compile`. Trainer's own compilation compiles the complete model, which then
# cannot use the kernels for packed batches.
BLOCKS_ONLY = {"torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None}

# A run resumes from checkpoints with the state of the optimizer, and `RunTrainer` must see losses
# that are not finite. Trainer would upload its output directory, which may contain the texts.
_FIXED = {
    "save_only_model": False,
    "logging_nan_inf_filter": False,
    "push_to_hub": False,
    "resume_from_checkpoint": None,
}

# Bounds of options that Trainer does not check. Values out of range fail after the work has begun.
_BOUNDS = {
    "num_train_epochs": Annotated[float, Meta(gt=0)],
    "per_device_train_batch_size": Annotated[int, Meta(ge=1)],
    "gradient_accumulation_steps": Annotated[int, Meta(ge=1)],
    "seed": Annotated[int, Meta(ge=0, lt=2**32)],
    "data_seed": Annotated[int, Meta(ge=0, lt=2**32)] | None,
    "warmup_ratio": Annotated[float, Meta(ge=0, lt=1)],
    "weight_decay": Annotated[float, Meta(ge=0)],
    "adam_beta1": Annotated[float, Meta(ge=0, lt=1)],
    "adam_beta2": Annotated[float, Meta(ge=0, lt=1)],
    "adam_epsilon": Annotated[float, Meta(ge=0)],
    "dataloader_num_workers": Annotated[int, Meta(ge=0)],
}


def check_trainer_options(options: Mapping[str, Any]) -> None:
    """Check options of Trainer that Trainer itself does not check.

    Raises:
        UserError: If a value is out of range.
    """
    convert({name: options[name] for name in _BOUNDS if name in options}, _BOUNDS)
    if options.get("max_steps") == 0:
        raise UserError(
            "`max_steps` must be at least 1, or -1 to train for `num_train_epochs`, got 0."
        )


def check_services(options: Mapping[str, Any]) -> None:
    """Check that the experiment trackers can be used, before any work is done.

    Args:
        options: Options of Trainer.

    Raises:
        UserError: If a tracker of `report_to` is not installed.
    """
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    # The error would otherwise appear after data and models are loaded.
    trackers = options.get("report_to") or []
    trackers = [trackers] if isinstance(trackers, str) else trackers
    available = {"none", "all", *get_available_reporting_integrations()}
    if missing := [name for name in trackers if name not in available]:
        raise UserError(
            f"`report_to` names {listed(missing)}, which is not installed. Run `pip install "
            f"{missing[0]}`, or pass --report-to none."
        )


@overload
def training_arguments(
    output_dir: str | Path, options: Mapping[str, Any], fixed: Mapping[str, Any]
) -> "TrainingArguments": ...


@overload
def training_arguments(
    output_dir: str | Path,
    options: Mapping[str, Any],
    fixed: Mapping[str, Any],
    base: type[ArgumentsT],
) -> ArgumentsT: ...


def training_arguments(
    output_dir: str | Path,
    options: Mapping[str, Any],
    fixed: Mapping[str, Any],
    base: Any = None,
) -> Any:
    """Return the TrainingArguments of a command.

    Without an accelerator `use_cpu` is set. Otherwise the processes of torchrun could not connect
    to each other.

    Args:
        output_dir: Directory of the checkpoints.
        options: Options of Trainer from the recipe and the command line.
        fixed: Options that the command sets, in addition to those of all commands.
        base: Class of the result, by default TrainingArguments.

    Raises:
        UserError: If the user has changed one of `fixed`, or transformers rejects a value.
    """
    import torch
    from transformers import TrainingArguments

    options = dict(options)
    if token := options.pop("hub_token", None):
        # Trainer writes its arguments into every checkpoint, so the token must not be one of them.
        # huggingface_hub reads the variable.
        os.environ["HF_TOKEN"] = token
    if "output_dir" in options:
        raise UserError("`output_dir` is set by this command. Pass --output instead.")

    fixed = {**_FIXED, **fixed}
    _check_fixed_options(options, fixed)
    # The user may override these two options, but not the fixed ones.
    defaults = {"use_cpu": not torch.accelerator.is_available(), "ddp_timeout": WAIT_SECONDS}
    values = {**defaults, **options, **fixed}
    check_trainer_options(values)
    check_services(values)

    if "warmup_steps" in values:
        # An explicit `warmup_ratio` of transformers 4 overrides a fraction, which may be a default.
        values = {**warmup_options(values.pop("warmup_steps")), **values}
    try:
        training = (base or TrainingArguments)(output_dir=str(output_dir), **values)
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        raise UserError(f"Trainer rejects its options: {one_line(error, 400)}.") from error
    _check_arguments(training)
    return training


def _check_fixed_options(options: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Check that the options of the user do not change those that the command sets.

    Args:
        options: Options of Trainer from the recipe and the command line.
        fixed: Options that the command sets.

    Raises:
        UserError: If an option has another value.
    """
    for name, value in fixed.items():
        # A recipe may set a fixed option to the value of the command.
        if name not in options or options[name] == value:
            continue

        # Some options have a substitute, which the message names.
        if name in BLOCKS_ONLY:
            raise UserError(
                f"`{name}` compiles the complete model, which then cannot pack its batches. Pass "
                "--compile, which compiles the blocks."
            )
        if name == "push_to_hub":
            raise UserError(
                "`push_to_hub` would upload the checkpoints and the prepared texts. Omit the "
                "option, and upload the model after the run: hf upload USER/NAME OUTPUT."
            )
        if name == "resume_from_checkpoint":
            raise UserError(
                "`resume_from_checkpoint` is not needed. Run the same command again to resume an "
                "interrupted run."
            )

        raise UserError(
            f"`{name}` is set to {value!r} by this command, got {options[name]!r}. Omit the option."
        )


def _check_arguments(training: "TrainingArguments") -> None:
    """Check arguments that Trainer accepts, but that fail or change the batches later.

    Raises:
        UserError: If the best checkpoint has no evaluation or no metric, or the process has several
            GPUs.
    """
    if training.save_strategy == "best" and training.eval_strategy == "no":
        raise UserError(
            "`save_strategy: best` needs evaluations during the training, got `eval_strategy: no`. "
            "Pass --save-strategy steps."
        )
    if training.save_strategy == "best" and training.metric_for_best_model is None:
        raise UserError(
            "`save_strategy: best` needs the name of a metric. Pass --metric-for-best-model."
        )
    # Trainer would use DataParallel: it multiplies the batch size by the number of GPUs, and splits
    # packed batches, which have a single row.
    if training.n_gpu > 1:
        raise UserError(
            f"a process must use one GPU, and {training.n_gpu} are visible. Set "
            "CUDA_VISIBLE_DEVICES=0 to use one of them, or start one process per GPU with "
            "`accelerate launch` or `torchrun`."
        )


def warmup_options(warmup_steps: float) -> dict[str, Any]:
    """Return the options of TrainingArguments for a warmup, in the installed transformers.

    transformers 4 has a separate option for a fraction of the steps, which version 5 removed.

    Args:
        warmup_steps: Number of warmup steps; a value below 1 is a fraction of all steps.
    """
    import transformers

    if int(transformers.__version__.partition(".")[0]) >= 5:
        return {"warmup_steps": warmup_steps}
    if 0 < warmup_steps < 1:
        return {"warmup_ratio": warmup_steps}
    return {"warmup_steps": math.floor(warmup_steps)}


# Prefixes of options of Trainer that affect neither results nor the order of the data. They may
# change when a run is resumed.
_NO_EFFECT_ON_RESULTS = (
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


def result_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of Trainer that the results of a run may depend on."""
    return {
        name: value for name, value in options.items() if not name.startswith(_NO_EFFECT_ON_RESULTS)
    }
