"""Tables of `neobert mteb`: the layout of the paper's Table 4, each task, and the settings in which
rows differ."""

import functools
import json
from pathlib import Path

import mteb
import numpy as np

from ..common.files import write_text
from ..common.outputs import earlier_result
from ..common.published import MTEB, MTEB_NOTE, MTEB_TYPES
from ..common.results import markdown_table
from .instructions import TEMPLATE
from .options import PAPER_BENCHMARK


_RESULT = ("name", "scores", "types", "averages", "instructions", "max_length", "environment")


def averages(scores, types):
    """Mean over all tasks, and per type; scores in percent.

    Args:
        scores: {task: score}; a task that failed has None.
        types: {task: type}.
    Returns:
        dict type -> mean, with "all" -> mean over the tasks. None where a task of the mean has no
        score: no task is ever left out.
    """
    groups = {"all": list(scores)}
    for task in scores:
        groups.setdefault(types[task], []).append(task)
    means = {}
    for group, tasks in groups.items():
        values = [scores[task] for task in tasks]
        means[group] = None if any(value is None for value in values) else float(np.mean(values))
    return means


def _cell(value, digits=1):
    return "" if value is None else f"{value:.{digits}f}"


def table4(runs):
    """Markdown table in the layout of Table 4: published rows, then `runs` of the complete
    benchmark.

    Args:
        runs: {name: result dict}, results as `evaluate` returns them; tasks beyond the 56 do not
            count.
    """
    header = ["model", "source", *MTEB_TYPES.values(), "avg (56)"]
    rows = [
        [name, "published", *(_cell(value) for value in values)] for name, values in MTEB.items()
    ]
    for name, run in runs.items():
        rows.append([name, "measured", *_means(run, _paper_tasks())])
    return markdown_table(header, rows) + "\n" + MTEB_NOTE + "\n"


def table4_of_other_tasks(runs):
    """The same layout for `runs` of other tasks: the source of a row says how many, and the note
    that they are not those of the paper."""
    header = ["model", "source", *MTEB_TYPES.values(), "avg"]
    rows = [
        [name, "published, 56 tasks", *(_cell(value) for value in values)]
        for name, values in MTEB.items()
    ]
    for name, run in runs.items():
        count = len(run["scores"])
        rows.append(
            [
                name,
                f"measured, {count} other task{'s' if count > 1 else ''}",
                *_means(run, run["scores"]),
            ]
        )
    note = (
        "Rows of other tasks share the layout alone: their scores are not those of MTEB(eng, "
        "v1), and not to be compared with published rows."
    )
    return markdown_table(header, rows) + f"\n{note} {MTEB_NOTE}\n"


def _means(run, tasks):
    means = averages(
        {task: score for task, score in run["scores"].items() if task in tasks}, run["types"]
    )
    return [*(_cell(means.get(kind)) for kind in MTEB_TYPES), _cell(means["all"])]


def task_table(runs):
    """Markdown table of every task (rows) and run (columns), with the means per type and over all
    tasks."""
    tasks = {task: run["types"][task] for run in runs.values() for task in run["scores"]}
    rows = []
    for kind in dict.fromkeys(tasks.values()):
        members = [task for task in tasks if tasks[task] == kind]
        rows += [
            [task, kind, *(_cell(run["scores"].get(task), 2) for run in runs.values())]
            for task in members
        ]
        if len(members) > 1:
            rows.append(
                [
                    f"**mean of {len(members)}**",
                    kind,
                    *(_cell(run["averages"].get(kind), 2) for run in runs.values()),
                ]
            )
    means = [
        _cell(run["averages"]["all"], 2) if set(run["scores"]) == set(tasks) else ""
        for run in runs.values()
    ]
    rows.append([f"**mean over {len(tasks)} tasks**", "", *means])
    return markdown_table(["task", "type", *runs], rows)


def settings_table(runs):
    """Markdown table of the settings that every run's scores depend on, after a sentence that names
    those in which runs differ."""
    columns = {"max_length": [], "instructions": [], "dtype": []}
    for run in runs.values():
        template = run.get("instruction_template", TEMPLATE)
        own = run["instructions"] != "none" and template != TEMPLATE
        columns["max_length"].append(run["max_length"])
        columns["instructions"].append(
            run["instructions"] + (f", put as {json.dumps(template)}" if own else "")
        )
        columns["dtype"].append(run["environment"]["dtype"])
    differing = [name for name, values in columns.items() if len(set(values)) > 1]
    text = (
        f"These rows were not measured alike: they differ in {', '.join(differing)}.\n\n"
        if differing
        else ""
    )
    return text + markdown_table(["model", *columns], zip(runs, *columns.values()))


@functools.cache
def _paper_tasks():
    return frozenset(task.metadata.name for task in mteb.get_benchmark(PAPER_BENCHMARK).tasks)


def is_paper_benchmark(run):
    """Whether a result covers the 56 tasks of the paper's benchmark."""
    return _paper_tasks() <= set(run["scores"])


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
    complete = {name: run for name, run in runs.items() if is_paper_benchmark(run)}
    rest = {name: run for name, run in runs.items() if name not in complete}
    parts = []
    if complete:
        parts += ["# MTEB(eng, v1), the layout of Table 4", table4(complete), task_table(complete)]
    if rest:
        parts += ["# Other tasks, in the layout of Table 4", table4_of_other_tasks(rest)]
        parts += [
            "## Each task",
            "Main score of each task in percent (its own metric).\n\n" + task_table(rest),
        ]
    parts += ["## Settings of the measured rows", settings_table(runs)]
    write_text(Path(folder) / "table.md", "\n\n".join(parts))
