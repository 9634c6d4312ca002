"""Options of a command: nested frozen dataclasses, filled from recipes and the command line.

    @dataclass(frozen=True)
    class LossOptions(OptionGroup):
        title = "Loss"

        temperature: Annotated[float, Meta(gt=0)] = option(0.05, "Softmax temperature.")

    @dataclass(frozen=True)
    class DistillOptions:
        data: DataOptions
        loss: LossOptions = LossOptions()

    PARSER = OptionParser("neobert distill", "Distill a sentence encoder.", DistillOptions)
    options = PARSER.read(["--temperature", "0.1", ...])
    options.loss.temperature                                   # 0.1

A recipe is a YAML file of `name: value` lines. Values on the command line override those of
recipes. argparse splits the command line, and msgspec converts the values to their types and checks
their bounds. Options of transformers' Trainer are passed on unchanged: under `trainer:` in a
recipe, and by their names on the command line.
"""

import argparse
import dataclasses
import difflib
import importlib.util
import logging
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from .constants import RECIPES
from .errors import UserError, listed
from .files import read_brackets, read_yaml, redacted


logger = logging.getLogger("neobert.options")

OptionsT = TypeVar("OptionsT")

# Longer lists of choices are part of the description of an option and not of its placeholder.
_MAX_CHOICES_LENGTH = 60

# Paragraph of every `--help`.
_RECIPE_HELP = (
    "RECIPE.yaml is a file with a line `option: value` per option. A later recipe takes\n"
    "precedence over earlier ones, and the command line over recipes."
)

# Placeholder of a Boolean value in `--help`.
_BOOLEAN = "{true,false}"

# Keyword arguments of `add_argument` for a Boolean: --compile without a value is --compile true.
_BARE_FLAG = {"nargs": "?", "const": "true"}


@dataclass(frozen=True)
class OptionGroup:
    """Base class of a group of options; `title` is the heading of the group in `--help`."""

    title: ClassVar[str]


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    default_factory: Any = MISSING,
    metavar: str | None = None,
    positional: bool = False,
    affects_results: bool = True,
    may_be_empty: bool = False,
) -> Any:
    """Return a dataclass field with what `--help` and the identity of a run need.

    Args:
        default: Default value; an option without a default is required.
        help: Description of the option for `--help`.
        default_factory: Function that returns the default value, for lists and mappings.
        metavar: Placeholder of the value in `--help`; by default the name of its type.
        positional: Whether the value is passed without a name, before all options.
        affects_results: Whether results depend on the option. Other options may change when a run
            is resumed.
        may_be_empty: Whether the value may be "", which usually is an unset variable of the shell.
    """
    metadata = {
        "help": help,
        "metavar": metavar,
        "positional": positional,
        "affects_results": affects_results,
        "may_be_empty": may_be_empty,
    }
    return field(default=default, default_factory=default_factory, metadata=metadata)


def flatten(options: Any) -> dict[str, Any]:
    """Return the values of all groups of an options object, {option: value}."""
    values: dict[str, Any] = {}
    for group in dataclasses.fields(options):
        value = getattr(options, group.name)
        values.update(dataclasses.asdict(value) if isinstance(value, OptionGroup) else value)
    return values


def identity(options: Any) -> dict[str, Any]:
    """Return the options that the results of a run depend on, {option: value}.

    Options of Trainer are not included, see `training.options.result_options`.
    """
    names = []
    for group in _groups(type(options)).values():
        for item in dataclasses.fields(group):
            if item.init and item.metadata.get("affects_results", True):
                names.append(item.name)
    values = flatten(options)
    return {name: values[name] for name in names}


def log_options(options: Any) -> None:
    """Log the resolved options of a command, once at its start, without tokens and passwords."""
    text = ", ".join(f"{name}={value!r}" for name, value in redacted(flatten(options)).items())
    logger.info("Options: %s", text)


# ------------------------------------------------------------------------------------------------
# parser


@dataclass(frozen=True)
class OptionParser(Generic[OptionsT]):
    """Parser of one command's options.

    Attributes:
        command: Command as it is typed.
        about: Description of the command, one or two sentences.
        options: Dataclass whose fields are groups of options. A command that trains has the
            additional field `trainer: dict[str, Any]` for the options of Trainer.
        example: Command line that works.
        trainer_defaults: Defaults of Trainer's options that differ from those of transformers,
            {option: value}; None for commands that do not train.
        default_recipes: Recipes that are read before those of the user.
        trainer_help: Descriptions that replace those of `TRAINER_HELP`, {option: description}.
        trainer_replaced: Options of Trainer that the command sets itself, which `--help` omits,
            {option: option of the command to use instead, or ""}.
    """

    command: str
    about: str
    options: type[OptionsT]
    example: str = ""
    trainer_defaults: Mapping[str, Any] | None = None
    default_recipes: tuple[Path, ...] = ()
    trainer_help: Mapping[str, str] = field(default_factory=dict)
    trainer_replaced: Mapping[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, dataclasses.Field]:
        """Fields of all groups, {option: dataclass field}."""
        fields = {}
        for group in _groups(self.options).values():
            # `init=False` marks attributes that are computed from the options.
            fields.update({item.name: item for item in dataclasses.fields(group) if item.init})
        return fields

    def read(self, argv: Sequence[str]) -> OptionsT:
        """Read the options of a command line.

        Args:
            argv: Positional values and recipes (.yaml, .yml; later ones override earlier ones),
                then options.

        Raises:
            UserError: If an option is unknown, required and missing, empty, of a wrong type or
                out of range, or if a recipe cannot be read.
        """
        hints = self._hints()
        recipes, words = _split_recipes(argv, config_is_recipe="config" not in self.fields)

        values: dict[str, Any] = {}
        paths: list[str | Path] = [*self.default_recipes, *recipes]
        for path in paths:
            content = _read_recipe(path)
            # The section `trainer` only groups its options: they are those at the top level.
            section = content.pop("trainer", None) or {}
            if not isinstance(section, dict):
                raise UserError(
                    f"`trainer` in the recipe {path} must be a mapping, got {section!r:.80}."
                )
            content.update(section)
            values.update(convert(content, hints, f" in the recipe {path}"))
        values.update(convert(self._split_command_line(words, hints), hints, as_option=True))

        self._check_empty_values(values)
        self._check_required(values)
        self._check_replaced(values)
        return self._build(values)

    def help(self, argv: Sequence[str] = ()) -> str:
        """Return the text of `--help`, without importing torch or transformers.

        Args:
            argv: Command line. Parsers of several commands choose one by it; this one ignores it.
        """
        return self._argparse_parser(self._group_hints()).format_help()

    def _group_hints(self) -> dict[str, Any]:
        """Return the type hints of the options of all groups."""
        hints = {}
        for group in _groups(self.options).values():
            hints.update(_hints(group))
        return hints

    def _hints(self) -> dict[str, Any]:
        """Return the type hints of all options, including those of Trainer."""
        hints = self._group_hints()
        if self.trainer_defaults is not None:
            from transformers import TrainingArguments

            # In transformers 4 the type is int, see `training.options.warmup_options`.
            hints = {**_hints(TrainingArguments), "warmup_steps": float, **hints}
        return hints

    def _check_empty_values(self, values: Mapping[str, Any]) -> None:
        """Check that no value is "", except for options that allow it.

        Raises:
            UserError: If a value is empty.
        """
        fields = self.fields
        for name, value in values.items():
            # Options of Trainer have no field, and must not be empty.
            may_be_empty = name in fields and fields[name].metadata.get("may_be_empty", False)
            items = value if isinstance(value, (list, tuple)) else [value]
            if "" in items and not may_be_empty:
                raise UserError(
                    f"`{_dashed(name)}` is empty. Pass a value, or omit the option; an unset "
                    "variable of the shell is a common cause."
                )

    def _check_replaced(self, values: Mapping[str, Any]) -> None:
        """Check that no option of Trainer is set for which the command has an option of its own.

        Raises:
            UserError: If there is such an option. The message names the option of the command.
        """
        for name, replacement in self.trainer_replaced.items():
            if replacement and name in values:
                raise UserError(f"`{_dashed(name)}` is set by this command. Use {replacement}.")

    def _check_required(self, values: Mapping[str, Any]) -> None:
        """Check that all options without a default have a value.

        Raises:
            UserError: If an option is missing.
        """
        missing = [
            _spelled(item)
            for item in self.fields.values()
            if item.default is item.default_factory is MISSING and item.name not in values
        ]
        if missing:
            raise UserError(
                f"missing required options: {listed(missing)}. `{self.command} --help` lists all "
                "options."
            )

    def _build(self, values: dict[str, Any]) -> OptionsT:
        """Return the options object with these values. The values are removed from the dict."""
        groups: dict[str, Any] = {}
        for name, group in _groups(self.options).items():
            names = [f.name for f in dataclasses.fields(group) if f.init and f.name in values]
            groups[name] = group(**{option: values.pop(option) for option in names})

        # Only the options of Trainer are left.
        if self.trainer_defaults is not None:
            groups["trainer"] = {**self.trainer_defaults, **values}
        return self.options(**groups)

    def _split_command_line(self, words: Sequence[str], hints: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a command line as text, {option: text or list of texts}."""
        # Users of transformers type --max_length; it is accepted for --max-length.
        words = [re.sub(r"^--\w[\w-]*", lambda m: m[0].replace("_", "-"), word) for word in words]
        try:
            parsed, unknown = self._argparse_parser(hints).parse_known_args(words)
        except argparse.ArgumentError as error:
            raise UserError(f"{error}.") from None
        if unknown:
            name = unknown[0].partition("=")[0]
            # Options of Trainer that the command refuses would be a wrong suggestion.
            refused = {*SET_BY_COMMANDS, *self.trainer_replaced} - set(self.fields)
            names = [option for option in hints if option not in refused]
            raise UserError(f"unknown option {name!r}.{suggestion(name, names, as_option=True)}")

        values = {}
        for name, value in vars(parsed).items():
            # Options of Trainer such as `list | str` accept both forms, so a list of one item
            # may be meant as a single value. `convert` decides by the type.
            is_single = isinstance(value, list) and len(value) == 1
            values[name] = value[0] if is_single else value
        return values

    def _argparse_parser(self, hints: Mapping[str, Any]) -> argparse.ArgumentParser:
        """Return an argparse parser of the options in `hints`."""
        positional = [_spelled(f) for f in self.fields.values() if f.metadata.get("positional")]
        parser = argparse.ArgumentParser(
            usage=" ".join([self.command, *positional, "[RECIPE.yaml ...] [--option VALUE ...]"]),
            description=f"{self.about}\n\n{_RECIPE_HELP}"
            + (f"\n\nExample:\n  {self.example}" if self.example else ""),
            epilog=self._trainer_epilog(),
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            exit_on_error=False,
            # Options that are not on the command line must not override those of recipes.
            argument_default=argparse.SUPPRESS,
        )

        # The common options of Trainer follow the first group, which contains the data.
        for index, group in enumerate(_groups(self.options).values()):
            section = parser.add_argument_group(group.title)
            for item in dataclasses.fields(group):
                if item.init:
                    _add_option(section, item, hints[item.name])
            if index == 0:
                self._add_trainer_options(parser, hints)
        return parser

    def _add_trainer_options(
        self, parser: argparse.ArgumentParser, hints: Mapping[str, Any]
    ) -> None:
        """Add the options of Trainer: the common ones with their help, the others without."""
        if self.trainer_defaults is None:
            return
        fields = self.fields
        # A command may define an option of Trainer itself, with its own help and bounds.
        described = set(TRAINER_HELP) - set(fields) - set(self.trainer_replaced)
        section = parser.add_argument_group("Training")
        for name, (metavar, text) in TRAINER_HELP.items():
            if name not in described:
                continue
            default = self.trainer_defaults.get(name)
            if name in self.trainer_help:
                # argparse formats descriptions with the operator %.
                text = self.trainer_help[name].replace("%", "%%")
            elif default not in (None, ""):
                text += f" (default: {default})"
            # `hints` has no types of Trainer's options in `--help`, so the placeholder decides.
            settings: dict[str, Any] = {"metavar": metavar, "help": text}
            if metavar == _BOOLEAN:
                settings.update(_BARE_FLAG)
            section.add_argument(_dashed(name), dest=name, **settings)

        # The other options of Trainer are accepted, and only listed at the end of the help.
        for name in hints:
            if name not in fields and name not in described:
                settings = _argparse_settings(hints[name], None)
                settings["help"] = argparse.SUPPRESS
                parser.add_argument(_dashed(name), dest=name, **settings)

    def _trainer_epilog(self) -> str | None:
        """Return the list of Trainer's other options, or None for commands that do not train."""
        if self.trainer_defaults is None:
            return None
        described = {*TRAINER_HELP, *SET_BY_COMMANDS, *self.trainer_replaced, *self.fields}
        others = []
        for name in _trainer_option_names():
            if name not in described:
                default = self.trainer_defaults.get(name)
                others.append(f"{_dashed(name)}={default}" if default else _dashed(name))
        return (
            "Other options of transformers.TrainingArguments. --NAME=VALUE shows a default of\n"
            "this command, and the others have the defaults of transformers:\n  "
            + "\n  ".join(_wrapped(others))
        )


# Options of Trainer that `--help` describes, {option: (placeholder, description)}. The others are
# listed by name.
TRAINER_HELP = {
    "num_train_epochs": ("FLOAT", "Number of training epochs."),
    "max_steps": ("INT", "Number of optimizer steps. Overrides --num-train-epochs if positive."),
    "per_device_train_batch_size": ("INT", "Batch size per device, in sequences."),
    "gradient_accumulation_steps": ("INT", "Number of micro-batches per optimizer step."),
    "learning_rate": ("FLOAT", "Peak learning rate."),
    "warmup_steps": ("FLOAT", "Warmup steps; a value below 1 is a fraction of all steps."),
    "weight_decay": ("FLOAT", "Weight decay of the matrices."),
    "lr_scheduler_type": ("NAME", "Learning rate schedule, such as linear, cosine or constant."),
    "seed": ("INT", "Random seed."),
    "bf16": (_BOOLEAN, "Train in bfloat16 mixed precision."),
    "logging_steps": ("INT", "Number of steps between two log records."),
    "save_steps": ("INT", "Number of steps between two checkpoints, with --save-strategy steps."),
    "report_to": ("NAME", "Experiment tracker: none, tensorboard, wandb, ..."),
}


# Options of Trainer that the commands set, or that have no meaning in them.
SET_BY_COMMANDS = (
    "output_dir",
    "resume_from_checkpoint",
    "save_only_model",
    "logging_nan_inf_filter",
    "push_to_hub",
    "hub_model_id",
    "hub_strategy",
    "hub_private_repo",
    "hub_always_push",
    "hub_revision",
    "do_train",
    "do_eval",
    "do_predict",
    "local_rank",
)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter with lines of 100 characters, whose descriptions start at a fixed column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Return the lines of a description. Unlike argparse, do not break at hyphens.

        The halves of an option such as --max-length could not be found or copied.
        """
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _add_option(section: Any, item: dataclasses.Field, hint: Any) -> None:
    """Add one option of the command to a section of `--help`.

    Args:
        section: Section of an argparse parser.
        item: Field of the option.
        hint: Type hint of the option.
    """
    settings = _argparse_settings(hint, item.metadata.get("metavar"))
    settings["help"] = _description(item, hint)
    if item.metadata.get("positional"):
        # A recipe may contain the value, so the command line may omit it.
        nargs = "*" if list in _types(hint) else "?"
        section.add_argument(
            item.name, nargs=nargs, metavar=item.name.upper(), help=settings["help"]
        )
        # The option is accepted by its name, too, and described once.
        settings["help"] = argparse.SUPPRESS
    section.add_argument(_dashed(item.name), dest=item.name, **settings)


def _argparse_settings(hint: Any, metavar: str | None) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for an option of a type.

    Values stay text: `convert` checks the types of recipes and of the command line in one place.
    """
    allowed_types = _types(hint)
    settings: dict[str, Any] = {"metavar": metavar or _metavar(hint)}
    # Lists and mappings may be written as in YAML: --columns "[a, b]" or "{a: 1}".
    if {list, dict} & allowed_types:
        settings["type"] = read_brackets
    if list in allowed_types:
        settings["nargs"] = "+"
    elif bool in allowed_types:
        settings.update(_BARE_FLAG)
    return settings


def _metavar(hint: Any) -> str:
    """Return the placeholder of a value: INT, FLOAT, TEXT, {a,b}, ...

    It is NAME if the description lists the choices, see `_choices_are_described`.
    """
    choices = _choices(hint)
    if choices:
        return "NAME" if _choices_are_described(hint) else f"{{{','.join(choices)}}}"
    for alternative in _alternatives(hint):
        base = _without_bounds(alternative)
        if typing.get_origin(base) is list:
            return _metavar(typing.get_args(base)[0])
        if typing.get_origin(base) is dict or base is dict:
            return "MAPPING"

    for option_type, name in ((bool, _BOOLEAN), (int, "INT"), (float, "FLOAT")):
        if option_type in _types(hint):
            return name
    return "TEXT"


def _choices(hint: Any) -> list[str]:
    """Return the choices of an option, or of an item of a list; [] if any value is allowed."""
    for alternative in _alternatives(hint):
        base = _without_bounds(alternative)
        if typing.get_origin(base) is Literal:
            return list(map(str, typing.get_args(base)))
        if typing.get_origin(base) is list:
            return _choices(typing.get_args(base)[0])
    return []


def _choices_are_described(hint: Any) -> bool:
    """Return whether the description lists the choices instead of the placeholder.

    argparse prints the placeholder of a list twice, `X [X ...]`, and never breaks a placeholder
    into lines.
    """
    choices = _choices(hint)
    return bool(choices) and (list in _types(hint) or len(",".join(choices)) > _MAX_CHOICES_LENGTH)


def _description(item: dataclasses.Field, hint: Any) -> str:
    """Return the help text of an option with its default.

    Args:
        item: Field of the option.
        hint: Type hint of the option.
    """
    default = item.default if item.default_factory is MISSING else item.default_factory()
    text = item.metadata.get("help", "")
    if not item.metadata.get("metavar") and _choices_are_described(hint):
        text += f" Choices: {', '.join(_choices(hint))}."
    if default is MISSING:
        text += "" if item.metadata.get("positional") else " (required)"
    elif default not in (None, [], {}, ""):
        default_text = str(default).lower() if isinstance(default, bool) else str(default)
        if isinstance(default, (list, tuple)):
            # The form in which the command line accepts several values.
            default_text = " ".join(map(str, default))
        text += f" (default: {default_text})"
    # argparse formats the text with the operator %.
    return text.replace("%", "%%")


# ------------------------------------------------------------------------------------------------
# values


def convert(
    section: Mapping[str, Any],
    hints: Mapping[str, Any],
    where: str = "",
    as_option: bool = False,
    fallback: str = "`--help` lists the options.",
) -> dict[str, Any]:
    """Convert the values of a recipe's section or of the command line to the types of the options.

    Args:
        section: Values, {option: value}.
        hints: Type hints, {option: hint}; bounds are `Annotated` with `msgspec.Meta`.
        where: Text that follows an option's name in a message, " in the recipe x.yaml".
        as_option: Whether messages name options as on the command line.
        fallback: Sentence for an unknown key that resembles no option.

    Raises:
        UserError: If a key is unknown, or a value has a wrong type or is out of range.
    """
    values = {}
    for name, value in section.items():
        if name not in hints:
            remedy = suggestion(str(name), hints, fallback=fallback)
            raise UserError(f"unknown key {name!r}{where}.{remedy}")

        hint = hints[name]
        # The words of YAML and Python for an optional value that is not set.
        allowed_types = _types(hint)
        if types.NoneType in allowed_types and value in ("null", "None"):
            value = None
        # A single value stands for a list of one item.
        if allowed_types <= {list, types.NoneType} and isinstance(value, (str, int, float)):
            value = [value]
        # YAML reads [512, short] as a number and a text. The text of other numbers is ambiguous:
        # 1e3 would become "1000.0".
        if isinstance(value, list) and any(
            _without_bounds(member) == list[str] for member in _alternatives(hint)
        ):
            value = [str(item) if type(item) is int else item for item in value]

        # The command line has texts only: `strict=False` also reads numbers in them.
        try:
            values[name] = msgspec.convert(value, hint, strict=False)
        except msgspec.ValidationError:
            spelled = _dashed(name) if as_option else name.rstrip("_")
            raise UserError(f"`{spelled}`{where} must be {rule(hint)}, got {value!r}.") from None
        except TypeError:
            # msgspec does not support some of the hints of TrainingArguments.
            values[name] = value
        _check_finite(name, values[name], where)
    return values


def rule(hint: Any) -> str:
    """Return what a value must be to satisfy a type hint, in words: "an integer, at least 1"."""
    alternatives = [member for member in _alternatives(hint) if member is not types.NoneType]
    return " or ".join(map(_rule, alternatives))


def _rule(hint: Any) -> str:
    """Return the rule of a type that is not a union, see `rule`."""
    base = _without_bounds(hint)
    if typing.get_origin(base) is Literal:
        choices = list(map(str, typing.get_args(base)))
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if typing.get_origin(base) is list:
        return f"a list whose items are {rule(typing.get_args(base)[0])}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    text = names.get(base, "a mapping" if typing.get_origin(base) is dict else str(base))

    # The attributes of msgspec.Meta, in words.
    bounds = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
    limits = [
        f"{words} {getattr(meta, bound):,}"
        for meta in _metas(hint)
        for bound, words in bounds.items()
        if getattr(meta, bound) is not None
    ]
    return f"{text}, {' and '.join(limits)}" if limits else text


def suggestion(
    name: str,
    names: Mapping[str, Any] | Sequence[str],
    as_option: bool = False,
    fallback: str = "`--help` lists the options.",
) -> str:
    """Return " Did you mean ...?" for an unknown option or key.

    Args:
        name: Unknown option or key.
        names: Names of the options or keys.
        as_option: Whether to name the option as on the command line.
        fallback: Sentence to return if no name is similar.
    """
    plain = name.lstrip("-").replace("-", "_")
    common = COMMON_NAMES.get(plain, ())
    if isinstance(common, str):
        return f" {common}"

    # The names of other libraries come first, then typing errors, then parts of a name.
    matches = [other for other in common if other in names]
    matches += difflib.get_close_matches(plain, list(names), n=1)
    matches += [other for other in names if plain in other.split("_")]
    if not matches:
        return f" {fallback}"
    match = _dashed(matches[0]) if as_option else matches[0].rstrip("_")
    return f" Did you mean {match}?"


def _check_finite(name: str, value: Any, where: str) -> None:
    """Check that no number is NaN or infinite. msgspec accepts NaN without bounds.

    Raises:
        UserError: If a number is not finite.
    """
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, float) and not math.isfinite(item):
            raise UserError(f"`{name.rstrip('_')}`{where} must be a finite number, got {item}.")


# ------------------------------------------------------------------------------------------------
# type hints


def _groups(options: type) -> dict[str, type[OptionGroup]]:
    """Return the groups of an options class, {field: class}."""
    hints = typing.get_type_hints(options)
    groups = {}
    for item in dataclasses.fields(options):
        # The field `trainer` is a dictionary and no group.
        group = hints[item.name]
        if isinstance(group, type) and issubclass(group, OptionGroup):
            groups[item.name] = group
    return groups


def _hints(group: type) -> dict[str, Any]:
    """Return the type hints of a dataclass's fields, with their bounds."""
    hints = typing.get_type_hints(group, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(group) if f.init}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the hint itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _without_bounds(hint: Any) -> Any:
    """Return `int` for `Annotated[int, Meta(ge=1)]`, and other hints unchanged."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _metas(hint: Any) -> list[Meta]:
    """Return the bounds of `Annotated[int, Meta(ge=1)]`, [] for other hints."""
    return [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Meta)]


def _types(hint: Any) -> set[Any]:
    """Return the types that a hint allows: {list, NoneType} for `list[str] | None`."""
    bases = {_without_bounds(alternative) for alternative in _alternatives(hint)}
    return {typing.get_origin(base) or base for base in bases}


# ------------------------------------------------------------------------------------------------
# recipes and names


def _split_recipes(
    argv: Sequence[str], config_is_recipe: bool = True
) -> tuple[list[str], list[str]]:
    """Split the command line into its recipes and the other words.

    Recipes come before all options, or follow `--config` in commands without such an option.
    """
    recipes: list[str] = []
    words: list[str] = []
    before_options = True
    remaining = iter(argv)
    for word in remaining:
        # A .yaml file behind an option is the value of that option.
        before_options = before_options and not word.startswith("-")
        if config_is_recipe and word.partition("=")[0] == "--config":
            path = word.partition("=")[2] or next(remaining, "")
            if not path:
                raise UserError("`--config` needs a recipe: --config RECIPE.yaml.")
            recipes.append(path)
        elif before_options and word.endswith((".yaml", ".yml")):
            recipes.append(word)
        else:
            words.append(word)
    return recipes, words


def _read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a recipe: a file, or one of the package such as recipes/contrastive.yaml."""
    # A file of the user takes precedence over a bundled recipe of the same name.
    bundled = RECIPES.parent / path
    is_bundled = Path(path).parts[:1] == ("recipes",) and bundled.is_file()
    content = read_yaml(bundled if is_bundled and not Path(path).exists() else path)
    # An empty file, or one of comments only, has the content None.
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} must contain 'name: value' lines, got {content!r:.80}.")
    return content


def _trainer_option_names() -> list[str]:
    """Return the names of transformers.TrainingArguments, without importing transformers.

    The names are read from the source file: the import takes seconds, and `--help` must not fail
    if transformers is not installed.
    """
    try:
        spec = importlib.util.find_spec("transformers")
    except ImportError:
        return []
    if spec is None or spec.origin is None:
        return []
    source = Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8")
    body = source.partition("\nclass TrainingArguments")[2]
    return re.findall(r"^    (\w+): [^\n]*= field\(", body, re.MULTILINE)


def _wrapped(words: Sequence[str], width: int = 96) -> Iterator[str]:
    """Yield the words, separated by spaces, in lines of at most `width` characters."""
    line = ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    if line:
        yield line


def _dashed(name: str) -> str:
    """Return an option as typed; `for_`, a keyword of Python, loses its underscore."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def _spelled(item: dataclasses.Field) -> str:
    """Return an option as messages and the usage name it: SOURCE if positional, else --source."""
    return item.name.upper() if item.metadata.get("positional") else _dashed(item.name)


# Names in other libraries, other commands and earlier releases, with the options that they may
# stand for or with an answer. The first of the options that the command has is suggested.
COMMON_NAMES: dict[str, tuple[str, ...] | str] = {
    "batch_size": ("micro_batch_size", "per_device_train_batch_size", "batch_tokens"),
    "train_batch_size": ("micro_batch_size", "per_device_train_batch_size"),
    "lr": ("learning_rate",),
    "epochs": ("num_train_epochs",),
    "steps": ("max_steps",),
    "output_dir": ("output",),
    "output_file": ("output",),
    "data": ("train", "dataset", "texts", "pairs"),
    "dataset": ("train", "texts", "data"),
    "column": ("text_column",),
    "text_column": ("column",),
    "label": ("label_column",),
    "train_file": ("pairs", "texts", "dataset", "data"),
    "validation": ("validation_file", "validation_texts"),
    "validation_file": ("validation", "validation_texts"),
    "eval_file": ("validation_file", "validation", "validation_texts"),
    "model_name": ("model", "init_from"),
    "model_name_or_path": ("model", "init_from"),
    "texts_per_step": ("global_batch_size",),
    "tokens_per_step": ("global_batch_tokens",),
    "texts_per_batch": ("micro_batch_size", "batch_texts"),
    "tokens_per_batch": ("micro_batch_tokens",),
    "heldout": ("validation", "validation_file"),
    "measure": ("evaluate_only",),
    "resume": "Run the same command again to resume an interrupted run.",
    "resume_from_checkpoint": "Run the same command again to resume an interrupted run.",
    "overwrite_output_dir": "Existing files are never overwritten; remove the output directory.",
    "overwrite": "Existing files are never overwritten; remove the output directory.",
}
