"""Fixtures and arguments for the tests of `neobert contrastive`, with tiny data."""

import pytest
import torch
from helpers.jsonl import write_jsonl


pytest.importorskip("sentence_transformers")

from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTForMaskedLM


COLORS = "red green blue black white brown grey pink".split()
ANIMALS = "cat dog bird fish horse mouse lion wolf".split()


@pytest.fixture(scope="module", name="model_folder")
def make_model_folder(tmp_path_factory, tokenizer_dir):
    """Return the directory of a tiny encoder with random weights and its tokenizer."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("encoder")
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    NeoBERTForMaskedLM(NeoBERTConfig(**config)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder)
    return folder


@pytest.fixture(name="triplets")
def make_triplets(tmp_path):
    """Return the path of 64 rows with an anchor, a positive and a negative."""
    rows = [
        {
            "anchor": f"an animal, a {animal}, that is {color} and number {i}",
            "positive": f"{i} {color} {animal}",
            "negative": f"{animal} {i}",
        }
        for i, (color, animal) in enumerate(
            (color, animal) for color in COLORS for animal in ANIMALS
        )
    ]
    return str(write_jsonl(tmp_path / "triplets.jsonl", rows))


@pytest.fixture(name="pairs")
def make_pairs(tmp_path):
    """Return the path of 16 rows with an anchor and a positive."""
    rows = [
        {"anchor": f"{color} thing {i}", "positive": f"{i} {color}"}
        for i, color in enumerate(COLORS * 2)
    ]
    return str(write_jsonl(tmp_path / "pairs.jsonl", rows))


def arguments_for(model_folder, output, *extra_arguments):
    """Return the arguments of a run of 8 steps with checkpoints every 4 steps."""
    return [
        *("--model", str(model_folder), "--output", str(output), "--max_length", "32"),
        *("--per_device_train_batch_size", "8", "--use_cpu", "true", "--logging_steps", "1"),
        *("--save_steps", "4", "--max_steps", "8", *extra_arguments),
    ]
