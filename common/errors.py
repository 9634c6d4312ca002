"""Bad input is one sentence for the user: the exception that carries it, what makes strangers' text fit into it, and the guard of all commands."""

import contextlib
import errno
import importlib.util
import os
import sys
import traceback


_LONGEST = 4000


def printable(text):
    """`text` with control characters and other unprintable ones escaped: names in a stranger's file must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def shortened(text, limit):
    """`text` in at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class UserError(ValueError):
    """Bad input: one sentence that says what was given, what is allowed, what to do. Commands print it and exit with 2.

    The sentence may quote a stranger's text: this is the one place where it is escaped and cut to a readable length.
    """

    def __init__(self, message):
        super().__init__(shortened(printable(message), _LONGEST))


class Stopped(Exception):
    """A run that was asked to end and can go on later: one sentence, or none in the other processes of the run.

    Commands print it and exit with 143, as a process does that SIGTERM ends.
    """


def one_line(error, limit=200):
    """Another program's message on one line of at most `limit` characters, without its final stop, to be part of a sentence of ours."""
    return (printable(" ".join(str(error).split()))[:limit].rstrip(".")) or type(error).__name__


def listed(names, limit=20):
    """`a, b, c and 4 more`; each name escaped and of at most 200 characters."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shortened(printable(name), 200) for name in names[:limit]) + more


def require(extra, *modules):
    """Checks that `modules` can be imported.

    Args:
        extra: the extra of setup.cfg that brings them, "train" or "eval" for example.
        modules: top-level module names.
    Raises:
        ImportError: one sentence with the missing modules and the pip line that brings them, for a clone of the repository.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"this needs {', '.join(missing)}, not installed here: pip install -e '.[{extra}]' in the repository's folder")


# ----------------------------------------------------------------------------------------------------- the guard of all commands


def _in_words(error):
    """The sentence about an exception that ended a command."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; run the same command again to continue"
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, OSError) and error.errno is not None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "no space is left on the disk" if full else error.strerror or one_line(error)
        return reason if error.filename is None else f"{error.filename}: {reason}"
    if isinstance(error, ImportError):
        return one_line(error, _LONGEST)
    return f"unexpected {type(error).__name__}: {one_line(error)}; NEOBERT_DEBUG=1 shows where"


def _flush_output():
    """What was printed goes out; what cannot (a closed pipe, a full disk) is not tried again when the interpreter ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def guarded(name, run):
    """Runs a command and returns its exit code; whatever goes wrong becomes one sentence. NEOBERT_DEBUG=1 shows the traceback as well.

    Args:
        name: the command as messages name it.
        run: function without arguments; returns an exit code, or None for 0.
    Returns:
        what `run` returns; 2 after an error, 130 after an interrupt, 143 after SIGTERM.
    """
    for stream in (sys.stdout, sys.stderr):
        # A file's name may hold characters that the terminal's encoding lacks.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = run() or 0
        _flush_output()
        return code
    except SystemExit:
        raise
    except Stopped as stopped:
        if str(stopped):
            print(f"{name}: {printable(stopped)}", file=sys.stderr)
        return 143
    except BaseException as error:  # a panic of Rust code is no Exception
        with contextlib.suppress(OSError):
            _flush_output()
        if os.environ.get("NEOBERT_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        print(f"{name}: {shortened(printable(_in_words(error)), _LONGEST)}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 2
