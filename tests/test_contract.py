"""Test the contract of every command that writes (docs/development.md).

Existing files are never touched, outputs are complete or absent, a run is identified by its
settings and inputs, one process owns a directory, interrupted runs end with the same bits, and no
file contains a secret.
"""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers.contract_runs import command
from helpers.jsonl import write_jsonl
from helpers.raw_checkpoint import raw_from_model


pytest.importorskip("sentence_transformers")

from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTForMaskedLM


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
COLORS = "red green blue black white brown grey pink".split()
ANIMALS = "cat dog bird fish horse mouse lion wolf".split()
TRAINER = ["--logging-steps", "1", "--save-steps", "2", "--use-cpu", "true"]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory, tokenizer_dir):
    """Folder of what the commands read: texts, pairs, GLUE rows, a small masked LM."""
    folder = tmp_path_factory.mktemp("inputs")
    texts = [
        f"a {color} {animal} and {number % 7} of its friends are in the garden."
        for number, (color, animal) in enumerate((c, a) for c in COLORS for a in ANIMALS)
    ]
    (folder / "texts.txt").write_text("\n".join(texts) + "\n")
    rows = [{"anchor": text, "positive": f"{i} {text[2:12]}"} for i, text in enumerate(texts)]
    write_jsonl(folder / "pairs.jsonl", rows)
    labeled = [{"text": text, "label": ("even", "odd")[i % 2]} for i, text in enumerate(texts)]
    write_jsonl(folder / "labeled.jsonl", labeled)
    for split, count in (("train", 48), ("validation", 8)):
        rows = [{"sentence": texts[i], "label": i % 2, "idx": i} for i in range(count)]
        write_jsonl(folder / "glue" / "sst2" / f"{split}.jsonl", rows)
    torch.manual_seed(0)
    model = NeoBERTForMaskedLM(NeoBERTConfig(**SIZES))
    model.save_pretrained(folder / "model")
    raw_from_model(folder / "model", folder / "checkpoint", 1, torch.float32)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder / "model")
    return folder


def pretrain(inputs, output):
    return [
        *("pretrain", "--dataset", inputs / "texts.txt", "--output", output),
        *("--model-config", json.dumps(SIZES), "--max-length", "32", "--micro-batch-tokens", "128"),
        *("--max-steps", "6", "--warmup-steps", "1", "--report-to", "none", *TRAINER),
        *("--peak-tflops", "0.01"),
    ]


def contrastive(inputs, output):
    return [
        *("contrastive", "--model", inputs / "model", "--pairs", inputs / "pairs.jsonl"),
        *("--output", output, "--max-length", "32", "--per-device-train-batch-size", "8"),
        *("--max-steps", "6", *TRAINER),
    ]


def distill(inputs, output):
    return [
        *("distill", inputs / "model", "--texts", inputs / "texts.txt", "--output", output),
        *("--model-config", json.dumps({**SIZES, "hidden_size": 16}), "--validation-percent", "20"),
        *("--max-steps", "6", "--per-device-train-batch-size", "8", "--eval-steps", "3", *TRAINER),
    ]


def glue(inputs, output):
    return [
        *("glue", "--task", "sst2", "--model", inputs / "model", "--data", inputs / "glue"),
        *("--output", output, "--seeds", "1", "--batch-size", "8", "--max-length", "32"),
        *("--learning-rate", "1e-3", "--num-train-epochs", "2", "--evaluations-per-epoch", "2"),
        *("--use-cpu", "true"),
    ]


def finetune(inputs, output):
    return [
        *("finetune", inputs / "labeled.jsonl", "--model", inputs / "model", "--output", output),
        *("--max-length", "32", "--max-steps", "6", "--eval-strategy", "steps"),
        *("--save-strategy", "steps", "--eval-steps", "2", *TRAINER),
    ]


def encode(inputs, output):
    return [
        *("encode", inputs / "texts.txt", output, "--model", inputs / "model"),
        *("--dtype", "float32", "--rows", "16"),
    ]


def convert(inputs, output):
    return ["convert", inputs / "checkpoint", output, "--dtype", "float32"]


def export_onnx(inputs, output):
    return ["export", "onnx", inputs / "model", output, "--precisions", "fp32"]


def export_gguf(inputs, output):
    return ["export", "gguf", inputs / "model", output]


def tokenizer(inputs, output):
    return [
        *("tokenizer", inputs / "texts.txt", "--output", output, "--vocab-size", "192"),
    ]


# What makes its output at once: what is there is refused.
once = pytest.mark.parametrize(
    "make", [convert, export_onnx, export_gguf, tokenizer], ids=lambda make: make.__name__
)


RUNS = {  # a setting in place of another, and one of the weights that it makes
    pretrain: ("--seed", "model.safetensors"),
    contrastive: ("--seed", "model.safetensors"),
    distill: ("--seed", "model.safetensors"),
    finetune: ("--seed", "model.safetensors"),
}
runs = pytest.mark.parametrize("make", RUNS, ids=lambda make: make.__name__)
# Of glue each run has a folder of its own below the output, named by its settings.
every_run = pytest.mark.parametrize("make", [*RUNS, glue], ids=lambda make: make.__name__)


@pytest.fixture
def run(tmp_path):
    """`command` in a folder of its own."""
    (tmp_path / "logs").mkdir()
    return lambda argv, **more: command(argv, tmp_path, tmp_path / "logs" / "log", **more)


@pytest.fixture(scope="session")
def finished(inputs, tmp_path_factory):
    """Folder of the finished output of a command, its writes: made once."""
    made = {}

    def folder_of(make):
        if make not in made:
            place = tmp_path_factory.mktemp(make.__name__)
            code, printed, writes = command(make(inputs, place / "out"), place, place / "log")
            assert code == 0, printed
            made[make] = place / "out", writes
        return made[make]

    return folder_of


def contents(folder):
    """{name: bytes} of a folder."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def result_of(folder):
    """Names of all files, and the bytes of the model's."""
    made = contents(folder)
    kept = {name: data for name, data in made.items() if name.endswith(("safetensors", "r.json"))}
    return sorted(made), kept


# ------------------------------------------------------------------------------------------------
# what exists is never touched


@runs
def test_a_folder_with_other_files_is_refused_and_left_as_it_is(make, inputs, run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    code, printed, _ = run(make(inputs, tmp_path / "out"), no_model=True)
    assert code == 2 and "notes.txt" in printed and "choose another output" in printed, printed
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}


@runs
def test_a_finished_run_is_finished_and_another_one_is_refused(make, inputs, run, finished):
    output, _ = finished(make)
    before = contents(output)
    code, printed, _ = run(make(inputs, output), no_model=True)
    assert code == 0 and re.search("finished already|already finished", printed), printed
    code, printed, _ = run([*make(inputs, output), RUNS[make][0], "7"], no_model=True)
    assert code == 2 and "other settings" in printed and "now 7" in printed, printed
    assert contents(output) == before


@runs
def test_what_is_read_may_be_fetched_again_and_the_output_copied(
    make, inputs, run, finished, tmp_path
):
    """Other times and another folder, the same bytes; other bytes are another run."""
    shutil.copytree(inputs, tmp_path / "again", copy_function=shutil.copyfile)
    shutil.copytree(finished(make)[0], tmp_path / "out", copy_function=shutil.copyfile)
    code, printed, _ = run(make(tmp_path / "again", tmp_path / "out"), no_model=True)
    assert code == 0 and re.search("finished already|already finished", printed), printed
    for name in ("texts.txt", "pairs.jsonl", "labeled.jsonl"):
        path = tmp_path / "again" / name
        path.write_text(path.read_text().replace("garden", "meadow"))
    code, printed, _ = run(make(tmp_path / "again", tmp_path / "out"), no_model=True)
    assert code == 2 and "other settings" in printed, printed


@runs
def test_a_second_process_is_refused(make, inputs, run, tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        code, printed, _ = run(make(inputs, tmp_path / "out"))
    assert code == 2 and "in use by another run" in printed, printed
    assert set(contents(tmp_path / "out")) <= {".lock"} | {
        name for name in contents(tmp_path / "out") if name.startswith("prepared")
    }


@every_run
def test_an_empty_name_is_refused(make, inputs, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed, _ = run(make(inputs, ""), no_model=True)
    assert code == 2 and "output" in printed and "empty" in printed, printed


# ------------------------------------------------------------------------------------------------
# complete or nothing, the same bits


def interrupted(make, inputs, run, finished, tmp_path, **kills):
    """Kills a run, each time otherwise, and compares what its continuation makes."""
    for kill in kills["kills"]:
        code, printed, _ = run(make(inputs, tmp_path / "out"), **kill)
        assert code in (0, 9, -9), printed
    code, printed, _ = run(make(inputs, tmp_path / "out"))
    assert code == 0, printed
    assert result_of(tmp_path / "out") == result_of(finished(make)[0])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
@every_run
def test_killed_at_any_write(make, inputs, run, finished, tmp_path, part):
    """Twice in a row: at a write of each sixth of the run, and at one of any."""
    writes = finished(make)[1]
    pick = random.Random(f"{make.__name__} {part}")
    first = pick.randint(1 + part * writes // 6, max(1, (part + 1) * writes // 6))
    kills = [{"kill_at": first}, {"kill_at": pick.randint(1, writes)}]
    interrupted(make, inputs, run, finished, tmp_path, kills=kills)


@pytest.mark.slow
@every_run
def test_killed_at_any_moment(make, inputs, run, finished, tmp_path):
    pick = random.Random(make.__name__)
    kills = [{"kill_after": pick.uniform(0.2, 6)} for _ in range(3)]
    interrupted(make, inputs, run, finished, tmp_path, kills=kills)


def everything(place):
    """{name: bytes} of an output that is a folder or a file; None where nothing is there."""
    if not place.exists():
        return None
    return contents(place) if place.is_dir() else {"": place.read_bytes()}


def place_of(make, folder):
    return folder / ("out.gguf" if make is export_gguf else "out")


@once
def test_what_is_there_is_not_replaced(make, inputs, run, tmp_path):
    """A folder with a file in it, and a file."""
    (tmp_path / "a.gguf").mkdir()
    (tmp_path / "a.gguf" / "notes.txt").write_text("mine")
    (tmp_path / "b.gguf").write_text("mine")
    for output in ("a.gguf", "b.gguf"):
        before = everything(tmp_path / output)
        code, printed, _ = run(make(inputs, tmp_path / output), no_model=True)
        assert code == 2 and ("already exists" in printed or "is a file" in printed), printed
        assert everything(tmp_path / output) == before


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@once
def test_killed_at_any_write_it_is_complete_or_not_there(make, inputs, run, tmp_path, part):
    output = place_of(make, tmp_path)
    code, printed, writes = run(make(inputs, output))
    assert code == 0, printed
    whole = everything(output)
    output.rename(tmp_path / "whole")
    pick = random.Random(f"{make.__name__} {part}")
    kill_at = pick.randint(1 + part * writes // 3, (part + 1) * writes // 3)
    code, printed, _ = run(make(inputs, output), kill_at=kill_at)
    if everything(output) is None:
        code, printed, _ = run(make(inputs, output), strange=True)
        assert code == 0, printed
    made = everything(output)
    assert sorted(made) == sorted(whole)
    # Figures of an export have the date.
    assert {n for n in whole if made[n] != whole[n]} <= {"export.json", "README.md"}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_encode_killed_at_any_write(inputs, run, finished, tmp_path, part):
    writes = finished(encode)[1]
    pick = random.Random(f"encode {part}")
    for _ in range(2):
        run(encode(inputs, tmp_path / "out"), kill_at=pick.randint(1, writes))
    shutil.copytree(inputs, tmp_path / "again", copy_function=shutil.copyfile)
    code, printed, _ = run(encode(tmp_path / "again", tmp_path / "out"), strange=True)
    assert code == 0, printed
    assert contents(tmp_path / "out") == contents(finished(encode)[0])
    code, printed, _ = run([*encode(inputs, tmp_path / "out"), "--max-length", "9"], no_model=True)
    assert code == 2, printed
    assert "`max_length` must be null as in" in printed and "got 9." in printed, printed


@pytest.mark.slow
@pytest.mark.parametrize("output", ["out.csv", "out.jsonl", "out.parquet"])
def test_predict_killed_at_any_write(inputs, run, finished, tmp_path, output):
    model = finished(finetune)[0]

    def predict(name):
        return ["predict", inputs / "texts.txt", tmp_path / name, "--model", model, "--rows", "16"]

    code, printed, writes = run(predict(f"whole-{output}"))
    assert code == 0, printed
    pick = random.Random(f"predict {output}")
    for _ in range(3):
        run(predict(output), kill_at=pick.randint(1, writes))
    code, printed, _ = run(predict(output), strange=True)
    assert code == 0, printed
    assert (tmp_path / output).read_bytes() == (tmp_path / f"whole-{output}").read_bytes()
    code, printed, _ = run(predict(output), no_model=True)
    assert code == 0 and "already complete" in printed, printed
    assert sorted(path.name for path in tmp_path.glob(f"{output}*")) == [output, f"{output}.json"]


# ------------------------------------------------------------------------------------------------
# secrets, strange file systems


@every_run
def test_no_secret_is_written_and_chmod_and_hard_links_are_not_needed(
    make, inputs, run, finished, tmp_path
):
    secret = "hf_0123456789abcdefghijklmnopqrstuvwx"
    argv = [*make(inputs, tmp_path / "out"), "--hub-token", secret]
    code, printed, _ = run(argv, strange=True)
    assert code == 0, printed
    assert not [name for name, data in contents(tmp_path).items() if secret.encode() in data]
    assert result_of(tmp_path / "out") == result_of(finished(make)[0])
