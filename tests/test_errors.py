"""Pins how commands end: strangers' text is escaped and cut in one place, and whatever goes wrong is one sentence with a way to the traceback."""

import errno
import os
import subprocess
import sys

import pytest

from neobert.common import errors
from neobert.common.errors import UserError, guarded, listed, one_line


def run(error, monkeypatch=None, debug=None):
    def command():
        raise error

    if debug is not None:
        monkeypatch.setenv("NEOBERT_DEBUG", debug)
    return guarded("neobert x", command)


def test_text_of_a_stranger_is_escaped_in_every_message():
    name = "a\x1b]0;owned\x07\n\u202e\ud800\u00e9\u4f60"
    escaped = "a\\x1b]0;owned\\x07\\n\\u202e\\ud800\u00e9\u4f60"
    assert str(UserError(name)) == listed([name]) == escaped
    assert str(UserError(str(UserError(name)))) == escaped, "escaped twice"
    assert len(str(UserError("x" * 10**6))) == 4000 and len(listed(["x" * 10**6] * 3)) < 700
    assert one_line(ValueError(" two\n lines. ")) == "two lines"


@pytest.mark.parametrize(
    "error, message, code",
    [
        (UserError("give a file"), "give a file", 2),
        (ImportError("this needs\n  x"), "this needs x", 2),
        (PermissionError(errno.EACCES, "Permission denied", "run/a.pt"), "run/a.pt: Permission denied", 2),
        (OSError(errno.ENOSPC, "No space left on device"), "no space is left on the disk", 2),
        (MemoryError(), "there is not enough memory", 2),
        (KeyError("x"), "unexpected KeyError: 'x'; NEOBERT_DEBUG=1 shows where", 2),
        (RecursionError("too deep"), "unexpected RecursionError: too deep; NEOBERT_DEBUG=1 shows where", 2),
        (type("PanicException", (BaseException,), {})("oh"), "unexpected PanicException: oh; NEOBERT_DEBUG=1 shows where", 2),
        (KeyboardInterrupt(), "interrupted; run the same command again to continue", 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_everything_is_one_sentence(capsys, error, message, code):
    assert run(error) == code
    assert capsys.readouterr().err == f"neobert x: {message}\n"


def test_debug_shows_the_traceback(capsys, monkeypatch):
    assert run(UserError("give a file"), monkeypatch, "1") == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback") and error.endswith("neobert x: give a file\n")
    run(UserError("give a file"), monkeypatch, "0")
    assert "Traceback" not in capsys.readouterr().err


def test_exit_codes_pass():
    assert guarded("x", lambda: None) == 0 and guarded("x", lambda: 3) == 3
    with pytest.raises(SystemExit) as left:
        guarded("x", lambda: sys.exit(0))
    assert left.value.code == 0


# Without the package, whose import takes seconds.
CODE = f"""
import runpy, sys
sys.exit(runpy.run_path({errors.__file__!r})["guarded"]("x", lambda: print("\\u4f60\\udc80" * 9999)))
"""


@pytest.mark.parametrize(
    "output, code, message", [("ascii", 0, ""), ("closed", 2, "x: Broken pipe\n"), ("full", 2, "x: no space is left on the disk\n")]
)
def test_output_that_cannot_be_written(tmp_path, output, code, message):
    """In another process: ASCII output, a reader that left, a full disk."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii" if output == "ascii" else "utf-8"}
    if output == "closed":
        reader, target = os.pipe()
        os.close(reader)
    else:
        target = os.open(tmp_path / "out" if output == "ascii" else "/dev/full", os.O_WRONLY | os.O_CREAT)
    process = subprocess.run([sys.executable, "-c", CODE], stdout=target, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(target)
    assert (process.returncode, process.stderr) == (code, message)
    if output == "ascii":
        assert (tmp_path / "out").read_text() == "\\u4f60\\udc80" * 9999 + "\n"
