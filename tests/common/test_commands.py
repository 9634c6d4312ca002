"""Test the messages and exit codes of commands.

Every error is printed as one line, with an optional traceback, and has an exit code.
"""

import errno
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import neobert
from neobert import cli
from neobert.common.commands import guarded
from neobert.common.errors import UserError, one_line
from neobert.common.folders import new_file
from neobert.common.loading import check_model


def run(error, monkeypatch=None, debug=None):
    """Return the exit code of a command that raises an error.

    Args:
        error: Exception that the command raises.
        monkeypatch: Fixture that sets the environment variable, required with `debug`.
        debug: Value of NEOBERT_DEBUG.
    """

    def command():
        raise error

    if debug is not None:
        monkeypatch.setenv("NEOBERT_DEBUG", debug)
    return guarded("neobert x", command)


@pytest.mark.parametrize(
    "error, message, code",
    [
        (UserError("give a file"), "give a file", 2),
        (ImportError("this needs\n  x"), "this needs x.", 2),
        (
            PermissionError(errno.EACCES, "Permission denied", "run/a.pt"),
            "run/a.pt: Permission denied.",
            2,
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "no space is left on the disk.", 2),
        (
            RuntimeError("I/O error: No space left on device (os error 28)"),
            "no space is left on the disk.",
            2,
        ),
        (KeyError("x"), "unexpected KeyError: 'x'. Set NEOBERT_DEBUG=1 to see the traceback.", 2),
        (
            type("PanicException", (BaseException,), {})("oh"),
            "unexpected PanicException: oh. Set NEOBERT_DEBUG=1 to see the traceback.",
            2,
        ),
        (KeyboardInterrupt(), "interrupted.", 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors_are_printed_as_one_line(capsys, error, message, code):
    """Check the message and the exit code of each type of exception."""
    assert run(error) == code
    assert capsys.readouterr().err == f"neobert x: {message}\n"


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("pretrain", " Run the same command again to resume."),
        ("pseudo-perplexity", " Run the same command again to resume."),
        ("serve", ""),
        ("export", ""),
    ],
)
def test_only_interrupted_runs_are_resumed(capsys, command, advice):
    """The message advises to run the command again only if it then resumes."""

    def interrupt():
        raise KeyboardInterrupt

    assert guarded(f"neobert {command}", interrupt) == 130
    assert capsys.readouterr().err == f"neobert {command}: interrupted.{advice}\n"


def test_debug_shows_the_traceback(capsys, monkeypatch):
    assert run(UserError("give a file"), monkeypatch, "1") == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback") and error.endswith("neobert x: give a file\n")

    run(UserError("give a file"), monkeypatch, "0")
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", (["distill", "--help"], ["--help"]))
def test_a_closed_pipe_is_no_error(arguments):
    """Check the exit code if the reader of stdout has exited.

    This occurs in `neobert distill --help | head -1`. The exit code is that of SIGPIPE.
    """
    code = "import sys; from neobert.cli import main; sys.exit(main(sys.argv[1:]))"
    reader, writer = os.pipe()
    os.close(reader)

    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)},
    )
    os.close(writer)

    assert (process.returncode, process.stderr) == (141, "")


def test_full_disk_error_contains_the_file(tmp_path, capsys):
    """Check that the message contains the file even if the exception does not.

    numpy's `tofile`, which writes GGUF files, raises an OSError without errno and file name.
    """

    def write():
        with new_file(tmp_path / "a.gguf"):
            raise OSError("Not enough free space to write 1024 bytes")

    assert guarded("x", write) == 2
    expected = f"x: {tmp_path}/a.gguf: no space is left on the disk.\n"
    assert capsys.readouterr().err == expected
    assert not list(tmp_path.iterdir())


def test_dir_lists_only_public_names():
    """`dir(neobert)` contains the names of `__all__` and no others."""
    assert sorted(dir(neobert)) == sorted(neobert.__all__)


def test_exit_codes_are_returned():
    """Check that `guarded` returns the exit code of the command, and does not catch SystemExit."""
    assert guarded("x", lambda: None) == 0 and guarded("x", lambda: 3) == 3
    with pytest.raises(SystemExit) as error:
        guarded("x", lambda: sys.exit(0))
    assert error.value.code == 0


def test_help_version_and_suggestions(capsys):
    """Check the help, the version, and the suggestions for misspelled commands and options."""
    for arguments in (["--help"], ["-h"], ["help"]):
        assert cli.main(arguments) == 0 and "usage: neobert" in capsys.readouterr().out
    assert cli.main([]) == 2 and "usage: neobert" in capsys.readouterr().err
    for arguments in (["--version"], ["-V"]):
        assert cli.main(arguments) == 0 and capsys.readouterr().out.startswith("neobert ")
    for name, suggestion in (("convrt", "convert"), ("--hlep", "--help"), ("encod", "encode")):
        assert cli.main([name]) == 2 and f"Did you mean {suggestion}?" in capsys.readouterr().err
    assert cli.main(["glue", ""]) == 2 and "unknown option ''" in capsys.readouterr().err


def test_missing_model_is_reported(tmp_path, monkeypatch):
    """Check that a name that is a missing directory is rejected without a request to the Hub.

    Without a network, a request would take minutes to fail.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "weights.pt").write_bytes(b"")

    for name in ("/nope", "./nope", "runs/embed", "a/b/c", "", "with spaces", "nofolder"):
        with pytest.raises(
            UserError,
            match=f"there is no {name or repr(name)}. Pass a directory, or a name on the Hub",
        ):
            check_model(name)

    with pytest.raises(UserError, match="there is no model in weights.pt"):
        check_model("weights.pt")

    (tmp_path / "runs" / "config.json").write_text("{}")
    for name in ("runs", "chandar-lab/NeoBERT", "sentence-transformers/all-MiniLM-L6-v2"):
        check_model(name)


@pytest.mark.parametrize(
    "command",
    [
        "convert nofolder out",
        "export onnx nofolder out",
        "pretrain --dataset texts.txt --init-from nofolder --output out",
        "pretrain --dataset texts.txt --tokenizer nofolder --output out",
        "pseudo-perplexity --model nofolder --text texts.txt --output out",
        "glue --task rte --model nofolder --output out",
        "contrastive --model nofolder --pairs pairs.jsonl --output out",
        'distill nofolder --texts texts.txt --model-config {"hidden_size":32} --output out',
        "encode texts.txt out.parquet --model nofolder",
        "mteb --model nofolder --tasks STSBenchmark --output out",
    ],
)
def test_commands_do_not_connect_if_the_model_is_missing(command, tmp_path, monkeypatch, capsys):
    """Check that no command opens a connection if the model is a missing directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        socket.socket, "connect", lambda *arguments: pytest.fail("the command opened a connection")
    )
    (tmp_path / "texts.txt").write_text("a river\na stone\n")
    (tmp_path / "pairs.jsonl").write_text(
        '{"anchor": "a", "positive": "b"}\n{"anchor": "c", "positive": "d"}\n'
    )

    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "there is no nofolder" in error or "no file nofolder" in error, error


@pytest.mark.parametrize(
    "command",
    [
        "pretrain --dataset rows.jsonl --column body --init-from model --tokenizer model "
        "--output out",
        "encode rows.jsonl out.parquet --model model --text-column body",
        'distill model --texts rows.jsonl --model-config {"hidden_size":32} --output out',
    ],
)
def test_missing_column_is_reported_before_loading_a_model(
    command, tmp_path, monkeypatch, capsys, tokenizer_dir
):
    """A missing column is reported first, although the directory contains no valid model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tokenizer_dir, "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "neobert", "not": "a model"}')
    (tmp_path / "rows.jsonl").write_text('{"content": "a river"}\n{"content": "a stone"}\n')
    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "no column" in error and "content" in error, error


def test_error_without_letters_contains_its_type():
    """Check that the type of the exception is added to a message without letters."""
    assert one_line(KeyError(45)) == "KeyError 45" and one_line(ValueError("")) == "ValueError"
