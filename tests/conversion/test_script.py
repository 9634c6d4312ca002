"""Test that `python convert_checkpoint.py` and `neobert convert` are the same command.

Both have the same messages, exit codes and optional traceback. Ctrl-C prints one line, even while
libraries are imported.
"""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.conversion_helpers import SCRIPT

from neobert.cli import main
from neobert.common.commands import guarded
from neobert.conversion.command import main as convert


def test_error_is_one_line_with_optional_traceback(tmp_path, capsys, monkeypatch):
    """An error is one line, and NEOBERT_DEBUG=1 prints the traceback before it.

    Control characters in the name of the checkpoint are escaped.
    """
    monkeypatch.delenv("NEOBERT_DEBUG", raising=False)
    (tmp_path / "run\x1b[2J").mkdir()
    (tmp_path / "run\x1b[2J" / "model.safetensors").write_bytes(b"cut")
    arguments = ["convert", str(tmp_path / "run\x1b[2J"), str(tmp_path / "out")]

    assert main(arguments) == 2
    message = capsys.readouterr().err
    pattern = r"neobert convert: .*run\\x1b\[2J/model.safetensors cannot be read: it is trunc.*\n"
    assert re.fullmatch(pattern, message), message

    monkeypatch.setenv("NEOBERT_DEBUG", "1")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last)") and error.endswith(message)


@pytest.mark.parametrize(
    "arguments, output",
    [
        (
            [],
            "PROG: missing required options: CHECKPOINT, OUTPUT. `neobert convert --help` lists "
            "all options.\n",
        ),
        (["a", "b", "--heed", "x"], "PROG: unknown option '--heed'. Did you mean --head?\n"),
        (["/nowhere", "b"], "PROG: there is no file /nowhere.\n"),
    ],
)
def test_script_and_command_print_the_same_errors(capsys, arguments, output):
    """Check that both print the same message, each with its own name.

    The script is not started. Its function runs in this process instead, which is faster.
    """
    script = "convert_checkpoint.py"
    assert main(["convert", *arguments]) == 2
    assert capsys.readouterr().err == output.replace("PROG", "neobert convert")
    assert guarded(script, lambda: convert(arguments)) == 2
    assert capsys.readouterr().err == output.replace("PROG", script)


@pytest.mark.skipif("not sys.platform.startswith('linux')", reason="requires /proc")
def test_ctrl_c_during_the_imports(tmp_path):
    """Check that SIGINT during the import of torch prints one line and no traceback."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "a", "b"], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    # The process has mapped libc10 as soon as it imports torch.
    deadline = time.monotonic() + 900
    while "libc10" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None and time.monotonic() < deadline, "torch was not imported"
        time.sleep(0.005)

    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=900)
    assert (process.returncode, error) == (
        130,
        "convert_checkpoint.py: interrupted.\n",
    )
