"""Options of the commands: dataclasses filled from YAML recipes and the command line, with the allowed range of each in its field.

A recipe is a YAML file of `name: value` lines. What the command line gives wins. Options of transformers' Trainer go through as they are: under
`trainer:` in a recipe, by their names on the command line.
"""

import contextlib
import dataclasses
import difflib
import math
import os
import types
import typing
from dataclasses import MISSING, dataclass, field
from pathlib import Path

from .errors import UserError, listed, one_line
from .yaml_files import read_collection, read_scalar, read_yaml


def option(default=MISSING, help="", *, default_factory=MISSING, positional=False, **bounds):
    """A dataclass field with its help and its range.

    Args:
        default, default_factory: as of `dataclasses.field`.
        positional: given without a name, before all options.
        bounds: `least`, `most` (inclusive), `above`, `below` (exclusive), `choices`; of each item where the value is a list.
    """
    unknown = bounds.keys() - {"least", "most", "above", "below", "choices"}
    assert not unknown, f"option() has no {unknown}"
    metadata = {"help": help, "positional": positional, "bounds": bounds}
    return field(default=default, default_factory=default_factory, metadata=metadata)


@dataclass
class Arguments:
    """Base of the options of every command: the ranges in the fields are checked when an object is made."""

    def __post_init__(self):
        check_ranges(self)


def check_ranges(arguments, where="", values=None):
    """Raises UserError for the first field whose value is not finite or outside of the range in the field's metadata. None passes.

    Args:
        arguments: object of a dataclass.
        where: follows the field's name in the message.
        values: {field: value} to check in place of the object's own.
    """
    values = vars(arguments) if values is None else values
    bounds = {described.name: described.metadata.get("bounds", {}) for described in dataclasses.fields(arguments)}
    _check_values({name: values[name] for name in bounds if name in values}, bounds, where)


def _check_values(values, bounds, where=""):
    for name, value in values.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if problem := _problem(item, bounds.get(name, {})):
                raise UserError(f"{name}{where} must be {problem}, but {item!r} was given")


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
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return [kind for kind in alternatives if kind is not types.NoneType]


def _convert(hint, value):
    """`value`, text of the command line or a value of a recipe, as the type hint has it; ValueError if it cannot be."""
    if hint is typing.Any:
        return value
    kinds = _kinds(hint)
    plain = [typing.get_origin(kind) or kind for kind in kinds]
    if types.NoneType in typing.get_args(hint) and (value is None or value in ("None", "null")):
        return None
    if value is None:
        raise ValueError
    for kind, mark in ((dict, "{"), (list, "[")):
        if kind in plain and isinstance(value, str) and value.lstrip().startswith(mark):
            with contextlib.suppress(ValueError):  # else it is text, a pattern such as [ab]*.txt
                value = read_collection(value, kind)
    if plain == [list] and not isinstance(value, (list, dict)):
        value = [value]
    if isinstance(value, (list, dict)):
        if type(value) not in plain:
            raise ValueError
        *key, item = typing.get_args(kinds[plain.index(type(value))]) or (typing.Any,)
        if isinstance(value, list):
            return [_convert(item, inner) for inner in value]
        return {_convert(*key, name) if key else name: _convert(item, inner) for name, inner in value.items()}
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
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    words = []
    for kind in _kinds(hint):
        *_, inner = typing.get_args(kind) or (typing.Any,)
        each = f", each {_words(inner)}" if typing.get_origin(kind) in (list, dict) and inner is not typing.Any else ""
        words.append(names.get(typing.get_origin(kind) or kind, "text") + each)
    return " or ".join(words)


def read_arguments(dataclass_types, argv, prog=None, description=None, trainer=None):
    """Fills dataclasses from `argv`.

    Args:
        dataclass_types: every option belongs to exactly one of them.
        argv: positional values and YAML recipes (later ones win), then `--name value`.
        prog, description: for --help.
        trainer: {option: default} of transformers' TrainingArguments, where the command trains. Adds a dict to what is returned: these
            defaults, then `trainer:` of the recipes, then what the command line gives under Trainer's own names.
    Returns:
        list with one object for each type, and the dict of Trainer's options.
    Raises:
        UserError: an unknown option, a value of a wrong type or out of its range, a recipe that cannot be read.
    """
    fields = {f.name: f for type_ in dataclass_types for f in dataclasses.fields(type_) if f.init}
    hints = {name: hint for type_ in dataclass_types for name, hint in typing.get_type_hints(type_).items() if name in fields}
    trainer_hints = _trainer_hints() if trainer is not None else {}
    if {"-h", "--help"} & set(argv):
        _print_help(prog, description, fields, trainer)
        raise SystemExit(0)
    if "--version" in argv:
        from .. import __version__

        print(f"neobert {__version__}")
        raise SystemExit(0)
    values, recipes, rest = _positional(argv, [name for name, f in fields.items() if f.metadata.get("positional")])
    for_trainer = dict(trainer or {})
    for path in recipes:
        recipe = read_yaml(path)
        if recipe is not None and not isinstance(recipe, dict):
            held = {list: "a list", str: "text"}.get(type(recipe), "a single value")
            raise UserError(f"{path} must hold 'name: value' lines, but holds {held}")
        recipe = dict(recipe or {})
        section = recipe.pop("trainer", None) or {}
        if section and trainer is None:
            raise UserError(f"the recipe {path} has a section trainer, but this command has no Trainer")
        values |= typed(recipe, hints, f"in the recipe {path}")
        for_trainer |= typed(section, trainer_hints, f"under trainer: in the recipe {path}")
    given = typed(_options(rest, {**trainer_hints, **hints}), {**trainer_hints, **hints}, "on the command line")
    values |= {name: value for name, value in given.items() if name in hints}
    for_trainer |= {name: value for name, value in given.items() if name not in hints}
    lacking = [name for name, f in fields.items() if f.default is MISSING and f.default_factory is MISSING and name not in values]
    if lacking:
        raise UserError(f"give {listed(_spelled(name, fields) for name in lacking)}; --help lists the options")
    try:
        objects = [
            type_(**{f.name: values[f.name] for f in dataclasses.fields(type_) if f.init and f.name in values}) for type_ in dataclass_types
        ]
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    return objects if trainer is None else [*objects, for_trainer]


# For commands that have `compile`: Trainer's own compilation takes the complete model, whose kernels for packed batches it leaves out.
BLOCKS_ONLY = {"torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None}


# The ranges of Trainer's options that Trainer takes as they come and fails with later.
_TRAINER_BOUNDS = {
    "num_train_epochs": {"above": 0},
    "per_device_train_batch_size": {"least": 1},
    "per_device_eval_batch_size": {"least": 1},
    "gradient_accumulation_steps": {"least": 1},
    "dataloader_num_workers": {"least": 0},
    "dataloader_prefetch_factor": {"least": 1},
    "seed": {"least": 0, "below": 2**32},
    "data_seed": {"least": 0, "below": 2**32},
}


def check_trainer_options(options):
    """Raises UserError for options of Trainer whose numbers are not finite or out of range, and for trackers that are not there.

    Args:
        options: {option: value}.
    """
    from .trackers import check_trackers

    _check_values(options, _TRAINER_BOUNDS)
    if options.get("max_steps") == 0:
        raise UserError("max_steps must be at least 1, or -1 where num_train_epochs counts, but 0 was given")
    check_trackers(options.get("report_to"))


def training_arguments(output_dir, given, fixed, base=None):
    """transformers' TrainingArguments from a recipe's section and what the command sets itself.

    Without an accelerator it must be said that the CPU is used: torchrun's processes would not find each other.

    Args:
        output_dir: where checkpoints go.
        given: Trainer's options as `read_arguments` returns them.
        fixed: {option: value} that the command needs as they are.
        base: the class, by default TrainingArguments.
    Raises:
        UserError: one of `fixed` was given otherwise; values that transformers refuses, or its optimizer or schedule would.
    """
    import torch

    if base is None:
        from transformers import TrainingArguments as base
    given = dict(given)
    if token := given.pop("hub_token", None):
        os.environ["HF_TOKEN"] = token  # where huggingface_hub looks; Trainer writes its arguments into every checkpoint
    if "output_dir" in given:
        raise UserError("output_dir is set by this command; give --output in its place")
    for name, value in fixed.items():
        if name in given and given[name] != value:
            if name in BLOCKS_ONLY:
                raise UserError(f"{name} compiles the complete model, which then packs nothing; give --compile, which compiles its blocks")
            raise UserError(f"{name} is set to {value!r} by this command, but {given[name]!r} was given; leave it out")
    options = {"use_cpu": not torch.accelerator.is_available(), **given, **fixed}
    check_trainer_options(options)
    if options.get("fp16") and (options["use_cpu"] or not torch.accelerator.is_available()):
        raise UserError("fp16 needs a GPU or another accelerator, and there is none in use; leave it out, or give bf16")
    try:
        training = base(output_dir=str(output_dir), **options)
        _try_out(training)
        return training
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        raise error if isinstance(error, UserError) else UserError(f"Trainer's options: {one_line(error, 400)}") from error


def _try_out(training):
    """Makes the optimizer and the schedule of one parameter, so that the libraries check their values now."""
    import torch
    from transformers import Trainer

    from .optimisation import make_schedule

    if training.optim_target_modules is not None or "lomo" in training.optim:
        return  # made of the model itself
    kind, values = Trainer.get_optimizer_cls_and_kwargs(training)
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **{"weight_decay": training.weight_decay, **values})
    steps = training.max_steps if training.max_steps > 0 else 1000
    make_schedule(training.lr_scheduler_type, optimizer, training.get_warmup_steps(steps), steps, training.lr_scheduler_kwargs)


# What Trainer's options begin with that touch neither the numbers nor the order of the data: a continued run may change them.
_FREE = (
    "output_dir", "logging_", "log_", "include_", "save_", "enable_jit_checkpoint", "disable_tqdm", "report_to", "run_name", "project",
    "trackio_", "push_to_hub", "hub_", "dataloader_num", "dataloader_pin", "dataloader_persistent", "dataloader_prefetch", "ddp_",
    "local_rank", "use_cpu", "no_cuda", "gradient_checkpointing", "activation_checkpointing", "torch_empty_cache",
    "skip_memory_metrics", "do_", "per_device_eval_batch_size",
)  # fmt: skip


def number_options(options):
    """Those of Trainer's options that a run's numbers may depend on."""
    return {name: value for name, value in options.items() if not name.startswith(_FREE)}


def _trainer_hints():
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    return {f.name: hints[f.name] for f in dataclasses.fields(TrainingArguments) if f.init}


def _spelled(name, fields):
    """An option as the command line has it."""
    described = fields.get(name)
    return name.upper() if described is not None and described.metadata.get("positional") else f"--{name.replace('_', '-')}"


def _positional(argv, names):
    """({positional name: value}, recipes, the rest) of a command line."""
    argv, values, recipes = list(argv), {}, []
    names = list(names)
    while argv and not argv[0].startswith("-"):
        value = argv.pop(0)
        if not value:
            raise UserError("an argument is empty; --help lists what is expected")
        if names and Path(value).suffix not in (".yaml", ".yml"):
            values[names.pop(0)] = value
        else:
            recipes.append(value)
    return values, recipes, argv


def _options(argv, hints):
    """{option: text, list of texts, or True} of `--name value`, `--name=value`, `--name a b` for lists, and `--name` for switches."""
    values, name = {}, None
    for argument in argv:
        if argument.startswith("--") and len(argument) > 2:
            spelled, equals, value = argument[2:].partition("=")
            name = spelled.replace("-", "_")
            if name not in hints:
                raise UserError(f"unknown argument {argument!r}{nearest(name, hints, '--')}")
            values[name] = [value] if equals else []
        elif name is None:
            raise UserError(f"{argument!r} was given where an option, --name, was expected; --help lists them")
        else:
            values[name].append(argument)
    for name, given in values.items():
        kinds = [typing.get_origin(kind) or kind for kind in _kinds(hints[name])]
        if not given and bool not in kinds:
            raise UserError(f"--{name.replace('_', '-')} needs a value, {_words(hints[name])}")
        if len(given) > 1 and list not in kinds:
            raise UserError(f"--{name.replace('_', '-')} takes one value, but {' '.join(given)!r} was given")
        if not given:
            values[name] = True
        elif list not in kinds or (len(given) == 1 and (str in kinds or given[0].startswith("["))):
            values[name] = given[0]
    return values


def nearest(name, names, dashes="", otherwise="--help lists the options"):
    """The end of a message about an unknown name: `; did you mean ...?`, or `otherwise` where none of `names` is like it."""
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
            raise UserError(f"unknown key {name!r} {where}{nearest(name, hints, otherwise=otherwise)}")
        try:
            values[name] = _convert(hints[name], value)
        except (ValueError, TypeError, OverflowError):
            raise UserError(f"{name} {where} must be {_words(hints[name])}, but {value!r} was given") from None
    return values


def _print_help(prog, description, fields, trainer):
    """The options with their ranges and defaults."""
    positional = [_spelled(name, fields) for name, f in fields.items() if f.metadata.get("positional")]
    print(" ".join(["usage:", prog or "", *positional, "[RECIPE.yaml]", "[--option value ...]"]))
    if description:
        print(f"\n{description}")
    words = {"least": "at least", "most": "at most", "choices": "one of"}
    print()
    for name, described in fields.items():
        default = described.default if described.default_factory is MISSING else described.default_factory()
        parts = [described.metadata.get("help", "")] if described.metadata.get("help") else []
        for bound, limit in described.metadata.get("bounds", {}).items():
            parts.append(f"{words.get(bound, bound)} {', '.join(map(str, limit)) if bound == 'choices' else limit}")
        if default is MISSING and not described.metadata.get("positional"):
            parts.append("required")
        shown = "" if default in (MISSING, None) else f" (default: {default})"
        print(f"  {_spelled(name, fields)}\n      {'; '.join(parts)}{shown}")
    if trainer is not None:
        print("\nand every option of transformers.TrainingArguments" + ("; those with other defaults here:\n" if trainer else ""))
        print("\n".join(f"  --{name.replace('_', '-')} (default: {value})" for name, value in trainer.items()))
