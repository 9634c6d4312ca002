"""`neobert glue`: the paper's GLUE protocol (PAPER section 6) for any encoder, full or LoRA, with several seeds, and its table.

    neobert glue --task rte --model chandar-lab/NeoBERT
    neobert glue --task all --model bert-base-uncased --grid --seeds 1,2,3
    neobert glue --task sst2 --data my_folder --model my_model --lora

Every finished run is a folder OUTPUT/<name>/<task>/<run>/ with result.json; the same command again skips it and continues an unfinished one
from its best checkpoint. OUTPUT/table.md and table.json are made from all result.json files under OUTPUT.
"""

import hashlib
import itertools
import json
import logging
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers.utils import logging as transformers_logging

from ..common.errors import UserError, require
from ..common.files import check_folder, write_json, write_text
from ..common.identity import weights_digest
from ..common.loading import RECIPES, check_vocabulary, load_tokenizer
from ..common.recipe import read_recipe
from ..common.results import environment, markdown_table
from .glue_tasks import HUB_DATA, PUBLISHED, PUBLISHED_NOTE, TASKS, load_task, metric_function, parse_tasks, rows_digest


logger = logging.getLogger("neobert.glue")
RECIPE = RECIPES / "glue.yaml"
_HYPER_PARAMETERS = ("batch_size", "learning_rate", "weight_decay")


@dataclass
class GlueRecipe:
    """Options of `neobert glue`; recipes/glue.yaml holds the paper's values."""

    task: str = field(metadata={"help": "all, or a comma-separated list of mnli, qnli, qqp, rte, sst2, mrpc, cola, stsb"})
    model: str = field(metadata={"help": "model folder, or name on the Hub; any encoder"})
    data: str = field(default=HUB_DATA, metadata={"help": "name on the Hub, or a folder with <task>/<split>.jsonl|csv|tsv|parquet"})
    output: str = field(default="runs/glue", metadata={"help": "folder of the runs and the table"})
    name: str | None = field(default=None, metadata={"help": "row of the table; default: last part of --model"})
    tokenizer: str | None = field(default=None, metadata={"help": "folder or Hub name; default: the model's"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run Python code that the model brings (NeoBERT itself needs none)"})
    seeds: str = field(default="1,2,3", metadata={"help": "comma-separated; the table gives mean and standard deviation"})
    grid: bool = field(default=False, metadata={"help": "search grid_values with the first seed, then run the best with all seeds"})
    start: str = field(
        default="auto",
        metadata={"help": "RTE, STS-B, MRPC, QNLI start from: auto (best MNLI run if there is one), mnli (required), none"},
    )
    selection: str = field(default="heldout", metadata={"help": "what stops and selects: heldout (training rows) or dev (as published)"})
    heldout_fraction: float = 0.1
    heldout_rows: int = 2000
    metric: str = field(
        default="mean",
        metadata={"help": "what stops and selects: mean of the task's metrics (as in the paper), or the name of one of them"},
    )
    preset: str = "neobert-4096"
    batch_size: int | None = field(default=None, metadata={"help": "of all processes together; default: the preset's"})
    learning_rate: float | None = field(default=None, metadata={"help": "default: the preset's, or lora_learning_rate"})
    weight_decay: float | None = field(default=None, metadata={"help": "default: the preset's"})
    epochs: float = 10.0
    warmup: float = 0.06
    patience: int = 15
    max_eval_interval: int = 500
    evaluations_per_epoch: int = 10
    classifier_pooling: str | None = field(default=None, metadata={"help": "cls or mean, for NeoBERT; default: what its config.json says"})
    head_dropout: float = 0.1
    max_length: int = 512
    lora: bool = field(default=False, metadata={"help": "adapt with LoRA instead of training all weights"})
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_targets: str = field(default="auto", metadata={"help": "comma-separated, all-linear, or auto: qkv,wo,w12,w3 for NeoBERT"})
    lora_learning_rate: float = 3e-4
    max_train_samples: int | None = field(default=None, metadata={"help": "a random subset, for a quick look"})
    max_eval_samples: int | None = None
    eval_batch_size: int = 64
    bf16: bool = field(default=False, metadata={"help": "bfloat16 mixed precision"})
    report_to: str = field(default="none", metadata={"help": "tensorboard, wandb, trackio, none"})
    keep_models: str = field(default="best", metadata={"help": "best (of each task), all, or none (MNLI's best is always kept)"})
    presets: dict | None = None
    grid_values: dict | None = None
    lora_grid_values: dict | None = None

    def __post_init__(self):
        self.name = self.name or Path(str(self.model).rstrip("/")).name or "model"
        self.seed_list = _whole_numbers(self.seeds)
        choices = {"selection": ("heldout", "dev"), "start": ("auto", "mnli", "none"), "keep_models": ("best", "all", "none")}
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise UserError(f"{key} must be one of {', '.join(allowed)}, but {getattr(self, key)!r} was given")
        for key in (
            "epochs",
            "patience",
            "max_eval_interval",
            "evaluations_per_epoch",
            "heldout_rows",
            "max_length",
            "eval_batch_size",
            "lora_learning_rate",
        ):
            if getattr(self, key) <= 0:
                raise UserError(f"{key} must be above 0, but {getattr(self, key)!r} was given")
        if self.max_length < 8:
            raise UserError(f"max_length must be at least 8 tokens (a pair has 3 special ones), but {self.max_length} was given")
        if (self.weight_decay or 0) < 0:
            raise UserError(f"weight_decay must be at least 0, but {self.weight_decay} was given")
        for key in ("batch_size", "learning_rate", "max_train_samples", "max_eval_samples"):
            if getattr(self, key) is not None and getattr(self, key) <= 0:
                raise UserError(f"{key} must be above 0, but {getattr(self, key)!r} was given")
        for key in ("warmup", "head_dropout", "heldout_fraction"):
            if not 0 <= getattr(self, key) < 1:
                raise UserError(f"{key} must be from 0 to below 1, but {getattr(self, key)!r} was given")
        if self.preset not in (self.presets or {}):
            raise UserError(f"there is no preset {self.preset!r}; choose from {', '.join(self.presets or {}) or 'none'}")

    def check_metric(self, task):
        """Raises UserError when `metric` is not one of `task`."""
        if self.metric != "mean" and self.metric not in task.metrics:
            metric_function(self.metric)  # names those that exist
            raise UserError(f"{task.name} has no metric {self.metric!r}; choose mean, or from {', '.join(task.metrics)}")

    def lora_settings(self):
        if not self.lora:
            return None
        return {"rank": self.lora_rank, "alpha": self.lora_alpha, "dropout": self.lora_dropout, "targets": self.lora_targets}

    def combinations(self, task):
        """Hyper-parameters of `task`: one dictionary, or with --grid all of them. What was given by hand counts everywhere."""
        values = dict(self.presets[self.preset].get(task.name) or {})
        if self.lora:
            values["learning_rate"] = self.lora_learning_rate
        axes = {key: [values[key]] if key in values else [] for key in _HYPER_PARAMETERS}
        if self.grid:
            axes |= {key: list(found) for key, found in (self.lora_grid_values if self.lora else self.grid_values).items()}
        for key in _HYPER_PARAMETERS:
            given = getattr(self, key)
            if given is not None:
                axes[key] = [given]
            if not axes[key]:
                raise UserError(f"preset {self.preset!r} has no {key} for {task.name}; give --{key}")
            if not all(isinstance(value, (int, float)) for value in axes[key]):
                raise UserError(f"{key} of {task.name} must be a number, but {axes[key]!r} was given (YAML needs the dot in 1.0e-5)")
        return [dict(zip(_HYPER_PARAMETERS, found)) for found in itertools.product(*(axes[key] for key in _HYPER_PARAMETERS))]


def _whole_numbers(text):
    try:
        numbers = [int(part) for part in str(text).split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0 or max(numbers) >= 2**32:
        raise UserError(f"seeds must be different whole numbers from 0 to {2**32 - 1}, such as 1,2,3, but {text!r} was given")
    return numbers


def read_arguments(argv):
    """GlueRecipe from recipes/glue.yaml, then YAML files and `--key value` of `argv`."""
    return read_recipe([GlueRecipe], [str(RECIPE), *argv], prog="neobert glue")[0]


# --------------------------------------------------------------------------------------------------------------------- runs


def slug(name):
    """`name` as a folder name."""
    return re.sub(r"[^\w.-]+", "-", name)


def run_folder(recipe, settings):
    """OUTPUT/<name>/<task>/<readable part and a digest of all settings>."""
    digest = hashlib.sha256(f"{settings.key()}{settings.seed}".encode()).hexdigest()[:8]
    lora = f"_lora{settings.lora['rank']}" if settings.lora else ""
    run = f"bs{settings.batch_size}_lr{settings.learning_rate:g}_wd{settings.weight_decay:g}{lora}_seed{settings.seed}_{digest}"
    return Path(recipe.output) / slug(recipe.name) / settings.task / run


_RESULT = {"name", "task", "settings", "score", "selected", "last", "best_of_all_evaluations"}


def _read_result(path):
    """The result in a result.json, or None where there is none that is whole."""
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text())
    except ValueError:
        result = None
    if isinstance(result, dict) and _RESULT <= result.keys():
        return result
    logger.warning("%s is no whole result and is left out", path)
    return None


def finished_runs(output):
    """[(folder, result)] of all finished runs under `output`; a file that is no result is reported and left out."""
    return [(path.parent, result) for path in sorted(Path(output).glob("*/*/*/result.json")) if (result := _read_result(path))]


def _same_row(recipe, result, task_name):
    """Whether a result is in the row of the table that this recipe's runs are in, and of this task."""
    ours = {"name": recipe.name, "settings": {**vars(recipe), "lora": recipe.lora_settings()}}
    return result["task"] == task_name and _row_label(result) == _row_label(ours)


def mnli_start(recipe, revision):
    """(run, folder of its weights) of the best finished MNLI run of this model under this protocol, or None.

    Best by the score that selected its checkpoint, over seeds and grid.
    """
    found = [
        (result["selected"]["score"], folder)
        for folder, result in finished_runs(recipe.output)
        if _same_row(recipe, result, "mnli") and result["settings"]["revision"] == revision and (folder / "best" / "config.json").is_file()
    ]
    if not found:
        return None
    folder = max(found)[1]
    return folder.name, folder / "best"


def _start(recipe, task, revision):
    """(what the run starts from for its settings, model to load)."""
    if not task.from_mnli or recipe.start == "none":
        return None, recipe.model
    found = mnli_start(recipe, revision)
    if found is not None:
        logger.warning("%s starts from the best MNLI run, %s", task.name, found[0])
        return found[0], str(found[1])
    if recipe.start == "mnli":
        raise UserError(
            f"{task.name} was asked to start from MNLI, but {recipe.output} has no finished MNLI run of {recipe.name} with these settings; "
            "run --task mnli first, or use --start none"
        )
    logger.warning(
        "%s starts from %s itself: there is no finished MNLI run under %s (the paper starts from MNLI; run --task mnli first)",
        task.name,
        recipe.model,
        recipe.output,
    )
    return None, recipe.model


def _settings(recipe, task, revision, seed, hyper, start, rows=""):
    from .glue_run import RunSettings

    same = ("epochs", "warmup", "patience", "max_eval_interval", "max_length", "head_dropout", "selection", "heldout_fraction")
    same += ("evaluations_per_epoch", "classifier_pooling", "heldout_rows", "max_train_samples", "max_eval_samples", "bf16", "metric")
    shared = {key: getattr(recipe, key) for key in same}
    shared |= {"tokenizer": recipe.tokenizer, "data": recipe.data, "rows": rows, "lora": recipe.lora_settings()}
    return RunSettings(task=task.name, revision=revision, seed=seed, start=start, **hyper, **shared)


def run_task(recipe, task, splits, tokenizer, revision):
    """All runs of one task; returns the results of the chosen hyper-parameters, one a seed."""
    from .glue_run import fine_tune

    start, model = _start(recipe, task, revision)
    rows = rows_digest(splits)

    def run(hyper, seed):
        settings = _settings(recipe, task, revision, seed, hyper, start, rows)
        folder = run_folder(recipe, settings)
        if (result := _read_result(folder / "result.json")) is not None:
            logger.warning("%s is finished already: %s", task.name, folder)
            return result
        logger.warning("%s: %s", task.name, folder.name)
        result = fine_tune(settings, splits, model, tokenizer, folder, recipe)
        logger.warning("%s: dev %.2f, last evaluation %.2f", folder.name, 100 * result["score"], 100 * result["last"]["score"])
        _prune(recipe, task)
        return result

    combinations = recipe.combinations(task)
    chosen = combinations[0]
    if len(combinations) > 1:
        tried = [run(hyper, recipe.seed_list[0]) for hyper in combinations]
        chosen = combinations[max(range(len(tried)), key=lambda i: tried[i]["selected"]["score"])]
        logger.warning("%s: best of %d combinations: %s", task.name, len(combinations), chosen)
    return [run(chosen, seed) for seed in recipe.seed_list]


def _prune(recipe, task):
    """Deletes weights that `keep_models` does not keep; results and adapters stay."""
    if recipe.keep_models == "all":
        return
    runs = [
        (result["selected"]["score"], folder) for folder, result in finished_runs(recipe.output) if _same_row(recipe, result, task.name)
    ]
    runs = sorted(run for run in runs if (run[1] / "best").is_dir())
    kept = runs[-1:] if recipe.keep_models == "best" or task.name == "mnli" else []
    for _, folder in runs:
        if folder not in [run[1] for run in kept]:
            shutil.rmtree(folder / "best", ignore_errors=True)


# -------------------------------------------------------------------------------------------------------------------- table


def _row_label(result):
    settings = result["settings"]
    notes = []
    if settings.get("data", HUB_DATA) != HUB_DATA:
        notes.append(f"data: {Path(settings['data']).name}")
    if settings["lora"]:
        notes.append(f"LoRA r={settings['lora']['rank']}")
    if settings["selection"] == "dev":
        notes.append("selected on dev")
    if settings.get("metric", "mean") != "mean":
        notes.append(f"selected by {settings['metric']}")
    if settings["max_train_samples"]:
        notes.append(f"{settings['max_train_samples']} training rows")
    if settings.get("max_eval_samples"):
        notes.append(f"{settings['max_eval_samples']} dev rows")
    return result["name"] + (f" ({', '.join(notes)})" if notes else "")


def _mean_and_deviation(values):
    """Mean and sample standard deviation (None for a single value)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5


def collect(output):
    """Measured rows: [{"name", "cells": {task: {...}}, "average"}], names in alphabetical order.

    A cell is the group of runs that differ in the seed alone: of all groups with the most seeds, the one with the best mean selection score.
    Averages are over all eight tasks, or absent.
    """
    groups = {}
    for _, result in finished_runs(output):
        settings = {name: value for name, value in result["settings"].items() if name != "seed"}
        groups.setdefault((_row_label(result), result["task"], json.dumps(settings, sort_keys=True)), []).append(result)
    rows = {}
    for (label, task, _), results in sorted(groups.items(), key=lambda item: item[0]):
        results = sorted(results, key=lambda result: result["settings"]["seed"])
        mean, deviation = _mean_and_deviation([result["score"] for result in results])
        selected = _mean_and_deviation([result["selected"]["score"] for result in results])[0]
        cell = {
            "score": mean,
            "deviation": deviation,
            "seeds": [result["settings"]["seed"] for result in results],
            "last": _mean_and_deviation([result["last"]["score"] for result in results])[0],
            "best_of_all_evaluations": max(result["best_of_all_evaluations"] for result in results),
            "selected": selected,
            "settings": {name: value for name, value in results[0]["settings"].items() if name != "seed"},
            "rows": results[0].get("rows"),
            "runs": [
                {"seed": result["settings"]["seed"], "score": result["score"], "environment": result.get("environment")}
                for result in results
            ],
        }
        cells = rows.setdefault(label, {})
        if task not in cells or (len(cell["seeds"]), selected) > (len(cells[task]["seeds"]), cells[task]["selected"]):
            cells[task] = cell
    full = [{"name": label, "cells": cells} for label, cells in sorted(rows.items())]
    for row in full:
        complete = len(row["cells"]) == len(TASKS)
        row["average"] = sum(cell["score"] for cell in row["cells"].values()) / len(TASKS) if complete else None
    return full


def _cell(cell):
    if cell is None:
        return None
    text = f"{100 * cell['score']:.1f}"
    return text if cell["deviation"] is None else f"{text} ± {100 * cell['deviation']:.1f}"


def _departures(settings, task):
    """What of a run's settings is not that of recipes/glue.yaml, whose value follows in brackets."""

    def flat(values):
        return {**values, **{f"lora_{name}": value for name, value in (values.get("lora") or {}).items()}}

    recipe = read_arguments(["--task", task.name, "--model", "model", *(["--lora"] if settings["lora"] else [])])
    protocol = flat(vars(_settings(recipe, task, None, None, recipe.combinations(task)[0], None)))
    own = ("task", "revision", "data", "rows", "lora", "start")  # of every run, or said elsewhere
    changed = {name: value for name, value in flat(settings).items() if name not in own and value != protocol.get(name, value)}
    texts = [f"{name} {_short(value)} ({_short(protocol[name])})" for name, value in changed.items()]
    return texts + ["start from the model (the best MNLI run)"] * (task.from_mnli and not settings.get("start"))


def _short(value):
    return f"{value:g}" if isinstance(value, float) else str(value)


def _origins(row):
    """Lines of a list: how each cell of a measured row was made, and by which commands."""
    commands = {}
    for name, task in TASKS.items():
        if (cell := row["cells"].get(name)) is None:
            continue
        parts = [f"{task.title}: seed{'s' * (len(cell['seeds']) > 1)} {', '.join(map(str, cell['seeds']))}"]
        parts += [f"rows: {', '.join(f'{count:,} {part}' for part, count in cell['rows'].items())}"] if cell["rows"] else []
        departures = _departures(cell["settings"], task)
        parts.append(f"unlike the protocol: {', '.join(departures)}" if departures else "the protocol's settings")
        yield f"- {row['name']}, {'; '.join(parts)}"
        for run in cell["runs"]:
            made = run["environment"] or {}
            text = f"`{made['command']}`, commit {made['commit']}, {made['hardware']}" if made else "the command is not in result.json"
            commands.setdefault(text, []).append(f"{task.title} {run['seed']}")
    yield from (f"- {row['name']}, {', '.join(runs)}: {text}" for text, runs in commands.items())


def write_tables(output):
    """Writes `output`/table.md and table.json in the layout of Table 3: published rows, then measured ones, and how these were made."""
    measured = collect(output)
    rows = [[name, "published", *scores] for name, *scores in PUBLISHED]
    for row in measured:
        seeds = sorted({len(cell["seeds"]) for cell in row["cells"].values()})
        counts = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seed{'s' if seeds[0] > 1 else ''}"
        average = None if row["average"] is None else f"{100 * row['average']:.1f}"
        rows.append([row["name"], f"measured, {counts}", *(_cell(row["cells"].get(task)) for task in TASKS), average])
    header = ["model", "source", *(task.title for task in TASKS.values()), "avg"]
    note = (
        f"{PUBLISHED_NOTE}\n\nRows marked 'measured' are dev scores x 100, mean ± standard deviation over seeds. The checkpoint was chosen on "
        "training rows that were held out, unless the row says 'selected on dev'. The average is given when all eight tasks are there."
    )
    if any("(data: " in row["name"] for row in measured):
        note += (
            " A row with 'data: NAME' was measured on other data in GLUE's schema: it is no GLUE score, and not to be compared with the "
            "published rows."
        )
    origins = "\n".join(line for row in measured for line in _origins(row))
    about = "The protocol is recipes/glue.yaml; its value stands in brackets. A command has its task and seed before it."
    text = f"# GLUE, dev sets\n\n{markdown_table(header, rows)}\n{note}\n"
    write_text(Path(output) / "table.md", text + (f"\n## The measured rows\n\n{about}\n\n{origins}\n" if origins else ""))
    data = {"kind": "glue", "header": header, "rows": rows, "measured": measured, "note": note, "environment": environment()}
    write_json(Path(output) / "table.json", data)


def check(recipe, tasks):
    """Everything that can be wrong is found here, before any training. Returns tokenizer, revision and {task: splits}."""
    from ..common.lora import head_modules, lora_config
    from ..common.trackers import check_trackers
    from .glue_run import check_sizes, load_classifier

    check_folder(recipe.output, "output")
    for task in tasks:
        recipe.combinations(task)
        recipe.check_metric(task)
    check_trackers(recipe.report_to)
    tokenizer_source = recipe.tokenizer or recipe.model
    model, new = load_classifier(recipe.model, tasks[0], recipe.head_dropout, recipe.trust_remote_code, recipe.classifier_pooling)
    tokenizer = load_tokenizer(tokenizer_source)
    check_vocabulary(tokenizer, model, recipe.model)
    if new:
        logger.warning("%s has no head for this task; new and random: %s", recipe.model, ", ".join(new))
    if recipe.lora:
        lora_config(model, **recipe.lora_settings(), modules_to_save=head_modules(model, new))
    del model
    revision = weights_digest(recipe.model)
    if recipe.start == "mnli" and TASKS["mnli"] not in tasks:
        for task in tasks:
            _start(recipe, task, revision)
    data = {task.name: load_task(task, recipe.data) for task in tasks}
    for task in tasks:
        sizes = {found["batch_size"] for found in recipe.combinations(task)}
        check_sizes(task, len(data[task.name]["train"]["label"]), sizes, recipe)
    _check_same_origin(recipe, revision, {name: rows_digest(splits) for name, splits in data.items()})
    return tokenizer, revision, data


def _check_same_origin(recipe, revision, rows):
    """Raises UserError when `output` has runs of this name from other weights, or of these tasks from other rows: a row holds one model.

    Args:
        rows: {task: digest of its rows}.
    """
    for folder, result in finished_runs(recipe.output):
        settings = result["settings"]
        if result["name"] == recipe.name and settings.get("revision", revision) != revision:
            raise UserError(
                f"{folder.parent.parent} holds runs of other weights ({result.get('model')}) under the name {recipe.name!r}; "
                "give this model another --name, or choose another --output"
            )
        task = result["task"]
        if _same_row(recipe, result, task) and settings.get("rows") and settings["rows"] != rows.get(task, settings["rows"]):
            raise UserError(
                f"the rows of {task} in {recipe.data} are not those of the finished runs in {folder.parent}; choose another --output or --name"
            )


def main(argv=None):
    """Runs `neobert glue`; bad input is a UserError before any work."""
    recipe = read_arguments(sys.argv[1:] if argv is None else argv)
    require("train", "accelerate", "datasets")
    require("eval", "sklearn", "scipy")
    from .glue_run import process_state

    main_process = process_state().is_main_process
    logging.basicConfig(format="%(message)s")
    logger.disabled = not main_process
    tasks = parse_tasks(recipe.task)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its own report on new heads; `check` says it in one line
    try:
        tokenizer, revision, data = check(recipe, tasks)
        for task in tasks:
            run_task(recipe, task, data[task.name], tokenizer, revision)
            if main_process:
                write_tables(recipe.output)
    finally:
        transformers_logging.set_verbosity(verbosity)
    if main_process:
        print((Path(recipe.output) / "table.md").read_text())
    return 0
