"""Test that `python convert_checkpoint.py` and `neobert convert` are one command.

Messages, exit codes and the optional traceback are the same. Ctrl-C prints one line, also while
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


def test_one_sentence_and_the_traceback_when_asked_for(tmp_path, capsys, monkeypatch):
    """Also of a checkpoint whose name has characters that a terminal would obey."""
    monkeypatch.delenv("NEOBERT_DEBUG", raising=False)
    (tmp_path / "run\x1b[2J").mkdir()
    (tmp_path / "run\x1b[2J" / "model.safetensors").write_bytes(b"cut")
    arguments = ["convert", str(tmp_path / "run\x1b[2J"), str(tmp_path / "out")]
    assert main(arguments) == 2
    sentence = capsys.readouterr().err
    words = r"neobert convert: .*run\\x1b\[2J/model.safetensors cannot be read: it is trunc.*\n"
    assert re.fullmatch(words, sentence), sentence
    monkeypatch.setenv("NEOBERT_DEBUG", "1")
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last)") and said.endswith(sentence)


@pytest.mark.parametrize(
    "arguments, output",
    [
        (
            [],
            "PROG: CHECKPOINT, OUTPUT must be given. `neobert convert --help` lists all options.\n",
        ),
        (["a", "b", "--heed", "x"], "PROG: unknown option '--heed'. Did you mean --head?\n"),
        (["/nowhere", "b"], "PROG: there is no file /nowhere.\n"),
    ],
)
def test_both_say_the_same(capsys, arguments, output):
    """The script's own way is taken in this process, but for the import of the package."""
    script = "convert_checkpoint.py"
    assert main(["convert", *arguments]) == 2
    assert capsys.readouterr().err == output.replace("PROG", "neobert convert")
    assert guarded(script, lambda: convert(arguments)) == 2
    assert capsys.readouterr().err == output.replace("PROG", script)


@pytest.mark.skipif("not sys.platform.startswith('linux')", reason="looks into /proc")
def test_ctrl_c_during_the_imports(tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "a", "b"], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    until = time.monotonic() + 60
    while "libc10" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None and time.monotonic() < until, "it never came to import torch"
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (
        130,
        "convert_checkpoint.py: interrupted. Run the same command again to resume.\n",
    )
