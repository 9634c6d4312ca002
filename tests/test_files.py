"""Pins what may be removed and what may be told: a command replaces only what it made itself, restores it when the replacement fails, never
touches its input, and hides secrets in everything it writes.
"""

import json
import os
import shutil

import pytest

from neobert.common import files
from neobert.common.errors import UserError
from neobert.common.results import environment


def digests(folder):
    """{relative path: digest or link target} of everything below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_file() and files.sha256(path)
        for path in sorted(folder.rglob("*"))
    }


def write(output, text="new", command="convert", replace=False):
    with files.new_folder(output, command, replace=replace) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a.txt").write_text(text)
    return output


def test_written_completely_with_a_manifest(tmp_path):
    output = write(tmp_path / "out")
    manifest = json.loads((output / "convert.json").read_text())
    assert manifest == {"command": "convert", "files": {"sub/a.txt": files.sha256(output / "sub" / "a.txt")}}
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "something was left beside the output"


def test_own_output_is_replaced_and_nothing_stays_beside_it(tmp_path):
    output = write(write(tmp_path / "out", "old"), "new", replace=True)
    assert (output / "sub" / "a.txt").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: (out / "notes.txt").write_text("mine"),
        lambda out: (out / "sub" / "a.txt").write_text("edited"),
        lambda out: (out / ".git").mkdir() or (out / ".git" / "HEAD").write_text("ref"),
        lambda out: (out / "link").symlink_to("/etc/hostname"),
        lambda out: (out / "convert.json").unlink(),
        lambda out: (out / "convert.json").write_text("{}"),
        lambda out: (out / "convert.json").write_text('{"command": "encode", "files": {}}'),
        lambda out: os.mkfifo(out / "pipe"),
    ],
    ids=["added", "edited", "git", "link", "no manifest", "empty manifest", "another command's", "fifo"],
)
def test_anything_else_is_left_alone(tmp_path, spoil):
    output = write(tmp_path / "out", "old")
    spoil(output)
    before = digests(tmp_path)
    with pytest.raises(UserError, match="not replaced"):
        write(output, "new", replace=True)
    assert digests(tmp_path) == before


def test_working_files_are_patterns_of_whole_paths(tmp_path):
    output = tmp_path / "out"
    files.write_manifest((output / "checkpoints" / "checkpoint-1").mkdir(parents=True) or output, "encode")
    (output / "part-000000.parquet").write_text("rows")
    (output / "checkpoints" / "checkpoint-1" / "optimizer.pt").write_text("state")
    files.check_replaceable(output, "encode", ("part-*.parquet", "checkpoints/**"))
    (output / "sub").mkdir()
    (output / "sub" / "part-000001.parquet").write_text("of somebody else")
    with pytest.raises(UserError, match="sub/part-000001.parquet"):
        files.check_replaceable(output, "encode", ("part-*.parquet", "checkpoints/**"))


def test_old_output_comes_back_when_the_last_rename_fails(tmp_path, monkeypatch):
    output = write(tmp_path / "out", "old")
    before, rename = digests(tmp_path), os.rename

    def fail(source, target):
        if ".writing-" in str(source):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(KeyboardInterrupt):
        write(output, "new", replace=True)
    assert digests(tmp_path) == before, "the old output did not come back"


def test_killed_between_the_renames(tmp_path):
    output = write(tmp_path / "out", "old")
    before = digests(output)
    dead = 2**22 + 1
    output.rename(tmp_path / f".out.replaced-{os.uname().nodename}-{dead}")
    (tmp_path / f".out.writing-{os.uname().nodename}-{dead}").mkdir()
    files.recover(output)
    assert digests(output) == before and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("replace", [False, True])
def test_another_process_was_faster(tmp_path, replace):
    """Two writers of one new output: the second one says so, and the first one's output stays."""
    output = tmp_path / "out"
    with pytest.raises((UserError, OSError)), files.new_folder(output, "convert", replace=replace) as folder:
        (folder / "a.txt").write_text("slow")
        output.mkdir()
        (output / "theirs.txt").write_text("fast")
    assert digests(output) == {"theirs.txt": files.sha256(output / "theirs.txt")}


def test_a_link_as_output_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for text in ("old", "new"):
        write(tmp_path / "link", text, replace=True)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "sub" / "a.txt").read_text() == text


@pytest.mark.parametrize(
    "output, message",
    [("run", "holds"), ("run/step", "itself"), ("run/step/out", "inside"), ("to_run", "holds"), ("to_run/step", "itself"), (".", "holds")],
)
def test_input_and_output_apart(tmp_path, output, message):
    (tmp_path / "run" / "step").mkdir(parents=True)
    (tmp_path / "to_run").symlink_to("run")
    with pytest.raises(UserError, match=message):
        files.check_apart(tmp_path / output, tmp_path / "run" / "step")
    files.check_apart(tmp_path / "elsewhere", tmp_path / "run" / "step")


def test_set_aside_until_the_new_output_is_complete(tmp_path):
    output = write(tmp_path / "out", "old", command="encode")
    before = digests(output)
    files.set_aside(output, "encode")
    assert not output.exists() and digests(tmp_path / "out.before-overwrite") == before
    # An interrupted new run is given up for another one: the complete old output still waits.
    write(output, "half", command="encode")
    files.set_aside(output, "encode")
    assert not output.exists() and digests(tmp_path / "out.before-overwrite") == before
    write(output, "new", command="encode")
    files.remove_set_aside(output, "encode")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    shutil.rmtree(output)
    output.mkdir()
    (output / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not replaced"):
        files.set_aside(output, "encode")
    assert (output / "mine.txt").exists()


SECRET = "s3cr3t-Value"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hub_token", SECRET],
        ["--hub-token", SECRET],
        [f"--hub_token={SECRET}"],
        ["--api-key", SECRET],
        ["--wandbApiKey", SECRET],
        ["--password", SECRET],
        ["--client_secret", SECRET],
        ["--dataset", f"https://somebody:{SECRET}@host/data.jsonl"],
        ["--note", "hf_AbCdEfGhIjKlMnOpQrStUvWx"],
    ],
)
def test_secrets_are_not_written(tmp_path, monkeypatch, arguments):
    monkeypatch.setattr("sys.argv", ["neobert", *arguments, "--tokens_per_batch", "512", "--tokenizer", "folder"])
    command = environment()["command"]
    assert SECRET not in command and "hf_" not in command and files.HIDDEN in command
    assert "--tokens_per_batch 512 --tokenizer folder" in command, "more than secrets was hidden"
    files.write_json(tmp_path / "result.json", {"settings": [{arguments[0].lstrip("-").partition("=")[0]: arguments[-1]}], "steps": 3})
    text = (tmp_path / "result.json").read_text()
    assert SECRET not in text and "hf_" not in text and json.loads(text)["steps"] == 3
