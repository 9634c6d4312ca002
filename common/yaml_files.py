"""The one reader of YAML: numbers and truths as YAML 1.2 has them (1e-4 is a number, no is text), `${a.b}` references resolved, damaged files one sentence.

What a stranger's file may cost is bounded: its bytes, its depth, and the values that it has once anchors and merges are written out.
"""

import os
import re

import yaml

from .errors import UserError, one_line, shortened
from .files import read_text


_BYTES = 300_000
_DEPTH = 50
_VALUES = 100_000
_NUMBER_LENGTH = 400
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4, without a dot, as text; and its constructors fail on strange values in many ways."""

    def compose_node(self, parent, index):
        self.depth = getattr(self, "depth", 0) + 1
        if self.depth > _DEPTH:
            raise yaml.YAMLError(f"it is nested more than {_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def get_single_node(self):
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node

    def construct_object(self, node, deep=False):
        if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":str") and len(node.value) > _NUMBER_LENGTH:
            raise yaml.YAMLError(f"a value of {len(node.value)} characters that is not text")
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            raise yaml.YAMLError(f"{shortened(str(node.value), 80)!r} is not of the type {node.tag.rpartition(':')[2]}") from None


def _count_values(node, counts):
    """How many values a node has with its aliases written out.

    Raises:
        yaml.YAMLError: too many, or a node that holds itself.
    """
    if id(node) in counts:
        if counts[id(node)] is None:
            raise yaml.YAMLError("a part of it holds itself")
        return counts[id(node)]
    counts[id(node)] = None
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
    count = 1 + sum(_count_values(part, counts) for part in parts)
    if count > _VALUES:
        raise yaml.YAMLError(f"it has more than {_VALUES:,} values")
    counts[id(node)] = count
    return count


# As in YAML 1.2, where no, off, yes and on are text: Trainer's eval_strategy is "no", YaRN's factor "off".
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
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
        what it holds: a mapping, a list, a scalar, or None for an empty file. A reference to nothing is None.
    Raises:
        UserError: no such file, not valid YAML, or too large.
    """
    if not os.path.exists(path):
        raise UserError(f"there is no file {path}; give the path of a YAML file")
    text = read_text(path, _BYTES)
    try:
        return resolved(_load(text))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {one_line(error, 400)}") from error


def read_scalar(text):
    """One value of the command line as YAML has it: a number, true, false, null, or text."""
    try:
        value = _load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, (bool, int, float)) or value is None else text


def read_collection(text, kind):
    """A mapping (`kind` dict) or list in YAML's or JSON's brackets; ValueError for anything else."""
    try:
        value = _load(text)
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from None
    if not isinstance(value, kind):
        raise ValueError(f"{text!r} is not a {kind.__name__}")
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
