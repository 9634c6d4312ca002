"""Rerankers and classifiers on the CPU: packed NeoBERT, padded NeoBERT, BERT and ModernBERT.

    python -m benchmarks.rerank                              # 6 layers of 384
    python -m benchmarks.rerank --layers 12 --hidden 768 --queries 2 --output PATH

The workloads are `CrossEncoder.predict`, classification and training steps. All models have the
same hidden size and depth and random weights, which do not change the time. The texts are entries
of two dictionaries: those of WordNet have similar lengths, and some of GCIDE's are long. Texts of
one length, for which packing cannot be faster, are the third set. All models process the same
tokens, at most 256 per text or pair. The clock is processor time for one thread, and wall time for
more threads.
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

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


PACKED = "NeoBERT packed"
PADDED = "NeoBERT padded"
# Maximum number of tokens per text or pair.
LENGTH = 256
# Number of passages per query.
PASSAGES = 20
WORKS = {
    "query": "reranking the 20 passages of one query at a time",
    "pairs": "reranking all pairs together, which `predict` sorts by length",
    "texts": "classifying 32 texts at a time in their order",
    "sorted": "classifying 32 texts at a time, sorted by length",
    "train-pairs": "one training step on 16 pairs in their order",
    "train-sorted": "training steps on 16 texts, sorted by length",
}

# Queries, and `PASSAGES` passages of each.
TextSet = tuple[list[str], list[str]]


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


def make_models(folder: str, layers: int, hidden: int) -> dict[str, CrossEncoder]:
    """Return the models with random weights and the bundled tokenizer, {name: model}."""
    torch.manual_seed(0)
    fields = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_labels": 1,
        "num_attention_heads": hidden // 64,
        "vocab_size": 30522,
        "pad_token_id": 0,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 512,
    }
    # The ratio of ModernBERT base.
    modernbert_fields = {**fields, "intermediate_size": 3 * hidden // 2}
    neobert = NeoBERTForSequenceClassification(NeoBERTConfig(**fields))
    weights = {
        PACKED: neobert,
        PADDED: neobert,
        "BERT": BertForSequenceClassification(BertConfig(**fields)),
        "ModernBERT": ModernBertForSequenceClassification(ModernBertConfig(**modernbert_fields)),
    }

    models = {}
    for name, model in weights.items():
        path = str(Path(folder) / name)
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(path)
        models[name] = CrossEncoder(path, max_length=LENGTH, device="cpu")
    # Both NeoBERT models have the same weights, so their logits can be compared.
    models[PADDED].model.config.unpad_inputs = False
    return models


def make_texts(count: int) -> dict[str, TextSet]:
    """Return the sets of texts, {name: (`count` queries, 20 passages of each)}."""
    generator = random.Random(0)
    queries = generator.sample([row["text"] for row in wordnet_sentences()], count)
    sets = {}
    for name, entries in (("WordNet", wordnet_entries), ("GCIDE", gcide_entries)):
        passages = generator.sample([row["text"] for row in entries()], count * PASSAGES)
        sets[name] = (queries, passages)
    # Packing cannot be faster for these, so they show its overhead.
    equal = equal_texts(count * PASSAGES, generator)
    sets["one length"] = ([" ".join(WORDS)] * count, equal)
    return sets


def work_of(
    name: str, cross_encoder: CrossEncoder, queries: list[str], passages: list[str]
) -> Callable[[], object]:
    """Return the function to time.

    Args:
        name: Key of `WORKS`.
        cross_encoder: Model.
        queries: N queries.
        passages: 20 N passages.
    """
    model: Any = cross_encoder.model
    tokenizer: Any = cross_encoder.tokenizer
    pairs = [(queries[i // PASSAGES], passage) for i, passage in enumerate(passages)]
    if name == "query":
        # A search engine reranks the passages of one query per call.
        starts = range(0, len(pairs), PASSAGES)
        return lambda: [cross_encoder.predict(pairs[i : i + PASSAGES]) for i in starts]
    if name == "pairs":
        return lambda: cross_encoder.predict(pairs)

    texts: list[Any] = sorted(passages, key=len)
    if name == "texts":
        texts = list(passages)
    elif name == "train-pairs":
        texts = list(pairs[:16])
    is_training = name.startswith("train")
    size = 16 if is_training else 32
    batches = [
        tokenizer(
            texts[start : start + size],
            padding=True,
            truncation=True,
            max_length=LENGTH,
            return_tensors="pt",
        )
        for start in range(0, len(texts), size)
    ]

    @torch.inference_mode()
    def classify() -> None:
        model.eval()
        for batch in batches:
            model(**batch)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def train() -> None:
        model.train()
        for batch in batches:
            model(**batch, labels=torch.ones(len(batch["input_ids"]))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train if is_training else classify


def measure(
    options: RerankOptions, models: Mapping[str, CrossEncoder], texts: Mapping[str, TextSet]
) -> list[dict[str, Any]]:
    """Time every model on every set of texts and workload.

    Returns:
        One row per set and workload, with the seconds of `PACKED` and the ratios of the other
        models' times to them.
    """
    clock = CLOCKS["processor" if options.threads == 1 else "wall"]
    rows = []
    for name, (queries, passages) in texts.items():
        tokenizer: Any = models[PACKED].tokenizer
        encoded = tokenizer(passages, truncation=True, max_length=LENGTH)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        percentiles = [int(length) for length in np.percentile(lengths, [5, 50, 95, 100])]

        for work in options.works:
            calls = {key: work_of(work, model, queries, passages) for key, model in models.items()}
            # The first calls allocate memory, and are not measured.
            in_turns(calls, 1, clock=clock)
            # In turns, other processes on the machine slow all models down equally.
            timings = in_turns(calls, options.repeats, clock=clock)
            reference = timings[PACKED].seconds
            others = {
                key: ratio(timing.seconds, reference)
                for key, timing in timings.items()
                if key != PACKED
            }
            rows.append(
                {
                    "texts": name,
                    "tokens_5_50_95_100": percentiles,
                    "work": work,
                    "seconds_packed": reference,
                    "times_as_long": others,
                }
            )
            print(name, work, {key: round(value["ratio"], 2) for key, value in others.items()})
    return rows


def page(options: RerankOptions, rows: Sequence[dict[str, Any]], difference: float) -> str:
    """Return the result as markdown.

    Args:
        options: Options of the script.
        rows: Result of `measure`.
        difference: Largest relative difference between the logits of packed and padded NeoBERT.
    """
    clock = "processor time" if options.threads == 1 else "wall time"
    parts = [
        f"{options.layers} layers of {options.hidden}, random weights, {clock}. The ratios are "
        "times divided by the time of packed NeoBERT: the median and the quartiles of "
        f"{options.repeats} repeats in turns. Below 1 packing is slower, which is possible for "
        f"texts of one length. A text or pair has at most {LENGTH} tokens. The logits of packed "
        f"and padded NeoBERT differ by at most {difference:.0e} of their value."
    ]
    others = list(rows[0]["times_as_long"])

    for name in dict.fromkeys(row["texts"] for row in rows):
        set_rows = [row for row in rows if row["texts"] == name]
        low, median, high, longest = set_rows[0]["tokens_5_50_95_100"]

        cells = []
        for row in set_rows:
            ratios = [row["times_as_long"][other] for other in others]
            spreads = [
                f"{value['ratio']:.2f} ({between(value['quartiles'], '.2f')})" for value in ratios
            ]
            seconds = statistics.median(row["seconds_packed"])
            cells.append([WORKS[row["work"]], f"{seconds:.2f}", *spreads])

        parts += [
            f"## {name}",
            f"Texts of {median} tokens (median), 90 % of {low} to {high}, at most {longest}.",
            markdown_table(["Workload", "NeoBERT packed (s)", *others], cells),
        ]
    return "\n\n".join(part.strip() for part in parts)


@benchmark("Rerankers and classifiers on the CPU", RerankOptions)
def main(options: RerankOptions) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Measure every set of texts, and the effect of packing on the logits."""
    texts = make_texts(options.queries)
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(folder, options.layers, options.hidden)

    queries, passages = texts["GCIDE"]
    pairs = [(queries[0], passage) for passage in passages[:PASSAGES]]
    packed = models[PACKED].predict(pairs, activation_fn=torch.nn.Identity())
    padded = models[PADDED].predict(pairs, activation_fn=torch.nn.Identity())
    difference = float(np.abs(packed / padded - 1).max())

    rows = measure(options, models, texts)
    recorded = {"dtype": "float32", "attention": "sdpa", "machine": "shared with other work"}
    return {"difference": difference, "rows": rows}, page(options, rows, difference), recorded


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.rerank", main))
