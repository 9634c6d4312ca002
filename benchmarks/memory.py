"""Peak memory of inference above the weights, NeoBERT against transformers' ModernBERT base at the same batch, by length.

    python benchmarks/memory.py --output results/memory_cpu

Each measurement is a process of its own. On the CPU the peak is that of resident memory beyond what the process held before the forward
(after a forward of 16 tokens, which loads the kernels); malloc gives freed tensors back to the system at once, since resident memory would
else grow with what it keeps and not with what the model needs. On CUDA it is the peak of reserved memory. Without gradients a layer's
activations are freed before the next one's are made, so that the peak does not depend on depth: `--layers` cuts both models, and
`--check-depth` measures one row at full depth beside it.

`flash_contract` is NeoBERT packing two texts, one half as long as the other, for a function that is called as flash attention is (packed tokens,
int32 offsets) and runs SDPA on each text: what the model itself holds around a flash kernel.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neobert.benchmarks.throughput_models import build
from neobert.benchmarks.throughput_sets import make_batch
from neobert.common.files import write_json, write_text
from neobert.common.memory import PeakMemory
from neobert.common.results import environment, markdown_table


def flash_contract(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs):
    """(1, H, T, K) and int32 offsets -> (1, T, H, K)."""
    sizes = cu_seq_lens_q.diff().tolist() if cu_seq_lens_q is not None else [query.shape[2]]
    texts = zip(*(x.split(sizes, dim=2) for x in (query, key, value)))
    return torch.cat([F.scaled_dot_product_attention(*text, scale=scaling).transpose(1, 2) for text in texts], dim=1), None


ALL_ATTENTION_FUNCTIONS.register("flash_contract", flash_contract)
ALL_MASK_ATTENTION_FUNCTIONS.register("flash_contract", ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])


def texts_of(implementation, length, batch):
    """Lengths of the texts of a measurement."""
    return [length, length // 2] * batch if implementation == "flash_contract" else [length] * batch


def measure(model, implementation, length, batch, layers, device):
    """Peak bytes above the weights of one forward."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    contract = implementation == "flash_contract"
    run = build(model, "sdpa" if contract else implementation, device, dtype, {"num_hidden_layers": layers} if layers else None)
    if contract:
        run.model.config._attn_implementation = implementation
    tokens = make_batch(texts_of(implementation, length, batch), device)
    with torch.inference_mode():
        run(*make_batch([16], device))
        with PeakMemory(device) as memory:
            run(*tokens)
    return memory.growth


def in_a_process(arguments, model, implementation, length, layers):
    command = [sys.executable, __file__, "--one", model, str(length), str(layers or 0), "--implementation", implementation]
    command += ["--batch", str(arguments.batch), "--device", arguments.device, "--threads", str(arguments.threads)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)})
    if result.returncode:
        raise SystemExit(f"{model} at {length} tokens failed: {result.stderr.strip().splitlines()[-1]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="results/memory_cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=3, help="3: two local layers and a global one in ModernBERT; 0: all")
    parser.add_argument("--check-depth", type=int, default=0, metavar="LENGTH", help="also measure this length at full depth")
    parser.add_argument("--implementation", default="sdpa")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.one:
        model, length, layers = arguments.one[0], int(arguments.one[1]), int(arguments.one[2])
        print(json.dumps(measure(model, arguments.implementation, length, arguments.batch, layers, arguments.device)))
        return
    cases = [(arguments.implementation, length, arguments.layers) for length in arguments.lengths]
    cases += [("flash_contract", length, arguments.layers) for length in arguments.lengths]
    if arguments.check_depth:
        cases.append((arguments.implementation, arguments.check_depth, 0))
    env = environment(batch=arguments.batch, device=arguments.device)
    rows, table = [], []
    for implementation, length, layers in cases:
        ours = in_a_process(arguments, "neobert", implementation, length, layers)
        # The peer has no part in the contract.
        theirs = None if implementation == "flash_contract" else in_a_process(arguments, "modernbert-base", implementation, length, layers)
        tokens = sum(texts_of(implementation, length, arguments.batch))
        row = {"implementation": implementation, "length": length, "layers": layers or "all", "tokens": tokens, "neobert": ours}
        rows.append({**row, "modernbert-base": theirs, "ratio": theirs and ours / theirs})
        cells = [implementation, f"{length:,}", f"{tokens:,}", layers or "all", f"{ours / 2**20:,.0f}", f"{ours / 2**10 / tokens:.1f}"]
        table.append([*cells, *(("", "") if theirs is None else (f"{theirs / 2**20:,.0f}", f"{ours / theirs:.2f}"))])
        print(" | ".join(map(str, table[-1])), flush=True)
    header = ["implementation", "longest text", "tokens", "layers", "NeoBERT MiB", "KiB a token", "ModernBERT base MiB", "ratio"]
    text = f"# Peak memory above the weights\n\n`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, "
    text += ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    text += f"; inference. `flash_contract`: two texts packed, the second half as long.\n\n{markdown_table(header, table)}"
    write_json(Path(arguments.output).with_suffix(".json"), {"environment": env, "rows": rows})
    write_text(Path(arguments.output).with_suffix(".md"), text)


if __name__ == "__main__":
    main()
