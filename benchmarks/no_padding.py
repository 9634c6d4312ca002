"""What packing costs a batch that has nothing to pack: with an attention mask of ones against no mask at all, times in turns.

python benchmarks/no_padding.py --output results/no_padding_cpu
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.benchmarks.throughput_sets import make_batch
from neobert.common.files import write_json, write_text
from neobert.common.results import environment, markdown_table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="results/no_padding_cpu")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--shapes", nargs="+", default=["8x64", "4x128", "1x512"], help="texts x tokens")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help="processor: CPU seconds, with --threads 1")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    config = NeoBERTConfig(num_hidden_layers=arguments.layers)
    model = NeoBERTModel._from_config(config, attn_implementation="sdpa", dtype=dtype).eval().to(arguments.device)
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    rows, table = [], []
    with torch.inference_mode():
        for shape in arguments.shapes:
            texts, tokens = map(int, shape.split("x"))
            ids, ones = make_batch([tokens] * texts, arguments.device)
            seconds = {"none": [], "ones": []}
            for repeat in range(-1, arguments.repeats):
                pairs = [("none", None), ("ones", ones)]
                for name, mask in pairs if repeat % 2 else pairs[::-1]:
                    start = clock()
                    model(ids, attention_mask=mask)
                    if arguments.device == "cuda":
                        torch.cuda.synchronize()
                    if repeat >= 0:
                        seconds[name].append(clock() - start)
            ratios = [b / a for a, b in zip(seconds["none"], seconds["ones"])]
            low, _, high = statistics.quantiles(ratios, n=4)
            rows.append({"shape": shape, "seconds": seconds, "ratio": statistics.median(ratios), "quartiles": [low, high]})
            table.append([shape, f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}"])
            print(*table[-1], flush=True)
    env = environment(clock=arguments.clock, device=arguments.device, layers=arguments.layers)
    text = f"# A batch without padding\n\n`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, "
    text += f"{env['threads']} threads, {arguments.clock} time, torch {env['versions']['torch']}.\n\n"
    text += markdown_table(["texts x tokens", "seconds with a mask of ones over without", "quartiles"], table)
    write_json(Path(arguments.output).with_suffix(".json"), {"environment": env, "rows": rows})
    write_text(Path(arguments.output).with_suffix(".md"), text)


if __name__ == "__main__":
    main()
