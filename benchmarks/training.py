"""Masked-LM training steps (forward, backward, clipping, AdamW): packed with logits of the masked
tokens, against padded with all logits.

    # CPU, short texts, both ways in turns
    python -m neobert.benchmarks.training --output results/training_cpu
    # bf16 autocast against float32
    python -m neobert.benchmarks.training --sets 128 --dtypes float32 bfloat16
    python -m neobert.benchmarks.training --device cuda --hidden 768 --layers 28 \\
        --sets 1024 4096 --tokens 32768

Both ways see the same texts with the same tokens masked, so their losses must agree. Each runs in a
process of its own, which makes its peak memory its own; the ways take turns. The share is of the
operations that a step needs (three times those of the forward: 6 a weight and token, 12 D a pair of
visible tokens, the decoder for masked tokens only) over what a plain matrix product did beside it.
"""

import functools
import statistics
import sys
from dataclasses import asdict, dataclass, replace

import torch
from tqdm import tqdm

from ..common.arguments import Arguments, Options, option
from ..common.commands import guarded
from ..common.memory import PeakMemory
from ..common.results import environment, markdown_table, write_result
from ..configuration_neobert import NeoBERTConfig
from ..modeling_neobert import NeoBERTForMaskedLM
from ..throughput.models import draw_lengths, make_batch
from ..throughput.options import check_set
from ..throughput.timing import MatrixProduct, between, quartiles, ratio, timed
from .measuring import in_a_process, mib


WAYS = {"packed": "packed, logits of masked tokens", "padded": "padded, all logits"}
MASK = 103  # [MASK] of the bundled tokenizer


@dataclass(frozen=True)
class Steps:
    """What one process trains.

    Attributes:
        way: a key of `WAYS`.
        name: a set of `throughput_sets`; as many texts of it as hold about `tokens` real tokens.
        dtype: "float32", or "bfloat16" for autocast over float32 weights.
        steps: timed steps, after one that is not.
    """

    way: str
    name: str
    dtype: str
    device: str
    threads: int
    tokens: int
    steps: int
    hidden: int
    layers: int

    def lengths(self, seed):
        """Of the texts of a step."""
        texts = draw_lengths(self.name, max(2, self.tokens), seed)
        total = count = 0
        while total < self.tokens and count < len(texts):
            total, count = total + texts[count], count + 1
        return texts[:count]

    def batch(self, seed):
        """Token ids with 20 % of the tokens masked, and their labels."""
        batch = make_batch(self.lengths(seed), "cpu", seed)
        chosen = (
            torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
        )
        chosen &= batch.attention_mask.bool()
        ids = torch.where(chosen, MASK, batch.input_ids)
        labels = torch.where(chosen, batch.input_ids, -100)
        return batch.lengths, {
            "input_ids": ids,
            "attention_mask": batch.attention_mask,
            "labels": labels,
        }

    def model(self):
        """With the same weights for every way."""
        torch.manual_seed(0)
        config = NeoBERTConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            intermediate_size=4 * self.hidden,
            sparse_prediction=self.way == "packed",
            unpad_inputs=self.way == "packed",
        )
        return NeoBERTForMaskedLM(config).to(self.device).train()

    def measure(self):
        """Trains.

        Returns:
            dict: losses, seconds, real tokens and needed operations of each timed step, the matrix
            product's rates, fill, bytes of the weights with their gradients and Adam's two moments
            (16 a parameter), and the peak beyond what there was before the model.
        """
        torch.set_num_threads(self.threads)
        product, losses, timed_steps = (
            MatrixProduct(self.device, getattr(torch, self.dtype)),
            [],
            [],
        )
        with PeakMemory(self.device) as memory:
            model = self.model()
            optimizer = torch.optim.AdamW(
                model.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.1, fused=True
            )

            def train(inputs):
                with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bfloat16"):
                    loss = model(**inputs).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())

            for step in range(self.steps + 1):
                lengths, inputs = self.batch(step)
                inputs = {name: value.to(self.device) for name, value in inputs.items()}
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
        kept = {name: [step[name] for step in timed_steps[1:]] for name in timed_steps[0]}
        return {
            **kept,
            "losses": [loss.item() for loss in losses],
            "state_bytes": 16 * sum(parameter.numel() for parameter in model.parameters()),
            "peak_bytes": memory.growth,
        }


def forward_operations(model, lengths, predicted):
    """Floating-point operations that a forward needs: 2 a weight and token, 4 D a pair of visible
    tokens, the decoder for predicted tokens."""
    decoder = model.decoder.weight.numel()
    weights = (
        sum(
            module.weight.numel()
            for module in model.modules()
            if isinstance(module, torch.nn.Linear)
        )
        - decoder
    )
    pairs = sum(length * length for length in lengths) * model.config.num_hidden_layers
    return (
        2 * weights * sum(lengths) + 2 * decoder * predicted + 4 * model.config.hidden_size * pairs
    )


@dataclass
class TrainingArguments(Arguments):
    """Options of `python -m neobert.benchmarks.training`."""

    output: str = option("results/training_cpu", "path of the result without its ending")
    ways: list[str] = option(
        help="what is compared", default_factory=lambda: list(WAYS), choices=tuple(WAYS)
    )
    sets: list[str] = option(
        help="text lengths, as in neobert throughput", default_factory=lambda: ["short"]
    )
    dtypes: list[str] = option(
        help="bfloat16: autocast",
        default_factory=lambda: ["float32"],
        choices=("float32", "bfloat16"),
    )
    device: str = option("cpu", choices=("cpu", "cuda"))
    hidden: int = option(256, "width", least=64)
    layers: int = option(6, least=1)
    tokens: int = option(1536, "real tokens of a step", least=1)
    steps: int = option(4, "timed steps of a run", least=1)
    repeats: int = option(3, "runs of each way", least=1)
    threads: int = option(default_factory=torch.get_num_threads, least=1)

    def __post_init__(self):
        super().__post_init__()
        for name in self.sets:
            check_set(name)

    def cases(self):
        """The `Steps` of one repeat."""
        first = Steps(
            "", "", "", self.device, self.threads, self.tokens, self.steps, self.hidden, self.layers
        )
        return [
            replace(first, way=way, name=name, dtype=dtype)
            for name in self.sets
            for dtype in self.dtypes
            for way in self.ways
        ]


def summary(case, runs):
    """The figures of one way over its runs."""
    joined = {
        name: [value for run in runs for value in run[name]]
        for name in ("seconds", "tokens", "operations", "rates")
    }
    speeds = [count / second for count, second in zip(joined["tokens"], joined["seconds"])]
    shares = [
        needed / second / rate
        for needed, second, rate in zip(joined["operations"], joined["seconds"], joined["rates"])
    ]
    return {
        **asdict(case),
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


def main(argv=None):
    """Measures, writes and prints the table; returns the exit code."""
    (options,) = Options(
        "python -m neobert.benchmarks.training", __doc__, (TrainingArguments,)
    ).read(sys.argv[1:] if argv is None else argv)
    runs = {case: [] for case in options.cases()}
    for _ in tqdm(range(options.repeats), desc="repeats", disable=None):
        for case in runs:
            runs[case].append(in_a_process(Steps.measure, case))
    rows = [summary(case, found) for case, found in runs.items()]
    text = (
        f"A step has about {options.tokens:,} real tokens. Model: {options.layers} layers of "
        f"{options.hidden}, vocabulary 30,522. Times as fast: as the last way in "
        f"{options.dtypes[0]}, step by step. Peak: beyond the process before there was a model. "
        "Activations: the peak without weights, gradients and Adam's moments.\n\n" + table(rows)
    )
    env = {**environment(dtype=options.dtypes, device=options.device), "threads": options.threads}
    print(write_result(options.output, "Training steps", env, {"rows": rows}, text))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.training", main))
