"""Test the adaptation of a model to other texts with `neobert pretrain`.

Covers `adaptation.md`, which compares the final model with the initial model, the model card, and
the defaults that depend on the model, the texts and the device.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch


pytest.importorskip("datasets")
pytest.importorskip("accelerate")

from helpers.paths import ROOT
from helpers.pretrain_runs import arguments_of, log_of, make_corpus, run_of  # noqa: F401

from neobert import cli
from neobert.common.errors import UserError
from neobert.common.loading import load_tokenizer
from neobert.pretraining import command as pretrain
from neobert.pretraining import schedule
from neobert.pretraining.prepared import load_prepared
from neobert.pretraining.run import resolve_options


@pytest.fixture(scope="module", name="start")
def make_start(corpus):
    """Return the output directory of a model trained on English, and write Spanish texts."""
    spanish = ["los hombres cantan canciones", "las manzanas verdes caen", "el agua fría baja"]
    lines = [f"{spanish[i % 3]} {spanish[i % 2]}" for i in range(300)]
    (corpus / "spanish.txt").write_text("\n".join(lines) + "\n")
    (corpus / "spanish-validation.txt").write_text("\n".join(reversed(lines[:60])) + "\n")

    run_of(arguments_of(corpus, corpus / "start", max_steps=60, save_steps=60))
    return corpus / "start"


def _adapt(corpus, start, out, **overrides):
    """Return the command line of a run that adapts the English model to Spanish.

    The run has a Spanish and an English validation set.
    """
    validation_files = {"spanish": "spanish-validation.txt", "english": "validation.txt"}
    options = {
        "init_from": start,
        "model_config": None,
        "dataset": corpus / "spanish.txt",
        "prepared": out / "prepared",
        "validation": json.dumps(
            {name: str(corpus / file) for name, file in validation_files.items()}
        ),
        "max_steps": 12,
        "save_steps": 12,
    }
    return arguments_of(corpus, out, **options | overrides)


def test_adaptation_table_compares_initial_and_final_metrics(corpus, start, tmp_path, caplog):
    """Check the table of adaptation.md, which is repeated in the model card.

    The initial metrics are those of a separate run with `--evaluate-only`. The model must improve
    on Spanish and get worse on English.
    """
    caplog.set_level("INFO")
    final_metrics = run_of(_adapt(corpus, start, tmp_path / "out"))
    initial_metrics = run_of([*_adapt(corpus, start, tmp_path / "measured"), "--evaluate-only"])

    page = (tmp_path / "out" / "adaptation.md").read_text()
    assert "| metric | initial model | after | change |" in page
    card = (tmp_path / "out" / "README.md").read_text()
    table = page.removeprefix("# Before and after\n\n")
    assert card.endswith(f"## Validation\n\n{table}")
    assert "/start` on `" in card and "/spanish.txt`." in card and "| steps | 12 |" in card

    for name in ("spanish", "english"):
        before, after = (
            metrics[f"eval_{name}_bits_per_character"]
            for metrics in (initial_metrics, final_metrics)
        )
        errors = [
            metrics[f"eval_{name}_bits_per_character_error"]
            for metrics in (initial_metrics, final_metrics)
        ]
        line = f"| {name} bits per character | {before:.3f} ± {errors[0]:.3f} |"
        line += f" {after:.3f} ± {errors[1]:.3f} | {after - before:+.3f} |"
        assert line in page and (after < before) is (name == "spanish"), page

    # The command of a finished run returns the metrics of that run.
    caplog.clear()
    assert run_of(_adapt(corpus, start, tmp_path / "out")) == final_metrics
    assert "the run has already finished" in caplog.text


def test_new_vocabulary_is_compared_with_the_initial_model(corpus, start, tmp_path):
    """Check that changes are relative to the initial model with its original tokenizer.

    Relative to the untrained new embeddings, the table would not show what the model has forgotten.
    The reference values come from separate runs with `--evaluate-only`.
    """
    arguments = ["--vocab-size", "192", "--output", str(tmp_path / "tokenizer")]
    assert cli.main(["tokenizer", str(corpus / "spanish.txt"), *arguments]) == 0
    transfer_options = {
        "tokenizer": tmp_path / "tokenizer",
        "init_embeddings": "transfer",
        "max_steps": 3,
    }
    options = {**transfer_options, "model_config": json.dumps({"dropout": 0.1})}

    final_metrics = run_of(_adapt(corpus, start, tmp_path / "out", **options))
    initial_metrics = run_of([*_adapt(corpus, start, tmp_path / "given"), "--evaluate-only"])
    untrained_metrics = run_of(
        [*_adapt(corpus, start, tmp_path / "new", **transfer_options), "--evaluate-only"]
    )

    page = (tmp_path / "out" / "adaptation.md").read_text()
    assert "| initial model, own tokenizer | untrained new rows | after | change |" in page
    for name in ("spanish", "english"):
        key = f"eval_{name}_bits_per_character"
        assert untrained_metrics[key.replace("eval", "start")] == initial_metrics[key]
        cells = [
            f"{metrics[key]:.3f} ± {metrics[f'{key}_error']:.3f}"
            for metrics in (initial_metrics, untrained_metrics, final_metrics)
        ]
        change = f"{final_metrics[key] - initial_metrics[key]:+.3f}"
        assert f"| {name} bits per character | {' | '.join(cells)} | {change} |" in page

    # The masked accuracies of two vocabularies are not comparable, so the table has no change.
    rows = [line for line in page.splitlines() if " masked accuracy | " in line]
    assert len(rows) == 2 and all(row.endswith("|  |") for row in rows)

    # Dropout depends on the random state, which the evaluation before training must not change.
    options["validation"] = None
    run_of(_adapt(corpus, start, tmp_path / "without", **options))
    logs = [log_of(tmp_path / name) for name in ("out", "without")]
    assert logs[0] == logs[1]


def test_no_initial_value_for_text_outside_the_old_vocabulary(corpus, start, tmp_path):
    """Check that the table has neither an initial value nor a change for such a validation set."""
    (corpus / "signs.txt").write_text("\u0aa0 \u0aa0\u0aa2 \u0aa2\n" * 200)
    (corpus / "signs-validation.txt").write_text("\u0aa0\u0aa2 \u0aa2 \u0aa0\n" * 20)
    arguments = ["--vocab-size", "192", "--output", str(tmp_path / "tokenizer")]
    assert cli.main(["tokenizer", str(corpus / "signs.txt"), *arguments]) == 0

    options = {
        "dataset": corpus / "signs.txt",
        "validation": corpus / "signs-validation.txt",
        "tokenizer": tmp_path / "tokenizer",
        "init_embeddings": "transfer",
        "max_steps": 3,
    }
    run_of(_adapt(corpus, start, tmp_path / "out", **options))

    (line,) = (
        line
        for line in (tmp_path / "out" / "adaptation.md").read_text().splitlines()
        if "bits per character |" in line
    )
    assert line.startswith("| bits per character | - |") and line.endswith("|  |"), line


def test_recipe_defaults_for_a_small_model_on_cpu(corpus, start, tmp_path, monkeypatch):
    """Check the command of the README, which sets only the model, the texts and the output.

    The recipe derives the maximum length, the dtype, the learning rate and the number of steps.
    """
    monkeypatch.chdir(tmp_path)
    arguments = ["recipes/adapt_domain.yaml", "--init-from", str(start), "--output", "out"]
    arguments += ["--dataset", str(corpus / "spanish.txt")]
    arguments += ["--validation", str(corpus / "spanish-validation.txt"), "--report-to", "none"]
    assert cli.main(["pretrain", *arguments]) == 0

    result = json.loads((tmp_path / "out" / "result.json").read_text())
    # The model has a context length of 64 tokens and a hidden size of 32.
    assert result["max_length"] == 64
    assert result["environment"]["dtype"] == "float32"
    assert result["learning_rate"] == pytest.approx(3e-4 * 768 / 32)
    # The texts of 5,450 tokens form two batches per epoch.
    texts = load_prepared(tmp_path / "out" / "prepared" / "train")
    assert result["steps"] == 3 * _batches_per_epoch(texts, 4096, seed=0, max_length=64) == 6


def test_epochs_are_converted_to_steps():
    """Check the conversion of epochs to optimizer steps, which is rounded up."""
    assert schedule.steps_of_epochs(3, [1000, 200], [], 100) == 36
    assert schedule.steps_of_epochs(0.01, [1000], [], 100) == 1
    # The first source is exhausted after 100 / 0.5 = 200 texts, and the second one after 400. The
    # epoch ends with the first source.
    assert schedule.steps_of_epochs(2, [100, 200], [0.5, 0.5], 64) == 7


def _batches_per_epoch(texts, batch_tokens, seed=7, max_length=32):
    """Return the number of batches of complete texts of the first epoch, in a loop over them."""
    order = np.arange(len(texts.lengths), dtype=np.uint32)
    np.random.default_rng([seed, 0, 0]).shuffle(order)
    count = 1
    size = 0
    for length in texts.lengths[order].clip(max=max_length).tolist():
        if size + length > batch_tokens:
            count += 1
            size = 0
        size += length
    return count


def test_run_ends_at_the_lower_of_max_steps_and_epochs(corpus, tmp_path):
    """Check that a run ends at the lower limit of `max_steps` and `num_train_epochs`."""

    def steps(**overrides):
        run = pretrain.read_run(arguments_of(corpus, tmp_path, **overrides))
        tokenizer = load_tokenizer(str(ROOT / "tokenizer"))
        return resolve_options(run, None, tokenizer).training.max_steps

    assert steps(max_steps=7) == 7
    texts = load_prepared(corpus / "prepared" / "train")
    # Batches of complete sequences have fewer than 256 tokens, so there are more of them.
    count = _batches_per_epoch(texts, 256)
    assert count > -(-int(texts.lengths.sum()) // 256)
    assert steps(num_train_epochs=2, max_steps=10_000) == 2 * count
    assert steps(num_train_epochs=2, max_steps=5) == 5

    # The size of a batch is a number of texts, and the corpus has 360 texts.
    batch_options = {
        "micro_batch_size": 6,
        "micro_batch_tokens": None,
        "gradient_accumulation_steps": 2,
    }
    assert steps(num_train_epochs=2, max_steps=10_000, **batch_options) == 2 * 360 // 12
    # The last micro-batch of an epoch is smaller: 360 texts are 52 micro-batches of 7.
    smaller = {**batch_options, "micro_batch_size": 7, "gradient_accumulation_steps": 1}
    assert steps(num_train_epochs=2, max_steps=10_000, **smaller) == 2 * 52

    # A text of n tokens without [CLS] and [SEP] is split into windows of 6 tokens.
    batch_options |= {"long_texts": "split", "max_length": 8}
    window_count = sum(-(-(length - 2) // 6) for length in texts.lengths.tolist())
    assert window_count > 360
    expected = -(-2 * -(-window_count // 6) // 2)
    assert steps(num_train_epochs=2, max_steps=10_000, **batch_options) == expected

    with pytest.raises(UserError, match="`num_train_epochs` needs prepared text"):
        steps(num_train_epochs=2, streaming="true")


def test_epochs_of_weighted_sources_of_different_lengths(tmp_path):
    """Check that an epoch reads every text once if both sources have as many texts as their weight.

    The texts of the sources have 4 and 12 tokens, and a micro-batch has at most 256 tokens.
    """
    for name, words in (("short", 2), ("long", 10)):
        (tmp_path / f"{name}.txt").write_text(f"{'the ' * words}\n" * 200)
    sources = [{"name": str(tmp_path / f"{name}.txt"), "weight": 1} for name in ("short", "long")]
    arguments = arguments_of(
        tmp_path,
        tmp_path / "out",
        dataset=json.dumps(sources),
        num_train_epochs=1,
        max_steps=10_000,
    )
    tokenizer = load_tokenizer(str(ROOT / "tokenizer"))
    run = resolve_options(pretrain.read_run(arguments), None, tokenizer)
    assert run.training.max_steps == math.ceil(200 * (4 + 12) / 256)


@pytest.mark.parametrize("short_texts", [200, 10])
def test_reported_epochs_are_those_of_the_option(tmp_path, caplog, short_texts):
    """The printed and logged epochs of weighted sources end with the first source.

    The two sources have 4 tokens per text and different numbers of texts. An epoch of the order
    contains at least 100 texts of each source, so 10 texts are repeated.
    """
    for name, texts in (("short", short_texts), ("long", 400)):
        (tmp_path / f"{name}.txt").write_text("the the\n" * texts)
    sources = [{"name": str(tmp_path / f"{name}.txt"), "weight": 1} for name in ("short", "long")]
    options = {"num_train_epochs": 2, "max_steps": 10_000, "micro_batch_tokens": None}
    options |= {"micro_batch_size": 10, "dataset": json.dumps(sources)}
    caplog.set_level("INFO")
    run_of(arguments_of(tmp_path, tmp_path / "out", **options))

    steps = 2 * 2 * short_texts // 10
    assert f"{steps} steps, 2 epochs" in caplog.text
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    last = [record for record in log if "loss" in record][-1]
    assert (last["step"], last["epoch"]) == (steps, pytest.approx(2))


def test_evaluation_without_validation_texts_is_refused(corpus, tmp_path):
    """The error appears before texts are prepared."""
    arguments = arguments_of(corpus, tmp_path, validation=None)
    with pytest.raises(UserError, match="`eval_strategy` is steps, but there are no validation"):
        pretrain.read_run([*arguments, "--eval-strategy", "steps"])


def test_unknown_scheduler_options_are_reported(corpus, tmp_path, capsys):
    arguments = [*arguments_of(corpus, tmp_path), "--lr-scheduler-kwargs", "{foo: 1}"]
    assert cli.main(["pretrain", *arguments]) == 2
    message = "`lr_scheduler_type` warmup_stable_decay does not accept `lr_scheduler_kwargs`"
    assert message in capsys.readouterr().err


def test_scheduler_options_without_a_scheduler_change_the_default(corpus, tmp_path):
    """Check that `lr_scheduler_kwargs` without a type override values of the paper's schedule."""
    arguments = [*arguments_of(corpus, tmp_path), "--lr-scheduler-kwargs"]
    training = pretrain.read_run([*arguments, "{min_lr_ratio: 0.5}"]).training
    expected = schedule.paper_schedule(8, 2)["lr_scheduler_kwargs"] | {"min_lr_ratio": 0.5}
    assert training.lr_scheduler_type == "warmup_stable_decay"
    assert training.lr_scheduler_kwargs == expected
    with pytest.raises(UserError, match="`lr_scheduler_kwargs` must be a mapping, got 'half'"):
        pretrain.read_run([*arguments, "half"])


def test_warmup_ratio_of_transformers_4(corpus, tmp_path, monkeypatch):
    """Check that `warmup_ratio`, which transformers 5 lacks, determines the warmup steps."""
    settings = {}
    monkeypatch.setattr(
        schedule,
        "training_arguments",
        lambda output, values, fixed: settings.update(values) or _FakeTrainingArguments(values),
    )
    options = pretrain.read_run(arguments_of(corpus, tmp_path)).options
    for values, steps in (
        ({"warmup_ratio": 0.5}, 4),
        ({"warmup_ratio": 0.5, "warmup_steps": 0}, 4),
        ({"warmup_ratio": 0.5, "warmup_steps": 3}, 3),
        ({"warmup_ratio": 0.0}, 0),
    ):
        schedule.make_training_arguments(dataclasses.replace(options, trainer=values))
        assert settings["warmup_steps"] == steps, values


def test_tokens_are_counted_by_the_command_alone(corpus, tmp_path):
    """Check that Trainer's own count, which would be added to that of the command, is refused."""
    arguments = [*arguments_of(corpus, tmp_path), "--include-num-input-tokens-seen", "all"]
    with pytest.raises(UserError, match="`include_num_input_tokens_seen` is set to False by this"):
        pretrain.read_run(arguments)


@pytest.mark.parametrize("hidden_size, expected", [(192, 1.2e-3), (768, 3e-4), (1024, 3e-4)])
def test_the_adaptation_learning_rate(hidden_size, expected):
    """Check that the default learning rate is higher for models smaller than NeoBERT."""
    assert schedule.adaptation_learning_rate(hidden_size) == pytest.approx(expected)


def test_bf16_auto_follows_the_accelerator(corpus, tmp_path, monkeypatch):
    """Check that `bf16: auto` selects bfloat16 on an accelerator, unless fp16 or the CPU is set."""
    run = pretrain.read_run(arguments_of(corpus, tmp_path, bf16="auto"))
    assert not run.training.bf16

    monkeypatch.setattr(schedule, "supports_bf16", lambda: True)
    assert not pretrain.read_run(
        [*arguments_of(corpus, tmp_path, bf16="auto"), "--use-cpu"]
    ).training.bf16

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        schedule,
        "training_arguments",
        lambda output, settings, fixed: _FakeTrainingArguments(settings),
    )
    assert schedule.make_training_arguments(run.options).bf16
    options = dataclasses.replace(run.options, trainer={"fp16": True})
    assert not schedule.make_training_arguments(options).bf16


class _FakeTrainingArguments:
    """Replacement for TrainingArguments, which reject bfloat16 on a machine that lacks it."""

    n_gpu = 0
    eval_strategy = "no"

    def __init__(self, settings):
        self.bf16 = settings["bf16"]


def test_emulated_bf16_is_not_supported(monkeypatch):
    """Check that a GPU which only emulates bfloat16 does not count as supporting it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    assert not schedule.supports_bf16()
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: not including_emulation
    )
    assert schedule.supports_bf16()


def test_no_adaptation_page_without_init_from(corpus, tmp_path):
    """Check that a run from random weights has its metrics in the model card only."""
    arguments = arguments_of(corpus, tmp_path, max_steps=3, validation=corpus / "validation.txt")
    run_of([*arguments, "--mask-schedule", "0.3", "0.15"])
    assert not list(tmp_path.glob("adaptation*"))
    card = (tmp_path / "README.md").read_text()
    assert "| masked tokens | 30% to 15% |" in card
    assert card.startswith("---\n") and "pipeline_tag: fill-mask" in card
    assert "trained from random weights on `" in card
    assert "| untrained model | after |" in card and "| bits per character |" in card
