"""Pins what a run with init_from leaves, adaptation.md: held-out figures of the model given and of
the final one, and that new rows of a vocabulary are no start to compare with."""

import json

import pytest


pytest.importorskip("datasets")
pytest.importorskip("accelerate")

from pretrain_runs import arguments_of, make_corpus, run_of  # noqa: F401

from neobert import __main__ as cli


@pytest.fixture(scope="module", name="start")
def make_start(corpus):
    """A trained English model, and Spanish text for training and held out."""
    spanish = ["los hombres cantan canciones", "las manzanas verdes caen", "el agua fría baja"]
    lines = [f"{spanish[i % 3]} {spanish[i % 2]}" for i in range(300)]
    (corpus / "spanish.txt").write_text("\n".join(lines) + "\n")
    (corpus / "spanish-heldout.txt").write_text("\n".join(reversed(lines[:60])) + "\n")
    run_of(arguments_of(corpus, corpus / "start", max_steps=60, save_steps=60))
    return corpus / "start"


def _adapt(corpus, start, out, **more):
    heldout = {"spanish": "spanish-heldout.txt", "english": "heldout.txt"}
    values = {
        "init_from": start,
        "model_config": None,
        "dataset": corpus / "spanish.txt",
        "prepared": out / "prepared",
        "heldout": json.dumps({name: str(corpus / file) for name, file in heldout.items()}),
        "max_steps": 12,
        "save_steps": 12,
    }
    return arguments_of(corpus, out, **values | more)


def test_the_page_says_what_was_won_and_lost(corpus, start, tmp_path, capsys):
    metrics = run_of(_adapt(corpus, start, tmp_path / "out"))
    given = run_of([*_adapt(corpus, start, tmp_path / "measured"), "--measure"])
    page = (tmp_path / "out" / "adaptation.md").read_text()
    assert "| held-out text | the model given | after | change |" in page
    for name in ("spanish", "english"):
        before, after = (values[f"eval_{name}_bits_per_character"] for values in (given, metrics))
        errors = [values[f"eval_{name}_bits_per_character_error"] for values in (given, metrics)]
        line = f"| {name} bits per character | {before:.3f} ± {errors[0]:.3f} |"
        line += f" {after:.3f} ± {errors[1]:.3f} | {after - before:+.3f} |"
        assert line in page and (after < before) is (name == "spanish"), page
    capsys.readouterr()
    assert run_of(_adapt(corpus, start, tmp_path / "out")) == metrics
    assert "finished already" in capsys.readouterr().err


def test_new_rows_are_no_start_to_compare_with(corpus, start, tmp_path):
    tokenizer = corpus / "tokenizer"
    given = ["--vocab-size", "192", "--output", str(tokenizer)]
    assert cli.main(["tokenizer", str(corpus / "spanish.txt"), *given]) == 0
    new = {"tokenizer": tokenizer, "init_embeddings": "transplant", "max_steps": 3}
    run_of(_adapt(corpus, start, tmp_path, **new))
    page = (tmp_path / "adaptation.md").read_text()
    assert "| with its new rows, untrained | after |" in page and "+" not in page, page


def test_a_run_without_a_start_has_no_page(corpus, tmp_path):
    run_of(arguments_of(corpus, tmp_path, max_steps=3, heldout=corpus / "heldout.txt"))
    assert not list(tmp_path.glob("adaptation*"))
