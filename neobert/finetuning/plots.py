"""Plots of a fine-tuning run: learning curve, confusion matrix, and predicted values."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


# Colors of Okabe and Ito, which color-blind readers can distinguish.
_BLUE = "#0072B2"
_ORANGE = "#D55E00"
# Maximum number of labels in a plot, and in a matrix with numbers in its cells. More are not
# legible.
MAX_LABELS = 40
_MAX_CELL_TEXT = 12


def plot_learning_curve(
    history: Sequence[Mapping[str, float]],
    losses: Sequence[tuple[float, float]],
    metric: str,
    selected_epoch: float | None,
    path: Path,
) -> None:
    """Plot the training loss and the validation metric over the epochs.

    Args:
        history: Evaluations with "epoch" and "score".
        losses: Epochs and losses of the log.
        metric: Name of the validation metric.
        selected_epoch: Epoch of the selected weights.
        path: File to write (.png).
    """
    # A Figure without pyplot needs no display, and is freed when the function returns.
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    loss_axes = figure.add_subplot()
    loss_axes.set_xlabel("Epoch")
    if losses:
        loss_axes.plot(*zip(*losses), color=_ORANGE, label="training loss")
    loss_axes.set_ylabel("Training loss")
    loss_axes.set_ylim(bottom=0)

    # Loss and metric have different scales, and one axis each.
    metric_axes = loss_axes.twinx()
    epochs = [entry["epoch"] for entry in history]
    metric_axes.plot(
        epochs,
        [entry["score"] for entry in history],
        "o-",
        color=_BLUE,
        label=f"validation {metric}",
    )
    metric_axes.set_ylabel(f"Validation {metric}")
    if selected_epoch is not None:
        metric_axes.axvline(
            selected_epoch, color="#999999", linestyle=":", label="selected weights"
        )

    # One legend for the lines of both axes.
    handles, labels = loss_axes.get_legend_handles_labels()
    metric_handles, metric_labels = metric_axes.get_legend_handles_labels()
    figure.legend(
        handles + metric_handles,
        labels + metric_labels,
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.savefig(path)


def plot_confusion(matrix: Sequence[Sequence[int]], labels: Sequence[str], path: Path) -> bool:
    """Plot a confusion matrix, colored by the fraction of the rows of a label.

    Args:
        matrix: Numbers of test rows per label (row) and prediction (column).
        labels: Label names.
        path: File to write (.png).

    Returns:
        Whether the plot was written; it needs at most `MAX_LABELS` labels.
    """
    if len(labels) > MAX_LABELS:
        return False
    counts = np.asarray(matrix)
    # Colors show fractions of a row, so rare labels are visible, too.
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    size = 3.0 + 0.35 * len(labels)
    figure = Figure(figsize=(size + 1, size), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="Fraction of the label's test rows")

    shown = [label if len(label) <= 20 else f"{label[:19]}…" for label in labels]
    # Labels may contain "$", which encloses formulas in matplotlib.
    axes.set_xticks(
        range(len(labels)),
        shown,
        rotation=45,
        ha="right",
        rotation_mode="anchor",
        parse_math=False,
    )
    axes.set_yticks(range(len(labels)), shown, parse_math=False)
    axes.set_xlabel("Prediction")
    axes.set_ylabel("Label")
    if len(labels) <= _MAX_CELL_TEXT:
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=color)
    figure.savefig(path)
    return True


def plot_values(truth: np.ndarray, predicted: np.ndarray, path: Path) -> None:
    """Plot the predicted values of a regression against the labels of the test rows.

    Args:
        truth: Labels, (N,).
        predicted: Predicted values, (N,).
        path: File to write (.png).
    """
    figure = Figure(figsize=(5, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(truth, predicted, s=12, alpha=0.5, color=_BLUE, linewidths=0)
    # Correct predictions are on the diagonal.
    bounds = [float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))]
    axes.plot(bounds, bounds, color="#999999", linestyle=":")
    axes.set_xlabel("Label")
    axes.set_ylabel("Prediction")
    figure.savefig(path)


def plot_label_f1(table: Sequence[Mapping], path: Path) -> bool:
    """Plot the F1 of every label of a multi-label task or of every entity type.

    Args:
        table: Rows of `label_table` with "label" and "f1".
        path: File to write (.png).

    Returns:
        Whether the plot was written; it needs one to `MAX_LABELS` labels.
    """
    if not 1 <= len(table) <= MAX_LABELS:
        return False
    figure = Figure(figsize=(6, 1.5 + 0.3 * len(table)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(len(table)), [row["f1"] for row in table], color=_BLUE)
    axes.set_yticks(range(len(table)), [row["label"] for row in table], parse_math=False)
    # The first label is at the top, as in the table.
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("F1 on the test rows")
    figure.savefig(path)
    return True
