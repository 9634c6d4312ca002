"""Evaluation of a fine-tuned model: predictions, metrics, and rows of its confusion matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..common.task_file import CLASSIFICATION, MULTI_LABEL, REGRESSION, TOKENS
from .baselines import METRICS
from .tagging import find_entities, predicted_tags, tag_counts, token_positions
from .text_tasks import Examples, TextTask
from .tokenization import tokenize_rows


if TYPE_CHECKING:
    from datasets import Dataset


# Label of tokens that the cross entropy of torch ignores.
IGNORED = -100


@dataclass(frozen=True)
class TokenizedSplit:
    """Tokenized training, validation or test rows.

    Attributes:
        examples: Rows.
        dataset: Input of the model.
        positions: Index of the first token of each word of each row, -1 if truncated; for token
            classification.
        truncated: Number of rows that were truncated.
    """

    examples: Examples
    dataset: "Dataset"
    positions: list[np.ndarray]
    truncated: int


def tokenize(
    task: TextTask,
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    scaling: tuple[float, float] | None = None,
) -> TokenizedSplit:
    """Tokenize rows, and count those that are truncated.

    Args:
        task: Task of the rows.
        examples: Rows.
        tokenizer: Tokenizer of the model.
        max_length: Maximum sequence length in tokens.
        scaling: Factor and offset of the labels of a regression; the model learns
            (label - offset) / factor.
    """
    from datasets import Dataset, concatenate_datasets

    # The tokens of a group are stored in a data set, which takes less memory than lists.
    is_tagged = task.name == TOKENS
    truncated = 0
    offsets: list[np.ndarray] = []
    parts = []
    groups = tokenize_rows(tokenizer, examples.texts, max_length, with_offsets=is_tagged)
    for encoded, lengths in groups:
        truncated += sum(length > max_length for length in lengths)
        offsets += map(np.asarray, encoded.pop("offset_mapping", []))
        parts.append(Dataset.from_dict(encoded))
    dataset = concatenate_datasets(parts)

    labels: list[Any] = examples.labels
    positions: list[np.ndarray] = []
    if is_tagged:
        # Tags are those of words, labels those of tokens.
        positions = [token_positions(*row) for row in zip(examples.words, offsets)]
        labels = _token_labels(task, examples, positions, [len(row) for row in offsets])
    elif scaling is not None:
        # The labels are standardized, and the output layer is rescaled after training.
        factor, offset = scaling
        labels = [(label - offset) / factor for label in labels]
    return TokenizedSplit(examples, dataset.add_column("labels", labels), positions, truncated)


def _token_labels(
    task: TextTask, examples: Examples, positions: list[np.ndarray], lengths: list[int]
) -> list[list[int]]:
    """Return the label of each token of each row.

    Args:
        task: Token classification.
        examples: Rows with one tag per word.
        positions: Index of the first token of each word of each row, -1 if truncated.
        lengths: Number of tokens of each row.
    """
    label2id = {tag: index for index, tag in enumerate(task.labels)}
    token_labels = []
    for row_positions, tags, length in zip(positions, examples.labels, lengths):
        # The tag of a word belongs to its first token; the loss ignores the others.
        row = np.full(length, IGNORED)
        for position, tag in zip(row_positions, tags):
            if position >= 0:
                row[position] = label2id[tag]
        token_labels.append(row.tolist())
    return token_labels


def word_logits(split: TokenizedSplit, logits: np.ndarray) -> list[np.ndarray]:
    """Return the logits of the words of each row, arrays of shape (W, C); zeros if truncated.

    Args:
        split: Rows with the positions of their words.
        logits: (N, L, C) logits of the tokens.
    """
    rows = []
    for row, positions in zip(logits, split.positions):
        # The position -1 of a truncated word would select the last token.
        words = row[np.maximum(positions, 0)].astype(np.float32)
        words[positions < 0] = 0
        rows.append(words)
    return rows


def decode_predictions(task: TextTask, split: TokenizedSplit, logits: np.ndarray) -> Any:
    """Return the predictions of rows from their logits.

    Args:
        task: Task of the rows.
        split: Rows with the positions of their words.
        logits: Logits of the rows, (N, C), or of their tokens, (N, L, C).

    Returns:
        Class numbers (N,), zeros and ones (N, C), values (N,), or a list of tags per row.
    """
    if task.name == REGRESSION:
        return logits[:, 0]
    # A logit above 0 is a probability above 0.5.
    if task.name == MULTI_LABEL:
        return (logits > 0).astype(np.int64)
    if task.name == TOKENS:
        return [
            predicted_tags(task.labels, words, positions >= 0)
            for words, positions in zip(word_logits(split, logits), split.positions)
        ]
    return logits.argmax(axis=-1)


def metric_inputs(task: TextTask, labels: Sequence, predicted: Any) -> tuple[Any, np.ndarray]:
    """Return labels and predictions in the form that `baselines.METRICS` take.

    Args:
        task: Task of the rows.
        labels: Labels of the rows, as in `Examples`.
        predicted: Predictions for the rows, as `decode_predictions` returns them.
    """
    # Metrics of entities are ratios of sums, and need only three counts per text.
    if task.name == TOKENS:
        counts = [tag_counts(truth, tags, task.bio) for truth, tags in zip(labels, predicted)]
        return np.zeros(len(counts)), np.array(counts).reshape(-1, 3)
    dtype = None if task.name == REGRESSION else np.int64
    return np.asarray(labels, dtype=dtype), np.asarray(predicted)


def metric_values(task: TextTask, labels: Sequence, predicted: Any) -> dict[str, float]:
    """Return all metrics of a task.

    Args:
        task: Task of the rows.
        labels: Labels of the rows, as in `Examples`.
        predicted: Predictions for the rows, as `decode_predictions` returns them.
    """
    inputs = metric_inputs(task, labels, predicted)
    return {name: float(METRICS[name](*inputs)) for name in task.metrics}


def calibration_inputs(
    task: TextTask, split: TokenizedSplit, logits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits (N, C) and labels of the predictions of a classifier, of words for tags.

    Args:
        task: Task of the rows, except regression.
        split: Rows with the positions of their words.
        logits: Logits of the rows, (N, C), or of their tokens, (N, L, C).
    """
    if task.name != TOKENS:
        return logits, np.asarray(split.examples.labels)
    label2id = {tag: index for index, tag in enumerate(task.labels)}
    rows = []
    labels = []
    for words, positions, tags in zip(
        word_logits(split, logits), split.positions, split.examples.labels
    ):
        # Words beyond the maximum length have no logits.
        kept = np.flatnonzero(positions >= 0)
        rows.append(words[kept])
        labels += [label2id[tags[index]] for index in kept]
    return np.concatenate(rows), np.array(labels, dtype=np.int64)


def label_table(task: TextTask, labels: Sequence, predicted: Any) -> list[dict[str, Any]]:
    """Return precision, recall, F1 and the number of test rows of every label or entity type.

    Args:
        task: Task of the rows.
        labels: Labels of the rows, as in `Examples`.
        predicted: Predictions for the rows, as `decode_predictions` returns them.
    """
    if task.name == REGRESSION:
        return []
    if task.name == TOKENS:
        return _tag_table(task, labels, predicted)

    from sklearn.metrics import precision_recall_fscore_support

    # The same function serves single-label rows (N,) and multi-label rows (N, labels).
    truth = np.asarray(labels, dtype=np.int64)
    columns = precision_recall_fscore_support(
        truth, predicted, labels=range(len(task.labels)), zero_division=0.0
    )
    return [_table_row(name, *map(float, values)) for name, *values in zip(task.labels, *columns)]


def _table_row(
    name: str, precision: float, recall: float, f1: float, count: float
) -> dict[str, Any]:
    return {"label": name, "precision": precision, "recall": recall, "f1": f1, "rows": int(count)}


def _tag_table(task: TextTask, labels: Sequence, predicted: Any) -> list[dict[str, Any]]:
    """Return the table of entity types, or of plain tags over words."""
    # Numbers of correct, predicted and true items per label. Words take the place of characters as
    # the units of the bounds.
    counts: dict[str, np.ndarray] = {}
    for truth, tags in zip(labels, predicted):
        bounds = [(index, index + 1) for index in range(len(truth))]
        true_items = {*find_entities(truth, bounds, task.bio)}
        predicted_items = {*find_entities(tags, bounds, task.bio)}
        for column, items in enumerate((true_items & predicted_items, predicted_items, true_items)):
            for item in items:
                counts.setdefault(item.label, np.zeros(3))[column] += 1

    rows = []
    for label in sorted(counts):
        correct, guessed, true = counts[label]
        precision = correct / guessed if guessed else 0.0
        recall = correct / true if true else 0.0
        f1 = 2 * correct / (guessed + true)
        rows.append(_table_row(label, precision, recall, f1, true))
    return rows


def mean_distance(task: TextTask, labels: Sequence[int], predicted: np.ndarray) -> float | None:
    """Return the mean distance of labels and predictions, or None if labels are not numbers.

    Args:
        task: Task of the rows.
        labels: Class numbers of the rows, (N,).
        predicted: Predicted class numbers, (N,).
    """
    # Labels such as 1 to 5 stars are classes with an order.
    try:
        values = np.array([float(name) for name in task.labels])
    except ValueError:
        return None
    # Python reads the label "nan" as a number.
    if task.name != CLASSIFICATION or not np.isfinite(values).all():
        return None
    return float(np.abs(values[np.asarray(labels)] - values[predicted]).mean())


def confusion_matrix(task: TextTask, labels: Sequence, predicted: Any) -> list[list[int]] | None:
    """Return the numbers of test rows per label (row) and prediction (column), or None.

    Args:
        task: Task of the rows.
        labels: Labels of the rows, as in `Examples`.
        predicted: Predictions for the rows, as `decode_predictions` returns them.
    """
    # Only a classification with one label per row has a confusion matrix.
    if task.name in (REGRESSION, MULTI_LABEL, TOKENS):
        return None
    # Unlike `matrix[rows, columns] += 1`, `np.add.at` counts repeated cells, too.
    matrix = np.zeros((len(task.labels), len(task.labels)), dtype=int)
    np.add.at(matrix, (np.asarray(labels), np.asarray(predicted)), 1)
    return matrix.tolist()
