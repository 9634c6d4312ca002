"""Latency of one text on one CPU thread: PackedEncoder and ONNX Runtime with the same weights.

    python -m benchmarks.latency --output results/latency

Two models are measured: the bundled encoder, and 6 blocks of 768 with random weights, or the
directory of `--model`. ONNX Runtime runs the graphs of `neobert export onnx`. All engines take
turns of several calls, and the table shows the median processor time of a call, which other
processes on the machine hardly change.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTModel, PackedEncoder
from neobert.cli import main as neobert_main
from neobert.common.commands import guarded
from neobert.common.constants import TOKENIZER
from neobert.common.errors import UserError, require
from neobert.common.identity import model_digest
from neobert.common.options import OptionGroup, option
from neobert.common.tables import markdown_table

from .measuring import ROOT, benchmark


BUNDLED = ROOT / "examples" / "sentence-encoder"
DTYPES = ("float32", "int8", "bfloat16")
# What was tried with the bundled encoder, on the CPU that the text names.
REJECTED_ALTERNATIVES = """## Rejected alternatives

Measured on an AMD EPYC with AVX-512, VNNI and AVX512-BF16.

`PackedEncoder` runs prepacked oneDNN linear layers and few operators (`neobert/embeddings/cpu_forward.py`). Before this forward pass existed (commit a45ec02), one text of 8, 20, 60 and 200 tokens took 8.7, 13.2, 16.7 and 40.2 ms in float32 with the encoder that was bundled then. At 8 tokens, the 16 matrix products alone take 2.4 ms, longer than the complete forward pass of ONNX Runtime (2.1 ms).

These alternatives were measured and rejected. Results are for 8 tokens:

| Alternative | Result |
| --- | --- |
| oneDNN's fused activation and product for SwiGLU | 2.91 ms instead of 2.66 ms for these layers |
| prepacked weights of MKL instead of oneDNN | 3.17 ms instead of 2.45 ms for the 16 products |
| attention as batched matrix products | 1 % faster, but not bit-identical |
| huge pages, or a hint of the number of rows when packing the weights | no difference |
| `torch.jit` | cannot trace prepacked weights, and is deprecated |
| a dense forward pass that is compiled with frozen weights (`torch._inductor.config.freezing`) | 2.55 ms instead of 2.73 ms at 8 tokens, 4.0 instead of 4.1 at 20, 9.7 instead of 9.0 at 60, 30.5 instead of 32.4 at 200; the first call takes 14 s and a C++ compiler |

The last row was measured with the encoder of 2026-11-26. In int8, the matrix products of a text of 8 tokens take 1.0 ms of 2.7 ms. The rest is about 400 operators of 4 µs, and an addition of two tensors alone takes 3.2 µs on this CPU. ONNX Runtime executes a fused graph in 0.9 ms. Its time can therefore not be reached with operators of torch. In float32, there are 136 operators, and nearly all of the time is that of the products.

[peers](peers.md) compares CTranslate2 and other engines.
"""  # noqa: E501
# Files of the export by precision.
GRAPHS = {"float32": "model.onnx", "int8": "model_quantized.onnx"}


@dataclass(frozen=True)
class LatencyOptions(OptionGroup):
    """Options of the measurement."""

    title = "Measurement"

    output: str = option(help="Path of the result, without .json and .md.")
    model: list[str] = option(
        default_factory=list,
        help="Directories of the models. By default the bundled encoder and 6 blocks of 768.",
    )
    tokens: list[int] = option(
        default_factory=lambda: [8, 20, 60, 200], help="Sequence lengths in tokens."
    )
    turns: Annotated[int, Meta(ge=1)] = option(20, "Number of turns of each engine.")
    calls: Annotated[int, Meta(ge=1)] = option(8, "Number of measured calls per turn.")
    threads: Annotated[int, Meta(ge=1, le=1)] = option(1, "Number of CPU threads.")


def build_wide(folder: Path) -> Path:
    """Write a model of 6 blocks of 768 with random weights, and return its directory."""
    torch.manual_seed(0)
    # Larger initial weights than the default, so attention is not nearly uniform.
    config = NeoBERTConfig(num_hidden_layers=6, decoder_init_range=0.04, embedding_init_range=0.2)
    NeoBERTModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder


def onnx_call(graph: Path, ids: np.ndarray) -> Callable[[], object]:
    """Return a function that runs a graph on one text with one thread."""
    require("onnx", "onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    output = session.get_outputs()[0].name

    # The graph has a batch dimension, and exported graphs take int64.
    row = ids[None].astype(np.int64)
    inputs = {"input_ids": row, "attention_mask": np.ones_like(row)}
    return lambda: session.run([output], inputs)


def median_milliseconds(
    calls: dict[str, Callable[[], object]], turns: int, calls_per_turn: int
) -> dict[str, float]:
    """Return the median processor time of each call in milliseconds; the calls take turns."""
    times: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            # The first call of a turn loads the weights into the caches.
            call()
            for _ in range(calls_per_turn):
                start = time.process_time_ns()
                call()
                times[name].append(time.process_time_ns() - start)
    return {name: statistics.median(values) / 1e6 for name, values in times.items()}


def measure_model(options: LatencyOptions, model: str, graphs: Path) -> list[dict[str, Any]]:
    """Return one row per sequence length, with the times of each engine in milliseconds."""
    encoders = {dtype: PackedEncoder(model, dtype=dtype, device="cpu") for dtype in DTYPES}
    generator = np.random.default_rng(0)

    rows = []
    for tokens in options.tokens:
        # Any ids of ordinary words: the time depends on their number only.
        ids = generator.integers(1000, 20000, tokens).astype(np.int32)
        calls: dict[str, Callable[[], object]] = {}
        for dtype, encoder in encoders.items():
            calls[f"PackedEncoder, {dtype}"] = partial(encoder.embed, [ids])
        for precision, name in GRAPHS.items():
            calls[f"ONNX Runtime, {precision}"] = onnx_call(graphs / "onnx" / name, ids)

        times = median_milliseconds(calls, options.turns, options.calls)
        rows.append({"tokens": tokens, **times})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of one model, with the ratios to ONNX Runtime."""
    lines = []
    for row in rows:
        line = {f"{name} (ms)": f"{value:.2f}" for name, value in row.items() if name != "tokens"}
        ratios = {}
        for dtype in GRAPHS:
            ratio = row[f"PackedEncoder, {dtype}"] / row[f"ONNX Runtime, {dtype}"]
            ratios[f"Ratio, {dtype}"] = f"{ratio:.2f}"
        lines.append({"Tokens": str(row["tokens"]), **line, **ratios})
    return markdown_table([*lines[0]], [[*line.values()] for line in lines])


@benchmark("Latency of one text", LatencyOptions)
def main(options: LatencyOptions) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Measure the latency of one text and write the table."""
    with tempfile.TemporaryDirectory() as scratch:
        models = list(options.model) or [str(BUNDLED), str(build_wide(Path(scratch, "768x6")))]
        data: dict[str, list[dict[str, Any]]] = {}
        digests = []
        for number, model in enumerate(models):
            name = Path(model).name
            if name in data:
                name = f"{name} ({number + 1})"
            graphs = Path(scratch, f"{number}-onnx")
            arguments = ["export", "onnx", model, str(graphs), "--precisions", "fp32", "int8"]
            if neobert_main(arguments):
                raise UserError(f"the export of {model} failed; its message is above.")
            data[name] = measure_model(options, model, graphs)
            digests.append(f"encoder `{model_digest(model)}` ({name})")

    page = (
        f"Models: {', '.join(digests)}.\n\n"
        "The tables contain the median processor time of one call in milliseconds. The last two "
        "columns are the ratios of `PackedEncoder` to ONNX Runtime in the same precision; below 1, "
        "`PackedEncoder` is faster.\n"
    )
    for name, rows in data.items():
        page += f"\n## {name}\n\n{table(rows)}\n"
    page += f"\n{REJECTED_ALTERNATIVES}"
    return {"models": data}, page, {"packages": ["onnxruntime"], "dtype": "float32, int8, bfloat16"}


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.latency", main))
