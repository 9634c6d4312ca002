"""Pins runs of `neobert glue`: skipped when finished, started from MNLI, LoRA saved, merged and
reloaded. That an interrupted run ends as an uninterrupted one is in test_contract.py."""

import json

import pytest
import torch
from glue_runs import make_world, run  # noqa: F401
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from neobert import NeoBERTForMaskedLM
from neobert.common.errors import UserError


pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------------------------
# runs


def test_run_result_and_skipping(world, tmp_path):
    runs = run(world, tmp_path, num_train_epochs=3, seeds="1,2")
    folder, result = runs["sst2", 1]
    assert result["score"] > 0.8, f"dev accuracy {result['score']} on a task that one word decides."
    chosen = next(
        entry for entry in result["evaluations"] if entry["step"] == result["selected"]["step"]
    )
    assert result["score"] == chosen["dev_score"] and result["selected"]["score"] == max(
        e["score"] for e in result["evaluations"]
    )
    assert result["last"]["step"] == result["planned_steps"] == 27, (
        "The final weights (3 epochs of 9 batches) were not evaluated."
    )
    assert (
        result["best_of_all_evaluations"] >= result["score"] and result["reload_difference"] < 1e-5
    )
    assert (
        result["environment"]["versions"]["torch"]
        and result["parameters"]["trained"] == result["parameters"]["all"]
    )
    # The saved model gives the reported score.
    kept = [f for f, _ in runs.values() if (f / "best").is_dir()]
    assert len(kept) == 1, "keep_models best keeps one model a task."
    model = AutoModelForSequenceClassification.from_pretrained(
        kept[0] / "best", dtype=torch.float32
    ).eval()
    rows = [
        json.loads(line)
        for line in (world / "data" / "sst2" / "validation.jsonl").read_text().splitlines()
    ]
    batch = AutoTokenizer.from_pretrained(kept[0] / "best")(
        [row["sentence"] for row in rows], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        right = model(**batch).logits.argmax(-1) == torch.tensor([row["label"] for row in rows])
    expected = next(r["score"] for f, r in runs.values() if f == kept[0])
    assert right.float().mean().item() == pytest.approx(expected), (
        "best/ is not the model that the score belongs to."
    )
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(before) == 2
    run(world, tmp_path, num_train_epochs=3, seeds="1,2")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == before, (
        "A finished run was run again."
    )


def test_trainers_options_go_through(world, tmp_path):
    """They are part of what a run is known by, and of what the table says, where they touch the
    numbers."""
    common = {"num_train_epochs": 0.2, "name": "mine"}
    first, one = run(world, tmp_path, **common)["sst2", 1]
    runs = run(
        world, tmp_path, lr_scheduler_type="constant", optim="sgd", logging_steps=3, **common
    )
    assert runs["sst2", 1][0] == first or len(list(tmp_path.rglob("result.json"))) == 2
    settings = [
        json.loads(path.read_text())["settings"]["trainer"]
        for path in tmp_path.rglob("result.json")
    ]
    assert {"num_train_epochs": 0.2, "lr_scheduler_type": "constant", "optim": "sgd"} in settings, (
        "logging is not a setting of the numbers"
    )
    for option, sentence in (
        (
            {"eval_steps": 3},
            "eval_steps is set to . by this command, but 3.0 was given; leave it out",
        ),
        ({"fsdp_nothing": 1}, "unknown argument '--fsdp-nothing'"),
        (
            {"gradient_accumulation_steps": 3},
            "cannot be shared by processes x gradient_accumulation_steps = 3",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            run(world, tmp_path / "bad", **option)
    _, split = run(
        world, tmp_path / "split", gradient_accumulation_steps=2, num_train_epochs=1, head_dropout=0
    )["sst2", 1]
    _, whole = run(world, tmp_path / "joined", num_train_epochs=1, head_dropout=0)["sst2", 1]
    assert [entry["step"] for entry in split["evaluations"]] == [
        entry["step"] for entry in whole["evaluations"]
    ], "the batch is of 16 rows"


def test_mnli_start(world, tmp_path, caplog):
    with pytest.raises(
        UserError,
        match="rte was asked to start from MNLI, but .* has no finished MNLI run of model",
    ):
        run(world, tmp_path, "rte", start="mnli")
    assert not list(tmp_path.rglob("*")), (
        "Something was done before the missing MNLI run was named."
    )
    runs = run(world, tmp_path, "rte")
    assert "there is no finished MNLI run" in caplog.text, (
        "That RTE did not start from MNLI must be said."
    )
    assert runs["rte", 1][1]["starts_from"] == "the model"
    runs = run(world, tmp_path / "with_mnli", "rte,mnli,stsb,mrpc,sst2", num_train_epochs=0.2)
    mnli = runs["mnli", 1][0].name
    for task in ("rte", "stsb", "mrpc"):
        assert runs[task, 1][1]["starts_from"] == mnli, f"{task} did not start from the MNLI run."
    assert runs["sst2", 1][1]["starts_from"] == "the model", "SST-2 starts from the model itself."
    assert runs["rte", 1][1]["new_head"] == ["classifier.bias", "classifier.weight"], (
        "The MNLI run's dense layer was not kept."
    )


# ------------------------------------------------------------------------------------------------
# LoRA


def test_lora_is_saved_merged_and_reloaded(world, tmp_path):
    peft = pytest.importorskip("peft")
    folder, result = run(world, tmp_path, lora=True, lora_rank=4, num_train_epochs=3)["sst2", 1]
    # Per block and rank: qkv 32 + 96, wo 32 + 32, w12 32 + 64, w3 32 + 32; the head: 32 x 32 + 32
    # and 32 x 2 + 2.
    adapter, head = 2 * 4 * (128 + 64 + 96 + 64), 32 * 32 + 32 + 66
    assert result["parameters"]["trained"] == adapter + head, (
        "Other layers than qkv, wo, w12, w3 and the head are trained."
    )
    original = NeoBERTForMaskedLM.from_pretrained(world / "model", dtype=torch.float32)
    merged = AutoModelForSequenceClassification.from_pretrained(
        folder / "best", dtype=torch.float32
    ).eval()
    assert torch.equal(merged.model.encoder.weight, original.model.encoder.weight), (
        "The embedding has no adapter, and changed."
    )
    change = (
        merged.model.transformer_encoder[0].qkv.weight
        - original.model.transformer_encoder[0].qkv.weight
    )
    assert 1 <= torch.linalg.matrix_rank(change, rtol=1e-3) <= 4, (
        "The merged update of a rank-4 adapter has rank 4 at most."
    )
    base = AutoModelForSequenceClassification.from_pretrained(
        world / "model", num_labels=2, dtype=torch.float32
    )
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    ids = torch.randint(1000, 2000, (3, 9))
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-4, atol=1e-5
        )
    assert result["reload_difference"] < 1e-5
    assert "LoRA r=4" in (tmp_path / "table.md").read_text(), (
        "The table must say that the row is LoRA."
    )


def test_lora_on_the_embedding(world, tmp_path):
    pytest.importorskip("peft")
    folder, result = run(
        world,
        tmp_path,
        lora=True,
        lora_rank=4,
        lora_targets="qkv,encoder",
        num_train_epochs=0.3,
        warmup_ratio=0,
    )["sst2", 1]
    adapter, head = 2 * 4 * (32 + 96) + 4 * (30522 + 32), 32 * 32 + 32 + 66
    assert result["parameters"]["trained"] == adapter + head, (
        "qkv of two blocks, the embedding and the head are trained."
    )
    original = NeoBERTForMaskedLM.from_pretrained(world / "model", dtype=torch.float32)
    merged = AutoModelForSequenceClassification.from_pretrained(
        folder / "best", dtype=torch.float32
    )
    assert not torch.equal(merged.model.encoder.weight, original.model.encoder.weight), (
        "The embedding's adapter is not in the merged model."
    )
    assert result["reload_difference"] < 1e-5, (
        "The merged model predicts something else after loading."
    )


def test_lora_on_a_baseline(world, tmp_path):
    pytest.importorskip("peft")
    _, result = run(world, tmp_path, model=world / "bert", lora=True, num_train_epochs=0.2)[
        "sst2", 1
    ]
    assert 0 < result["parameters"]["trained"] < 0.1 * result["parameters"]["all"]
    assert result["reload_difference"] < 1e-5, (
        "The merged baseline predicts something else after loading."
    )
