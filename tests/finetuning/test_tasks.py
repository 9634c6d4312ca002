"""Test the rows of GLUE tasks and the messages of `neobert glue` about invalid input.

Covers the file types, the data set on the Hub, and invalid rows, options and checkpoints.
"""

import json
import shutil
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from helpers.glue_runs import make_world, run  # noqa: F401

from neobert.common.errors import UserError
from neobert.finetuning import glue_run, glue_tasks
from neobert.finetuning.glue_options import GLUE_OPTIONS, Hyperparameters
from neobert.finetuning.glue_tasks import TASKS


# ------------------------------------------------------------------------------------------------
# invalid input


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"task": "squad"}, "`task` must be all or some of mnli, .*, got 'squad'"),
        ({"task": "cola"}, "there is no file of rows .*/cola/train"),
        ({"data": "nobody/nothing"}, "'nobody/nothing' is not a directory, and task sst2 could"),
        ({"preset": "best"}, "`preset` must be one of neobert-4096, neobert-1024, got 'best'"),
        ({"lora": True, "lora_targets": "query"}, "LoRA target 'query' is not a linear layer"),
        ({"gradient_accumulation_steps": 3}, "processes x gradient_accumulation_steps = 3"),
        (
            {"presets": "{mine: {sst2: {batch_size: 3, learning_rate: 1e-4}}}", "preset": "mine"},
            "has no weight_decay for sst2",
        ),
        ({"presets": "{mine: {sst2: {foo: 3}}}"}, "`presets` has the unknown hyperparameter 'foo'"),
        (
            {"grid_values": "{warmup_ratio: [0.1]}"},
            "`grid_values` has the unknown .*'warmup_ratio'",
        ),
        (
            {"grid_values": "{weight_decay: []}"},
            "must have at least one weight_decay, got an empty",
        ),
        ({"lora_rank": 4}, "`lora_rank` applies to adapters only. Pass --lora, or omit"),
    ],
)
def test_bad_options(world, tmp_path, more, words):
    """Invalid options are an error, and nothing but the record of the run is written.

    `more` contains the options, and `words` is the expected message.
    """
    with pytest.raises(UserError, match=words):
        run(world, tmp_path / "out", **more)
    files = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files <= {"run.json", ".lock"}, "Files were written although the options are invalid."


def test_default_name_and_grid_values():
    """The default name is that of the resolved directory, and --grid-values sets the grid."""
    arguments = ["--task", "sst2", "--model", "here/sub/..", "--grid"]
    grid = "{batch_size: [3], learning_rate: [1e-4], weight_decay: [0]}"
    options = GLUE_OPTIONS.read([*arguments, "--grid-values", grid])
    # The name is a directory below the output, so it must not be "..".
    assert options.name == "here"
    (hyperparameters,) = options.combinations(TASKS["sst2"])
    assert hyperparameters == Hyperparameters(batch_size=3, learning_rate=1e-4, weight_decay=0)


def test_all_tasks_are_validated_before_training(world, tmp_path, monkeypatch):
    """A batch size that three processes cannot share is an error before any run."""
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
    """Check the messages about empty files, broken JSON, wrong labels and wrong texts."""
    path = tmp_path / "sst2" / "train.jsonl"
    path.parent.mkdir()
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    with pytest.raises(UserError, match=words):
        glue_tasks.load_task(TASKS["sst2"], str(tmp_path))


def test_parquet_and_csv_give_the_same_rows(tmp_path):
    """Parquet and CSV files with the same content give the same rows.

    The parquet file is named like the shards on the Hub.
    """
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


def test_load_task_from_the_hub(monkeypatch):
    """`load_task` requests all splits of the data set, and returns the columns of the task."""
    import datasets

    rows = [{"premise": "a", "hypothesis": "b", "label": 2, "idx": 0}]
    requests = []

    def load(name, task, split):
        requests.append((name, task, split))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)

    splits = glue_tasks.load_task(TASKS["mnli"], glue_tasks.HUB_DATA)
    names = ("train", "validation_matched", "validation_mismatched")
    assert requests == [("nyu-mll/glue", "mnli", split) for split in names]
    assert splits["train"] == {"premise": ["a"], "hypothesis": ["b"], "label": [2]}


def test_incomplete_or_truncated_checkpoint_is_refused(world, tmp_path):
    """A checkpoint that lacks encoder weights, and a truncated file, are refused."""
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(world / "model", tmp_path / "model")
    weights = {k: v for k, v in load_file(model / "model.safetensors").items() if "wo" not in k}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    message = "lacks 2 weights of the encoder, for example model.transformer_encoder.0.wo.weight"
    with pytest.raises(UserError, match=message):
        run(world, tmp_path / "out", model=model)

    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be loaded as a classifier"):
        run(world, tmp_path / "out", model=model)
