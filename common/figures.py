"""The one style of all plots (neobert.mplstyle), and the few forms that they share.

    figure, axes = subplots("Title", "length in tokens", "tokens per second")
    length_axis(axes, [128, 512])
    save(figure, "results/x.png", environment())

No display is needed: pyplot is not used.
"""

import io
import math
import textwrap
from pathlib import Path

from .errors import require
from .folders import new_file
from .results import environment_line


# Colours of Okabe and Ito, which colour-blind readers tell apart. The model of this repository is
# always green, what it is compared with is not.
OWN, GREY = "#009e73", "#7f7f7f"
COLOURS = ("#0072b2", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d00", "#4d4d4d")
MARKERS = "sD^vPXp"


def subplots(title, xlabel=None, ylabel=None, rows=1, columns=1, size=None, **options):
    """A figure and its axes in the common style.

    Args:
        title: of the figure. xlabel, ylabel: of every panel.
        rows, columns: panels.
        size: inches, by default 6.4 x 4.2 a panel.
        options: of matplotlib's `Figure.subplots`: sharex, width_ratios, ...
    Returns:
        (Figure, Axes), or an array of Axes where there are several panels.
    Raises:
        ImportError: matplotlib is not installed.
    """
    require("eval", "matplotlib")
    from matplotlib import style
    from matplotlib.figure import Figure

    style.use(Path(__file__).with_name("neobert.mplstyle"))
    figure = Figure(figsize=size or (6.4 * columns, 4.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    for panel in figure.axes:
        panel.set(xlabel=xlabel or "", ylabel=ylabel or "")
    if len(figure.axes) == 1:
        figure.axes[0].set_title(title)
    else:
        figure.suptitle(title)
    return figure, axes


def line(axes, x, y, spread=None, *, label, series, own=False):
    """A line with a marker at each measured point.

    Args:
        spread: (lowest, highest) of each point, drawn as bars.
        series: a number for each line of the panel, which chooses colour and marker.
        own: whether it is the model of this repository.
    """
    errors = None
    if spread is not None:
        below = [max(value - low, 0) for value, (low, _) in zip(y, spread)]
        errors = [below, [max(high - value, 0) for value, (_, high) in zip(y, spread)]]
    colour = OWN if own else COLOURS[series % len(COLOURS)]
    marker = "o" if own else MARKERS[series % len(MARKERS)]
    axes.errorbar(x, y, yerr=errors, label=label, color=colour, marker=marker, elinewidth=1)


def length_axis(axes, lengths):
    """A logarithmic x axis with a tick at each of `lengths`, in tokens, and no others."""
    axes.set_xscale("log", base=2)
    lengths = sorted(set(lengths))
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()


def ratio_axis(axes, low, high):
    """A logarithmic y axis with ticks at 1/4, 1/2, 1, 2, 4 and so on: twice as fast is as far from
    1 as half as fast."""
    axes.set_yscale("log", base=2)
    first, last = math.floor(math.log2(low) - 0.05), math.ceil(math.log2(high) + 0.05)
    ticks = [2.0**i for i in range(first, last + 1)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])
    axes.minorticks_off()


def save(figure, path, environment=None):
    """Writes a figure completely or not at all.

    Args:
        path: .png or another form that matplotlib writes.
        environment: as `results.environment()` returns it; hardware, threads, dtype and commit
            become the caption.
    """
    if environment:
        shown = ("hardware", "threads", "dtype", "commit", "date")
        text = environment_line({name: environment.get(name) for name in shown})
        text = textwrap.fill(text, int(20 * figure.get_figwidth()))
        figure.text(0.5, -0.01, text, ha="center", va="top", fontsize=6, color="#666666")
    image = io.BytesIO()
    figure.savefig(image, format=Path(path).suffix[1:], dpi=150, bbox_inches="tight")
    with new_file(path) as file:
        file.write(image.getvalue())
