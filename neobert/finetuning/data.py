"""Rows of a GLUE run: what is trained on, what is held out, and the metrics of every part."""

import math

import numpy as np

from .baselines import BaselineResult, bootstrap_error, fit_baselines, value_and_error
from .tasks import Task, predicted_labels, scores


def split_heldout(rows, fraction, at_most):
    """Indices (kept, held out) of `rows` training rows; the same for every seed, so that seeds
    differ in training alone."""
    count = min(at_most, int(rows * fraction))
    order = np.random.default_rng(0).permutation(rows)
    return np.sort(order[count:]).tolist(), np.sort(order[:count]).tolist()


def prepare(task, splits, tokenizer, settings, model_limit):
    """Training rows and one evaluation set, with the slice of every part of it.

    Args:
        splits: from `glue_tasks.load_task`.
        model_limit: longest text in tokens that the model takes, or None.
    Returns:
        training and evaluation `datasets.Dataset`, tokenised, without padding; {part: slice}; the
        parts are "heldout" (unless selection is "dev") and the dev splits.
    """
    from datasets import Dataset, concatenate_datasets

    max_length = min(settings["max_length"], model_limit or settings["max_length"])

    def tokenised(columns):
        texts = (columns[name] for name in task.texts)
        encoded = tokenizer(*texts, truncation=True, max_length=max_length)
        return Dataset.from_dict({**encoded, "labels": columns["label"]})

    train, parts = tokenised(splits["train"]), {}
    if settings["selection"] == "heldout":
        kept, held_out = split_heldout(
            len(train), settings["heldout_fraction"], settings["heldout_rows"]
        )
        train, parts["heldout"] = train.select(kept), train.select(held_out)
    parts |= {split: tokenised(splits[split]) for split in task.validation}
    slices, start = {}, 0
    for name, part in parts.items():
        slices[name] = slice(start, start + len(part))
        start += len(part)
    return train, concatenate_datasets(list(parts.values())), slices


def evaluation_metrics(task, logits, labels, slices):
    """Metrics of every part.

    Returns:
        "dev_<metric>" and "dev_score" (means over the dev splits), "<split>_<metric>" where there
        are several dev splits, and "score": what stops and selects, of the held-out rows if there
        are some, else of dev.
    """
    predictions = predicted_labels(task, logits)
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
        predictions: Predicted labels of every dev split.
        labels: Labels of every dev split.
    """
    values = []
    variances = []
    for split in task.validation:
        if task.metrics == ("accuracy",):
            value, error = value_and_error("accuracy", labels[split], predictions[split])
        else:

            def score(labels: np.ndarray, predictions: np.ndarray) -> float:
                return scores(task, predictions, labels)["score"]

            value = score(labels[split], predictions[split])
            error = bootstrap_error(score, labels[split], predictions[split])
        values.append(value)
        variances.append(error**2)
    return float(np.mean(values)), math.sqrt(sum(variances)) / len(values)


def task_baselines(
    task: Task, splits: dict[str, dict[str, list]], settings: dict
) -> list[BaselineResult]:
    """Fit the baselines on a run's training rows and measure them on the dev splits.

    Args:
        splits: Rows from `glue_tasks.load_task`.
        settings: Settings of the run from `GlueArguments.settings`.
    """

    def texts(split: str) -> list[tuple[str, ...]]:
        return list(zip(*(splits[split][name] for name in task.texts)))

    train_texts = texts("train")
    train_labels = splits["train"]["label"]
    if settings["selection"] == "heldout":
        kept, _ = split_heldout(
            len(train_labels), settings["heldout_fraction"], settings["heldout_rows"]
        )
        train_texts = [train_texts[i] for i in kept]
        train_labels = [train_labels[i] for i in kept]

    labels = {split: np.asarray(splits[split]["label"]) for split in task.validation}
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
