"""Data sets that single words determine, and runs of `neobert finetune` on a tiny encoder."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.jsonl import write_jsonl
from helpers.paths import ROOT
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTModel


for _name in ("accelerate", "datasets", "sklearn", "scipy", "seqeval", "matplotlib"):
    pytest.importorskip(_name)

from neobert.finetuning import finetune  # noqa: E402
from neobert.finetuning.finetune_options import FINETUNE  # noqa: E402


FILL = "the film is a story of two friends and their house".split()
CLASS_WORDS = {"bad": "awful gloomy dark".split(), "good": "great lovely bright".split()}
PEOPLE = "john mary peter anna".split()
FAMILIES = "smith jones brown taylor".split()
TOWNS = "london paris rome berlin".split()


def sentence(generator: random.Random, *words: str) -> str:
    """Return a sentence of random filler words that contains the words in random positions."""
    sentence_words = generator.choices(FILL, k=5)
    for word in words:
        sentence_words.insert(generator.randrange(len(sentence_words)), word)
    return " ".join(sentence_words)


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write a NeoBERT of two small layers, which fits these rows in a few steps."""
    torch.manual_seed(seed)
    config = NeoBERTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        embedding_init_range=0.3,
        classifier_pooling="mean",
    )
    NeoBERTModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "tokenizer").save_pretrained(folder)
    return folder


def classification_rows(count: int = 200) -> list[dict[str, Any]]:
    """Return texts with two labels, which one word determines."""
    generator = random.Random(0)
    rows = []
    for number in range(count):
        label = "good" if number % 2 else "bad"
        word = generator.choice(CLASS_WORDS[label])
        rows.append({"id": number, "text": sentence(generator, word), "label": label})
    return rows


def pair_rows(count: int = 240) -> list[dict[str, Any]]:
    """Return pairs with the labels of NLI, which one word of the hypothesis determines."""
    generator = random.Random(0)
    words = {"contradiction": "not", "entailment": "also", "neutral": "maybe"}
    rows = []
    for number in range(count):
        label = sorted(words)[number % 3]
        rows.append(
            {
                "premise": sentence(generator),
                "hypothesis": sentence(generator, words[label]),
                "label": label,
            }
        )
    return rows


def multi_label_rows(count: int = 200) -> list[dict[str, Any]]:
    """Return texts with zero to two labels, each of which one word determines."""
    generator = random.Random(0)
    rows = []
    for _ in range(count):
        labels = [label for label in sorted(CLASS_WORDS) if generator.random() < 0.5]
        words = [generator.choice(CLASS_WORDS[label]) for label in labels]
        rows.append({"text": sentence(generator, *words), "labels": labels})
    return rows


def regression_rows(count: int = 200) -> list[dict[str, Any]]:
    """Return texts whose score is their number of positive words plus 0.5."""
    generator = random.Random(0)
    rows = []
    for _ in range(count):
        number = generator.randrange(4)
        words = [generator.choice(CLASS_WORDS["good"]) for _ in range(number)]
        rows.append({"text": sentence(generator, *words), "score": number + 0.5})
    return rows


def span_rows(count: int = 200) -> list[dict[str, Any]]:
    """Return texts with the character spans of a person and a town."""
    generator = random.Random(0)
    rows = []
    for number in range(count):
        person = f"{generator.choice(PEOPLE).title()} {generator.choice(FAMILIES).title()}"
        town = generator.choice(TOWNS).title()
        text = f"the {generator.choice(FILL)} of {person}, {generator.choice(FILL)} in {town}."
        spans = []
        for value, label in ((person, "PER"), (town, "LOC")):
            start = text.index(value)
            spans.append({"start": start, "end": start + len(value), "label": label})
        rows.append({"id": f"r{number}", "text": text, "entities": spans})
    return rows


def run(folder: Path, rows: list[dict[str, Any]], *arguments: object) -> dict[str, Any]:
    """Fine-tune the tiny model and return the result. The output directory is `folder/out`."""
    data = folder / "rows.jsonl"
    if not data.exists():
        write_jsonl(data, rows)
    if not (folder / "model").exists():
        write_model(folder / "model")
    return finetune.finetune(FINETUNE.read(command_line(folder, *arguments)))


def command_line(folder: Path, *arguments: object) -> list[str]:
    """Return the arguments of a run after `neobert finetune`."""
    words = [
        *(folder / "rows.jsonl", "--model", folder / "model", "--output", folder / "out"),
        *("--learning-rate", "5e-3", "--num-train-epochs", "6", "--use-cpu", "true"),
        *arguments,
    ]
    return [str(word) for word in words]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
