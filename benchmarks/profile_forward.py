"""Where the time of a packed forward goes: torch.profiler over one set of texts, part by part,
against the matrix-product rate.

    python -m neobert.benchmarks.profile_forward --output results/profile_short_texts
    python -m neobert.benchmarks.profile_forward --device cuda --set 2048 --texts 16 --layers 28 \\
        --output results/profile_gpu

Parts are sums of the profiler's own times of their operations, of their kernels on CUDA; "between
operations" is what is left of the profiled
passes: Python, views, waiting, and the profiler itself. What the profiler adds is told by the
passes without it.
"""

import statistics
import sys
from collections import Counter
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from ..common.arguments import Arguments, Options, option
from ..common.commands import guarded
from ..common.results import environment, markdown_table, write_result
from ..throughput.models import build, draw_lengths, make_batch
from ..throughput.options import check_set
from ..throughput.timing import MatrixProduct, Timing, timed


# What an operation is for, by its name; the first match counts. Matrix products are told apart by
# their weight.
PARTS = {
    "attention": (
        "scaled_dot_product",
        "flash_attn",
        "flash_attention",
        "varlen",
        "softmax",
        "bmm",
    ),
    "SwiGLU": ("silu",),
    "RMSNorm": ("rms_norm", "pow", "square", "mean", "rsqrt", "sum"),
    "RoPE": ("complex", "polar", "sin", "cos", "flip"),
    "casts and copies": ("copy_", "_to_copy", "clone", "contiguous"),
    "gather, scatter, cat": (
        "index",
        "embedding",
        "cat",
        "fill_",
        "zero_",
        "nonzero",
        "sort",
        "gather",
        "scatter",
    ),
    "compiled kernels": ("triton", "graph", "fused", "Torch-Compiled", "CompiledFunction"),
}


@dataclass
class ProfileArguments(Arguments):
    """Options of `python -m neobert.benchmarks.profile_forward`."""

    output: str = option("results/profile_short_texts", "path of the result without its ending")
    set: str = option("short", "text lengths, as in neobert throughput")
    texts: int = option(24, "of the batch", least=1)
    layers: int = option(6, "of the published width", least=1)
    implementation: str = option(
        "sdpa", choices=("sdpa", "padded", "compiled", "flex_attention", "flash_attention_2")
    )
    device: str = option("cpu", choices=("cpu", "cuda"))
    dtype: str | None = option(
        None,
        "by default bfloat16 on GPUs, else float32",
        choices=("float32", "bfloat16", "float16"),
    )
    repeats: int = option(5, least=1)
    threads: int = option(default_factory=torch.get_num_threads, least=1)

    def __post_init__(self):
        super().__post_init__()
        check_set(self.set)
        self.dtype = self.dtype or ("bfloat16" if self.device == "cuda" else "float32")


def part_of(name, shapes, products):
    """Name of the part that a profiled operation belongs to.

    Args:
        name, shapes: of the operation and its inputs.
        products: {(in, out) of a weight: its name}.
    """
    shapes = [tuple(shape) for shape in shapes if shape]
    if name in ("aten::mm", "aten::addmm"):
        return products.get(shapes[-1], "other products")
    for part, words in PARTS.items():
        if any(word in name for word in words):
            return part
    if name.startswith("aten::mul") and shapes:
        # The halves of the feed-forward and complex numbers (RoPE) are multiplied; else a norm is
        # scaled.
        inner = next(shape[1] for shape, weight in products.items() if weight == "w12") // 2
        return "SwiGLU" if shapes[0][-1] == inner else "RoPE" if len(shapes[0]) == 5 else "RMSNorm"
    return "residuals" if name.startswith("aten::add") else "other operations"


def own_seconds(event, device):
    """Seconds of an operation without those that it calls; on CUDA of its kernels."""
    return (event.self_device_time_total if device == "cuda" else event.self_cpu_time_total) / 1e6


def passes(run, batch, options):
    """(`Timing` of plain passes, seconds of profiled ones, the profile)."""
    product, plain = MatrixProduct(options.device, getattr(torch, options.dtype)), Timing()
    activities = (
        {ProfilerActivity.CPU, ProfilerActivity.CUDA}
        if options.device == "cuda"
        else {ProfilerActivity.CPU}
    )
    with torch.inference_mode():
        for _ in range(2):
            run(batch)
        for _ in range(options.repeats):
            plain.add(*timed(lambda: run(batch), product))
        with profile(activities=activities, record_shapes=True) as record:
            profiled = [timed(lambda: run(batch))[0] for _ in range(options.repeats)]
    return plain, profiled, record


def needed(config, lengths, products):
    """Floating-point operations of one forward: {part: count}, 2 a weight and token, 4 D a pair of
    tokens that see each other."""
    tokens = sum(lengths)
    counts = {
        name: 2 * shape[0] * shape[1] * tokens * config.num_hidden_layers
        for shape, name in products.items()
    }
    return {
        **counts,
        "attention": 4
        * config.hidden_size
        * sum(n * n for n in lengths)
        * config.num_hidden_layers,
    }


def profile_forward(options, small=None):
    """The figures of one forward; `small` replaces configuration fields (tests).

    Returns:
        dict: seconds of plain and profiled passes, the matrix product's rate, the share of it, and
        the parts, longest first.
    """
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    run = build(
        "neobert",
        options.implementation,
        options.device,
        dtype,
        {"num_hidden_layers": options.layers, **(small or {})},
    )
    lengths = draw_lengths(options.set, options.texts)
    timing, profiled, record = passes(run, make_batch(lengths, options.device), options)
    plain, rate = timing.seconds, statistics.median(timing.rates)
    block, layers = run.model.transformer_encoder[0], run.model.config.num_hidden_layers
    weights = {"qkv": block.qkv, "wo": block.wo, "w12": block.ffn.w12, "w3": block.ffn.w3}
    products = {tuple(weight.weight.shape[::-1]): name for name, weight in weights.items()}
    seconds, calls = Counter(), Counter()
    for event in record.key_averages(group_by_input_shape=True):
        if (second := own_seconds(event, options.device)) > 0:
            part = part_of(event.key, event.input_shapes, products)
            seconds[part] += second / options.repeats
            calls[part] += event.count / options.repeats
    complete, operations = statistics.mean(profiled), needed(run.model.config, lengths, products)
    seconds["between operations"] = max(complete - sum(seconds.values()), 0.0)
    parts = [
        {
            "part": part,
            "ms_a_layer": second / layers * 1e3,
            "of_the_pass": second / complete,
            "calls_a_layer": calls[part] / layers if part in calls else None,
            "share_of_gemm": operations[part] / second / rate
            if operations.get(part) and second
            else None,
        }
        for part, second in sorted(seconds.items(), key=lambda pair: -pair[1])
    ]
    total = sum(operations.values())
    return {
        "lengths": lengths,
        "seconds": plain,
        "profiled_seconds": profiled,
        "gemm_gflops": rate / 1e9,
        "share_of_gemm": total / statistics.median(plain) / rate,
        "tokens_per_second": sum(lengths) / statistics.median(plain),
        "backend": run.backend,
        "parts": parts,
    }


def page(result, options):
    """The figures as markdown."""
    plain, lengths, parts = result["seconds"], result["lengths"], result["parts"]
    rows = []
    for part in parts:
        calls, share = part["calls_a_layer"], part["share_of_gemm"]
        rows.append(
            [part["part"], None if calls is None else f"{calls:.1f}"]
            + [f"{part['ms_a_layer']:.2f}", f"{part['of_the_pass']:.1%}"]
            + [None if share is None else f"{share:.2f}"]
        )
    header = "part, operations a layer, ms a layer, of the pass, share of the matrix-product rate"
    return (
        f"{len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} "
        f"together ({options.set}), {options.layers} layers of the published width; "
        f"{result['backend'].rstrip('.')}. A pass takes {statistics.median(plain):.4f} s "
        f"({min(plain):.4f} to {max(plain):.4f} over {len(plain)}), "
        f"{result['share_of_gemm']:.2f} of the matrix-product rate of "
        f"{result['gemm_gflops']:,.0f} GFLOP/s measured beside it; "
        f"{statistics.mean(result['profiled_seconds']):.4f} s under the profiler.\n\n"
        + markdown_table(header.split(", "), rows)
    )


def main(argv=None):
    """Measures, writes and prints the table; returns the exit code."""
    (options,) = Options(
        "python -m neobert.benchmarks.profile_forward", __doc__, (ProfileArguments,)
    ).read(sys.argv[1:] if argv is None else argv)
    result = profile_forward(options)
    env = environment(dtype=options.dtype, device=options.device, attention=options.implementation)
    print(
        write_result(
            options.output,
            "Where the time of a packed forward goes",
            env,
            result,
            page(result, options),
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.profile_forward", main))
