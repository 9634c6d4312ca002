"""Test the protocol of `neobert glue`.

Metrics are compared with values computed by hand. The hyperparameters and the evaluation interval
are those of the paper. Also covers early stopping, held-out rows and the identity of a run.
"""

import math
from dataclasses import astuple

import numpy as np
import pytest
from helpers.glue_runs import make_world, run  # noqa: F401
from transformers import DistilBertConfig

from neobert.common import loading
from neobert.common.errors import UserError
from neobert.embeddings import windows
from neobert.finetuning import glue_data, glue_run, glue_tasks
from neobert.finetuning import model as glue_model
from neobert.finetuning.glue_options import GLUE_OPTIONS, GlueRun, Hyperparameters, SelectionOptions
from neobert.finetuning.glue_tasks import TASKS


# ------------------------------------------------------------------------------------------------
# metrics


def test_metrics_match_hand_computed_values():
    """Check the metrics of GLUE tasks against values computed by hand."""

    def scores(name, logits, labels):
        predictions = glue_tasks.predicted_labels(TASKS[name], logits)
        return glue_tasks.scores(TASKS[name], predictions, labels)

    labels = np.array([1, 1, 1, 0, 0, 1])
    # There are 3 true positives, 1 false positive, 1 false negative and 1 true negative.
    logits = np.eye(2)[[1, 0, 1, 0, 1, 1]]
    values = scores("mrpc", logits, labels)
    assert values["accuracy"] == pytest.approx(4 / 6) and values["f1"] == pytest.approx(
        2 * 3 / (2 * 3 + 1 + 1)
    )
    # The score of a task with two metrics is their mean.
    assert values["score"] == pytest.approx((4 / 6 + 0.75) / 2)
    matthews = (3 * 1 - 1 * 1) / math.sqrt((3 + 1) * (3 + 1) * (1 + 1) * (1 + 1))
    assert scores("cola", logits, labels) == pytest.approx(
        {"matthews": matthews, "score": matthews}
    )

    predictions = np.array([[1.0], [2.0], [4.0], [3.0]])
    truth = np.array([0.0, 1.0, 2.0, 5.0])
    x = predictions[:, 0] - 2.5
    y = truth - 2.0
    pearson = (x * y).sum() / math.sqrt((x**2).sum() * (y**2).sum())
    values = scores("stsb", predictions, truth)
    # The ranks are 1 2 4 3 and 1 2 3 4, so Spearman's rho is 1 - 6 * (1 + 1) / (4 * 15).
    assert values["pearson"] == pytest.approx(pearson) and values["spearman"] == pytest.approx(0.8)
    # The correlation with a constant is undefined, and must be 0 instead of NaN.
    assert scores("stsb", np.ones((4, 1)), truth)["score"] == 0.0


def test_mnli_score_averages_matched_and_mismatched():
    """The dev score averages both dev splits, and the held-out rows select the checkpoint."""
    labels = np.array([0, 1, 2, 0, 1, 2])
    logits = np.eye(3)[[0, 1, 0, 0, 0, 0]]
    slices = {"heldout": slice(0, 1), "validation_matched": slice(1, 3)}
    slices["validation_mismatched"] = slice(3, 6)

    values = glue_data.evaluation_metrics(TASKS["mnli"], logits, labels, slices)
    assert values["validation_matched_accuracy"] == pytest.approx(1 / 2)
    assert values["validation_mismatched_accuracy"] == pytest.approx(1 / 3)
    # The dev score is the mean of the two accuracies, not the accuracy over all rows (2 / 5).
    assert values["dev_score"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert values["score"] == 1.0, "The held-out rows must select the checkpoint."

    # Without held-out rows, the dev set selects the checkpoint.
    del slices["heldout"]
    values = glue_data.evaluation_metrics(TASKS["mnli"], logits, labels, slices)
    assert values["score"] == values["dev_score"]


# ------------------------------------------------------------------------------------------------
# protocol


def test_presets_and_defaults_match_the_paper():
    """Check the presets and the default options against the paper.

    `paper` contains the batch size, learning rate and weight decay of the best combination of the
    grid, for NeoBERT-4096 and for NeoBERT-1024.
    """
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
    argv = ["--task", "all", "--model", "m"]

    def combinations(task, *arguments):
        return GLUE_OPTIONS.read([*argv, *arguments]).combinations(TASKS[task])

    for task, rows in paper.items():
        for preset, row in zip(("neobert-4096", "neobert-1024"), rows):
            (combination,) = combinations(task, "--preset", preset)
            assert astuple(combination) == row, f"{preset} differs from the paper for {task}."

    # Options that are given explicitly are not searched.
    assert len(combinations("rte", "--grid")) == 5 * 6 * 2
    grid = combinations("rte", "--grid", "--weight-decay", "0")
    assert len(grid) == 30 and {combination.weight_decay for combination in grid} == {0}
    assert {combination.learning_rate for combination in grid} == {
        5e-6,
        6e-6,
        8e-6,
        1e-5,
        2e-5,
        3e-5,
    }
    assert {combination.batch_size for combination in grid} == {2, 4, 8, 16, 32}

    options = GLUE_OPTIONS.read(argv)
    assert (options.selection.patience, options.selection.max_eval_interval) == (15, 500)
    assert (options.optimization.warmup_ratio, options.model.head_dropout) == (0.06, 0.1)
    assert options.optimization.seeds == [1, 2, 3]
    assert options.trainer["num_train_epochs"] == 10
    assert options.trainer["lr_scheduler_type"] == "linear"
    assert combinations("rte", "--lora")[0].learning_rate == 3e-4, (
        "LoRA must have its own default learning rate."
    )


def test_the_learning_rate_depends_on_the_hidden_size():
    """Check the default learning rate of encoders that are smaller than the presets are for.

    Presets are for a hidden size of 768. Smaller encoders get 2e-5 * (768 / hidden size)^5, at most
    1e-3, unless a preset, a learning rate or LoRA is requested.
    """

    def rate(hidden_size, *arguments):
        options = GLUE_OPTIONS.read(["--task", "sst2", "--model", "m", *arguments])
        (hyperparameters,) = options.combinations(TASKS["sst2"], hidden_size)
        assert (hyperparameters.batch_size, hyperparameters.weight_decay) in (
            (32, 1e-2),
            (16, 1e-5),
        )
        return hyperparameters.learning_rate

    assert rate(384) == pytest.approx(6.4e-4)
    assert rate(192) == 1e-3
    assert rate(767) == pytest.approx(2e-5, rel=0.01)
    assert rate(768) == rate(1024) == rate(None) == 8e-6
    assert rate(384, "--preset", "neobert-4096") == 8e-6
    assert rate(384, "--preset", "neobert-1024") == 1e-5
    assert rate(384, "--learning-rate", "1e-5") == 1e-5
    assert rate(384, "--lora") == 3e-4


def test_encoder_hidden_size_is_read_from_config(world, tmp_path):
    """`encoder_hidden_size` reads the hidden size under the name that the architecture uses."""
    assert glue_model.encoder_hidden_size(str(world / "model")) == 32
    assert glue_model.encoder_hidden_size(str(world / "bert")) == 32
    # The configuration of DistilBERT stores the hidden size as `dim`.
    DistilBertConfig(dim=96, n_heads=4).save_pretrained(tmp_path)
    assert glue_model.encoder_hidden_size(str(tmp_path)) == 96


def test_head_dropout_and_new_head(world):
    """Check the dropout and pooling of the head, and the list of parameters that are new."""

    def load(name, **options):
        return glue_model.load_classifier(
            str(world / name), TASKS["mnli"].labels, "single_label_classification", **options
        )

    model, new = load("model", head_dropout=0.25, pooling="cls")
    assert model.dropout.p == 0.25 and model.config.classifier_pooling == "cls"
    assert model.config.num_labels == 3 and model.config.id2label[2] == "contradiction"
    # A masked language model has no classification head.
    assert new == ["classifier.bias", "classifier.weight", "dense.bias", "dense.weight"]

    model, new = load("bert", head_dropout=0.25)
    assert model.dropout.p == 0.25, "BERT must have the same head dropout as NeoBERT."
    # The checkpoint has a head for two labels, which cannot be used for three.
    assert new == ["classifier.bias", "classifier.weight"]


def test_early_stopping_counts_evaluations_without_progress(world, tmp_path):
    """A run with a negligible learning rate stops after `patience` more evaluations."""
    runs = run(world, tmp_path, learning_rate=1e-12, num_train_epochs=3, patience=4)
    result = runs["sst2", 1][1]
    assert result["stopped_early"] and len(result["evaluations"]) == 5, (
        "Four evaluations without progress must follow the first one."
    )
    assert result["selected"]["step"] == result["evaluations"][0]["step"], (
        "The first of several equal scores must be selected."
    )


def test_held_out_score_selects_the_checkpoint(world, tmp_path, monkeypatch):
    """The held-out score selects the checkpoint, and its dev score is reported."""
    held_out = iter([0.2, 0.95, 0.3, 0.4, 0.5])
    dev = iter([0.9, 0.1, 0.8, 0.7, 0.6])
    metrics = lambda *_: {"score": next(held_out), "dev_score": next(dev)}  # noqa: E731
    monkeypatch.setattr(glue_run, "evaluation_metrics", metrics)
    result = run(world, tmp_path, patience=3)["sst2", 1][1]

    assert result["selected"]["step"] == 2 and result["score"] == 0.1, (
        "The dev score must not select the checkpoint."
    )
    assert result["last"] == {"step": 5, "score": 0.6}, (
        "The run must stop three evaluations after the best one."
    )
    # The published protocol would report the best dev score.
    assert result["best_of_all_evaluations"] == 0.9


def make_run(*arguments):
    """Return a run of SST-2 with fixed hyperparameters and additional command-line arguments."""
    argv = ["--task", "sst2", "--model", "m", "--num-train-epochs", "4", *arguments]
    hyperparameters = Hyperparameters(batch_size=32, learning_rate=1e-3, weight_decay=0.0)
    return GlueRun(GLUE_OPTIONS.read(argv), TASKS["sst2"], hyperparameters, seed=1)


def test_run_directory_depends_on_result_affecting_options():
    """Only options that affect the results change the directory of a run.

    The name of the directory ends with a digest of the settings, so the command recognizes finished
    runs.
    """
    run = make_run()
    assert run.folder.as_posix().startswith("runs/glue/m/sst2/bs32_lr0.001_wd0_seed1_")

    for same in (("--output", "runs/glue"), ("--seeds", "7"), ("--data", "x"), ("--start", "none")):
        assert make_run(*same).settings == run.settings, f"{same} must not change the settings."
    for other in (("--head-dropout", "0"), ("--patience", "3"), ("--lora",), ("--optim", "sgd")):
        assert make_run(*other).folder != run.folder, f"{other} must change the directory."
    assert make_run("--lora", "--lora-rank", "4").folder.name.startswith(
        "bs32_lr0.001_wd0_lora4_seed1_"
    )

    assert run.settings["lora"] is None and "lora_rank" not in run.settings
    assert set(run.settings) == {
        *("max_length", "selection", "heldout_fraction", "heldout_rows", "patience"),
        *("max_eval_interval", "evaluations_per_epoch", "batch_size", "learning_rate"),
        *("weight_decay", "warmup_ratio", "classifier_pooling", "head_dropout", "task", "seed"),
        *("lora", "trainer", "revision", "rows", "start"),
    }


@pytest.mark.parametrize("characters", [1_000_000, 100])
def test_held_out_rows_are_not_trained_on(world, monkeypatch, characters):
    """The training rows and the held-out rows are disjoint and cover the training split.

    Rows are tokenized in groups of at most `characters` characters.
    """
    monkeypatch.setattr(windows, "_CHARACTERS", characters)
    splits = glue_tasks.load_task(TASKS["sst2"], str(world / "data"))
    tokenizer = loading.load_tokenizer(str(world / "model"))
    train, evaluation, slices = glue_data.prepare(
        TASKS["sst2"], splits, tokenizer, SelectionOptions(), 64
    )
    # Of 160 training rows a tenth is held out. The 40 dev rows follow the held-out rows.
    assert (len(train), slices) == (144, {"heldout": slice(0, 16), "validation": slice(16, 56)})

    kept, held_out = glue_data.split_heldout(160, 0.1, 2000)
    assert sorted(kept + held_out) == list(range(160)), "Each row must be in exactly one part."
    assert len(glue_data.split_heldout(100_000, 0.1, 2000)[1]) == 2000

    texts = [splits["train"]["sentence"][i] for i in held_out]
    ids = evaluation["input_ids"][:16]
    assert [tokenizer.decode(row, skip_special_tokens=True) for row in ids] == texts
    assert train["labels"][:] == [splits["train"]["label"][i] for i in kept]


def test_held_out_rows_are_a_random_sample():
    """Held-out rows are a random sample, because training files may be sorted.

    About 50 rows of each half of 1,000 rows must be held out.
    """
    _, held_out = glue_data.split_heldout(1000, 0.1, 2000)
    first_half = sum(row < 500 for row in held_out)
    assert len(held_out) == 100 and 30 < first_half < 70


def test_at_least_one_row_is_held_out():
    """Held-out rows select the checkpoint, so at least one row is held out."""
    for rows in (2, 5, 9, 10, 19, 20):
        kept, held_out = glue_data.split_heldout(rows, 0.1, 2000)
        assert len(held_out) == max(1, rows // 10)
        assert sorted(kept + held_out) == list(range(rows))

    message = "`--heldout-fraction` must be a number, greater than 0 and less than 1, got '0'"
    with pytest.raises(UserError, match=message):
        make_run("--heldout-fraction", "0")


@pytest.mark.parametrize(
    ("batches", "steps"), [(5, 1), (10, 1), (59, 5), (4999, 499), (5000, 500), (24544, 500)]
)
def test_evaluation_interval(tmp_path, batches, steps):
    """The interval is a tenth of an epoch, at least 1 and at most 500 steps."""

    def interval(*argv):
        return glue_run.trainer_arguments(make_run(*argv), tmp_path, batches * 32)[0].eval_steps

    assert interval() == steps
    assert interval("--evaluations-per-epoch", "2") == min(500, batches // 2)


def test_warmup_is_a_fraction_of_all_steps(tmp_path):
    """The warmup takes 6 % of all steps, rounded up.

    1,000 rows in batches of 32 are 32 steps per epoch and 128 steps in 4 epochs, and 6 % of 128 is
    7.68.
    """
    training, steps = glue_run.trainer_arguments(make_run(), tmp_path, 1000)
    assert (steps, training.get_warmup_steps(steps), training.eval_steps) == (128, 8, 3)

    # A maximum number of steps replaces the epochs.
    training, steps = glue_run.trainer_arguments(make_run("--max-steps", "50"), tmp_path, 1000)
    assert (steps, training.max_steps, training.get_warmup_steps(steps)) == (50, 50, 3)
