"""Pins what a run with init_from leaves, adaptation.md: gains and losses against the model that was
given, with its own tokenizer, also where the run replaces the vocabulary."""

import json

import pytest


pytest.importorskip("datasets")
pytest.importorskip("accelerate")

import torch
from pretrain_runs import arguments_of, make_corpus, run_of  # noqa: F401

from neobert import __main__ as cli
from neobert.pretraining.heldout import evaluate_batches


@pytest.fixture(scope="module", name="start")
def make_start(corpus):
    """A trained English model, and Spanish text for training and held out."""
    spanish = ["los hombres cantan canciones", "las manzanas verdes caen", "el agua fría baja"]
    lines = [f"{spanish[i % 3]} {spanish[i % 2]}" for i in range(300)]
    (corpus / "spanish.txt").write_text("\n".join(lines) + "\n")
    (corpus / "spanish-heldout.txt").write_text("\n".join(reversed(lines[:60])) + "\n")
    run_of(arguments_of(corpus, corpus / "start", max_steps=60, save_steps=60))
    tokenizer = ["--vocab-size", "192", "--output", str(corpus / "tokenizer")]
    assert cli.main(["tokenizer", str(corpus / "spanish.txt"), *tokenizer]) == 0
    return corpus / "start"


def _adapt(corpus, start, out, **more):
    heldout = {name: str(corpus / f"{name}heldout.txt") for name in ("spanish-", "")}
    return arguments_of(
        corpus,
        out,
        **{
            "init_from": start,
            "model_config": None,
            "dataset": corpus / "spanish.txt",
            "prepared": out / "prepared",
            "heldout": json.dumps({"spanish": heldout["spanish-"], "english": heldout[""]}),
            "max_steps": 12,
            "save_steps": 12,
            **more,
        },
    )


def _figures(out):
    return json.loads((out / "adaptation.json").read_text())["sets"]


def test_the_page_says_what_was_won_and_lost(corpus, start, tmp_path, capsys):
    out = tmp_path / "out"
    steps = {"eval_strategy": "steps", "eval_steps": 4}
    metrics = run_of(_adapt(corpus, start, out, **steps))
    start_metrics = run_of([*_adapt(corpus, start, tmp_path / "measured"), "--measure"])
    for name, measures in _figures(out).items():
        for measure in ("bits_per_character", "masked_accuracy"):
            values = measures[measure]
            assert values["given"] == start_metrics[f"eval_{name}_{measure}"]
            assert values["after"] == metrics[f"eval_{name}_{measure}"]
    bits = {name: measures["bits_per_character"] for name, measures in _figures(out).items()}
    assert bits["spanish"]["after"] < bits["spanish"]["given"]
    assert bits["english"]["after"] > bits["english"]["given"]
    page = (out / "adaptation.md").read_text()
    change = 100 * (bits["english"]["after"] / bits["english"]["given"] - 1)
    assert "Gained on spanish: " in page
    assert f"Lost on english: {change:.1f} % more bits a character." in page
    assert "untrained" not in page, "the vocabulary is the same"
    unigram = metrics["eval_english_unigram_accuracy"]
    assert f"| english | always the most frequent token | {unigram:.3f} | {unigram:.3f} |" in page
    curve = json.loads((out / "adaptation.json").read_text())["curve"]
    assert sorted({record["step"] for record in curve}) == [0, 4, 8, 12]
    capsys.readouterr()
    assert run_of(_adapt(corpus, start, out, **steps)) == metrics
    assert "finished already" in capsys.readouterr().err


def test_another_vocabulary_is_compared_with_the_model_given(corpus, start, tmp_path):
    """New rows are bad at English before the first step, so that the run seems to gain there; the
    model that was given was better."""
    new = {"tokenizer": corpus / "tokenizer", "init_embeddings": "transplant"}
    out = tmp_path / "out"
    english = {"name": str(corpus / "train.txt"), "weight": 0.25}
    spanish = {"name": str(corpus / "spanish.txt"), "weight": 0.75}
    given = {**new, "dataset": json.dumps([spanish, english]), "max_steps": 24, "save_steps": 12}
    metrics = run_of(_adapt(corpus, start, out, **given))
    alone = run_of([*_adapt(corpus, start, tmp_path / "measured"), "--measure"])
    both = run_of([*_adapt(corpus, start, tmp_path / "both", **given), "--measure"])
    for name, measures in _figures(out).items():
        values = measures["bits_per_character"]
        assert values["given"] == alone[f"eval_{name}_bits_per_character"]
        assert values["given"] == both[f"start_{name}_bits_per_character"]
        assert values["untrained"] == both[f"eval_{name}_bits_per_character"]
        assert values["after"] == metrics[f"eval_{name}_bits_per_character"]
    english = _figures(out)["english"]["bits_per_character"]
    assert english["given"] < english["after"] < english["untrained"]
    page = (out / "adaptation.md").read_text()
    assert "Lost on english" in page and "Gained on spanish" in page
    assert "| the model given | with its new rows, untrained | after |" in page


def test_a_text_that_the_old_vocabulary_cannot_read(corpus, start, tmp_path):
    """It has no figure of the model given, and no gain."""
    (corpus / "signs.txt").write_text("ઠ ઠઢ ઢ ઠ ઢઠ\n" * 200)
    (corpus / "signs-heldout.txt").write_text("ઠઢ ઢઠ ઢ ઠ\n" * 20)
    tokenizer = tmp_path / "tokenizer"
    arguments = ["--vocab-size", "192", "--output", str(tokenizer)]
    assert cli.main(["tokenizer", str(corpus / "signs.txt"), *arguments]) == 0
    heldout = json.dumps({"signs": str(corpus / "signs-heldout.txt")})
    more = {"dataset": corpus / "signs.txt", "heldout": heldout, "tokenizer": tokenizer}
    out = tmp_path / "out"
    run_of(_adapt(corpus, start, out, **more, init_embeddings="transplant", max_steps=3))
    bits = _figures(out)["signs"]["bits_per_character"]
    assert bits["given"] is None and bits["after"] > 0
    page = (out / "adaptation.md").read_text()
    assert "| signs | bits a character | - |" in page and "Gained" not in page


def test_a_run_without_a_start_has_no_page(corpus, tmp_path):
    run_of(arguments_of(corpus, tmp_path, max_steps=3, heldout=corpus / "heldout.txt"))
    assert not list(tmp_path.glob("adaptation*"))


def test_errors_are_those_of_ratios_over_batches():
    """Against the textbook's formula: residuals a - r b over the batches, n / (n - 1)."""
    rng = torch.Generator().manual_seed(0)
    batches, rows = [], []
    for count in (4, 7, 2, 5, 9):
        labels = torch.randint(0, 6, (1, count), generator=rng)
        batches.append({"labels": labels, "logits": torch.randn(1, count, 6, generator=rng)})

    class Answers(torch.nn.Module):
        def forward(self, labels, logits):
            loss = torch.nn.functional.cross_entropy(logits[0], labels[0])
            return type("Output", (), {"loss": loss, "logits": logits})

    characters = torch.tensor([1, 2, 3, 1, 4, 2])
    metrics = evaluate_batches(Answers(), batches, "cpu", characters=characters)
    for batch in batches:
        loss = torch.nn.functional.cross_entropy(
            batch["logits"][0].double(), batch["labels"][0], reduction="sum"
        )
        right = (batch["logits"].argmax(-1) == batch["labels"]).sum()
        lengths = characters[batch["labels"]].sum()
        rows.append([float(loss) / 0.6931471805599453, right, batch["labels"].numel(), lengths])
    values = torch.tensor(rows, dtype=torch.float64)
    for name, a, b in (("bits_per_character", 0, 3), ("masked_accuracy", 1, 2)):
        ratio = values[:, a].sum() / values[:, b].sum()
        residuals = values[:, a] - ratio * values[:, b]
        error = (residuals.square().sum() * 5 / 4).sqrt() / values[:, b].sum()
        assert metrics[name] == pytest.approx(float(ratio), rel=1e-5)
        assert metrics[f"{name}_error"] == pytest.approx(float(error), rel=1e-4)
