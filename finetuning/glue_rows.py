"""Rows of a GLUE run: what is trained on, what is held out, and the metrics of every part."""

import numpy as np
import torch

from .glue_tasks import scores


def split_heldout(rows, fraction, at_most):
    """Indices (kept, held out) of `rows` training rows; the same for every seed, so that seeds
    differ in training alone."""
    count = min(at_most, int(rows * fraction))
    order = np.random.default_rng(0).permutation(rows)
    return np.sort(order[count:]).tolist(), np.sort(order[:count]).tolist()


class Rows(torch.utils.data.Dataset):
    """Tokenised rows of one task: {"input_ids", ..., "labels"} without padding."""

    def __init__(self, tokenizer, task, columns, max_length):
        texts = [columns[name] for name in task.texts]
        self.labels = columns["label"]
        self.encoded = (
            tokenizer(*texts, truncation=True, max_length=max_length) if self.labels else {}
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {
            **{name: values[i] for name, values in self.encoded.items()},
            "labels": self.labels[i],
        }


def _take(columns, indices):
    return {name: [values[i] for i in indices] for name, values in columns.items()}


def prepare(task, splits, tokenizer, settings, model_limit):
    """Training rows and one evaluation set, with the slice of every part of it.

    Args:
        splits: from `glue_tasks.load_task`.
        model_limit: longest text in tokens that the model takes, or None.
    Returns:
        train Rows, evaluation Rows, {part: slice}; the parts are "heldout" (unless selection is
        "dev") and the dev splits.
    """
    max_length = min(settings["max_length"], model_limit or settings["max_length"])
    train, parts = splits["train"], {}
    if settings["selection"] == "heldout":
        kept, held_out = split_heldout(
            len(train["label"]), settings["heldout_fraction"], settings["heldout_rows"]
        )
        parts["heldout"] = _take(train, held_out)
        train = _take(train, kept)
    parts |= {split: splits[split] for split in task.validation}
    joined = {name: [x for part in parts.values() for x in part[name]] for name in train}
    slices, start = {}, 0
    for name, part in parts.items():
        slices[name] = slice(start, start + len(part["label"]))
        start += len(part["label"])
    return (
        Rows(tokenizer, task, train, max_length),
        Rows(tokenizer, task, joined, max_length),
        slices,
    )


def evaluation_metrics(task, logits, labels, slices, metric="mean"):
    """Metrics of every part.

    Args:
        metric: what stops and selects, "mean" of the task's metrics or one of them.
    Returns:
        "dev_<metric>" and "dev_score" (means over the dev splits), "<split>_<metric>" where there
        are several dev splits, and "score":
        what stops and selects, of the held-out rows if there are some, else of dev.
    """
    dev = {
        split: scores(task, logits[slices[split]], labels[slices[split]])
        for split in task.validation
    }
    metrics = {
        f"dev_{name}": float(np.mean([part[name] for part in dev.values()]))
        for name in (*task.metrics, "score")
    }
    if len(dev) > 1:
        metrics |= {
            f"{split}_{name}": part[name] for split, part in dev.items() for name in task.metrics
        }
    part = slices.get("heldout")
    key = "score" if metric == "mean" else metric
    metrics["score"] = (
        metrics[f"dev_{key}"] if part is None else scores(task, logits[part], labels[part])[key]
    )
    return metrics
