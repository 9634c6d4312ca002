"""Pins the GLUE table: its layout, the published averages, the best of a grid with all seeds, the
runs whose weights stay."""

import json

import numpy as np
import pytest
from glue_runs import make_world, run  # noqa: F401
from jsonl import write_jsonl

from neobert.common.errors import UserError
from neobert.common.published import GLUE
from neobert.finetuning import glue, glue_table
from neobert.finetuning.glue_tasks import TASKS
from neobert.finetuning.options import OPTIONS


# ------------------------------------------------------------------------------------------------
# table


def fake_result(folder, task, seed, score, name="mine", selected=None, **settings):
    values = {
        "seed": seed,
        "lora": None,
        "selection": "heldout",
        "learning_rate": 1e-5,
        **settings,
    }
    result = {
        "task": task,
        "name": name,
        "settings": values,
        "score": score,
        "last": {"score": score - 0.01},
    }
    result |= {
        "selected": {"score": score if selected is None else selected},
        "best_of_all_evaluations": score + 0.01,
    }
    path = folder / name / task / f"{seed}-{values['learning_rate']}" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result))


def test_table_layout(tmp_path):
    for task in TASKS:
        for seed, score in ((1, 0.80), (2, 0.84)):
            fake_result(tmp_path, task, seed, score)
    # A single seed does not win over two, however good; of two groups of one size the better
    # selection score counts, not the dev score.
    fake_result(tmp_path, "rte", 3, 0.99, learning_rate=1e-4)
    fake_result(tmp_path, "sst2", 1, 0.90, name="other", selected=0.7)
    fake_result(tmp_path, "sst2", 1, 0.85, name="other", selected=0.8, learning_rate=1e-4)
    glue_table.write_tables(tmp_path)
    lines = [
        line.strip("| ").split(" | ")
        for line in (tmp_path / "table.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    tasks = ["MNLI", "QNLI", "QQP", "RTE", "SST", "MRPC", "CoLA", "STS"]
    assert lines[0] == ["model", "source", *tasks, "avg"]
    published = [line for line in lines if len(line) > 1 and line[1] == "published"]
    assert len(published) == len(GLUE) == 12 and ["NeoBERT-4096", "published", "89.0", "93.7"] in [
        line[:4] for line in published
    ]
    mine = next(line for line in lines if line[0] == "mine")
    # Standard deviation of 80 and 84 with n - 1: 2.83.
    assert mine == ["mine", "measured, 2 seeds", *["82.0 ± 2.8"] * 8, "82.0"]
    table = json.loads((tmp_path / "table.json").read_text())
    expected = ["other", "measured, 1 seed", *[None] * 4, "85.0", *[None] * 4]
    assert table["rows"][-1] == expected, "an average needs all eight tasks"
    (cell,) = [cell for cell in table["measured"] if cell["name"] == "other"]
    assert (cell["score"], cell["deviation"], cell["seeds"]) == (0.85, None, 1)


@pytest.mark.parametrize(
    "settings, note",
    [
        ({"data": "folder/mine"}, "data: mine"),
        ({"lora": {"rank": 4}}, "LoRA r=4"),
        ({"selection": "dev"}, "selected on dev"),
        ({"metric": "accuracy"}, "selected by accuracy"),
    ],
)
def test_runs_that_do_not_compare_are_rows_of_their_own(tmp_path, settings, note):
    fake_result(tmp_path, "rte", 1, 0.5)
    fake_result(tmp_path, "rte", 2, 0.9, **{"learning_rate": 1e-4, **settings})
    assert sorted(glue_table.collect(tmp_path)["name"]) == ["mine", f"mine ({note})"]


def test_published_averages():
    """Every published row's average is that of its tasks, to the rounding of the paper (its
    NomicBERT and BERT rows are rounded further)."""
    for name, values in GLUE.items():
        assert abs(np.mean(values[:-1]) - values[-1]) < 1.6, f"{name}: a figure was copied wrongly."


def test_grid_runs_the_best_with_all_seeds(tmp_path, monkeypatch):
    done = []

    def fine_tune(output, settings, splits, model, tokenizer, options, trainer):
        rate = settings["learning_rate"]
        done.append((rate, settings["batch_size"], settings["seed"]))
        # Selection prefers 2e-5, the dev score prefers 1e-5.
        selected, score = (0.9, 0.5) if rate == 2e-5 else (0.4, 0.8)
        return {"score": score, "selected": {"score": selected}, "last": {"score": score}}

    monkeypatch.setattr(glue, "fine_tune", fine_tune)
    arguments, trainer = OPTIONS["glue"].read(
        [
            *("--task", "sst2", "--model", "mine", "--output", str(tmp_path), "--grid"),
            *("--batch-size", "8", "--weight-decay", "0.1", "--seeds", "5", "6"),
        ]
    )
    known = {"revision": "ours", "tokenizer": None}
    results = glue.run_task(arguments, trainer, TASKS["sst2"], {}, None, known)
    assert len(done) == 8, "six learning rates with the first seed, then both seeds of the best"
    assert done[-2:] == [(2e-5, 8, 5), (2e-5, 8, 6)] and len(results) == 2, (
        "The best is the one with the best selection score."
    )


def _give_weights(folder):
    for path in folder.rglob("result.json"):
        (path.parent / "best").mkdir()
        (path.parent / "best" / "config.json").write_text("{}")


def test_the_mnli_run_to_start_from_is_the_best_selected_one_of_the_same_weights(tmp_path):
    for seed, score, selected, revision in (
        (1, 0.9, 0.5, "ours"),
        (2, 0.6, 0.8, "ours"),
        (3, 0.7, 0.7, "ours"),
        (4, 0.95, 0.99, "others"),
    ):
        fake_result(tmp_path, "mnli", seed, score, selected=selected, revision=revision)
    arguments, _ = OPTIONS["glue"].read(
        ["--task", "rte", "--model", "m", "--name", "mine", "--output", str(tmp_path)]
    )
    assert glue.mnli_start(arguments, "ours") is None, "a run whose weights are gone is no start"
    _give_weights(tmp_path)
    assert glue.mnli_start(arguments, "ours") == tmp_path / "mine" / "mnli" / "2-1e-05"
    assert glue.mnli_start(arguments, "third") is None


@pytest.mark.parametrize(
    "keep, task, left",
    [
        ("best", "rte", {2}),
        ("none", "rte", set()),
        ("none", "mnli", {2}),
        ("all", "rte", {1, 2, 3}),
    ],
)
def test_the_weights_that_stay_are_those_of_the_best_selected_run(tmp_path, keep, task, left):
    for seed, score, selected in ((1, 0.9, 0.5), (2, 0.6, 0.8), (3, 0.7, 0.7)):
        fake_result(tmp_path, task, seed, score, selected=selected)
    _give_weights(tmp_path)
    arguments, _ = OPTIONS["glue"].read(
        [
            *("--task", task, "--model", "m", "--name", "mine", "--output", str(tmp_path)),
            *("--keep-models", keep),
        ]
    )
    glue._prune(arguments, TASKS[task])
    assert {int(path.parent.name[0]) for path in tmp_path.rglob("best")} == left
    assert len(glue_table.finished_runs(tmp_path)) == 3, "results stay"


def test_a_row_of_the_table_holds_one_model_and_one_set_of_rows(world, tmp_path):
    output, quick = tmp_path / "out", {"num_train_epochs": 0.2, "name": "mine"}
    run(world, output, **quick)
    assert "| mine (data: data) |" in (output / "table.md").read_text(), (
        "The row must say that its data is not GLUE's."
    )
    words = "is a run of other weights or rows under the name 'mine'; give another --name"
    with pytest.raises(UserError, match=words):
        run(world, output, **{**quick, "model": world / "bert"})
    for path in (world / "data" / "sst2").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_jsonl(tmp_path / "data" / "sst2" / path.name, rows[1:])
    with pytest.raises(UserError, match=words):
        run(world, output, **{**quick, "data": tmp_path / "data"})
    assert len(glue_table.finished_runs(output)) == 1


def test_tables_of_others_are_not_replaced(world, tmp_path):
    for name in ("table.md", "table.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(UserError, match="has a table that is not of this command"):
            run(world, tmp_path)
        assert (tmp_path / name).read_text() == "{}"
        (tmp_path / name).unlink()
