"""The eight GLUE tasks of the paper's Table 3: their data schema, their metrics, and the published figures."""

import csv
import hashlib
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import UserError, one_line


@dataclass(frozen=True)
class Task:
    """One GLUE task.

    Attributes:
        title: column of Table 3.
        texts: columns with the text, or the pair of texts.
        labels: label names in the order of their numbers; empty for regression.
        metrics: names of the metrics; the task's score is their mean.
        validation: dev splits; the metrics of several splits are averaged (MNLI: matched and mismatched).
        from_mnli: fine-tuned from the best MNLI checkpoint (PAPER section 6).
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

# In the order of Table 3. MNLI comes first, so that "all" has its checkpoint for the tasks that start from it.
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
        Task("qqp", "QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")),
        Task("rte", "RTE", ("sentence1", "sentence2"), _NLI, ("accuracy",), from_mnli=True),
        Task("sst2", "SST", ("sentence",), ("negative", "positive"), ("accuracy",)),
        Task("mrpc", "MRPC", ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("accuracy", "f1"), from_mnli=True),
        Task("cola", "CoLA", ("sentence",), ("unacceptable", "acceptable"), ("matthews",)),
        Task("stsb", "STS", ("sentence1", "sentence2"), (), ("pearson", "spearman"), from_mnli=True),
    )
}
_ALIASES = {"sst": "sst2", "sst-2": "sst2", "sts": "stsb", "sts-b": "stsb"}

# Table 3 of the paper, dev sets: name, then one score a task in the order of TASKS, then the average.
PUBLISHED = (
    ("BERT base", 84.0, 90.5, 71.2, 66.4, 93.5, 88.9, 52.1, 85.8, 79.6),
    ("RoBERTa base", 87.6, 92.8, 91.9, 78.7, 94.8, 90.2, 63.6, 91.2, 86.4),
    ("GTE-en-8192 base", 86.7, 91.9, 88.8, 84.8, 93.3, 92.1, 57.0, 90.2, 85.6),
    ("NomicBERT-2048", 86.0, 92.0, 92.0, 82.0, 93.0, 88.0, 50.0, 90.0, 84.0),
    ("ModernBERT base", 89.1, 93.9, 92.1, 87.4, 96.0, 92.2, 65.1, 91.8, 88.5),
    ("NeoBERT-1024", 88.9, 93.9, 90.7, 91.0, 95.8, 93.4, 64.8, 92.1, 88.8),
    ("NeoBERT-4096", 89.0, 93.7, 90.7, 91.3, 95.6, 93.4, 66.2, 91.8, 89.0),
    ("BERT large", 86.3, 92.7, 72.1, 70.1, 94.9, 89.3, 60.5, 86.5, 82.1),
    ("RoBERTa large", 90.2, 94.7, 92.2, 86.6, 96.4, 90.9, 68.0, 92.4, 88.9),
    ("DeBERTaV3 large", 91.9, 96.0, 93.0, 92.7, 96.9, 91.9, 75.3, 93.0, 91.4),
    ("GTE-en-8192 large", 89.2, 93.9, 89.2, 88.1, 95.1, 93.5, 60.4, 91.4, 87.6),
    ("ModernBERT large", 90.8, 95.2, 92.7, 92.1, 97.1, 91.7, 71.4, 92.8, 90.5),
)
PUBLISHED_NOTE = (
    "Rows marked 'published' are Table 3 of arXiv 2502.19587: one seed, the best of all evaluations on the dev set, baselines copied "
    "from other papers (BERT's from the test server)."
)


HUB_DATA = "nyu-mll/glue"


def parse_tasks(names):
    """Tasks of a comma-separated list, or all eight for "all", in the order of TASKS.

    Raises:
        UserError: a name that is no task here.
    """
    wanted = [name.strip().lower() for name in str(names).split(",") if name.strip()]
    if wanted == ["all"]:
        return list(TASKS.values())
    wanted = [_ALIASES.get(name, name) for name in wanted]
    for name in wanted:
        if name == "wnli":
            raise UserError("wnli is left out, as in the paper; the tasks are " + ", ".join(TASKS))
        if name not in TASKS:
            raise UserError(f"there is no GLUE task {name!r}; choose all, or from {', '.join(TASKS)}")
    if not wanted:
        raise UserError(f"no task was given; choose all, or from {', '.join(TASKS)}")
    return [task for name, task in TASKS.items() if name in wanted]


# ------------------------------------------------------------------------------------------------------------------ metrics


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
    values = {name: float(metric_function(name)(labels.tolist(), predictions.tolist())) for name in task.metrics}
    return {**values, "score": sum(values.values()) / len(values)}


# --------------------------------------------------------------------------------------------------------------------- data


def load_task(task, source):
    """Train and dev splits as lists of columns, every row checked.

    Args:
        source: a local folder with `<task>/<split>.jsonl` (or .json, .csv, .tsv, .parquet, also sharded as `<split>-00000-of-00001.parquet`),
            with nyu-mll/glue's columns; else the name of such a data set on the Hub.
    Returns:
        {split: {column: list}} with the text columns and "label".
    Raises:
        UserError: no such folder or data set, a split without rows or in two files that are no shards, a column that is missing, a broken row,
            a label out of range.
    """
    splits = {}
    for split in ("train", *task.validation):
        if Path(source).is_dir():
            where, rows = _local_rows(Path(source) / task.name, split)
        else:
            where, rows = _hub_rows(source, task.name, split)
        splits[split] = _checked(task, where, rows)
    return splits


def rows_digest(splits):
    """Twelve hex digits that change when a row of `load_task`'s splits does."""
    digest = hashlib.sha256()
    for split, columns in splits.items():
        for name, values in columns.items():
            digest.update(json.dumps([split, name, values]).encode())
    return digest.hexdigest()[:12]


def _local_rows(folder, split):
    """(description, [(place, row)]) of one split of a local folder."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; a local GLUE folder holds <task>/<split>.jsonl, .csv, .tsv or .parquet")
    suffixes = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
    files = [p for p in sorted(folder.iterdir()) if p.suffix in suffixes and (p.stem == split or p.stem.startswith(f"{split}-0"))]
    if not files:
        raise UserError(f"{folder} has no split {split!r}; expected {split}.jsonl, .csv, .tsv or .parquet")
    if len({(path.suffix, path.stem == split) for path in files}) > 1:
        names = ", ".join(path.name for path in files)
        raise UserError(f"{folder} has the split {split!r} more than once ({names}); leave one file, or shards of one format")
    rows = [row for path in files for row in _file_rows(path)]
    return str(files[0]) if len(files) == 1 else f"{folder}/{split}-*", rows


def _file_rows(path):
    """[(place for messages, row)] of one file."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return [(f"{path}, row {i}", row) for i, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1)]
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if path.suffix in (".csv", ".tsv"):
        return _table_rows(path, text)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append((f"{path}, line {number}", json.loads(line)))
            except ValueError as error:
                raise UserError(f"{path}, line {number} is not valid JSON ({error}); one object a line is expected") from error
    return rows


def _table_rows(path, text):
    """The same for .csv with its standard quotes, and for .tsv, where a quote is a character as any other: GLUE's texts have single ones."""
    format = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {"strict": True}
    reader, rows = csv.DictReader(io.StringIO(text, newline=""), **format), []
    try:
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if None in row:
                raise UserError(f"{place} has more columns than the first line, {len(reader.fieldnames)}; a separator in a text?")
            rows.append((place, row))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num} is broken ({error}); are its quotes closed?") from error
    return rows


def _hub_rows(name, task, split):
    from ..common.errors import require

    require("train", "datasets")
    from datasets import load_dataset

    try:
        data = load_dataset(name, task, split=split)
    except Exception as error:  # datasets raises its own, OSError, ValueError, ConnectionError, ... for one cause: no data
        reason = one_line(error)
        raise UserError(f"{name!r} is no local folder, and task {task} was not loaded from the Hub: {reason}") from error
    return f"{name}/{task}/{split}", [(f"{name}/{task}/{split}, row {i}", row) for i, row in enumerate(data, 1)]


def _checked(task, where, rows):
    """{column: list} of rows that have the task's columns, texts and labels."""
    if not rows:
        raise UserError(f"{where} is empty; at least one row is needed")
    columns = {name: [] for name in (*task.texts, "label")}
    for place, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{place} is a {type(row).__name__}, but an object with {', '.join(columns)} is expected")
        for name in columns:
            if row.get(name) is None:
                raise UserError(f"{place} has no {name!r}; {task.name} needs the columns {', '.join(columns)}")
        for name in task.texts:
            if not isinstance(row[name], str):
                raise UserError(f"{place}: {name!r} must be text, but {row[name]!r} was given")
            columns[name].append(row[name])
        columns["label"].append(_checked_label(task, place, row["label"]))
    return columns


def _checked_label(task, place, label):
    """A class number, or a float for regression."""
    if task.regression:
        allowed = f"a number from {task.low:g} to {task.high:g}"
    else:
        allowed = f"a whole number from 0 to {len(task.labels) - 1} ({', '.join(task.labels)})"
    try:
        number = float(label)
    except (TypeError, ValueError):
        number = math.nan
    whole = task.regression or number == math.floor(number) if math.isfinite(number) else False
    low, high = (task.low, task.high) if task.regression else (0, len(task.labels) - 1)
    if isinstance(label, bool) or not whole or not low <= number <= high:
        raise UserError(f"{place}: label {label!r} is out of range; {task.name} takes {allowed}")
    return number if task.regression else int(number)
