"""Plots of a throughput run: tokens per second by length, and speedup by fraction of padding."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator


# The colors can be distinguished with color blindness (Okabe and Ito).
_COLORS = ("#009E73", "#CC79A7", "#0072B2", "#D55E00", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "o^sDvPX"


def plot_lengths(rows: Sequence[Mapping[str, Any]], path: Path, caption: str = "") -> bool:
    """Plot tokens per second against the sequence length of full batches (paper, Figure 3).

    Args:
        rows: Rows of a run, as `throughput.command.measure` returns them.
        path: File to write (.png).
        caption: Hardware and versions, shown below the plot.

    Returns:
        Whether the plot was written; it needs at least two lengths of one model.
    """
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        # Batches without padding show the effect of the sequence length alone.
        if not row.get("error") and row["fill"] == 1:
            lines.setdefault(f"{row['model']} ({row['implementation']})", []).append(row)

    # A line needs two lengths.
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return False

    figure, axes = _axes("Throughput on full batches", caption)
    lengths = sorted({row["longest"] for points in lines.values() for row in points})
    for index, (name, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda row: row["longest"])
        _draw_line(
            axes,
            index,
            name,
            [row["longest"] for row in points],
            [row["tokens_per_second"] for row in points],
            [row["quartiles"] for row in points],
        )

    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Sequence length (tokens)")
    axes.set_ylabel("Throughput (tokens/s)")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.legend(frameon=False)
    figure.savefig(path)
    return True


def plot_speedup(
    rows: Sequence[Mapping[str, Any]],
    ratios: Mapping[str, Mapping[str, Any]],
    path: Path,
    caption: str = "",
) -> bool:
    """Plot the speedup of packed NeoBERT against the fraction of non-padding tokens.

    Args:
        rows: Rows of a run.
        ratios: Speedups, as `throughput.command.ratios` returns them.
        path: File to write (.png).
        caption: Hardware and versions, shown below the plot.

    Returns:
        Whether the plot was written; it needs at least two fractions of one comparison.
    """
    lines = _speedup_lines(rows, ratios)
    if not lines:
        return False

    figure, axes = _axes("Speedup of packed NeoBERT", caption)
    for index, (label, points) in enumerate(lines.items()):
        _draw_line(
            axes,
            index,
            label,
            [100 * fraction for fraction, _ in points],
            [value["ratio"] for _, value in points],
            [value["quartiles"] for _, value in points],
        )
        # Full batches of different lengths have one x value, where labels would overlap.
        for fraction, value in points:
            if fraction < 1:
                axes.annotate(
                    f"{value['ratio']:.2f}",
                    (100 * fraction, value["ratio"]),
                    textcoords="offset points",
                    xytext=(4, 9),
                    fontsize=9,
                )

    # Packed NeoBERT is faster above this line. On a logarithmic axis, speedups of 2 and 1/2 are
    # equally far from the line.
    axes.axhline(1, color="#777777", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("Non-padding tokens in the batch (%)")
    axes.set_ylabel("Speedup (tokens/s, log scale)")
    axes.legend(frameon=False)
    figure.savefig(path)
    return True


def _speedup_lines(
    rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[tuple[float, Any]]]:
    """Return the points of each comparison that has at least two, sorted by their fraction.

    Returns:
        {label: (fraction of non-padding tokens, speedup) of each workload}.
    """
    fractions = {row["set"]: row["fill"] for row in rows if not row.get("error")}
    labels = {
        "neobert/padded": "over NeoBERT with padding",
        "modernbert-base/sdpa": "over ModernBERT base",
    }
    lines = {}
    for other, label in labels.items():
        points = [
            (fractions[workload], speedups[other])
            for workload, speedups in ratios.items()
            if other in speedups
        ]
        if len({fraction for fraction, _ in points}) > 1:
            lines[label] = sorted(points, key=lambda point: (point[0], point[1]["ratio"]))
    return lines


def _axes(title: str, caption: str) -> tuple[Figure, Axes]:
    """Return a figure with a title and a caption below its plot."""
    # The figure is written to a file, so no display is necessary.
    matplotlib.use("agg", force=False)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e0e0e0")
    axes.set_axisbelow(True)
    if caption:
        figure.supxlabel(caption, fontsize=7, color="#777777")
    return figure, axes


def _draw_line(
    axes: Axes,
    index: int,
    label: str,
    x: Sequence[float],
    y: Sequence[float],
    quartiles: Sequence[Sequence[float]],
) -> None:
    """Draw one line with its quartiles as error bars."""
    # matplotlib takes distances from the value, which must not be negative.
    below = [max(0.0, value - low) for value, (low, _) in zip(y, quartiles)]
    above = [max(0.0, high - value) for value, (_, high) in zip(y, quartiles)]
    axes.errorbar(
        x,
        y,
        yerr=[below, above],
        label=label,
        color=_COLORS[index % len(_COLORS)],
        marker=_MARKERS[index % len(_MARKERS)],
        capsize=3,
    )
