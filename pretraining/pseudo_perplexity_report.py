"""The table and the plot of `neobert pseudo-perplexity`, from rows of its CSV."""

import math
import textwrap
from pathlib import Path

import numpy as np

from ..common import figures
from ..common.results import environment, markdown_table, write_result


def summarise(rows):
    """Buckets of CSV rows: [{"name", "yarn", "length", "texts", "positions", "pseudo_perplexity",
    "low", "high", errors}].

    The bucket's pseudo-perplexity is exp of the mean over texts of their mean cross-entropy.
    `error_positions`: standard error of that mean from sampling positions, for these texts;
    `error_texts`: from the spread between texts, which contains the former. low and high are exp of
    the mean -+ 1.96 of the larger error.
    """
    groups = {}
    for row in rows:
        groups.setdefault((row["name"], row["yarn"], int(row["length"])), []).append(row)
    buckets = []
    for (name, yarn, length), found in sorted(groups.items()):
        means, errors = (
            np.array([float(row[key]) for row in found])
            for key in ("mean_cross_entropy", "standard_error")
        )
        of_positions = float(np.sqrt((errors**2).sum()) / len(found))
        of_texts = float(means.std(ddof=1) / math.sqrt(len(found))) if len(found) > 1 else math.nan
        mean, reach = means.mean(), 1.96 * np.nanmax([of_positions, of_texts, 0.0])
        low, middle, high = (math.exp(min(x, 700.0)) for x in (mean - reach, mean, mean + reach))
        errors = {"error_positions": of_positions, "error_texts": of_texts}
        buckets.append(
            {
                "name": name,
                "yarn": yarn,
                "length": length,
                "texts": len(found),
                "positions": sum(int(row["positions"]) for row in found),
                "mean_cross_entropy": float(mean),
                **{key: None if math.isnan(value) else value for key, value in errors.items()},
                "pseudo_perplexity": middle,
                "low": low,
                "high": high,
            }
        )
    return buckets


def plot(rows, buckets, path, title, env):
    """Figure 2: every text as a point, the buckets as a line with 95 % intervals, both axes
    logarithmic."""
    figure, axes = figures.subplots(
        textwrap.fill(title or "Pseudo-perplexity against length", 66),
        "length in tokens",
        "pseudo-perplexity",
    )
    series = sorted(
        {(bucket["name"], bucket["yarn"]) for bucket in buckets},
        key=lambda pair: (pair[0], pair[1] != "off", pair[1]),
    )
    for i, (name, yarn) in enumerate(series):
        # Series are a little beside each other, so that their bars can be told apart.
        shift = 1.02 ** (i - (len(series) - 1) / 2)
        points = [row for row in rows if (row["name"], row["yarn"]) == (name, yarn)]
        tokens, values = (
            [float(row[key]) for row in points] for key in ("tokens", "pseudo_perplexity")
        )
        colour = figures.COLOURS[i % len(figures.COLOURS)]
        axes.scatter(
            [shift * x for x in tokens], values, s=6, alpha=0.2, color=colour, linewidths=0
        )
        line = [bucket for bucket in buckets if (bucket["name"], bucket["yarn"]) == (name, yarn)]
        places = [shift * b["length"] for b in line]
        middles = [b["pseudo_perplexity"] for b in line]
        label = name if yarn == "off" else f"{name}, YaRN x {yarn}"
        spread = [(b["low"], b["high"]) for b in line]
        figures.line(axes, places, middles, spread, label=label, series=i)
    figures.length_axis(axes, [bucket["length"] for bucket in buckets])
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [m * 10**e for e in range(-1, 9) for m in (1, 2, 5) if low <= m * 10**e <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend()
    figures.save(figure, path, env)


def write_summary(output, rows, title=None):
    """Writes pseudo_perplexity.json, .md and .png into a folder, from rows of its CSV; returns the
    page."""
    buckets, path = summarise(rows), Path(output) / "pseudo_perplexity"
    env = environment(dtype=sorted({row["dtype"] for row in rows}))
    header = ["model", "YaRN", "length", "texts", "positions", "pseudo-perplexity", "95 % interval"]
    lines = [
        [
            *(b[name] for name in ("name", "yarn", "length", "texts", "positions")),
            f"{b['pseudo_perplexity']:.3f}",
            f"{b['low']:.3f} to {b['high']:.3f}",
        ]
        for b in buckets
    ]
    note = (
        "exp(mean cross-entropy), every position masked on its own; the interval covers the "
        "choice of texts and of positions."
    )
    data = {"kind": "pseudo-perplexity", "buckets": buckets}
    page = write_result(
        path, "Pseudo-perplexity", env, data, f"{markdown_table(header, lines)}\n{note}"
    )
    plot(rows, buckets, path.with_suffix(".png"), title, env)
    return page
