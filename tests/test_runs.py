"""Pins who owns an output folder: new, begun or finished; the lock comes first; what no marker
names, or was changed, is the user's."""

import json
import multiprocessing
import os

import pytest

from neobert.common.errors import UserError
from neobert.common.runs import LOCK, Run, locked, split_files, stamps


def make(folder, settings=None, name="a.txt", text="one", overwrite=False):
    """A finished run that wrote one file."""
    run = Run(folder, "encode", settings or {"rows": 1})
    with run.claim(overwrite):
        scratch = run.scratch()
        (scratch / name).write_text(text)
        run.finish(run.move_in(scratch), seconds=2)
    return run


def names(folder):
    return sorted(path.name for path in folder.iterdir())


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
    assert names(out) == ["encode.json"], "the lock is left behind"
    with (
        pytest.raises(UserError, match=r"other settings \(rows 1, now 2\); give the same"),
        Run(out, "encode", {"rows": 2}).claim(),
    ):
        pass


def test_a_claim_that_writes_nothing_leaves_nothing(tmp_path):
    with locked(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("held", ["notes.txt", "encode.json", "distill.json"])
def test_the_folder_of_somebody_else_is_refused(tmp_path, held):
    (tmp_path / held).write_text('{"command": "distill", "settings": {}}')
    with pytest.raises(UserError, match="other files|not of this version of neobert encode"):
        Run(tmp_path, "encode", {}).inspect(overwrite=True)
    assert names(tmp_path) == [held]


def test_overwriting_keeps_the_old_output_until_the_new_one_is_complete(tmp_path):
    make(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    run = Run(tmp_path, "encode", {"rows": 2})
    with run.claim(overwrite=True):
        (tmp_path / "b.txt").write_text("half")
    aside = tmp_path / ".before-overwrite"
    assert (aside / "a.txt").read_text() == "one"
    (aside / "mine.txt").write_text("mine")
    with run.claim():
        assert run.state == "begun"
        run.finish(["b.txt"])
    assert names(tmp_path) == [".before-overwrite", "b.txt", "encode.json", "mine.txt"] and names(
        aside
    ) == ["mine.txt"]
    with (
        pytest.raises(UserError, match="before-overwrite holds files of somebody else"),
        run.claim(overwrite=True),
    ):
        pass


def test_killed_while_the_old_output_is_set_aside(tmp_path, monkeypatch):
    """At any of the renames and writes: the next --overwrite goes on, and no file of the old output
    is lost."""
    replace, left = os.replace, [0]

    def killed(source, target):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(source, target)

    for moment in range(4):
        out = tmp_path / str(moment)
        run = Run(out, "encode", {"rows": 1})
        with run.claim():
            for name in ("a.txt", "b.txt"):
                (out / name).write_text(name)
            run.finish(["a.txt", "b.txt"])
        left[0] = moment
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            with (
                pytest.raises(KeyboardInterrupt),
                Run(out, "encode", {"rows": 2}).claim(overwrite=True),
            ):
                pytest.fail("vacuous")
        with Run(out, "encode", {"rows": 2}).claim(overwrite=True):
            assert names(out) == [".before-overwrite", LOCK, "encode.json"]
            assert [
                (out / ".before-overwrite" / name).read_text() for name in ("a.txt", "b.txt")
            ] == ["a.txt", "b.txt"]


def test_a_file_that_the_user_changed_is_not_replaced(tmp_path):
    make(tmp_path)
    (tmp_path / "a.txt").write_text("edited")
    with (
        pytest.raises(UserError, match=r"changed since \(a.txt\)"),
        Run(tmp_path, "encode", {}).claim(overwrite=True),
    ):
        pass
    assert (tmp_path / "a.txt").read_text() == "edited"


@pytest.mark.parametrize("moves", range(3))
def test_a_result_moves_in_beside_the_files_of_the_user(tmp_path, monkeypatch, moves):
    """Killed between two of its files as well; a file of the user under a name of the result is not
    replaced."""
    out, replace = tmp_path / "out", os.replace
    run = Run(out, "encode", {})

    def end(text):
        scratch = run.scratch()
        for name in ("a.txt", "b.txt", "c.txt"):
            (scratch / name).write_text(text)
        return run.move_in(scratch, "a.txt")

    def killed(source, target, count=[]):  # noqa: B006
        if str(source).endswith(".txt"):
            count.append(target)
            if len(count) > moves:
                raise KeyboardInterrupt
        replace(source, target)

    with run.claim(), monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            end("first")
    with run.claim():
        (out / "c.txt").unlink(missing_ok=True)
        (out / "c.txt").write_text("mine")
        with pytest.raises(UserError, match=r"did not write \(c.txt\); move them"):
            end("second")
        assert (out / "c.txt").read_text() == "mine"
        (out / "c.txt").unlink()
        assert end("third") == ["b.txt", "c.txt", "a.txt"]
        run.finish(["a.txt", "b.txt", "c.txt"])
    assert (
        names(out) == ["a.txt", "b.txt", "c.txt", "encode.json"]
        and (out / "c.txt").read_text() == "third"
    )


def test_a_result_that_was_moving_in_goes_with_its_run(tmp_path, monkeypatch):
    """Killed there, and then given up for another run: its files are not the user's, and do not
    keep the other's result out."""
    run, replace = Run(tmp_path, "encode", {"rows": 1}), os.replace

    def killed(source, target):
        replace(source, target)
        if str(source).endswith(".txt"):
            raise KeyboardInterrupt

    with run.claim(), monkeypatch.context() as patch:
        scratch = run.scratch()
        for name in ("a.txt", "b.txt"):
            (scratch / name).write_text("one")
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run.move_in(scratch)
    assert (tmp_path / "a.txt").exists() and run.scratch_folder.exists()
    make(tmp_path, {"rows": 2}, overwrite=True)
    assert names(tmp_path) == ["a.txt", "encode.json"]


def test_a_link_to_a_folder_of_the_user_is_not_written_through(tmp_path):
    run, other = Run(tmp_path / "out", "encode", {}), tmp_path / "other"
    other.mkdir()
    with run.claim():
        (tmp_path / "out" / "sub").symlink_to(other)
        scratch = run.scratch()
        (scratch / "sub").mkdir()
        (scratch / "sub" / "a.txt").write_text("one")
        with pytest.raises(UserError, match=r"did not write \(sub/a.txt\)"):
            run.move_in(scratch)
    assert names(other) == []


def test_a_link_is_never_followed(tmp_path):
    out, other = tmp_path / "out", tmp_path / "precious"
    other.mkdir()
    (other / "a.txt").write_text("precious")
    run = Run(out, "encode", {})
    out.mkdir()
    (out / LOCK).symlink_to(other / "a.txt")
    with pytest.raises(UserError, match="not a lock that neobert made"), run.claim():
        pass
    (out / LOCK).unlink()
    with run.claim():
        (out / f".encode-{run.id}").symlink_to(other)
        (other / ".neobert.json").write_text(json.dumps({"command": "encode", "run": run.id}))
        with pytest.raises(UserError, match="was not made by neobert encode"):
            run.scratch()
    (out / "a.txt").symlink_to(other / "a.txt")
    assert split_files(out, stamps(other, ["a.txt"]))[0] == []
    assert (other / "a.txt").read_text() == "precious"


def test_a_marker_cannot_name_what_is_outside(tmp_path):
    path = tmp_path / "precious.txt"
    path.write_text("precious")
    (stamp,) = stamps(tmp_path, ["precious.txt"]).values()
    marker = {
        "command": "encode",
        "run": "1",
        "settings": {},
        "files": {"../precious.txt": stamp, str(path): stamp},
    }
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "encode.json").write_text(json.dumps(marker))
    make(tmp_path / "out", overwrite=True)
    assert path.read_text() == "precious"


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


def test_what_a_finished_run_set_aside_goes_when_it_was_killed_before_that(tmp_path):
    make(tmp_path)
    make(tmp_path, {"rows": 2}, "b.txt", overwrite=True)
    aside = tmp_path / ".before-overwrite"
    aside.mkdir()
    (aside / "encode.json").write_text(
        json.dumps({"command": "encode", "run": "0", "settings": {}, "files": {}})
    )
    with Run(tmp_path, "encode", {"rows": 2}).claim() as run:
        assert run.state == "finished" and not aside.exists()
