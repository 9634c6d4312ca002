"""What every command does around its work: whatever goes wrong becomes one sentence and an exit
code."""

import logging
import os
import re
import select
import sys
import traceback

from .errors import LONGEST, Stopped, UserError, one_line, printable, shortened


# Messages of a full disk: of the system, of Rust code, of torch.save and of numpy's tofile.
_DISK_FULL = (
    "No space left on device|Disk quota exceeded|os error (28|122)|\\d requested and \\d+ written|"
    "PytorchStreamWriter failed writing|unexpected pos \\d+ vs \\d+|iostream error|"
    "Not enough free space to write"
)


def _in_words(error):
    """The sentence about an exception that ended a command."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; run the same command again to continue"
    text = " ".join(map(str, error.args))  # str() of an OSError with a file name leaves them out
    full, name = re.search(_DISK_FULL, text), getattr(error, "filename", None)
    if full or (isinstance(error, OSError) and error.errno is not None):
        reason = "no space is left on the disk" if full else error.strerror or one_line(error)
        return reason if name is None else f"{name}: {reason}"
    if isinstance(error, ImportError):
        return one_line(error, LONGEST)
    return f"unexpected {type(error).__name__}: {one_line(error)}; NEOBERT_DEBUG=1 shows where"


def setup_logging() -> None:
    """Write the messages of the logger "neobert" to stderr, from level INFO on.

    Only the main process of a distributed run logs progress; the others log errors. Handlers that
    the application has installed on the root logger are kept.
    """
    logging.basicConfig(format="%(message)s")
    is_main = os.environ.get("RANK", "0") == "0"
    logging.getLogger("neobert").setLevel(logging.INFO if is_main else logging.ERROR)


def _stdout_is_closed() -> bool:
    """Return whether the reader of stdout is gone, as in `neobert --help | head -1`.

    What is left to print is then discarded, so that the interpreter does not fail on it at its end.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def guarded(name, run):
    """Runs a command and returns its exit code; whatever goes wrong becomes one sentence.
    NEOBERT_DEBUG=1 shows the traceback as well.

    Args:
        name: the command as messages name it.
        run: function without arguments; returns an exit code, or None for 0.
    Returns:
        What `run` returns; 2 after an error, 130 after an interrupt, 141 if stdout is closed, 143
        after SIGTERM.
    """
    setup_logging()
    try:
        code = run() or 0
        sys.stdout.flush()  # a closed pipe is noticed here and not when the interpreter ends
        return code
    except BrokenPipeError as error:
        if _stdout_is_closed():
            return 141  # as of a process that SIGPIPE ends
        print(f"{name}: {_in_words(error)}", file=sys.stderr)
        return 2
    except SystemExit:
        raise
    except Stopped as stopped:
        if str(stopped):
            print(f"{name}: {printable(stopped)}", file=sys.stderr)
        return 143
    except BaseException as error:  # a panic of Rust code is not an Exception
        if os.environ.get("NEOBERT_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        print(f"{name}: {shortened(printable(_in_words(error)), LONGEST)}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 2
