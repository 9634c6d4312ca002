"""The table and the plot of `neobert pseudo-perplexity`, from the rows of its CSV."""

import logging
import math
import textwrap
from pathlib import Path

import numpy as np

from ..common import figures
from ..common.results import environment, markdown_table, write_result


logger = logging.getLogger("neobert.pseudo_perplexity")
FIELDS = (
    *("name", "revision", "yarn", "dtype", "text", "length", "tokens", "positions", "seed"),
    *("mean_cross_entropy", "standard_error", "pseudo_perplexity"),
)
KEY = FIELDS[: FIELDS.index("mean_cross_entropy")]


def comparable_rows(given, rows, planned, texts):
    """The CSV's rows that belong in this run's table, each text once in every series and length.

    Of this run's model those that are planned (with any YaRN); of other models, whose tokens may differ, those of the same data, lengths,
    bucketing, dtype, positions and seed. Models that have none are named in a warning.

    Args:
        texts: digests of the texts that the data holds.
    """
    alike = [name for name in KEY if name != "yarn"]
    mine = {tuple(key[name] for name in alike) for _, _, key in planned}
    count, largest = given.position_count, {}
    for row in rows:
        series = row["name"], row["yarn"]
        largest[series] = max(int(row["length"]), largest.get(series, 0))

    def belongs(row):
        if row["name"] == given.name:
            return tuple(row[name] for name in alike) in mine
        if row["seed"]:
            positions = (row["seed"], row["positions"]) == (str(given.seed), str(count))
        else:
            positions = count is None or int(row["positions"]) <= count
        # A text that fills its bucket was cut to it; texts at their own length are cut at the largest alone.
        length, filled = int(row["length"]), row["tokens"] == row["length"]
        bucketing = filled if given.bucketing == "cut" else not filled or length == largest[row["name"], row["yarn"]]
        return positions and bucketing and length in given.lengths and row["dtype"] == given.dtype and row["text"] in texts

    kept = {(row["name"], row["yarn"], row["text"], row["length"]): row for row in rows if belongs(row)}
    if left := sorted({row["name"] for row in rows} - {key[0] for key in kept}):
        logger.warning("not in this table, because of other texts or settings: %s", ", ".join(left))
    return list(kept.values())


def summarise(rows):
    """Buckets of CSV rows: [{"name", "yarn", "length", "texts", "positions", "pseudo_perplexity", "low", "high", errors}].

    The bucket's pseudo-perplexity is exp of the mean over texts of their mean cross-entropy. `error_positions`: standard error of that mean
    from sampling positions, for these texts; `error_texts`: from the spread between texts, which contains the former. low and high are exp of
    the mean -+ 1.96 of the larger error.
    """
    groups = {}
    for row in rows:
        groups.setdefault((row["name"], row["yarn"], int(row["length"])), []).append(row)
    buckets = []
    for (name, yarn, length), found in sorted(groups.items()):
        means = np.array([float(row["mean_cross_entropy"]) for row in found])
        errors = np.array([float(row["standard_error"]) for row in found])
        mean = means.mean()
        error_positions = float(np.sqrt((errors**2).sum()) / len(found))
        error_texts = float(means.std(ddof=1) / math.sqrt(len(found))) if len(found) > 1 else math.nan
        error = np.nanmax([error_positions, error_texts, 0.0])
        low, middle, high = (math.exp(min(x, 700.0)) for x in (mean - 1.96 * error, mean, mean + 1.96 * error))
        buckets.append(
            {
                "name": name,
                "yarn": yarn,
                "length": length,
                "texts": len(found),
                "positions": sum(int(row["positions"]) for row in found),
                "mean_cross_entropy": float(mean),
                "error_positions": None if math.isnan(error_positions) else error_positions,
                "error_texts": None if math.isnan(error_texts) else error_texts,
                "pseudo_perplexity": middle,
                "low": low,
                "high": high,
            }
        )
    return buckets


def plot(rows, buckets, path, title, env):
    """Figure 2: every text as a point, the buckets as a line with 95 % intervals, both axes logarithmic."""
    figure, axes = figures.subplots(textwrap.fill(title or "Pseudo-perplexity against length", 66), "length in tokens", "pseudo-perplexity")
    series = sorted({(bucket["name"], bucket["yarn"]) for bucket in buckets}, key=lambda pair: (pair[0], pair[1] != "off", pair[1]))
    for i, (name, yarn) in enumerate(series):
        # Series are a little beside each other, so that their bars can be told apart.
        shift = 1.02 ** (i - (len(series) - 1) / 2)
        own = [row for row in rows if (row["name"], row["yarn"]) == (name, yarn)]
        points = [int(row["tokens"]) * shift for row in own], [float(row["pseudo_perplexity"]) for row in own]
        axes.scatter(*points, s=6, alpha=0.2, color=figures.COLOURS[i % len(figures.COLOURS)], linewidths=0)
        line = [b for b in buckets if (b["name"], b["yarn"]) == (name, yarn)]
        figures.line(
            axes, [b["length"] * shift for b in line], [b["pseudo_perplexity"] for b in line],
            name if yarn == "off" else f"{name}, YaRN x {yarn}", i, [(b["low"], b["high"]) for b in line],
        )  # fmt: skip
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
    """Writes pseudo_perplexity.json, .md and .png into a folder, from rows of its CSV; returns the page."""
    buckets = summarise(rows)
    env = environment(dtype=sorted({row["dtype"] for row in rows}))
    header = ["model", "YaRN", "length", "texts", "positions", "pseudo-perplexity", "95 % interval"]
    lines = [
        [
            b["name"],
            b["yarn"],
            b["length"],
            b["texts"],
            b["positions"],
            f"{b['pseudo_perplexity']:.3f}",
            f"{b['low']:.3f} to {b['high']:.3f}",
        ]
        for b in buckets
    ]
    note = "exp(mean cross-entropy), every position masked on its own; the interval covers the choice of texts and of positions."
    path = Path(output) / "pseudo_perplexity"
    data = {"kind": "pseudo-perplexity", "buckets": buckets}
    page = write_result(path, "Pseudo-perplexity", env, data, f"{markdown_table(header, lines)}\n{note}")
    plot(rows, buckets, path.with_suffix(".png"), title, env)
    return page
