"""Command `neobert throughput`: tokens per second of NeoBERT and other encoders.

The models have random weights. A workload defines the sequence lengths of a batch (paper, Table 9
and Figure 3), and padding is not counted as tokens. The models take turns in every repeat, together
with a plain matrix product, so other load on the machine affects all of them. Results are
written after every workload: an interrupt keeps those that have finished.
"""

import functools
import importlib.util
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..common.environment import environment
from ..common.errors import one_line
from ..common.folders import check_new
from ..common.measures import PeakMemory
from ..common.options import log_options
from ..common.results import write_result
from ..common.tables import markdown_table
from .models import Batch, Candidate, build, draw_lengths, flops, lengths_of_file, make_batch
from .options import OPTIONS, Plan
from .timing import CLOCKS, MatrixProduct, Ratio, Timing, between, in_turns, ratio


NOTE = (
    "Medians over the repeats. Padding counts neither as tokens nor as work. The fraction of the "
    "matrix product's speed is that of the floating-point operations that the tokens need. Peak "
    "memory is the memory beyond that before the forward pass: reserved on CUDA, resident on the "
    "CPU."
)

Pair = tuple[str, str]

# Measured values of a workload, a model and an implementation, with the keys of throughput.json.
Row = dict[str, Any]


# ------------------------------------------------------------------------------------------------
# measurement


@dataclass(frozen=True)
class _Ready:
    """Candidate that has run once on its batch.

    Attributes:
        candidate: Model to time.
        batch: Batch of the workload.
        peak_bytes: Peak memory of the first forward pass, None if it is not known.
    """

    candidate: Candidate
    batch: Batch
    peak_bytes: int | None


class _Candidates:
    """Models of a run, which are built when they are first used.

    All variants of NeoBERT share one set of weights.
    """

    def __init__(self, plan: Plan, small: Mapping[str, Any]) -> None:
        self.plan = plan
        self.small = small
        self.models: dict[Pair, Candidate] = {}

    def get(self, pair: Pair) -> Candidate:
        """Return the model of a pair (model, implementation)."""
        if pair not in self.models:
            name, implementation = pair
            shared = self._neobert() if name == "neobert" else None
            dtype = getattr(torch, self.plan.dtype)
            self.models[pair] = build(
                name, implementation, self.plan.device, dtype, self.small, shared
            )
        return self.models[pair]

    def _neobert(self) -> torch.nn.Module | None:
        for (name, _), candidate in self.models.items():
            if name == "neobert":
                return candidate.encoder
        return None


def measure(
    plan: Plan,
    small: Mapping[str, Any] | None = None,
    save: Callable[[list[Row]], object] = lambda rows: None,
) -> list[Row]:
    """Measure every model and implementation on every workload.

    Args:
        plan: Models, workloads and repetitions.
        small: Configuration fields that replace the published ones.
        save: Function that is called with the rows so far after every workload.

    Returns:
        One row per workload, model and implementation. A model that is not available or fails has a
        row with "error".
    """
    changes = dict(small or {})
    if plan.layers:
        changes["num_hidden_layers"] = plan.layers

    # The matrix product has the precision of the models, so fractions of its speed are
    # comparable.
    dtype = getattr(torch, plan.dtype)
    product = MatrixProduct(plan.device, dtype, CLOCKS[plan.clock])
    file_lengths = lengths_of_file(plan.texts, plan.tokenizer) if plan.texts else None
    candidates = _Candidates(plan, changes)
    rows: list[Row] = []

    # Each model makes one untimed pass and the timed repeats.
    workloads = plan.sets
    pass_count = len(workloads) * len(plan.pairs()) * (plan.repeats + 1)
    with tqdm(total=pass_count, desc="throughput", unit="pass", disable=None) as progress:
        for workload in workloads:
            # The lengths are a function of the batch size, which the limits of the run determine.
            lengths = functools.partial(
                draw_lengths, workload, seed=plan.seed, file_lengths=file_lengths
            )
            rows += _measure_workload(workload, lengths, plan, candidates, product, progress)
            # An interrupt keeps the workloads that have finished.
            save(rows)
    return rows


def _measure_workload(
    workload: str,
    lengths: Callable[[int], list[int]],
    plan: Plan,
    candidates: _Candidates,
    product: MatrixProduct,
    progress: tqdm,
) -> list[Row]:
    """Measure every model and implementation on one workload.

    Args:
        workload: Name of the workload.
        lengths: Function that returns the sequence lengths for a batch size.
        plan: Models and repetitions.
        candidates: Models of the run.
        product: Matrix product that is measured around every call.
        progress: Progress bar, which counts the forward passes.

    Returns:
        One row per model and implementation.
    """
    rows: dict[Pair, Row] = {}
    ready: dict[Pair, _Ready] = {}
    for pair in plan.pairs():
        model, implementation = pair
        progress.set_postfix_str(f"{workload} {model}/{implementation}")
        rows[pair] = {"set": workload, "model": model, "implementation": implementation}
        # A package may be missing, or a kernel may fail with any exception.
        try:
            ready[pair] = _first_passes(candidates.get(pair), lengths, plan)
        except Exception as error:
            rows[pair]["error"] = one_line(error, 160)
        progress.update(1)

    # Candidates alternate, so changes of the machine's speed affect all of them.
    calls = {pair: functools.partial(entry.candidate, entry.batch) for pair, entry in ready.items()}
    with torch.inference_mode():
        timings = in_turns(calls, plan.repeats, product, CLOCKS[plan.clock], progress.update)

    for pair, entry in ready.items():
        rows[pair].update(_measured_fields(entry, timings[pair], product))
    return list(rows.values())


@torch.inference_mode()
def _first_passes(candidate: Candidate, lengths: Callable[[int], list[int]], plan: Plan) -> _Ready:
    """Run a model on as many sequences as the options allow, without timing.

    Args:
        candidate: Model to run.
        lengths: Function that returns the sequence lengths for a batch size.
        plan: Limits of the batch, and number of passes.

    Raises:
        ValueError: If a sequence is too long for the model.
    """
    batch_size = plan.batch or plan.max_batch
    if not plan.batch:
        # The lengths depend on the batch size, so each size is tried.
        while batch_size > 1 and batch_size * max(lengths(batch_size)) > plan.max_tokens:
            batch_size -= 1

    batch = make_batch(lengths(batch_size), plan.device, plan.seed)
    if max(batch.lengths) > candidate.longest:
        raise ValueError(f"takes texts of at most {candidate.longest} tokens")

    # Later passes reuse the memory of the first one, so only the first one shows the peak.
    with PeakMemory(plan.device) as memory:
        candidate(batch)

    # Further passes compile kernels and fill caches.
    for _ in range(plan.warmup - 1):
        candidate(batch)
    return _Ready(candidate, batch, memory.growth)


def _measured_fields(entry: _Ready, timing: Timing, product: MatrixProduct) -> Row:
    """Return the measured fields of a row."""
    batch = entry.batch
    batch_size = len(batch.lengths)
    longest = max(batch.lengths)
    non_padding_tokens = sum(batch.lengths)

    # Padding is not counted, so an implementation that computes on padding is slower by that work.
    speed = timing.per_second(non_padding_tokens)
    operations = flops(entry.candidate.encoder, batch.lengths)
    return {
        "backend": entry.candidate.backend,
        "batch": batch_size,
        "longest": longest,
        "fill": non_padding_tokens / (batch_size * longest),
        "real_tokens": non_padding_tokens,
        "tokens_per_second": speed["median"],
        "quartiles": speed["quartiles"],
        "seconds": timing.seconds,
        "gemm_gflops": statistics.median_high(timing.rates) / 1e9,
        "gemm_size": product.size,
        "share_of_gemm": timing.fraction_of_product(operations),
        "peak_memory_mib": None if entry.peak_bytes is None else entry.peak_bytes / 2**20,
    }


# ------------------------------------------------------------------------------------------------
# tables


def ratios(rows: Sequence[Row], implementation: str | None = None) -> dict[str, dict[str, Ratio]]:
    """Return the speedup of NeoBERT over every other run of the same workload.

    Args:
        rows: Rows of a run.
        implementation: Implementation of NeoBERT that is compared; by default that of
            `compared_implementation`.

    Returns:
        The speedups, {workload: {"model/implementation": ratio}}.
    """
    implementation = implementation or compared_implementation(rows)
    # Times per token can be compared even if batch sizes differ.
    seconds_per_token: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if not row.get("error"):
            key = (row["set"], row["model"], row["implementation"])
            tokens = row["real_tokens"]
            seconds_per_token[key] = [seconds / tokens for seconds in row["seconds"]]

    speedups: dict[str, dict[str, Ratio]] = {}
    for (workload, model, other), times in seconds_per_token.items():
        reference = seconds_per_token.get((workload, "neobert", implementation))
        if reference is not None and reference is not times:
            speedups.setdefault(workload, {})[f"{model}/{other}"] = ratio(times, reference)
    return speedups


def compared_implementation(rows: Sequence[Row]) -> str:
    """Return the implementation of NeoBERT that is compared: sdpa, or the first measured one."""
    measured = [
        row["implementation"] for row in rows if row["model"] == "neobert" and not row.get("error")
    ]
    return "sdpa" if "sdpa" in measured or not measured else measured[0]


def row_table(rows: Sequence[Row]) -> str:
    """Return every run as a markdown table."""
    header = [
        "Workload",
        "Model",
        "Implementation",
        "Batch size",
        "Longest sequence (tokens)",
        "Non-padding fraction",
        "Tokens/s",
        "Quartiles",
        "Fraction of matrix product",
        "Peak memory (MiB)",
    ]

    lines: list[list[object]] = []
    errors: list[str] = []
    for row in rows:
        # A row with an error has no measured values.
        name = [row["set"], row["model"], row["implementation"]]
        if row.get("error"):
            lines.append([*name, "", "", "", "failed", "", "", ""])
            errors.append(f"- {', '.join(name)}: {row['error']}\n")
            continue

        peak = row["peak_memory_mib"]
        lines.append(
            [
                *name,
                row["batch"],
                row["longest"],
                f"{row['fill']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                between(row["quartiles"]),
                f"{row['share_of_gemm']:.2f}",
                None if peak is None else f"{peak:,.0f}",
            ]
        )
    table = markdown_table(header, lines)
    return f"{table}\n{''.join(errors)}" if errors else table


def comparison(rows: Sequence[Row]) -> str:
    """Return `ratios` as a markdown table with a heading, or "" if there is nothing to compare."""
    lines = []
    for workload, others in ratios(rows).items():
        for other, value in others.items():
            speedup = f"{value['ratio']:.2f}"
            lines.append([workload, other, speedup, between(value["quartiles"], ".2f")])
    if not lines:
        return ""
    table = markdown_table(["Workload", "Model/implementation", "Speedup", "Quartiles"], lines)
    return f"## Speedup of NeoBERT ({compared_implementation(rows)})\n\n{table}"


def write_results(
    folder: Path, plan: Plan, environment: Mapping[str, Any], rows: Sequence[Row]
) -> None:
    """Write throughput.json and throughput.md.

    Args:
        folder: Output directory.
        plan: Plan of the run.
        environment: Environment of the run.
        rows: Rows so far, as `measure` returns them.
    """
    text = f"Clock: {plan.clock}. {NOTE}\n\n{row_table(rows)}\n{comparison(rows)}"
    data = {"options": asdict(plan), "rows": rows, "ratios": ratios(rows)}
    write_result(folder / "throughput", "Throughput", environment, data, text)


def write_plots(folder: Path, environment: Mapping[str, Any], rows: Sequence[dict]) -> None:
    """Write throughput.png (tokens per second by length) and by_fill.png (speedup by padding).

    A plot is omitted if the run has only one point of it, or if matplotlib is not installed.

    Args:
        folder: Output directory.
        environment: Environment of the run, for the caption.
        rows: Rows of the run, as `measure` returns them.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return
    from .plots import plot_lengths, plot_speedup

    parts = [environment.get(name) for name in ("hardware", "dtype", "commit", "date")]
    caption = ", ".join(str(part) for part in parts if part)
    plot_lengths(rows, folder / "throughput.png", caption)
    plot_speedup(rows, ratios(rows), folder / "by_fill.png", caption)


def main(argv: Sequence[str] | None = None, small: Mapping[str, Any] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments of the command line after `throughput`.
        small: Configuration fields that replace the published ones, for tests.

    Returns:
        The exit code: 0, 1 if all measurements failed, or 130 after an interrupt.
    """
    options = OPTIONS["throughput"].read(sys.argv[1:] if argv is None else argv)
    log_options(options)
    plan = Plan.from_options(options)
    if plan.threads:
        torch.set_num_threads(plan.threads)

    # A directory that cannot be used is reported before the measurement, which may take hours.
    check_new(plan.output, "output")
    folder = Path(plan.output)
    folder.mkdir(parents=True, exist_ok=True)
    record = environment(dtype=plan.dtype)
    save = functools.partial(write_results, folder, plan, record)
    try:
        rows = measure(plan, small, save)
    except KeyboardInterrupt:
        # Shells report 128 plus the number of the signal, which is 2 for SIGINT.
        finished = "No workload has finished."
        if (folder / "throughput.json").exists():
            finished = f"{folder} contains the workloads that have finished."
        print(f"interrupted. {finished}", file=sys.stderr)
        return 130

    write_plots(folder, record, rows)
    print(row_table(rows), comparison(rows), sep="\n")
    failed = sum(1 for row in rows if row.get("error"))
    if failed:
        print(f"{failed} of {len(rows)} measurements failed, see the table.", file=sys.stderr)
    return 1 if failed == len(rows) else 0
