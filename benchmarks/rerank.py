"""Rerankers and classifiers on the CPU: `CrossEncoder.predict`, classification and training steps
of NeoBERT packed against the same model padded, and against BERT and ModernBERT of its width and
depth.

    python -m benchmarks.rerank                              # 6 blocks of 384
    python -m benchmarks.rerank --layers 12 --hidden 768 --queries 2 --output PATH

Weights are random, which take the same time. Texts are entries of two dictionaries as they stand:
WordNet's are alike in length, a few of GCIDE's are long; and texts of one length, on which packing
can gain nothing. All models see the same tokens, at most 256 of a text or a pair. The clock
is processor time for one thread, and time on the wall for more.
"""

import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from msgspec import Meta
from sentence_transformers import CrossEncoder
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
)

from neobert.common.commands import guarded
from neobert.common.constants import TOKENIZER
from neobert.common.options import OptionGroup, option
from neobert.common.tables import markdown_table
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForSequenceClassification
from neobert.throughput.timing import CLOCKS, between, in_turns, ratio

from .local_text import gcide_entries, wordnet_entries, wordnet_sentences
from .measuring import WORDS, benchmark, equal_texts


PACKED, PADDED = "NeoBERT packed", "NeoBERT padded"
LENGTH, PASSAGES = 256, 20  # tokens of a text or pair at most; passages of a query
WORKS = {
    "query": "reranking a query's 20 passages at a time",
    "pairs": "reranking all pairs together, which `predict` sorts by length",
    "texts": "classifying, 32 texts at a time as they come",
    "sorted": "classifying, 32 texts at a time sorted by length",
    "train-pairs": "a training step on 16 pairs as they come",
    "train-sorted": "training steps on 16 texts sorted by length",
}


@dataclass(frozen=True)
class RerankOptions(OptionGroup):
    """Options of `python -m benchmarks.rerank`."""

    title = "Options"

    output: str = option("results/rerank", "Result files, PATH.json and PATH.md.", metavar="PATH")
    layers: Annotated[int, Meta(ge=1)] = option(6, "Number of layers.")
    hidden: Annotated[int, Meta(ge=64)] = option(
        384, "Hidden size. The size of an attention head is 64."
    )
    queries: Annotated[int, Meta(ge=1)] = option(
        3, "Number of queries with 20 passages each. The passages are the texts to classify."
    )
    works: list[Literal[tuple(WORKS)]] = option(  # type: ignore[valid-type]
        help="Workloads to measure.", default_factory=lambda: list(WORKS)
    )
    repeats: Annotated[int, Meta(ge=1)] = option(
        5, "Number of timed repeats, in which the models take turns."
    )
    threads: Annotated[int, Meta(ge=1)] = option(1, "Number of CPU threads.")


def make_models(folder, layers, hidden):
    """{name: CrossEncoder} with random weights and the packaged tokenizer."""
    torch.manual_seed(0)
    size = {"hidden_size": hidden, "num_hidden_layers": layers, "num_labels": 1}
    size |= {"num_attention_heads": hidden // 64, "vocab_size": 30522, "pad_token_id": 0}
    size |= {"intermediate_size": 4 * hidden, "max_position_embeddings": 512}
    modern = {**size, "intermediate_size": 3 * hidden // 2}  # ModernBERT base's proportion
    made = {
        PACKED: NeoBERTForSequenceClassification(NeoBERTConfig(**size)),
        "BERT": BertForSequenceClassification(BertConfig(**size)),
        "ModernBERT": ModernBertForSequenceClassification(ModernBertConfig(**modern)),
    }
    models = {}
    for name in (PACKED, PADDED, "BERT", "ModernBERT"):
        path = str(Path(folder) / name)
        made.get(name, made[PACKED]).save_pretrained(path)
        AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(path)
        models[name] = CrossEncoder(path, max_length=LENGTH, device="cpu")
    models[PADDED].model.config.unpad_inputs = False
    return models


def make_texts(count):
    """{set: (`count` queries, 20 passages of each)}."""
    draw = random.Random(0)
    queries = draw.sample([row["text"] for row in wordnet_sentences()], count)
    texts = {
        name: (queries, draw.sample([row["text"] for row in entries()], count * PASSAGES))
        for name, entries in (("WordNet", wordnet_entries), ("GCIDE", gcide_entries))
    }
    equal = equal_texts(count * PASSAGES, draw)
    return texts | {"one length": ([" ".join(WORDS)] * count, equal)}


def work_of(name, cross_encoder, queries, passages):
    """What is timed, a function without arguments."""
    model, tokenizer = cross_encoder.model, cross_encoder.tokenizer
    pairs = [(queries[i // PASSAGES], passage) for i, passage in enumerate(passages)]
    if name == "query":
        starts = range(0, len(pairs), PASSAGES)
        return lambda: [cross_encoder.predict(pairs[i : i + PASSAGES]) for i in starts]
    if name == "pairs":
        return lambda: cross_encoder.predict(pairs)
    texts = {"texts": passages, "train-pairs": pairs[:16]}.get(name, sorted(passages, key=len))
    size = 16 if name.startswith("train") else 32
    cut = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    batches = [tokenizer(texts[i : i + size], **cut) for i in range(0, len(texts), size)]

    @torch.inference_mode()
    def classify():
        model.eval()
        for batch in batches:
            model(**batch)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def train():
        model.train()
        for batch in batches:
            model(**batch, labels=torch.ones(len(batch["input_ids"]))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train if name.startswith("train") else classify


def measure(given, models, texts):
    """A row for each set of texts and work: seconds of every model, and their ratios to PACKED."""
    rows = []
    for name, (queries, passages) in texts.items():
        found = models[PACKED].tokenizer(passages, truncation=True, max_length=LENGTH)
        lengths = [len(ids) for ids in found["input_ids"]]
        for work in given.works:
            calls = {key: work_of(work, model, queries, passages) for key, model in models.items()}
            clock = CLOCKS["processor" if given.threads == 1 else "wall"]
            timings = in_turns(calls, given.repeats, clock=clock)
            mine = timings[PACKED].seconds
            others = {key: ratio(timings[key].seconds, mine) for key in models if key != PACKED}
            spread = [int(length) for length in np.percentile(lengths, [5, 50, 95, 100])]
            row = {"texts": name, "tokens_5_50_95_100": spread, "work": work}
            rows.append({**row, "seconds_packed": mine, "times_as_long": others})
            print(name, work, {key: round(value["ratio"], 2) for key, value in others.items()})
    return rows


def page(given, rows, difference):
    """The result in markdown."""
    clock = "processor time" if given.threads == 1 else "time on the wall"
    lines = [
        f"{given.layers} blocks of {given.hidden}, random weights, {clock}: how many times as long "
        f"as NeoBERT packed the others take, the median of {given.repeats} turns with its "
        "quartiles. Below 1 packing loses, as it may on texts of one length. A text or a pair has "
        f"at most {LENGTH} tokens. Logits of NeoBERT packed and padded differ by {difference:.0e} "
        "of their size at most."
    ]
    others = list(rows[0]["times_as_long"])
    for name in dict.fromkeys(row["texts"] for row in rows):
        mine = [row for row in rows if row["texts"] == name]
        low, median, high, longest = mine[0]["tokens_5_50_95_100"]
        lines += [
            f"## {name}",
            f"Texts of {median} tokens in the median, 90 % of {low} to {high}, at most {longest}.",
        ]
        cells = []
        for row in mine:
            times = [row["times_as_long"][other] for other in others]
            spreads = [f"{t['ratio']:.2f} ({between(t['quartiles'], '.2f')})" for t in times]
            seconds = statistics.median(row["seconds_packed"])
            cells.append([WORKS[row["work"]], f"{seconds:.2f}", *spreads])
        lines.append(markdown_table(["work", "NeoBERT packed, s", *others], cells))
    return "\n\n".join(line.strip() for line in lines)


@benchmark("Rerankers and classifiers on the CPU", RerankOptions)
def main(given):
    """Every set of texts, and what packing changes in the logits."""
    texts = make_texts(given.queries)
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(folder, given.layers, given.hidden)
    queries, passages = texts["GCIDE"]
    pairs = [(queries[0], passage) for passage in passages[:PASSAGES]]
    logits = [
        models[name].predict(pairs, activation_fn=torch.nn.Identity()) for name in (PACKED, PADDED)
    ]
    difference = float(np.abs(logits[0] / logits[1] - 1).max())
    rows = measure(given, models, texts)
    made = {"dtype": "float32", "attention": "sdpa", "machine": "shared with other work"}
    return {"difference": difference, "rows": rows}, page(given, rows, difference), made


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.rerank", main))
