"""The one reader of YAML: numbers and truths as YAML 1.2 has them (1e-4 is a number, no is text),
`${a.b}` references resolved, damaged files one sentence."""

import os
import re

import yaml

from .errors import UserError, one_line
from .files import read_text


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# What PyYAML raises for a file that is not valid, beside its own error, and for strange values.
_FAULTS = (
    yaml.YAMLError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    OverflowError,
    RecursionError,
)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4, without a dot, as text, and no, off, yes and on as truths."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
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
        what it holds: a mapping, a list, a scalar, or None for an empty file. A reference to
        nothing is None.
    Raises:
        UserError: no such file, not valid YAML, or too large.
    """
    if not os.path.exists(path):
        raise UserError(f"there is no file {path}; give the path of a YAML file")
    text = read_text(path)
    try:
        data = yaml.load(text, _Loader)
        return _resolved(data, data, {})
    except _FAULTS as error:
        raise UserError(f"{path} is not valid YAML: {one_line(error, 400)}") from error


def read_brackets(text):
    """A list or mapping in YAML's or JSON's brackets as what it is, any other text unchanged: a
    pattern such as [ab]*.txt."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return yaml.load(text, _Loader)
    except _FAULTS:
        return text


def _resolved(value, data, known, depth=8):
    """`value` with every text that is one reference, `${section.name}`, replaced by what it names
    in `data`; what several aliases name is one object, as in the file.

    Args:
        known: {id of a part of `data`: what it became}.
    """
    if isinstance(value, (dict, list)):
        if id(value) not in known:
            known[id(value)] = value  # for what holds itself
            if isinstance(value, dict):
                made = {key: _resolved(part, data, known, depth) for key, part in value.items()}
            else:
                made = [_resolved(part, data, known, depth) for part in value]
            known[id(value)] = made
        return known[id(value)]
    reference = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
    if reference is None:
        return value
    target = data
    for key in reference[1].split("."):
        target = target.get(key) if isinstance(target, dict) else None
    if not depth or isinstance(target, (dict, list)):
        return None
    return _resolved(target, data, known, depth - 1)
