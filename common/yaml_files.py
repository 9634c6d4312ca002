"""The one reader of YAML: numbers as YAML 1.2 has them (1e-4 is a number), `${a.b}` references resolved, damaged files one sentence."""

import re
from pathlib import Path

import yaml

from .errors import UserError, one_line


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4, without a dot, as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+"),
    list("-+0123456789."),
)


def read_yaml(path):
    """The content of a YAML file with its references resolved.

    Args:
        path: the file.
    Returns:
        what it holds: a mapping, a list, a scalar, or None for an empty file. A reference to nothing is None.
    Raises:
        UserError: no such file, or not valid YAML.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}; give the path of a YAML file")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, OSError) as error:  # bytes that are not UTF-8 and dates that do not exist are ValueError
        raise UserError(f"{path} is not valid YAML: {one_line(error, 400)}") from error
    return resolved(data)


def read_scalar(text):
    """One value of the command line as YAML has it: a number, true, false, null, or text."""
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError):
        return text
    return value if isinstance(value, (bool, int, float)) or value is None else text


def read_mapping(text):
    """A mapping in YAML's or JSON's braces; ValueError for anything else."""
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a mapping")
    return value


def resolved(data):
    """`data` with every text that is one reference, `${section.name}`, replaced by what it names in `data`."""

    def value_of(value, depth):
        if isinstance(value, dict):
            return {key: value_of(inner, depth) for key, inner in value.items()}
        if isinstance(value, list):
            return [value_of(inner, depth) for inner in value]
        reference = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
        if reference is None:
            return value
        target = data
        for key in reference.group(1).split("."):
            target = target.get(key) if isinstance(target, dict) else None
        return value_of(target, depth - 1) if depth and not isinstance(target, (dict, list)) else None

    return value_of(data, 8)
