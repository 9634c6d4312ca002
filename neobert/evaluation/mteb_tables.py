"""Tables of `neobert mteb`: benchmarks, single tasks, and settings."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import mteb

from ..common.files import write_text
from ..common.published import MTEB, MTEB_NOTE, MTEB_TYPES
from ..common.results import earlier_result
from ..common.tables import markdown_table
from ..embeddings.instructions import TEMPLATE
from .options import BENCHMARKS, PAPER_BENCHMARK


# Keys by which a result file of `neobert mteb` is recognized.
_RESULT_KEYS = (
    "name",
    "model",
    "fingerprint",
    "scores",
    "types",
    "instructions",
    "dtype",
    "max_length",
    "environment",
)


def averages(
    scores: Mapping[str, float | None], types: Mapping[str, str]
) -> dict[str, float | None]:
    """Return the means that MTEB's leaderboard shows, in percent.

    Args:
        scores: Scores in percent, {task: score}; None for a task that failed.
        types: Types of the tasks, {task: type}.

    Returns:
        "tasks", the mean over all tasks; "types", the mean over the means of the types; and the
        mean of each type. A mean is None if one of its tasks has no score.
    """
    # Types have different numbers of tasks. "types" gives each type the same weight.
    groups: dict[str, list[float | None]] = {}
    for task, score in scores.items():
        groups.setdefault(types[task], []).append(score)
    means = {task_type: _mean(group) for task_type, group in groups.items()}
    return {"tasks": _mean(scores.values()), "types": _mean(means.values()), **means}


def _mean(scores: Iterable[float | None]) -> float | None:
    """Return the mean of scores, or None if a score is missing."""
    values = list(scores)
    return None if None in values else fmean(values)  # type: ignore[arg-type]


def _cell(value: float | None, digits: int = 1) -> str | None:
    """Return the text of a table cell, or None for a missing value."""
    return None if value is None else f"{value:.{digits}f}"


def benchmark_table(name: str, runs: Mapping[str, dict[str, Any]]) -> str:
    """Return the Markdown table of a benchmark, with one row per run that has all of its tasks.

    The table of the paper's benchmark starts with the published scores. The result is "" if no run
    has all tasks.

    Args:
        name: Name of the benchmark.
        runs: Results by name, from `read_runs`.
    """
    # Columns are in the order of the paper's table, without the types that the benchmark lacks.
    tasks = {task.metadata.name: task.metadata.type for task in mteb.get_benchmark(name).tasks}
    task_types = [task_type for task_type in MTEB_TYPES if task_type in tasks.values()]
    rows: list[list[str | None]] = []
    for model, run in runs.items():
        # A run without all tasks of the benchmark has no comparable mean.
        if run["scores"].keys() >= tasks.keys():
            means = averages({task: run["scores"][task] for task in tasks}, tasks)
            cells = [_cell(means[column]) for column in (*task_types, "tasks", "types")]
            rows.append([model, "measured", *cells])
    if not rows:
        return ""

    header = ["model", "source", *(MTEB_TYPES[task_type] for task_type in task_types)]
    header += ["mean of tasks", "mean of types"]

    # The paper contains no mean of types, so the last cell of its rows is empty.
    if name != PAPER_BENCHMARK:
        return markdown_table(header, rows)
    published = [[model, "published", *map(_cell, values), None] for model, values in MTEB.items()]
    return f"{markdown_table(header, published + rows)}\n{MTEB_NOTE}"


def task_table(runs: Mapping[str, dict[str, Any]]) -> str:
    """Return the Markdown table of all tasks: one column per run, and the mean over all tasks."""
    types: dict[str, str] = {}
    for run in runs.values():
        # Runs may have different tasks, and the table contains the tasks of all runs.
        types |= {task: run["types"][task] for task in run["scores"]}
    scores = {name: [run["scores"].get(task) for task in types] for name, run in runs.items()}

    rows: list[list[str | None]] = []
    for index, (task, task_type) in enumerate(types.items()):
        rows.append([task, task_type, *(_cell(values[index], 2) for values in scores.values())])

    # A run without all tasks of the table has no comparable mean.
    means = [_cell(_mean(values), 2) for values in scores.values()]
    rows.append([f"**mean over {len(types)} tasks**", None, *means])
    return markdown_table(["task", "type", *runs], rows)


def settings_table(runs: Mapping[str, dict[str, Any]]) -> str:
    """Return the Markdown table of the settings that the scores of every run depend on."""
    rows = []
    for name, run in runs.items():
        # Results of earlier versions do not contain the template, which had the default value.
        template = repr(run.get("instruction_template", TEMPLATE))
        dtype = run["environment"]["dtype"]
        rows.append([name, run["max_length"], run["instructions"], dtype, template])
    return markdown_table(["model", "max_length", "instructions", "dtype", "template"], rows)


def read_run(path: Path | str) -> dict[str, Any] | None:
    """Return the result of `neobert mteb` in a JSON file, or None for any other file."""
    return earlier_result(path, *_RESULT_KEYS)


def read_runs(folder: Path | str) -> dict[str, dict[str, Any]]:
    """Return all results of `neobert mteb` in a directory, {name: result}."""
    runs = {}
    # Sorted names give the tables the same order on every file system.
    for path in sorted(Path(folder).glob("*.json")):
        run = read_run(path)
        if run:
            runs[run["name"]] = run
    return runs


def write_tables(folder: Path | str) -> None:
    """Write table.md from all results in a directory."""
    # Benchmarks come first, and a benchmark that no run has completed has no table.
    runs = read_runs(folder)
    parts = ["# MTEB"]
    for name in BENCHMARKS:
        table = benchmark_table(name, runs)
        if table:
            parts += [f"## {name}", table]
    parts += ["## Tasks", "Main score of each task in percent."]
    parts += [task_table(runs), "## Settings", settings_table(runs)]
    write_text(Path(folder) / "table.md", "\n\n".join(part.strip() for part in parts) + "\n")
