"""Page of `make gpu`: targets, and the results of benchmarks/gpu.sh.

python -m benchmarks.gpu results/gpu
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neobert.common.commands import guarded
from neobert.common.environment import environment_line
from neobert.common.files import read_json
from neobert.common.tables import markdown_table
from neobert.throughput.command import ratios


# Maximum peak memory above the weights, relative to ModernBERT base.
MAX_MEMORY_RATIO = 1.8


def targets(rows: Sequence[dict[str, Any]], memory: Sequence[Mapping[str, Any]]) -> str:
    """Return a markdown table of the targets and the results. A missing result is an empty cell.

    Args:
        rows: Rows of every throughput.json.
        memory: Rows of memory.json.
    """
    # A model without its package has a row with the reason.
    rows = [row for row in rows if not row.get("error")]

    def best(workload: str, figure: str, model: str = "neobert") -> float | None:
        """Return the best figure of a model on a workload, or None."""
        figures = [row[figure] for row in rows if (row["set"], row["model"]) == (workload, model)]
        return max(figures, default=None)

    # (Target, minimum, result)
    lines: list[tuple[str, float, float | None]] = []
    for name, minimum in (("4096", 1.47), ("8192", 1.91)):
        neobert = best(name, "tokens_per_second")
        modernbert = best(name, "tokens_per_second", "modernbert-base")
        speedup = neobert / modernbert if neobert and modernbert else None
        lines.append((f"{int(name):,} tokens: best speedup over ModernBERT base", minimum, speedup))
    for name in ("2048", "4096"):
        what = f"{int(name):,} tokens: fraction of the speed of a bf16 matrix product"
        lines.append((what, 0.5, best(name, "share_of_gemm")))

    speedups = ratios(rows, "sdpa")
    for name in ("normal-256", "normal-4096", "short"):
        value = speedups.get(name, {}).get("neobert/padded")
        result = None if value is None else value["ratio"]
        lines.append((f"{name}: speedup of packed over padded", 1.4, result))

    table: list[list[object]] = []
    for what, minimum, result in lines:
        if result is None:
            table.append([what, minimum, None, None])
        else:
            table.append([what, minimum, f"{result:.2f}", "yes" if result >= minimum else "no"])

    # Less memory is better, so this target is a maximum.
    memory_ratios = {
        row["length"]: row["neobert"] / row["modernbert-base"]
        for row in memory
        if "modernbert-base" in row
    }
    for length in (4096, 8192):
        what = f"{length:,} tokens: peak memory above the weights over ModernBERT base"
        limit = f"at most {MAX_MEMORY_RATIO}"
        result = memory_ratios.get(length)
        if result is None:
            table.append([what, limit, None, None])
        else:
            is_reached = result <= MAX_MEMORY_RATIO
            table.append([what, limit, f"{result:.2f}", "yes" if is_reached else "no"])
    return markdown_table(["bf16", "Target", "Result", "Reached"], table)


def main(argv: Sequence[str] | None = None) -> int:
    """Write gpu.md.

    Returns:
        The exit code: 1 if a model could not be measured, else 0.
    """
    (folder,) = map(Path, sys.argv[1:] if argv is None else argv)
    results = [read_json(path) for path in sorted(folder.glob("*/throughput.json"))]
    rows = [row for result in results for row in result["rows"]]
    memory_path = folder / "memory.json"
    memory = read_json(memory_path)["rows"] if memory_path.exists() else []

    # All measurements ran on the same machine.
    environments = [environment_line(result["environment"]) for result in results[:1]]
    pages = sorted(path.relative_to(folder) for path in folder.rglob("*.md"))
    links = "\n".join(f"- [{page}]({page})" for page in pages if page.name != "gpu.md")
    text = "\n\n".join(["# GPU", *environments, targets(rows, memory).strip(), links])
    (folder / "gpu.md").write_text(f"{text}\n", encoding="utf-8")
    print(text)
    return int(any(row.get("error") for row in rows))


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.gpu", main))
