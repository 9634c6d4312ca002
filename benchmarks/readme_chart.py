"""The chart of README.md, from results/throughput_cpu/throughput.json: python -m
neobert.benchmarks.readme_chart"""

import json
from pathlib import Path

from ..common.figures import GREY, line, ratio_axis, save, subplots


FOLDER = Path(__file__).resolve().parent.parent / "results" / "throughput_cpu"
OTHERS = {
    "neobert/padded": "NeoBERT with padding",
    "modernbert-base/sdpa": "ModernBERT base, 149M\n(full batches of 128, 256, 512 tokens)",
}


def points(data, other):
    """[(fill, ratio, quartiles)] of packed NeoBERT over `other`, one for each measured set, by fill
    and then by length."""
    sets = {
        row["set"]: row
        for row in data["rows"]
        if (row["model"], row["implementation"]) == ("neobert", "sdpa")
    }
    names = [name for name, ratios in data["ratios"].items() if other in ratios]
    names.sort(key=lambda name: (sets[name]["fill"], sets[name]["longest"]))
    found = [(sets[name]["fill"], data["ratios"][name][other]) for name in names]
    return [(fill, value["ratio"], value["quartiles"]) for fill, value in found]


def main():
    data = json.loads((FOLDER / "throughput.json").read_text(encoding="utf-8"))
    figure, axes = subplots(
        "How many times as fast is NeoBERT (245M, packed), in real tokens per second?",
        "real tokens in the batch (the rest is padding)",
        "times as fast as",
        size=(6.4, 3.4),
    )
    for series, (other, label) in enumerate(OTHERS.items()):
        fills, values, spreads = zip(*points(data, other))
        line(axes, fills, values, label, series + 1, spread=spreads, own=series == 0)
        for fill in sorted(set(fills)):
            here = [value for x, value in zip(fills, values) if x == fill]
            text, shift = ", ".join(f"{value:.2f}" for value in here), (0, -14 if series else 7)
            axes.annotate(
                text, (fill, min(here)), shift, textcoords="offset points", ha="center", fontsize=8
            )
    axes.axhline(1, color=GREY, linewidth=0.9)
    axes.text(0.16, 1.04, "equally fast", fontsize=8, color=GREY)
    axes.set_xlim(0.15, 1.1)
    axes.set_xticks([i / 5 for i in range(1, 6)], [f"{20 * i} %" for i in range(1, 6)])
    ratio_axis(axes, 0.75, 6)
    axes.set_ylim(bottom=0.42)
    axes.legend(loc="upper right")
    print(save(figure, FOLDER / "by_fill.png", data["environment"]))


if __name__ == "__main__":
    main()
