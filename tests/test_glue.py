"""Pins `neobert glue`: metrics by hand-worked numbers, the paper's protocol (interval, hyper-parameters, early stopping on the mean, MNLI start,
no decay on norms), runs that resume and lose nothing, LoRA saved, merged and reloaded, the table, and one sentence for bad input."""

import contextlib
import json
import math
import os
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    TrainerCallback,
)

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.common.errors import Stopped, UserError


for _name in ("accelerate", "datasets", "sklearn", "scipy"):
    pytest.importorskip(_name)
from neobert.common import loading  # noqa: E402
from neobert.common.arguments import training_arguments  # noqa: E402
from neobert.common.locks import FolderLock  # noqa: E402
from neobert.common.published import GLUE  # noqa: E402
from neobert.finetuning import glue, glue_run, glue_table, glue_tasks  # noqa: E402
from neobert.finetuning.glue_arguments import RunSettings, parse  # noqa: E402
from neobert.finetuning.glue_tasks import TASKS  # noqa: E402


# ------------------------------------------------------------------------------------------------------------- tiny world


GOOD, BAD = "good great lovely bright happy".split(), "bad awful gloomy dark sad".split()
FILL = "the film is a story of two friends and their house".split()


def sentence(generator, good):
    words = generator.choices(FILL, k=6)
    words.insert(generator.randrange(6), generator.choice(GOOD if good else BAD))
    return " ".join(words)


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A random NeoBERT with its tokenizer, and four tasks in nyu-mll/glue's schema that single words decide."""
    root = tmp_path_factory.mktemp("glue")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
    NeoBERTForMaskedLM(NeoBERTConfig(**sizes, embedding_init_range=0.2, decoder_init_range=0.1, classifier_pooling="mean")).save_pretrained(
        root / "model"
    )
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).resolve().parents[1] / "tokenizer")
    tokenizer.save_pretrained(root / "model")
    bert = BertForSequenceClassification(BertConfig(vocab_size=30522, **sizes))
    bert.save_pretrained(root / "bert")
    tokenizer.save_pretrained(root / "bert")
    generator = random.Random(0)
    data = root / "data"
    for split, count in (("train", 160), ("validation", 40)):
        rows = [{"sentence": sentence(generator, i % 2), "label": i % 2, "idx": i} for i in range(count)]
        write_rows(data / "sst2" / f"{split}.jsonl", rows)
        pairs = [{"sentence1": sentence(generator, 1), "sentence2": sentence(generator, i % 2), "label": 1 - i % 2} for i in range(count)]
        write_rows(data / "rte" / f"{split}.jsonl", pairs)
        write_rows(data / "mrpc" / f"{split}.jsonl", [{**row, "label": 1 - row["label"]} for row in pairs])
        write_rows(data / "stsb" / f"{split}.jsonl", [{**row, "label": 5.0 - 4.0 * row["label"]} for row in pairs])
    for split, count in (("train", 160), ("validation_matched", 30), ("validation_mismatched", 40)):
        rows = [{"premise": sentence(generator, i % 3), "hypothesis": sentence(generator, i % 3 > 1), "label": i % 3} for i in range(count)]
        write_rows(data / "mnli" / f"{split}.jsonl", rows)
    return root


def run(world, output, task="sst2", **more):
    given = {"task": task, "model": world / "model", "data": world / "data", "output": output, "seeds": "1", "num_train_epochs": 1}
    given |= {"batch_size": 16, "learning_rate": 3e-3, **more}
    values = {key: [] if value is True else str(value).split(",") if key == "seeds" else [str(value)] for key, value in given.items()}
    glue.main([part for key, value in values.items() for part in (f"--{key.replace('_', '-')}", *value)])
    return {(result["task"], result["settings"]["seed"]): (folder, result) for folder, result in glue_table.finished_runs(output)}


# ------------------------------------------------------------------------------------------------------------------ metrics


def test_metrics_by_hand():
    labels = np.array([1, 1, 1, 0, 0, 1])
    logits = np.eye(2)[[1, 0, 1, 0, 1, 1]]  # 3 true positives, 1 false positive, 1 false negative, 1 true negative
    values = glue_tasks.scores(TASKS["mrpc"], logits, labels)
    assert values["accuracy"] == pytest.approx(4 / 6) and values["f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert values["score"] == pytest.approx((4 / 6 + 0.75) / 2), "The score of a task with two metrics is their mean."
    matthews = (3 * 1 - 1 * 1) / math.sqrt((3 + 1) * (3 + 1) * (1 + 1) * (1 + 1))
    assert glue_tasks.scores(TASKS["cola"], logits, labels) == pytest.approx({"matthews": matthews, "score": matthews})
    predictions, truth = np.array([[1.0], [2.0], [4.0], [3.0]]), np.array([0.0, 1.0, 2.0, 5.0])
    x, y = predictions[:, 0] - 2.5, truth - 2.0
    pearson = (x * y).sum() / math.sqrt((x**2).sum() * (y**2).sum())
    values = glue_tasks.scores(TASKS["stsb"], predictions, truth)
    # Ranks 1 2 4 3 against 1 2 3 4: 1 - 6 * (1 + 1) / (4 * 15).
    assert values["pearson"] == pytest.approx(pearson) and values["spearman"] == pytest.approx(0.8)
    assert glue_tasks.scores(TASKS["stsb"], np.ones((4, 1)), truth)["score"] == 0.0, "A constant correlates with nothing: 0, not nan."
    with pytest.raises(UserError, match="there is no metric 'bleu'; choose from accuracy"):
        glue_tasks.metric_function("bleu")


def test_mnli_is_the_mean_of_matched_and_mismatched():
    labels = np.array([0, 1, 2, 0, 1, 2])
    logits = np.eye(3)[[0, 1, 0, 0, 0, 0]]
    slices = {"heldout": slice(0, 1), "validation_matched": slice(1, 3), "validation_mismatched": slice(3, 6)}
    values = glue_run.evaluation_metrics(TASKS["mnli"], logits, labels, slices)
    assert values["validation_matched_accuracy"] == pytest.approx(1 / 2)
    assert values["validation_mismatched_accuracy"] == pytest.approx(1 / 3)
    assert values["dev_score"] == pytest.approx((1 / 2 + 1 / 3) / 2), "MNLI scores the mean of the two, not the pooled accuracy (2 / 5)."
    assert values["score"] == 1.0, "Held-out rows select, not the dev set."
    assert glue_run.evaluation_metrics(TASKS["mnli"], logits, labels, {**slices, "heldout": None})["score"] == values["dev_score"]


def test_one_metric_can_select_in_place_of_the_mean():
    labels, logits = np.array([1, 1, 1, 0, 0, 1]), np.eye(2)[[1, 0, 1, 0, 1, 1]]
    for slices in ({"validation": slice(0, 6)}, {"heldout": slice(0, 6), "validation": slice(0, 2)}):
        chosen = {
            name: glue_run.evaluation_metrics(TASKS["mrpc"], logits, labels, slices, name)["score"] for name in ("mean", "accuracy", "f1")
        }
        assert chosen == pytest.approx({"mean": (4 / 6 + 0.75) / 2, "accuracy": 4 / 6, "f1": 0.75}), (
            "Another metric than the given one selects."
        )


# ----------------------------------------------------------------------------------------------------------------- protocol


@pytest.mark.parametrize(("batches", "steps"), [(5, 1), (10, 1), (59, 5), (4999, 499), (5000, 500), (24544, 500)])
def test_evaluation_interval(batches, steps):
    assert glue_run.evaluation_interval(batches) == steps, "The interval is min(500, batches_per_epoch // 10), at least 1."
    assert glue_run.evaluation_interval(90, per_epoch=2) == 45, "evaluations_per_epoch is ignored."


def test_hyper_parameters_are_the_papers():
    """Best of the grid for NeoBERT-4096 and NeoBERT-1024: batch, learning rate, weight decay."""
    paper = {
        "cola": ((8, 8e-6, 1e-5), (4, 6e-6, 1e-5)),
        "mnli": ((16, 5e-6, 1e-5), (16, 6e-6, 1e-2)),
        "mrpc": ((2, 1e-5, 1e-5), (8, 2e-5, 1e-5)),
        "qnli": ((8, 5e-6, 1e-5), (8, 5e-6, 1e-5)),
        "qqp": ((32, 8e-6, 1e-5), (32, 1e-5, 1e-2)),
        "rte": ((32, 5e-6, 1e-5), (8, 6e-6, 1e-5)),
        "sst2": ((32, 8e-6, 1e-2), (16, 1e-5, 1e-5)),
        "stsb": ((32, 2e-5, 1e-5), (8, 1e-5, 1e-2)),
    }
    for i, preset in enumerate(("neobert-4096", "neobert-1024")):
        arguments, trainer = parse(["--task", "all", "--model", "m", "--preset", preset])
        for task in glue_tasks.parse_tasks("all"):
            assert [tuple(found.values()) for found in arguments.combinations(task)] == [paper[task.name][i]], f"{preset}, {task.name}"
    grid = parse(["--task", "rte", "--model", "m", "--grid"])[0]
    assert len(grid.combinations(TASKS["rte"])) == 5 * 6 * 2, "The grid is 5 batch sizes, 6 learning rates, 2 weight decays."
    pinned = parse(["--task", "rte", "--model", "m", "--grid", "--batch-size", "7"])[0].combinations(TASKS["rte"])
    assert len(pinned) == 12 and {found["batch_size"] for found in pinned} == {7}, "A value given by hand pins its axis of the grid."
    assert (arguments.patience, arguments.warmup_ratio, arguments.head_dropout, arguments.max_eval_interval) == (15, 0.06, 0.1, 500)
    assert (trainer["num_train_epochs"], trainer["lr_scheduler_type"]) == (10, "linear")
    assert arguments.seeds == [1, 2, 3], "One seed is not a default."
    lora = parse(["--task", "rte", "--model", "m", "--lora"])[0]
    assert lora.combinations(TASKS["rte"])[0]["learning_rate"] == lora.lora_learning_rate, "LoRA has its own learning rate."


@pytest.mark.parametrize("name", ["model", "bert"])
def test_norms_and_biases_have_no_decay(world, name):
    model, _ = glue_run.load_classifier(str(world / name), TASKS["rte"])
    arguments = training_arguments(world / "unused", {"weight_decay": 0.1, "report_to": "none"}, {})
    trainer = glue_run.GlueTrainer(model, arguments)
    groups = trainer.create_optimizer().param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    without = {names[id(p)] for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    decayed = {names[id(p)] for group in groups if group["weight_decay"] == 0.1 for p in group["params"]}
    assert without | decayed == set(names.values()), "A parameter is not trained."
    wrong = [n for n in decayed if "norm" in n.lower() or n.endswith("bias")]
    assert not wrong, f"Weight decay on {wrong}."
    assert all(n.endswith("bias") or "norm" in n.lower() for n in without), f"A matrix has no weight decay: {without}."


def test_head_dropout_and_new_head(world):
    model, new = glue_run.load_classifier(str(world / "model"), TASKS["mnli"], head_dropout=0.25)
    assert model.dropout.p == 0.25 and model.config.num_labels == 3 and model.config.id2label[2] == "contradiction"
    assert new == ["classifier.bias", "classifier.weight", "dense.bias", "dense.weight"], "A masked-LM checkpoint brings no head."
    assert glue_run.load_classifier(str(world / "model"), TASKS["mnli"], pooling="cls")[0].config.classifier_pooling == "cls"
    model, new = glue_run.load_classifier(str(world / "bert"), TASKS["mnli"], head_dropout=0.25)
    assert model.dropout.p == 0.25, "The baseline has another head dropout."
    assert new == ["classifier.bias", "classifier.weight"], "A head of two labels cannot serve three."


def test_early_stopping_counts_evaluations_without_progress(world, tmp_path):
    runs = run(world, tmp_path, learning_rate=1e-12, num_train_epochs=3, patience=4)
    result = runs["sst2", 1][1]
    assert result["stopped_early"] and len(result["evaluations"]) == 5, "One evaluation sets the mark, four more bring no progress."
    assert result["selected"]["step"] == result["evaluations"][0]["step"], "The first of equal checkpoints is the best."


def test_the_held_out_score_selects(world, tmp_path, monkeypatch):
    held_out, dev = iter([0.2, 0.9, 0.3, 0.4, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]), iter([0.9, 0.1, 0.8, 0.7, 0.6, 0.2, 0.2, 0.2, 0.2, 0.2])
    metrics = lambda *_: {"score": next(held_out), "dev_score": next(dev)}  # noqa: E731
    monkeypatch.setattr(glue_run, "evaluation_metrics", metrics)
    result = run(world, tmp_path, patience=3)["sst2", 1][1]
    assert result["selected"]["step"] == 2 and result["score"] == 0.1, "The dev set chose its own checkpoint."
    assert result["last"] == {"step": 5, "score": 0.6}, "Three evaluations after the best one, the run should have stopped."
    assert result["best_of_all_evaluations"] == 0.9, "What the published protocol would report is kept beside it."


def test_held_out_rows_are_not_trained_on(world):
    splits = glue_tasks.load_task(TASKS["sst2"], str(world / "data"))
    tokenizer = loading.load_tokenizer(str(world / "model"))
    hyper = {"batch_size": 8, "learning_rate": 1e-3, "weight_decay": 0.0}
    settings = RunSettings.of(*parse(["--task", "sst2", "--model", "m"]), TASKS["sst2"], hyper, 1, revision="")
    train, evaluation, slices = glue_run.prepare(TASKS["sst2"], splits, tokenizer, settings, 64)
    assert (len(train), slices) == (144, {"heldout": slice(0, 16), "validation": slice(16, 56)}), (
        "160 rows: 144 and a tenth, then 40 of dev."
    )
    kept, held_out = glue_run.split_heldout(160, 0.1, 2000)
    assert not set(kept) & set(held_out) and sorted(kept + held_out) == list(range(160)), "The parts overlap or lose rows."
    assert len(glue_run.split_heldout(100_000, 0.1, 2000)[1]) == 2000, "At most 2,000 rows are held out."
    texts = [splits["train"]["sentence"][i] for i in held_out]
    assert [tokenizer.decode(evaluation[i]["input_ids"], skip_special_tokens=True) for i in range(16)] == texts


# --------------------------------------------------------------------------------------------------------------------- runs


def test_run_result_and_skipping(world, tmp_path):
    runs = run(world, tmp_path, num_train_epochs=3, seeds="1,2")
    folder, result = runs["sst2", 1]
    assert result["score"] > 0.8, f"dev accuracy {result['score']} on a task that one word decides."
    chosen = next(entry for entry in result["evaluations"] if entry["step"] == result["selected"]["step"])
    assert result["score"] == chosen["dev_score"] and result["selected"]["score"] == max(e["score"] for e in result["evaluations"])
    assert result["last"]["step"] == result["planned_steps"] == 27, "The final weights (3 epochs of 9 batches) were not evaluated."
    assert result["best_of_all_evaluations"] >= result["score"] and result["reload_difference"] < 1e-5
    assert result["environment"]["versions"]["torch"] and result["parameters"]["trained"] == result["parameters"]["all"]
    # The saved model gives the reported score.
    kept = [f for f, _ in runs.values() if (f / "best").is_dir()]
    assert len(kept) == 1, "keep_models best keeps one model a task."
    model = AutoModelForSequenceClassification.from_pretrained(kept[0] / "best", dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (world / "data" / "sst2" / "validation.jsonl").read_text().splitlines()]
    batch = AutoTokenizer.from_pretrained(kept[0] / "best")([row["sentence"] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        right = model(**batch).logits.argmax(-1) == torch.tensor([row["label"] for row in rows])
    expected = next(r["score"] for f, r in runs.values() if f == kept[0])
    assert right.float().mean().item() == pytest.approx(expected), "best/ is not the model that the score belongs to."
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(before) == 2
    run(world, tmp_path, num_train_epochs=3, seeds="1,2")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == before, "A finished run was run again."


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
    assert not list((tmp_path / "parts").rglob("result.json")), "An unfinished run must not look finished."
    _, parts = run(world, tmp_path / "parts", num_train_epochs=2)["sst2", 1]
    assert parts["resumed"] and not whole["resumed"], "The run started from the beginning again."
    assert parts["evaluations"] == whole["evaluations"], "The continued run differs from the uninterrupted one."
    assert not list((tmp_path / "parts").rglob("checkpoints")), "Checkpoints of a finished run stay behind."


def test_a_damaged_checkpoint_starts_the_run_again(world, tmp_path, monkeypatch, capsys):
    """The best checkpoint is the only one that a run keeps; without it the run begins anew, and says so."""
    _, whole = run(world, tmp_path / "whole", num_train_epochs=2)["sst2", 1]
    with interrupted(monkeypatch, _Interrupt(12)), pytest.raises(KeyboardInterrupt):
        run(world, tmp_path / "parts", num_train_epochs=2)
    (path,) = (tmp_path / "parts").rglob("optimizer.pt")
    path.unlink()
    _, parts = run(world, tmp_path / "parts", num_train_epochs=2)["sst2", 1]
    assert "optimizer.pt is missing); there is no complete checkpoint, beginning anew" in capsys.readouterr().err
    assert parts["evaluations"] == whole["evaluations"], "a checkpoint without Adam's moments was continued from"


class _Terminate(_Interrupt):
    """SIGTERM at a step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("step", "rate"), [(3, 3e-3), (6, 1e-12)])
def test_sigterm_loses_no_step(world, tmp_path, monkeypatch, step, rate):
    """An evaluation every second step; with the tiny rate the run waits for progress, and how long it has waited is kept too."""
    quick = {"num_train_epochs": 3, "patience": 5, "learning_rate": rate, "evaluations_per_epoch": 4}
    _, whole = run(world, tmp_path / "whole", **quick)["sst2", 1]
    assert whole["stopped_early"] or rate > 1e-3, "vacuous: the run waits for nothing"
    with interrupted(monkeypatch, _Terminate(step)), pytest.raises(Stopped, match="stopped by SIGTERM after step . of 27, which is saved"):
        run(world, tmp_path / "parts", **quick)
    assert not list((tmp_path / "parts").rglob("result.json")), "An unfinished run must not look finished."
    ((_, parts),) = run(world, tmp_path / "parts", **quick).values()
    assert parts["resumed"] and parts["evaluations"] == whole["evaluations"] and parts["score"] == whole["score"]


def test_a_second_run_in_the_same_folder_is_refused(world, tmp_path):
    with FolderLock(tmp_path / "lock"):
        pass  # what it leaves behind is nothing
    assert not list((tmp_path / "lock").iterdir())
    folder, _ = run(world, tmp_path / "out", num_train_epochs=0.2)["sst2", 1]
    (folder / "result.json").unlink()
    with FolderLock(folder), pytest.raises(UserError, match="is in use by process"):
        run(world, tmp_path / "out", num_train_epochs=0.2)


def test_no_token_is_stored(world, tmp_path, monkeypatch):
    secret, found = "hf_" + "Qw3rTy" * 6, []
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(sys, "argv", ["neobert", "glue", "--hub-token", secret])

    class Look(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            assert list(tmp_path.rglob("training_args.bin")), "vacuous: there is no checkpoint"
            found.extend(path.name for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes())

    with interrupted(monkeypatch, Look()):
        run(world, tmp_path, hub_token=secret)
    found += [path.name for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert not found, f"the token is in {found}"


def test_trainers_options_go_through(world, tmp_path):
    """They are part of what a run is known by, and of what the table says, where they touch the numbers."""
    common = {"num_train_epochs": 0.2, "name": "mine"}
    first, one = run(world, tmp_path, **common)["sst2", 1]
    runs = run(world, tmp_path, lr_scheduler_type="constant", optim="sgd", logging_steps=3, **common)
    assert runs["sst2", 1][0] == first or len(list(tmp_path.rglob("result.json"))) == 2
    settings = [json.loads(path.read_text())["settings"]["trainer"] for path in tmp_path.rglob("result.json")]
    assert {"num_train_epochs": 0.2, "lr_scheduler_type": "constant", "optim": "sgd"} in settings, "logging is not a setting of the numbers"
    glue_table.write_tables(tmp_path)
    assert "num_train_epochs 0.2 (10)" in (tmp_path / "table.md").read_text()
    for option, sentence in (
        ({"eval_steps": 3}, "eval_steps is set to . by this command, but 3.0 was given; leave it out"),
        ({"fsdp_nothing": 1}, "unknown argument '--fsdp-nothing'"),
        ({"gradient_accumulation_steps": 3}, "cannot be shared by processes x gradient_accumulation_steps = 3"),
    ):
        with pytest.raises(UserError, match=sentence):
            run(world, tmp_path / "bad", **option)
    _, split = run(world, tmp_path / "split", gradient_accumulation_steps=2, num_train_epochs=1, head_dropout=0)["sst2", 1]
    _, whole = run(world, tmp_path / "joined", num_train_epochs=1, head_dropout=0)["sst2", 1]
    assert [entry["step"] for entry in split["evaluations"]] == [entry["step"] for entry in whole["evaluations"]], "the batch is of 16 rows"


def test_mnli_start(world, tmp_path, caplog):
    with pytest.raises(UserError, match="rte was asked to start from MNLI, but .* has no finished MNLI run of model"):
        run(world, tmp_path, "rte", start="mnli")
    assert not list(tmp_path.rglob("*")), "Something was done before the missing MNLI run was named."
    runs = run(world, tmp_path, "rte")
    assert "there is no finished MNLI run" in caplog.text, "That RTE did not start from MNLI must be said."
    assert runs["rte", 1][1]["starts_from"] == "the model"
    runs = run(world, tmp_path / "with_mnli", "rte,mnli,stsb,mrpc,sst2", num_train_epochs=0.2)
    mnli = runs["mnli", 1][0].name
    for task in ("rte", "stsb", "mrpc"):
        assert runs[task, 1][1]["starts_from"] == mnli, f"{task} did not start from the MNLI run."
    assert runs["sst2", 1][1]["starts_from"] == "the model", "SST-2 starts from the model itself."
    assert runs["rte", 1][1]["new_head"] == ["classifier.bias", "classifier.weight"], "The MNLI run's dense layer was not kept."


# --------------------------------------------------------------------------------------------------------------------- LoRA


def test_lora_is_saved_merged_and_reloaded(world, tmp_path):
    peft = pytest.importorskip("peft")
    folder, result = run(world, tmp_path, lora=True, lora_rank=4, num_train_epochs=3)["sst2", 1]
    # Per block and rank: qkv 32 + 96, wo 32 + 32, w12 32 + 64, w3 32 + 32; the head: 32 x 32 + 32 and 32 x 2 + 2.
    adapter, head = 2 * 4 * (128 + 64 + 96 + 64), 32 * 32 + 32 + 66
    assert result["parameters"]["trained"] == adapter + head, "Other layers than qkv, wo, w12, w3 and the head are trained."
    original = NeoBERTForMaskedLM.from_pretrained(world / "model", dtype=torch.float32)
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "best", dtype=torch.float32).eval()
    assert torch.equal(merged.model.encoder.weight, original.model.encoder.weight), "The embedding has no adapter, and changed."
    change = merged.model.transformer_encoder[0].qkv.weight - original.model.transformer_encoder[0].qkv.weight
    assert 1 <= torch.linalg.matrix_rank(change, rtol=1e-3) <= 4, "The merged update of a rank-4 adapter has rank 4 at most."
    base = AutoModelForSequenceClassification.from_pretrained(world / "model", num_labels=2, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    ids = torch.randint(1000, 2000, (3, 9))
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert result["reload_difference"] < 1e-5
    assert "LoRA r=4" in (tmp_path / "table.md").read_text(), "The table must say that the row is LoRA."


def test_lora_on_the_embedding(world, tmp_path):
    pytest.importorskip("peft")
    folder, result = run(world, tmp_path, lora=True, lora_rank=4, lora_targets="qkv,encoder", num_train_epochs=0.3, warmup_ratio=0)[
        "sst2", 1
    ]
    adapter, head = 2 * 4 * (32 + 96) + 4 * (30522 + 32), 32 * 32 + 32 + 66
    assert result["parameters"]["trained"] == adapter + head, "qkv of two blocks, the embedding and the head are trained."
    original = NeoBERTForMaskedLM.from_pretrained(world / "model", dtype=torch.float32)
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "best", dtype=torch.float32)
    assert not torch.equal(merged.model.encoder.weight, original.model.encoder.weight), (
        "The embedding's adapter is not in the merged model."
    )
    assert result["reload_difference"] < 1e-5, "The merged model predicts something else after loading."


def test_lora_on_a_baseline(world, tmp_path):
    pytest.importorskip("peft")
    _, result = run(world, tmp_path, model=world / "bert", lora=True, num_train_epochs=0.2)["sst2", 1]
    assert 0 < result["parameters"]["trained"] < 0.1 * result["parameters"]["all"]
    assert result["reload_difference"] < 1e-5, "The merged baseline predicts something else after loading."


# -------------------------------------------------------------------------------------------------------------------- table


def fake_result(folder, task, seed, score, name="mine", selected=None, **settings):
    values = {"seed": seed, "lora": None, "selection": "heldout", "max_train_samples": None, "learning_rate": 1e-5, **settings}
    result = {"task": task, "name": name, "settings": values, "score": score, "last": {"score": score - 0.01}}
    result |= {"selected": {"score": score if selected is None else selected}, "best_of_all_evaluations": score + 0.01}
    path = folder / name / task / f"{seed}-{values['learning_rate']}" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result))


def test_table_layout(tmp_path):
    for task in TASKS:
        for seed, score in ((1, 0.80), (2, 0.84)):
            fake_result(tmp_path, task, seed, score)
    # A single seed does not win over two, however good; of two groups of one size the better selection score counts, not the dev score.
    fake_result(tmp_path, "rte", 3, 0.99, learning_rate=1e-4)
    fake_result(tmp_path, "sst2", 1, 0.90, name="other", selected=0.7)
    fake_result(tmp_path, "sst2", 1, 0.85, name="other", selected=0.8, learning_rate=1e-4)
    glue_table.write_tables(tmp_path)
    lines = [line.strip("| ").split(" | ") for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")]
    assert lines[0] == ["model", "source", "MNLI", "QNLI", "QQP", "RTE", "SST", "MRPC", "CoLA", "STS", "avg"]
    published = [line for line in lines if len(line) > 1 and line[1] == "published"]
    assert len(published) == len(GLUE) == 12 and ["NeoBERT-4096", "published", "89.0", "93.7"] in [line[:4] for line in published]
    mine = next(line for line in lines if line[0] == "mine")
    # Standard deviation of 80 and 84 with n - 1: 2.83.
    assert mine == ["mine", "measured, 2 seeds", *["82.0 ± 2.8"] * 8, "82.0"]
    data = json.loads((tmp_path / "table.json").read_text())
    other = next(row for row in data["measured"] if row["name"] == "other")
    assert other["cells"]["sst2"]["score"] == 0.85 and other["average"] is None, "An average needs all eight tasks."


def test_a_broken_result_is_left_out(tmp_path, caplog):
    fake_result(tmp_path, "rte", 1, 0.5)
    for name, text in (("cut", '{"task": "rt'), ("other", "{}"), ("list", "[]")):
        (tmp_path / "mine" / "rte" / name).mkdir()
        (tmp_path / "mine" / "rte" / name / "result.json").write_text(text)
    assert len(glue_table.finished_runs(tmp_path)) == 1
    assert caplog.text.count("is not a complete result and is left out") == 3, "what is left out must be said"


def test_published_averages():
    """Every published row's average is that of its tasks, to the rounding of the paper (its NomicBERT and BERT rows are rounded further)."""
    for name, values in GLUE.items():
        assert abs(np.mean(values[:-1]) - values[-1]) < 1.6, f"{name}: a figure was copied wrongly."


def test_grid_runs_the_best_with_all_seeds(world, tmp_path, monkeypatch):
    done = []

    def fine_tune(settings, splits, model, tokenizer, folder, options, trainer):
        done.append((settings.learning_rate, settings.batch_size, settings.seed))
        # Selection prefers 2e-5, the dev score prefers 1e-5.
        selected, score = (0.9, 0.5) if settings.learning_rate == 2e-5 else (0.4, 0.8)
        fake_result(folder.parent.parent.parent, "sst2", settings.seed, score, selected=selected, learning_rate=settings.learning_rate)
        result = {"score": score, "selected": {"score": selected}, "last": {"score": score}, "best_of_all_evaluations": score}
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({**result, "name": "x", "task": "y", "settings": {}}))
        return result

    monkeypatch.setattr(glue_run, "fine_tune", fine_tune)
    given = ["--task", "sst2", "--model", "mine", "--output", str(tmp_path), "--grid"]
    arguments, trainer = parse([*given, "--batch-size", "8", "--weight-decay", "0.1", "--seeds", "5", "6"])
    monkeypatch.setattr(glue, "_prune", lambda *_: None)
    results = glue.run_task(arguments, trainer, TASKS["sst2"], {}, None, "revision")
    assert len(done) == 7, f"Six learning rates with the first seed and one more seed of the best, but {done}."
    assert done[-1] == (2e-5, 8, 6) and len(results) == 2, "The best is the one with the best selection score."


def test_the_table_says_how_each_row_was_made(tmp_path):
    """Each cell: seeds, rows, what is not glue.yaml's; each run: its command and commit, also where a row was made by several."""
    arguments, trainer = parse(["--task", "sst2", "--model", "m", "--num-train-epochs", "3", "--lora", "--lora-rank", "4"])
    for task, seed, command in (("sst2", 2, "first"), ("sst2", 1, "first"), ("stsb", 1, "second")):
        hyper = {**arguments.combinations(TASKS[task])[0], "batch_size": 32}
        settings = vars(RunSettings.of(arguments, trainer, TASKS[task], hyper, seed, revision=""))
        fake_result(tmp_path, score=0.5, **settings)
        path = next((tmp_path / "mine" / task).glob(f"{seed}-*")) / "result.json"
        made = {"command": f"neobert glue {command}", "commit": "abc", "hardware": "a CPU"}
        path.write_text(json.dumps({**json.loads(path.read_text()), "rows": {"train": 900, "heldout": 100}, "environment": made}))
    fake_result(tmp_path, "rte", 1, 0.5, name="older", start="a run of MNLI")
    glue_table.write_tables(tmp_path)
    lines = (tmp_path / "table.md").read_text().split("## The measured rows")[1].strip().splitlines()[2:]
    assert lines == [
        "- mine (LoRA r=4), SST: seeds 1, 2; rows: 900 train, 100 heldout; unlike the protocol: lora_rank 4 (16), num_train_epochs 3 (10)",
        "- mine (LoRA r=4), STS: seed 1; rows: 900 train, 100 heldout; unlike the protocol: lora_rank 4 (16), num_train_epochs 3 (10), "
        "start from the model (the best MNLI run)",
        "- mine (LoRA r=4), SST 1, SST 2: `neobert glue first`, commit abc, a CPU",
        "- mine (LoRA r=4), STS 1: `neobert glue second`, commit abc, a CPU",
        "- older, RTE: seed 1; unlike the protocol: learning_rate 1e-05 (5e-06)",
        "- older, RTE 1: the command is not in result.json",
    ]
    cell = json.loads((tmp_path / "table.json").read_text())["measured"][0]["cells"]["sst2"]
    assert [run["seed"] for run in cell["runs"]] == cell["seeds"] == [1, 2] and cell["runs"][0]["environment"]["commit"] == "abc"


# ---------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"task": "squad"}, "there is no GLUE task 'squad'; choose all, or from mnli"),
        ({"task": "wnli"}, "wnli is left out"),
        ({"task": "cola"}, "there is no folder .*cola"),
        ({"data": "nobody/nothing"}, "'nobody/nothing' is not a local folder, and task sst2 was not loaded from the Hub"),
        ({"model": "nobody/nothing"}, "neither a model folder nor a model that can be reached on the Hub"),
        ({"seeds": "1,1"}, "seeds must be different whole numbers"),
        ({"seeds": "-1"}, "seeds must be at least 0, but -1 was given"),
        ({"seeds": 2**32}, "seeds must be below 4294967296"),
        ({"heldout_rows": -1}, "heldout_rows must be above 0"),
        ({"task": "sst2,rte", "max_train_samples": 5}, "rte has 5 training rows, too few to hold 0.1 of them out"),
        ({"selection": "test"}, "selection must be one of heldout, dev"),
        ({"preset": "best"}, "there is no preset 'best'; choose from neobert-4096, neobert-1024"),
        ({"num_train_epochs": 0}, "num_train_epochs must be above 0, but 0.0 was given"),
        ({"heldout_fraction": 0.001}, "too few to hold 0.001 of them out; use --selection dev"),
        (
            {"lora": True, "lora_targets": "query"},
            "LoRA target 'query' is not a linear layer or embedding of this model; it has classifier, dense, encoder, qkv",
        ),
        ({"classifier_pooling": "max"}, "classifier_pooling must be one of cls, mean, but 'max' was given"),
        ({"lora": True, "lora_rank": 0}, "lora_rank must be at least 1, but 0 was given"),
        ({"metric": "bleu"}, "there is no metric 'bleu'; choose from accuracy"),
        ({"metric": "f1"}, "sst2 has no metric 'f1'; choose mean, or from accuracy"),
        ({"report_to": "nonsense"}, "report_to 'nonsense' is unknown; installed are none"),
        ({"weight_decay": -1}, "weight_decay must be at least 0"),
        ({"max_length": 2}, "max_length must be at least 8, but 2 was given"),
        ({"learning_rates": 1}, "unknown argument '--learning-rates'; did you mean --learning-rate"),
    ],
)
def test_bad_options(world, tmp_path, more, sentence):
    with pytest.raises(UserError, match=sentence):
        run(world, tmp_path / "out", **more)
    assert not list((tmp_path / "out").rglob("*.json")), "Work was done although the input is bad."


def test_every_task_is_checked_before_the_first_is_trained(world, tmp_path, monkeypatch):
    monkeypatch.setattr(glue_run, "fine_tune", lambda *_: pytest.fail("A task was trained before all were checked."))
    for task in ("sst2", "rte"):
        for split in ("train", "validation"):
            lines = (world / "data" / task / f"{split}.jsonl").read_text().splitlines()
            write_rows(tmp_path / task / f"{split}.jsonl", [json.loads(line) for line in lines[: 5 if task == "rte" else None]])
    with pytest.raises(UserError, match="rte has 5 training rows, too few to hold 0.1 of them out; use --selection dev"):
        run(world, tmp_path / "out", "sst2,rte", data=tmp_path)
    monkeypatch.setattr(glue_run, "process_state", lambda: SimpleNamespace(num_processes=3, is_main_process=True))
    with pytest.raises(UserError, match="the batch size of rte, 16, cannot be shared by 3 processes"):
        run(world, tmp_path / "out", "rte")


def test_roberta_takes_texts_to_its_last_position_only(world, tmp_path):
    """Its positions start at padding_idx + 1: a table of 34 is for 32 tokens, which its tokenizer does not say."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 34}
    RobertaForSequenceClassification(RobertaConfig(vocab_size=30522, pad_token_id=1, **sizes)).save_pretrained(tmp_path)
    tokenizer = loading.load_tokenizer(str(world / "bert"))
    tokenizer.model_max_length = int(1e30)
    tokenizer.save_pretrained(tmp_path)
    model, _ = glue_run.load_classifier(str(tmp_path), TASKS["sst2"])
    limit = glue_run.text_limit(model, loading.load_tokenizer(str(tmp_path)))
    assert limit == 32
    ids = torch.full((1, limit), 9)
    assert model(input_ids=ids).logits.isfinite().all()
    bert, _ = glue_run.load_classifier(str(world / "bert"), TASKS["sst2"])
    assert glue_run.text_limit(bert, tokenizer) == 64, "BERT's positions start at 0."


GOOD_ROW = {"sentence": "good", "label": 1}


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], "train.jsonl has no rows"),
        ([GOOD_ROW, "{broken"], "train.jsonl, line 2 is not JSON"),
        ([GOOD_ROW, [1, 2]], r"line 2 must be an object {...}, one a line, but is \[1, 2\]"),
        (
            [GOOD_ROW, {"sentence": "bad", "label": 2}],
            r"line 2: label 2 is out of range; sst2 takes a whole number from 0 to 1 \(negative, positive\)",
        ),
        ([{"sentence": "bad", "label": -1}], "line 1: label -1 is out of range"),
        ([{"sentence": "bad", "label": 0.5}], "label 0.5 is out of range"),
        ([{"sentence": "bad", "label": "positive"}], "label 'positive' is out of range"),
        ([{"text": "bad", "label": 0}], "line 1 has no 'sentence'; sst2 needs the columns sentence, label"),
        ([{"sentence": None, "label": 0}], "line 1 has no 'sentence'"),
        ([{"sentence": 5, "label": 0}], "'sentence' must be text, but 5 was given"),
    ],
)
def test_bad_rows(tmp_path, lines, sentence):
    path = tmp_path / "sst2" / "train.jsonl"
    path.parent.mkdir()
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(UserError, match=sentence):
        glue_tasks.load_task(TASKS["sst2"], str(tmp_path))


def test_file_kinds_give_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"sentence1": "a, \u2028 b", "sentence2": 'say "c"', "label": 2.5}, {"sentence1": "d", "sentence2": "e", "label": 0.0}]
    loaded = []
    for kind in ("jsonl", "csv", "parquet"):
        folder = tmp_path / kind / "stsb"
        for split in ("train", "validation"):
            write_rows(folder / f"{split}.jsonl", rows)
            if kind == "csv":
                (folder / f"{split}.jsonl").unlink()
                (folder / f"{split}.csv").write_text('sentence1,sentence2,label\n"a, \u2028 b","say ""c""",2.5\nd,e,0.0\n')
            elif kind == "parquet":
                (folder / f"{split}.jsonl").unlink()
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
        loaded.append(glue_tasks.load_task(TASKS["stsb"], str(tmp_path / kind)))
    assert loaded[0] == loaded[1] == loaded[2], "One data set in three formats reads differently."
    assert loaded[0]["train"] == {"sentence1": ["a, \u2028 b", "d"], "sentence2": ['say "c"', "e"], "label": [2.5, 0.0]}


def test_quotes_are_characters_in_tsv_and_quote_in_csv(tmp_path):
    texts = [f'"{i} opens and never closes' if i % 3 == 0 else f'{i} says "so", twice' for i in range(150)]
    folder = tmp_path / "sst2"
    folder.mkdir()
    for split, rows in (("train", texts), ("validation", texts[:21])):
        (folder / f"{split}.tsv").write_text("sentence\tlabel\n" + "".join(f"{text}\t1\n" for text in rows))
    splits = glue_tasks.load_task(TASKS["sst2"], str(tmp_path))
    assert splits["train"]["sentence"] == texts and splits["validation"]["sentence"] == texts[:21]
    (folder / "train.tsv").unlink()
    for text, sentence in (
        ('"open,1\nnext,0\n', "is broken .*; are its quotes closed"),
        ('"open,1\n"next,0\n', "is broken"),
        ("one, two,1\n", "train.csv, line 2 has more columns than the first line, 2; a separator in a text"),
    ):
        (folder / "train.csv").write_text("sentence,label\n" + text)
        with pytest.raises(UserError, match=sentence):
            glue_tasks.load_task(TASKS["sst2"], str(tmp_path))


@pytest.mark.parametrize("second", ["train.csv", "train-00000-of-00001.jsonl"])
def test_two_copies_of_a_split_are_refused(tmp_path, second):
    write_rows(tmp_path / "sst2" / "train.jsonl", [GOOD_ROW])
    (tmp_path / "sst2" / second).write_text("")
    with pytest.raises(UserError, match=rf"has the split 'train' more than once \(.*{second}.*\); leave one file, or shards of one"):
        glue_tasks.load_task(TASKS["sst2"], str(tmp_path))


def test_a_row_of_the_table_holds_one_model_and_one_set_of_rows(world, tmp_path):
    output, quick = tmp_path / "out", {"num_train_epochs": 0.2, "name": "mine"}
    run(world, output, **quick)
    assert "| mine (data: data) |" in (output / "table.md").read_text(), "The row must say that its data is not GLUE's."
    assert "it is not a GLUE score" in (output / "table.md").read_text()
    with pytest.raises(UserError, match="holds runs of other weights .* under the name 'mine'; give this model another --name"):
        run(world, output, **{**quick, "model": world / "bert"})
    changed = tmp_path / "data" / "sst2"
    for path in (world / "data" / "sst2").iterdir():
        write_rows(changed / path.name, [json.loads(line) for line in path.read_text().splitlines()][1:])
    with pytest.raises(UserError, match="the rows of sst2 in .* are not those of the finished runs"):
        run(world, output, **{**quick, "data": tmp_path / "data"})
    assert len(glue_table.finished_runs(output)) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="output must be a folder"):
        run(world, tmp_path / "file", **quick)


def test_a_model_without_a_usable_tokenizer(world, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((world / "bert" / name).read_bytes())
    with pytest.raises(UserError, match="no tokenizer was found in"):
        run(world, tmp_path / "out", model=tmp_path)
    padless = PreTrainedTokenizerFast(tokenizer_file=str(world / "bert" / "tokenizer.json"), unk_token="[UNK]")
    padless.save_pretrained(tmp_path / "padless")
    with pytest.raises(UserError, match="has no padding token"):
        run(world, tmp_path / "out", model=world / "bert", tokenizer=tmp_path / "padless")
    (tmp_path / "st" / "0_Transformer").mkdir(parents=True)
    (tmp_path / "st" / "0_Transformer" / "config.json").write_text("{}")
    (tmp_path / "st" / "modules.json").write_text('[{"path": "0_Transformer"}, {"path": "1_Pooling"}]')
    with pytest.raises(UserError, match="is a sentence encoder whose model is in a folder of its own; give .*0_Transformer"):
        run(world, tmp_path / "out", model=tmp_path / "st")


def test_rows_of_the_hub(monkeypatch):
    import datasets

    asked = []

    def load(name, task, split):
        asked.append((name, task, split))
        return datasets.Dataset.from_list([{"premise": "a", "hypothesis": "b", "label": 2, "idx": 0}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    splits = glue_tasks.load_task(TASKS["mnli"], glue_tasks.HUB_DATA)
    assert asked == [("nyu-mll/glue", "mnli", split) for split in ("train", "validation_matched", "validation_mismatched")]
    assert splits["train"] == {"premise": ["a"], "hypothesis": ["b"], "label": [2]}


def test_checkpoint_of_another_kind(world, tmp_path):
    from safetensors.torch import load_file, save_file

    for path in (world / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if "wo" not in k}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 2 weights of the encoder, model.transformer_encoder.0.wo.weight for example"):
        run(world, tmp_path / "out", model=tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="has no config.json; convert a raw training checkpoint first"):
        run(world, tmp_path / "out", model=tmp_path)
