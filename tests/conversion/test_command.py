"""Pins `neobert convert` from end to end: the command on golden weights gives the reference
outputs; nothing is replaced; what a conversion that fails, is stopped or finds the disk full leaves
behind (nothing).
"""

import errno
import hashlib
import json
import multiprocessing
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from conversion_helpers import convert, digests, run_script, save
from safetensors.torch import load_file

from neobert import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from neobert.__main__ import main
from neobert.common.commands import guarded
from neobert.common.errors import UserError
from neobert.conversion import command


@pytest.mark.slow
def test_the_command(tmp_path, golden, tokenizer_dir):
    """The golden weights as a raw checkpoint, through the script of a bare checkout, in a shell
    without the package."""
    weights = load_file(golden / "neobert_tiny" / "model.safetensors")
    source = tmp_path / "run" / "model_checkpoints" / "100"
    save(source, {f"module._orig_mod.{name}": value for name, value in weights.items()})
    shutil.copyfile(golden / "neobert_tiny" / "config.json", tmp_path / "run" / "config.json")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = run_script(
        "run",
        "out/model",
        "--tokenizer",
        "none",
        "--max-shard-size",
        "300KB",
        cwd=tmp_path,
        env=environment,
    )
    assert process.returncode == 0, process.stderr
    output = tmp_path / "out" / "model"
    shards = sorted(output.glob("model-*.safetensors"))
    assert len(shards) == 3 and max(shard.stat().st_size for shard in shards) < 310_000, (
        "not sharded as asked"
    )
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert (
        index["weight_map"].keys() == weights.keys()
        and index["metadata"]["total_size"] == 4 * 177_928
    )
    for shard in shards:
        assert hashlib.sha256(shard.read_bytes()).hexdigest() in process.stdout, (
            "the table lacks the digest of a file"
        )
        for name, value in load_file(shard).items():
            assert torch.equal(value, weights[name]), f"{name} changed"
    assert re.search(
        r"tensors\s+28\nparameters\s+177,928\ndtype\s+float32\nbytes\s+\d", process.stdout
    ), process.stdout
    assert re.search(r"largest difference\s+0.0e\+00 \(largest output [1-9]", process.stdout), (
        "the proof was not made, or is not exact"
    )
    assert (
        'AutoModelForMaskedLM.from_pretrained("out/model", trust_remote_code=True)'
        in process.stdout
    )

    expected = load_file(golden / "neobert_tiny" / "expected.safetensors")
    reloaded = NeoBERTForMaskedLM.from_pretrained(output).eval()
    with torch.no_grad():
        logits = reloaded(expected["input_ids"], expected["attention_mask"]).logits
    real = expected["attention_mask"].bool()
    assert (logits - expected["logits"])[real].abs().max() < 5e-5, (
        "the converted model does not give the reference outputs"
    )
    assert not list(tmp_path.glob("out/.*")), "something temporary was left"


@pytest.mark.parametrize(
    "checkpoint_name, output, message",
    [
        ("run", "run", "is there already"),
        ("run", "other", "is there already"),
        ("run", "file", "is there already"),
        ("run", "file/out", "file is a file"),
        ("run", "to_step", "is there already"),
        ("run", "run/new", "are in one another"),
        ("to_run", "run/new", "are in one another"),
        ("run/checkpoint-3", "run/checkpoint-3/new", "are in one another"),
        ("run", "", "is empty"),
    ],
)
def test_outputs_that_are_refused(tmp_path, model, monkeypatch, checkpoint_name, output, message):
    """Before the checkpoint is read; all files stay as they were."""
    monkeypatch.chdir(tmp_path)
    for name in ("run/checkpoint-3", "other"):
        model.save_pretrained(tmp_path / name)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "to_run").symlink_to("run")
    (tmp_path / "to_step").symlink_to("run/checkpoint-3")
    (tmp_path / "run" / "checkpoint-3" / "model.safetensors").write_bytes(b"rubbish")
    before = digests(tmp_path)
    with pytest.raises(UserError, match=message):
        convert(checkpoint_name, output, "--tokenizer", "none")
    assert digests(tmp_path) == before


def test_a_full_disk(tmp_path, checkpoint, monkeypatch, capsys, without_proof):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "write_weights", full)
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--tokenizer", "none"]) == 2
    assert "no space is left on the disk" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "sent, code",
    [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, 130)],
    ids=["9", "15", "ctrl-c"],
)
def test_stopped_while_writing(tmp_path, checkpoint, monkeypatch, without_proof, sent, code):
    """No output. What a killed run left, the next one removes."""
    (reads, writes), output = os.pipe(), tmp_path / "new" / "out"

    def write(*arguments):
        write_model_card(*arguments)
        os.write(writes, b"!")
        time.sleep(60)

    def run():
        sys.exit(guarded("x", lambda: convert(checkpoint, output, "--tokenizer", "none")))

    write_model_card = command.write_model_card
    monkeypatch.setattr(command, "write_model_card", write)
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    assert select.select([reads], [], [], 60)[0], "it never came to write"
    os.kill(process.pid, sent)
    process.join()
    monkeypatch.setattr(command, "write_model_card", write_model_card)
    assert process.exitcode == code
    left = [path.name for path in tmp_path.glob("new/*")]
    assert left == ([] if sent == signal.SIGINT else [".out.tmp"])
    convert(checkpoint, output, "--tokenizer", "none")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"], (
        "what the killed run left is still there"
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--dtype", "float8"],
            "dtype must be one of float32, bfloat16, float16, but 'float8' was given",
        ),
        (
            ["--head", "crf"],
            "head must be one of masked-lm, base, sequence-classification, token-classification, "
            "question-answering",
        ),
        (["--step", "last"], "a number or latest, but 'last' was given"),
        (["--sentence-transformers", "--tokenizer", "none"], "needs a tokenizer"),
        (
            ["--max-shard-size", "big", "--tokenizer", "none"],
            "--max-shard-size takes a size as 5GB or 500MB, but 'big' was given",
        ),
        (["--steps", "3"], "unknown argument '--steps'; did you mean --step?"),
        (["--toknizer", "x"], "unknown argument '--toknizer'; did you mean --tokenizer?"),
        (["--step"], "--step needs a value"),
        (["--config", "/nowhere.yaml"], "cannot be read"),
    ],
)
def test_bad_options(tmp_path, checkpoint, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        convert(checkpoint, tmp_path / "out", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_unreadable_checkpoint_leaves_no_folders(tmp_path, checkpoint):
    """Damage of the numbers."""
    path = checkpoint / "state_dict.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        UserError, match="is damaged: state_dict/data/.* in it does not have the checksum"
    ):
        convert(checkpoint, tmp_path / "a" / "b" / "out", "--tokenizer", "none")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_sentence_transformers_needs_a_backbone(tmp_path, tiny_config):
    source = save(
        tmp_path / "run",
        NeoBERTForSequenceClassification(NeoBERTConfig(**tiny_config)).state_dict(),
        **tiny_config,
    )
    with pytest.raises(
        UserError,
        match="goes with --head masked-lm or base, but the checkpoint's is sequence-classification",
    ):
        convert(source, tmp_path / "out", "--sentence-transformers")


def test_the_temporary_folder_of_the_machine_is_not_needed(
    tmp_path, checkpoint, monkeypatch, without_proof
):
    """A full or missing TMPDIR: all work is done beside the output, where the space was checked."""
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.fixture
def shared_folder():
    """A folder that every user may enter, while the process has the rights of an ordinary user."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    for path in sorted(folder.rglob("*")):
        path.chmod(0o700)
    shutil.rmtree(folder)


@pytest.mark.skipif("os.name != 'posix'", reason="rights as POSIX has them")
@pytest.mark.parametrize(
    "closed",
    [
        "run",
        "run/state_dict.pt",
        "run/config.json",
        "out",
        "given.json",
        "tokenizer",
        "tokenizer/tokenizer.json",
    ],
)
def test_without_permission(
    shared_folder, model, tiny_config, tokenizer_dir, without_proof, capsys, monkeypatch, closed
):
    """Every place that a conversion reads or writes: the place is named, and all files stay as they
    were."""
    monkeypatch.chdir(shared_folder)
    save(Path("run"), model.state_dict(), **tiny_config)
    shutil.copytree(tokenizer_dir, "tokenizer")
    Path("given.json").write_text(json.dumps(tiny_config))
    Path("out").mkdir()
    options = (
        ["--config", "given.json"]
        if closed == "given.json"
        else ["--tokenizer", "tokenizer"]
        if "tokenizer" in closed
        else []
    )
    for path in shared_folder.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    before = digests(shared_folder)
    Path(closed).chmod(0)
    rights, user = Path(closed).stat().st_mode, os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        code = main(["convert", "run", "out/model", *(options or ["--tokenizer", "none"])])
    finally:
        os.seteuid(user)
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        code == 2
        and error.startswith("neobert convert: ")
        and "ermission" in error
        and closed.split("/")[0] in error
    ), error
    assert digests(shared_folder) == before and Path(closed).stat().st_mode == rights
