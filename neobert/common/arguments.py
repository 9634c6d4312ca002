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
import operator
import re
import typing
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import NoneType, UnionType

import msgspec

from .constants import RECIPES
from .errors import UserError, listed
from .files import read_brackets, read_yaml


# What an option's range is called, and when a value is in it.
_BOUNDS = {
    "least": ("at least", operator.ge),
    "most": ("at most", operator.le),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
    "choices": ("one of", lambda value, choices: value in choices),
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
    metadata = {"help": help, "positional": positional, "free": free, "bounds": bounds}
    return field(default=default, default_factory=default_factory, metadata=metadata)


@dataclass
class Arguments:
    """Base of the options of every command: the ranges in the fields are checked when an object is
    made."""

    def __post_init__(self):
        check_ranges(self)


def check_ranges(arguments, where=""):
    """Raises UserError for the first field of a dataclass whose value is outside of the range in
    the field's metadata. None passes.

    Args:
        where: follows the field's name in the message.
    """
    bounds = {f.name: f.metadata.get("bounds", {}) for f in dataclasses.fields(arguments)}
    check_values(vars(arguments), bounds, where)


def check_values(values, bounds, where=""):
    """Raises UserError for the first of `values` that is outside of its `bounds`,
    {name: {bound: limit}}."""
    for name, value in values.items():
        for bound, limit in bounds.get(name, {}).items():
            for item in _items(value):
                if item is not None and not _BOUNDS[bound][1](item, limit):
                    limit = _limit(bound, limit)
                    raise UserError(
                        f"{name.rstrip('_')}{where} must be {limit}, but {item!r} was given"
                    )


def _items(value):
    return value if isinstance(value, (list, tuple)) else [value]


def _limit(bound, limit):
    """`at least 1`, `one of a, b`."""
    limit = ", ".join(map(str, limit)) if bound == "choices" else limit
    return f"{_BOUNDS[bound][0]} {limit}"


def _kinds(hint):
    """The types that a hint allows: {list, NoneType} of `list[str] | None`."""
    union = typing.get_origin(hint) in (typing.Union, UnionType)
    hints = typing.get_args(hint) if union else [hint]
    return {typing.get_origin(kind) or kind for kind in hints}


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
            close = nearest(name, hints, otherwise=otherwise)
            raise UserError(f"unknown key {name!r} {where}{close}")
        kinds = _kinds(hints[name])
        if NoneType in kinds and value in ("null", "None"):
            value = None
        if kinds <= {list, NoneType} and isinstance(value, (str, int, float)):
            value = [value]
        try:
            values[name] = msgspec.convert(value, hints[name], strict=False)
        except msgspec.ValidationError as error:
            wanted = re.sub("Expected `(.*)`, got .*", r"\1", str(error))
            raise UserError(
                f"{name.rstrip('_')} {where} must be {wanted}, but {value!r} was given"
            ) from None
        except TypeError:  # some hints of Trainer's are not among those that msgspec has
            values[name] = value
    return values


# What other libraries call an option: {name: names here, the first one that the command has}.
_USUAL_NAMES = {
    "batch_size": ("batch_size", "texts_per_batch", "per_device_train_batch_size", "batch"),
    "per_device_train_batch_size": ("batch_size", "texts_per_batch"),
    "lr": ("learning_rate",),
    "epochs": ("num_train_epochs",),
    "output_dir": ("output",),
    "train_file": ("dataset", "pairs", "texts", "data", "source"),
    "validation_file": ("heldout",),
}


def nearest(name, names, dashes="", otherwise="--help lists the options"):
    """The end of a message about an unknown name: `; did you mean ...?`, or `otherwise` where none
    of `names` is like it or has it as a word."""
    usual = [known for known in _USUAL_NAMES.get(str(name), ()) if known in names]
    close = usual or difflib.get_close_matches(str(name), names, n=1)
    close = close or [known for known in names if str(name) in known.split("_")]
    if not close:
        return f"; {otherwise}"
    return f"; did you mean {dashes}{close[0].replace('_', '-') if dashes else close[0]}?"


# ------------------------------------------------------------------------------------------------
# a command


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

    def read(self, argv):
        """Fills the groups.

        Args:
            argv: positional values and YAML recipes (later ones win), then `--name value`.
        Returns:
            list with one object for each group; with `trainer` also the dict of Trainer's options:
            the defaults, then those of the recipes, then what the command line gives.
        Raises:
            UserError: an unknown option, a value that is empty, of a wrong type or out of its
                range, a recipe that cannot be read.
        """
        fields, groups = self.fields, self.groups
        if self.trainer is not None:
            from transformers import TrainingArguments

            groups = (TrainingArguments, *groups)
        hints = _hints(groups)
        words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
        recipes = [word for word in words if word.endswith((".yaml", ".yml"))]
        argv = [word for word in words if word not in recipes] + argv[len(words) :]
        if "config" not in hints:
            argv, more = _config_files(argv)
            recipes += more
        values = {}
        for path in recipes:
            recipe = _recipe(path)
            recipe |= recipe.pop("trainer", None) or {}
            values |= typed(recipe, hints, f"in the recipe {path}")
        values |= typed(self._command_line(argv, hints), hints, "on the command line")
        for name, value in values.items():
            may_be_empty = name in fields and fields[name].default == ""
            if not may_be_empty and "" in _items(value):
                raise UserError(
                    f"{name.rstrip('_')} is empty, as a variable is that was not set; give it a "
                    "value, or leave it out"
                )
        required = [f for f in fields.values() if f.default is f.default_factory is MISSING]
        if missing := [f for f in required if f.name not in values]:
            raise UserError(f"give {listed(map(_spelled, missing))}; --help lists the options")
        objects = [
            group(**{name: values.pop(name) for name in _hints([group]) if name in values})
            for group in self.groups
        ]
        return objects if self.trainer is None else [*objects, {**self.trainer, **values}]

    def _command_line(self, argv, hints):
        """{option: text or list of texts} of the command line without its recipes; what is in
        brackets as the list or mapping that it is."""
        # --max_length is --max-length
        argv = [re.sub(r"^--\w[\w-]*", lambda name: name[0].replace("_", "-"), a) for a in argv]
        try:
            values, rest = self._parser(hints).parse_known_args(argv)
        except argparse.ArgumentError as error:
            raise UserError(error) from None
        if rest:
            name = rest[0].partition("=")[0].lstrip("-").replace("-", "_")
            if name == "resume" and "resume_from_checkpoint" in hints:
                raise UserError(
                    "unknown argument '--resume'. Run the same command again to resume."
                )
            raise UserError(f"unknown argument {rest[0]!r}{nearest(name, hints, '--')}")
        values = vars(values).items()
        return {
            name: value[0] if isinstance(value, list) and len(value) == 1 else value
            for name, value in values
        }

    def _parser(self, hints):
        """argparse's reader of the options in `hints`, and writer of the help on those that are not
        Trainer's."""
        fields, topics = self.fields, {}
        positional = [_spelled(f) for f in fields.values() if f.metadata.get("positional")]
        defaults = [f"  {_dashed(name)} (default: {v})" for name, v in (self.trainer or {}).items()]
        about_trainer = "Every option of transformers.TrainingArguments is accepted."
        if defaults:
            about_trainer = f"{about_trainer[:-1]}. Different defaults:"
        epilog = [] if "config" in hints else ["A recipe can also be passed as `--config FILE`."]
        if self.trainer is not None:
            epilog += [about_trainer, *defaults]
        parser = argparse.ArgumentParser(
            usage=" ".join([self.command, *positional, "[RECIPE.yaml] [--option value ...]"]),
            description=self.about + (f"\n\nexample:\n  {self.example}" if self.example else ""),
            epilog="\n".join(epilog),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            exit_on_error=False,
            argument_default=argparse.SUPPRESS,
        )
        # An option stands under the first line of the class that declares it.
        bases = [base for group in self.groups for base in group.__mro__]
        classes = {name: base for base in bases for name in inspect.get_annotations(base)}
        for name, hint in hints.items():
            kinds, topic, settings = _kinds(hint), parser, {"help": argparse.SUPPRESS}
            settings |= {"dest": name, "metavar": "VALUE"}
            if {list, dict} & kinds:
                settings["type"] = read_brackets
            if list in kinds:
                settings["nargs"] = "+"
            elif bool in kinds:
                settings |= {"nargs": "?", "const": "true", "metavar": "true|false"}
            if f := fields.get(name):
                title = classes[name].__doc__.splitlines()[0].rstrip(".")
                if title not in topics:
                    topics[title] = parser.add_argument_group(title)
                topic, settings["help"] = topics[title], _described(f)
            if f and f.metadata.get("positional"):
                several = "*" if list in kinds else "?"
                topic.add_argument(name, nargs=several, metavar=name.upper(), help=_described(f))
                settings["help"] = argparse.SUPPRESS  # by its name too, in place of its position
            topic.add_argument(_dashed(name), **settings)
        return parser

    def help(self, argv=()):
        """The text of --help: every topic with its options, their ranges and defaults."""
        return self._parser(_hints(self.groups)).format_help()


def _config_files(argv):
    """Return the command line without `--config FILE` options, and the files that they name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="extend", nargs="+", default=[], metavar="FILE")
    try:
        parsed, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(error) from None
    return rest, parsed.config


def _recipe(path):
    """The content of a recipe: a file, or one of the package, such as recipes/contrastive.yaml."""
    shipped = RECIPES.parent / path
    is_shipped = Path(path).parts[:1] == ("recipes",) and shipped.is_file()
    recipe = read_yaml(shipped if is_shipped and not Path(path).exists() else path) or {}
    if not isinstance(recipe, dict):
        raise UserError(f"{path} must hold 'name: value' lines, but holds {recipe!r:.80}")
    return recipe


def _hints(groups):
    """{option: type hint} of dataclasses."""
    hints = {}
    for group in groups:
        every = typing.get_type_hints(group)
        hints |= {f.name: every[f.name] for f in dataclasses.fields(group) if f.init}
    return hints


def _dashed(name):
    """A field as an option: `for_`, a name that Python keeps for itself, loses its mark."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def _spelled(f):
    """An option as the command line has it."""
    return f.name.upper() if f.metadata.get("positional") else _dashed(f.name)


def _described(f):
    """What --help says of an option."""
    default = f.default if f.default_factory is MISSING else f.default_factory()
    required = default is MISSING and not f.metadata.get("positional")
    limits = [_limit(*bound) for bound in f.metadata.get("bounds", {}).items()]
    parts = [f.metadata.get("help"), *limits, "required" if required else ""]
    shown = "" if default in (MISSING, None, [], {}) else f" (default: {default})"
    return ("; ".join(filter(None, parts)) + shown).replace("%", "%%")
