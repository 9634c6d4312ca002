"""Tiny texts, prepared data sets and batches for the tests of pre-training data."""

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
    """Return the repository's tokenizer."""
    return AutoTokenizer.from_pretrained(tokenizer_dir)


def make_texts(count, longest=20):
    """Return texts of 1 to `longest` random words, which are one token each."""
    rng = np.random.default_rng(0)
    lengths = [1 + i % longest for i in range(count)]
    return [" ".join(rng.choice(WORDS, size)) for size in lengths]


def prepare(source, out, tokenizer, column="text", **options):
    """Tokenize the texts of `source` into a prepared data set in the directory `out`."""
    return prepared.prepare_dataset(parse_sources(source, column=column), out, tokenizer, **options)


def tokenize_texts(texts, tokenizer):
    """Return a list of texts as `TokenizedTexts` in memory."""
    rows = prepared.token_ids(tokenizer, texts)
    return prepared.TokenizedTexts.from_dataset(Dataset.from_dict({"input_ids": rows}))


def rows_of(dataset, **options):
    """Return the texts of a data set as a list."""
    return [row["text"] for row in load_rows(parse_sources(dataset, **options))]


def texts_of_batch(batch):
    """Return the texts of a packed or padded batch as tuples of token ids.

    Masked tokens are restored from the labels.
    """
    ids = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
    if "cu_seq_lens_q" in batch:
        bounds = batch["cu_seq_lens_q"].tolist()
        return [tuple(ids[0, start:stop].tolist()) for start, stop in zip(bounds, bounds[1:])]
    return [tuple(row[mask.bool()].tolist()) for row, mask in zip(ids, batch["attention_mask"])]
