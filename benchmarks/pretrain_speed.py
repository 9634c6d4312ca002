"""Pre-training steps on real short texts: packed batches with logits of the masked tokens, against padded batches with all logits.

    python benchmarks/pretrain_speed.py                          # CPU: both ways, same texts, same masks, same losses
    python benchmarks/pretrain_speed.py --device cuda            # the 250M model in bf16 at 1,024 and 4,096 tokens, share of the matrix rate

Each way runs in a process of its own, so that its peak memory is its own; the ways take turns. Texts: WordNet's entries (apt-get install wordnet-base).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from neobert.common.files import write_json, write_text
from neobert.common.loading import TOKENIZER
from neobert.common.local_text import wordnet_entries
from neobert.common.memory import PeakMemory
from neobert.common.optimisation import make_optimizer
from neobert.common.results import environment, markdown_table
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM
from neobert.pretraining.batching import MicroBatches, Windows, pad, real_tokens, squared_lengths
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.pretrain_trainer import flops_per_batch, matrix_product_rate
from neobert.pretraining.pretraining_data import tokens_from_texts


WAYS = {"packed": "packed, logits of masked tokens", "plain": "padded, all logits"}


def short_batches(count, tokens_per_batch, max_length=128):
    """The packed micro-batches of the first 20,000 entries."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    texts = [row["text"] for _, row in zip(range(20_000), wordnet_entries())]
    windows = Windows(tokens_from_texts(texts, tokenizer), tokenizer.cls_token_id, tokenizer.sep_token_id, max_length)
    settings = {"tokens_per_batch": tokens_per_batch, "max_length": max_length, "seed": 0}
    batches = MicroBatches(windows, TokenMasking(tokenizer), count=count, **settings)
    return [batches[i] for i in range(count)], tokenizer.pad_token_id


def as_padded(batch, pad_token_id):
    """The same texts and labels as a padded batch."""
    bounds = batch["cu_seq_lens_q"].tolist()
    parts = list(zip(bounds, bounds[1:]))
    padded = pad([batch["input_ids"][0, start:stop].numpy() for start, stop in parts], pad_token_id)
    labels = torch.full_like(padded["input_ids"], -100)
    for row, (start, stop) in enumerate(parts):
        labels[row, : stop - start] = batch["labels"][0, start:stop]
    return {**padded, "labels": labels}


def measure_way(way, arguments):
    """Trains `steps` steps one way.

    Returns:
        dict: losses, real tokens, seconds, fill, and in bytes: memory before there is a model (interpreter, libraries, texts), weights with
        their gradients and Adam's two moments (16 a parameter), and the peak.
    """
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    batches, pad_token_id = short_batches(arguments.steps + 1, arguments.tokens)
    if way == "plain":
        batches = [as_padded(batch, pad_token_id) for batch in batches]
    config = NeoBERTConfig(
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        intermediate_size=4 * arguments.hidden,
        max_position_embeddings=512,
        masked_lm_logits="masked" if way == "packed" else "all",
        unpad_inputs=way == "packed",
    )
    losses, tokens, seconds, computed = [], [], [], []
    with PeakMemory("cpu") as memory:
        model = NeoBERTForMaskedLM(config).train()
        optimizer = make_optimizer(model, "adamw", 1e-3, (0.9, 0.95), 1e-8, 0.1)
        for batch in batches:
            start = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
            tokens.append(real_tokens(batch))
            computed.append(batch["input_ids"].numel())
    # The first step allocates and warms up.
    result = {"losses": losses, "tokens": sum(tokens[1:]), "seconds": sum(seconds[1:]), "fill": sum(tokens) / sum(computed)}
    state = 16 * sum(parameter.numel() for parameter in model.parameters())
    return {**result, "without_model_bytes": memory.before, "state_bytes": state, "peak_bytes": memory.peak}


def run_way(way, arguments):
    """`measure_way` in a process of its own."""
    command = [sys.executable, __file__, "--way", way]
    for name in ("hidden", "layers", "tokens", "steps", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.strip().splitlines()[-1])


def compare(arguments):
    """Both ways in turn; writes results/pretrain_speed.json and .md."""
    runs = {way: [] for way in WAYS}
    for _ in tqdm(range(arguments.repeats), desc="repeats"):
        for way in WAYS:
            runs[way].append(run_way(way, arguments))
    difference = max(abs(a - b) for one, two in zip(*runs.values()) for a, b in zip(one["losses"], two["losses"]))
    rates = {way: [run["tokens"] / run["seconds"] for run in results] for way, results in runs.items()}
    peaks = {way: max(run["peak_bytes"] for run in results) for way, results in runs.items()}
    training = {way: max(run["peak_bytes"] - run["without_model_bytes"] for run in results) for way, results in runs.items()}
    state = runs["packed"][0]["state_bytes"]
    ratios = [a / b for a, b in zip(rates["packed"], rates["plain"])]
    summary = {
        "speedup_median": statistics.median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
        "peak_memory_ratio": peaks["packed"] / peaks["plain"],
        "training_memory_ratio": training["packed"] / training["plain"],
        "working_memory_ratio": (training["packed"] - state) / (training["plain"] - state),
        "largest_loss_difference": difference,
    }
    env = environment(dtype="float32", attention="sdpa", settings={k: v for k, v in vars(arguments).items() if k not in ("way", "output")})
    env["threads"] = arguments.threads
    # One busy thread of our own counts too: more than that is other work, which the speed ratio then shows.
    env["load_average"] = round(os.getloadavg()[1], 1)
    write_json(f"{arguments.output}.json", {**env, **summary, "runs": runs})
    rows = []
    for way, what in WAYS.items():
        spread = f"{min(rates[way]):,.0f} to {max(rates[way]):,.0f}"
        memory = [f"{value / 2**20:,.0f}" for value in (peaks[way], training[way], training[way] - state)]
        rows.append([what, f"{statistics.median(rates[way]):,.0f}", spread, *memory])
    ratios_of_memory = [f"{summary[name]:.2f}" for name in ("peak_memory_ratio", "training_memory_ratio", "working_memory_ratio")]
    rows.append(["packed / padded", f"{summary['speedup_median']:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", *ratios_of_memory])
    header = [
        "way",
        "real tokens/s (median)",
        f"of {arguments.repeats} runs",
        "peak memory of the process, MiB",
        "of it training",
        "of that activations",
    ]
    first = runs["packed"][0]
    text = "# Pre-training speed on short texts, CPU\n\n" + markdown_table(header, rows)
    text += (
        f"\nPacked with masked logits is {summary['speedup_median']:.1f} times as fast (pairs of runs: {min(ratios):.1f} to {max(ratios):.1f}) with "
        f"{summary['peak_memory_ratio']:.2f} of the peak memory. Same texts, same masks: the losses of {arguments.steps + 1} training steps "
        f"({first['losses'][0]:.4f} to {first['losses'][-1]:.4f}) differ by at most {difference:.1e}.\n\n"
        f"Training: all but the interpreter, its libraries and the texts. Activations: training without the {state / 2**20:,.0f} MiB of weights, gradients "
        f"and Adam's moments, which both ways have alike.\n\n"
        f"WordNet entries of up to 128 tokens, about {arguments.tokens:,} real tokens a step ({runs['plain'][0]['fill']:.0%} of the padded batch are "
        f"real); {arguments.layers} layers of {arguments.hidden}, vocabulary 30,522; forward, backward, clipping, AdamW.\n\n"
        f"`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, {arguments.threads} threads, float32, sdpa, load average "
        f"{env['load_average']}; " + ", ".join(f"{name} {version}" for name, version in env["versions"].items()) + ".\n"
    )
    write_text(f"{arguments.output}.md", text)
    print(text)


def gpu(arguments):
    """The published size in bf16: tokens/s and the share of the matrix-product rate at 1,024 and 4,096 tokens."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    peak = matrix_product_rate(device, torch.bfloat16)
    config = NeoBERTConfig(masked_lm_logits="masked")
    model = NeoBERTForMaskedLM(config).to(device).train()
    optimizer = make_optimizer(model, "adamw", 6e-4, (0.9, 0.95), 1e-8, 0.1)
    rows, results = [], []
    for length in (1024, 4096):
        texts = max(1, arguments.gpu_tokens // length)
        ids = torch.randint(1000, 30_000, (1, texts * length), device=device)
        labels = torch.where(torch.rand(ids.shape, device=device) < 0.2, ids, -100)
        bounds = torch.arange(0, texts * length + 1, length, dtype=torch.int32, device=device)
        batch = {
            "input_ids": ids,
            "labels": labels,
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": length,
            "max_length_k": length,
        }
        seconds = []
        torch.cuda.reset_peak_memory_stats()
        for _ in range(arguments.steps + 3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        median, tokens = statistics.median(seconds[3:]), ids.numel()
        share = flops_per_batch(config, tokens, squared_lengths(batch), int((labels != -100).sum())) / median / peak
        memory = torch.cuda.max_memory_reserved() / 2**30
        results.append({"length": length, "texts": texts, "seconds": seconds[3:], "share_of_matrix_rate": share, "reserved_gib": memory})
        rows.append([length, texts, f"{tokens / median:,.0f}", f"{share:.0%}", f"{memory:.1f}"])
    env = environment(dtype="bfloat16 autocast", attention=model.attention_backend(), matrix_rate_tflops=peak / 1e12)
    write_json(f"{arguments.output}_gpu.json", {**env, "runs": results})
    text = "# Pre-training speed, GPU, 250M model\n\n" + markdown_table(
        ["length", "texts", "tokens/s", "of the matrix rate", "reserved, GiB"], rows
    )
    text += f"\n`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, bf16 autocast, {env['attention']}.\n"
    write_text(f"{arguments.output}_gpu.md", text)
    print(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=3072, help="real tokens of a step")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gpu_tokens", type=int, default=32768)
    parser.add_argument("--output", default=str(Path(__file__).resolve().parent.parent / "results" / "pretrain_speed"))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure_way(arguments.way, arguments)))
    elif arguments.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("pretrain_speed: --device cuda was given, but there is no CUDA device; leave it out to compare on the CPU")
        gpu(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
