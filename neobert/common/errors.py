"""Errors that are shown to the user as one sentence, and escaping of untrusted text."""

import importlib.util
from collections.abc import Iterable
from importlib.metadata import version

from packaging.version import Version


# Maximum length of a message in characters.
LONGEST = 4000


def printable(text: object) -> str:
    """Return text with control characters and other unprintable characters escaped.

    Names in an untrusted file must not control the terminal.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def shortened(text: str, limit: int) -> str:
    """Return text of at most `limit` characters, with an ellipsis if the text was longer."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class UserError(ValueError):
    """Invalid input. Commands print the message and exit with code 2.

    The message states the rule, the value that was given, and the remedy. The message may quote
    untrusted text: it is escaped and shortened here.
    """

    def __init__(self, message: object) -> None:
        text = str(message)
        # torch raises the error of a DataLoader worker again, preceded by the worker's traceback.
        if text.startswith("Caught UserError in DataLoader worker"):
            text = text.rstrip().rpartition("UserError: ")[2]
        super().__init__(shortened(printable(text), LONGEST))


class Stopped(Exception):
    """A run was stopped and can be resumed. Commands print the message and exit with code 143.

    The exit code is that of a process which SIGTERM ends. The message is empty in all processes of
    a distributed run but the main process.
    """


def one_line(error: object, limit: int = 200) -> str:
    """Return the message of another library on one line, as a part of a sentence.

    Args:
        error: Exception or message.
        limit: Maximum number of characters.
    """
    # Messages of several lines, such as tracebacks, are joined.
    text = printable(" ".join(str(error).split()))[:limit].rstrip(".")
    if any(c.isalpha() for c in text):
        return text
    # The message of KeyError(45) is "45".
    return f"{type(error).__name__} {text}".strip()


def listed(names: Iterable[object], limit: int = 20) -> str:
    """Return names as "a, b, c and 4 more". Each name is escaped and shortened."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shortened(printable(name), 200) for name in names[:limit]) + more


# Modules whose distribution has another name.
_DISTRIBUTIONS = {"sklearn": "scikit-learn"}


def require(extra: str, *modules: str) -> None:
    """Check that modules are installed.

    Args:
        extra: Extra of setup.cfg that installs the modules, such as "train" or "eval".
        modules: Names of top-level modules, with the minimum version if there is one:
            "sentence_transformers>=6".

    Raises:
        ImportError: If a module is missing or too old. The message contains the command that
            installs all of them.
    """
    # find_spec does not import the module, which may take seconds.
    missing = []
    for module in modules:
        name, _, min_version = module.partition(">=")
        is_installed = importlib.util.find_spec(name) is not None
        if is_installed and (not min_version or Version(version(name)) >= Version(min_version)):
            continue
        # Packages may be imported by another name than that of their distribution.
        distribution = _DISTRIBUTIONS.get(name, name.replace("_", "-"))
        missing.append(f"'{distribution}>={min_version}'" if min_version else distribution)

    if missing:
        raise ImportError(
            f"a required package is not installed. Run `pip install {' '.join(missing)}`, or `pip "
            f"install -e '.[{extra}]'` in a clone."
        )
