"""`neobert throughput`: real tokens a second of NeoBERT and its peers, on fixed lengths and on
mixed ones (paper, Table 9 and Figure 3).

Every model is built with random weights. A *set* says how long the texts of a batch are; tokens a
second count real tokens only. The models that are compared take turns in every repeat, and so does
a plain matrix product, so that a busy machine slows all alike. Results are written after every set:
an interrupt keeps what is done.
"""

import functools
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
from .models import build, draw_lengths, flops, lengths_of_file, make_batch
from .options import OPTIONS, Plan
from .timing import CLOCKS, MatrixProduct, between, in_turns, ratio


NOTE = (
    "Medians over repeats; padding is not counted as tokens or as work. Share: floating-point "
    "operations that the real tokens need, over those that a plain matrix product did in the same "
    "time. Peak: memory beyond that before the forward, reserved on CUDA and resident on the CPU."
)


# ------------------------------------------------------------------------------------------------
# measurement


def measure(plan, small=None, save=lambda rows: None):
    """Measures every model and implementation on every set.

    Args:
        plan: Models, workloads and repetitions.
        small: configuration fields that replace the published ones.
        save: function of the rows so far, called after every set.
    Returns:
        a list of dictionaries, one a set, model and implementation. A model that is not available
        here, or fails, has a row with "error".
    """
    small = dict(small or {})
    if plan.layers:
        small["num_hidden_layers"] = plan.layers
    clock = CLOCKS[plan.clock]
    product = MatrixProduct(plan.device, getattr(torch, plan.dtype), clock)
    file_lengths = None
    if plan.texts:
        file_lengths = lengths_of_file(plan.texts, plan.tokenizer)
    pairs, candidates, rows = plan.pairs(), {}, []
    steps = len(plan.sets) * len(pairs) * (plan.repeats + 1)
    with tqdm(total=steps, desc="throughput", unit="pass", disable=None) as progress:
        for name in plan.sets:
            lengths = functools.partial(
                draw_lengths, name, seed=plan.seed, file_lengths=file_lengths
            )
            ready, of_set = {}, []
            for pair in pairs:
                progress.set_postfix_str(f"{name} {'/'.join(pair)}")
                row = {"set": name, "model": pair[0], "implementation": pair[1]}
                of_set.append(row)
                try:
                    if pair not in candidates:
                        # all variants of NeoBERT share one set of weights
                        kin = [one for (model, _), one in candidates.items() if model == "neobert"]
                        shared = kin[0].encoder if kin and pair[0] == "neobert" else None
                        dtype = getattr(torch, plan.dtype)
                        candidates[pair] = build(*pair, plan.device, dtype, small, shared)
                    batch, peak = _first_passes(candidates[pair], lengths, plan)
                    ready[pair] = row, batch, peak
                # one that is not installed or fails here has a row that says so
                except Exception as error:
                    row["error"] = one_line(error, 160)
                progress.update(1)
            calls = {
                pair: lambda candidate=candidates[pair], batch=batch: candidate(batch)
                for pair, (_, batch, _) in ready.items()
            }
            with torch.inference_mode():
                timings = in_turns(calls, plan.repeats, product, clock, progress.update)
            for pair, (row, batch, peak) in ready.items():
                row.update(_figures(candidates[pair], batch, timings[pair], product))
                row["peak_memory_mib"] = None if peak is None else peak / 2**20
            rows += of_set
            save(rows)
    return rows


@torch.inference_mode()
def _first_passes(candidate, lengths, plan):
    """Untimed passes, with as many texts as the options allow.

    Args:
        lengths: function of a number of texts -> their lengths.
    Returns:
        (the `Batch`, bytes of memory beyond those before its first pass or None).
    """
    texts = plan.batch or plan.max_batch
    while not plan.batch and texts > 1 and texts * max(lengths(texts)) > plan.max_tokens:
        texts -= 1
    batch = make_batch(lengths(texts), plan.device, plan.seed)
    if max(batch.lengths) > candidate.longest:
        raise ValueError(f"takes texts of at most {candidate.longest} tokens")
    with PeakMemory(plan.device) as memory:
        candidate(batch)
    for _ in range(plan.warmup - 1):
        candidate(batch)
    return batch, memory.growth


def _figures(candidate, batch, timing, product):
    """The measured fields of a row."""
    tokens, texts, longest = sum(batch.lengths), len(batch.lengths), max(batch.lengths)
    speed = timing.per_second(tokens)
    return {
        "backend": candidate.backend,
        "batch": texts,
        "longest": longest,
        "fill": tokens / (texts * longest),
        "real_tokens": tokens,
        "tokens_per_second": speed["median"],
        "quartiles": speed["quartiles"],
        "seconds": timing.seconds,
        "gemm_gflops": sorted(timing.rates)[len(timing.rates) // 2] / 1e9,
        "gemm_size": product.size,
        "share_of_gemm": timing.share(flops(candidate.encoder, batch.lengths)),
    }


# ------------------------------------------------------------------------------------------------
# tables


def ratios(rows, implementation="sdpa"):
    """Speed of NeoBERT over every other run of the same set: {set: {"model/implementation":
    {"ratio", "quartiles"}}}."""
    per_token = {
        (row["set"], row["model"], row["implementation"]): [
            second / row["real_tokens"] for second in row["seconds"]
        ]
        for row in rows
        if not row.get("error")
    }
    result = {}
    for (name, model, kind), seconds in per_token.items():
        own = per_token.get((name, "neobert", implementation))
        if own is not None and own is not seconds:
            result.setdefault(name, {})[f"{model}/{kind}"] = ratio(seconds, own)
    return result


def row_table(rows):
    """Every run, as a markdown table."""
    lines = []
    for row in rows:
        name = [row["set"], row["model"], row["implementation"]]
        if row.get("error"):
            lines.append([*name, "", "", "", "", row["error"], "", ""])
            continue
        speed = f"{row['tokens_per_second']:,.0f}", between(row["quartiles"])
        peak = row["peak_memory_mib"]
        lines.append(
            [*name, row["batch"], row["longest"], f"{row['fill']:.2f}", *speed]
            + [f"{row['share_of_gemm']:.2f}", None if peak is None else f"{peak:,.0f}"]
        )
    header = "set, model, implementation, texts, longest, fill, real tokens/s, quartiles"
    return markdown_table([*header.split(", "), "share of GEMM", "peak MiB"], lines)


def ratio_table(rows, implementation="sdpa"):
    """`ratios` as a markdown table."""
    table = [
        [name, other, f"{value['ratio']:.2f}", between(value["quartiles"], ".2f")]
        for name, others in ratios(rows, implementation).items()
        for other, value in others.items()
    ]
    return markdown_table(["set", "model/implementation", "times as fast", "quartiles"], table)


def write_results(folder, plan, made, rows):
    """Writes throughput.json and throughput.md.

    Args:
        made: the environment, as `results.environment` returns it.
    """
    text = (
        f"Clock: {plan.clock}. {NOTE}\n\n{row_table(rows)}\n## NeoBERT (sdpa) over\n\n"
        f"{ratio_table(rows)}"
    )
    data = {"options": asdict(plan), "rows": rows, "ratios": ratios(rows)}
    write_result(Path(folder) / "throughput", "Throughput", made, data, text)


def write_plots(folder: Path, environment: Mapping[str, Any], rows: Sequence[dict]) -> None:
    """Write throughput.png (tokens per second by length) and by_fill.png (speedup by padding).

    A plot is omitted if the run has only one point of it, or if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return
    from .plots import plot_lengths, plot_speedup

    parts = [environment.get(name) for name in ("hardware", "dtype", "commit", "date")]
    caption = ", ".join(str(part) for part in parts if part)
    plot_lengths(rows, folder / "throughput.png", caption)
    plot_speedup(rows, ratios(rows), folder / "by_fill.png", caption)


def main(argv=None, small=None):
    """Runs the benchmark; `small` replaces configuration fields (tests). Returns the exit status,
    130 after an interrupt."""
    options = OPTIONS["throughput"].read(sys.argv[1:] if argv is None else argv)
    log_options(options)
    plan = Plan.from_options(options)
    if plan.threads:
        torch.set_num_threads(plan.threads)
    check_new(plan.output, "output")
    folder = Path(plan.output)
    made = environment(dtype=plan.dtype)
    save = functools.partial(write_results, folder, plan, made)
    try:
        rows = measure(plan, small, save)
    except KeyboardInterrupt:
        print(f"interrupted; the sets that were finished are in {folder}", file=sys.stderr)
        return 130
    write_plots(folder, made, rows)
    print(row_table(rows), ratio_table(rows), sep="\n")
    return 0
