"""Tables of `neobert mteb`: benchmarks of which a run has all tasks, each task, the settings."""

from pathlib import Path
from statistics import fmean

import mteb

from ..common.files import write_text
from ..common.results import MTEB, MTEB_NOTE, MTEB_TYPES, earlier_result, markdown_table
from ..embeddings.instructions import TEMPLATE
from .options import BENCHMARKS, PAPER_BENCHMARK


_RESULT = (
    *("name", "model", "fingerprint", "scores", "types", "instructions", "dtype", "max_length"),
    "environment",
)


def averages(scores, types):
    """Means as MTEB's leaderboard has them; scores in percent.

    Args:
        scores: {task: score}; a task that failed has None.
        types: {task: type}.
    Returns:
        {"tasks": mean over all tasks, "types": mean over the means of the types, type: its mean}.
        None where a task of the mean has no score: no task is ever left out.
    """
    groups = {}
    for task, score in scores.items():
        groups.setdefault(types[task], []).append(score)
    means = {kind: _mean(group) for kind, group in groups.items()}
    return {"tasks": _mean(scores.values()), "types": _mean(means.values()), **means}


def _mean(values):
    return None if None in (values := list(values)) else fmean(values)


def _cell(value, digits=1):
    return None if value is None else f"{value:.{digits}f}"


def benchmark_table(name, runs):
    """Markdown table of a benchmark, a row for each run that has all its tasks; that of the paper
    has the published rows first. "" where there is no such run.

    Args:
        runs: {name: result dict}, as `read_runs` returns them.
    """
    tasks = {task.metadata.name: task.metadata.type for task in mteb.get_benchmark(name).tasks}
    kinds = [kind for kind in MTEB_TYPES if kind in tasks.values()]
    rows = []
    for model, run in runs.items():
        if run["scores"].keys() >= tasks.keys():
            means = averages({task: run["scores"][task] for task in tasks}, tasks)
            cells = [_cell(means[kind]) for kind in (*kinds, "tasks", "types")]
            rows.append([model, "measured", *cells])
    if not rows:
        return ""
    header = ["model", "source", *(MTEB_TYPES[kind] for kind in kinds)]
    header += ["mean of tasks", "mean of types"]
    if name != PAPER_BENCHMARK:
        return markdown_table(header, rows)
    published = [[model, "published", *map(_cell, values), None] for model, values in MTEB.items()]
    return f"{markdown_table(header, published + rows)}\n{MTEB_NOTE}"


def task_table(runs):
    """Markdown table of every task (rows) and run (columns), with the mean over all tasks."""
    types = {task: run["types"][task] for run in runs.values() for task in run["scores"]}
    scores = {name: [run["scores"].get(task) for task in types] for name, run in runs.items()}
    rows = [
        [task, kind, *(_cell(values[row], 2) for values in scores.values())]
        for row, (task, kind) in enumerate(types.items())
    ]
    means = [_cell(_mean(values), 2) for values in scores.values()]
    rows.append([f"**mean over {len(types)} tasks**", None, *means])
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
    runs, parts = read_runs(folder), ["# MTEB"]
    for name in BENCHMARKS:
        if table := benchmark_table(name, runs):
            parts += [f"## {name}", table]
    parts += ["## Each task", "Main score of each task in percent (its own metric)."]
    parts += [task_table(runs), "## Settings", settings_table(runs)]
    write_text(Path(folder) / "table.md", "\n\n".join(part.strip() for part in parts) + "\n")
