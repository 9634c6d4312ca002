"""The page of `make gpu`: its targets, and what benchmarks/gpu.sh has measured of them.

python -m benchmarks.gpu results/gpu
"""

import sys
from pathlib import Path

from neobert.common.commands import guarded
from neobert.common.environment import environment_line
from neobert.common.files import read_json
from neobert.common.tables import markdown_table
from neobert.throughput.command import ratios


def targets(rows, memory):
    """Markdown table of the targets with what was measured, empty where nothing was.

    Args:
        rows: of every throughput.json.
        memory: of memory.json.
    """
    rows = [row for row in rows if not row.get("error")]

    def best(name, figure, model="neobert"):
        """The highest figure of a model on a set, or None."""
        every = [row[figure] for row in rows if (row["set"], row["model"]) == (name, model)]
        return max(every, default=None)

    lines = []
    for name, least in (("4096", 1.47), ("8192", 1.91)):
        ours, theirs = (
            best(name, "tokens_per_second", model) for model in ("neobert", "modernbert-base")
        )
        what = f"fixed {int(name):,} over ModernBERT base, both at their best"
        lines.append((what, least, ours / theirs if ours and theirs else None))
    for name in ("2048", "4096"):
        what = f"share of the bf16 matrix-product rate at {int(name):,}"
        lines.append((what, 0.5, best(name, "share_of_gemm")))
    faster = ratios(rows)
    for name in ("normal-256", "normal-4096", "short"):
        value = faster.get(name, {}).get("neobert/padded", {}).get("ratio")
        lines.append((f"{name}: packed over padded", 1.4, value))
    peaks = {
        row["length"]: row["neobert"] / row["modernbert-base"]
        for row in memory
        if "modernbert-base" in row
    }
    for length in (4096, 8192):
        what = f"peak memory above the weights over ModernBERT base, {length:,}"
        lines.append((what, "at most 1.8", peaks.get(length)))
    table = []
    for what, target, value in lines:
        if value is None:
            table.append([what, target, None, None])
        else:
            reached = value <= 1.8 if target == "at most 1.8" else value >= target
            table.append([what, target, f"{value:.2f}", "yes" if reached else "no"])
    return markdown_table(["bf16", "target", "measured", "reached"], table)


def main(argv=None):
    """Writes gpu.md; returns 1 where a model could not be measured, else 0."""
    (folder,) = map(Path, sys.argv[1:] if argv is None else argv)
    results = [read_json(path) for path in sorted(folder.glob("*/throughput.json"))]
    memory = read_json(folder / "memory.json")["rows"] if (folder / "memory.json").exists() else []
    rows = [row for result in results for row in result["rows"]]
    made = [environment_line(result["environment"]) for result in results[:1]]
    pages = sorted(path.relative_to(folder) for path in folder.rglob("*.md"))
    links = "\n".join(f"- [{page}]({page})" for page in pages if page.name != "gpu.md")
    text = "\n\n".join(["# GPU", *made, targets(rows, memory).strip(), links])
    (folder / "gpu.md").write_text(f"{text}\n", encoding="utf-8")
    print(text)
    return int(any(row.get("error") for row in rows))


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.gpu", main))
