"""Pins runs of `neobert glue`: skipped when finished, resumed to the uninterrupted run, no step
lost on SIGTERM, started from MNLI, LoRA saved, merged and reloaded."""

import contextlib
import json
import os
import signal
import sys

import numpy as np
import pytest
import torch
from glue_runs import make_world, run  # noqa: F401
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from neobert import NeoBERTForMaskedLM
from neobert.common.errors import Stopped, UserError
from neobert.common.runs import locked
from neobert.finetuning import glue_run, glue_table


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


class _Interrupt(TrainerCallback):
    """Ctrl-C at a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interrupted(monkeypatch, callback):
    """Within it, every run has one more callback."""
    real = glue_run.GlueTrainer.__init__

    def with_callback(self, *inputs, **named):
        named["callbacks"] = [*named["callbacks"], callback]
        real(self, *inputs, **named)

    with monkeypatch.context() as patch:
        patch.setattr(glue_run.GlueTrainer, "__init__", with_callback)
        yield


def test_interrupted_run_continues_and_equals_the_uninterrupted(world, tmp_path, monkeypatch):
    _, whole = run(world, tmp_path / "whole", num_train_epochs=2)["sst2", 1]
    best, marks = -1.0, []
    for entry in whole["evaluations"]:
        if entry["score"] > best:
            best = entry["score"]
            marks.append(entry["step"])
    saved = [step for step in marks if 1 < step < whole["planned_steps"] - 1]
    assert saved, "Vacuous: the run must have a checkpoint on its way."
    with interrupted(monkeypatch, _Interrupt(saved[-1] + 1)), pytest.raises(KeyboardInterrupt):
        run(world, tmp_path / "parts", num_train_epochs=2)
    assert not list((tmp_path / "parts").rglob("result.json")), (
        "An unfinished run must not look finished."
    )
    (checkpoints,) = (tmp_path / "parts").rglob("checkpoints")
    mine = [
        checkpoints.parent / name
        for name in (
            "notes.txt",
            "best/notes.txt",
            "best.partial/notes.txt",
            "checkpoints/checkpoint-99/notes",
        )
    ]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    _, parts = run(world, tmp_path / "parts", num_train_epochs=2)["sst2", 1]
    mine[-1] = checkpoints / "damaged-checkpoint-99" / "notes"
    assert all(path.read_text() == "mine" for path in mine), "files of the user went"
    assert parts["resumed"] and not whole["resumed"], "The run started from the beginning again."
    assert parts["evaluations"] == whole["evaluations"], (
        "The continued run differs from the uninterrupted one."
    )
    assert not list(checkpoints.rglob("*.safetensors")), (
        "Checkpoints of a finished run stay behind."
    )


def test_a_damaged_checkpoint_starts_the_run_again(world, tmp_path, monkeypatch, capsys):
    """The best checkpoint is the only one that a run keeps; without it the run begins anew, and
    says so."""
    _, whole = run(world, tmp_path / "whole", num_train_epochs=2)["sst2", 1]
    with interrupted(monkeypatch, _Interrupt(12)), pytest.raises(KeyboardInterrupt):
        run(world, tmp_path / "parts", num_train_epochs=2)
    (path,) = (tmp_path / "parts").rglob("optimizer.pt")
    path.unlink()
    _, parts = run(world, tmp_path / "parts", num_train_epochs=2)["sst2", 1]
    assert (
        "optimizer.pt is missing); there is no complete checkpoint, beginning anew"
        in capsys.readouterr().err
    )
    assert parts["evaluations"] == whole["evaluations"], (
        "a checkpoint without Adam's moments was continued from"
    )


class _Terminate(_Interrupt):
    """SIGTERM at a step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("step", "rate"), [(3, 3e-3), (6, 1e-12)])
def test_sigterm_loses_no_step(world, tmp_path, monkeypatch, step, rate):
    """An evaluation every second step; with the tiny rate the run waits for progress, and how long
    it has waited is kept too."""
    quick = {
        "num_train_epochs": 3,
        "patience": 5,
        "learning_rate": rate,
        "evaluations_per_epoch": 4,
    }
    _, whole = run(world, tmp_path / "whole", **quick)["sst2", 1]
    assert whole["stopped_early"] or rate > 1e-3, "vacuous: the run waits for nothing"
    with (
        interrupted(monkeypatch, _Terminate(step)),
        pytest.raises(Stopped, match="stopped by SIGTERM after step . of 27, which is saved"),
    ):
        run(world, tmp_path / "parts", **quick)
    assert not list((tmp_path / "parts").rglob("result.json")), (
        "An unfinished run must not look finished."
    )
    ((_, parts),) = run(world, tmp_path / "parts", **quick).values()
    assert (
        parts["resumed"]
        and parts["evaluations"] == whole["evaluations"]
        and parts["score"] == whole["score"]
    )


class _Signal(_Interrupt):
    """A signal at a step and at each after it, until the run ends."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("seed", range(4))
def test_any_interruptions_end_as_none(world, tmp_path, monkeypatch, seed):
    """Two or three random ones, by Ctrl-C or SIGTERM; half of the runs wait for progress and stop
    early."""
    quick = {
        "num_train_epochs": 3,
        "patience": 5,
        "learning_rate": 3e-3 if seed % 2 else 1e-12,
        "evaluations_per_epoch": 4,
    }
    _, whole = run(world, tmp_path / "whole", **quick)["sst2", 1]
    random = np.random.default_rng(seed)
    for step in sorted(random.integers(1, whole["last"]["step"] - 3, size=2 + seed // 2).tolist()):
        number = signal.SIGTERM if random.integers(2) else signal.SIGINT
        with (
            interrupted(monkeypatch, _Signal(step, number)),
            pytest.raises((Stopped, KeyboardInterrupt)),
        ):
            run(world, tmp_path / "parts", **quick)
    ((_, parts),) = run(world, tmp_path / "parts", **quick).values()
    assert parts["evaluations"] == whole["evaluations"] and parts["score"] == whole["score"]


def test_a_second_run_in_the_same_folder_is_refused(world, tmp_path):
    folder, _ = run(world, tmp_path / "out", num_train_epochs=0.2)["sst2", 1]
    (folder / "result.json").unlink()
    with locked(folder), pytest.raises(UserError, match="is in use by another run"):
        run(world, tmp_path / "out", num_train_epochs=0.2)


def test_no_token_is_stored(world, tmp_path, monkeypatch):
    secret, found = "hf_" + "Qw3rTy" * 6, []
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(sys, "argv", ["neobert", "glue", "--hub-token", secret])

    class Look(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            assert list(tmp_path.rglob("training_args.bin")), "vacuous: there is no checkpoint"
            found.extend(
                path.name
                for path in tmp_path.rglob("*")
                if path.is_file() and secret.encode() in path.read_bytes()
            )

    with interrupted(monkeypatch, Look()):
        run(world, tmp_path, hub_token=secret)
    found += [
        path.name
        for path in tmp_path.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]
    assert not found, f"the token is in {found}"


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
    glue_table.write_tables(tmp_path)
    assert "num_train_epochs 0.2 (10)" in (tmp_path / "table.md").read_text()
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
