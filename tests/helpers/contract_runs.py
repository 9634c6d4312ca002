"""Run `neobert` commands in processes of their own, for tests/test_contract.py.

Each command is forked from a server that has imported the libraries, so it starts quickly. A
command can be killed at any write to a directory, and can run with failing file system calls.
"""

import importlib
import multiprocessing
import os
import sys
import tempfile


LIBRARIES = ["sentence_transformers", "transformers", "datasets", "peft", "accelerate"]
# Audit events of calls that change the file system. `open` changes it in some modes only.
_WRITES = ("open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree")


def _writes(event, arguments, folder):
    """Return whether an audit event changes a file or directory below `folder`."""
    if event not in _WRITES or not arguments or not isinstance(arguments[0], (str, os.PathLike)):
        return False
    reading = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return not reading and os.fspath(arguments[0]).startswith(str(folder))


def _refuse(*arguments, **kwargs):
    """Raise the error of an operation that the file system does not permit."""
    raise PermissionError(1, "Operation not permitted")


def _refuse_below(folder, function):
    """Return a version of a function of `os` that fails for paths below `folder`."""

    def refuse(path, *arguments, **kwargs):
        if isinstance(path, int) or os.fspath(path).startswith(folder):
            _refuse()
        return function(path, *arguments, **kwargs)

    return refuse


def _child(argv, where, log, scratch, kill_at, strange, no_model):
    """Run the command in the forked process, and write its output to the file `log`."""
    tempfile.tempdir = os.environ["TMPDIR"] = scratch

    with open(log, "w", buffering=1) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)

    # Another test may have started the server without the libraries.
    for name in LIBRARIES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)

    if strange:
        for name in ("chmod", "fchmod", "link"):
            setattr(os, name, _refuse_below(where, getattr(os, name)))
    if no_model:
        torch.nn.Module.__init__ = _refuse

    count = 0

    def watch(event, arguments):
        nonlocal count
        if _writes(event, arguments, where):
            count += 1
            if count == kill_at:
                os._exit(9)

    sys.addaudithook(watch)

    from neobert.cli import main

    try:
        code = main([str(argument) for argument in argv])
    except SystemExit as error:
        code = error.code

    sys.stdout.flush()
    sys.stderr.flush()
    with open(f"{log}.writes", "w") as file:
        file.write(str(count))
    os._exit(code or 0)


def command(argv, where, log, kill_at=None, kill_after=None, strange=False, no_model=False):
    """Run a command and return its exit code, its output, and its number of writes below `where`.

    Args:
        argv: Arguments after `neobert`.
        where: Directory whose writes are counted.
        log: File for the output of the command.
        kill_at: Number of the write at which the process ends as if it was killed. None for never.
        kill_after: Number of seconds after which the process is killed. None for never.
        strange: Whether os.chmod, os.fchmod and os.link fail below `where`, as on file systems
            without permissions and links.
        no_model: Whether creating any torch module fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)

    # A killed process does not remove its temporary directories.
    with tempfile.TemporaryDirectory() as scratch:
        process = context.Process(
            target=_child,
            args=(argv, str(where), str(log), scratch, kill_at, strange, no_model),
        )
        process.start()
        process.join(300 if kill_after is None else kill_after)
        has_ended = not process.is_alive()
        if not has_ended:
            process.kill()
            process.join()

    assert has_ended or kill_after is not None, f"The command {argv} did not end in 300 seconds."
    writes = open(f"{log}.writes").read() if os.path.exists(f"{log}.writes") else "0"
    return process.exitcode, open(log).read(), int(writes)
