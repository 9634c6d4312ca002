"""Test complete runs of `neobert glue`: results, options of Trainer, start from MNLI, and LoRA.

test_contract.py checks that a resumed run has the result of an uninterrupted one.
"""

import json

import pytest
import torch
from helpers.glue_runs import make_world, run  # noqa: F401
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from neobert.finetuning.glue_tasks import TASKS, load_task


pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------------------------
# runs


def test_run_result_and_rerun(world, tmp_path):
    """Check the result and the saved model of a run, and that a finished run is not repeated."""
    runs = run(world, tmp_path, num_train_epochs=3, seeds="1,2")
    folder, result = runs["sst2", 1]
    assert result["score"] > 0.8, "A single word determines the class."

    evaluations = result["evaluations"]
    selected = result["selected"]
    (evaluation,) = [entry for entry in evaluations if entry["step"] == selected["step"]]
    assert result["score"] == evaluation["dev_score"]
    assert selected["score"] == max(entry["score"] for entry in evaluations)
    assert result["last"]["step"] == result["planned_steps"] == 27
    assert result["reload_difference"] < 1e-5
    assert result["parameters"]["trained"] == result["parameters"]["all"]

    # The saved model has the reported score.
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "best", dtype=torch.float32
    ).eval()
    rows = load_task(TASKS["sst2"], str(world / "data"))["validation"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "best")
    with torch.no_grad():
        logits = model(**tokenizer(rows["sentence"], padding=True, return_tensors="pt")).logits
    is_correct = logits.argmax(-1) == torch.tensor(rows["label"])
    assert is_correct.float().mean().item() == pytest.approx(result["score"])

    # Running the command again does not write the results again.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(before) == 2
    run(world, tmp_path, num_train_epochs=3, seeds="1,2")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == before


def test_trainer_options_are_used(world, tmp_path):
    """Options of Trainer are used, and those that affect the results are part of the settings.

    `logging_steps` does not affect the results. Gradient accumulation does not change the batch
    size.
    """
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
    assert steps[0] == steps[1], "The global batch size must be 16 rows in both runs."


def test_tasks_that_start_from_mnli(world, tmp_path, caplog):
    """RTE, STS-B and MRPC start from the MNLI run if there is one, and SST-2 does not."""
    runs = run(world, tmp_path, "rte")
    assert "there is no finished MNLI run" in caplog.text
    assert runs["rte", 1][1]["starts_from"] == "the model"

    runs = run(world, tmp_path / "with_mnli", "rte,mnli,stsb,mrpc,sst2", num_train_epochs=0.2)
    starts = {task: result["starts_from"] for (task, _), (_, result) in runs.items()}
    model = "the model"
    mnli = runs["mnli", 1][0].name
    assert starts == dict(mnli=model, rte=mnli, stsb=mnli, mrpc=mnli, sst2=model)
    assert runs["rte", 1][1]["new_head"] == ["classifier.bias", "classifier.weight"]


# ------------------------------------------------------------------------------------------------
# LoRA


def weights(folder):
    """Return the weights of a saved model."""
    return load_file(folder / "model.safetensors")


def test_lora_is_saved_merged_and_reloaded(world, tmp_path):
    """The adapter is saved, and the merged model has the logits of the model with the adapter."""
    peft = pytest.importorskip("peft")
    folder, result = run(world, tmp_path, lora=True, lora_rank=4, num_train_epochs=3)["sst2", 1]

    # The adapter of a block has, per rank, 32 + 96 parameters for qkv, 32 + 32 for wo, 32 + 64 for
    # w12 and 32 + 32 for w3. The head has 32 x 32 + 32 and 32 x 2 + 2 parameters.
    adapter = 2 * 4 * (128 + 64 + 96 + 64)
    head = 32 * 32 + 32 + 66
    assert result["parameters"]["trained"] == adapter + head

    # The merged weights differ from the original ones by a matrix of low rank.
    before = weights(world / "model")
    after = weights(folder / "best")
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


def test_lora_with_bert(world, tmp_path):
    """LoRA works with BERT, whose linear layers have other names than those of NeoBERT."""
    pytest.importorskip("peft")
    runs = run(world, tmp_path, model=world / "bert", lora=True, num_train_epochs=0.2)
    _, result = runs["sst2", 1]
    assert 0 < result["parameters"]["trained"] < 0.1 * result["parameters"]["all"]
    assert result["reload_difference"] < 1e-5
