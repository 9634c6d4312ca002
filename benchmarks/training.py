r"""Measure masked-LM training steps (forward, backward, clipping, AdamW).

The layouts are packed batches with logits of the masked tokens, and padded batches with all logits.

    # CPU, short texts, both layouts in turns
    python -m benchmarks.training --output results/training_cpu
    # bf16 autocast against float32
    python -m benchmarks.training --sets 128 --dtypes float32 bfloat16
    python -m benchmarks.training --device cuda --hidden 768 --layers 28 \
        --sets 1024 4096 --tokens 32768

Both layouts have the same texts with the same masked tokens, so their losses must agree. Each run
is a process of its own, so its peak memory is that of the run; the layouts take turns. The
fraction of GEMM is the number of operations that a step needs (three times those of the forward: 6
per weight and token, 12 D per pair of visible tokens, and the decoder for masked tokens only) per
second, divided by the operations per second of a plain matrix product in the same run.
"""

import functools
import itertools
import statistics
import sys
from bisect import bisect_left
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

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
from neobert.throughput.options import check_workload
from neobert.throughput.timing import MatrixProduct, between, quartiles, ratio, timed

from .measuring import benchmark, mib, run_in_process


WAYS = {"packed": "packed, logits of masked tokens", "padded": "padded, all logits"}
# Id of [MASK] in the bundled tokenizer.
MASK = 103


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
            check_workload(name)


def sample_batch(name: str, tokens: int, seed: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return the lengths of random texts, and their padded batch with 20 % of the tokens masked.

    Args:
        name: Workload, as in `neobert throughput`.
        tokens: Number of non-padding tokens, which the last text may exceed.
        seed: Random seed.
    """
    lengths = draw_lengths(name, max(2, tokens), seed)
    # Drop the texts after the one that completes the number of tokens.
    lengths = lengths[: bisect_left(list(itertools.accumulate(lengths)), tokens) + 1]

    batch = make_batch(lengths, "cpu", seed)
    generator = torch.Generator().manual_seed(seed)
    is_masked = torch.rand(batch.input_ids.shape, generator=generator) < 0.2
    is_masked &= batch.attention_mask.bool()
    return lengths, {
        "input_ids": torch.where(is_masked, MASK, batch.input_ids),
        "attention_mask": batch.attention_mask,
        "labels": torch.where(is_masked, batch.input_ids, -100),
    }


def measure(options: TrainingOptions, name: str, dtype: str, way: str) -> dict[str, Any]:
    """Train for some steps.

    Args:
        options: Options of the script.
        name: One of `options.sets`.
        dtype: One of `options.dtypes`.
        way: Layout, a key of `WAYS`.

    Returns:
        Losses of all steps; for each timed step its seconds, non-padding tokens, fraction of
        non-padding tokens, required operations, and the operations per second of the matrix
        product; the bytes of weights, gradients and Adam's moments (16 per parameter); and the
        peak memory beyond that of the process before the model was built.
    """
    torch.set_num_threads(options.threads)
    product = MatrixProduct(options.device, getattr(torch, dtype))
    losses: list[torch.Tensor] = []
    timed_steps: list[dict[str, Any]] = []
    with PeakMemory(options.device) as memory:
        # All layouts start from the same weights.
        torch.manual_seed(0)
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

        def train(inputs: dict[str, torch.Tensor]) -> None:
            with torch.autocast(options.device, torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = model(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        for step in range(options.steps + 1):
            # The step is the seed, so all layouts train on the same batches.
            lengths, inputs = sample_batch(name, options.tokens, step)
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

    # The first step is not timed: it allocates memory and warms up.
    timed_values = {key: [step[key] for step in timed_steps[1:]] for key in timed_steps[0]}
    return {
        **timed_values,
        "losses": [loss.item() for loss in losses],
        "state_bytes": 16 * sum(parameter.numel() for parameter in model.parameters()),
        "peak_bytes": memory.growth,
    }


def forward_operations(model: NeoBERTForMaskedLM, lengths: list[int], predicted: int) -> int:
    """Return the number of floating-point operations of a forward pass.

    Args:
        model: Model.
        lengths: Sequence lengths in tokens.
        predicted: Number of masked tokens, for which the decoder computes logits.
    """
    return flops(model.model, lengths) + 2 * model.decoder.weight.numel() * predicted


def summarize(case: tuple[str, str, str], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one case, (set, dtype, way), over its runs."""
    joined = {}
    for key in ("seconds", "tokens", "operations", "rates"):
        joined[key] = list(itertools.chain.from_iterable(run[key] for run in runs))
    # Speeds are those of the single steps, so a slow step changes the median little.
    speeds = [count / second for count, second in zip(joined["tokens"], joined["seconds"])]
    fractions = [
        operations / second / rate
        for operations, second, rate in zip(
            joined["operations"], joined["seconds"], joined["rates"]
        )
    ]

    name, dtype, way = case
    return {
        "name": name,
        "dtype": dtype,
        "way": way,
        "tokens_per_second": statistics.median(speeds),
        "quartiles": quartiles(speeds),
        "share_of_gemm": statistics.median(fractions),
        "fill": statistics.mean(runs[0]["fills"]),
        "state_bytes": runs[0]["state_bytes"],
        "peak_bytes": max((run["peak_bytes"] for run in runs if run["peak_bytes"]), default=None),
        "seconds": joined["seconds"],
        "losses": runs[0]["losses"],
    }


def results_table(rows: list[dict[str, Any]]) -> str:
    """Return a markdown table with one row per case.

    The speedup is relative to the last layout of the same set in the first dtype.
    """
    lines = []
    for row in rows:
        same_set = [
            other
            for other in rows
            if (other["name"], other["dtype"]) == (row["name"], rows[0]["dtype"])
        ]

        speedup = ratio(same_set[-1]["seconds"], row["seconds"])
        peak = row["peak_bytes"]
        lines.append(
            [
                row["name"],
                row["dtype"],
                WAYS[row["way"]],
                f"{row['fill']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                between(row["quartiles"]),
                f"{row['share_of_gemm']:.2f}",
                f"{speedup['ratio']:.2f}",
                between(speedup["quartiles"], ".2f"),
                mib(peak),
                mib(peak and peak - row["state_bytes"]),
                f"{row['losses'][-1]:.4f}",
            ]
        )

    header = [
        "workload",
        "dtype",
        "layout",
        "fraction of non-padding tokens",
        "tokens/s",
        "quartiles of tokens/s",
        "fraction of GEMM",
        "speedup",
        "quartiles of the speedup",
        "peak, MiB",
        "activations, MiB",
        "last loss",
    ]
    return markdown_table(header, lines)


@benchmark("Training steps", TrainingOptions)
def main(options: TrainingOptions) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Measure every set, dtype and layout, in turns."""
    cases = list(itertools.product(options.sets, options.dtypes, options.ways))
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {case: [] for case in cases}
    # In turns, other processes on the machine slow all layouts down equally.
    for _ in tqdm(range(options.repeats), desc="repeats", disable=None):
        for case in cases:
            runs[case].append(run_in_process(measure, options, *case))

    rows = [summarize(case, runs[case]) for case in cases]
    text = (
        f"A step has about {options.tokens:,} non-padding tokens. Model: {options.layers} layers "
        f"of {options.hidden}, vocabulary of 30,522 tokens. The speedup is relative to the last "
        f"layout in {options.dtypes[0]}, step by step. The peak is that beyond the process before "
        "the model was built. Activations: the peak without weights, gradients and Adam's "
        f"moments.\n\n{results_table(rows)}"
    )
    data = {"options": asdict(options), "rows": rows}
    return data, text, {"dtype": options.dtypes, "device": options.device}


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.training", main))
