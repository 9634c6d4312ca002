"""Tests of the checks of Trainer's options, which run before a command loads data or models."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
import transformers

from neobert.common import options as common_options
from neobert.common.errors import UserError
from neobert.contrastive import command as contrastive_command
from neobert.contrastive.options import OPTIONS as CONTRASTIVE
from neobert.finetuning import trainer as finetuning_trainer
from neobert.finetuning.finetune_options import FINETUNE
from neobert.finetuning.options import OPTIONS as FINETUNING
from neobert.pretraining import schedule
from neobert.pretraining.options import OPTIONS as PRETRAINING
from neobert.training import options as training_options
from neobert.training.options import result_options, training_arguments, warmup_options


def test_a_tracker_that_is_not_installed_is_refused(tmp_path):
    """Check that an experiment tracker that is not installed raises an error."""
    output = tmp_path / "out"
    with pytest.raises(UserError, match="names swanlab, which is not installed. Run `pip install"):
        training_arguments(output, {"report_to": ["none", "swanlab"]}, {})
    assert training_arguments(output, {"report_to": "none"}, {}).report_to == []
    assert not output.exists()


def test_push_to_hub_is_refused(tmp_path):
    """Check that `push_to_hub` is refused: Trainer would upload the prepared texts, too."""
    with pytest.raises(UserError, match="prepared texts.*hf upload USER/NAME OUTPUT"):
        training_arguments(tmp_path / "out", {"push_to_hub": True}, {})
    assert not (tmp_path / "out").exists()


def test_resume_from_checkpoint_is_refused(tmp_path):
    """Runs resume by themselves, so the option would have no effect."""
    with pytest.raises(UserError, match="`resume_from_checkpoint` is not needed. Run the same"):
        training_arguments(tmp_path / "out", {"resume_from_checkpoint": "checkpoint-2"}, {})


def test_several_visible_gpus_are_refused(tmp_path, monkeypatch):
    """Trainer would use DataParallel, which multiplies the batch size."""
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(UserError, match="one GPU, and 2 are visible. Set CUDA_VISIBLE_DEVICES=0"):
        training_arguments(tmp_path / "out", {}, {})


def test_negative_data_seed_is_refused(tmp_path):
    with pytest.raises(UserError, match="`data_seed` must be an integer, at least 0"):
        training_arguments(tmp_path / "out", {"data_seed": -1}, {})


@pytest.mark.parametrize(
    ("parser", "fixed"),
    [
        (FINETUNE, finetuning_trainer.FIXED),
        (FINETUNING["glue"], finetuning_trainer.FIXED),
        (CONTRASTIVE["contrastive"], contrastive_command.FIXED),
        (PRETRAINING["pretrain"], {**schedule._FIXED}),
    ],
    ids=["finetune", "glue", "contrastive", "pretrain"],
)
def test_help_omits_options_that_a_command_sets(parser, fixed):
    """`--help` has no option that the command would refuse."""
    # `--help` describes --compile instead of Trainer's compilation, which it lists for distill.
    names = {*training_options._FIXED, *fixed} - set(training_options.BLOCKS_ONLY)
    words = set(re.findall(r"--[a-z0-9-]+", parser.help()))
    assert not words & {"--" + name.replace("_", "-") for name in names}
    assert names <= {*common_options.SET_BY_COMMANDS, *parser.trainer_replaced}


@pytest.mark.parametrize(
    ("parser", "option", "replacement"),
    [
        (FINETUNING["glue"], "--seed", "--seeds"),
        (FINETUNING["glue"], "--warmup-steps", "--warmup-ratio"),
        (FINETUNING["glue"], "--per-device-train-batch-size", "--batch-size"),
        (PRETRAINING["pretrain"], "--per-device-train-batch-size", "--micro-batch-size"),
        (PRETRAINING["pretrain"], "--per-device-eval-batch-size", "--micro-batch-size"),
        (PRETRAINING["pretrain"], "--eval-on-start", "--validation"),
    ],
)
def test_replaced_options_are_refused(parser, option, replacement):
    """The message about an option that the command sets names the option to use instead."""
    assert replacement in parser.help() and f"{option} " not in parser.help()
    is_glue = parser is FINETUNING["glue"]
    arguments = ["--model", "m", "--task", "rte"] if is_glue else ["--dataset", "a.txt"]
    message = f"`{option}` is set by this command. Use {replacement}[.,]"
    with pytest.raises(UserError, match=message):
        parser.read([*arguments, "--output", "o", option, "1"])


def test_training_arguments(tmp_path, monkeypatch):
    """Check that options, fixed options and the default of `use_cpu` are combined."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    options = {"max_steps": 3, "seed": 5, "hub_token": "hf_secret"}
    args = training_arguments(tmp_path, options, {"seed": 5, "use_cpu": True})
    assert (args.max_steps, args.seed, args.use_cpu, args.output_dir) == (3, 5, True, str(tmp_path))
    assert not args.save_only_model and not args.logging_nan_inf_filter
    # The token must not be an argument, because Trainer writes its arguments to every checkpoint.
    assert args.hub_token is None and os.environ["HF_TOKEN"] == "hf_secret"

    monkeypatch.delenv("HF_TOKEN")
    args = training_arguments(tmp_path, {"report_to": "none"}, {})
    assert args.use_cpu is not torch.accelerator.is_available()
    assert not list(tmp_path.iterdir()), "no file must be written"


@pytest.mark.parametrize(
    "version, warmup_steps, options",
    [
        ("4.57.6", 0.1, {"warmup_ratio": 0.1}),
        ("4.57.6", 3.0, {"warmup_steps": 3}),
        ("4.57.6", 0.0, {"warmup_steps": 0}),
        ("5.24.0", 0.1, {"warmup_steps": 0.1}),
        ("5.24.0", 3.0, {"warmup_steps": 3.0}),
    ],
)
def test_warmup_options_of_both_major_versions(monkeypatch, version, warmup_steps, options):
    """transformers 4 requires an integer in `warmup_steps`, and a fraction in `warmup_ratio`."""
    monkeypatch.setattr(transformers, "__version__", version)
    result = warmup_options(warmup_steps)
    assert result == options
    assert version[0] == "5" or not isinstance(result.get("warmup_steps"), float)


def test_warmup_steps_may_be_a_fraction(tmp_path, monkeypatch):
    """A command passes its warmup in the form of the installed version of transformers."""
    args = training_arguments(tmp_path, {"warmup_steps": 0.1, "report_to": "none"}, {})
    assert args.get_warmup_steps(50) == 5

    calls = []

    def arguments(**values):
        calls.append(values)
        return SimpleNamespace(n_gpu=0, save_strategy="no")

    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    training_arguments(tmp_path, {"warmup_steps": 0.1, "warmup_ratio": 0.2}, {}, base=arguments)
    training_arguments(tmp_path, {"warmup_steps": 0.1}, {}, base=arguments)
    assert [values["warmup_ratio"] for values in calls] == [0.2, 0.1]
    assert not any("warmup_steps" in values for values in calls)


def test_command_line_accepts_a_fraction_with_the_types_of_transformers_4(monkeypatch):
    """`--warmup-steps` is a number, although transformers 4 declares an integer."""
    types = {**transformers.TrainingArguments.__annotations__, "warmup_steps": int}
    monkeypatch.setattr(transformers.TrainingArguments, "__annotations__", types)
    words = "rows.csv --text-column a --label-column b --model m --output o --warmup-steps 0.05"
    assert FINETUNE.read(words.split()).trainer["warmup_steps"] == 0.05


@pytest.mark.parametrize(
    "options, words",
    [
        ({"output_dir": "x"}, "`output_dir` is set by this command. Pass --output instead"),
        ({"bf16": True}, "`bf16` is set to False by this command, got True. Omit the option"),
        ({"load_best_model_at_end": True, "eval_strategy": "no"}, "load_best_model_at_end"),
        (
            {"gradient_accumulation_steps": 0},
            "`gradient_accumulation_steps` must be an integer, at",
        ),
        ({"num_train_epochs": 0.0}, "`num_train_epochs` must be a number, greater than 0, got 0.0"),
        ({"save_only_model": True}, "`save_only_model` is set to False by this command, got True"),
        ({"logging_nan_inf_filter": True}, "`logging_nan_inf_filter` is set to False by this"),
        ({"warmup_ratio": 1.0}, "`warmup_ratio` must be a number, at least 0"),
        ({"max_steps": 0}, "`max_steps` must be at least 1, or -1 to train for"),
        ({"adam_beta2": 1.0}, "`adam_beta2` must be a number, at least 0 and less than 1, got 1.0"),
        ({"weight_decay": -0.1}, "`weight_decay` must be a number, at least 0, got -0.1"),
        ({"dataloader_num_workers": -1}, "`dataloader_num_workers` must be an integer, at least 0"),
    ],
)
def test_invalid_trainer_options_are_rejected(tmp_path, options, words):
    """Check that options that are fixed, out of range or rejected by Trainer raise an error."""
    with pytest.raises(UserError, match=words):
        training_arguments(tmp_path, options, {"bf16": False})


def test_only_options_that_affect_results_identify_a_run():
    """Check that only options that may affect the results identify a run.

    All other options may change when a run is resumed.
    """
    changeable = {"output_dir": "a", "logging_steps": 1, "save_steps": 2, "report_to": "none"}
    changeable |= {"dataloader_num_workers": 3, "push_to_hub": True}
    identifying = {
        "learning_rate": 1e-4,
        "seed": 1,
        "per_device_train_batch_size": 8,
        "max_steps": 3,
    }
    identifying |= {"bf16": True, "max_grad_norm": 1.0, "dataloader_drop_last": True}
    assert result_options({**changeable, **identifying}) == identifying


def test_save_strategy_best_needs_evaluations_and_a_metric(tmp_path):
    options = {"save_strategy": "best"}
    with pytest.raises(UserError, match="needs evaluations during the training, got `eval_str"):
        training_arguments(tmp_path / "out", {**options, "metric_for_best_model": "loss"}, {})
    with pytest.raises(UserError, match="needs the name of a metric"):
        training_arguments(tmp_path / "out", {**options, "eval_strategy": "epoch"}, {})
