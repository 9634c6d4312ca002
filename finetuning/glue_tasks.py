"""The eight GLUE tasks of the paper's Table 3: their data schema, their rows, their metrics."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import UserError, one_line, require
from ..common.rows import check_characters, read_rows, row_format, short


_FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Task:
    """One GLUE task.

    Attributes:
        title: column of Table 3.
        texts: columns with the text, or the pair of texts.
        labels: label names in the order of their numbers; empty for regression.
        metrics: names of the metrics; the task's score is their mean.
        validation: dev splits; the metrics of several splits are averaged (MNLI: matched and
            mismatched).
        from_mnli: fine-tuned from the best MNLI checkpoint (the protocol of the paper).
        low, high: range of a regression label.
    """

    name: str
    title: str
    texts: tuple
    labels: tuple
    metrics: tuple
    validation: tuple = ("validation",)
    from_mnli: bool = False
    low: float = 0.0
    high: float = 5.0

    @property
    def num_labels(self):
        return max(len(self.labels), 1)

    @property
    def regression(self):
        return not self.labels


_NLI = ("entailment", "not_entailment")

# In the order of Table 3. MNLI comes first, so that "all" has its checkpoint for the tasks that
# start from it.
TASKS = {
    task.name: task
    for task in (
        Task(
            "mnli",
            "MNLI",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            ("accuracy",),
            ("validation_matched", "validation_mismatched"),
        ),
        Task("qnli", "QNLI", ("question", "sentence"), _NLI, ("accuracy",), from_mnli=True),
        Task(
            "qqp",
            "QQP",
            ("question1", "question2"),
            ("not_duplicate", "duplicate"),
            ("accuracy", "f1"),
        ),
        Task("rte", "RTE", ("sentence1", "sentence2"), _NLI, ("accuracy",), from_mnli=True),
        Task("sst2", "SST", ("sentence",), ("negative", "positive"), ("accuracy",)),
        Task(
            "mrpc",
            "MRPC",
            ("sentence1", "sentence2"),
            ("not_equivalent", "equivalent"),
            ("accuracy", "f1"),
            from_mnli=True,
        ),
        Task("cola", "CoLA", ("sentence",), ("unacceptable", "acceptable"), ("matthews",)),
        Task(
            "stsb", "STS", ("sentence1", "sentence2"), (), ("pearson", "spearman"), from_mnli=True
        ),
    )
}
_ALIASES = {"sst": "sst2", "sst-2": "sst2", "sts": "stsb", "sts-b": "stsb"}

HUB_DATA = "nyu-mll/glue"


def parse_tasks(names):
    """Tasks of a comma-separated list, or all eight for "all", in the order of TASKS.

    Raises:
        UserError: a name that is not a task here.
    """
    wanted = [name.strip().lower() for name in str(names).split(",") if name.strip()]
    if wanted == ["all"]:
        return list(TASKS.values())
    wanted = [_ALIASES.get(name, name) for name in wanted]
    for name in wanted:
        if name == "wnli":
            raise UserError("wnli is left out, as in the paper; the tasks are " + ", ".join(TASKS))
        if name not in TASKS:
            raise UserError(
                f"there is no GLUE task {name!r}; choose all, or from {', '.join(TASKS)}"
            )
    if not wanted:
        raise UserError(f"no task was given; choose all, or from {', '.join(TASKS)}")
    return [task for name, task in TASKS.items() if name in wanted]


# ------------------------------------------------------------------------------------------------
# metrics


def _correlation(function):
    def correlation(labels, predictions):
        # Undefined for constant predictions, which correlate with nothing.
        if len(set(predictions)) < 2 or len(set(labels)) < 2:
            return 0.0
        value = float(function(labels, predictions)[0])
        return 0.0 if math.isnan(value) else value

    return correlation


def metric_function(name):
    """The function (labels, predictions) -> float for a metric's name, from scikit-learn or SciPy.

    Raises:
        UserError: there is no such metric.
    """
    from scipy import stats
    from sklearn import metrics

    functions = {
        "accuracy": metrics.accuracy_score,
        "f1": lambda labels, predictions: metrics.f1_score(labels, predictions, zero_division=0.0),
        "matthews": metrics.matthews_corrcoef,
        "pearson": _correlation(stats.pearsonr),
        "spearman": _correlation(stats.spearmanr),
    }
    if name not in functions:
        raise UserError(f"there is no metric {name!r}; choose from {', '.join(functions)}")
    return functions[name]


def scores(task, logits, labels):
    """Metrics of one split, and their mean as "score".

    Args:
        logits: (N, C) array; C is 1 for regression.
        labels: (N,) array.
    """
    predictions = logits[:, 0] if task.regression else logits.argmax(axis=-1)
    values = {
        name: float(metric_function(name)(labels.tolist(), predictions.tolist()))
        for name in task.metrics
    }
    return {**values, "score": sum(values.values()) / len(values)}


# ------------------------------------------------------------------------------------------------
# data


def load_task(task, source):
    """Train and dev splits as lists of columns, every row checked.

    Args:
        source: a local folder with `<task>/<split>.jsonl` (or .json, .csv, .tsv, .parquet, also
            sharded as `<split>-00000-of-00001.parquet`), with nyu-mll/glue's columns; else the name
            of such a data set on the Hub.
    Returns:
        {split: {column: list}} with the text columns and "label".
    Raises:
        UserError: no such folder or data set, a split without rows or in two files that are not
            shards, a column that is missing, a broken row, a label out of range.
    """
    rows = _local_rows if Path(source).is_dir() else _hub_rows
    return {
        split: _checked(task, rows(source, task.name, split))
        for split in ("train", *task.validation)
    }


def rows_digest(splits):
    """Twelve hex digits that change when a row of `load_task`'s splits does."""
    digest = hashlib.sha256()
    for split, columns in splits.items():
        for name, values in columns.items():
            digest.update(json.dumps([split, name, values]).encode())
    return digest.hexdigest()[:12]


def _local_rows(source, task, split):
    """(place, row) of one split of a local folder."""
    folder = Path(source) / task
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}; a local GLUE folder holds <task>/<split>.jsonl, .csv, "
            ".tsv or .parquet"
        )
    files = [
        path
        for path in sorted(folder.iterdir())
        if row_format(path) in _FORMATS and path.name.partition(".")[0].split("-0")[0] == split
    ]
    if not files:
        raise UserError(
            f"{folder} has no split {split!r}; expected {split}.jsonl, .csv, .tsv or .parquet"
        )
    if len({(path.suffix, path.stem == split) for path in files}) > 1:
        names = ", ".join(path.name for path in files)
        raise UserError(
            f"{folder} has the split {split!r} more than once ({names}); leave one file, or shards "
            "of one format"
        )
    for path in files:
        yield from read_rows(path)


def _hub_rows(name, task, split):
    require("train", "datasets")
    from datasets import load_dataset

    try:
        data = load_dataset(name, task, split=split)
    # datasets raises its own, OSError, ValueError, ConnectionError, ... for one cause: no data
    except Exception as error:
        reason = one_line(error)
        raise UserError(
            f"{name!r} is not a local folder, and task {task} was not loaded from the Hub: {reason}"
        ) from error
    for number, row in enumerate(data, 1):
        yield f"{name}/{task}/{split}, row {number:,}", row


def _checked(task, rows):
    """{column: list} of rows that have the task's columns, texts and labels."""
    columns = {name: [] for name in (*task.texts, "label")}
    for place, row in rows:
        for name in columns:
            if row.get(name) is None:
                raise UserError(
                    f"{place} has no {name!r}; {task.name} needs the columns {', '.join(columns)}"
                )
        for name in task.texts:
            if not isinstance(row[name], str):
                raise UserError(f"{place}: {name!r} must be text, but {short(row[name])} was given")
            check_characters(place, name, row[name])
            columns[name].append(row[name])
        columns["label"].append(_checked_label(task, place, row["label"]))
    return columns


def _checked_label(task, place, label):
    """A class number, or a float for regression."""
    low, high = (task.low, task.high) if task.regression else (0, len(task.labels) - 1)
    try:
        number = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number <= high or not (task.regression or number.is_integer()):
        allowed = (
            f"a number from {low:g} to {high:g}"
            if task.regression
            else f"a whole number from 0 to {high} ({', '.join(task.labels)})"
        )
        raise UserError(
            f"{place}: label {short(label)} is out of range; {task.name} takes {allowed}"
        )
    return number if task.regression else int(number)
