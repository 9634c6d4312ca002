"""Peak memory of inference above the weights, NeoBERT against transformers' ModernBERT base at the
same batch, by length.

    python -m benchmarks.memory --output results/memory_cpu

Each measurement is a process of its own. On the CPU the peak is that of resident memory beyond what
the process held before the forward (after a forward of 16 tokens, which loads the kernels); malloc
gives freed tensors back to the system at once, since resident memory would else grow with what it
keeps and not with what the model needs. On CUDA it is the peak of reserved memory. Without
gradients a layer's activations are freed before the next one's are made, so that the peak does not
depend on depth: `--layers` cuts both models, and
`--check-depth` measures one length at full depth beside it.

`flash_contract` is NeoBERT packing two texts, one half as long as the other, for a function that is
called as flash attention is (packed tokens, int32 offsets) and runs SDPA on each text: what the
model itself holds around a flash kernel.
"""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from msgspec import Meta
from tqdm import tqdm

from neobert.common.commands import guarded
from neobert.common.measures import PeakMemory
from neobert.common.options import OptionGroup, option
from neobert.common.tables import markdown_table
from neobert.throughput.models import IMPLEMENTATIONS, build, make_batch

from .measuring import benchmark, in_a_process, mib


CONTRACT = "flash_contract"


def flash_contract(
    module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs
):
    """(1, H, T, K) and int32 offsets -> (1, T, H, K)."""
    sizes = cu_seq_lens_q.diff().tolist() if cu_seq_lens_q is not None else [query.shape[2]]
    texts = zip(*(x.split(sizes, dim=2) for x in (query, key, value)))
    return torch.cat(
        [F.scaled_dot_product_attention(*text, scale=scaling).transpose(1, 2) for text in texts],
        dim=1,
    ), None


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


def lengths_of(implementation, length, batch):
    """Of the texts of a case, in tokens."""
    return [length, length // 2] * batch if implementation == CONTRACT else [length] * batch


def measure(options, model, implementation, length, layers):
    """Peak bytes above the weights of one forward, in a process of its own; `layers` 0 means
    all."""
    torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    usual = "sdpa" if implementation == CONTRACT else implementation
    small = {"num_hidden_layers": layers} if layers else {}
    run = build(model, usual, options.device, dtype, small)
    if implementation == CONTRACT:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

        functions.register(CONTRACT, flash_contract)
        masks.register(CONTRACT, masks["flash_attention_2"])
        run.model.config._attn_implementation = CONTRACT
    batch = make_batch(lengths_of(implementation, length, options.batch), options.device)
    with torch.inference_mode():
        run(make_batch([16], options.device))
        with PeakMemory(options.device) as memory:
            run(batch)
    return memory.growth


def table(rows):
    """The rows as markdown."""
    lines = []
    for row in rows:
        mine, other = row["neobert"], row.get("modernbert-base")
        case = row["implementation"], f"{row['length']:,}", f"{row['tokens']:,}", row["layers"]
        ratio = None if other is None else f"{mine / other:.2f}"
        a_token = f"{mine / 2**10 / row['tokens']:.1f}"
        lines.append([*case, mib(mine), a_token, mib(other), ratio])
    header = "implementation, longest text, tokens, layers, NeoBERT MiB, KiB a token"
    return markdown_table([*header.split(", "), "ModernBERT base MiB", "ratio"], lines)


@benchmark("Peak memory above the weights", MemoryOptions)
def main(options):
    """Every length of NeoBERT and of its peer, which has no part in the contract."""
    cases = [
        (name, length, options.layers)
        for name in (options.implementation, CONTRACT)
        for length in options.lengths
    ]
    if options.check_depth:
        cases.append((options.implementation, options.check_depth, 0))
    rows, variables = [], {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    for name, length, layers in tqdm(cases, desc="memory", disable=None):
        row = {"implementation": name, "length": length, "layers": layers or "all"}
        row["tokens"] = sum(lengths_of(name, length, options.batch))
        for model in ("neobert",) if name == CONTRACT else ("neobert", "modernbert-base"):
            case = (options, model, name, length, layers)
            row[model] = in_a_process(measure, *case, variables=variables)
        rows.append(row)
    text = f"`{CONTRACT}`: two texts packed, the second half as long.\n\n{table(rows)}"
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    return {"rows": rows}, text, dict(dtype=dtype, device=options.device, batch=options.batch)


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.memory", main))
