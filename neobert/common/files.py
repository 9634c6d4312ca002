"""Text, JSON and YAML files: written completely or not at all, without secrets.

YAML has numbers and truths as its version 1.2 (1e-4 is a number, no is text), and `${a.b}` stands
for what is there. Secrets are options and keys named token, key, password or secret, and the user
part of an address: by name alone.
"""

import itertools
import json
import os
import re
from pathlib import Path

import yaml

from .errors import UserError, one_line
from .folders import new_file


HIDDEN = "<hidden>"
_SECRET = re.compile(r"(^|[_-])(token|key|password|secret)$", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def check_file(path):
    """Raises UserError unless `path` is a file: a pipe or a device may never end."""
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a file" if os.path.exists(path) else f"no file {path}")


def read_text(path):
    """The content of a UTF-8 file; UserError where it cannot be read."""
    check_file(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)})") from None


def write_text(path, text):
    """Writes a file completely or not at all. Lone surrogates (file names that are not UTF-8) are
    written as escapes: "\\udce9"."""
    with new_file(path) as file:
        file.write(bytes(text, "utf-8", "backslashreplace"))


# ------------------------------------------------------------------------------------------------
# JSON


def read_json(path):
    """The content of a JSON file; UserError where it cannot be read."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({one_line(error)})") from None


def json_text(data):
    """The one form of JSON files here: indented, characters as they are."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def write_json(path, data):
    """Writes `data` as `json_text`, completely or not at all, without secrets (`redacted`)."""
    write_text(path, json_text(redacted(data)))


# ------------------------------------------------------------------------------------------------
# YAML


# An untrusted file of 400 bytes can name 10^9 values by aliases, merge keys or references.
MAX_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """YAML loader with the booleans and floats of YAML 1.2 and a limit on expanded aliases.

    YAML 1.1 reads 1e-4, without a dot, as text, and no, off, yes and on as booleans.
    """

    def compose_node(self, parent, index):
        """Compose the next node and count the values it has once its aliases are expanded."""
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias:
            return node

        # Children are composed before their parent. An alias to a parent, which the constructor
        # refuses, has no size yet.
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = itertools.chain.from_iterable(children)
        sizes = vars(self).setdefault("sizes", {})
        sizes[id(node)] = 1 + sum(sizes.get(id(child), 1) for child in children)
        _check_size(sizes[id(node)])
        return node


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
    """Return the content of a YAML file with its references resolved.

    Returns:
        A mapping, a list, a scalar, or None for an empty file. A reference to a missing key is
        None.

    Raises:
        UserError: the file does not exist, is not valid YAML, or has more than `MAX_VALUES` values.
    """
    text = read_text(path)
    try:
        data = parse_yaml(text)
        return _resolved(data, data, itertools.count(1))
    except Exception as error:  # PyYAML's own, and those of int(), of dates, of a deep file
        raise UserError(f"{path} is not valid YAML: {one_line(error, 400)}") from error


def parse_yaml(text: str):
    """Return the content of YAML text with references such as `${model.size}` left as text."""
    return yaml.load(text, _Loader)


def read_brackets(text):
    """Return a list or mapping in the brackets of YAML or JSON as what it is, and any other text,
    such as the pattern [ab]*.txt, unchanged."""
    try:
        return parse_yaml(text) if text.startswith(("[", "{")) else text
    except Exception:
        return text


def _check_size(count: int) -> None:
    if count > MAX_VALUES:
        raise UserError(
            f"aliases and references must expand to at most {MAX_VALUES:,} values, got more"
        )


def _resolved(value, data, counter):
    """Return `value` with every text that is one reference, `${section.name}`, replaced by the
    value that it names in `data`.

    Args:
        value: a part of `data`.
        data: the content of the file.
        counter: counts the values of the result.
    """
    _check_size(next(counter))
    if isinstance(value, dict):
        return {key: _resolved(part, data, counter) for key, part in value.items()}
    if isinstance(value, list):
        return [_resolved(part, data, counter) for part in value]

    reference = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
    if reference is None:
        return value
    target = data
    for key in reference[1].split("."):
        target = target.get(key) if isinstance(target, dict) else None
    return _resolved(target, data, counter)


# ------------------------------------------------------------------------------------------------
# secrets


def redacted(data):
    """`data` (of JSON types) with the text under such keys, and the users in addresses, hidden."""
    if isinstance(data, dict):
        return {
            key: HIDDEN
            if value and isinstance(value, str) and _SECRET.search(str(key))
            else redacted(value)
            for key, value in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [redacted(value) for value in data]
    return _USER.sub(HIDDEN, data) if isinstance(data, str) else data


def redacted_arguments(argv):
    """A command line with the values of such options hidden: `--hub_token X`, `--api-key=X`."""
    output, hide = [], False
    for argument in argv:
        option, equals, _ = argument.partition("=")
        is_secret = option.startswith("-") and bool(_SECRET.search(option))
        if hide and not argument.startswith("--"):
            output.append(HIDDEN)
        else:
            output.append(f"{option}={HIDDEN}" if is_secret and equals else redacted(argument))
        hide = is_secret and not equals
    return output
