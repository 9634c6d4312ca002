"""Test that the server predicts what `neobert predict` does, with a model of `neobert finetune`."""

import json

import pytest
from helpers import finetune_runs as runs
from helpers.jsonl import write_jsonl
from helpers.serving import serving

from neobert.cli import main


pytestmark = pytest.mark.slow


def test_a_fine_tuned_classifier_has_the_probabilities_of_predict(tmp_path):
    rows = runs.classification_rows()
    runs.run(tmp_path, rows)
    classifier = str(tmp_path / "out")
    texts = [row["text"] for row in rows[:50]]
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    output = tmp_path / "predictions.jsonl"
    words = [str(tmp_path / "texts.jsonl"), str(output), "--model", classifier, "--device", "cpu"]
    assert main(["predict", *words, "--probabilities"]) == 0
    expected = [json.loads(line) for line in output.read_text().splitlines()]

    with serving("--classifier", classifier) as client:
        body = {"inputs": [[text] for text in texts]}
        predictions = client.post("/predict", json=body).json()
    for row, prediction in zip(expected, predictions, strict=True):
        probabilities = {item["label"]: item["score"] for item in prediction}
        assert max(probabilities, key=probabilities.get) == row["prediction"]
        for label, probability in probabilities.items():
            assert probability == pytest.approx(row[f"probability_{label}"], abs=2e-6)
