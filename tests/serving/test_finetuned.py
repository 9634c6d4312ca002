"""Test that the server and `neobert predict` return the same predictions of a fine-tuned model."""

import json

import pytest
from helpers import finetune_runs as runs
from helpers.jsonl import write_jsonl
from helpers.serving import serving

from neobert.cli import main


pytestmark = pytest.mark.slow


def test_server_probabilities_match_neobert_predict(tmp_path):
    """Fine-tune a classifier, and compare the probabilities of `/predict` and `neobert predict`."""
    rows = runs.classification_rows()
    runs.run(tmp_path, rows)
    classifier = str(tmp_path / "out")

    texts = [row["text"] for row in rows[:50]]
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    output = tmp_path / "predictions.jsonl"
    arguments = [
        str(tmp_path / "texts.jsonl"),
        str(output),
        "--model",
        classifier,
        "--device",
        "cpu",
    ]
    assert main(["predict", *arguments, "--probabilities"]) == 0
    expected = [json.loads(line) for line in output.read_text().splitlines()]

    with serving("--classifier", classifier) as client:
        body = {"inputs": [[text] for text in texts]}
        predictions = client.post("/predict", json=body).json()

    for row, prediction in zip(expected, predictions, strict=True):
        probabilities = {item["label"]: item["score"] for item in prediction}
        assert max(probabilities, key=probabilities.get) == row["prediction"]
        for label, probability in probabilities.items():
            assert probability == pytest.approx(row[f"probability_{label}"], abs=2e-6)
