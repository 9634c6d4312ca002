"""Options of the commands: dataclasses filled from YAML recipes and the command line, with the
allowed range of each in its field.

A recipe is a YAML file of `name: value` lines. What the command line gives wins. Options of
transformers' Trainer go through as they are: under
`trainer:` in a recipe, by their names on the command line.
"""

import dataclasses
import difflib
import inspect
import keyword
import math
import types
import typing
from dataclasses import MISSING, dataclass, field
from pathlib import Path

from .errors import UserError, listed
from .yaml_files import read_collection, read_scalar, read_yaml


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
    unknown = bounds.keys() - {"least", "most", "above", "below", "choices"}
    assert not unknown, f"option() has no {unknown}"
    metadata = {"help": help, "positional": positional, "free": free, "bounds": bounds}
    return field(default=default, default_factory=default_factory, metadata=metadata)


@dataclass
class Arguments:
    """Base of the options of every command: the ranges in the fields are checked when an object is
    made."""

    def __post_init__(self):
        check_ranges(self)


def check_ranges(arguments, where="", values=None):
    """Raises UserError for the first field whose value is not finite or outside of the range in the
    field's metadata. None passes.

    Args:
        arguments: object of a dataclass.
        where: follows the field's name in the message.
        values: {field: value} to check in place of the object's own.
    """
    values = vars(arguments) if values is None else values
    bounds = {
        described.name: described.metadata.get("bounds", {})
        for described in dataclasses.fields(arguments)
    }
    check_values({name: values[name] for name in bounds if name in values}, bounds, where)


def check_values(values, bounds, where=""):
    """Raises UserError for the first of `values` that is not finite or outside of its `bounds`,
    {name: {bound: limit}}."""
    for name, value in values.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if problem := _problem(item, bounds.get(name, {})):
                raise UserError(
                    f"{name.rstrip('_')}{where} must be {problem}, but {item!r} was given"
                )


def _problem(value, bounds):
    """What `value` should be and is not, or None."""
    if value is None:
        return None
    if "choices" in bounds and value not in bounds["choices"]:
        return f"one of {', '.join(map(str, bounds['choices']))}"
    if not _is_finite(value):
        return "made of finite numbers" if isinstance(value, (list, dict)) else "a finite number"
    for name, words, holds in (
        ("least", "at least", lambda a, b: a >= b),
        ("most", "at most", lambda a, b: a <= b),
        ("above", "above", lambda a, b: a > b),
        ("below", "below", lambda a, b: a < b),
    ):
        if name in bounds and not holds(value, bounds[name]):
            return f"{words} {bounds[name]}"
    return None


def _is_finite(value):
    """Whether no number in `value`, however deep, is infinite or NaN."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _kinds(hint):
    """The types that a hint allows, None apart."""
    alternatives = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )
    return [kind for kind in alternatives if kind is not types.NoneType]


def _plain(hint):
    """As `_kinds`, `list` for `list[str]`."""
    return [typing.get_origin(kind) or kind for kind in _kinds(hint)]


def _convert(hint, value):
    """`value`, text of the command line or a value of a recipe, as the type hint has it; ValueError
    if it cannot be."""
    if hint is typing.Any:
        return value
    kinds = _kinds(hint)
    plain = _plain(hint)
    if types.NoneType in typing.get_args(hint) and (value is None or value in ("None", "null")):
        return None
    if value is None:
        raise ValueError
    for kind, mark in ((dict, "{"), (list, "[")):
        if kind in plain and isinstance(value, str) and value.lstrip().startswith(mark):
            try:
                value = read_collection(value, kind)
            except UserError:
                raise
            except ValueError:
                pass  # it is text, a pattern such as [ab]*.txt
    if plain == [list] and not isinstance(value, (list, dict)):
        value = [value]
    if isinstance(value, (list, dict)):
        if type(value) not in plain:
            raise ValueError
        *key, item = typing.get_args(kinds[plain.index(type(value))]) or (typing.Any,)
        if isinstance(value, list):
            return [_convert(item, inner) for inner in value]
        return {
            _convert(*key, name) if key else name: _convert(item, inner)
            for name, inner in value.items()
        }
    if plain == [dict]:
        raise ValueError
    if str in plain and not {bool, int, float, typing.Literal} & set(plain):
        return str(value)
    value = read_scalar(value) if isinstance(value, str) else value
    if len(plain) > 1 or plain[0] not in (bool, int, float):
        return value
    (kind,) = plain
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (bool, int, float)):
        raise ValueError
    if kind is int and value != int(value):
        raise ValueError
    return kind(value)


def _words(hint):
    """The type hint for a message."""
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    words = []
    for kind in _kinds(hint):
        *_, inner = typing.get_args(kind) or (typing.Any,)
        each = (
            f", each {_words(inner)}"
            if typing.get_origin(kind) in (list, dict) and inner is not typing.Any
            else ""
        )
        words.append(names.get(typing.get_origin(kind) or kind, "text") + each)
    return " or ".join(words)


def read_arguments(dataclass_types, argv, trainer=None):
    """Fills dataclasses from `argv`.

    Args:
        dataclass_types: every option belongs to exactly one of them.
        argv: positional values and YAML recipes (later ones win), then `--name value`.
        trainer: {option: default} of transformers' TrainingArguments, where the command trains.
        Adds a dict to what is returned: these defaults, then `trainer:` of the recipes, then what
            the command line gives under Trainer's own names.
    Returns:
        list with one object for each type, and the dict of Trainer's options.
    Raises:
        UserError: an unknown option, a value of a wrong type or out of its range, a recipe that
            cannot be read.
    """
    fields = {f.name: f for type_ in dataclass_types for f in dataclasses.fields(type_) if f.init}
    hints = {
        name: hint
        for type_ in dataclass_types
        for name, hint in typing.get_type_hints(type_).items()
        if name in fields
    }
    trainer_hints = _trainer_hints() if trainer is not None else {}
    names = [name for name, f in fields.items() if f.metadata.get("positional")]
    values, recipes, rest = _positional(argv, names, {n for n in names if list in _plain(hints[n])})
    for_trainer = dict(trainer or {})
    for path in recipes:
        recipe = read_yaml(_shipped(path))
        if recipe is not None and not isinstance(recipe, dict):
            held = {list: "a list", str: "text"}.get(type(recipe), "a single value")
            raise UserError(f"{path} must hold 'name: value' lines, but holds {held}")
        recipe = dict(recipe or {})
        section = recipe.pop("trainer", None) or {}
        if section and trainer is None:
            raise UserError(
                f"the recipe {path} has a section trainer, but this command has no Trainer"
            )
        values |= typed(recipe, hints, f"in the recipe {path}")
        for_trainer |= typed(section, trainer_hints, f"under trainer: in the recipe {path}")
    given = typed(
        _options(rest, {**trainer_hints, **hints}),
        {**trainer_hints, **hints},
        "on the command line",
    )
    values |= {name: value for name, value in given.items() if name in hints}
    for_trainer |= {name: value for name, value in given.items() if name not in hints}
    lacking = [
        name
        for name, f in fields.items()
        if f.default is MISSING and f.default_factory is MISSING and name not in values
    ]
    if lacking:
        raise UserError(
            f"give {listed(_spelled(name, fields) for name in lacking)}; --help lists the options"
        )
    try:
        objects = [
            type_(
                **{
                    f.name: values[f.name]
                    for f in dataclasses.fields(type_)
                    if f.init and f.name in values
                }
            )
            for type_ in dataclass_types
        ]
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    return objects if trainer is None else [*objects, for_trainer]


def _shipped(path):
    """`path`, or where there is no such file the recipe of that name which the package brings:
    "recipes/contrastive.yaml"."""
    own = Path(__file__).resolve().parent.parent / path
    return (
        own if own.is_file() and own.parent.name == "recipes" and not Path(path).exists() else path
    )


def _trainer_hints():
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    return {f.name: hints[f.name] for f in dataclasses.fields(TrainingArguments) if f.init}


def _spelled(name, fields):
    """An option as the command line has it."""
    described = fields.get(name)
    return (
        name.upper()
        if described is not None and described.metadata.get("positional")
        else _dashed(name)
    )


def _dashed(name):
    """A field as an option: a name that Python keeps for itself, `for_`, loses its mark."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def _positional(argv, names, several):
    """({positional name: value}, recipes, the rest) of a command line. A name among `several` takes
    all values that follow, as a list."""
    argv, values, recipes = list(argv), {}, []
    names = list(names)
    while argv and not argv[0].startswith("-"):
        value = argv.pop(0)
        if not value:
            raise UserError("an argument is empty; --help lists what is expected")
        if names and Path(value).suffix not in (".yaml", ".yml"):
            if names[0] in several:
                values.setdefault(names[0], []).append(value)
            else:
                values[names.pop(0)] = value
        else:
            recipes.append(value)
    return values, recipes, argv


def _options(argv, hints):
    """{option: text, list of texts, or True} of `--name value`, `--name=value`, `--name a b` for
    lists, and `--name` for switches."""
    values, name = {}, None
    for argument in argv:
        if argument.startswith("--") and len(argument) > 2:
            spelled, equals, value = argument[2:].partition("=")
            name = spelled.replace("-", "_")
            name += "_" * keyword.iskeyword(name)  # --for is the field for_
            if name not in hints:
                raise UserError(f"unknown argument {argument!r}{nearest(name, hints, '--')}")
            values[name] = [value] if equals else []
        elif name is None:
            raise UserError(
                f"{argument!r} was given where an option, --name, was expected; --help lists them"
            )
        else:
            values[name].append(argument)
    for name, given in values.items():
        kinds = _plain(hints[name])
        if not given and bool not in kinds:
            raise UserError(f"{_dashed(name)} needs a value, {_words(hints[name])}")
        if len(given) > 1 and list not in kinds:
            raise UserError(f"{_dashed(name)} takes one value, but {' '.join(given)!r} was given")
        if not given:
            values[name] = True
        elif list not in kinds or (len(given) == 1 and (str in kinds or given[0].startswith("["))):
            values[name] = given[0]
    return values


def nearest(name, names, dashes="", otherwise="--help lists the options"):
    """The end of a message about an unknown name: `; did you mean ...?`, or `otherwise` where none
    of `names` is like it."""
    close = difflib.get_close_matches(str(name), names, n=1)
    if not close:
        return f"; {otherwise}"
    return f"; did you mean {dashes}{close[0].replace('_', '-') if dashes else close[0]}?"


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
        try:
            values[name] = _convert(hints[name], value)
        except UserError:
            raise
        except (ValueError, TypeError, OverflowError):
            raise UserError(
                f"{name} {where} must be {_words(hints[name])}, but {value!r} was given"
            ) from None
    return values


@dataclass(frozen=True)
class Options:
    """The options of one command, and what its --help says.

    Attributes:
        command: as it is typed, "neobert encode".
        about: what it does, in a sentence or two.
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

    def read(self, argv):
        """Objects of `groups`, and with `trainer` a dict of Trainer's options; see
        `read_arguments`."""
        if {"-h", "--help"} & set(argv):
            print(self.help(argv))
            raise SystemExit(0)
        return read_arguments(self.groups, argv, self.trainer)

    def help(self, argv=()):
        """The text of --help: every topic with its options, their ranges and defaults."""
        fields = {f.name: f for group in self.groups for f in dataclasses.fields(group) if f.init}
        hints = {
            n: hint for group in self.groups for n, hint in typing.get_type_hints(group).items()
        }
        positional = [
            _spelled(name, fields) + ("..." if list in _plain(hints[name]) else "")
            for name, f in fields.items()
            if f.metadata.get("positional")
        ]
        lines = [
            " ".join(
                ["usage:", self.command, *positional, "[RECIPE.yaml]", "[--option value ...]"]
            ),
            "",
            self.about,
        ]
        if self.example:
            lines += ["", "example:", f"  {self.example}"]
        topic = None
        for name, described in fields.items():
            owner = next(
                base
                for group in self.groups
                for base in group.__mro__[::-1]
                if name in inspect.get_annotations(base)
            )
            if owner is not topic:
                topic = owner
                lines += ["", f"{owner.__doc__.splitlines()[0].rstrip('.')}:"]
            lines.append(_described(_spelled(name, fields), described))
        if self.trainer is not None:
            lines += [
                "",
                "Every option of transformers.TrainingArguments; those with other defaults here:",
            ]
            lines += [
                f"  --{name.replace('_', '-')} (default: {value})"
                for name, value in self.trainer.items()
            ]
        return "\n".join(lines)


def _described(spelled, described):
    """An option's line of --help."""
    default = (
        described.default if described.default_factory is MISSING else described.default_factory()
    )
    parts = [described.metadata["help"]] if described.metadata.get("help") else []
    words = {"least": "at least", "most": "at most", "choices": "one of"}
    for bound, limit in described.metadata.get("bounds", {}).items():
        parts.append(
            f"{words.get(bound, bound)} "
            f"{', '.join(map(str, limit)) if bound == 'choices' else limit}"
        )
    if default is MISSING and not described.metadata.get("positional"):
        parts.append("required")
    shown = "" if default in (MISSING, None, [], {}) else f" (default: {default})"
    return f"  {spelled:<24} {'; '.join(parts)}{shown}"
