"""Peak memory of inference beyond the weights, by sequence length: NeoBERT and ModernBERT base.

    python -m benchmarks.memory --output results/memory_cpu

Every measurement runs in a process of its own. On the CPU the peak is that of the resident memory
beyond the memory before the forward pass (after a forward pass of 16 tokens, which loads the
kernels). malloc returns freed tensors to the system at once; otherwise resident memory would
include what malloc keeps. On CUDA it is the peak of the reserved memory. Without gradients the
activations of a layer are freed before those of the next layer are allocated, so the peak does not
depend on the depth: `--layers` truncates both models, and `--check-depth` also measures one length
with all layers.

The implementation `flash_contract` is NeoBERT on two packed sequences, the second half as long as
the first. Its attention function is called like flash attention (packed tokens, int32 offsets) and
runs SDPA on each sequence. The measurement shows what the model itself allocates around a flash
attention kernel.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from msgspec import Meta
from tqdm import tqdm

from neobert.common.commands import guarded
from neobert.common.measures import PeakMemory
from neobert.common.options import OptionGroup, option
from neobert.common.tables import markdown_table
from neobert.throughput.models import IMPLEMENTATIONS, build, make_batch

from .measuring import benchmark, mib, run_in_process


CONTRACT = "flash_contract"


def flash_contract(
    module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for each packed sequence with SDPA.

    Args:
        module: Attention layer, not used.
        query: Queries (1, H, T, K).
        key: Keys (1, H, T, K).
        value: Values (1, H, T, K).
        attention_mask: Mask, not used.
        scaling: Scale of the scores.
        cu_seq_lens_q: Offsets of the sequences (N + 1,), int32.
        kwargs: Other arguments of an attention function, not used.

    Returns:
        Outputs (1, T, H, K), and None for the attention weights.
    """
    sizes = cu_seq_lens_q.diff().tolist() if cu_seq_lens_q is not None else [query.shape[2]]
    queries = query.split(sizes, dim=2)
    keys = key.split(sizes, dim=2)
    values = value.split(sizes, dim=2)
    outputs = [
        F.scaled_dot_product_attention(*sequence, scale=scaling).transpose(1, 2)
        for sequence in zip(queries, keys, values)
    ]
    return torch.cat(outputs, dim=1), None


@dataclass(frozen=True)
class MemoryOptions(OptionGroup):
    """Options of `python -m benchmarks.memory`."""

    title = "Options"

    output: str = option(
        "results/memory_cpu", "Result files, PATH.json and PATH.md.", metavar="PATH"
    )
    lengths: list[Annotated[int, Meta(ge=16, le=8192)]] = option(
        help="Sequence lengths in tokens.", default_factory=lambda: [1024, 2048, 4096, 8192]
    )
    batch: Annotated[int, Meta(ge=1)] = option(1, "Batch size in sequences.")
    layers: Annotated[int, Meta(ge=0)] = option(
        3, "Number of layers to keep: 3 are two local and one global layer of ModernBERT, 0 all."
    )
    check_depth: Annotated[int, Meta(ge=16, le=8192)] | None = option(
        None, "Sequence length to measure with all layers, too."
    )
    implementation: Literal[tuple(IMPLEMENTATIONS)] = option(  # type: ignore[valid-type]
        "sdpa", "Attention implementation of both models."
    )
    device: Literal["cpu", "cuda"] = option(
        "cuda" if torch.cuda.is_available() else "cpu", "Device."
    )
    threads: Annotated[int, Meta(ge=1)] = option(
        default_factory=torch.get_num_threads, help="Number of CPU threads."
    )


def lengths_of(implementation: str, length: int, batch_size: int) -> list[int]:
    """Return the sequence lengths of a case in tokens."""
    if implementation == CONTRACT:
        return [length, length // 2] * batch_size
    return [length] * batch_size


def measure(
    options: MemoryOptions, model: str, implementation: str, length: int, layers: int
) -> int | None:
    """Return the peak memory of one forward pass beyond the weights, in bytes.

    Args:
        options: Device, batch size and number of threads.
        model: Name of the model, "neobert" or "modernbert-base".
        implementation: Key of `IMPLEMENTATIONS`, or `CONTRACT`.
        length: Sequence length in tokens.
        layers: Number of layers, 0 for all.
    """
    torch.set_num_threads(options.threads)
    # These are the usual types of inference on each device.
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    built_with = "sdpa" if implementation == CONTRACT else implementation
    changes = {"num_hidden_layers": layers} if layers else {}
    candidate = build(model, built_with, options.device, dtype, changes)

    if implementation == CONTRACT:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        # The masks of flash attention select the code path for packed tokens in the model.
        ALL_ATTENTION_FUNCTIONS.register(CONTRACT, flash_contract)
        ALL_MASK_ATTENTION_FUNCTIONS.register(
            CONTRACT, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"]
        )
        candidate.model.config._attn_implementation = CONTRACT

    batch = make_batch(lengths_of(implementation, length, options.batch), options.device)
    with torch.inference_mode():
        # The first call loads the kernels, whose memory does not depend on the length.
        candidate(make_batch([16], options.device))
        with PeakMemory(options.device) as memory:
            candidate(batch)
    return memory.growth


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a markdown table."""
    header = [
        "Implementation",
        "Longest sequence (tokens)",
        "Tokens",
        "Layers",
        "NeoBERT (MiB)",
        "NeoBERT (KiB per token)",
        "ModernBERT base (MiB)",
        "Ratio",
    ]

    lines = []
    for row in rows:
        neobert = row["neobert"]
        modernbert = row.get("modernbert-base")
        lines.append(
            [
                row["implementation"],
                f"{row['length']:,}",
                f"{row['tokens']:,}",
                row["layers"],
                mib(neobert),
                f"{neobert / 2**10 / row['tokens']:.1f}",
                mib(modernbert),
                None if modernbert is None else f"{neobert / modernbert:.2f}",
            ]
        )
    return markdown_table(header, lines)


@benchmark("Peak memory above the weights", MemoryOptions)
def main(options: MemoryOptions) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Measure every length with NeoBERT and ModernBERT, and NeoBERT with `CONTRACT`."""
    cases = [
        (implementation, length, options.layers)
        for implementation in (options.implementation, CONTRACT)
        for length in options.lengths
    ]
    # With all layers, to confirm that the peak does not depend on their number.
    if options.check_depth:
        cases.append((options.implementation, options.check_depth, 0))

    rows = []
    # malloc returns blocks above this size to the system as soon as they are freed.
    variables = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    for implementation, length, layers in tqdm(cases, desc="memory", disable=None):
        row: dict[str, Any] = {
            "implementation": implementation,
            "length": length,
            "layers": layers or "all",
            "tokens": sum(lengths_of(implementation, length, options.batch)),
        }
        models = ["neobert"] if implementation == CONTRACT else ["neobert", "modernbert-base"]
        for model in models:
            row[model] = run_in_process(
                measure, options, model, implementation, length, layers, variables=variables
            )
        rows.append(row)

    text = f"`{CONTRACT}`: two packed sequences, the second half as long.\n\n{table(rows)}"
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    return {"rows": rows}, text, dict(dtype=dtype, device=options.device, batch=options.batch)


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.memory", main))
