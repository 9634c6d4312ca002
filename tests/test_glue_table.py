"""Pins the GLUE table: its layout, the published averages, the best of a grid with all seeds, and
how each row was made."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
from glue_runs import make_world, run  # noqa: F401
from jsonl import write_jsonl

from neobert.common.errors import UserError
from neobert.common.published import GLUE
from neobert.common.runs import stamps
from neobert.finetuning import glue, glue_run, glue_table
from neobert.finetuning.glue_tasks import TASKS
from neobert.finetuning.options import OPTIONS, RunSettings


# ------------------------------------------------------------------------------------------------
# table


def fake_result(folder, task, seed, score, name="mine", selected=None, **settings):
    values = {
        "seed": seed,
        "lora": None,
        "selection": "heldout",
        "max_train_samples": None,
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
    assert lines[0] == [
        "model",
        "source",
        "MNLI",
        "QNLI",
        "QQP",
        "RTE",
        "SST",
        "MRPC",
        "CoLA",
        "STS",
        "avg",
    ]
    published = [line for line in lines if len(line) > 1 and line[1] == "published"]
    assert len(published) == len(GLUE) == 12 and ["NeoBERT-4096", "published", "89.0", "93.7"] in [
        line[:4] for line in published
    ]
    mine = next(line for line in lines if line[0] == "mine")
    # Standard deviation of 80 and 84 with n - 1: 2.83.
    assert mine == ["mine", "measured, 2 seeds", *["82.0 ± 2.8"] * 8, "82.0"]
    data = json.loads((tmp_path / "table.json").read_text())
    other = next(row for row in data["measured"] if row["name"] == "other")
    assert other["cells"]["sst2"]["score"] == 0.85 and other["average"] is None, (
        "An average needs all eight tasks."
    )


@pytest.mark.parametrize(
    "settings, note",
    [
        ({"data": "folder/mine"}, "data: mine"),
        ({"lora": {"rank": 4}}, "LoRA r=4"),
        ({"selection": "dev"}, "selected on dev"),
        ({"metric": "accuracy"}, "selected by accuracy"),
        ({"max_train_samples": 7}, "7 training rows"),
        ({"max_eval_samples": 5}, "5 dev rows"),
    ],
)
def test_runs_that_do_not_compare_are_rows_of_their_own(tmp_path, settings, note):
    fake_result(tmp_path, "rte", 1, 0.5)
    fake_result(tmp_path, "rte", 2, 0.9, **{"learning_rate": 1e-4, **settings})
    assert [row["name"] for row in glue_table.collect(tmp_path)] == ["mine", f"mine ({note})"]


def test_a_broken_result_is_left_out(tmp_path, caplog):
    fake_result(tmp_path, "rte", 1, 0.5)
    for name, text in (("cut", '{"task": "rt'), ("other", "{}"), ("list", "[]")):
        (tmp_path / "mine" / "rte" / name).mkdir()
        (tmp_path / "mine" / "rte" / name / "result.json").write_text(text)
    assert len(glue_table.finished_runs(tmp_path)) == 1
    assert caplog.text.count("is not a complete result and is left out") == 3, (
        "what is left out must be said"
    )


def test_published_averages():
    """Every published row's average is that of its tasks, to the rounding of the paper (its
    NomicBERT and BERT rows are rounded further)."""
    for name, values in GLUE.items():
        assert abs(np.mean(values[:-1]) - values[-1]) < 1.6, f"{name}: a figure was copied wrongly."


def test_grid_runs_the_best_with_all_seeds(world, tmp_path, monkeypatch):
    done = []

    def fine_tune(settings, splits, model, tokenizer, folder, options, trainer):
        done.append((settings.learning_rate, settings.batch_size, settings.seed))
        # Selection prefers 2e-5, the dev score prefers 1e-5.
        selected, score = (0.9, 0.5) if settings.learning_rate == 2e-5 else (0.4, 0.8)
        fake_result(
            folder.parent.parent.parent,
            "sst2",
            settings.seed,
            score,
            selected=selected,
            learning_rate=settings.learning_rate,
        )
        result = {
            "score": score,
            "selected": {"score": selected},
            "last": {"score": score},
            "best_of_all_evaluations": score,
        }
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(
            json.dumps({**result, "name": "x", "task": "y", "settings": {}})
        )
        return result

    monkeypatch.setattr(glue_run, "fine_tune", fine_tune)
    given = ["--task", "sst2", "--model", "mine", "--output", str(tmp_path), "--grid"]
    arguments, trainer = OPTIONS["glue"].read(
        [*given, "--batch-size", "8", "--weight-decay", "0.1", "--seeds", "5", "6"]
    )
    monkeypatch.setattr(glue, "_prune", lambda *_: None)
    results = glue.run_task(arguments, trainer, TASKS["sst2"], {}, None, "revision")
    assert len(done) == 7, (
        f"Six learning rates with the first seed and one more seed of the best, but {done}."
    )
    assert done[-1] == (2e-5, 8, 6) and len(results) == 2, (
        "The best is the one with the best selection score."
    )


def _give_weights(folder):
    for path in folder.rglob("result.json"):
        (path.parent / "best").mkdir()
        (path.parent / "best" / "config.json").write_text("{}")
        (path.parent / "glue.json").write_text(
            json.dumps({"files": stamps(path.parent, ["best/config.json"])})
        )


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
    assert glue.mnli_start(arguments, "ours") == (
        "2-1e-05",
        tmp_path / "mine" / "mnli" / "2-1e-05" / "best",
    )
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
            "--task",
            task,
            "--model",
            "m",
            "--name",
            "mine",
            "--output",
            str(tmp_path),
            "--keep-models",
            keep,
        ]
    )
    glue._prune(arguments, TASKS[task])
    assert {int(path.parent.name[0]) for path in tmp_path.rglob("best")} == left
    (tmp_path / "mine" / task / "3-1e-05" / "best").mkdir(exist_ok=True)
    (tmp_path / "mine" / task / "3-1e-05" / "best" / "notes.txt").write_text("mine")
    glue._prune(arguments, TASKS[task])
    assert (tmp_path / "mine" / task / "3-1e-05" / "best" / "notes.txt").exists()
    assert len(glue_table.finished_runs(tmp_path)) == 3, "results stay"


def test_the_table_says_how_each_row_was_made(tmp_path):
    """Each cell: seeds, rows, what is not glue.yaml's; each run: its command and commit, also where
    a row was made by several."""
    arguments, trainer = OPTIONS["glue"].read(
        ["--task", "sst2", "--model", "m", "--num-train-epochs", "3", "--lora", "--lora-rank", "4"]
    )
    for task, seed, command in (("sst2", 2, "first"), ("sst2", 1, "first"), ("stsb", 1, "second")):
        hyper = {**arguments.combinations(TASKS[task])[0], "batch_size": 32}
        settings = vars(RunSettings.of(arguments, trainer, TASKS[task], hyper, seed, revision=""))
        fake_result(tmp_path, score=0.5, **settings)
        path = next((tmp_path / "mine" / task).glob(f"{seed}-*")) / "result.json"
        made = {"command": f"neobert glue {command}", "commit": "abc", "hardware": "a CPU"}
        path.write_text(
            json.dumps(
                {
                    **json.loads(path.read_text()),
                    "rows": {"train": 900, "heldout": 100},
                    "environment": made,
                }
            )
        )
    fake_result(tmp_path, "rte", 1, 0.5, name="older", start="a run of MNLI")
    glue_table.write_tables(tmp_path)
    lines = (
        (tmp_path / "table.md")
        .read_text()
        .split("## The measured rows")[1]
        .strip()
        .splitlines()[2:]
    )
    assert lines == [
        "- mine (LoRA r=4), SST: seeds 1, 2; rows: 900 train, 100 heldout; unlike the protocol: "
        "lora_rank 4 (16), num_train_epochs 3 (10)",
        "- mine (LoRA r=4), STS: seed 1; rows: 900 train, 100 heldout; unlike the protocol: "
        "lora_rank 4 (16), num_train_epochs 3 (10), "
        "start from the model (the best MNLI run)",
        "- mine (LoRA r=4), SST 1, SST 2: `neobert glue first`, commit abc, a CPU",
        "- mine (LoRA r=4), STS 1: `neobert glue second`, commit abc, a CPU",
        "- older, RTE: seed 1; unlike the protocol: learning_rate 1e-05 (5e-06)",
        "- older, RTE 1: the command is not in result.json",
    ]
    cell = json.loads((tmp_path / "table.json").read_text())["measured"][0]["cells"]["sst2"]
    assert [run["seed"] for run in cell["runs"]] == cell["seeds"] == [1, 2] and cell["runs"][0][
        "environment"
    ]["commit"] == "abc"


def test_a_row_of_the_table_holds_one_model_and_one_set_of_rows(world, tmp_path):
    output, quick = tmp_path / "out", {"num_train_epochs": 0.2, "name": "mine"}
    run(world, output, **quick)
    assert "| mine (data: data) |" in (output / "table.md").read_text(), (
        "The row must say that its data is not GLUE's."
    )
    assert "it is not a GLUE score" in (output / "table.md").read_text()
    with pytest.raises(
        UserError,
        match=(
            "holds runs of other weights .* under the name 'mine'; give this model another --name"
        ),
    ):
        run(world, output, **{**quick, "model": world / "bert"})
    changed = tmp_path / "data" / "sst2"
    for path in (world / "data" / "sst2").iterdir():
        write_jsonl(
            changed / path.name, [json.loads(line) for line in path.read_text().splitlines()][1:]
        )
    with pytest.raises(
        UserError, match="the rows of sst2 in .* are not those of the finished runs"
    ):
        run(world, output, **{**quick, "data": tmp_path / "data"})
    assert len(glue_table.finished_runs(output)) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="output must be a folder"):
        run(world, tmp_path / "file", **quick)


def test_tables_of_others_are_not_replaced(world, tmp_path, monkeypatch):
    monkeypatch.setattr(glue, "run_task", lambda *given: pytest.fail("the training began"))
    for name in ("table.md", "table.json"):
        (tmp_path / name).write_text("[]")
        with pytest.raises(UserError, match=f"{name} was not made by neobert glue"):
            run(world, tmp_path)
        assert (tmp_path / name).read_text() == "[]"
        (tmp_path / name).unlink()


def test_a_table_that_was_interrupted_is_written_again(tmp_path, monkeypatch):
    for name in ("write_text", "write_json"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(glue_table, name, Mock(side_effect=KeyboardInterrupt))
            glue_table.write_tables(tmp_path)
    glue_table.write_tables(tmp_path)
    assert (tmp_path / "table.md").is_file()
