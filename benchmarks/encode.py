"""`neobert encode` against SentenceTransformer.encode with the same model on texts of mixed length: speed, vectors, memory.

python benchmarks/encode.py --model FOLDER --output results/encode
Without --model: random weights of --layers x --hidden, which take the same time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.common.files import write_json, write_text
from neobert.common.loading import TOKENIZER
from neobert.common.local_text import wordnet_entries
from neobert.common.memory import PeakMemory
from neobert.common.results import environment, markdown_table
from neobert.embeddings.encode import EncodeArguments, encode
from neobert.embeddings.packed_encoder import PackedEncoder


def mixed_texts(count, median_words, most_words, seed=0):
    """English of log-normal length (sigma 1, as web pages have): WordNet entries joined until the drawn number of words is reached."""
    generator = np.random.default_rng(seed)
    entries = [row["text"].split() for row in wordnet_entries()]
    generator.shuffle(entries)
    words = iter(word for entry in entries * 4 for word in entry)
    lengths = np.clip(generator.lognormal(np.log(median_words), 1.0, count), 3, most_words).astype(int)
    return [" ".join(next(words) for _ in range(length)) for length in lengths]


def random_model(folder, layers, hidden):
    torch.manual_seed(0)
    config = NeoBERTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        max_position_embeddings=1024,
    )
    NeoBERTModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder


def spread(values):
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values), "runs": values}


def write_jsonl(path, texts):
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def measure_speed(model, texts, repeats, device, dtype, batch_sizes, folder):
    """Real tokens a second of each way, runs interleaved; and the largest difference of the vectors relative to the largest value.

    `neobert encode` reads a jsonl file and writes a safetensors file; SentenceTransformer.encode has its texts in memory and returns an array.
    Both start with a loaded model.
    """
    encoder = PackedEncoder(model, device=device, dtype=dtype)
    reference = encoder.sentence_transformer
    tokens = sum(len(ids) for ids in encoder.tokenize(texts))
    source, output = Path(folder) / "speed.jsonl", Path(folder) / "speed.safetensors"
    write_jsonl(source, texts)

    def command():
        output.unlink(missing_ok=True)
        encode(source, output, EncodeArguments(model=model, device=str(encoder.device)), progress_bar=False, encoder=encoder)

    ways = {"neobert encode, file to file": command}
    for size in batch_sizes:
        ways[f"SentenceTransformer.encode, batch {size}"] = lambda size=size: reference.encode(texts, batch_size=size)
    others = [way() for name, way in ways.items()][1:]  # also the warm-up
    packed = load_file(output)["embeddings"]
    difference = max(float(np.abs(packed - other).max() / np.abs(other).max()) for other in others)
    seconds, processor = {name: [] for name in ways}, {name: [] for name in ways}
    for _ in tqdm(range(repeats), desc="speed"):
        for name, way in ways.items():
            start, cpu = time.perf_counter(), time.process_time()
            way()
            if encoder.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - cpu)
    lengths = [len(ids) for ids in encoder.tokenize(texts)]
    own = next(iter(seconds.values()))
    return {
        "texts": len(texts),
        "tokens": tokens,
        "tokens_per_text": {"median": float(np.median(lengths)), "longest": max(lengths)},
        "tokens_per_second": {name: spread([tokens / s for s in values]) for name, values in seconds.items()},
        "times_as_fast": {name: spread([other / mine for other, mine in zip(values, own)]) for name, values in seconds.items()},
        "tokens_per_processor_second": {name: spread([tokens / s for s in values]) for name, values in processor.items()},
        "largest_relative_difference": difference,
        "dtype": str(encoder.dtype).removeprefix("torch."),
        "device": str(encoder.device),
        "parameters": sum(p.numel() for p in reference.parameters()),
    }


def memory_child(way, model, path):
    """Run in a process of its own; prints by how many MiB the peak of the work is above the memory after loading and a warm-up."""
    encoder = PackedEncoder(model, device="cpu")
    arguments = EncodeArguments(model=model, shard_rows=512, device="cpu")

    def run(path, folder):
        if way == "packed":
            encode(path, Path(folder) / "out", arguments, progress_bar=False, encoder=encoder)
        else:
            with open(path, encoding="utf-8") as lines:
                encoder.sentence_transformer.encode([json.loads(line)["text"] for line in lines])

    with tempfile.TemporaryDirectory() as folder:  # imports and buffers of the first call
        write_jsonl(Path(folder) / "warm.jsonl", ["some words to start with"] * 64)
        run(Path(folder) / "warm.jsonl", folder)
    with tempfile.TemporaryDirectory() as folder, PeakMemory("cpu") as peak:
        run(path, folder)
    print(json.dumps(peak.growth / 2**20))


def measure_memory(model, texts, factors, folder):
    """{way: [[rows, MiB beyond the loaded model], ...]}"""
    growth = {"neobert encode, file to file": [], "SentenceTransformer.encode": []}
    for factor in tqdm(factors, desc="memory"):
        path = Path(folder) / f"corpus-{factor}.jsonl"
        write_jsonl(path, (f"{i} {text}" for i in range(factor) for text in texts))
        for name, way in zip(growth, ("packed", "sentence-transformers")):
            command = [sys.executable, __file__, "--memory_child", way, "--model", str(model), "--corpus", str(path)]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            growth[name].append([factor * len(texts), json.loads(run.stdout.splitlines()[-1])])
    return growth


def plot(result, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    rates = result["speed"]["tokens_per_second"]
    names = list(rates)[::-1]
    medians = [rates[name]["median"] for name in names]
    errors = [[m - rates[n]["lowest"] for n, m in zip(names, medians)], [rates[n]["highest"] - m for n, m in zip(names, medians)]]
    labels = [name.replace(", ", ",\n") for name in names]
    left.barh(labels, medians, xerr=errors, color=["#9aa5b1"] * (len(names) - 1) + ["#2b6cb0"])
    left.set_xlabel("real tokens a second (bars: lowest to highest)")
    for (name, points), colour in zip(result["memory"].items(), ("#2b6cb0", "#9aa5b1")):
        right.plot(*zip(*points), marker="o", label=name, color=colour)
    right.set_xlabel("texts in the corpus")
    right.set_ylabel("peak memory beyond the model (MiB)")
    right.set_ylim(bottom=0)
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="sentence encoder or bare NeoBERT")
    parser.add_argument("--output", help="folder for encode.json, encode.md, encode.png")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--median_words", type=int, default=60)
    parser.add_argument("--most_words", type=int, default=800)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--memory_factors", type=int, nargs="+", default=[1, 4, 16], help="corpora of this many times 1,000 texts")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--memory_child", help=argparse.SUPPRESS)
    parser.add_argument("--corpus", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory_child:
        return memory_child(given.memory_child, given.model, given.corpus)
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or random_model(Path(folder) / "model", given.layers, given.hidden)
        texts = mixed_texts(given.texts, given.median_words, given.most_words)
        speed = measure_speed(str(model), texts, given.repeats, given.device, given.dtype, given.batch_sizes, folder)
        small = random_model(Path(folder) / "small", 1, 256)
        memory = measure_memory(small, mixed_texts(1000, 20, 200), given.memory_factors, folder)
    shape = given.model and Path(given.model).name or f"random weights, {given.layers} layers x {given.hidden}"
    env = environment(dtype=speed["dtype"], device=speed["device"], attention="sdpa")
    result = {"model": shape, "speed": speed, "memory": memory, "environment": env}
    output = Path(given.output or "results/encode")
    write_json(output / "encode.json", result)
    processor, ratio = speed["tokens_per_processor_second"], speed["times_as_fast"]
    rows = [
        [
            name,
            *(f"{rate[key]:,.0f}" for key in ("median", "lowest", "highest")),
            f"{processor[name]['median']:,.0f}",
            "{median:.2f} ({lowest:.2f} to {highest:.2f})".format(**ratio[name]),
        ]
        for name, rate in speed["tokens_per_second"].items()
    ]
    sizes = [points[0] for points in next(iter(memory.values()))]
    memory_rows = [[name, *(f"{size:,.0f}" for _, size in points)] for name, points in memory.items()]
    lengths = speed["tokens_per_text"]
    text = (
        f"Real tokens a second (padding does not count), {speed['texts']:,} texts of {speed['tokens']:,} tokens (median "
        f"{lengths['median']:.0f}, longest {lengths['longest']}), model: {shape} ({speed['parameters'] / 1e6:.1f}M parameters), "
        f"{speed['dtype']}, {speed['device']}, {given.repeats} interleaved runs. `neobert encode` reads jsonl and writes safetensors, "
        "SentenceTransformer.encode has its texts in memory; both start with the model loaded. Largest difference of the vectors: "
        f"{speed['largest_relative_difference']:.1e} of the largest value.\n\n"
        + markdown_table(
            ["way", "median", "lowest", "highest", "median, per second of processor time", "neobert encode is times as fast"], rows
        )
        + "\nPeak memory beyond the loaded model and the libraries, MiB (random weights, 1 layer x 256, texts of 20 words in the median and at "
        "most 200, parts of 512 rows):\n\n"
        + markdown_table(["way", *(f"{size:,} texts" for size in sizes)], memory_rows)
        + f"\n`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, {env['threads']} threads, torch "
        f"{env['versions'].get('torch')}, sentence-transformers {env['versions'].get('sentence-transformers')}.\n"
    )
    write_text(output / "encode.md", text)
    plot(result, output / "encode.png")
    print(text)


if __name__ == "__main__":
    main()
