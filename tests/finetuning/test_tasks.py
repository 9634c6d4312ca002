"""Test the rows of GLUE tasks.

All file types give the same rows. Covers splits, held-out rows, names on the Hub, and messages
about invalid rows and options.
"""

import json
import shutil
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from helpers.glue_runs import make_world, run  # noqa: F401

from neobert.common.errors import UserError
from neobert.finetuning import glue_run
from neobert.finetuning import tasks as glue_tasks
from neobert.finetuning.options import OPTIONS, Hyperparameters
from neobert.finetuning.tasks import TASKS


# ------------------------------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"task": "squad"}, "`task` must be all or some of mnli, .*, got 'squad'"),
        ({"task": "cola"}, "there is no file of rows .*/cola/train"),
        ({"data": "nobody/nothing"}, "'nobody/nothing' is not a directory, and task sst2 could"),
        ({"preset": "best"}, "`preset` must be one of neobert-4096, neobert-1024, got 'best'"),
        ({"lora": True, "lora_targets": "query"}, "LoRA target 'query' is not a linear layer"),
        ({"gradient_accumulation_steps": 3}, "processes x gradient_accumulation_steps = 3"),
        ({"presets": "{mine: {sst2: {foo: 3}}}", "preset": "mine"}, "has no weight_decay for sst2"),
    ],
)
def test_bad_options(world, tmp_path, more, words):
    with pytest.raises(UserError, match=words):
        run(world, tmp_path / "out", **more)
    files = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files <= {"run.json", ".lock"}, "Work was done although the input is bad."


def test_names_and_grids():
    arguments = ["--task", "sst2", "--model", "here/sub/..", "--grid"]
    grid = "{batch_size: [3], learning_rate: [1e-4], weight_decay: [0]}"
    options = OPTIONS["glue"].read([*arguments, "--grid-values", grid])
    assert options.name == "here", "a row's folder is below the output"
    (chosen,) = options.combinations(TASKS["sst2"])
    assert chosen == Hyperparameters(batch_size=3, learning_rate=1e-4, weight_decay=0)


def test_every_task_is_checked_before_the_first_is_trained(world, tmp_path, monkeypatch):
    processes = SimpleNamespace(num_processes=3, is_main_process=True)
    monkeypatch.setattr(glue_run, "process_state", lambda: processes)
    with pytest.raises(UserError, match="`batch_size` of rte must be a multiple of .* = 3, got 16"):
        run(world, tmp_path / "out", "rte,sst2")
    assert not (tmp_path / "out").exists()


GOOD_ROW = {"sentence": "good", "label": 1}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "sst2/train has no rows"),
        ([GOOD_ROW, "{broken"], "train.jsonl, row 2: Expecting property name"),
        (
            [GOOD_ROW, {"sentence": "bad", "label": 2}],
            r"row 2: the label .* \(nega.*, got 2",
        ),
        ([{"sentence": "bad", "label": -1}], "label of sst2 must be from 0 to 1 .*, got -1"),
        ([{"sentence": "bad", "label": 0.5}], "label of sst2 must be from 0 to 1 .*, got 0.5"),
        (
            [{"sentence": "bad", "label": "positive"}],
            "must be from 0 to 1 .*, got 'positive'",
        ),
        ([{"sentence": 5, "label": 0}], "row 1: 'sentence' must be text"),
    ],
)
def test_bad_rows(tmp_path, lines, words):
    path = tmp_path / "sst2" / "train.jsonl"
    path.parent.mkdir()
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    with pytest.raises(UserError, match=words):
        glue_tasks.load_task(TASKS["sst2"], str(tmp_path))


def test_file_kinds_give_the_same_rows(tmp_path):
    """A train split of one kind and a dev split of another; parquet as the Hub has it, sharded."""
    folder = tmp_path / "stsb"
    rows = [{"sentence1": "a, b", "sentence2": 'say "c"', "label": 2.5}]
    rows += [{"sentence1": "d", "sentence2": "e", "label": 0.0}]
    folder.mkdir()
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "train-00000-of-00001.parquet")
    (folder / "validation.csv").write_text(
        'sentence1,sentence2,label\n"a, b","say ""c""",2.5\nd,e,0.0\n'
    )
    loaded = glue_tasks.load_task(TASKS["stsb"], str(tmp_path))
    columns = {"sentence1": ["a, b", "d"], "sentence2": ['say "c"', "e"], "label": [2.5, 0.0]}
    assert loaded == {"train": columns, "validation": columns}


def test_rows_of_the_hub(monkeypatch):
    import datasets

    rows = [{"premise": "a", "hypothesis": "b", "label": 2, "idx": 0}]
    asked = []

    def load(name, task, split):
        asked.append((name, task, split))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    splits = glue_tasks.load_task(TASKS["mnli"], glue_tasks.HUB_DATA)
    names = ("train", "validation_matched", "validation_mismatched")
    assert asked == [("nyu-mll/glue", "mnli", split) for split in names]
    assert splits["train"] == {"premise": ["a"], "hypothesis": ["b"], "label": [2]}


def test_checkpoint_of_another_kind(world, tmp_path):
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(world / "model", tmp_path / "model")
    weights = {k: v for k, v in load_file(model / "model.safetensors").items() if "wo" not in k}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    words = "lacks 2 weights of the encoder, for example model.transformer_encoder.0.wo.weight"
    with pytest.raises(UserError, match=words):
        run(world, tmp_path / "out", model=model)
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be loaded as a classifier"):
        run(world, tmp_path / "out", model=model)
