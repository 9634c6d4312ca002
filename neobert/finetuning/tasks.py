"""The eight GLUE tasks of the paper's Table 3: their data schema, their rows, their metrics."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from ..common.errors import UserError, one_line


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
    """

    name: str
    title: str
    texts: tuple
    labels: tuple
    metrics: tuple
    validation: tuple = ("validation",)
    from_mnli: bool = False

    @property
    def regression(self):
        return not self.labels

    @property
    def metric_name(self) -> str:
        """Name of the score: the metric, or the mean of the metrics."""
        return f"mean of {' and '.join(self.metrics)}" if self.metrics[1:] else self.metrics[0]


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
HUB_DATA = "nyu-mll/glue"


def parse_tasks(names):
    """Tasks of a comma-separated list, or all eight for "all", in the order of TASKS.

    Raises:
        UserError: a name that is not a task here.
    """
    wanted = [name.strip() for name in names.split(",")]
    if wanted == ["all"]:
        return list(TASKS.values())
    for name in wanted:
        if name not in TASKS:
            raise UserError(
                f"there is no GLUE task {name!r}; choose all, or from {', '.join(TASKS)}"
            )
    return [task for name, task in TASKS.items() if name in wanted]


def predicted_labels(task, logits):
    """Return the predicted classes, or the predicted values of a regression.

    Args:
        logits: Array of shape (N, C), where C is 1 for regression.
    """
    return logits[:, 0] if task.regression else logits.argmax(axis=-1)


def scores(task, predictions, labels):
    """Return the metrics of one split, and their mean as "score".

    Args:
        predictions: Array of N classes, or of N values for regression.
        labels: Array of N labels.
    """
    from .baselines import METRICS

    values = {name: float(METRICS[name](labels, predictions)) for name in task.metrics}
    return {**values, "score": sum(values.values()) / len(values)}


# ------------------------------------------------------------------------------------------------
# data


def load_task(task, source):
    """Train and dev splits as lists of columns, every row checked.

    Args:
        source: a local folder, or its URL, with `<task>/<split>.jsonl` (or .csv, .tsv, .parquet,
            also sharded as `<split>-00000-of-00001.parquet`) in nyu-mll/glue's columns; else the
            name of such a data set on the Hub.
    Returns:
        {split: {column: list}} with the text columns and "label".
    Raises:
        UserError: no such folder or data set, a split in two formats, a row without a text, a
            label out of range.
    """
    rows = _local_rows if Path(source).is_dir() or "://" in source else _hub_rows
    splits = {}
    for split in ("train", *task.validation):
        columns = splits[split] = {name: [] for name in (*task.texts, "label")}
        for place, row in rows(source, task, split, list(columns)):
            for name in task.texts:
                columns[name].append(row[name])
            columns["label"].append(_label(task, place, row["label"]))
        if not columns["label"]:
            raise UserError(f"{source}/{task.name}/{split} has no rows")
    return splits


def rows_digest(splits):
    """Twelve hex digits that change when a row of `load_task`'s splits does."""
    parts = (
        json.dumps([split, name, values])
        for split, columns in splits.items()
        for name, values in columns.items()
    )
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]


def _local_rows(source, task, split, columns):
    """(place, row) of one split of a local folder."""
    from ..common.data import files, numbered_rows

    for file in files(f"{source}/{task.name}/{split}[.-]*"):
        for number, row in numbered_rows(file, columns, task.texts):
            yield f"{file.url}, row {number + 1:,}", row


def _hub_rows(name, task, split, columns):
    from datasets import load_dataset

    try:
        data = load_dataset(name, task.name, split=split).select_columns(columns)
    # datasets raises its own, OSError, ValueError, ConnectionError, ... for one cause: no data
    except Exception as error:
        raise UserError(
            f"{name!r} is not a local folder, and task {task.name} was not loaded from the Hub: "
            f"{one_line(error)}"
        ) from error
    for number, row in enumerate(data, 1):
        yield f"{name}/{task.name}/{split}, row {number:,}", row


def _label(task, place, label):
    """A class number, or a float for regression."""
    kind, most = (float, 5) if task.regression else (int, len(task.labels) - 1)
    try:
        return msgspec.convert(label, Annotated[kind, msgspec.Meta(ge=0, le=most)], strict=False)
    except msgspec.ValidationError:
        names = f" ({', '.join(task.labels)})" if task.labels else ""
        raise UserError(
            f"{place}: label {label!r:.80} is out of range; {task.name} takes 0 to {most}{names}"
        ) from None
