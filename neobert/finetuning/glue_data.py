"""Rows of a GLUE run: training rows, held-out rows, and the metrics of every part."""

import math
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..embeddings.windows import text_groups
from .baselines import BaselineResult, bootstrap_error, fit_baselines, value_and_error
from .glue_options import SelectionOptions
from .glue_tasks import GlueRows, Task, predicted_labels, scores


if TYPE_CHECKING:
    from datasets import Dataset


def split_heldout(rows: int, fraction: float, max_rows: int) -> tuple[list[int], list[int]]:
    """Return the indices of the rows to train on and of the held-out rows.

    The held-out rows are the same for every seed, so seeds differ in training alone.

    Args:
        rows: Number of training rows.
        fraction: Fraction of the rows to hold out.
        max_rows: Maximum number of held-out rows.
    """
    # The seed is fixed. Sorted indices keep the rows in the order of the file.
    count = min(max_rows, max(1, int(rows * fraction)))
    order = np.random.default_rng(0).permutation(rows)
    return np.sort(order[count:]).tolist(), np.sort(order[:count]).tolist()


def prepare(
    task: Task,
    splits: GlueRows,
    tokenizer: PreTrainedTokenizerBase,
    selection: SelectionOptions,
    max_length: int,
) -> "tuple[Dataset, Dataset, dict[str, slice]]":
    """Tokenize the rows of a run.

    Args:
        task: GLUE task.
        splits: Rows from `load_task`.
        tokenizer: Tokenizer of the model.
        selection: Options that hold out training rows.
        max_length: Maximum sequence length in tokens.

    Returns:
        Training rows, evaluation rows, and the slice of every part of the evaluation rows. The
        parts are "heldout", unless the dev set selects, and the dev splits. Rows are not padded.
    """
    from datasets import Dataset, concatenate_datasets

    def tokenize(columns: dict[str, list]) -> Dataset:
        # The collator pads each batch, so rows keep their lengths here.
        texts = [columns[name] for name in task.texts]
        parts = []
        for group in text_groups([sum(map(len, row)) for row in zip(*texts)]):
            encoded = tokenizer(
                *(column[group] for column in texts), truncation=True, max_length=max_length
            )
            parts.append(Dataset.from_dict({**encoded, "labels": columns["label"][group]}))
        return concatenate_datasets(parts)

    train = tokenize(splits["train"])
    # Held-out training rows come first, because they select the checkpoint.
    parts = {}
    if selection.selection == "heldout":
        kept, held_out = split_heldout(
            len(train), selection.heldout_fraction, selection.heldout_rows
        )
        parts["heldout"] = train.select(held_out)
        train = train.select(kept)
    for split in task.validation:
        parts[split] = tokenize(splits[split])

    # Trainer evaluates one data set, so the parts are concatenated.
    slices = {}
    start = 0
    for name, part in parts.items():
        slices[name] = slice(start, start + len(part))
        start += len(part)
    return train, concatenate_datasets(list(parts.values())), slices


def evaluation_metrics(
    task: Task, logits: np.ndarray, labels: np.ndarray, slices: dict[str, slice]
) -> dict[str, float]:
    """Return the metrics of every part of the evaluation rows.

    Args:
        task: GLUE task.
        logits: Logits of the evaluation rows, (N, C).
        labels: Labels of the evaluation rows, (N,).
        slices: Slice of every part of the evaluation rows, as `prepare` returns them.

    Returns:
        "dev_<metric>" and "dev_score", means over the dev splits; "<split>_<metric>" if there are
        several dev splits; and "score", which selects the checkpoint: the score of the held-out
        rows, or of the dev set without them.
    """
    predictions = predicted_labels(task, logits)
    # `slices` is in the order in which `prepare` concatenated the parts.
    parts = {name: scores(task, predictions[rows], labels[rows]) for name, rows in slices.items()}
    dev = [parts[split] for split in task.validation]
    metrics = {f"dev_{name}": float(np.mean([part[name] for part in dev])) for name in dev[0]}
    if len(dev) > 1:
        for split in task.validation:
            metrics |= {f"{split}_{name}": parts[split][name] for name in task.metrics}
    metrics["score"] = parts["heldout"]["score"] if "heldout" in parts else metrics["dev_score"]
    return metrics


def score_and_error(
    task: Task, predictions: dict[str, np.ndarray], labels: dict[str, np.ndarray]
) -> tuple[float, float]:
    """Return the dev score of a task and its standard error over rows.

    The score is the mean over the task's metrics and dev splits. The standard error of an accuracy
    is binomial, other scores are bootstrapped. Splits are independent.

    Args:
        task: GLUE task.
        predictions: Predicted labels of every dev split.
        labels: Labels of every dev split.
    """
    values = []
    variances = []
    # The bootstrap resamples the mean of several metrics as a whole, because they are correlated.
    for split in task.validation:
        if task.metrics == ("accuracy",):
            value, error = value_and_error("accuracy", labels[split], predictions[split])
        else:

            def score(labels: np.ndarray, predictions: np.ndarray) -> float:
                return scores(task, predictions, labels)["score"]

            value = score(labels[split], predictions[split])
            error = bootstrap_error(score, labels[split], predictions[split])
        # MNLI has two dev sets, and reports the mean of both.
        values.append(value)
        variances.append(error**2)
    # The standard error of a mean of independent values.
    return float(np.mean(values)), math.sqrt(sum(variances)) / len(values)


def task_baselines(
    task: Task, splits: GlueRows, selection: SelectionOptions
) -> list[BaselineResult]:
    """Fit the baselines on a run's training rows and measure them on the dev splits.

    Args:
        task: GLUE task.
        splits: Rows from `load_task`.
        selection: Options that hold out training rows.
    """

    def texts(split: str) -> list[tuple[str, ...]]:
        return list(zip(*(splits[split][name] for name in task.texts)))

    train_texts = texts("train")
    train_labels = splits["train"]["label"]
    if selection.selection == "heldout":
        kept, _ = split_heldout(
            len(train_labels), selection.heldout_fraction, selection.heldout_rows
        )
        train_texts = [train_texts[i] for i in kept]
        train_labels = [train_labels[i] for i in kept]

    labels = {split: np.asarray(splits[split]["label"]) for split in task.validation}
    # The baselines learn from the rows that fine-tuning learns from, and predict all dev sets at
    # once.
    test_texts = [row for split in task.validation for row in texts(split)]
    ends = np.cumsum([len(labels[split]) for split in task.validation])[:-1]
    results = []
    for baseline in fit_baselines(train_texts, train_labels, test_texts, task.regression):
        predictions = dict(zip(task.validation, np.split(baseline.predictions, ends)))
        value, error = score_and_error(task, predictions, labels)
        results.append(
            BaselineResult(
                name=baseline.name,
                metric=task.metric_name,
                value=value,
                standard_error=error,
                train_rows=baseline.train_rows,
            )
        )
    return results
