"""Test the files that `neobert pretrain` writes next to the weights.

Covers adaptation.md, which compares the final model with the initial model and its own tokenizer,
the model card, and defaults by model.
"""

import dataclasses
import json

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
    """A trained English model, and Spanish texts for training and validation."""
    spanish = ["los hombres cantan canciones", "las manzanas verdes caen", "el agua fría baja"]
    lines = [f"{spanish[i % 3]} {spanish[i % 2]}" for i in range(300)]
    (corpus / "spanish.txt").write_text("\n".join(lines) + "\n")
    (corpus / "spanish-validation.txt").write_text("\n".join(reversed(lines[:60])) + "\n")
    run_of(arguments_of(corpus, corpus / "start", max_steps=60, save_steps=60))
    return corpus / "start"


def _adapt(corpus, start, out, **more):
    sets = {"spanish": "spanish-validation.txt", "english": "validation.txt"}
    values = {
        "init_from": start,
        "model_config": None,
        "dataset": corpus / "spanish.txt",
        "prepared": out / "prepared",
        "validation": json.dumps({name: str(corpus / file) for name, file in sets.items()}),
        "max_steps": 12,
        "save_steps": 12,
    }
    return arguments_of(corpus, out, **values | more)


def test_the_page_says_what_was_won_and_lost(corpus, start, tmp_path, caplog):
    caplog.set_level("INFO")
    metrics = run_of(_adapt(corpus, start, tmp_path / "out"))
    given = run_of([*_adapt(corpus, start, tmp_path / "measured"), "--evaluate-only"])
    page = (tmp_path / "out" / "adaptation.md").read_text()
    assert "| validation text | initial model | after | change |" in page
    card = (tmp_path / "out" / "README.md").read_text()
    table = page.removeprefix("# Before and after\n\n")
    assert card.endswith(f"## Validation\n\n{table}")
    assert "/start` on `" in card and "/spanish.txt`." in card and "| steps | 12 |" in card
    for name in ("spanish", "english"):
        before, after = (values[f"eval_{name}_bits_per_character"] for values in (given, metrics))
        errors = [values[f"eval_{name}_bits_per_character_error"] for values in (given, metrics)]
        line = f"| {name} bits per character | {before:.3f} ± {errors[0]:.3f} |"
        line += f" {after:.3f} ± {errors[1]:.3f} | {after - before:+.3f} |"
        assert line in page and (after < before) is (name == "spanish"), page
    caplog.clear()
    assert run_of(_adapt(corpus, start, tmp_path / "out")) == metrics
    assert "the run has already finished" in caplog.text


def test_a_new_vocabulary_is_compared_with_the_given_model(corpus, start, tmp_path):
    """Check that forgetting is visible: changes are relative to the model with its own tokenizer.

    The reference values come from runs of their own that only measure.
    """
    arguments = ["--vocab-size", "192", "--output", str(tmp_path / "tokenizer")]
    assert cli.main(["tokenizer", str(corpus / "spanish.txt"), *arguments]) == 0
    new = {"tokenizer": tmp_path / "tokenizer", "init_embeddings": "transfer", "max_steps": 3}
    options = {**new, "model_config": json.dumps({"dropout": 0.1})}
    metrics = run_of(_adapt(corpus, start, tmp_path / "out", **options))
    given = run_of([*_adapt(corpus, start, tmp_path / "given"), "--evaluate-only"])
    untrained = run_of([*_adapt(corpus, start, tmp_path / "new", **new), "--evaluate-only"])

    page = (tmp_path / "out" / "adaptation.md").read_text()
    assert "| initial model, own tokenizer | untrained new rows | after | change |" in page
    for name in ("spanish", "english"):
        key = f"eval_{name}_bits_per_character"
        assert untrained[key.replace("eval", "start")] == given[key]
        cells = [
            f"{values[key]:.3f} ± {values[f'{key}_error']:.3f}"
            for values in (given, untrained, metrics)
        ]
        change = f"{metrics[key] - given[key]:+.3f}"
        assert f"| {name} bits per character | {' | '.join(cells)} | {change} |" in page
    # Masked accuracy of two vocabularies is not comparable.
    rows = [line for line in page.splitlines() if " masked accuracy | " in line]
    assert len(rows) == 2 and all(row.endswith("|  |") for row in rows)

    # Dropout follows the random state, which the additional measurement must not change.
    options["validation"] = None
    run_of(_adapt(corpus, start, tmp_path / "without", **options))
    logs = [log_of(tmp_path / name) for name in ("out", "without")]
    assert logs[0] == logs[1]


def test_a_text_that_the_old_vocabulary_cannot_represent(corpus, start, tmp_path):
    """Check that such a set has neither a value of the given model nor a change."""
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


def test_the_recipe_fits_a_small_model_on_a_cpu(corpus, start, tmp_path, monkeypatch):
    """Check the command of the README: nothing but the model, the texts and the output is set."""
    monkeypatch.chdir(tmp_path)
    given = ["recipes/adapt_domain.yaml", "--init-from", str(start), "--output", "out"]
    given += ["--dataset", str(corpus / "spanish.txt")]
    given += ["--validation", str(corpus / "spanish-validation.txt"), "--report-to", "none"]
    assert cli.main(["pretrain", *given]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    # 64 tokens are the model's context, 32 its hidden size.
    assert result["max_length"] == 64
    assert result["environment"]["dtype"] == "float32"
    assert result["learning_rate"] == pytest.approx(3e-4 * 768 / 32)
    tokens = int(load_prepared(tmp_path / "out" / "prepared" / "train").lengths.sum())
    assert result["steps"] == -(-3 * tokens // 4096)


def test_epochs_become_steps():
    assert schedule.steps_of_epochs(3, [1000, 200], [], 100) == 36
    assert schedule.steps_of_epochs(0.01, [1000], [], 100) == 1
    # The first source ends after 100 / 0.5 = 200 texts, before the second one after 400.
    assert schedule.steps_of_epochs(2, [100, 200], [0.5, 0.5], 64) == 7


def test_epochs_and_steps_are_both_limits(corpus, tmp_path):
    def steps(**more):
        run = pretrain.read_run(arguments_of(corpus, tmp_path, **more))
        tokenizer = load_tokenizer(str(ROOT / "tokenizer"))
        return resolve_options(run, None, tokenizer).training.max_steps

    assert steps(max_steps=7) == 7
    text = load_prepared(corpus / "prepared" / "train")
    assert steps(num_train_epochs=2, max_steps=10_000) == -(-2 * int(text.lengths.sum()) // 256)
    assert steps(num_train_epochs=2, max_steps=5) == 5
    texts = {"micro_batch_size": 6, "micro_batch_tokens": None, "gradient_accumulation_steps": 2}
    assert steps(num_train_epochs=2, max_steps=10_000, **texts) == 2 * 360 // 12
    with pytest.raises(UserError, match="`num_train_epochs` needs prepared text"):
        steps(num_train_epochs=2, streaming="true")


@pytest.mark.parametrize("hidden_size, expected", [(192, 1.2e-3), (768, 3e-4), (1024, 3e-4)])
def test_the_adaptation_learning_rate(hidden_size, expected):
    assert schedule.adaptation_learning_rate(hidden_size) == pytest.approx(expected)


def test_bf16_auto_follows_the_accelerator(corpus, tmp_path, monkeypatch):
    run = pretrain.read_run(arguments_of(corpus, tmp_path, bf16="auto"))
    assert not run.training.bf16
    monkeypatch.setattr(schedule, "supports_bf16", lambda: True)
    assert not pretrain.read_run(
        [*arguments_of(corpus, tmp_path, bf16="auto"), "--use-cpu"]
    ).training.bf16
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(schedule, "training_arguments", lambda output, given, fixed: _Given(given))
    assert schedule.make_training_arguments(run.options).bf16
    options = dataclasses.replace(run.options, trainer={"fp16": True})
    assert not schedule.make_training_arguments(options).bf16


class _Given:
    """TrainingArguments that accept bfloat16 on any machine."""

    n_gpu = 0

    def __init__(self, given):
        self.bf16 = given["bf16"]


def test_emulated_bf16_is_not_supported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    assert not schedule.supports_bf16()
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: not including_emulation
    )
    assert schedule.supports_bf16()


def test_a_run_without_a_start_has_no_page(corpus, tmp_path):
    run_of(arguments_of(corpus, tmp_path, max_steps=3, validation=corpus / "validation.txt"))
    assert not list(tmp_path.glob("adaptation*"))
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\n") and "pipeline_tag: fill-mask" in card
    assert "trained from random weights on `" in card
    assert "| untrained model | after |" in card and "| bits per character |" in card
