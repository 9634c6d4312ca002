"""Compiled blocks on packed batches: speed against eager on both layouts, and recompilations over batches of different shapes.

    python benchmarks/compile_packed.py --output results/compile_packed_cpu

`compile_blocks` compiles every block in place with a dynamic token count; packing and scatter stay outside. All blocks share their graphs, so
the count of graphs is that of one block. Speeds are medians over repeats in which the variants take turns on the same batch.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from tqdm import tqdm

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.benchmarks.throughput_models import compile_blocks
from neobert.benchmarks.throughput_sets import draw_lengths, make_batch
from neobert.common.files import write_json, write_text
from neobert.common.results import environment, markdown_table


def build(arguments, unpad, compiled):
    torch.manual_seed(0)
    config = NeoBERTConfig(num_hidden_layers=arguments.layers, hidden_size=arguments.hidden, num_attention_heads=arguments.hidden // 64,
                           intermediate_size=4 * arguments.hidden, unpad_inputs=unpad)  # fmt: skip
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    model = NeoBERTModel._from_config(config, attn_implementation="sdpa", dtype=dtype).eval().to(arguments.device)
    return compile_blocks(model) if compiled else model


def graphs():
    return counters["stats"]["unique_graphs"]


def count_recompilations(model, arguments):
    """Graphs after the first batches and after all of `arguments.batches` whose texts, lengths and number of texts differ."""
    generator, seen = torch.Generator().manual_seed(1), []
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        for i in tqdm(range(arguments.batches), desc="batches", unit="batch"):
            texts = int(torch.randint(2, arguments.texts + 1, (1,), generator=generator))
            model(*make_batch(draw_lengths("short", texts, seed=i), arguments.device))
            seen.append(graphs())
    breaks = {" ".join(reason.split())[:120]: count for reason, count in counters["graph_break"].items()}
    return seen, breaks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="results/compile_packed_cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--texts", type=int, default=24, help="texts of a timed batch, and at most in a counted one")
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help="processor: CPU seconds, with --threads 1")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    variants = {(unpad, compiled): build(arguments, unpad, compiled) for unpad in (True, False) for compiled in (False, True)}
    seen, breaks = count_recompilations(variants[True, True], arguments)
    batch = make_batch(draw_lengths("short", arguments.texts), arguments.device)
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    seconds, outputs = {key: [] for key in variants}, {}
    with torch.no_grad():
        for repeat in range(-1, arguments.repeats):
            for key, model in variants.items():
                start = clock()
                outputs[key] = model(*batch).last_hidden_state
                if arguments.device == "cuda":
                    torch.cuda.synchronize()
                if repeat >= 0:
                    seconds[key].append(clock() - start)
    real, rows, table = batch[1].bool(), [], []
    for (unpad, compiled), times in seconds.items():
        ratio = [plain / s for plain, s in zip(seconds[True, False], times)]
        difference = (outputs[unpad, compiled] - outputs[True, False])[real].abs().max() / outputs[True, False].abs().max()
        row = {"layout": "packed" if unpad else "padded", "compiled": compiled, "seconds": times, "ratio": statistics.median(ratio)}
        rows.append({**row, "largest_difference": difference.item()})
        cells = [row["layout"], "compiled" if compiled else "eager", f"{int(real.sum()) / statistics.median(times):,.0f}"]
        table.append([*cells, f"{row['ratio']:.2f}", f"{min(ratio):.2f} to {max(ratio):.2f}", f"{difference:.1e}"])
    env = environment(clock=arguments.clock, device=arguments.device, layers=arguments.layers, hidden=arguments.hidden)
    text = f"# Compiled blocks on packed batches\n\n`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, "
    text += f"{env['threads']} threads, {arguments.clock} time, torch {env['versions']['torch']}, fill {real.float().mean():.2f}.\n\n"
    header = ["layout", "blocks", "real tokens/s", "times as fast as packed eager", "range over repeats", "difference"]
    text += markdown_table(header, table)
    text += f"\nOver {arguments.batches} batches of different texts, lengths and numbers of texts: {seen[0]} graphs after the first batch, "
    text += f"{seen[min(2, len(seen) - 1)]} after the third, {seen[-1]} after the last. Graph breaks: {breaks or 'none'}.\n"
    write_json(Path(arguments.output).with_suffix(".json"), {"environment": env, "rows": rows, "graphs": seen, "graph_breaks": breaks})
    write_text(Path(arguments.output).with_suffix(".md"), text)
    print(text)


if __name__ == "__main__":
    main()
