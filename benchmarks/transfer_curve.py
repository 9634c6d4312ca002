"""Plot the quality of distilled encoders against their training time.

    python -m benchmarks.transfer_curve results/block_transfer.json results/block_transfer.png

The JSON file contains the runs that results/block_transfer.md describes: for each series of runs
the training time in core minutes, without the teacher's embeddings, and the MRR@10 on all queries
of open_text (`python -m benchmarks.open_text --model STUDENT --against TEACHER`).
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from neobert.common.files import read_json


def plot_curve(runs: Mapping[str, Any], path: Path) -> None:
    """Plot the ratio of each encoder's MRR@10 to the teacher's against the core hours.

    Args:
        runs: "teacher", the MRR@10 of the teacher, and "series", {name: points}. A point has
            "minutes" and "mrr".
        path: File to write (.png).
    """
    # Figure has no window, so it also works on machines without a display.
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for marker, (name, points) in zip("o^sDv", runs["series"].items()):
        hours = [point["minutes"] / 60 for point in points]
        ratios = [point["mrr"] / runs["teacher"] for point in points]
        axes.plot(hours, ratios, marker=marker, label=name)
    axes.set_xlabel("Training time (core hours)")
    axes.set_ylabel("MRR@10 relative to the teacher")
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside upper left")
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", help="JSON file of the runs.")
    parser.add_argument("output", help="Plot to write (.png).")
    args = parser.parse_args(argv)
    plot_curve(read_json(args.runs), Path(args.output))


if __name__ == "__main__":
    main()
