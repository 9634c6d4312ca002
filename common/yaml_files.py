"""The one reader of YAML: numbers and truths as YAML 1.2 has them (1e-4 is a number, no is text),
`${a.b}` references resolved, damaged files one sentence."""

import os
import re

import yaml

from .errors import UserError, one_line
from .files import read_text


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class _Twice(yaml.YAMLError):
    """A mapping has a name twice, of which YAML's readers would take the last."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4, without a dot, as text; and its constructors fail on strange values in
    many ways."""

    def construct_object(self, node, deep=False):
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            raise yaml.YAMLError(
                f"{str(node.value)[:80]!r} is not of the type {node.tag.rpartition(':')[2]}"
            ) from None

    def construct_mapping(self, node, deep=False):
        if isinstance(node, yaml.MappingNode):
            keys = [(key.tag, str(key.value)) for key, _ in node.value]
            if twice := [key for key in keys if keys.count(key) > 1 and key[1] != "<<"]:
                raise _Twice(f"{twice[0][1]!r} is there twice in one mapping")
        return super().construct_mapping(node, deep)


# As in YAML 1.2, where no, off, yes and on are text: Trainer's eval_strategy is "no", YaRN's factor
# "off".
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+"),
    list("-+0123456789."),
)


def _load(text):
    """The first document of a text, where every fault is a YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError(one_line(error)) from None


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
        return resolved(_load(text))
    except (yaml.YAMLError, RecursionError) as error:  # the second for a part that holds itself
        raise UserError(f"{path} is not valid YAML: {one_line(error, 400)}") from error


def read_scalar(text):
    """One value of the command line as YAML has it: a number, true, false, null, or text."""
    try:
        value = _load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, (bool, int, float)) or value is None else text


def read_collection(text, kind):
    """A mapping (`kind` dict) or list in YAML's or JSON's brackets; ValueError for anything else,
    UserError for a name that is there twice."""
    try:
        value = _load(text)
    except _Twice as error:
        raise UserError(f"{error}: {text}") from None
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from None
    if not isinstance(value, kind):
        raise ValueError(f"{text!r} is not a {kind.__name__}")
    return value


def resolved(data):
    """`data` with every text that is one reference, `${section.name}`, replaced by what it names in
    `data`."""

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
        return (
            value_of(target, depth - 1) if depth and not isinstance(target, (dict, list)) else None
        )

    return value_of(data, 8)
