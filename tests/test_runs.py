"""Pins who owns an output folder: new, begun or finished; the lock comes first; what no marker names is the user's."""

import json
import multiprocessing
import os

import pytest

from neobert.common.errors import UserError
from neobert.common.runs import LOCK, Run, locked, own_files


def make(folder, settings=None, name="a.txt", text="one", overwrite=False):
    """A finished run that wrote one file."""
    run = Run(folder, "encode", settings or {"rows": 1})
    with run.claim(overwrite):
        (folder / name).write_text(text)
        run.finish([name], seconds=2)
    return run


def test_new_begun_and_finished(tmp_path):
    out = tmp_path / "out"
    run = Run(out, "encode", {"rows": 1})
    with run.claim():
        assert run.state == "new"
    with run.claim():
        assert run.state == "begun", "a run that ended before its end goes on"
        run.finish([], seconds=2)
    with run.claim():
        assert run.state == "finished" and run.marker["seconds"] == 2
    assert sorted(path.name for path in out.iterdir()) == ["encode.json"], "the lock is left behind"
    with pytest.raises(UserError, match=r"other settings \(rows differ\)"), Run(out, "encode", {"rows": 2}).claim():
        pass


def test_a_claim_that_writes_nothing_leaves_nothing(tmp_path):
    with locked(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("held", ["notes.txt", "encode.json", "distill.json"])
def test_the_folder_of_somebody_else_is_refused(tmp_path, held):
    (tmp_path / held).write_text('{"command": "distill", "settings": {}}')
    with pytest.raises(UserError, match="other files|not of neobert encode"), Run(tmp_path, "encode", {}).claim(overwrite=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [held]


def test_overwriting_keeps_the_old_output_until_the_new_one_is_complete(tmp_path):
    make(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    run = Run(tmp_path, "encode", {"rows": 2})
    with run.claim(overwrite=True):
        (tmp_path / "b.txt").write_text("half")
    assert (tmp_path / ".before-overwrite" / "a.txt").read_text() == "one"
    with run.claim():
        assert run.state == "begun"
        run.finish(["b.txt"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.txt", "encode.json", "mine.txt"]


def test_a_link_is_never_followed(tmp_path):
    out, other = tmp_path / "out", tmp_path / "precious.txt"
    other.write_text("precious")
    out.mkdir()
    (out / LOCK).symlink_to(other)
    with pytest.raises(UserError, match="not a lock that neobert made"), locked(out):
        pass
    (out / LOCK).unlink()
    make(out)
    (out / "a.txt").unlink()
    (out / "a.txt").symlink_to(other)
    assert list(own_files(out, ["a.txt", "../precious.txt"])) == []
    make(out, {"rows": 2}, "b.txt", overwrite=True)
    assert other.read_text() == "precious" and (out / "a.txt").is_symlink()


def test_a_marker_cannot_name_what_is_outside(tmp_path):
    (tmp_path / "precious.txt").write_text("precious")
    marker = {"command": "encode", "settings": {}, "files": ["../precious.txt", str(tmp_path / "precious.txt")]}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "encode.json").write_text(json.dumps(marker))
    make(tmp_path / "out", overwrite=True)
    assert (tmp_path / "precious.txt").read_text() == "precious"


def test_the_second_of_two_runs_is_refused_before_it_looks(tmp_path):
    make(tmp_path)
    with locked(tmp_path):
        pipe, theirs = multiprocessing.Pipe()
        child = os.fork()
        if child == 0:
            try:
                with Run(tmp_path, "encode", {"rows": 2}).claim(overwrite=True):
                    theirs.send("claimed")
            except UserError as error:
                theirs.send(str(error))
            os._exit(0)
        assert "is in use by another run" in pipe.recv()
        os.waitpid(child, 0)
    assert (tmp_path / "a.txt").read_text() == "one", "its overwrite moved the first one's files"


def test_files_have_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o077)
    try:
        make(tmp_path / "out")
        assert (tmp_path / "out" / "encode.json").stat().st_mode & 0o777 == 0o600
        with locked(tmp_path / "other"):
            assert (tmp_path / "other" / LOCK).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
