"""Test the contract of every command that writes files (docs/development.md).

- Existing files are never modified.
- An output is complete or does not exist.
- A run is identified by its options and its input files.
- Only one process at a time can use an output directory.
- An interrupted run that is resumed produces the same bits as an uninterrupted run.
- No file contains a secret.
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
    """Return a folder with the input files of all commands.

    It contains texts, pairs, labeled rows, GLUE rows, a small masked language model and its
    training checkpoint.
    """
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


# Commands that create their output in one step and do not resume. They refuse an existing output.
once = pytest.mark.parametrize(
    "make", [convert, export_onnx, export_gguf, tokenizer], ids=lambda make: make.__name__
)


# For each resumable command: an option that changes the run, and a weight file of its output.
RUNS = {
    pretrain: ("--seed", "model.safetensors"),
    contrastive: ("--seed", "model.safetensors"),
    distill: ("--seed", "model.safetensors"),
    finetune: ("--seed", "model.safetensors"),
}
runs = pytest.mark.parametrize("make", RUNS, ids=lambda make: make.__name__)
# `glue` is not in RUNS, because each of its runs has its own folder below the output.
every_run = pytest.mark.parametrize("make", [*RUNS, glue], ids=lambda make: make.__name__)


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a command in a temporary folder; see `contract_runs.command`."""
    (tmp_path / "logs").mkdir()
    return lambda argv, **options: command(argv, tmp_path, tmp_path / "logs" / "log", **options)


@pytest.fixture(scope="session")
def finished(inputs, tmp_path_factory):
    """Return a function that runs a command to its end, once per session.

    The function returns the output folder and the number of writes of the command.
    """
    outputs = {}

    def folder_of(make):
        if make not in outputs:
            folder = tmp_path_factory.mktemp(make.__name__)
            code, printed, writes = command(make(inputs, folder / "out"), folder, folder / "log")
            assert code == 0, printed
            outputs[make] = folder / "out", writes
        return outputs[make]

    return folder_of


def contents(folder):
    """Return the files of a folder as {relative path: bytes}."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def result_of(folder):
    """Return the names of all files of a folder, and the bytes of the weights and tokenizers.

    The other files contain times and paths, which differ between runs.
    """
    files = contents(folder)
    model = {name: data for name, data in files.items() if name.endswith(("safetensors", "r.json"))}
    return sorted(files), model


# ------------------------------------------------------------------------------------------------
# Existing outputs


@runs
def test_a_folder_with_other_files_is_refused_and_left_as_it_is(make, inputs, run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    code, printed, _ = run(make(inputs, tmp_path / "out"), no_model=True)
    assert code == 2 and "notes.txt" in printed and "choose another output" in printed, printed
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}


@runs
def test_finished_run_is_kept_and_other_options_are_refused(make, inputs, run, finished):
    """Repeating a finished command changes nothing, and other options are an error."""
    output, _ = finished(make)
    before = contents(output)

    code, printed, _ = run(make(inputs, output), no_model=True)
    assert code == 0 and re.search("finished already|already finished", printed), printed

    code, printed, _ = run([*make(inputs, output), RUNS[make][0], "7"], no_model=True)
    assert code == 2 and "other settings" in printed and "now 7" in printed, printed
    assert contents(output) == before


@runs
def test_run_is_identified_by_the_bytes_of_its_inputs(make, inputs, run, finished, tmp_path):
    """A run is identified by the bytes of its input files, not by their paths and times."""
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
    """A command refuses an output directory whose lock another process holds."""
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        code, printed, _ = run(make(inputs, tmp_path / "out"))
    assert code == 2 and "in use by another run" in printed, printed
    assert set(contents(tmp_path / "out")) <= {".lock"} | {
        name for name in contents(tmp_path / "out") if name.startswith("prepared")
    }


@every_run
def test_empty_output_path_is_refused(make, inputs, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed, _ = run(make(inputs, ""), no_model=True)
    assert code == 2 and "output" in printed and "empty" in printed, printed


# ------------------------------------------------------------------------------------------------
# Killed commands


def interrupted(make, inputs, run, finished, tmp_path, **kills):
    """Kill a run several times, resume it, and compare its output with an uninterrupted run.

    Args:
        make: Function that returns the arguments of the command.
        inputs: Folder of the input files.
        run: Fixture that runs a command.
        finished: Fixture that returns the output of an uninterrupted run.
        tmp_path: Folder of the output.
        kills: The argument `kills`, a list with the options of `run` that kill each attempt.
    """
    for kill in kills["kills"]:
        code, printed, _ = run(make(inputs, tmp_path / "out"), **kill)
        assert code in (0, 9, -9), printed
    code, printed, _ = run(make(inputs, tmp_path / "out"))
    assert code == 0, printed
    assert result_of(tmp_path / "out") == result_of(finished(make)[0])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@every_run
def test_resume_after_kills_at_random_writes(make, inputs, run, finished, tmp_path, part):
    """A run that is killed at four of its writes can be resumed, and the result is the same.

    The first write is random within one third of the run, the others are random within the run.
    """
    writes = finished(make)[1]
    pick = random.Random(f"{make.__name__} {part}")
    first = pick.randint(1 + part * writes // 3, max(1, (part + 1) * writes // 3))
    kill_at = [first, *(pick.randint(1, writes) for _ in range(3))]
    kills = [{"kill_at": number} for number in kill_at]
    interrupted(make, inputs, run, finished, tmp_path, kills=kills)


@pytest.mark.slow
@every_run
def test_resume_after_kills_at_random_times(make, inputs, run, finished, tmp_path):
    """A run that is killed after random times can be resumed, and the result is the same."""
    pick = random.Random(make.__name__)
    kills = [{"kill_after": pick.uniform(0.2, 6)} for _ in range(3)]
    interrupted(make, inputs, run, finished, tmp_path, kills=kills)


def everything(path):
    """Return an output, which is a folder or a file, as {relative path: bytes}, or None."""
    if not path.exists():
        return None
    return contents(path) if path.is_dir() else {"": path.read_bytes()}


def place_of(make, folder):
    """Return the output path of a command, which is a file for GGUF and a folder otherwise."""
    return folder / ("out.gguf" if make is export_gguf else "out")


@once
def test_existing_output_is_not_replaced(make, inputs, run, tmp_path):
    """A command refuses an output path that is a non-empty folder or a file."""
    (tmp_path / "a.gguf").mkdir()
    (tmp_path / "a.gguf" / "notes.txt").write_text("mine")
    (tmp_path / "b.gguf").write_text("mine")

    for output in ("a.gguf", "b.gguf"):
        before = everything(tmp_path / output)
        code, printed, _ = run(make(inputs, tmp_path / output), no_model=True)
        assert code == 2 and ("already exists" in printed or "is a file" in printed), printed
        assert everything(tmp_path / output) == before


@pytest.mark.slow
@once
def test_killed_output_is_complete_or_absent(make, inputs, run, tmp_path):
    """After a kill the output is complete or absent, and a second run completes an absent one."""
    output = place_of(make, tmp_path)
    code, printed, writes = run(make(inputs, output))
    assert code == 0, printed
    expected = everything(output)
    output.rename(tmp_path / "whole")

    pick = random.Random(make.__name__)
    for part in range(3):
        kill_at = pick.randint(1 + part * writes // 3, (part + 1) * writes // 3)
        code, printed, _ = run(make(inputs, output), kill_at=kill_at)
        if everything(output) is None:
            code, printed, _ = run(make(inputs, output), strange=True)
            assert code == 0, printed

        files = everything(output)
        assert sorted(files) == sorted(expected)
        # These two files of an export contain the date.
        assert {n for n in expected if files[n] != expected[n]} <= {"export.json", "README.md"}
        output.rename(tmp_path / f"killed-{part}")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_encode_resumes_after_kills(inputs, run, finished, tmp_path, part):
    """`encode` resumes after two kills, also from a copy of the inputs, but not with other options.

    The resumed run produces the same bytes as an uninterrupted run.
    """
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
def test_predict_resumes_after_kills(inputs, run, finished, tmp_path, output):
    """`predict` resumes after three kills, and leaves only its output and the JSON file next to it.

    The resumed run produces the same bytes as an uninterrupted run.
    """
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
# Secrets and restricted file systems


@every_run
def test_no_secret_is_written_on_restricted_file_systems(make, inputs, run, finished, tmp_path):
    """Check that no file contains the Hub token, and that a run works on restricted file systems.

    With `strange=True`, changing permissions and creating hard links fails, as on some network
    and FAT file systems.
    """
    secret = "hf_0123456789abcdefghijklmnopqrstuvwx"
    argv = [*make(inputs, tmp_path / "out"), "--hub-token", secret]
    code, printed, _ = run(argv, strange=True)
    assert code == 0, printed
    assert not [name for name, data in contents(tmp_path).items() if secret.encode() in data]
    assert result_of(tmp_path / "out") == result_of(finished(make)[0])
