"""Text, JSON and YAML files, written atomically and without secrets.

YAML files have the floats and booleans of YAML 1.2 (1e-4 is a number, `no` is text), and `${a.b}`
is replaced by the value of the key b in a. Secrets are the values of options and keys whose name
ends with token, key, password or secret, and the user in a URL.
"""

import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from .errors import UserError, one_line
from .folders import new_file


HIDDEN = "<hidden>"
# Names of options and keys that hold secrets: `hub_token`, `api-key`, but not `tokenizer`.
_SECRET = re.compile(r"(^|[_-])(token|key|password|secret)$", re.IGNORECASE)
# User and password in https://user:password@host.
_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def check_file(path: str | Path) -> None:
    """Check that a path is a regular file. A pipe or a device may never end.

    Raises:
        UserError: If the path is not a file.
    """
    if os.path.isfile(path):
        return
    if os.path.exists(path):
        raise UserError(f"{path} is not a file.")
    raise UserError(f"there is no file {path}.")


def read_text(path: str | Path) -> str:
    """Return the content of a UTF-8 file.

    Raises:
        UserError: If the file does not exist or cannot be read.
    """
    check_file(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}).") from None


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically.

    Lone surrogates, which occur in file names that are not UTF-8, are written as escapes.
    """
    with new_file(path) as file:
        file.write(bytes(text, "utf-8", "backslashreplace"))


# ------------------------------------------------------------------------------------------------
# JSON


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        UserError: If the file does not exist, cannot be read, or is not valid JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({one_line(error)}).") from None


def difference_from_type(content: Any, content_type: Any) -> str | None:
    """Return how the content of a JSON file differs from a type, or None if it does not.

    Args:
        content: Content of the file.
        content_type: Type hint, such as a `TypedDict`. Other keys of the content are allowed.
    """
    try:
        msgspec.convert(content, content_type)
    except msgspec.ValidationError as error:
        return one_line(error)
    return None


def json_text(data: Any) -> str:
    """Return data as the text of a JSON file, indented and without escapes of letters."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def write_json(path: str | Path, data: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json_text(data))


def write_record(path: str | Path, data: Any) -> None:
    """Write a record of a run as a JSON file, atomically and without secrets (see `redacted`)."""
    write_json(path, redacted(data))


# ------------------------------------------------------------------------------------------------
# YAML


# An untrusted file of 400 bytes can name 10^9 values by aliases, merge keys or references.
MAX_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """YAML loader with the booleans and floats of YAML 1.2 and a limit on expanded aliases.

    YAML 1.1 reads 1e-4, without a dot, as text, and no, off, yes and on as booleans.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        # Number of values of every node that has been composed, {id of the node: number}.
        self.sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node and count the values it has once its aliases are expanded."""
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias or node is None:
            return node

        # Children are composed before their parent. An alias to a parent, which the constructor
        # refuses, has no size yet.
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = itertools.chain.from_iterable(children)
        size = 1 + sum(self.sizes.get(id(child), 1) for child in children)
        _check_size(size)
        self.sizes[id(node)] = size
        return node


# The resolvers decide the type of a scalar by a pattern, and are indexed by its first character.
# The copy leaves those of SafeLoader unchanged.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


class _UniqueKeyLoader(_Loader):
    """YAML loader that rejects a key that occurs twice in a mapping. PyYAML uses the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, and check its keys before merge keys (<<) are expanded.

        Raises:
            UserError: If a key occurs twice.
        """
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in keys:
                raise UserError(
                    f"every key of a mapping must be unique, got {key.value!r} again in line "
                    f"{key.start_mark.line + 1}"
                )
            keys.add(key.value)
        return node


def read_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file with its references resolved.

    Returns:
        A mapping, a list, a scalar, or None for an empty file. A reference to a missing key is
        None.

    Raises:
        UserError: If the file does not exist, is not valid YAML, has a key twice in a mapping, or
            has more than `MAX_VALUES` values.
    """
    text = read_text(path)
    try:
        data = yaml.load(text, _UniqueKeyLoader)
        return _resolved(data, data, itertools.count(1))
    # Besides the errors of PyYAML there are those of int(), of dates, and of deep recursion.
    except Exception as error:
        raise UserError(f"{path} is not valid YAML: {one_line(error, 400)}.") from error


def parse_yaml(text: str) -> Any:
    """Return the content of YAML text with references such as `${model.size}` left as text."""
    return yaml.load(text, _Loader)


def read_brackets(text: str) -> Any:
    """Return the list or mapping in text such as "[a, b]" or "{a: 1}".

    Other text, such as the pattern [ab]*.txt, is returned unchanged.
    """
    try:
        return parse_yaml(text) if text.startswith(("[", "{")) else text
    except Exception:
        return text


def _check_size(count: int) -> None:
    if count > MAX_VALUES:
        raise UserError(
            f"aliases and references must expand to at most {MAX_VALUES:,} values, got more."
        )


def _resolved(value: Any, data: Any, counter: Iterator[int]) -> Any:
    """Return a value with its references, `${section.name}`, replaced by the values they name.

    Args:
        value: Part of `data`.
        data: Content of the file.
        counter: Counter of the values of the result.
    """
    _check_size(next(counter))
    if isinstance(value, dict):
        return {key: _resolved(part, data, counter) for key, part in value.items()}
    if isinstance(value, list):
        return [_resolved(part, data, counter) for part in value]

    # A value that is a single reference, ${a.b}, takes over the type of its target.
    reference = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
    if reference is None:
        return value
    target = data
    for key in reference[1].split("."):
        target = target.get(key) if isinstance(target, dict) else None
    # The target may contain references itself. A cycle ends in a RecursionError, which `read_yaml`
    # reports.
    return _resolved(target, data, counter)


# ------------------------------------------------------------------------------------------------
# secrets


def redacted(data: Any) -> Any:
    """Return JSON data with secrets and the users in URLs replaced by HIDDEN."""
    if isinstance(data, dict):
        return {key: _redacted_value(key, value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [redacted(value) for value in data]
    return _USER.sub(HIDDEN, data) if isinstance(data, str) else data


def _redacted_value(key: object, value: Any) -> Any:
    is_secret = bool(value) and isinstance(value, str) and _SECRET.search(str(key))
    return HIDDEN if is_secret else redacted(value)


def redacted_arguments(argv: Sequence[str]) -> list[str]:
    """Return a command line with secrets replaced by HIDDEN: `--hub_token X`, `--api-key=X`."""
    output = []
    hide_next = False
    for argument in argv:
        # A secret may be in the same word, --token=X, or in the next one, --token X.
        option, equals, _ = argument.partition("=")
        is_secret = option.startswith("-") and bool(_SECRET.search(option))
        # The next word is another option if the value is missing, as in --token --output x.
        if hide_next and not argument.startswith("--"):
            output.append(HIDDEN)
        elif is_secret and equals:
            output.append(f"{option}={HIDDEN}")
        else:
            output.append(redacted(argument))
        hide_next = is_secret and not equals
    return output
