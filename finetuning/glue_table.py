"""Results of `neobert glue`: the runs that a folder holds, and their table in the layout of the
paper's Table 3."""

import json
import logging
from pathlib import Path

from ..common.errors import UserError
from ..common.files import TEXT_LIMIT, read_json, write_json, write_text
from ..common.outputs import check_result_files, earlier_result
from ..common.published import GLUE, GLUE_NOTE
from ..common.results import environment, markdown_table
from .glue_tasks import HUB_DATA, TASKS
from .options import OPTIONS, RunSettings


logger = logging.getLogger("neobert.glue")
_RESULT = {"name", "task", "settings", "score", "selected", "last", "best_of_all_evaluations"}


def read_result(path):
    """The result in a result.json, or None where there is none that is complete."""
    if not path.is_file():
        return None
    try:
        result = read_json(path, 16 * TEXT_LIMIT)
    except UserError:
        result = None
    if isinstance(result, dict) and _RESULT <= result.keys():
        return result
    logger.warning("%s is not a complete result and is left out", path)
    return None


def finished_runs(output):
    """[(folder, result)] of all finished runs under `output`; a file that is not a result is
    reported and left out.

    Raises:
        UserError: `output` has a table that is not of this command, which `write_tables` would
            replace.
    """
    check_result_files(
        output,
        "glue",
        earlier_result(Path(output) / "table.json", "header", "measured"),
        "table.json",
        "table.md",
    )
    return [
        (path.parent, result)
        for path in sorted(Path(output).glob("*/*/*/result.json"))
        if (result := read_result(path))
    ]


def same_row(arguments, result, task_name):
    """Whether a result is in the row of the table that these arguments' runs are in, and of this
    task."""
    ours = {
        "name": arguments.name,
        "settings": {**vars(arguments), "lora": arguments.lora_settings()},
    }
    return result["task"] == task_name and _row_label(result) == _row_label(ours)


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

    A cell is the group of runs that differ in the seed alone: of all groups with the most seeds,
    the one with the best mean selection score. Averages are over all eight tasks, or absent.
    """
    groups = {}
    for _, result in finished_runs(output):
        settings = {name: value for name, value in result["settings"].items() if name != "seed"}
        groups.setdefault(
            (_row_label(result), result["task"], json.dumps(settings, sort_keys=True)), []
        ).append(result)
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
            "settings": {
                name: value for name, value in results[0]["settings"].items() if name != "seed"
            },
            "rows": results[0].get("rows"),
            "runs": [
                {
                    "seed": result["settings"]["seed"],
                    "score": result["score"],
                    "environment": result.get("environment"),
                }
                for result in results
            ],
        }
        cells = rows.setdefault(label, {})
        if task not in cells or (len(cell["seeds"]), selected) > (
            len(cells[task]["seeds"]),
            cells[task]["selected"],
        ):
            cells[task] = cell
    full = [{"name": label, "cells": cells} for label, cells in sorted(rows.items())]
    for row in full:
        complete = len(row["cells"]) == len(TASKS)
        row["average"] = (
            sum(cell["score"] for cell in row["cells"].values()) / len(TASKS) if complete else None
        )
    return full


def _cell(cell):
    if cell is None:
        return None
    text = f"{100 * cell['score']:.1f}"
    return text if cell["deviation"] is None else f"{text} ± {100 * cell['deviation']:.1f}"


def _departures(settings, task):
    """What of a run's settings is not that of recipes/glue.yaml, whose value follows in
    brackets."""

    def flat(values):
        lora = {f"lora_{name}": value for name, value in (values.get("lora") or {}).items()}
        return {**values, **lora, **values.get("trainer", {})}

    arguments, trainer = OPTIONS["glue"].read(
        ["--task", task.name, "--model", "model", *(["--lora"] if settings["lora"] else [])]
    )
    hyper = arguments.combinations(task)[0]
    protocol = flat(vars(RunSettings.of(arguments, trainer, task, hyper, None, revision=None)))
    # of every run, or said elsewhere
    own = (
        "task",
        "revision",
        "data",
        "rows",
        "lora",
        "start",
        "seed",
        "trainer",
    )
    known = {
        name: value
        for name, value in flat(settings).items()
        if name in protocol or name in settings.get("trainer", {})
    }
    changed = {
        name: value
        for name, value in known.items()
        if name not in own and value != protocol.get(name)
    }
    texts = [
        f"{name} {_short(value)} ({_short(protocol[name]) if name in protocol else 'not set'})"
        for name, value in changed.items()
    ]
    return texts + ["start from the model (the best MNLI run)"] * (
        task.from_mnli and not settings.get("start")
    )


def _short(value):
    return f"{value:g}" if isinstance(value, float) else str(value)


def _origins(row):
    """Lines of a list: how each cell of a measured row was made, and by which commands."""
    commands = {}
    for name, task in TASKS.items():
        if (cell := row["cells"].get(name)) is None:
            continue
        parts = [
            f"{task.title}: seed{'s' * (len(cell['seeds']) > 1)} "
            f"{', '.join(map(str, cell['seeds']))}"
        ]
        parts += (
            [f"rows: {', '.join(f'{count:,} {part}' for part, count in cell['rows'].items())}"]
            if cell["rows"]
            else []
        )
        departures = _departures(cell["settings"], task)
        parts.append(
            f"unlike the protocol: {', '.join(departures)}"
            if departures
            else "the protocol's settings"
        )
        yield f"- {row['name']}, {'; '.join(parts)}"
        for run in cell["runs"]:
            made = run["environment"] or {}
            text = (
                f"`{made['command']}`, commit {made['commit']}, {made['hardware']}"
                if made
                else "the command is not in result.json"
            )
            commands.setdefault(text, []).append(f"{task.title} {run['seed']}")
    yield from (f"- {row['name']}, {', '.join(runs)}: {text}" for text, runs in commands.items())


def write_tables(output):
    """Writes `output`/table.md and table.json in the layout of Table 3: published rows, then
    measured ones, and how these were made."""
    measured = collect(output)
    rows = [[name, "published", *scores] for name, scores in GLUE.items()]
    for row in measured:
        seeds = sorted({len(cell["seeds"]) for cell in row["cells"].values()})
        counts = (
            f"{seeds[0]} to {seeds[-1]} seeds"
            if len(seeds) > 1
            else f"{seeds[0]} seed{'s' if seeds[0] > 1 else ''}"
        )
        average = None if row["average"] is None else f"{100 * row['average']:.1f}"
        rows.append(
            [
                row["name"],
                f"measured, {counts}",
                *(_cell(row["cells"].get(task)) for task in TASKS),
                average,
            ]
        )
    header = ["model", "source", *(task.title for task in TASKS.values()), "avg"]
    note = (
        f"{GLUE_NOTE}\n\nRows marked 'measured' are dev scores x 100, mean ± standard deviation "
        "over seeds. The checkpoint was chosen on "
        "training rows that were held out, unless the row says 'selected on dev'. The average is "
        "given when all eight tasks are there."
    )
    if any("(data: " in row["name"] for row in measured):
        note += (
            " A row with 'data: NAME' was measured on other data in GLUE's schema: it is not a "
            "GLUE score, and not to be compared with the "
            "published rows."
        )
    origins = "\n".join(line for row in measured for line in _origins(row))
    about = (
        "The protocol is recipes/glue.yaml; its value is in brackets. A command has its task "
        "and seed before it."
    )
    text = f"# GLUE, dev sets\n\n{markdown_table(header, rows)}\n{note}\n"
    data = {
        "kind": "glue",
        "header": header,
        "rows": rows,
        "measured": measured,
        "note": note,
        "environment": environment(),
    }
    write_json(Path(output) / "table.json", data)
    write_text(
        Path(output) / "table.md",
        text + (f"\n## The measured rows\n\n{about}\n\n{origins}\n" if origins else ""),
    )
