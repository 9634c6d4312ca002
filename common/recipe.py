"""To be replaced by `arguments.py`: a recipe is one YAML file read into dataclasses; `--key value` on the command line overrides it; an unknown key is an error."""

import argparse
import dataclasses
import difflib
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from .errors import UserError, one_line


def refuse_options(arguments, reasons, defaults=None):
    """Raises UserError for an option of another library's dataclass that does not apply here but was set.

    Args:
        arguments: the dataclass instance.
        reasons: {option: what to do instead}; names that this version of the library does not have are passed over.
        defaults: the dataclass whose defaults mean "not set"; by default that of `arguments`.
    """
    for option in dataclasses.fields(defaults or arguments):
        if option.name not in reasons:
            continue
        default = option.default_factory() if option.default is dataclasses.MISSING else option.default
        value = getattr(arguments, option.name)
        if getattr(value, "value", value) != getattr(default, "value", default):
            raise UserError(f"{option.name} does not apply here, but {value!r} was given; {reasons[option.name]}")


class _Parser(HfArgumentParser):
    def error(self, message):
        raise UserError(message)


def read_recipe(dataclass_types, argv, prog=None):
    """Reads a recipe.

    Args:
        dataclass_types: the dataclasses to fill; every key belongs to exactly one of them.
        argv: paths of YAML files (later ones win), then `--key value` overrides.
        prog: program name in the help text.
    Returns:
        tuple with one instance of each dataclass.
    Raises:
        UserError: a file that is missing or not a mapping, an unknown key, a value of the wrong type.
    """
    parser = _Parser(dataclass_types, prog=prog, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    argv = list(argv)
    values = {}
    while argv and not argv[0].startswith("-"):
        values.update(_read_yaml(argv.pop(0)))
    known = {field.name: field for type_ in dataclass_types for field in dataclasses.fields(type_) if field.init}
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"unknown key {key!r} in the recipe{hint}")
    # YAML values become defaults, so that required fields may come from the file and the command line still wins.
    for action in parser._actions:
        if action.dest in values:
            action.required = False
            values[action.dest] = _typed(action, values[action.dest])
    parser.set_defaults(**values)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        close = difflib.get_close_matches(unknown[0].lstrip("-").replace("-", "_"), known, n=1)
        hint = f"; did you mean --{close[0]}?" if close else ""
        raise UserError(f"unknown argument {unknown[0]!r}{hint}")
    given = vars(namespace)
    try:
        return tuple(
            type_(**{field.name: given[field.name] for field in dataclasses.fields(type_) if field.init and field.name in given})
            for type_ in dataclass_types
        )
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error


def _read_yaml(path):
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no recipe {path}; give the path of a YAML file")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:  # bytes that are no UTF-8 and dates that do not exist are ValueError
        raise UserError(f"{path} is not valid YAML: {one_line(error, 400)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold 'key: value' lines, but holds a {type(values).__name__}")
    # YAML 1.1 reads 1e-4 (no dot) as text.
    return {key: _number(value) if isinstance(value, str) else value for key, value in values.items()}


def _typed(action, value):
    """A YAML value checked and converted as the command line's would be."""
    if isinstance(value, list):
        return [_typed(action, item) for item in value]
    if value is None or isinstance(value, dict) or action.type is None:
        return value
    try:
        if action.type is int and not isinstance(value, str):
            converted = int(value)
            if isinstance(value, bool) or converted != value:
                raise ValueError
        else:
            converted = action.type(value if isinstance(value, bool) else str(value))
    except (TypeError, ValueError, OverflowError, argparse.ArgumentTypeError) as error:
        kind = getattr(action.type, "__name__", "value")
        raise UserError(f"{action.dest} in the recipe must be of type {kind}, but {value!r} was given") from error
    if action.choices and converted not in action.choices:
        raise UserError(f"{action.dest} in the recipe must be one of {', '.join(map(str, action.choices))}, but {value!r} was given")
    return converted


def _number(text):
    try:
        return float(text) if "e" in text.lower() and text.lower() not in ("inf", "nan") else text
    except ValueError:
        return text
