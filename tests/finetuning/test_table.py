"""Test the table of `neobert glue`, the grid search, and which weights are saved.

Covers the layout of the table, the averages of the published rows, the runs of all seeds with the
best combination of a grid, and the MNLI run that other tasks start from.
"""

import json

import numpy as np
import pytest
from helpers.glue_runs import make_world, run  # noqa: F401
from helpers.jsonl import write_jsonl

from neobert.common.errors import UserError
from neobert.common.files import write_json
from neobert.common.published import GLUE
from neobert.finetuning import glue_command as glue
from neobert.finetuning import glue_run, glue_table
from neobert.finetuning.glue_options import GLUE_OPTIONS
from neobert.finetuning.glue_tasks import TASKS


# ------------------------------------------------------------------------------------------------
# table


def fake_result(folder, task, seed, score, name="mine", selected=None, row=None, **settings):
    """Write the result of a finished run, and return the directory of the run.

    Args:
        folder: Output directory of `neobert glue`.
        task: Name of the task.
        seed: Seed of the run.
        score: Dev score.
        name: Name of the model.
        selected: Score that selects the checkpoint, by default the dev score.
        row: Row of the table, by default the name of the model.
        **settings: Settings of the run.
    """
    values = {"seed": seed, "learning_rate": 1e-5, "revision": "a", "rows": "b", **settings}
    result = {"neobert": "glue", "task": task, "name": name, "row": row or name}
    result |= {"settings": values, "score": score}
    result |= {"last": {"score": score - 0.01}, "best_of_all_evaluations": score + 0.01}
    result["selected"] = {"score": score if selected is None else selected}
    path = folder / name / task / f"{seed}-{values['learning_rate']}" / "result.json"
    write_json(path, result)
    return path.parent


def test_table_layout(tmp_path):
    """Check the header, the published rows, and the measured rows with their averages."""
    for task in TASKS:
        for seed, score in ((1, 0.80), (2, 0.84)):
            fake_result(tmp_path, task, seed, score)
    # A group of two seeds is preferred to a single seed with a higher score. Of two groups with the
    # same number of seeds, the one with the higher selection score is preferred. Dev scores do not
    # count.
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
    # The standard deviation of 80 and 84, with n - 1 degrees of freedom, is 2.83.
    assert mine == ["mine", "measured, 2 seeds", *["82.0 ± 2.8"] * 8, "82.0"]

    table = json.loads((tmp_path / "table.json").read_text())
    expected = ["other", "measured, 1 seed", *[None] * 4, "85.0", *[None] * 4]
    assert table["rows"][-1] == expected, "The average requires all eight tasks."
    (cell,) = [cell for cell in table["measured"] if cell["name"] == "other"]
    assert (cell["score"], cell["deviation"], cell["seeds"]) == (0.85, None, 1)


@pytest.mark.parametrize(
    "options, row",
    [
        (["--data", "folder/mine"], "m (data: mine)"),
        (["--lora", "--lora-rank", "4"], "m (LoRA r=4)"),
        (["--selection", "dev"], "m (selected on dev)"),
        (["--learning-rate", "1e-4"], "m"),
    ],
)
def test_incomparable_runs_have_separate_rows(options, row):
    """Options that make runs incomparable are part of the name of the row."""
    assert GLUE_OPTIONS.read(["--task", "rte", "--model", "m", *options]).row == row


def test_published_averages():
    """The average of each published row is the mean of its tasks.

    The tolerance allows for the rounding of the paper, which is coarser for NomicBERT and BERT.
    """
    for name, values in GLUE.items():
        assert abs(np.mean(values[:-1]) - values[-1]) < 1.6, (
            f"The values of {name} do not match the published average."
        )


def test_grid_runs_best_combination_with_all_seeds(tmp_path, monkeypatch):
    """The grid is searched with the first seed, and the best combination is run with all seeds."""
    calls = []

    def fine_tune(run, *arguments):
        rate = run.hyperparameters.learning_rate
        calls.append((rate, run.hyperparameters.batch_size, run.seed))
        # The learning rate 2e-5 has the best selection score, but not the best dev score.
        selected, score = (0.9, 0.5) if rate == 2e-5 else (0.4, 0.8)
        return {"score": score, "selected": {"score": selected}, "last": {"score": score}}

    monkeypatch.setattr(glue, "fine_tune", fine_tune)
    options = GLUE_OPTIONS.read(
        [
            *("--task", "sst2", "--model", "mine", "--output", str(tmp_path), "--grid"),
            *("--batch-size", "8", "--weight-decay", "0.1", "--seeds", "5", "6"),
        ]
    )
    results = glue.run_task(
        options, TASKS["sst2"], glue.Inputs(None, "ours", 768, splits={"sst2": {}})
    )

    assert len(calls) == 8, "Six learning rates with the first seed, then two runs with the best."
    assert calls[-2:] == [(2e-5, 8, 5), (2e-5, 8, 6)] and len(results) == 2


def test_starts_from_mnli_run_with_best_selection_score(tmp_path):
    """Tasks start from the MNLI run of the same row with the highest selection score."""
    argv = ["--task", "rte", "--model", "m", "--name", "mine", "--output", str(tmp_path)]
    options = GLUE_OPTIONS.read(argv)
    for seed, score, selected in ((1, 0.9, 0.5), (2, 0.6, 0.8), (3, 0.7, 0.7)):
        folder = fake_result(tmp_path, "mnli", seed, score, selected=selected)
        if seed == 1:
            # A run without saved weights cannot be the start.
            assert glue.choose_start(options, TASKS["rte"]) == (None, "m")
        (folder / "best").mkdir()

    # The run of another model has a higher score.
    fake_result(tmp_path, "mnli", 4, 0.95, selected=0.99, name="others")
    best = tmp_path / "mine" / "mnli" / "2-1e-05"
    assert glue.choose_start(options, TASKS["rte"]) == (best.name, str(best / "best"))


def change_results(folder, change):
    """Change the results of all runs below a directory as if a user had edited the files."""
    for path in folder.rglob("result.json"):
        result = json.loads(path.read_text())
        change(result)
        write_json(path, result)


@pytest.mark.parametrize(
    "change, difference",
    [
        (lambda result: result.pop("settings"), "missing required field `settings`"),
        (
            lambda result: result["settings"].pop("revision"),
            r"missing required field `revision` - at `\$.settings`",
        ),
        (lambda result: result.update(selected=1), r"Expected `object`, got `int` - at `"),
        (lambda result: result.update(score="x"), r"Expected `float`, got `str` - at `\$.score`"),
        (lambda result: result.update(task="x"), r"Expected `str` matching .* - at `\$.task`"),
        (lambda result: result.update(baselines=[]), "missing required field `.*`"),
    ],
    ids=["settings", "revision", "selected", "score", "task", "baselines"],
)
def test_result_that_was_edited_by_hand(world, tmp_path, change, difference):
    """A damaged result.json stops the command before a run, with the file and the remedy."""
    folder = fake_result(tmp_path, "sst2", 1, 0.8)
    change_results(tmp_path, change)
    message = (
        f"^{folder}/result.json is not the result of a run of `neobert glue` .*{difference}.*\\. "
        f"Restore the file, or remove {folder} to repeat the run\\.$"
    )
    with pytest.raises(UserError, match=message):
        run(world, tmp_path)
    assert not list(tmp_path.rglob("run.json"))

    # A file of another program is no result.
    change_results(tmp_path, lambda result: result.pop("neobert"))
    assert glue_table.finished_runs(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("keep, kept", [("best", {1, 2}), ("all", {1, 2, 3})])
def test_keep_models_option(world, tmp_path, monkeypatch, keep, kept):
    """By default, the weights of a run are saved if its score is higher than all earlier scores.

    Weights that were saved before are not removed. With "all", the weights of all runs are saved.
    """
    scores = iter([0.5, 0.5, 0.7, 0.7, 0.6, 0.6])
    monkeypatch.setattr(
        glue_run, "evaluation_metrics", lambda *_: {"score": next(scores), "dev_score": 0.5}
    )
    settings = {"num_train_epochs": 0.2, "max_eval_interval": 1}
    run(world, tmp_path, seeds="1,2,3", keep_models=keep, **settings)

    best = [path.parent for path in tmp_path.rglob("best/model.safetensors")]
    assert {int(path.parent.name.split("seed")[1][0]) for path in best} == kept
    assert len(glue_table.finished_runs(tmp_path)) == 3


def test_different_weights_or_rows_need_another_name(world, tmp_path):
    """Other weights or other rows under the name of an earlier run are an error."""
    output = tmp_path / "out"
    options = {"num_train_epochs": 0.2, "name": "mine"}
    run(world, output, **options)
    assert "| mine (data: data) |" in (output / "table.md").read_text()

    message = "`name` 'mine' is already used in .* for other weights or rows. Choose another --name"
    with pytest.raises(UserError, match=message):
        run(world, output, **{**options, "model": world / "bert"})

    for path in (world / "data" / "sst2").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_jsonl(tmp_path / "data" / "sst2" / path.name, rows[1:])
    with pytest.raises(UserError, match=message):
        run(world, output, **{**options, "data": tmp_path / "data"})
    assert len(glue_table.finished_runs(output)) == 1


def test_unrelated_table_files_are_not_replaced(world, tmp_path):
    """Table files that the command did not write are an error, and stay unchanged."""
    for name in ("table.md", "table.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(UserError, match="was not written by `neobert glue`"):
            run(world, tmp_path)
        assert (tmp_path / name).read_text() == "{}"
        (tmp_path / name).unlink()


@pytest.mark.parametrize("name", ["..", ".", "../other", "a/b", "two words"])
def test_names_that_are_no_directory_are_refused(name):
    """The name of a row is that of a directory in the output, which it must not leave."""
    with pytest.raises(UserError, match="`name` must consist of letters, digits and"):
        GLUE_OPTIONS.read(["--task", "rte", "--model", "m", "--name", name])
