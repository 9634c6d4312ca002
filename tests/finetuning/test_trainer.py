"""Tests of runs of `neobert glue`: skipped when finished, started from MNLI, LoRA saved, merged and
reloaded. That an interrupted run ends as an uninterrupted one is in test_contract.py."""

import json

import pytest
import torch
from helpers.glue_runs import make_world, run  # noqa: F401
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from neobert.finetuning.tasks import TASKS, load_task


pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------------------------
# runs


def test_run_result_and_skipping(world, tmp_path):
    runs = run(world, tmp_path, num_train_epochs=3, seeds="1,2")
    folder, result = runs["sst2", 1]
    assert result["score"] > 0.8, "one word decides this task"
    evaluations, selected = result["evaluations"], result["selected"]
    (chosen,) = [entry for entry in evaluations if entry["step"] == selected["step"]]
    assert result["score"] == chosen["dev_score"]
    assert selected["score"] == max(entry["score"] for entry in evaluations)
    assert result["last"]["step"] == result["planned_steps"] == 27
    assert result["reload_difference"] < 1e-5
    assert result["parameters"]["trained"] == result["parameters"]["all"]
    # The saved model gives the reported score.
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "best", dtype=torch.float32
    ).eval()
    rows = load_task(TASKS["sst2"], str(world / "data"))["validation"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "best")
    with torch.no_grad():
        logits = model(**tokenizer(rows["sentence"], padding=True, return_tensors="pt")).logits
    right = logits.argmax(-1) == torch.tensor(rows["label"])
    assert right.float().mean().item() == pytest.approx(result["score"])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(before) == 2
    run(world, tmp_path, num_train_epochs=3, seeds="1,2")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == before


def test_trainers_options_go_through(world, tmp_path):
    """They are part of what a run is known by where they touch the numbers."""
    common = {"num_train_epochs": 0.2, "name": "mine"}
    run(world, tmp_path, **common)
    run(world, tmp_path, lr_scheduler_type="constant", optim="sgd", logging_steps=3, **common)
    paths = list(tmp_path.rglob("result.json"))
    settings = [json.loads(path.read_text())["settings"]["trainer"] for path in paths]
    assert len(settings) == 2
    assert {"num_train_epochs": 0.2, "lr_scheduler_type": "constant", "optim": "sgd"} in settings
    results = [
        run(world, tmp_path / f"in {parts}", gradient_accumulation_steps=parts)["sst2", 1][1]
        for parts in (1, 2)
    ]
    steps = [[entry["step"] for entry in result["evaluations"]] for result in results]
    assert steps[0] == steps[1], "the batch is of 16 rows"


def test_mnli_start(world, tmp_path, caplog):
    runs = run(world, tmp_path, "rte")
    assert "there is no finished MNLI run" in caplog.text
    assert runs["rte", 1][1]["starts_from"] == "the model"
    runs = run(world, tmp_path / "with_mnli", "rte,mnli,stsb,mrpc,sst2", num_train_epochs=0.2)
    starts = {task: result["starts_from"] for (task, _), (_, result) in runs.items()}
    model, mnli = "the model", runs["mnli", 1][0].name
    assert starts == dict(mnli=model, rte=mnli, stsb=mnli, mrpc=mnli, sst2=model)
    assert runs["rte", 1][1]["new_head"] == ["classifier.bias", "classifier.weight"]


# ------------------------------------------------------------------------------------------------
# LoRA


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_lora_is_saved_merged_and_reloaded(world, tmp_path):
    peft = pytest.importorskip("peft")
    folder, result = run(world, tmp_path, lora=True, lora_rank=4, num_train_epochs=3)["sst2", 1]
    # Per block and rank: qkv 32 + 96, wo 32 + 32, w12 32 + 64, w3 32 + 32; the head: 32 x 32 + 32
    # and 32 x 2 + 2.
    adapter, head = 2 * 4 * (128 + 64 + 96 + 64), 32 * 32 + 32 + 66
    assert result["parameters"]["trained"] == adapter + head
    before, after = weights(world / "model"), weights(folder / "best")
    assert torch.equal(after["model.encoder.weight"], before["model.encoder.weight"])
    name = "model.transformer_encoder.0.qkv.weight"
    assert 1 <= torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 4
    classifier = AutoModelForSequenceClassification
    merged = classifier.from_pretrained(folder / "best", dtype=torch.float32).eval()
    base = classifier.from_pretrained(world / "model", num_labels=2, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    ids = torch.randint(1000, 2000, (3, 9))
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-4, atol=1e-5
        )
    assert result["reload_difference"] < 1e-5
    assert "LoRA r=4" in (tmp_path / "table.md").read_text()


def test_lora_on_a_baseline(world, tmp_path):
    pytest.importorskip("peft")
    runs = run(world, tmp_path, model=world / "bert", lora=True, num_train_epochs=0.2)
    _, result = runs["sst2", 1]
    assert 0 < result["parameters"]["trained"] < 0.1 * result["parameters"]["all"]
    assert result["reload_difference"] < 1e-5
