"""Optional dependencies: which extra of setup.cfg brings which package, said in the error when one is missing."""

import importlib.util


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
