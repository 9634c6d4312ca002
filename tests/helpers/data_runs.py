"""Tiny texts, prepared sets and streams, for the tests of the data of pre-training."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from neobert.pretraining import prepared
from neobert.pretraining.sources import load_rows, parse_sources


WORDS = ["river", "stone", "music", "paper", "green", "table", "winter", "north"]


@pytest.fixture(scope="module", name="tokenizer")
def make_tokenizer(tokenizer_dir):
    return AutoTokenizer.from_pretrained(tokenizer_dir)


def make_texts(count, longest=20):
    """Texts of 1 to `longest` words, one token each; no two alike."""
    rng = np.random.default_rng(0)
    lengths = [1 + i % longest for i in range(count)]
    return [" ".join(rng.choice(WORDS, size)) for size in lengths]


def prepare(source, out, tokenizer, column="text", **more):
    return prepared.prepare_dataset(parse_sources(source, column=column), out, tokenizer, **more)


def tokenise_texts(texts, tokenizer):
    """`TokenizedTexts` in memory, of a list of texts."""
    rows = prepared.token_ids(tokenizer, texts)
    return prepared.TokenizedTexts.from_dataset(Dataset.from_dict({"input_ids": rows}))


def rows_of(dataset, **more):
    """Texts of a data set, a list."""
    return [row["text"] for row in load_rows(parse_sources(dataset, **more))]


def texts_of_batch(batch):
    """The texts of a packed or padded batch, unmasked, as tuples of ids."""
    ids = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
    if "cu_seq_lens_q" in batch:
        bounds = batch["cu_seq_lens_q"].tolist()
        return [tuple(ids[0, start:stop].tolist()) for start, stop in zip(bounds, bounds[1:])]
    return [tuple(row[mask.bool()].tolist()) for row, mask in zip(ids, batch["attention_mask"])]
