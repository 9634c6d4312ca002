"""The one style of all plots, and the one way to write them: completely or not at all, with their
environment as a caption.

    figure, axes = subplots("Title", "length in tokens", "tokens per second")
    length_axis(axes, [128, 512])
    save(figure, "results/x.png", environment())

Colours are those of Okabe and Ito, which colour-blind readers tell apart. No display is needed:
pyplot is not used.
"""

import math
import os
import tempfile
import textwrap
from pathlib import Path

from .errors import require


# The model of this repository is always green, what it is compared with is not.
OWN, PALE, GREY = "#009e73", "#9fd8c6", "#7f7f7f"
COLOURS = ("#0072b2", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d00", "#4d4d4d")
MARKERS = ("s", "D", "^", "v", "P", "X", "p")

_STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 5.5,
    "lines.markeredgecolor": "white",
    "lines.markeredgewidth": 0.6,
    "errorbar.capsize": 2,
}


def subplots(title=None, xlabel=None, ylabel=None, rows=1, columns=1, size=None, **options):
    """A figure and its axes in the common style.

    Args:
        title: of the figure. xlabel, ylabel: of every panel.
        rows, columns: panels.
        size: inches, by default 6.4 x 4.2 a panel.
        options: of matplotlib's `Figure.subplots`: sharex, width_ratios, ...
    Returns:
        (Figure, Axes), or an array of Axes where there are several panels or with
        `squeeze=False`.
    Raises:
        ImportError: matplotlib is not installed.
    """
    require("eval", "matplotlib")
    import matplotlib
    import numpy
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(_STYLE)
    figure = Figure(figsize=size or (6.4 * columns, 4.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    panels = numpy.ravel(axes)
    for panel in panels:
        panel.set(
            **{name: value for name, value in (("xlabel", xlabel), ("ylabel", ylabel)) if value}
        )
    if title and len(panels) == 1:
        panels[0].set_title(title)
    elif title:
        figure.suptitle(title, fontsize=11)
    return figure, axes


def line(axes, x, y, label, series, spread=None, own=False, **options):
    """A line with a marker at each measured point.

    Args:
        series: a number for each line of the panel, which chooses colour and marker.
        spread: (lowest, highest) of each point, drawn as bars.
        own: whether it is the model of this repository.
        options: of matplotlib's `errorbar`, which win.
    """
    colour, marker = (
        (OWN, "o") if own else (COLOURS[series % len(COLOURS)], MARKERS[series % len(MARKERS)])
    )
    errors = None if spread is None else _error_bars(y, spread)
    style = {
        "color": colour,
        "marker": marker,
        "linewidth": 2.2 if own else 1.5,
        "elinewidth": 1,
        "zorder": 4 if own else 3,
    }
    axes.errorbar(x, y, yerr=errors, label=label, **{**style, **options})


def _error_bars(values, ranges):
    """matplotlib's form of (lowest, highest) ranges: how far they reach below and above each
    value."""
    return [
        [max(value - low, 0) for value, (low, _) in zip(values, ranges)],
        [max(high - value, 0) for value, (_, high) in zip(values, ranges)],
    ]


def bars(axes, labels, values, spreads=None, digits=1, colours=None, horizontal=False):
    """Bars that start at 0, with the value at the end of each.

    Args:
        values: None leaves the place of a bar empty.
        spreads: standard deviations, or (lowest, highest) of each value.
        colours: one, or one a bar; by default the model's own.
    """
    places, drawn = list(range(len(labels))), [value or 0 for value in values]
    spreads = [
        s if isinstance(s, (tuple, list)) else (v - (s or 0), v + (s or 0))
        for v, s in zip(drawn, spreads or [None] * len(drawn))
    ]
    errors = _error_bars(drawn, spreads) if any(low != high for low, high in spreads) else None
    ends = [max(value, high) for value, (_, high) in zip(drawn, spreads)]
    limit = max([*ends, 1e-12])
    options = {"color": colours or OWN, "error_kw": {"linewidth": 1, "capsize": 3}}
    if horizontal:
        axes.barh(places, drawn, xerr=errors, **options)
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.16 * limit)
    else:
        axes.bar(places, drawn, yerr=errors, **options)
        axes.set_xticks(places, labels)
        axes.set_ylim(0, 1.12 * limit)
    axes.grid(False, axis="y" if horizontal else "x")
    if limit >= 1000:
        (axes.xaxis if horizontal else axes.yaxis).set_major_formatter("{x:,.0f}")
    for place, value, end in zip(places, values, ends):
        if value is not None:
            x, y = (end + 0.02 * limit, place) if horizontal else (place, end + 0.02 * limit)
            where = (
                {"ha": "left", "va": "center"} if horizontal else {"ha": "center", "va": "bottom"}
            )
            axes.text(x, y, f"{value:,.{digits}f}", fontsize=8, **where)


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
    """Writes a figure completely or not at all; returns the path.

    Args:
        path: .png or another form that matplotlib writes.
        environment: as `results.environment()` returns it; hardware, threads, dtype and commit
            become the caption.
    """
    path = Path(path)
    if environment:
        text = textwrap.fill(caption(environment), int(20 * figure.get_figwidth()))
        figure.text(0.5, -0.01, text, ha="center", va="top", fontsize=6, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix
    )
    os.close(handle)
    try:
        figure.savefig(temporary, bbox_inches="tight", pad_inches=0.12)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def caption(environment):
    """Hardware, threads, dtype, commit and date of a result, on one line."""
    threads = environment.get("threads")
    dtype = environment.get("dtype")
    parts = [
        environment.get("hardware"),
        threads and f"{threads} thread{'s' if threads != 1 else ''}",
        ", ".join(dtype) if isinstance(dtype, (list, tuple)) else dtype,
        environment.get("commit") and f"commit {environment['commit']}",
        environment.get("date"),
    ]
    return ", ".join(str(part) for part in parts if part)
