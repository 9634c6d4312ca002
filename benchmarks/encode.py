"""`neobert encode` against what it replaces, on English texts of mixed length: speed, vectors, and
memory against the size of the corpus.

    # NeoBERT base, ModernBERT base, BERT of NeoBERT's size, float32 and bfloat16
    python -m neobert.benchmarks.encode
    python -m neobert.benchmarks.encode --layers 6 --texts 64

Weights are random, which take the same time. `neobert encode` reads jsonl and writes parquet; all
else is SentenceTransformer.encode, which sorts its texts by length, pads them, and has them in
memory. Each of its rows has the fastest of --batch-sizes. All models see the same tokens.
"""

import functools
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from transformers import AutoTokenizer, BertConfig, BertModel, ModernBertConfig, ModernBertModel

from ..common.arguments import Arguments, Options, option
from ..common.commands import guarded
from ..common.constants import TOKENIZER
from ..common.loading import choose_device
from ..common.memory import PeakMemory
from ..common.results import environment, markdown_table, write_result
from ..configuration_neobert import NeoBERTConfig
from ..embeddings.encode import encode
from ..embeddings.options import EncodeArguments
from ..embeddings.packed_encoder import PackedEncoder, load_sentence_transformer
from ..modeling_neobert import NeoBERTModel
from ..throughput.timing import between, in_turns, ratio
from .local_text import wordnet_entries
from .measuring import in_a_process


OURS = "neobert encode, file to file"
UNPADDED = "NeoBERT, padding taken out in the model"
PADDED = "NeoBERT, padding left in"
MODERN = "ModernBERT base"
BERT = "BERT of NeoBERT's size"


@dataclass
class EncodeBenchmark(Arguments):
    """Options of `python -m neobert.benchmarks.encode`."""

    output: str = option("results/encode/encode", "path of the result without its ending")
    dtypes: list[str] = option(
        default_factory=lambda: ["float32", "bfloat16"], choices=("float32", "float16", "bfloat16")
    )
    layers: int = option(28, "of NeoBERT and BERT, 768 wide; ModernBERT base has 22", least=1)
    texts: int = option(96, least=8)
    median_words: int = option(60, least=1)
    most_words: int = option(400, "BERT ends at 512 tokens", least=3)
    repeats: int = option(5, "each way takes its turn in every one", least=1)
    batch_sizes: list[int] = option(
        default_factory=lambda: [16, 32], help="of SentenceTransformer.encode", least=1
    )
    memory_factors: list[int] = option(
        default_factory=lambda: [1, 4, 16, 48],
        help="corpora of this many times 1,000 texts",
        least=1,
    )
    device: str | None = option(None, "cpu, cuda")
    threads: int | None = option(None, "of the CPU", least=1)


def mixed_texts(count, median_words, most_words, seed=0):
    """English of log-normal length (sigma 1, as web pages have): WordNet entries joined until the
    drawn number of words is reached."""
    generator = np.random.default_rng(seed)
    entries = [row["text"].split() for row in wordnet_entries()]
    generator.shuffle(entries)
    words = iter(word for entry in entries * 4 for word in entry)
    lengths = np.clip(generator.lognormal(np.log(median_words), 1.0, count), 3, most_words).astype(
        int
    )
    return [" ".join(next(words) for _ in range(length)) for length in lengths]


def write_jsonl(path, texts):
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def random_models(folder, layers, hidden=768):
    """{name: folder} of NeoBERT, ModernBERT base and BERT with random weights and the bundled
    tokenizer."""
    torch.manual_seed(0)
    heads = hidden // 64
    shape = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }
    models = {
        "neobert": NeoBERTModel(NeoBERTConfig(**shape, max_position_embeddings=1024)),
        MODERN: ModernBertModel(ModernBertConfig(pad_token_id=0, reference_compile=False)),
        BERT: BertModel(BertConfig(**shape, max_position_embeddings=512)),
    }
    for name, model in models.items():
        model.save_pretrained(Path(folder) / name)
        AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(Path(folder) / name)
    return {name: str(Path(folder) / name) for name in models}


def measure_speed(options, models, texts, dtype, folder):
    """Figures of every way in one precision: tokens a second, the ratio to `neobert encode`,
    agreement of the vectors.

    Args:
        options: `EncodeBenchmark`.
        models: of `random_models`.
    """
    device = choose_device(options.device)
    encoder = PackedEncoder(models["neobert"], dtype=dtype, device=device, max_length=512)
    source, output = Path(folder) / "texts.jsonl", Path(folder) / "vectors.parquet"
    write_jsonl(source, texts)
    arguments = EncodeArguments(
        source=str(source),
        output=str(output),
        model=models["neobert"],
        dtype=dtype,
        device=str(device),
        max_length=512,
    )

    def ours():
        output.unlink(missing_ok=True)
        encode(arguments, progress_bar=False, encoder=encoder)

    def padded(size):
        encoder.sentence_transformer[0].auto_model.config.unpad_inputs = False
        try:
            return encoder.sentence_transformer.encode(texts, batch_size=size)
        finally:
            encoder.sentence_transformer[0].auto_model.config.unpad_inputs = True

    def other(name):
        model = load_sentence_transformer(
            models[name], device, getattr(torch, dtype), max_length=512
        )
        return lambda size: model.encode(texts, batch_size=size)

    ways = {
        UNPADDED: lambda size: encoder.sentence_transformer.encode(texts, batch_size=size),
        PADDED: padded,
        MODERN: other(MODERN),
        BERT: other(BERT),
    }
    ours()
    vectors = np.array(pyarrow.parquet.read_table(output)["embedding"].to_pylist())
    difference = {}
    for name in (UNPADDED, PADDED):  # also the warm-up
        found = np.asarray(ways[name](options.batch_sizes[0]), dtype=np.float32)
        difference[name] = float(np.abs(vectors - found).max() / np.abs(found).max())
    calls, best = {OURS: ours}, {}
    for name, way in ways.items():
        sizes = {size: functools.partial(way, size) for size in options.batch_sizes}
        tried = in_turns(sizes, 1)
        best[name] = min(sizes, key=lambda size: tried[size].seconds)
        calls[name] = sizes[best[name]]
    timings = in_turns(calls, options.repeats)
    lengths = [len(ids) for ids in encoder.tokenize(texts)]
    tokens = sum(lengths)
    ours_seconds = timings[OURS].seconds
    return {
        "texts": len(texts),
        "tokens": tokens,
        "tokens_per_text": {"median": float(np.median(lengths)), "longest": max(lengths)},
        "batch_size": best,
        "tokens_per_second": {name: timing.per_second(tokens) for name, timing in timings.items()},
        "times_as_fast": {
            name: ratio(timing.seconds, ours_seconds) for name, timing in timings.items()
        },
        "difference_of_vectors": difference,
        "parameters": sum(p.numel() for p in encoder.sentence_transformer.parameters()),
    }


def memory_growth(way, model, path):
    """Run in a process of its own: by how many MiB the peak of the work is above the memory after
    loading and a warm-up."""
    encoder = PackedEncoder(model, dtype="float32", device="cpu")

    def run(path, folder):
        if way == OURS:
            output = str(Path(folder) / "out")
            arguments = EncodeArguments(
                source=str(path),
                output=output,
                model=model,
                rows=512,
                device="cpu",
                dtype="float32",
            )
            encode(arguments, progress_bar=False, encoder=encoder)
        else:
            with open(path, encoding="utf-8") as lines:
                encoder.sentence_transformer.encode([json.loads(line)["text"] for line in lines])

    with tempfile.TemporaryDirectory() as folder:  # imports and buffers of the first call
        write_jsonl(Path(folder) / "warm.jsonl", ["some words to start with"] * 64)
        run(Path(folder) / "warm.jsonl", folder)
    with tempfile.TemporaryDirectory() as folder, PeakMemory("cpu") as peak:
        run(path, folder)
    return peak.growth / 2**20


def measure_memory(factors, folder):
    """{way: [[rows, MiB beyond the loaded model], ...]} of a small model."""
    shape = {
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    NeoBERTModel(NeoBERTConfig(**shape)).save_pretrained(Path(folder) / "small")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(Path(folder) / "small")
    growth = {OURS: [], "SentenceTransformer.encode": []}
    texts = mixed_texts(1000, 20, 200)
    for factor in factors:
        path = Path(folder) / f"corpus-{factor}.jsonl"
        write_jsonl(path, (f"{i} {text}" for i in range(factor) for text in texts))
        for way, points in growth.items():
            points.append(
                [
                    factor * len(texts),
                    in_a_process(memory_growth, way, str(Path(folder) / "small"), path),
                ]
            )
    return growth


def page(options, speed, memory):
    """The result in markdown."""
    first = next(iter(speed.values()))
    lengths, sizes = first["tokens_per_text"], ", ".join(map(str, options.batch_sizes))
    parts = [
        f"Real tokens a second (padding does not count) on {first['texts']:,} English texts of "
        f"{first['tokens']:,} tokens (median {lengths['median']:.0f}, longest "
        f"{lengths['longest']}); NeoBERT and BERT of {options.layers} layers x 768 "
        f"({first['parameters'] / 1e6:.0f}M parameters), random weights; {options.repeats} runs of "
        "each way in turns. The ratio is the median over repeats, with its quartiles; above 1 "
        "`neobert encode` is faster. All but the first row are SentenceTransformer.encode, with "
        f"its texts in memory, at the fastest of the batch sizes {sizes}."
    ]
    header = ["way", "batch size", "tokens/s, median", "quartiles"]
    for dtype, found in speed.items():
        rows = []
        for name, rate in found["tokens_per_second"].items():
            times = found["times_as_fast"][name]
            spread = f"{times['ratio']:.2f} ({between(times['quartiles'], '.2f')})"
            size = found["batch_size"].get(name, "by tokens")
            rows.append([name, size, f"{rate['median']:,.0f}", between(rate["quartiles"]), spread])
        worst = max(found["difference_of_vectors"].values())
        parts += [
            f"## {dtype}",
            markdown_table([*header, "neobert encode is times as fast"], rows),
            f"Largest difference of the vectors of the three NeoBERT rows: {worst:.1e} of the "
            "largest value.",
        ]
    counts = [f"{count:,} texts" for count, _ in memory[OURS]]
    rows = [[name, *(f"{size:,.0f}" for _, size in points)] for name, points in memory.items()]
    parts += [
        "## Memory",
        "Peak beyond the loaded model and the libraries, MiB (NeoBERT of 1 layer x 256, float32, "
        "texts of 20 words in the median and at most 200, parts of 512 rows).",
        markdown_table(["way", *counts], rows),
    ]
    return "\n\n".join(part.strip() for part in parts)


def main(argv=None):
    """Measures, writes OUTPUT.json and .md; returns the exit code."""
    (options,) = Options("python -m neobert.benchmarks.encode", __doc__, (EncodeBenchmark,)).read(
        sys.argv[1:] if argv is None else argv
    )
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        models = random_models(folder, options.layers)
        texts = mixed_texts(options.texts, options.median_words, options.most_words)
        speed = {
            dtype: measure_speed(options, models, texts, dtype, folder) for dtype in options.dtypes
        }
        memory = measure_memory(options.memory_factors, folder)
    made = environment(
        device=str(choose_device(options.device)), dtype=options.dtypes, attention="sdpa"
    )
    data = {"speed": speed, "memory": memory}
    print(
        write_result(options.output, "Encoding a corpus", made, data, page(options, speed, memory))
    )
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.encode", main))
