"""Masked-LM training steps (forward, backward, clipping, AdamW): packed with logits of the masked
tokens, against padded with all logits.

    # CPU, short texts, both ways in turns
    python -m benchmarks.training --output results/training_cpu
    # bf16 autocast against float32
    python -m benchmarks.training --sets 128 --dtypes float32 bfloat16
    python -m benchmarks.training --device cuda --hidden 768 --layers 28 \\
        --sets 1024 4096 --tokens 32768

Both ways see the same texts with the same tokens masked, so their losses must agree. Each runs in a
process of its own, which makes its peak memory its own; the ways take turns. The share is of the
operations that a step needs (three times those of the forward: 6 a weight and token, 12 D a pair of
visible tokens, the decoder for masked tokens only) over what a plain matrix product did beside it.
"""

import functools
import itertools
import statistics
import sys
from bisect import bisect_left
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from tqdm import tqdm

from neobert.common.commands import guarded
from neobert.common.measures import PeakMemory
from neobert.common.options import OptionGroup, option
from neobert.common.tables import markdown_table
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM
from neobert.throughput.models import draw_lengths, flops, make_batch
from neobert.throughput.options import check_set
from neobert.throughput.timing import MatrixProduct, between, quartiles, ratio, timed

from .measuring import benchmark, in_a_process, mib


WAYS = {"packed": "packed, logits of masked tokens", "padded": "padded, all logits"}
MASK = 103  # [MASK] of the bundled tokenizer


@dataclass(frozen=True)
class TrainingOptions(OptionGroup):
    """Options of `python -m benchmarks.training`."""

    title = "Options"

    output: str = option(
        "results/training_cpu", "Result files, PATH.json and PATH.md.", metavar="PATH"
    )
    ways: list[Literal["packed", "padded"]] = option(
        help="Batch layouts to compare.", default_factory=lambda: list(WAYS)
    )
    sets: list[str] = option(
        help="Workloads, as in `neobert throughput`.", default_factory=lambda: ["short"]
    )
    dtypes: list[Literal["float32", "bfloat16"]] = option(
        help="Precisions. bfloat16 is autocast over float32 weights.",
        default_factory=lambda: ["float32"],
    )
    device: Literal["cpu", "cuda"] = option("cpu", "Device.")
    hidden: Annotated[int, Meta(ge=64)] = option(256, "Hidden size.")
    layers: Annotated[int, Meta(ge=1)] = option(6, "Number of layers.")
    tokens: Annotated[int, Meta(ge=1)] = option(1536, "Non-padding tokens per step.")
    steps: Annotated[int, Meta(ge=1)] = option(4, "Number of timed steps per run.")
    repeats: Annotated[int, Meta(ge=1)] = option(3, "Number of runs per layout.")
    threads: Annotated[int, Meta(ge=1)] = option(
        default_factory=torch.get_num_threads, help="Number of CPU threads."
    )

    def __post_init__(self) -> None:
        for name in self.sets:
            check_set(name)


def draw_batch(name, tokens, seed):
    """Lengths of as many texts of a set as hold about `tokens` real tokens; their ids with 20 % of
    them masked, and labels."""
    lengths = draw_lengths(name, max(2, tokens), seed)
    lengths = lengths[: bisect_left(list(itertools.accumulate(lengths)), tokens) + 1]
    batch = make_batch(lengths, "cpu", seed)
    chosen = torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    chosen &= batch.attention_mask.bool()
    return lengths, {
        "input_ids": torch.where(chosen, MASK, batch.input_ids),
        "attention_mask": batch.attention_mask,
        "labels": torch.where(chosen, batch.input_ids, -100),
    }


def measure(options, name, dtype, way):
    """Trains, in a process of its own.

    Args:
        options: `TrainingOptions`.
        name, dtype, way: of `options.sets`, `options.dtypes` and `WAYS`.
    Returns:
        dict: losses, seconds, real tokens and needed operations of each timed step, the matrix
        product's rates, fill, bytes of the weights with their gradients and Adam's two moments (16
        a parameter), and the peak beyond what there was before the model.
    """
    torch.set_num_threads(options.threads)
    product, losses, timed_steps = MatrixProduct(options.device, getattr(torch, dtype)), [], []
    with PeakMemory(options.device) as memory:
        torch.manual_seed(0)  # the same weights for every way
        config = NeoBERTConfig(
            hidden_size=options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 64,
            intermediate_size=4 * options.hidden,
            sparse_prediction=way == "packed",
            unpad_inputs=way == "packed",
        )
        model = NeoBERTForMaskedLM(config).to(options.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.1, fused=True)

        def train(inputs):
            with torch.autocast(options.device, torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = model(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        for step in range(options.steps + 1):
            lengths, inputs = draw_batch(name, options.tokens, step)
            inputs = {key: value.to(options.device) for key, value in inputs.items()}
            seconds, rate = timed(functools.partial(train, inputs), product)
            predicted = int((inputs["labels"] != -100).sum())
            timed_steps.append(
                {
                    "seconds": seconds,
                    "rates": rate,
                    "tokens": sum(lengths),
                    "fills": sum(lengths) / (len(lengths) * max(lengths)),
                    "operations": 3 * forward_operations(model, lengths, predicted),
                }
            )
    # The first step allocates and warms up.
    kept = {key: [step[key] for step in timed_steps[1:]] for key in timed_steps[0]}
    return {
        **kept,
        "losses": [loss.item() for loss in losses],
        "state_bytes": 16 * sum(parameter.numel() for parameter in model.parameters()),
        "peak_bytes": memory.growth,
    }


def forward_operations(model, lengths, predicted):
    """Floating-point operations that a forward needs: those of the encoder, and the decoder for
    predicted tokens."""
    return flops(model.model, lengths) + 2 * model.decoder.weight.numel() * predicted


def summary(case, runs):
    """The figures of one way over its runs; `case` is (set, dtype, way)."""
    joined = {
        key: [value for run in runs for value in run[key]]
        for key in ("seconds", "tokens", "operations", "rates")
    }
    speeds = [count / second for count, second in zip(joined["tokens"], joined["seconds"])]
    shares = [
        needed / second / rate
        for needed, second, rate in zip(joined["operations"], joined["seconds"], joined["rates"])
    ]
    return {
        **dict(zip(("name", "dtype", "way"), case)),
        "tokens_per_second": statistics.median(speeds),
        "quartiles": quartiles(speeds),
        "share_of_gemm": statistics.median(shares),
        "fill": statistics.mean(runs[0]["fills"]),
        "state_bytes": runs[0]["state_bytes"],
        "peak_bytes": max((run["peak_bytes"] for run in runs if run["peak_bytes"]), default=None),
        "seconds": joined["seconds"],
        "losses": runs[0]["losses"],
    }


def table(rows):
    """Markdown: every way, and how much faster it is than the last way of its set in the first
    dtype."""
    lines, first = [], rows[0]["dtype"]
    for row in rows:
        base = [other for other in rows if (other["name"], other["dtype"]) == (row["name"], first)]
        faster = ratio(base[-1]["seconds"], row["seconds"])
        peak = row["peak_bytes"]
        lines.append(
            [row["name"], row["dtype"], WAYS[row["way"]], f"{row['fill']:.2f}"]
            + [f"{row['tokens_per_second']:,.0f}", between(row["quartiles"])]
            + [f"{row['share_of_gemm']:.2f}"]
            + [f"{faster['ratio']:.2f}", between(faster["quartiles"], ".2f")]
            + [mib(peak), mib(peak and peak - row["state_bytes"]), f"{row['losses'][-1]:.4f}"]
        )
    header = "set, dtype, way, fill, real tokens/s, quartiles, share of GEMM, times as fast"
    more = "quartiles, peak MiB, of it activations, last loss"
    return markdown_table(f"{header}, {more}".split(", "), lines)


@benchmark("Training steps", TrainingOptions)
def main(options):
    """Every set, dtype and way, in turns."""
    runs = {case: [] for case in itertools.product(options.sets, options.dtypes, options.ways)}
    for _ in tqdm(range(options.repeats), desc="repeats", disable=None):
        for case, found in runs.items():
            found.append(in_a_process(measure, options, *case))
    rows = [summary(case, found) for case, found in runs.items()]
    text = (
        f"A step has about {options.tokens:,} real tokens. Model: {options.layers} layers of "
        f"{options.hidden}, vocabulary 30,522. Times as fast: as the last way in "
        f"{options.dtypes[0]}, step by step. Peak: beyond the process before there was a model. "
        "Activations: the peak without weights, gradients and Adam's moments.\n\n" + table(rows)
    )
    data = {"options": asdict(options), "rows": rows}
    return data, text, {"dtype": options.dtypes, "device": options.device}


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.training", main))
