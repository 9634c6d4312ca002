"""Pins the protocol of `neobert glue`: metrics by hand-worked numbers, the paper's hyper-parameters
and evaluation interval, early stopping on the mean, no decay on norms."""

import math

import numpy as np
import pytest
from glue_runs import make_world, run  # noqa: F401

from neobert.common import loading
from neobert.finetuning import glue_model, glue_rows, glue_run, glue_tasks
from neobert.finetuning.glue_tasks import TASKS
from neobert.finetuning.options import OPTIONS
from neobert.training.options import training_arguments


# ------------------------------------------------------------------------------------------------
# metrics


def test_metrics_by_hand():
    labels = np.array([1, 1, 1, 0, 0, 1])
    # 3 true positives, 1 false positive, 1 false negative, 1 true negative
    logits = np.eye(2)[[1, 0, 1, 0, 1, 1]]
    values = glue_tasks.scores(TASKS["mrpc"], logits, labels)
    assert values["accuracy"] == pytest.approx(4 / 6) and values["f1"] == pytest.approx(
        2 * 3 / (2 * 3 + 1 + 1)
    )
    assert values["score"] == pytest.approx((4 / 6 + 0.75) / 2), (
        "The score of a task with two metrics is their mean."
    )
    matthews = (3 * 1 - 1 * 1) / math.sqrt((3 + 1) * (3 + 1) * (1 + 1) * (1 + 1))
    assert glue_tasks.scores(TASKS["cola"], logits, labels) == pytest.approx(
        {"matthews": matthews, "score": matthews}
    )
    predictions, truth = np.array([[1.0], [2.0], [4.0], [3.0]]), np.array([0.0, 1.0, 2.0, 5.0])
    x, y = predictions[:, 0] - 2.5, truth - 2.0
    pearson = (x * y).sum() / math.sqrt((x**2).sum() * (y**2).sum())
    values = glue_tasks.scores(TASKS["stsb"], predictions, truth)
    # Ranks 1 2 4 3 against 1 2 3 4: 1 - 6 * (1 + 1) / (4 * 15).
    assert values["pearson"] == pytest.approx(pearson) and values["spearman"] == pytest.approx(0.8)
    assert glue_tasks.scores(TASKS["stsb"], np.ones((4, 1)), truth)["score"] == 0.0, (
        "A constant correlates with nothing: 0, not nan."
    )


def test_mnli_is_the_mean_of_matched_and_mismatched():
    labels = np.array([0, 1, 2, 0, 1, 2])
    logits = np.eye(3)[[0, 1, 0, 0, 0, 0]]
    slices = {
        "heldout": slice(0, 1),
        "validation_matched": slice(1, 3),
        "validation_mismatched": slice(3, 6),
    }
    values = glue_rows.evaluation_metrics(TASKS["mnli"], logits, labels, slices)
    assert values["validation_matched_accuracy"] == pytest.approx(1 / 2)
    assert values["validation_mismatched_accuracy"] == pytest.approx(1 / 3)
    assert values["dev_score"] == pytest.approx((1 / 2 + 1 / 3) / 2), (
        "MNLI scores the mean of the two, not the pooled accuracy (2 / 5)."
    )
    assert values["score"] == 1.0, "Held-out rows select, not the dev set."
    assert (
        glue_rows.evaluation_metrics(TASKS["mnli"], logits, labels, {**slices, "heldout": None})[
            "score"
        ]
        == values["dev_score"]
    )


def test_one_metric_can_select_in_place_of_the_mean():
    labels, logits = np.array([1, 1, 1, 0, 0, 1]), np.eye(2)[[1, 0, 1, 0, 1, 1]]
    for slices in (
        {"validation": slice(0, 6)},
        {"heldout": slice(0, 6), "validation": slice(0, 2)},
    ):
        chosen = {
            name: glue_rows.evaluation_metrics(TASKS["mrpc"], logits, labels, slices, name)["score"]
            for name in ("mean", "accuracy", "f1")
        }
        assert chosen == pytest.approx(
            {"mean": (4 / 6 + 0.75) / 2, "accuracy": 4 / 6, "f1": 0.75}
        ), "Another metric than the given one selects."


# ------------------------------------------------------------------------------------------------
# protocol


@pytest.mark.parametrize(
    ("batches", "steps"), [(5, 1), (10, 1), (59, 5), (4999, 499), (5000, 500), (24544, 500)]
)
def test_evaluation_interval(batches, steps):
    assert glue_run.evaluation_interval(batches) == steps, (
        "The interval is min(500, batches_per_epoch // 10), at least 1."
    )
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
        arguments, trainer = OPTIONS["glue"].read(
            ["--task", "all", "--model", "m", "--preset", preset]
        )
        for task in glue_tasks.parse_tasks("all"):
            assert [tuple(found.values()) for found in arguments.combinations(task)] == [
                paper[task.name][i]
            ], f"{preset}, {task.name}"
    grid = OPTIONS["glue"].read(["--task", "rte", "--model", "m", "--grid"])[0]
    assert len(grid.combinations(TASKS["rte"])) == 5 * 6 * 2, (
        "The grid is 5 batch sizes, 6 learning rates, 2 weight decays."
    )
    pinned = (
        OPTIONS["glue"]
        .read(["--task", "rte", "--model", "m", "--grid", "--batch-size", "7"])[0]
        .combinations(TASKS["rte"])
    )
    assert len(pinned) == 12 and {found["batch_size"] for found in pinned} == {7}, (
        "A value given by hand pins its axis of the grid."
    )
    assert (
        arguments.patience,
        arguments.warmup_ratio,
        arguments.head_dropout,
        arguments.max_eval_interval,
    ) == (15, 0.06, 0.1, 500)
    assert (trainer["num_train_epochs"], trainer["lr_scheduler_type"]) == (10, "linear")
    assert arguments.seeds == [1, 2, 3], "One seed is not a default."
    lora = OPTIONS["glue"].read(["--task", "rte", "--model", "m", "--lora"])[0]
    assert lora.combinations(TASKS["rte"])[0]["learning_rate"] == lora.lora_learning_rate, (
        "LoRA has its own learning rate."
    )


@pytest.mark.parametrize("name", ["model", "bert"])
def test_norms_and_biases_have_no_decay(world, name):
    model, _ = glue_model.load_classifier(str(world / name), TASKS["rte"])
    arguments = training_arguments(world / "unused", {"weight_decay": 0.1, "report_to": "none"}, {})
    trainer = glue_run.GlueTrainer(model, arguments)
    groups = trainer.create_optimizer().param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    without = {
        names[id(p)] for group in groups if group["weight_decay"] == 0 for p in group["params"]
    }
    decayed = {
        names[id(p)] for group in groups if group["weight_decay"] == 0.1 for p in group["params"]
    }
    assert without | decayed == set(names.values()), "A parameter is not trained."
    wrong = [n for n in decayed if "norm" in n.lower() or n.endswith("bias")]
    assert not wrong, f"Weight decay on {wrong}."
    assert all(n.endswith("bias") or "norm" in n.lower() for n in without), (
        f"A matrix has no weight decay: {without}."
    )


def test_head_dropout_and_new_head(world):
    model, new = glue_model.load_classifier(str(world / "model"), TASKS["mnli"], head_dropout=0.25)
    assert (
        model.dropout.p == 0.25
        and model.config.num_labels == 3
        and model.config.id2label[2] == "contradiction"
    )
    assert new == ["classifier.bias", "classifier.weight", "dense.bias", "dense.weight"], (
        "A masked-LM checkpoint brings no head."
    )
    assert (
        glue_model.load_classifier(str(world / "model"), TASKS["mnli"], pooling="cls")[
            0
        ].config.classifier_pooling
        == "cls"
    )
    model, new = glue_model.load_classifier(str(world / "bert"), TASKS["mnli"], head_dropout=0.25)
    assert model.dropout.p == 0.25, "The baseline has another head dropout."
    assert new == ["classifier.bias", "classifier.weight"], (
        "A head of two labels cannot serve three."
    )


def test_early_stopping_counts_evaluations_without_progress(world, tmp_path):
    runs = run(world, tmp_path, learning_rate=1e-12, num_train_epochs=3, patience=4)
    result = runs["sst2", 1][1]
    assert result["stopped_early"] and len(result["evaluations"]) == 5, (
        "One evaluation sets the mark, four more bring no progress."
    )
    assert result["selected"]["step"] == result["evaluations"][0]["step"], (
        "The first of equal checkpoints is the best."
    )


def test_the_held_out_score_selects(world, tmp_path, monkeypatch):
    held_out, dev = (
        iter([0.2, 0.9, 0.3, 0.4, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]),
        iter([0.9, 0.1, 0.8, 0.7, 0.6, 0.2, 0.2, 0.2, 0.2, 0.2]),
    )
    metrics = lambda *_: {"score": next(held_out), "dev_score": next(dev)}  # noqa: E731
    monkeypatch.setattr(glue_run, "evaluation_metrics", metrics)
    result = run(world, tmp_path, patience=3)["sst2", 1][1]
    assert result["selected"]["step"] == 2 and result["score"] == 0.1, (
        "The dev set chose its own checkpoint."
    )
    assert result["last"] == {"step": 5, "score": 0.6}, (
        "Three evaluations after the best one, the run should have stopped."
    )
    assert result["best_of_all_evaluations"] == 0.9, (
        "What the published protocol would report is kept beside it."
    )


def test_held_out_rows_are_not_trained_on(world):
    splits = glue_tasks.load_task(TASKS["sst2"], str(world / "data"))
    tokenizer = loading.load_tokenizer(str(world / "model"))
    hyper = {"batch_size": 8, "learning_rate": 1e-3, "weight_decay": 0.0}
    arguments, trainer = OPTIONS["glue"].read(["--task", "sst2", "--model", "m"])
    settings = arguments.settings(trainer, TASKS["sst2"], hyper, 1)
    train, evaluation, slices = glue_rows.prepare(TASKS["sst2"], splits, tokenizer, settings, 64)
    assert (len(train), slices) == (144, {"heldout": slice(0, 16), "validation": slice(16, 56)}), (
        "160 rows: 144 and a tenth, then 40 of dev."
    )
    kept, held_out = glue_rows.split_heldout(160, 0.1, 2000)
    assert not set(kept) & set(held_out) and sorted(kept + held_out) == list(range(160)), (
        "The parts overlap or lose rows."
    )
    assert len(glue_rows.split_heldout(100_000, 0.1, 2000)[1]) == 2000, (
        "At most 2,000 rows are held out."
    )
    texts = [splits["train"]["sentence"][i] for i in held_out]
    assert [
        tokenizer.decode(evaluation[i]["input_ids"], skip_special_tokens=True) for i in range(16)
    ] == texts


def test_the_warm_up_is_a_share_of_all_steps(tmp_path):
    """1,000 rows in batches of 32 are 32 batches, 4 epochs of them 128 steps, of which 6 % are
    7.68."""
    arguments, trainer = OPTIONS["glue"].read(
        ["--task", "sst2", "--model", "m", "--num-train-epochs", "4"]
    )
    hyper = {"batch_size": 32, "learning_rate": 1e-3, "weight_decay": 0.0}
    settings = arguments.settings(trainer, TASKS["sst2"], hyper, 1)
    training, steps = glue_run.trainer_arguments(settings, trainer, tmp_path, 1000)
    assert (steps, training.get_warmup_steps(steps), training.eval_steps) == (128, 8, 3)
