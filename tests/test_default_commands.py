"""Check that the training commands of the README beat their baselines with default options.

Each command runs as a process on text from outside this project: docstrings of installed packages,
or cities of the time zone database. Its result must be better than its baselines, and it must not
print a warning about a result without progress.
"""

import json
import os
import random
import subprocess
import sys
import zoneinfo
from pathlib import Path

import pytest
from helpers.docstrings import Docstring, read_docstrings
from helpers.paths import ROOT


pytestmark = pytest.mark.slow
ENCODER = ROOT / "examples" / "sentence-encoder"
NUM_TEST_ROWS = 300
# Rows of the tests that need fewer texts than `distill`.
NUM_ROWS = 1300


@pytest.fixture(scope="module")
def docstrings() -> list[Docstring]:
    """Return docstrings of installed packages."""
    return read_docstrings(per_package=300)


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write rows as JSON Lines and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(*arguments: object, folder: Path, expect_better: bool = True) -> str:
    """Run `neobert` in a folder and return its output.

    Unless `expect_better` is False, a warning about a result without progress fails the test.
    """
    process = subprocess.run(
        [sys.executable, "-m", "neobert", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    if expect_better:
        for problem in ("not better than", "single class", "agrees little"):
            assert problem not in process.stderr + process.stdout, (
                f"The command printed the warning {problem!r}."
            )
    return process.stdout


def test_contrastive_beats_initial_model_and_tfidf(docstrings, tmp_path):
    """`neobert contrastive` improves the retrieval of function names from docstring summaries."""
    pairs = [{"anchor": text.summary, "positive": text.name} for text in docstrings[:NUM_ROWS]]
    write_rows(tmp_path / "pairs.jsonl", pairs[:-NUM_TEST_ROWS])
    write_rows(tmp_path / "test.jsonl", pairs[-NUM_TEST_ROWS:])

    run(
        *("contrastive", "--model", ENCODER, "--pairs", "pairs.jsonl"),
        *("--validation-file", "test.jsonl", "--output", "runs/mine"),
        folder=tmp_path,
    )

    result = json.loads((tmp_path / "runs" / "mine" / "result.json").read_text())
    validation = result["training"]["validation"]
    after = validation["after"]["mrr@10"]
    assert after > validation["before"]["mrr@10"] + 0.02
    assert after > validation["tf-idf"]["mrr@10"]


def test_distilled_student_beats_initial_weights(docstrings, tmp_path):
    """`neobert distill` produces a student that retrieves better than its initial weights."""
    (tmp_path / "texts.txt").write_text(
        "\n".join(text.summary for text in docstrings[:-NUM_TEST_ROWS]), encoding="utf-8"
    )
    pairs = [{"anchor": text.summary, "positive": text.name} for text in docstrings]
    write_rows(tmp_path / "test.jsonl", pairs[-NUM_TEST_ROWS:])

    run(
        *("distill", ENCODER, "--texts", "texts.txt"),
        *("--validation-file", "test.jsonl", "--output", "runs/student"),
        folder=tmp_path,
    )

    figures = json.loads((tmp_path / "runs" / "student" / "result.json").read_text())
    comparison = figures["comparison"]
    student = comparison["student"]
    initial = comparison["initial_student"]
    assert student["mrr@10"] > initial["mrr@10"] + 0.02, (student, initial)


def test_adaptation_lowers_the_bits_per_character(bundled, docstrings, tmp_path):
    """Continued pre-training improves the masked language model on validation text."""
    rows = [{"text": text.summary} for text in docstrings[:NUM_ROWS]]
    write_rows(tmp_path / "mine.jsonl", rows[:-NUM_TEST_ROWS])
    write_rows(tmp_path / "validation.jsonl", rows[-NUM_TEST_ROWS:])

    run(
        *("pretrain", ROOT / "recipes" / "adapt_domain.yaml", "--init-from", bundled),
        *("--dataset", "mine.jsonl", "--validation", "validation.jsonl"),
        *("--output", "runs/adapted"),
        folder=tmp_path,
    )

    table = (tmp_path / "runs" / "adapted" / "adaptation.md").read_text(encoding="utf-8")
    (row,) = [line for line in table.splitlines() if line.startswith("| bits per character")]
    # The last column is the change.
    assert float(row.split("|")[-2]) < -0.3, table


def cities() -> tuple[list[dict], list[dict]]:
    """Return training and test rows: cities of the time zone database with their continents."""
    rows = []
    for zone in sorted(zoneinfo.available_timezones()):
        continent, _, city = zone.partition("/")
        if continent in ("Africa", "America", "Asia", "Europe") and "/" not in city:
            rows.append({"city": city.replace("_", " "), "continent": continent})
    random.Random(0).shuffle(rows)
    return rows[120:], rows[:120]


def test_a_classifier_beats_majority_and_tfidf(tmp_path):
    """`neobert finetune` predicts the continent of a city better than its baselines.

    `neobert predict` then reproduces the accuracy that the training reported.
    """
    train_rows, test_rows = cities()
    write_rows(tmp_path / "train.jsonl", train_rows)
    write_rows(tmp_path / "test.jsonl", test_rows)

    run(
        *("finetune", "train.jsonl", "--test-file", "test.jsonl", "--model", ENCODER),
        *("--text-column", "city", "--label-column", "continent", "--output", "runs/continents"),
        folder=tmp_path,
        # Logistic regression on the frozen embeddings is a close baseline.
        expect_better=False,
    )

    metrics = json.loads((tmp_path / "runs" / "continents" / "metrics.json").read_text())
    accuracy = metrics["fine_tuned"]["metrics"]["accuracy"]["value"]
    majority, tfidf, _ = [
        baseline["metrics"]["accuracy"]["value"] for baseline in metrics["baselines"]
    ]
    assert accuracy > max(majority, tfidf) + 0.05, metrics["baselines"]

    run(
        *("predict", "test.jsonl", "labels.jsonl", "--model", "runs/continents"),
        folder=tmp_path,
    )

    lines = (tmp_path / "labels.jsonl").read_text(encoding="utf-8").splitlines()
    predictions = [json.loads(line) for line in lines]
    assert [row["city"] for row in predictions] == [row["city"] for row in test_rows]
    correct = [row["prediction"] == row["continent"] for row in predictions]
    assert sum(correct) / len(correct) == pytest.approx(accuracy)
    assert all(0.25 <= row["probability"] <= 1 for row in predictions)


def test_glue_beats_majority_and_tfidf(tmp_path):
    """`neobert glue` beats its baselines on a binary task in the format of SST-2."""
    for name, rows in zip(("train", "validation"), cities()):
        labeled = [
            {"sentence": row["city"], "label": int(row["continent"] == "America")} for row in rows
        ]
        write_rows(tmp_path / "my_folder" / "sst2" / f"{name}.jsonl", labeled)

    run(
        *("glue", "--task", "sst2", "--data", "my_folder", "--seeds", "1", "--model", ENCODER),
        folder=tmp_path,
    )

    (path,) = (tmp_path / "runs" / "glue").rglob("result.json")
    result = json.loads(path.read_text())
    for baseline in result["baselines"]:
        assert result["score"] > baseline["value"] + 0.02, result
