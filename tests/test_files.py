"""Pins what may be removed and what may be told: a command replaces only what it made itself,
restores it when the replacement fails, never touches its input, and hides secrets in everything it
writes.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from neobert.common import files, outputs
from neobert.common.errors import UserError
from neobert.common.results import environment
from neobert.common.runs import OWNER
from neobert.common.secrets import HIDDEN, redacted, redacted_arguments


def digests(folder):
    """{relative path: digest or link target} of everything below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.is_file() and files.sha256(path)
        for path in sorted(folder.rglob("*"))
    }


def write(output, text="new", command="convert", replace=False):
    with outputs.new_folder(output, command, replace=replace) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a.txt").write_text(text)
    return output


def test_written_completely_with_a_manifest(tmp_path):
    output = write(tmp_path / "out")
    manifest = json.loads((output / "convert.json").read_text())
    written = (output / "sub" / "a.txt").stat()
    assert manifest == {
        "command": "convert",
        "files": {"sub/a.txt": [written.st_size, written.st_mtime_ns]},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["out"], (
        "something was left beside the output"
    )


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
        lambda out: (out / "convert.json").write_text(
            (out / "convert.json").read_text().replace('"convert"', '"encode"')
        ),
        lambda out: os.mkfifo(out / "pipe"),
    ],
    ids=[
        "added",
        "edited",
        "git",
        "link",
        "no manifest",
        "empty manifest",
        "another command's",
        "another command's files",
        "fifo",
    ],
)
def test_anything_else_is_left_alone(tmp_path, spoil):
    output = write(tmp_path / "out", "old")
    spoil(output)
    before = digests(tmp_path)
    with pytest.raises(UserError, match="not replaced"):
        write(output, "new", replace=True)
    assert digests(tmp_path) == before


def test_old_output_comes_back_when_the_last_rename_fails(tmp_path, monkeypatch):
    output = write(tmp_path / "out", "old")
    before, rename = digests(tmp_path), os.rename

    def fail(source, target):
        if Path(source).name == "new":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(KeyboardInterrupt):
        write(output, "new", replace=True)
    assert digests(tmp_path) == before, "the old output did not come back"


def test_interrupted_right_after_the_old_output_was_moved_away(tmp_path, monkeypatch):
    output = write(tmp_path / "out", "old")
    before, rename = digests(tmp_path), os.rename

    def interrupted(source, target):
        rename(source, target)
        if Path(target).name == "old":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(output, "new", replace=True)
    assert digests(tmp_path) == before, "the old output was lost"


@pytest.mark.parametrize("opened_by", ("us", "another program"))
def test_a_new_file_is_complete_or_absent(tmp_path, opened_by):
    path = tmp_path / "folder" / "out.bin"

    def fill(content, then=lambda: None):
        if opened_by == "us":
            with files.new_file(path) as file:
                file.write(content)
                then()
        else:
            with files.new_path(path) as temporary:
                temporary.write_bytes(content)
                then()

    def interrupted():
        assert not path.exists() or path.read_bytes() == b"old"
        raise KeyboardInterrupt

    for before in ([], ["out.bin"]):
        with pytest.raises(KeyboardInterrupt):
            fill(b"new", interrupted)
        assert os.listdir(path.parent) == before
        fill(b"old")
        assert path.read_bytes() == b"old" and os.listdir(path.parent) == ["out.bin"]


def test_all_is_on_the_disk_before_it_has_its_name_and_all_may_read_it(tmp_path, monkeypatch):
    """After a power cut a file that was renamed first may have its name and no content."""
    synced, fsync, replace, rename = set(), os.fsync, os.replace, os.rename

    def noted(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def checked(take_name):
        def run(source, target):
            sources = (
                [Path(source)]
                if Path(source).is_file()
                else [path for path in Path(source).rglob("*") if path.is_file()]
            )
            assert sources and all(path.stat().st_ino in synced for path in sources)
            take_name(source, target)

        return run

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", checked(replace))
    monkeypatch.setattr(os, "rename", checked(rename))
    files.write_text(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o644
    write(tmp_path / "out")


def test_what_dead_processes_of_this_machine_left_goes(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = files.socket.gethostname()
    stays = [
        *(
            "part-1.parquet",
            f".part-1.parquet.{here}-{os.getpid()}-abcd1234",
            f".part-1.parquet.another-{here}-{ended.pid}-abcd1234",
        ),
        *(f".notes.{here}-{ended.pid}-abcd1234", ".part-1.parquet"),
    ]
    for name in (*stays, f".part-2.parquet.{here}-{ended.pid}-abcd1234"):
        (tmp_path / name).write_text("content")
    files.remove_left_overs(tmp_path, "part-")
    assert sorted(os.listdir(tmp_path)) == sorted(stays)


def test_a_process_of_another_user_is_alive(monkeypatch):
    def refuse(process, number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert files.is_alive(1)


WRITER = """
import sys, time
from neobert.common import files, outputs
with outputs.new_folder(sys.argv[1], "convert") as folder:
    (folder / "half.txt").write_text("half")
    print("written", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def killed_writer(tmp_path):
    """Starts a process that writes a folder; the value is a function that kills it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path / "out"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout.readline() == "written\n"

    def kill():
        process.kill()
        process.wait()

    yield kill
    kill()


def test_what_a_killed_process_left_goes_but_a_living_one_keeps_its_place(tmp_path, killed_writer):
    outputs.recover(tmp_path / "out", "convert")
    (place,) = tmp_path.iterdir()
    assert (place / "new" / "half.txt").is_file(), "the folder of a living process was removed"
    killed_writer()
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"], (
        "what the killed process left is still there"
    )


def workplace(folder, name):
    """What a killed run leaves beside its output."""
    place = folder / f".{name}.writing-x"
    (place / "new").mkdir(parents=True)
    (place / OWNER).write_text(json.dumps({"command": "convert", "output": name}))
    return place


def test_what_has_the_name_of_a_workplace_and_is_not_ours_stays(tmp_path):
    """A name says nothing: only the mark of this command, in a folder that is no link."""
    (tmp_path / ".out.writing-thesis").mkdir()
    (tmp_path / ".out.writing-thesis" / "new").write_text("mine")
    (workplace(tmp_path, "out") / "mine.txt").write_text("mine")
    (tmp_path / ".out.writing-x").rename(tmp_path / "elsewhere")
    (tmp_path / ".out.writing-link").symlink_to("elsewhere")
    (workplace(tmp_path, "out") / OWNER).write_text('{"command": "export", "output": "out"}')
    before = digests(tmp_path)
    write(tmp_path / "out")
    assert {
        name: digest for name, digest in digests(tmp_path).items() if not name.startswith("out")
    } == before


@pytest.mark.parametrize("name", ["out", "out[1]"])
def test_killed_between_the_renames(tmp_path, name):
    output = write(tmp_path / name, "old")
    before = digests(output)
    output.rename(workplace(tmp_path, name) / "old")
    outputs.recover(output, "convert")
    assert digests(output) == before and [path.name for path in tmp_path.iterdir()] == [name]


def test_the_old_output_stays_where_somebody_else_took_its_name(tmp_path):
    """Killed between the renames, and then the user made a folder of that name."""
    write(tmp_path / "out", "old").rename(workplace(tmp_path, "out") / "old")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    before = digests(tmp_path)
    outputs.recover(tmp_path / "out", "convert")
    assert digests(tmp_path) == before


def test_folders_made_for_a_refused_output_go_again(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        outputs.new_folder(tmp_path / "a" / "b" / "out", "convert"),
    ):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("replace", [False, True])
def test_another_process_was_faster(tmp_path, replace):
    """Two writers of one new output: the second one says so, and the first one's output stays."""
    output = tmp_path / "out"
    message = (
        "not written by neobert convert" if replace else "written by another process meanwhile"
    )
    with (
        pytest.raises(UserError, match=message),
        outputs.new_folder(output, "convert", replace=replace) as folder,
    ):
        (folder / "a.txt").write_text("slow")
        output.mkdir()
        (output / "theirs.txt").write_text("fast")
    assert digests(output) == {"theirs.txt": files.sha256(output / "theirs.txt")}


def test_another_process_made_a_file_of_that_name(tmp_path):
    output = tmp_path / "out"
    message = "out was written by another process meanwhile; nothing of it was replaced"
    with pytest.raises(UserError, match=message), outputs.new_folder(output, "convert") as folder:
        (folder / "a.txt").write_text("slow")
        output.write_text("fast")
    assert output.read_text() == "fast" and os.listdir(tmp_path) == ["out"]


def test_another_process_took_the_name_between_the_renames(tmp_path, monkeypatch):
    """Then neither its output nor the old one, which cannot come back to its place, may be lost."""
    output, rename = write(tmp_path / "out", "old"), os.rename
    before = digests(output)

    def overtaken(source, target):
        if Path(source).name == "new":
            output.mkdir()
            (output / "theirs.txt").write_text("fast")
        rename(source, target)

    monkeypatch.setattr(os, "rename", overtaken)
    with pytest.raises(UserError, match="written by another process meanwhile"):
        write(output, "new", replace=True)
    assert os.listdir(output) == ["theirs.txt"]
    (old,) = tmp_path.glob(".out.writing-*/old")
    assert digests(old) == before


def test_a_link_as_output_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for text in ("old", "new"):
        write(tmp_path / "link", text, replace=True)
        assert (tmp_path / "link").is_symlink() and (
            tmp_path / "real" / "sub" / "a.txt"
        ).read_text() == text


@pytest.mark.parametrize(
    "output, message",
    [
        ("run", "holds"),
        ("run/step", "itself"),
        ("run/step/out", "inside"),
        ("to_run", "holds"),
        ("to_run/step", "itself"),
        (".", "holds"),
    ],
)
def test_input_and_output_apart(tmp_path, output, message):
    (tmp_path / "run" / "step").mkdir(parents=True)
    (tmp_path / "to_run").symlink_to("run")
    with pytest.raises(UserError, match=message):
        outputs.check_apart(tmp_path / output, tmp_path / "run" / "step")
    outputs.check_apart(tmp_path / "elsewhere", tmp_path / "run" / "step")


def test_input_and_output_apart_under_two_names_of_one_folder(tmp_path, monkeypatch):
    """As on a disk that ignores case, or one that is mounted twice: `samefile` says what the names
    do not."""
    (tmp_path / "run").mkdir()
    (tmp_path / "RUN").mkdir()
    same = os.path.samefile
    monkeypatch.setattr(
        os.path,
        "samefile",
        lambda a, b: {Path(a).name, Path(b).name} == {"run", "RUN"} or same(a, b),
    )
    for output, message in (("RUN", "itself"), ("RUN/out", "inside")):
        with pytest.raises(UserError, match=message):
            outputs.check_apart(tmp_path / output, tmp_path / "run")


def test_result_files_of_others_are_not_replaced(tmp_path):
    data = tmp_path / "table.json"

    def check():
        outputs.check_result_files(
            tmp_path, "glue", outputs.earlier_result(data, "rows"), "table.json", "table.md"
        )

    check()
    outputs.check_result_files(tmp_path / "new", "glue", None, "table.md")
    for content in (b"mine", b"\xff", b"[]", b'{"other": 1}', b"[" * 100_000):
        data.write_bytes(content)
        with pytest.raises(
            UserError,
            match=(
                "table.json was not made by neobert glue, so it is not replaced; move it, or "
                "choose another folder"
            ),
        ):
            check()
    data.unlink()
    (tmp_path / "table.md").symlink_to("nothing")
    with pytest.raises(UserError, match="table.md was not made"):
        check()
    data.write_text('{"rows": [NaN]}')
    check()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, "does not exist"),
        (os.mkfifo, "not a file, but a pipe, socket or device"),
        (os.mkdir, "not a file, but a folder"),
        (lambda path: path.write_bytes(b"\xff"), "not UTF-8"),
        (lambda path: path.write_text("[1, 2"), "not valid JSON"),
        (lambda path: path.write_text("[" * 100_000), "not valid JSON"),
        (
            lambda path: path.write_text("[" * 51 + "]" * 51),
            "not valid JSON .*nested more than 50 deep",
        ),
        (lambda path: path.write_text("[NaN]"), "not valid JSON .*NaN is not a finite number"),
        (
            lambda path: path.write_text("[-1e999]"),
            "not valid JSON .*-1e999 is not a finite number",
        ),
        (lambda path: path.write_text("9" * 5000), "not valid JSON"),
        (lambda path: path.write_text(" " * 1001), "more than 1,000 bytes"),
        (lambda path: path.symlink_to("/dev/zero"), "not a file, but a pipe, socket or device"),
    ],
    ids=[
        "absent",
        "pipe",
        "folder",
        "bytes",
        "cut",
        "deep",
        "too deep",
        "nan",
        "infinite",
        "digits",
        "large",
        "device",
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, make, message):
    make(tmp_path / "a.json")
    with pytest.raises(UserError, match=message):
        files.read_json(
            tmp_path / "a.json", limit=1000 if message.startswith("more") else 1_000_000
        )


def test_a_manifest_that_cannot_be_read_is_no_manifest(tmp_path):
    for spoil in (
        os.mkfifo,
        lambda path: path.write_text('{"command": "convert", "files": [1]}'),
        lambda path: path.write_text("[" * 9999),
    ):
        output = write(tmp_path / "out", "old")
        (output / "convert.json").unlink()
        spoil(output / "convert.json")
        with pytest.raises(UserError, match="not written by neobert convert"):
            write(output, "new", replace=True)
        shutil.rmtree(output)


def test_safetensors_in_pieces_equal_the_library(tmp_path):
    tensors = {
        "b": torch.randn(3, 5),
        "a.weight": torch.randn(7),
        "c": torch.randn(()),
        "half": torch.randn(3).half(),
    }
    layout = {
        name: ("F16" if name == "half" else "F32", tuple(value.shape))
        for name, value in tensors.items()
    }

    def pieces(name):
        data = tensors[name].flatten().view(torch.uint8).numpy()
        return [memoryview(data[:4]), memoryview(data[4:])]

    row = files.write_safetensors(tmp_path / "ours", layout, pieces, {"format": "pt"})
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    data = (tmp_path / "ours").read_bytes()
    assert data == (tmp_path / "theirs").read_bytes()
    assert row == {
        "file": "ours",
        "tensors": 4,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    with pytest.raises(ValueError, match="a.weight has 4 bytes where its dtype and shape take 28"):
        files.write_safetensors(tmp_path / "short", layout, lambda name: pieces(name)[:1])


@pytest.mark.parametrize("length", range(1, 9))
def test_the_numbers_of_a_safetensors_file_are_aligned(tmp_path, length):
    tensors = {"x" * length: torch.ones(3)}
    files.write_safetensors(
        tmp_path / "ours", {"x" * length: ("F32", (3,))}, lambda name: [tensors[name].numpy()]
    )
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_digest_in_blocks_is_that_of_the_whole_file(tmp_path, monkeypatch):
    """As Python 3.10 makes it."""
    content = os.urandom(5 << 19)
    (tmp_path / "a.bin").write_bytes(content)
    monkeypatch.delattr(hashlib, "file_digest", raising=False)
    assert files.sha256(tmp_path / "a.bin") == hashlib.sha256(content).hexdigest()


def test_text_of_any_name_can_be_written(tmp_path):
    """A file's name on Linux need not be UTF-8: Python has it with half surrogate pairs, and it
    comes into results with the command."""
    name = os.fsdecode(b"caf\xe9-caf\xc3\xa9.jsonl")
    files.write_json(tmp_path / "a.json", {"command": name})
    files.write_text(tmp_path / "a.md", name)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"command": name}
    assert (tmp_path / "a.md").read_text(encoding="utf-8") == "caf\\udce9-caf\u00e9.jsonl"


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_rights_are_those_that_the_umask_leaves(tmp_path, mask):
    """Libraries give files others: safetensors 0600, a copy those of its source."""
    before = os.umask(mask)
    try:
        with outputs.new_folder(tmp_path / "out", "convert") as folder:
            save_file({"a": torch.zeros(3)}, folder / "a.safetensors")
            (tmp_path / "closed").mkdir(mode=0o700)
            shutil.copytree(tmp_path / "closed", folder / "sub")
            shutil.copy(__file__, folder / "sub" / "a.py")
        files.write_text(tmp_path / "out" / "a.txt", "text")
    finally:
        os.umask(before)
    modes = {
        path: path.stat().st_mode & 0o777
        for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    }
    assert modes == {path: (0o777 if path.is_dir() else 0o666) & ~mask for path in modes}


SECRET = "s3cr3t-Value"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hub_token", SECRET],
        [f"--hub-token={SECRET}"],
        ["--api-key", SECRET],
        ["--client_secret", SECRET],
        ["--password", f"-{SECRET}"],
        ["-token", SECRET],
        ["--dataset", f"https://somebody:{SECRET}@host/data.jsonl"],
        ["--dataset", f"https://{SECRET}@host/data.jsonl"],
    ],
)
def test_secrets_are_not_written(tmp_path, monkeypatch, arguments):
    rest = ["--tokens_per_batch", "512", "--tokenizer", "folder"]
    monkeypatch.setattr("sys.argv", ["neobert", *arguments, *rest])
    command = environment()["command"]
    assert SECRET not in command and HIDDEN in command
    assert command.endswith(" ".join(rest)), "more than secrets was hidden"
    name = arguments[0].lstrip("-").partition("=")[0]
    settings = {"settings": [{name: arguments[-1]}], "steps": 3}
    files.write_json(tmp_path / "result.json", settings)
    text = (tmp_path / "result.json").read_text()
    assert SECRET not in text and json.loads(text)["steps"] == 3


def test_secrets_in_lists_are_hidden_and_options_behind_a_missing_one_are_not():
    assert redacted({"addresses": ("https://me:pw@host", 3)}) == {
        "addresses": [f"https://{HIDDEN}@host", 3]
    }
    assert redacted_arguments(["--hub_token", "--seed", "3"]) == [
        "--hub_token",
        "--seed",
        "3",
    ]


def test_classes_of_an_auto_map_are_not_secrets(tmp_path):
    auto_map = {"AutoModelForTokenClassification": "modeling_neobert.NeoBERTForTokenClassification"}
    files.write_json(tmp_path / "config.json", {"auto_map": auto_map})
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == auto_map
