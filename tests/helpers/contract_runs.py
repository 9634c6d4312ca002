"""Commands as processes of their own, for tests/test_contract.py: forked from one that has imported
the libraries, killed at any moment, on strange file systems."""

import importlib
import multiprocessing
import os
import sys
import tempfile


LIBRARIES = ["sentence_transformers", "transformers", "datasets", "peft", "accelerate"]
_WRITES = ("open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree")


def _writes(event, arguments, folder):
    """Whether an audit event changes something below `folder`."""
    if event not in _WRITES or not arguments or not isinstance(arguments[0], (str, os.PathLike)):
        return False
    reading = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return not reading and os.fspath(arguments[0]).startswith(str(folder))


def _refuse(*arguments, **more):
    raise PermissionError(1, "Operation not permitted")


def _refuse_below(folder, function):
    """`function`, of os, which fails for paths below `folder`."""

    def refuse(path, *arguments, **more):
        if isinstance(path, int) or os.fspath(path).startswith(folder):
            _refuse()
        return function(path, *arguments, **more)

    return refuse


def _child(argv, where, log, scratch, kill_at, strange, no_model):
    tempfile.tempdir = os.environ["TMPDIR"] = scratch
    with open(log, "w", buffering=1) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    for name in LIBRARIES:  # another test of this process may have begun the server without them
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
    """Runs a command; returns (exit code, what it printed, writes below `where`).

    Args:
        argv: after `neobert`.
        where: folder whose writes are counted.
        log: file for what it prints.
        kill_at: number of the write at which it ends like a killed process.
        kill_after: seconds after which it is killed.
        strange: os.chmod, os.fchmod and os.link fail below `where`.
        no_model: no module of torch can be made.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    # A killed process leaves its temporary directories behind.
    with tempfile.TemporaryDirectory() as scratch:
        process = context.Process(
            target=_child,
            args=(argv, str(where), str(log), scratch, kill_at, strange, no_model),
        )
        process.start()
        process.join(kill_after)
        if process.is_alive():
            process.kill()
        process.join(300)
    assert process.exitcode is not None, f"{argv} did not end"
    writes = open(f"{log}.writes").read() if os.path.exists(f"{log}.writes") else "0"
    return process.exitcode, open(log).read(), int(writes)
