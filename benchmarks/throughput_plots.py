"""Plots of `neobert throughput`: length against tokens per second, and fill rate against speed-up (the paper's Figure 3, and its gap)."""

import math
import os
import statistics
import tempfile
from pathlib import Path

from ..common.errors import require


_COLOURS = {
    "neobert": "#0b6e4f",
    "modernbert-base": "#d1495b",
    "modernbert-large": "#8d2e3c",
    "bert-base": "#3d6fb6",
    "bert-large": "#1d3f72",
    "roberta-base": "#edae49",
    "roberta-large": "#b07a16",
}
_NAMES = {
    "neobert": "NeoBERT",
    "modernbert-base": "ModernBERT base",
    "modernbert-large": "ModernBERT large",
    "bert-base": "BERT base",
    "bert-large": "BERT large",
    "roberta-base": "RoBERTa base",
    "roberta-large": "RoBERTa large",
}


def draw(folder, data):
    """Writes fixed.png and fill.png into `folder`, each only if there is something to draw.

    Args:
        data: what throughput.json holds.
    Returns:
        paths written.
    """
    require("eval", "matplotlib")
    rows = [row for row in data["rows"] if not row.get("error")]
    env = data["environment"]
    caption = f"{env['hardware']}, {env['threads']} threads, {env['dtype']}, commit {env['commit']}"
    written = []
    for name, plot in (("fixed.png", _fixed), ("fill.png", _fill)):
        figure = plot(rows)
        if figure is not None:
            figure.text(0.5, 0.005, caption, ha="center", va="bottom", fontsize=6.5, color="#666666")
            written.append(_save(figure, Path(folder) / name))
    return written


def _axes(title, xlabel, ylabel):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), dpi=150)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _fixed(rows):
    """Length of the texts, all alike, against tokens per second: each model with its fastest implementation."""
    best = {}
    for row in rows:
        if row["set"].isdigit():
            key = (row["model"], int(row["set"]))
            if key not in best or row["tokens_per_second"] > best[key]["tokens_per_second"]:
                best[key] = row
    if not best:
        return None
    figure, axes = _axes("Texts of one length, no padding", "length (tokens)", "tokens per second")
    for model in _NAMES:
        points = sorted((length, row) for (name, length), row in best.items() if name == model)
        if points:
            lengths = [length for length, _ in points]
            speeds = [row["tokens_per_second"] for _, row in points]
            spread = [[max(y - row["quartiles"][0], 0) for y, (_, row) in zip(speeds, points)],
                      [max(row["quartiles"][1] - y, 0) for y, (_, row) in zip(speeds, points)]]  # fmt: skip
            axes.errorbar(lengths, speeds, yerr=spread, marker="o", ms=4, capsize=2, color=_COLOURS[model], label=_NAMES[model])
    axes.set_xscale("log", base=2)
    ticks = sorted({length for _, length in best})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    # Room for the legend above the highest spread.
    axes.set_ylim(0, 1.3 * max(row["quartiles"][1] for row in best.values()))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    return figure


def _fill(rows):
    """Fill rate of a batch against the speed of packed NeoBERT over the padded layouts and over other models."""
    packed = {row["set"]: row for row in rows if (row["model"], row["implementation"]) == ("neobert", "sdpa")}
    lines = {}
    for row in rows:
        mine = packed.get(row["set"])
        if mine is None or row is mine or row["set"].isdigit() or mine["batch"] != row["batch"]:
            continue
        pairs = zip(mine["seconds"], row["seconds"])
        speed_up = statistics.median(b / a for a, b in pairs)
        lines.setdefault((row["model"], row["implementation"]), []).append((mine["fill"], speed_up, row["set"]))
    if not lines:
        return None
    figure, axes = _axes("What packing saves", "real tokens in the batch (fill rate)", "NeoBERT packed, times as fast as")
    styles = {"padded": ("#0b6e4f", "o", "NeoBERT padded"), "published": ("#555555", "s", "published construction (padded, expanded mask)")}
    fills = [fill for points in lines.values() for fill, _, _ in points]
    curve = [0.01 * i for i in range(max(int(100 * min(fills)) - 3, 5), 101)]
    axes.plot(curve, [1 / f for f in curve], color="#bbbbbb", linestyle="--", label="1 / fill (no other cost)")
    for (model, implementation), points in lines.items():
        points.sort()
        if model == "neobert":
            colour, marker, label = styles.get(implementation, ("#9c6ade", "^", f"NeoBERT {implementation}"))
        else:
            colour, marker, label = _COLOURS[model], "D", f"{_NAMES[model]} ({implementation})"
        axes.plot([p[0] for p in points], [p[1] for p in points], marker=marker, ms=4, color=colour, label=label)
    highest = max(speed for points in lines.values() for _, speed, _ in points)
    axes.set_ylim(0, math.ceil(highest * 1.1))
    axes.set_xlim(0, 1.02)
    axes.axhline(1, color="#999999", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    return figure


def _save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".png")
    os.close(handle)
    try:
        figure.savefig(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
