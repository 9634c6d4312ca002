"""Bad input is one sentence for the user: the exception that carries it, and what makes another program's message fit into it."""

import importlib.util


class UserError(ValueError):
    """Bad input: one sentence that says what was given, what is allowed, what to do. Commands print it and exit with 2."""


class Stopped(Exception):
    """A run that was asked to end and can go on later: one sentence, or none in the other processes of the run.

    Commands print it and exit with 143, as a process does that SIGTERM ends.
    """


def one_line(error, limit=200):
    """Another program's message on one line of at most `limit` characters, without its final stop, to be part of a sentence of ours."""
    return (printable(" ".join(str(error).split()))[:limit].rstrip(".")) or type(error).__name__


def printable(text):
    """`text` with control characters and other unprintable ones escaped: names in a stranger's file must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text))


def listed(names, limit=20):
    """`a, b, c and 4 more`."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(printable, names[:limit])) + more


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
