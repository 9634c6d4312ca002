"""Peak memory of inference above the weights, NeoBERT against transformers' ModernBERT base at the same batch, by length.

    python benchmarks/memory.py --output results/memory_cpu

Each measurement is a process of its own. On the CPU the peak is that of resident memory beyond what the process held before the forward
(after a forward of 16 tokens, which loads the kernels); on CUDA it is the peak of reserved memory. Without gradients a layer's activations
are freed before the next one's are made, so that the peak does not depend on depth: `--layers` cuts both models, and
`--check-depth` measures one row at full depth beside it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from neobert.evaluation.memory import PeakMemory
from neobert.evaluation.results import environment, markdown_table, write_json, write_text
from neobert.evaluation.throughput_models import build
from neobert.evaluation.throughput_sets import make_batch


def measure(model, implementation, length, batch, layers, device):
    """Peak bytes above the weights of one forward of `batch` texts of `length` tokens."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    run = build(model, implementation, device, dtype, {"num_hidden_layers": layers} if layers else None)
    tokens = make_batch([length] * batch, device)
    with torch.inference_mode():
        run(*make_batch([16], device))
        with PeakMemory(device) as memory:
            run(*tokens)
    return memory.growth


def in_a_process(arguments, model, length, layers):
    command = [sys.executable, __file__, "--one", model, str(length), str(layers or 0), "--implementation", arguments.implementation]
    command += ["--batch", str(arguments.batch), "--device", arguments.device, "--threads", str(arguments.threads)]
    result = subprocess.run(command, capture_output=True, text=True)
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
    cases = [(length, arguments.layers) for length in arguments.lengths]
    if arguments.check_depth:
        cases.append((arguments.check_depth, 0))
    rows, table = [], []
    for length, layers in cases:
        ours, theirs = (in_a_process(arguments, model, length, layers) for model in ("neobert", "modernbert-base"))
        rows.append({"length": length, "layers": layers or "all", "neobert": ours, "modernbert-base": theirs, "ratio": ours / theirs})
        table.append([f"{length:,}", layers or "all", f"{ours / 2**20:,.0f}", f"{theirs / 2**20:,.0f}", f"{ours / theirs:.2f}"])
        print(" | ".join(map(str, table[-1])), flush=True)
    header = ["length", "layers", "NeoBERT MiB", "ModernBERT base MiB", "ratio"]
    env = environment(batch=arguments.batch, device=arguments.device, implementation=arguments.implementation)
    text = f"# Peak memory above the weights\n\n`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, "
    text += ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    text += f"; batch of {arguments.batch}, {arguments.implementation}, inference.\n\n" + markdown_table(header, table)
    write_json(Path(arguments.output).with_suffix(".json"), {"environment": env, "rows": rows})
    write_text(Path(arguments.output).with_suffix(".md"), text)


if __name__ == "__main__":
    main()
