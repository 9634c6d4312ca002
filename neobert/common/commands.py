"""Frame of every command: logging, exit codes, and errors as one sentence."""

import logging
import os
import re
import select
import sys
import traceback
from collections.abc import Callable

from .errors import LONGEST, Stopped, UserError, one_line, printable, shortened


# Messages of a full disk: from the system, from Rust code, from torch.save and numpy's tofile.
_DISK_FULL = (
    "No space left on device|Disk quota exceeded|os error (28|122)|\\d requested and \\d+ written|"
    "PytorchStreamWriter failed writing|unexpected pos \\d+ vs \\d+|iostream error|"
    "Not enough free space to write"
)

# Commands that resume an interrupted run.
_RESUMABLE = {
    f"neobert {command}"
    for command in (
        "contrastive",
        "distill",
        "encode",
        "finetune",
        "glue",
        "mteb",
        "predict",
        "pretrain",
        "pseudo-perplexity",
    )
}


def guarded(name: str, run: Callable[[], int | None]) -> int:
    """Run a command and return its exit code. An error is printed as one sentence.

    With NEOBERT_DEBUG=1 the traceback is printed as well.

    Args:
        name: Name of the command in messages.
        run: Function that returns the exit code, or None for 0.

    Returns:
        The exit code of `run`; 2 after an error, 130 after an interrupt, 141 if stdout is closed,
        143 after SIGTERM.
    """
    setup_logging()

    try:
        code = run() or 0
        # A closed pipe is noticed here, and not when the interpreter exits.
        sys.stdout.flush()
        return code
    except BrokenPipeError as error:
        if _stdout_is_closed():
            # The exit code of a process that SIGPIPE ends.
            return 141
        print(f"{name}: {_message(error)}", file=sys.stderr)
        return 2
    # The application has chosen the exit code itself.
    except SystemExit:
        raise
    except Stopped as stopped:
        # Only the main process of a distributed run has a message.
        if str(stopped):
            print(f"{name}: {printable(stopped)}", file=sys.stderr)
        return 143
    # A panic of Rust code is not an Exception.
    except BaseException as error:
        if os.environ.get("NEOBERT_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        is_interrupt = isinstance(error, KeyboardInterrupt)
        message = _message(error)
        if is_interrupt and name in _RESUMABLE:
            message += " Run the same command again to resume."
        print(f"{name}: {shortened(printable(message), LONGEST)}", file=sys.stderr)
        return 130 if is_interrupt else 2


def setup_logging() -> None:
    """Write the messages of the logger "neobert" to stderr, from level INFO on.

    Only the main process of a distributed run logs progress; the others log errors. Handlers that
    the application has installed on the root logger are kept.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logging.basicConfig(handlers=[handler])
    is_main = os.environ.get("RANK", "0") == "0"
    logging.getLogger("neobert").setLevel(logging.INFO if is_main else logging.ERROR)


class _Formatter(logging.Formatter):
    """Formatter of messages without a prefix, and of warnings and errors with their level."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        is_warning = record.levelno >= logging.WARNING
        return f"{record.levelname.lower()}: {text}" if is_warning else text


def _message(error: BaseException) -> str:
    """Return the sentence about an exception that ended a command."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted."

    # str() of an OSError with a file name leaves out the other arguments.
    text = " ".join(map(str, error.args))
    disk_is_full = re.search(_DISK_FULL, text) is not None
    if disk_is_full or (isinstance(error, OSError) and error.errno is not None):
        if disk_is_full:
            reason = "no space is left on the disk"
        else:
            reason = getattr(error, "strerror", None) or one_line(error)
        path = getattr(error, "filename", None)
        return f"{reason}." if path is None else f"{path}: {reason}."

    # `require` writes complete sentences with the command to run, so no advice follows.
    if isinstance(error, ImportError):
        return f"{one_line(error, LONGEST)}."
    return (
        f"unexpected {type(error).__name__}: {one_line(error)}. Set NEOBERT_DEBUG=1 to see the "
        "traceback."
    )


def _stdout_is_closed() -> bool:
    """Return whether the reader of stdout has exited, as in `neobert --help | head -1`.

    Further output is then discarded, so the interpreter does not fail when it exits.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    # Without a requested event, poll still reports POLLERR, which a pipe without a reader has.
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
