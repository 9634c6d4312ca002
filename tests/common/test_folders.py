"""Test atomic outputs.

An output appears complete or not at all, and existing directories are never replaced. Leftovers of
killed processes are removed, a second process is rejected, and the umask sets the permissions.
"""

import os
import re
import shutil
import subprocess
import sys
import threading

import pytest

from neobert.common.errors import UserError
from neobert.common.folders import (
    check_disjoint,
    check_new,
    locked,
    new_file,
    new_folder,
    remove_leftover,
)


def everything(folder):
    """Return the relative paths of all files and directories in a directory, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def make(output, text="x"):
    """Write an output directory that contains one file in a subdirectory."""
    with new_folder(output) as folder:
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text(text)


@pytest.mark.parametrize("prepare", [None, "mkdir", "link"])
def test_a_new_folder(tmp_path, prepare):
    """Check that an output is created with its parents, in an empty directory, or behind a link."""
    output = tmp_path / "a" / "b"
    if prepare:
        (tmp_path / "a").mkdir()
    if prepare == "mkdir":
        output.mkdir()
    if prepare == "link":
        output.symlink_to(tmp_path / "target")
    make(output)
    assert (output / "below" / "file").read_text() == "x"
    assert everything(tmp_path / "a")[:1] == ["b"] and ".b.tmp" not in everything(tmp_path / "a")


@pytest.mark.parametrize(
    "output, sentence",
    [
        ("full", "full already exists. Remove it (rm -r"),
        ("file", "file already exists"),
        ("to_file", "to_file already exists"),
    ],
)
def test_existing_outputs_are_rejected(tmp_path, monkeypatch, output, sentence):
    """Check that an existing file or directory is neither accepted as an output nor changed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "to_file").symlink_to("file")
    before = everything(tmp_path)

    for function in (check_new, make):
        with pytest.raises(UserError, match=re.escape(sentence)):
            function(output)

    assert everything(tmp_path) == before and (tmp_path / "file").read_text() == "mine"


def test_error_leaves_no_incomplete_output(tmp_path):
    """Check that no incomplete file or directory remains after an exception.

    An existing file is not changed.
    """
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("old")
    for name in ("a", "b/c/d", "there/e/f"):
        with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / name) as folder:
            (folder / "half").write_text("x")
            raise KeyboardInterrupt

    for name in ("there/file", "c"):
        with pytest.raises(ZeroDivisionError), new_file(tmp_path / name) as file:
            file.write(b"x")
            1 / 0  # noqa: B018

    assert everything(tmp_path) == ["there", "there/file"]
    assert (tmp_path / "there" / "file").read_text() == "old"


def test_directory_created_meanwhile_is_not_replaced(tmp_path):
    """A directory that another process has created in the meantime is not replaced."""
    with pytest.raises(OSError), new_folder(tmp_path / "a") as folder:
        (folder / "new").write_text("x")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "mine").write_text("mine")
    assert everything(tmp_path) == ["a", "a/mine"]


# A script that waits while it writes an output.
KILLED = """
import os, signal, sys
from neobert.common.folders import new_folder
with new_folder(sys.argv[1]) as folder:
    (folder / "half").write_text("x")
    print("begun", flush=True)
    sys.stdin.read()
"""


def test_second_process_is_rejected_until_the_first_ends(tmp_path):
    """Check that a second process is rejected while the first one runs, and succeeds afterwards.

    The second process removes the incomplete output of the first one, which was killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path / "a"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"begun\n"

    with pytest.raises(UserError, match="in use by another run"):
        make(tmp_path / "a")

    process.kill()
    process.communicate()
    assert ".a.tmp/new/half" in everything(tmp_path), "the process must leave an incomplete output"

    make(tmp_path / "a")
    assert everything(tmp_path) == ["a", "a/below", "a/below/file"]


def test_lock_waits_on_request(tmp_path):
    """With `wait`, a directory is locked after the other lock has been released."""
    events = []

    def work():
        with locked(tmp_path, wait=True):
            events.append("second")

    thread = threading.Thread(target=work)
    with locked(tmp_path):
        with pytest.raises(UserError, match="is in use by another run"), locked(tmp_path):
            pass
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        events.append("first")
    thread.join(30)
    assert events == ["first", "second"]


def test_a_new_file(tmp_path):
    """Check that a file is created or replaced, and the leftover of a killed process is removed."""
    for content in (b"one", b"two"):
        (tmp_path / ".file.tmp").write_bytes(b"left by a killed process, and longer")
        with new_file(tmp_path / "file") as file:
            file.write(content)
        assert (tmp_path / "file").read_bytes() == content
    assert everything(tmp_path) == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_links_to_missing_paths_are_kept(tmp_path):
    """An output may be a link whose target does not exist yet."""
    for name in ("file", "folder"):
        (tmp_path / f"link_{name}").symlink_to(tmp_path / name)
    with new_file(tmp_path / "link_file") as file:
        file.write(b"x")
    with locked(tmp_path / "link_folder"):
        pass

    assert (tmp_path / "file").read_bytes() == b"x"
    assert (tmp_path / "folder").is_dir()
    assert all((tmp_path / f"link_{name}").is_symlink() for name in ("file", "folder"))


def test_file_system_without_permissions_and_links(tmp_path, monkeypatch):
    """Check that outputs are written if the file system supports neither permissions nor links."""

    def refuse(*arguments, **options):
        raise PermissionError("not on this file system")

    for name in ("chmod", "fchmod", "link"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(shutil, "copystat", refuse)

    umask = os.umask(0o027)
    try:
        make(tmp_path / "a")
        with new_file(tmp_path / "b") as file:
            file.write(b"x")
    finally:
        os.umask(umask)

    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/below/file", "b")]
    assert modes == [0o750, 0o640, 0o640]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_permissions_follow_the_umask(tmp_path):
    """Check the permissions of a file that only its owner can read, as safetensors writes it."""
    umask = os.umask(0o027)
    try:
        with new_folder(tmp_path / "a") as folder:
            (folder / "weights").touch(0o600)
    finally:
        os.umask(umask)
    assert (tmp_path / "a" / "weights").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "output, refused",
    [("in", True), ("in/out", True), (".", True), ("link/out", True), ("out", False), ("i", False)],
)
def test_inputs_and_outputs_are_disjoint(tmp_path, output, refused):
    """An output must neither contain an input nor be inside one, even through a link."""
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to("in")
    if not refused:
        return check_disjoint(tmp_path / output, tmp_path / "in")
    with pytest.raises(UserError, match="must not contain each other"):
        check_disjoint(tmp_path / output, tmp_path / "other", tmp_path / "in")


def test_leftover_lock_file_is_removed(tmp_path):
    """Check that the lock file of a process that was killed after the rename is removed."""
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
    leftover = tmp_path / ".out.tmp"
    leftover.mkdir()
    (leftover / ".lock").touch()
    remove_leftover(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "x"
