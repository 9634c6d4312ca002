"""Pins that `python convert_checkpoint.py` and `neobert convert` are one command: same sentences
and exit codes, a traceback when asked for, one line after Ctrl-C, also while the libraries are
still being imported.
"""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conversion_helpers import SCRIPT

from neobert.__main__ import main


@pytest.fixture
def truncated(tmp_path, golden):
    """A checkpoint whose name has characters that a terminal would obey."""
    folder = tmp_path / "run\x1b[2J"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(
        (golden / "neobert_tiny" / "model.safetensors").read_bytes()[:-100]
    )
    return folder


def test_one_sentence_and_the_traceback_when_asked_for(tmp_path, truncated, capsys, monkeypatch):
    monkeypatch.delenv("NEOBERT_DEBUG", raising=False)
    arguments = [str(truncated), str(tmp_path / "out")]
    assert main(["convert", *arguments]) == 2
    sentence = capsys.readouterr().err
    assert re.fullmatch(
        r"neobert convert: .*run\\x1b\[2J/model.safetensors cannot be read, it is truncated .*\n",
        sentence,
    ), sentence
    monkeypatch.setenv("NEOBERT_DEBUG", "1")
    assert main(["convert", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last)") and said.endswith(sentence)


@pytest.mark.parametrize(
    "arguments, code, output",
    [
        ([], 2, "PROG: give CHECKPOINT, OUTPUT; --help lists the options\n"),
        (["a"], 2, "PROG: give OUTPUT; --help lists the options\n"),
        (["a", "b", "--heed", "x"], 2, "PROG: unknown argument '--heed'; did you mean --head?\n"),
        (["a", "b", "c"], 2, "PROG: "),
        (["/nowhere", "b"], 2, "PROG: no file /nowhere\n"),
    ],
    ids=["nothing", "half", "typo", "too many", "absent"],
)
def test_both_say_the_same(capsys, monkeypatch, arguments, code, output):
    """The script's own way is taken in this process, but for the import of the package."""
    from neobert import convert_checkpoint
    from neobert.common.commands import guarded

    said = []
    for name, run in (
        ("neobert convert", lambda: main(["convert", *arguments])),
        (
            "convert_checkpoint.py",
            lambda: guarded("convert_checkpoint.py", lambda: convert_checkpoint.main(arguments)),
        ),
    ):
        try:
            found = run()
        except SystemExit as end:
            found = end.code
        printed = capsys.readouterr()
        assert found == code and (printed.out if code == 0 else printed.err).startswith(
            output.replace("PROG", name)
        ), printed
        said.append((printed.out + printed.err).replace(name, "PROG"))
    assert said[0] == said[1]


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
        "convert_checkpoint.py: interrupted; run the same command again to continue\n",
    )
