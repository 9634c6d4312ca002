"""Plots of `neobert throughput`: length against tokens per second, and fill rate against speed-up
(the paper's Figure 3, and its gap)."""

from pathlib import Path

from ..common.figures import GREY, length_axis, line, ratio_axis, save, subplots
from .throughput_results import ratios


# In the order of the legends; NeoBERT is drawn last, above the others.
_NAMES = {
    "bert-base": "BERT base",
    "roberta-base": "RoBERTa base",
    "modernbert-base": "ModernBERT base",
    "bert-large": "BERT large",
    "roberta-large": "RoBERTa large",
    "modernbert-large": "ModernBERT large",
    "neobert": "NeoBERT",
}
_LAYOUTS = {"neobert/padded": "NeoBERT, padded", "neobert/published": "NeoBERT as published"}


def draw(folder, data):
    """Writes fixed.png and fill.png into `folder`, each only if there is something to draw.

    Args:
        data: what throughput.json holds.
    Returns:
        paths written.
    """
    rows = [row for row in data["rows"] if not row.get("error")]
    figures = {"fixed.png": _fixed(rows), "fill.png": _fill(rows)}
    return [
        save(figure, Path(folder) / name, data["environment"])
        for name, figure in figures.items()
        if figure is not None
    ]


def _fixed(rows):
    """Length of the texts, all alike, against tokens per second: each model with its fastest
    implementation."""
    best = {}
    for row in rows:
        if row["set"].isdigit():
            key = (row["model"], int(row["set"]))
            if key not in best or row["tokens_per_second"] > best[key]["tokens_per_second"]:
                best[key] = row
    if not best:
        return None
    figure, axes = subplots(
        "Texts of one length, no padding", "length in tokens", "tokens per second"
    )
    models = [name for name in _NAMES if any(model == name for model, _ in best)]
    for i, model in enumerate(models):
        points = sorted((length, row) for (name, length), row in best.items() if name == model)
        # A little beside each other, so that models of one speed do not hide each other.
        places = [length * 1.025 ** (i - (len(models) - 1) / 2) for length, _ in points]
        speeds = [row["tokens_per_second"] for _, row in points]
        spreads = [row["quartiles"] for _, row in points]
        line(
            axes,
            places,
            speeds,
            _NAMES[model],
            list(_NAMES).index(model),
            spreads,
            own=model == "neobert",
        )
    length_axis(axes, [length for _, length in best])
    axes.set_xlim(
        0.88 * min(length for _, length in best), 1.14 * max(length for _, length in best)
    )
    axes.set_ylim(0, 1.3 * max(row["quartiles"][1] for row in best.values()))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper center", ncols=4)
    return figure


def _fill(rows):
    """The speed of packed NeoBERT over everything else: against the fill rate of mixed batches, and
    against the length of full ones."""
    fills = {
        row["set"]: row["fill"]
        for row in rows
        if (row["model"], row["implementation"]) == ("neobert", "sdpa")
    }
    found = ratios(rows)
    mixed = {name for name in found if not name.isdigit()}
    full = found.keys() - mixed
    if not found:
        return None
    panels = [names for names in (mixed, full) if names]
    figure, axes = subplots(
        "What packing saves: NeoBERT packed is so many times as fast as",
        columns=len(panels),
        size=(4.2 * len(panels) + 2.4, 4.2),
        sharey=True,
        squeeze=False,
    )
    others = sorted({other for values in found.values() for other in values}, key=_order)
    for panel, names in zip(axes[0], panels):
        for i, other in enumerate(others):
            points = sorted(
                (int(name) if names is full else fills[name], found[name][other])
                for name in names
                if other in found[name]
            )
            if points:
                # Series a little beside each other, so that equal ones do not hide each other.
                shift = i - (len(others) - 1) / 2
                places = [
                    x * 1.025**shift if names is full else x + 0.01 * shift for x, _ in points
                ]
                values = [value["ratio"] for _, value in points]
                spreads = [value["quartiles"] for _, value in points]
                line(panel, places, values, _label(other), **_look(other), spread=spreads)
        panel.axhline(1, color=GREY, linewidth=0.8)
        if names is full:
            panel.set(title="texts of one length: nothing to save", xlabel="length in tokens")
            length_axis(panel, map(int, names))
        else:
            low = max(min(fills[name] for name in names) - 0.04, 0.05)
            curve = [low + (1 - low) * i / 50 for i in range(51)]
            panel.plot(
                curve,
                [1 / fill for fill in curve],
                color="#bbbbbb",
                linestyle="--",
                label="1 / fill (if padding were all)",
            )
            panel.set(
                title="mixed lengths", xlabel="real tokens in the batch (fill rate)", xlim=(0, 1.02)
            )
    ends = [
        end for values in found.values() for value in values.values() for end in value["quartiles"]
    ]
    ratio_axis(axes[0][0], min([*ends, 1]), max([*ends, 1]))
    axes[0][0].set_ylabel("times as fast (above 1: NeoBERT is faster)")
    handles = {
        label: handle
        for panel in axes[0]
        for handle, label in zip(*panel.get_legend_handles_labels())
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right center")
    return figure


def _order(other):
    model, _, implementation = other.partition("/")
    return list(_NAMES).index(model), implementation


def _label(other):
    model, _, implementation = other.partition("/")
    return _LAYOUTS.get(other, f"{_NAMES[model]}, {implementation}")


def _look(other):
    """Each model has its colour in both plots; variants of NeoBERT are green and grey."""
    model = other.partition("/")[0]
    if model == "neobert":
        return {"series": 6, "own": other == "neobert/padded"}
    return {"series": list(_NAMES).index(model)}
