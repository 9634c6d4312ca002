"""Tiny models and GLUE tasks, and runs of `neobert glue` on them."""

import random
from pathlib import Path

import pytest
import torch
from helpers.jsonl import write_jsonl
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from neobert import NeoBERTConfig, NeoBERTForMaskedLM


for _name in ("accelerate", "datasets", "sklearn", "scipy"):
    pytest.importorskip(_name)
from neobert.finetuning import glue_command as glue  # noqa: E402
from neobert.finetuning import glue_table  # noqa: E402


GOOD = "good great lovely bright happy".split()
BAD = "bad awful gloomy dark sad".split()
FILL = "the film is a story of two friends and their house".split()


def sentence(generator, good):
    """Return a sentence of filler words with one positive or negative word."""
    words = generator.choices(FILL, k=6)
    words.insert(generator.randrange(6), generator.choice(GOOD if good else BAD))
    return " ".join(words)


@pytest.fixture(scope="module", name="world")
def make_world(tmp_path_factory):
    """Return a directory with random models, their tokenizer, and five small tasks.

    The models are `model`, a NeoBERT, and `bert`. The tasks have the schema of nyu-mll/glue, and
    single words determine their labels.
    """
    root = tmp_path_factory.mktemp("glue")

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }

    NeoBERTForMaskedLM(
        NeoBERTConfig(
            **sizes, embedding_init_range=0.2, decoder_init_range=0.1, classifier_pooling="mean"
        )
    ).save_pretrained(root / "model")
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).resolve().parents[2] / "tokenizer")
    tokenizer.save_pretrained(root / "model")

    bert = BertForSequenceClassification(BertConfig(vocab_size=30522, **sizes))
    bert.save_pretrained(root / "bert")
    tokenizer.save_pretrained(root / "bert")

    generator = random.Random(0)
    data = root / "data"
    for split, count in (("train", 160), ("validation", 40)):
        rows = [
            {"sentence": sentence(generator, i % 2), "label": i % 2, "idx": i} for i in range(count)
        ]
        write_jsonl(data / "sst2" / f"{split}.jsonl", rows)
        pairs = [
            {
                "sentence1": sentence(generator, 1),
                "sentence2": sentence(generator, i % 2),
                "label": 1 - i % 2,
            }
            for i in range(count)
        ]
        write_jsonl(data / "rte" / f"{split}.jsonl", pairs)
        write_jsonl(
            data / "mrpc" / f"{split}.jsonl", [{**row, "label": 1 - row["label"]} for row in pairs]
        )
        write_jsonl(
            data / "stsb" / f"{split}.jsonl",
            [{**row, "label": 5.0 - 4.0 * row["label"]} for row in pairs],
        )

    for split, count in (("train", 160), ("validation_matched", 30), ("validation_mismatched", 40)):
        rows = [
            {
                "premise": sentence(generator, i % 3),
                "hypothesis": sentence(generator, i % 3 > 1),
                "label": i % 3,
            }
            for i in range(count)
        ]
        write_jsonl(data / "mnli" / f"{split}.jsonl", rows)
    return root


def run(world, output, task="sst2", **more_options):
    """Run `neobert glue` and return {(task, seed): (directory, result)} of its finished runs."""
    options = {
        "task": task,
        "model": world / "model",
        "data": world / "data",
        "output": output,
        "seeds": "1",
        "num_train_epochs": 1,
    }
    options |= {"batch_size": 16, "learning_rate": 3e-3, **more_options}

    values = {
        key: [] if value is True else str(value).split(",") if key == "seeds" else [str(value)]
        for key, value in options.items()
    }

    glue.main(
        [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", *value)]
    )

    return {
        (result["task"], result["settings"]["seed"]): (folder, result)
        for folder, result in glue_table.finished_runs(output)
    }
