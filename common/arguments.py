"""Options of the commands: dataclasses filled from YAML recipes and the command line, with the
allowed range of each in its field.

A recipe is a YAML file of `name: value` lines. What the command line gives wins. Options of
transformers' Trainer go through as they are: under `trainer:` in a recipe, by their names on the
command line. argparse takes the command line apart, msgspec brings values into their types.
"""

import argparse
import dataclasses
import difflib
import inspect
import itertools
import math
import operator
import re
import types
import typing
from dataclasses import MISSING, dataclass, field
from pathlib import Path

import msgspec

from .constants import ROOT
from .errors import UserError, listed
from .yaml_files import read_brackets, read_yaml


# What an option's range is called, and when a value is in it.
_BOUNDS = {
    "least": ("at least", operator.ge),
    "most": ("at most", operator.le),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
    "choices": ("one of", lambda value, choices: value in choices),
}
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping",
}


def option(
    default=MISSING, help="", *, default_factory=MISSING, positional=False, free=False, **bounds
):
    """A dataclass field with its help and its range.

    Args:
        default, default_factory: as of `dataclasses.field`.
        positional: given without a name, before all options.
        free: a run that is continued may change it: it touches no number of the result.
        bounds: `least`, `most` (inclusive), `above`, `below` (exclusive), `choices`; of each item
            where the value is a list.
    """
    assert bounds.keys() <= _BOUNDS.keys(), f"option() has no {bounds.keys() - _BOUNDS.keys()}"
    metadata = {"help": help, "positional": positional, "free": free, "bounds": bounds}
    return field(default=default, default_factory=default_factory, metadata=metadata)


@dataclass
class Arguments:
    """Base of the options of every command: the ranges in the fields are checked when an object is
    made."""

    def __post_init__(self):
        check_ranges(self)


def check_ranges(arguments, where=""):
    """Raises UserError for the first field whose value is not finite or outside of the range in the
    field's metadata. None passes.

    Args:
        arguments: object of a dataclass.
        where: follows the field's name in the message.
    """
    bounds = {f.name: f.metadata.get("bounds", {}) for f in dataclasses.fields(arguments)}
    check_values(vars(arguments), bounds, where)


def check_values(values, bounds, where=""):
    """Raises UserError for the first of `values` that is not finite or outside of its `bounds`,
    {name: {bound: limit}}."""
    for name, value in values.items():
        for item in (item for item in _items(value) if item is not None):
            problem = [
                _limit(bound, limit)
                for bound, limit in bounds.get(name, {}).items()
                if not _BOUNDS[bound][1](item, limit)
            ]
            if isinstance(item, float) and not math.isfinite(item):
                problem = ["a finite number"]
            if problem:
                raise UserError(
                    f"{name.rstrip('_')}{where} must be {problem[0]}, but {item!r} was given"
                )


def _items(value):
    return value if isinstance(value, (list, tuple)) else [value]


def _limit(bound, limit):
    """`at least 1`, `one of a, b`."""
    limit = ", ".join(map(str, limit)) if bound == "choices" else limit
    return f"{_BOUNDS[bound][0]} {limit}"


def _kinds(hint):
    """The types that a hint allows: {list: list[str], NoneType: NoneType} of `list[str] | None`."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return {
        typing.get_origin(kind) or kind: kind
        for kind in (typing.get_args(hint) if union else [hint])
    }


def _words(hint):
    """The type hint for a message."""
    words = []
    for kind, complete in _kinds(hint).items():
        inner = typing.get_args(complete)[-1:] if kind in (list, dict) else ()
        each = f", each {_words(*inner)}" if inner and inner != (typing.Any,) else ""
        if kind is not types.NoneType:
            words.append(_WORDS.get(kind, "text") + each)
    return " or ".join(words)


def typed(section, hints, where, otherwise="--help lists the options"):
    """The values of a recipe's section or of the command line in the types of their options.

    Args:
        section: {option: value}.
        hints: {option: type hint}.
        where: follows an option's name in a message.
        otherwise: what a message about an unknown key ends with where none is like it.
    Raises:
        UserError: an unknown key, or a value of a wrong type.
    """
    values = {}
    for name, value in section.items():
        if name not in hints:
            raise UserError(
                f"unknown key {name!r} {where}{nearest(name, hints, otherwise=otherwise)}"
            )
        kinds = _kinds(hints[name]).keys()
        if types.NoneType in kinds and value in ("null", "None"):
            value = None
        if kinds - {types.NoneType} == {list} and isinstance(value, (str, int, float)):
            value = [value]
        if kinds - {types.NoneType} == {str} and type(value) in (int, float):
            value = str(value)  # subset: 20231101
        try:
            values[name] = msgspec.convert(value, hints[name], strict=False)
        except msgspec.ValidationError:
            words = _words(hints[name])
            raise UserError(
                f"{name.rstrip('_')} {where} must be {words}, but {value!r} was given"
            ) from None
        except TypeError:  # some hints of Trainer's are not among those that msgspec has
            values[name] = value
    return values


def nearest(name, names, dashes="", otherwise="--help lists the options"):
    """The end of a message about an unknown name: `; did you mean ...?`, or `otherwise` where none
    of `names` is like it or has it as a word."""
    close = difflib.get_close_matches(str(name), names, n=1)
    close = close or [known for known in names if str(name) in known.split("_")]
    if not close:
        return f"; {otherwise}"
    return f"; did you mean {dashes}{close[0].replace('_', '-') if dashes else close[0]}?"


def trainer_hints():
    """{option: type hint} of transformers' TrainingArguments."""
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    return {f.name: hints[f.name] for f in dataclasses.fields(TrainingArguments) if f.init}


# ------------------------------------------------------------------------------------------------
# a command


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        message = re.sub("^argument (.*): expected .*", r"\1 needs a value", message)
        raise UserError(f"{message}; --help lists the options")


@dataclass
class Options:
    """The options of one command.

    Attributes:
        command: as it is typed.
        about: what it does, one sentence.
        groups: dataclasses of options. Those of one topic are one class, or one base class of
            theirs.
        example: a command line that works.
        trainer: {option: default} of transformers' TrainingArguments, for a command that trains.
    """

    command: str
    about: str
    groups: tuple
    example: str = ""
    trainer: dict | None = None

    @property
    def fields(self):
        """{option: dataclass field}."""
        return {f.name: f for group in self.groups for f in dataclasses.fields(group) if f.init}

    @property
    def hints(self):
        """{option: type hint}."""
        hints = {}
        for group in self.groups:
            hints |= typing.get_type_hints(group)
        return {name: hints[name] for name in self.fields}

    def read(self, argv):
        """Fills the groups.

        Args:
            argv: positional values and YAML recipes (later ones win), then `--name value`.
        Returns:
            list with one object for each group; with `trainer` also the dict of Trainer's options:
            the defaults, then `trainer:` of the recipes, then what the command line gives.
        Raises:
            UserError: an unknown option, a value that is empty, of a wrong type or out of its
                range, a recipe that cannot be read.
        """
        if {"-h", "--help"} & set(argv):
            print(self.help())
            raise SystemExit(0)
        fields, hints = self.fields, self.hints
        of_trainer = trainer_hints() if self.trainer is not None else {}
        words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
        recipes = [word for word in words if word.endswith((".yaml", ".yml"))]
        argv = [word for word in words if word not in recipes] + argv[len(words) :]
        values = {}
        for path in recipes:
            values |= self._recipe(path, hints, of_trainer)
        values |= self._command_line(argv, {**of_trainer, **hints})
        for name, value in values.items():
            may_be_empty = name in fields and fields[name].default == ""
            if not may_be_empty and "" in _items(value):
                raise UserError(
                    f"{name.rstrip('_')} is empty, as a variable is that was not set; give it a "
                    "value, or leave it out"
                )
        lacking = [
            _spelled(f)
            for name, f in fields.items()
            if f.default is MISSING and f.default_factory is MISSING and name not in values
        ]
        if lacking:
            raise UserError(f"give {listed(lacking)}; --help lists the options")
        objects = []
        for group in self.groups:
            names = [f.name for f in dataclasses.fields(group) if f.init and f.name in values]
            objects.append(group(**{name: values.pop(name) for name in names}))
        return objects if self.trainer is None else [*objects, {**self.trainer, **values}]

    def _recipe(self, path, hints, of_trainer):
        """The values of one recipe, those for Trainer among them."""
        shipped = ROOT / path  # "recipes/contrastive.yaml" of the package
        is_shipped = shipped.parent.name == "recipes" and shipped.is_file()
        recipe = read_yaml(shipped if is_shipped and not Path(path).exists() else path) or {}
        if not isinstance(recipe, dict):
            raise UserError(f"{path} must hold 'name: value' lines, but holds {recipe!r:.80}")
        section = recipe.pop("trainer", None) or {}
        if section and self.trainer is None:
            raise UserError(
                f"the recipe {path} has a section trainer, but this command has no Trainer"
            )
        values = typed(recipe, hints, f"in the recipe {path}")
        return values | typed(section, of_trainer, f"under trainer: in the recipe {path}")

    def _command_line(self, argv, hints):
        """The values of the command line without its recipes."""
        # --max_length is --max-length
        argv = [re.sub(r"^--\w[\w-]*", lambda name: name[0].replace("_", "-"), a) for a in argv]
        given, rest = self._parser(hints).parse_known_args(argv)
        if rest:
            name = rest[0].partition("=")[0].lstrip("-").replace("-", "_")
            raise UserError(f"unknown argument {rest[0]!r}{nearest(name, hints, '--')}")
        values = vars(given)
        for name, value in values.items():
            if {list, dict} & _kinds(hints[name]).keys():
                items = [read_brackets(text) for text in _items(value)]
                values[name] = items[0] if len(items) == 1 else items
        return typed(values, hints, "on the command line")

    def _parser(self, hints):
        """argparse's reader of the options in `hints`, and writer of the help on those that are not
        Trainer's."""
        fields = self.fields
        positional = [_spelled(f) for f in fields.values() if f.metadata.get("positional")]
        parser = _Parser(
            usage=" ".join([self.command, *positional, "[RECIPE.yaml] [--option value ...]"]),
            description=self.about + (f"\n\nexample:\n  {self.example}" if self.example else ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        # An option stands under the first line of the class that declares it.
        titles = {
            name: base.__doc__.splitlines()[0].rstrip(".")
            for group in self.groups
            for base in group.__mro__
            for name in inspect.get_annotations(base)
        }
        topics = {
            title: parser.add_argument_group(title)
            for title in dict.fromkeys(titles[name] for name in fields)
        }
        for name, hint in hints.items():
            kinds, group = _kinds(hint), parser
            settings = {"dest": name, "metavar": "VALUE", "help": argparse.SUPPRESS}
            if list in kinds:
                settings["nargs"] = "+"
            elif bool in kinds:
                settings |= {"nargs": "?", "const": "true", "metavar": "true|false"}
            if name in fields:
                group, settings["help"] = topics[titles[name]], _described(fields[name])
            if name in fields and fields[name].metadata.get("positional"):
                several = "*" if list in kinds else "?"
                group.add_argument(name, nargs=several, metavar=name.upper(), help=settings["help"])
                settings["help"] = argparse.SUPPRESS  # by its name too, in place of its position
            group.add_argument(_dashed(name), **settings)
        return parser

    def help(self, argv=()):
        """The text of --help: every topic with its options, their ranges and defaults."""
        parser = self._parser(self.hints)
        if self.trainer is not None:
            parser.epilog = "\n".join(
                [
                    "Every option of transformers.TrainingArguments; with other defaults here:",
                    *(f"  {_dashed(name)} (default: {v})" for name, v in self.trainer.items()),
                ]
            )
        return parser.format_help()


def _dashed(name):
    """A field as an option: `for_`, a name that Python keeps for itself, loses its mark."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def _spelled(f):
    """An option as the command line has it."""
    return f.name.upper() if f.metadata.get("positional") else _dashed(f.name)


def _described(f):
    """What --help says of an option."""
    default = f.default if f.default_factory is MISSING else f.default_factory()
    bounds = f.metadata.get("bounds", {})
    parts = [f.metadata.get("help"), *(_limit(*bound) for bound in bounds.items())]
    if default is MISSING and not f.metadata.get("positional"):
        parts.append("required")
    shown = "" if default in (MISSING, None, [], {}) else f" (default: {default})"
    return ("; ".join(filter(None, parts)) + shown).replace("%", "%%")
