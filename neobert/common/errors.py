"""UserError, and escaping of untrusted text: bad input is one sentence for the user."""

import importlib.util
from importlib.metadata import version

from packaging.version import Version


LONGEST = 4000


def printable(text):
    """`text` with control characters and other unprintable ones escaped: names in a stranger's file
    must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def shortened(text, limit):
    """`text` in at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class UserError(ValueError):
    """Bad input: one sentence that says what was given, what is allowed, what to do. Commands print
    it and exit with 2.

    The sentence may quote a stranger's text: this is the one place where it is escaped and cut to a
    readable length.
    """

    def __init__(self, message):
        # torch raises the error of a loader's worker again with its traceback before it.
        if str(message).startswith("Caught UserError in DataLoader worker"):
            message = str(message).rstrip().rpartition("UserError: ")[2]
        super().__init__(shortened(printable(message), LONGEST))


class Stopped(Exception):
    """A run that was asked to end and can go on later: one sentence, or none in the other processes
    of the run.

    Commands print it and exit with 143, as a process does that SIGTERM ends.
    """


def one_line(error, limit=200):
    """Another program's message on one line of at most `limit` characters, without its final stop,
    to be part of a sentence of ours."""
    text = printable(" ".join(str(error).split()))[:limit].rstrip(".")
    return text if any(c.isalpha() for c in text) else f"{type(error).__name__} {text}".strip()


def listed(names, limit=20):
    """`a, b, c and 4 more`; each name escaped and of at most 200 characters."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shortened(printable(name), 200) for name in names[:limit]) + more


# Modules that another distribution brings than one of their name.
_DISTRIBUTIONS = {"sklearn": "scikit-learn"}


def require(extra, *modules):
    """Checks that `modules` can be imported, in a version that will do.

    Args:
        extra: the extra of setup.cfg that brings them, "train" or "eval" for example.
        modules: top-level module names; as "name>=1.2" where an older version lacks what is used.
    Raises:
        ImportError: one sentence with the missing modules and the pip line that brings them.
    """
    missing = []
    for name, least in (module.partition(">=")[::2] for module in modules):
        is_there = importlib.util.find_spec(name) is not None
        if not is_there or (least and Version(version(name)) < Version(least)):
            name = _DISTRIBUTIONS.get(name, name.replace("_", "-"))
            missing.append(f"'{name}>={least}'" if least else name)
    if missing:
        raise ImportError(
            f"this needs what is not installed here: pip install {' '.join(missing)}, or pip "
            f"install -e '.[{extra}]' in a clone"
        )
