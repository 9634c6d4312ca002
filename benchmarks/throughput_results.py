"""Result files of `neobert throughput`: throughput.json, .csv and .md, what `--resume` takes from
them, and the speed ratios."""

import csv
import io
from pathlib import Path

from ..common.errors import UserError
from ..common.files import write_text
from ..common.outputs import check_folder, check_result_files, earlier_result
from ..common.results import markdown_table, write_result
from .measuring import between, ratio


_FILES = ("throughput.json", "throughput.csv", "throughput.md", "fixed.png", "fill.png")
_COLUMNS = (
    "set",
    "model",
    "implementation",
    "batch",
    "longest",
    "fill",
    "tokens_per_second",
    "quartiles",
    "share_of_gemm",
    "peak_memory_mib",
    "error",
)
NOTE = (
    "Medians over repeats; padding is not counted as tokens or as work. Share: floating-point "
    "operations that the real tokens need, over "
    "those that a plain matrix product did in the same time. Peak: reserved memory on CUDA; on the "
    "CPU resident memory beyond the weights."
)


def ratios(rows, implementation="sdpa"):
    """Speed of NeoBERT over every other run of the same set: {set: {"model/implementation":
    {"ratio", "quartiles"}}}."""
    result = {}
    for mine in rows:
        if (mine["model"], mine["implementation"]) != ("neobert", implementation) or not mine.get(
            "seconds"
        ):
            continue
        own = [second / mine["real_tokens"] for second in mine["seconds"]]
        for other in rows:
            if other["set"] == mine["set"] and other is not mine and other.get("seconds"):
                found = ratio([second / other["real_tokens"] for second in other["seconds"]], own)
                result.setdefault(mine["set"], {})[
                    f"{other['model']}/{other['implementation']}"
                ] = found
    return result


def row_table(rows):
    """Every run, as a markdown table."""
    lines = []
    for row in rows:
        name = [row["set"], row["model"], row["implementation"]]
        if row.get("error"):
            lines.append([*name, *[""] * 4, row["error"], "", ""])
            continue
        figures = (
            f"{row['fill']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            between(row["quartiles"]),
            f"{row['share_of_gemm']:.2f}",
        )
        peak = row["peak_memory_mib"]
        lines.append(
            [*name, row["batch"], row["longest"], *figures, "" if peak is None else f"{peak:,.0f}"]
        )
    header = [
        "set",
        "model",
        "implementation",
        "texts",
        "longest",
        "fill",
        "real tokens/s",
        "quartiles",
        "share of GEMM",
        "peak MiB",
    ]
    return markdown_table(header, lines)


def ratio_table(rows, implementation="sdpa"):
    """`ratios` as a markdown table."""
    table = [
        [name, other, f"{value['ratio']:.2f}", between(value["quartiles"], ".2f")]
        for name, others in ratios(rows, implementation).items()
        for other, value in others.items()
    ]
    return markdown_table(["set", "model/implementation", "times as fast", "quartiles"], table)


def tables(data):
    """The page: every run, then the ratios."""
    env = data["environment"]
    kept = {
        (row.get("commit"), row.get("date")): None for row in data["rows"] if not row.get("error")
    }
    kept.pop((env["commit"], env["date"]), None)
    text = [
        f"Clock: {data['settings']['clock']}. {NOTE}",
        row_table(data["rows"]),
        "## NeoBERT (sdpa) over",
        ratio_table(data["rows"]),
    ]
    if kept:
        before = ", ".join(f"commit {commit}, {date}" for commit, date in kept)
        text.insert(1, f"Some rows were kept from earlier runs ({before}).")
    return "\n\n".join(part.strip() for part in text) + "\n"


def write_results(folder, data):
    """throughput.json, .csv and .md."""
    folder = Path(folder)
    rest = {name: value for name, value in data.items() if name != "environment"}
    write_result(
        folder / "throughput",
        "Throughput",
        data["environment"],
        {**rest, "ratios": ratios(data["rows"])},
        tables(data),
    )
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, _COLUMNS, extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerows(data["rows"])
    write_text(folder / "throughput.csv", buffer.getvalue())


def load_done(output, settings, resume):
    """Rows that an earlier run left in the folder `output`, for `resume`; without it there must be
    none.

    Raises:
        UserError: `output` is a file, or holds results or other files that this run would replace,
            or was measured with other settings.
    """
    check_folder(output, "output")
    path = Path(output) / "throughput.json"
    data = earlier_result(path, "settings", "rows")
    check_result_files(output, "throughput", data, *_FILES)
    if data is None:
        return []
    if not resume:
        raise UserError(
            f"{path} holds results already; add to them with --resume, or give another --output"
        )
    before = data["settings"]
    if changed := ", ".join(
        f"{name}={before.get(name)}"
        for name, value in settings.items()
        if before.get(name) != value
    ):
        raise UserError(f"{path} was measured with {changed}; give the same, or another --output")
    return data["rows"]
