"""Where the time of a packed batch goes: torch.profiler over forwards of one set of texts, part by part, against the matrix-product rate.

    python benchmarks/profile_packed.py --output results/profile_short_texts

Parts are sums of the profiler's self times of their operations; "between operations" is what is left of the profiled passes: Python, views, and
the profiler itself. What the profiler adds is told by the passes without it.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from neobert.benchmarks.throughput import GEMM_SECONDS, MatrixProduct
from neobert.benchmarks.throughput_models import build
from neobert.benchmarks.throughput_sets import draw_lengths, make_batch
from neobert.common.files import write_json, write_text
from neobert.common.results import environment, markdown_table


# What an operation is for, by its name; the first match counts. Matrix products are told apart by their weight.
PARTS = {
    "attention": ("scaled_dot_product", "flash_attn", "varlen", "softmax", "bmm"),
    "SwiGLU": ("silu",),
    "RMSNorm": ("rms_norm", "pow", "mean", "rsqrt", "sum"),
    "gather, scatter, cat, copies": ("index", "embedding", "cat", "copy_", "clone", "fill_", "zero_", "nonzero", "sort", "contiguous"),
}


def part_of(event, products):
    """Name of the part that a profiled operation belongs to."""
    shapes = [shape for shape in event.input_shapes if shape]
    if event.key in ("aten::mm", "aten::addmm"):
        return products.get(tuple(shapes[-1]), "other products")
    for part, names in PARTS.items():
        if any(name in event.key for name in names):
            return part
    if event.key.startswith("aten::mul") and shapes:
        # The halves of the feed-forward and complex numbers (RoPE) are multiplied; else a norm is scaled.
        inner = next(shape[1] for shape, name in products.items() if name == "w12") // 2
        return "SwiGLU" if shapes[0][-1] == inner else "RoPE" if len(shapes[0]) == 5 else "RMSNorm"
    return "residuals" if event.key == "aten::add" else "other operations"


def measure(arguments):
    """Seconds of plain passes, seconds and operations of profiled ones, the rate of a matrix product beside them, and the texts."""
    run = build("neobert", "sdpa", "cpu", torch.float32, {"num_hidden_layers": arguments.layers})
    lengths = draw_lengths(arguments.set, arguments.texts)
    batch = make_batch(lengths, "cpu")
    product, rates, plain, profiled = MatrixProduct("cpu", torch.float32), [], [], []
    with torch.inference_mode():
        for _ in range(2):
            run(*batch)
        for _ in range(arguments.repeats):
            rates.append(product(GEMM_SECONDS))
            start = time.perf_counter()
            run(*batch)
            plain.append(time.perf_counter() - start)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
            for _ in range(arguments.repeats):
                start = time.perf_counter()
                run(*batch)
                profiled.append(time.perf_counter() - start)
    rates.append(product(GEMM_SECONDS))
    return run, lengths, plain, profiled, record.key_averages(group_by_input_shape=True), statistics.median(rates)


def operations_needed(run, lengths, products):
    """Floating-point operations of one forward: {part: count}, 2 a weight and token, 4 D a pair of tokens that see each other."""
    config, tokens = run.model.config, sum(lengths)
    needed = {name: 2 * shape[0] * shape[1] * tokens * config.num_hidden_layers for shape, name in products.items()}
    return {**needed, "attention": 4 * config.hidden_size * sum(n * n for n in lengths) * config.num_hidden_layers}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="results/profile_short_texts")
    parser.add_argument("--set", default="short")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run, lengths, plain, profiled, events, rate = measure(arguments)
    block = run.model.transformer_encoder[0]
    layers = {"qkv": block.qkv, "wo": block.wo, "w12": block.ffn.w12, "w3": block.ffn.w3}
    products = {tuple(layer.weight.shape[::-1]): name for name, layer in layers.items()}
    seconds, calls = {}, {}
    for event in events:
        part = part_of(event, products)
        seconds[part] = seconds.get(part, 0.0) + event.self_cpu_time_total / 1e6 / arguments.repeats
        calls[part] = calls.get(part, 0) + (event.count / arguments.repeats if event.self_cpu_time_total > 0 else 0)
    whole, needed = sum(profiled) / len(profiled), operations_needed(run, lengths, products)
    seconds["between operations"] = max(whole - sum(seconds.values()), 0.0)
    rows, table = [], []
    for part, second in sorted(seconds.items(), key=lambda pair: -pair[1]):
        share = needed[part] / second / rate if part in needed else None
        per_layer = second / arguments.layers * 1e3
        rows.append({"part": part, "seconds": second, "fraction": second / whole, "calls": calls.get(part), "share_of_gemm": share})
        cells = [f"{per_layer:.2f}", f"{second / whole:.1%}", "" if share is None else f"{share:.2f}"]
        table.append([part, "" if part not in calls else f"{calls[part] / arguments.layers:.1f}", *cells])
    median, total = statistics.median(plain), sum(needed.values())
    share = total / median / rate
    env = environment(set=arguments.set, texts=arguments.texts, layers=arguments.layers, dtype="float32")
    text = f"# Where the time of packed texts goes\n\n`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, "
    text += f"{env['threads']} threads, float32, sdpa, torch {env['versions']['torch']}.\n\n"
    text += (
        f"{len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} together ({arguments.set}), {arguments.layers} "
    )
    text += f"layers of the published width. A pass takes {median:.3f} s ({min(plain):.3f} to {max(plain):.3f} over {len(plain)}), {share:.2f} of the "
    text += f"matrix-product rate of {rate / 1e9:,.0f} GFLOP/s measured beside it; {whole:.3f} s under the profiler.\n\n"
    text += markdown_table(["part", "operations a layer", "ms a layer", "of the pass", "share of the matrix-product rate"], table)
    result = {
        "environment": env,
        "seconds": plain,
        "profiled_seconds": profiled,
        "gemm_gflops": rate / 1e9,
        "share_of_gemm": share,
        "parts": rows,
    }
    write_json(Path(arguments.output).with_suffix(".json"), result)
    write_text(Path(arguments.output).with_suffix(".md"), text)
    print(text)


if __name__ == "__main__":
    main()
