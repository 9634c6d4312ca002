"""Rows of a GLUE run: what is trained on, what is held out, and the metrics of every part."""

import numpy as np

from .glue_tasks import scores


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
    parts = {name: scores(task, logits[rows], labels[rows]) for name, rows in slices.items()}
    dev = [parts[split] for split in task.validation]
    metrics = {f"dev_{name}": float(np.mean([part[name] for part in dev])) for name in dev[0]}
    if len(dev) > 1:
        for split in task.validation:
            metrics |= {f"{split}_{name}": parts[split][name] for name in task.metrics}
    metrics["score"] = parts["heldout"]["score"] if "heldout" in parts else metrics["dev_score"]
    return metrics
