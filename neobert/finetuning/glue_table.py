"""Finished runs of `neobert glue`, and their table in the layout of Table 3 of the paper."""

import json
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pandas
from msgspec import Meta

from ..common.environment import environment
from ..common.errors import UserError
from ..common.files import difference_from_type, read_json
from ..common.published import GLUE, GLUE_NOTE
from ..common.results import write_result
from ..common.tables import markdown_table
from .baselines import MAX_TRAIN_CHARACTERS, MAX_TRAIN_ROWS
from .glue_tasks import TASKS


NOTE = (
    f"{GLUE_NOTE}\n\nRows marked 'measured' are dev scores x 100, mean ± standard deviation over "
    "seeds. Held-out training rows selected the checkpoint, unless the row says 'selected on dev'. "
    "The average is shown if all eight tasks were measured. A row with 'data: NAME' was measured "
    "on other data with the columns of GLUE: it is not a GLUE score, and cannot be compared with "
    "the published rows. result.json of each run contains its settings, rows, command and commit."
)
BASELINE_NOTE = (
    "Baselines on the same rows: the majority class (regression: the mean label), and logistic "
    "(regression: ridge) regression on TF-IDF features of words and characters, fitted on at most "
    f"{MAX_TRAIN_ROWS:,} training rows with {MAX_TRAIN_CHARACTERS:,} characters. ± is the standard "
    "error over dev rows."
)


class _Settings(TypedDict):
    seed: int
    learning_rate: float
    revision: str | None
    rows: str | None


class _Score(TypedDict):
    score: float


class _Baseline(TypedDict):
    name: str
    value: float
    standard_error: float


class _Result(TypedDict):
    """Keys of result.json that this command reads."""

    settings: _Settings
    name: str
    row: str
    task: Annotated[str, Meta(pattern=f"^({'|'.join(TASKS)})$")]
    score: float
    selected: _Score
    last: _Score
    best_of_all_evaluations: float


class _ResultWithBaselines(_Result):
    """Keys of result.json with baselines, which earlier versions did not write."""

    standard_error: float
    predicted_classes: int | None
    baselines: list[_Baseline]


def finished_runs(output: str | Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the directory and the result of every finished run under `output`.

    Raises:
        UserError: If the result of a run is damaged.
    """
    runs = []
    for path in sorted(Path(output).glob("*/*/*/result.json")):
        result = read_json(path)
        # Files of other programs are ignored.
        if not isinstance(result, dict) or result.get("neobert") != "glue":
            continue
        expected = _ResultWithBaselines if "baselines" in result else _Result
        if difference := difference_from_type(result, expected):
            raise UserError(
                f"{path} is not the result of a run of `neobert glue` ({difference}). Restore the "
                f"file, or remove {path.parent} to repeat the run."
            )
        runs.append((path.parent, result))
    return runs


def collect(output: str | Path) -> pandas.DataFrame:
    """Return the measured cells of the table, one per row and task.

    A cell is the group of runs that differ in the seed only: of all groups with the most seeds, the
    group with the best mean selection score.

    Returns:
        Columns name, task, score, deviation (NaN for one seed), seeds (their number), selected,
        last and best_of_all_evaluations.
    """
    runs = []
    for _, result in finished_runs(output):
        # As text, because pandas cannot group by dictionaries.
        settings = {name: value for name, value in result["settings"].items() if name != "seed"}
        runs.append(
            {
                "name": result["row"],
                "task": result["task"],
                "settings": json.dumps(settings, sort_keys=True),
                "score": result["score"],
                "selected": result["selected"]["score"],
                "last": result["last"]["score"],
                "best_of_all_evaluations": result["best_of_all_evaluations"],
            }
        )

    # Runs that differ in the seed only are averaged.
    groups = pandas.DataFrame(runs).groupby(["name", "task", "settings"], as_index=False)
    groups = groups.agg(
        score=("score", "mean"),
        deviation=("score", "std"),
        seeds=("score", "size"),
        selected=("selected", "mean"),
        last=("last", "mean"),
        best_of_all_evaluations=("best_of_all_evaluations", "max"),
    )

    # The last group of a row and task has the most seeds, and of those the best score.
    return groups.sort_values(["seeds", "selected"]).groupby(["name", "task"]).tail(1)


def baseline_table(output: str | Path) -> str:
    """Return a table of the runs' scores beside their baselines on the same dev rows.

    Scores are percentages with their standard error over dev rows. Runs of earlier versions, which
    have no baselines, are left out.
    """
    rows = []
    for _, result in finished_runs(output):
        if "baselines" not in result:
            continue
        scores = [(result["score"], result["standard_error"])]
        scores += [(entry["value"], entry["standard_error"]) for entry in result["baselines"]]
        # The score of the run, the constant baseline, and the linear model.
        texts: list[str | None] = []
        for value, error in scores:
            texts.append(f"{100 * value:.1f} ± {100 * error:.1f}")
        # Without a second label or any characters there is no TF-IDF baseline.
        texts += [None] * (3 - len(texts))
        seed = result["settings"]["seed"]
        rate = f"{result['settings']['learning_rate']:g}"
        rows.append([result["row"], TASKS[result["task"]].title, seed, rate, *texts])
    if not rows:
        return ""

    header = ["model", "task", "seed", "learning rate", "score", "majority or mean", "TF-IDF"]
    return f"\n{markdown_table(header, rows)}\n{BASELINE_NOTE}\n"


def write_tables(output: str | Path) -> str:
    """Write `output`/table.md and table.json, and return the page.

    The page has the layout of Table 3, published rows, then measured rows, and a second table with
    the baselines of every run.
    """
    cells = collect(output)

    # GLUE tables state percents.
    percent = (100 * cells["score"]).map("{:.1f}".format)
    spread = (100 * cells["deviation"]).map(" ± {:.1f}".format).where(cells["seeds"] > 1, "")
    table = cells.assign(text=percent + spread).pivot(index="name", columns="task")
    texts = table["text"].reindex(columns=TASKS)
    # An average over some of the tasks could not be compared with the published ones.
    averages = (100 * table["score"].reindex(columns=TASKS)).mean(axis=1, skipna=False)
    texts["average"] = averages.map("{:.1f}".format).where(averages.notna())

    # The published rows come first, then those measured here.
    rows = [[name, "published", *published] for name, published in GLUE.items()]
    for name, row in texts.iterrows():
        seeds = sorted({int(count) for count in table["seeds"].loc[name].dropna()})
        # The tasks of a row may have different numbers of seeds, the smallest to the largest.
        counts = " to ".join(map(str, seeds[:1] + seeds[1:][-1:]))
        source = f"measured, {counts} seed{'' if counts == '1' else 's'}"
        rows.append([name, source, *(text if isinstance(text, str) else None for text in row)])

    header = ["model", "source", *(task.title for task in TASKS.values()), "avg"]
    data = {
        "header": header,
        "rows": rows,
        "measured": json.loads(cells.to_json(orient="records")),
        "note": NOTE,
    }
    return write_result(
        Path(output) / "table",
        "GLUE, dev sets",
        environment(),
        data,
        f"{markdown_table(header, rows)}\n{NOTE}\n{baseline_table(output)}",
    )
