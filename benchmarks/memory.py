"""Peak memory of inference above the weights, NeoBERT against transformers' ModernBERT base at the
same batch, by length.

    python -m neobert.benchmarks.memory --output results/memory_cpu

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
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from tqdm import tqdm

from ..common.arguments import Arguments, Options, option
from ..common.commands import guarded
from ..common.memory import PeakMemory
from ..common.results import environment, markdown_table, write_result
from .measuring import in_a_process, mib
from .throughput_models import IMPLEMENTATIONS, build
from .throughput_sets import make_batch


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
class Case:
    """One measurement; `layers` 0 means all."""

    model: str
    implementation: str
    length: int
    batch: int
    layers: int
    device: str
    threads: int

    @property
    def lengths(self):
        """Of the texts, in tokens."""
        return (
            [self.length, self.length // 2] * self.batch
            if self.implementation == CONTRACT
            else [self.length] * self.batch
        )

    def measure(self, small=None):
        """Peak bytes above the weights of one forward; `small` replaces configuration fields."""
        torch.set_num_threads(self.threads)
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        small = {**({"num_hidden_layers": self.layers} if self.layers else {}), **(small or {})}
        run = build(
            self.model,
            "sdpa" if self.implementation == CONTRACT else self.implementation,
            self.device,
            dtype,
            small,
        )
        if self.implementation == CONTRACT:
            from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

            ALL_ATTENTION_FUNCTIONS.register(CONTRACT, flash_contract)
            ALL_MASK_ATTENTION_FUNCTIONS.register(
                CONTRACT, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"]
            )
            run.model.config._attn_implementation = CONTRACT
        batch = make_batch(self.lengths, self.device)
        with torch.inference_mode():
            run(make_batch([16], self.device))
            with PeakMemory(self.device) as memory:
                run(batch)
        return memory.growth


@dataclass
class MemoryArguments(Arguments):
    """Options of `python -m neobert.benchmarks.memory`."""

    output: str = option("results/memory_cpu", "path of the result without its ending")
    lengths: list[int] = option(
        help="tokens of a text",
        default_factory=lambda: [1024, 2048, 4096, 8192],
        least=16,
        most=8192,
    )
    batch: int = option(1, "texts a batch", least=1)
    layers: int = option(3, "3: two local layers and a global one in ModernBERT; 0: all", least=0)
    check_depth: int | None = option(
        None, "also measure this length at full depth", least=16, most=8192
    )
    implementation: str = option("sdpa", "of both models", choices=tuple(IMPLEMENTATIONS))
    device: str = option("cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    threads: int = option(default_factory=torch.get_num_threads, least=1)


def row_of(ours):
    """Measures a case of NeoBERT and of its peer, which has no part in the contract; each in a
    process of its own."""
    peers = (
        [ours]
        if ours.implementation == CONTRACT
        else [ours, replace(ours, model="modernbert-base")]
    )
    sizes = [
        in_a_process(Case.measure, case, variables={"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)})
        for case in peers
    ]
    mine, other = sizes[0], sizes[1] if len(sizes) > 1 else None
    row = {
        "implementation": ours.implementation,
        "length": ours.length,
        "layers": ours.layers or "all",
        "tokens": sum(ours.lengths),
    }
    return {**row, "neobert": mine, "modernbert-base": other, "ratio": other and mine / other}


def table(rows):
    """The rows as markdown."""
    lines = []
    for row in rows:
        mine, other, tokens = row["neobert"], row["modernbert-base"], row["tokens"]
        ratio = "" if other is None else f"{row['ratio']:.2f}"
        ours = mib(mine), f"{mine / 2**10 / tokens:.1f}"
        lines.append(
            [
                row["implementation"],
                f"{row['length']:,}",
                f"{tokens:,}",
                row["layers"],
                *ours,
                mib(other),
                ratio,
            ]
        )
    header = [
        "implementation",
        "longest text",
        "tokens",
        "layers",
        "NeoBERT MiB",
        "KiB a token",
        "ModernBERT base MiB",
        "ratio",
    ]
    return markdown_table(header, lines)


def main(argv=None):
    """Measures, writes and prints the table; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    (given,) = Options("python -m neobert.benchmarks.memory", __doc__, (MemoryArguments,)).read(
        argv
    )
    first = Case(
        "neobert",
        given.implementation,
        given.lengths[0],
        given.batch,
        given.layers,
        given.device,
        given.threads,
    )
    cases = [
        replace(first, implementation=name, length=length)
        for name in (given.implementation, CONTRACT)
        for length in given.lengths
    ]
    if given.check_depth:
        cases.append(replace(first, length=given.check_depth, layers=0))
    rows = [row_of(case) for case in tqdm(cases, desc="memory", disable=None)]
    text = "Inference. `flash_contract`: two texts packed, the second half as long.\n\n" + table(
        rows
    )
    env = environment(
        dtype="bfloat16" if given.device == "cuda" else "float32",
        device=given.device,
        batch=given.batch,
    )
    print(
        write_result(
            given.output,
            "Peak memory above the weights",
            {**env, "threads": given.threads},
            {"rows": rows},
            text,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.memory", main))
