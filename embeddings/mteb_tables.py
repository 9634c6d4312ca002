"""Tables of `neobert mteb`: the layout of the paper's Table 4, each task, and the settings of the
measured rows."""

import functools
from pathlib import Path

import mteb

from ..common.files import write_text
from ..common.published import MTEB, MTEB_NOTE, MTEB_TYPES
from ..common.results import earlier_result, markdown_table
from .instructions import TEMPLATE
from .options import PAPER_BENCHMARK


_RESULT = ("name", "scores", "types", "averages", "instructions", "max_length", "environment")
NOTE = (
    "Rows of other tasks share the layout alone: their scores are not those of MTEB(eng, v1), and "
    "not to be compared with published rows. "
)


def averages(scores, types):
    """Mean over all tasks, and per type; scores in percent.

    Args:
        scores: {task: score}; a task that failed has None.
        types: {task: type}.
    Returns:
        dict type -> mean, with "all" -> mean over the tasks. None where a task of the mean has no
        score: no task is ever left out.
    """
    groups = {"all": list(scores.values())}
    for task, score in scores.items():
        groups.setdefault(types[task], []).append(score)
    return {kind: None if None in each else sum(each) / len(each) for kind, each in groups.items()}


def _cell(value, digits=1):
    return None if value is None else f"{value:.{digits}f}"


@functools.cache
def _paper_tasks():
    return frozenset(task.metadata.name for task in mteb.get_benchmark(PAPER_BENCHMARK).tasks)


def table4(runs):
    """Markdown table in the layout of Table 4: published rows, then `runs`.

    Args:
        runs: {name: result dict}, results as `evaluate` returns them. Of one with all 56 tasks of
            the paper these alone count; the source of another says how many other tasks it has.
    """
    rows = [[name, "published, 56 tasks", *map(_cell, values)] for name, values in MTEB.items()]
    for name, run in runs.items():
        scores, other = run["scores"], " other"
        if _paper_tasks() <= set(scores):
            scores, other = {task: scores[task] for task in _paper_tasks()}, ""
        means = averages(scores, run["types"])
        source = f"measured, {len(scores)}{other} task{'s' if len(scores) > 1 else ''}"
        rows.append([name, source, *(_cell(means.get(kind)) for kind in (*MTEB_TYPES, "all"))])
    table = markdown_table(["model", "source", *MTEB_TYPES.values(), "avg"], rows)
    return f"{table}\n{NOTE}{MTEB_NOTE}"


def task_table(runs):
    """Markdown table of every task (rows) and run (columns), with the mean over all tasks."""
    tasks = {task: run["types"][task] for run in runs.values() for task in run["scores"]}
    rows = [
        [task, kind, *(_cell(run["scores"].get(task), 2) for run in runs.values())]
        for task, kind in tasks.items()
    ]
    means = [
        _cell(run["averages"]["all"], 2) if len(run["scores"]) == len(tasks) else None
        for run in runs.values()
    ]
    rows.append([f"**mean over {len(tasks)} tasks**", None, *means])
    return markdown_table(["task", "type", *runs], rows)


def settings_table(runs):
    """Markdown table of the settings that every run's scores depend on."""
    rows = [
        [name, run["max_length"], run["instructions"], run["environment"]["dtype"]]
        + [repr(run.get("instruction_template", TEMPLATE))]
        for name, run in runs.items()
    ]
    return markdown_table(["model", "max_length", "instructions", "dtype", "put as"], rows)


def read_run(path):
    """The result of `neobert mteb` in a JSON file; None for any other file, or none."""
    return earlier_result(path, *_RESULT)


def read_runs(folder):
    """{name: result} of every result in `folder`; other files do not count."""
    return {
        run["name"]: run for path in sorted(Path(folder).glob("*.json")) if (run := read_run(path))
    }


def write_tables(folder):
    """Writes table.md from every result in `folder`."""
    runs = read_runs(folder)
    parts = [
        "# MTEB, the layout of the paper's Table 4",
        table4(runs),
        "## Each task",
        "Main score of each task in percent (its own metric).",
        task_table(runs),
        "## Settings of the measured rows",
        settings_table(runs),
    ]
    write_text(Path(folder) / "table.md", "\n\n".join(part.strip() for part in parts) + "\n")
