"""Fixtures and runs of `neobert encode` with a tiny encoder."""

import json
import random
from dataclasses import fields
from typing import get_type_hints

import numpy as np
import pytest
import torch


pytest.importorskip("sentence_transformers")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.encoding.command import encode
from neobert.encoding.options import EncodeOptions


WORDS = "the cat sat on a mat while seven brown dogs ran over green hills to find water and rest".split()  # noqa: E501


def texts_of_many_lengths(count):
    """Return texts of 1 to 90 random words."""
    generator = random.Random(0)
    return [
        " ".join(generator.choices(WORDS, k=generator.choice((1, 2, 5, 9, 30, 90))))
        for _ in range(count)
    ]


@pytest.fixture(scope="module", name="model_folder")
def make_model_folder(tmp_path_factory, tokenizer_dir):
    """Return the directory of a tiny encoder with random weights and its tokenizer."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("encoder")
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
    }
    NeoBERTModel(NeoBERTConfig(**config)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", name="encoder")
def make_encoder(model_folder):
    """Return the tiny encoder as a `PackedEncoder` in float32."""
    torch.set_num_threads(1)
    return PackedEncoder(str(model_folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module", name="reference")
def make_reference(model_folder):
    """Return the tiny encoder as a model of sentence-transformers with mean pooling."""
    transformer = Transformer(str(model_folder), max_seq_length=64)
    return SentenceTransformer(modules=[transformer, Pooling(64, "mean")], device="cpu")


@pytest.fixture(name="corpus")
def make_corpus(tmp_path):
    """Return the path of a .jsonl file with 70 texts, their ids and a number."""
    path = tmp_path / "corpus.jsonl"
    rows = [
        {"id": f"row-{i}", "text": text, "n": i} for i, text in enumerate(texts_of_many_lengths(70))
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def embed(source, output, model, encoder=None, **values):
    """Run `neobert encode` in float32, whose results are the same on every CPU."""
    values = {"dtype": "float32", **values}
    options = make_options(source=str(source), output=str(output), model=str(model), **values)
    return encode(options, progress_bar=False, encoder=encoder)


def make_options(**values):
    """Return `EncodeOptions` with these values, each assigned to the group that has it."""
    groups = {}
    for name, group in get_type_hints(EncodeOptions).items():
        names = values.keys() & {item.name for item in fields(group)}
        groups[name] = group(**{item: values.pop(item) for item in names})
    assert not values, f"No group of options has {sorted(values)}."
    return EncodeOptions(**groups)


def bits(folder, pattern="**/*"):
    """Return the contents of the files in a directory as {relative path: bytes}."""
    paths = [path for path in folder.glob(pattern) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def truncation_of(model_folder, texts, limit=64):
    """Return the expected statistics of truncated texts.

    Every text is tokenized without a limit, and the tokens above `limit` are counted.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    lengths = [len(tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    lost = [max(0, length - limit) for length in lengths]
    return {"texts": sum(map(bool, lost)), "tokens": sum(lost), "longest": max(lengths)}


def read_parquet(path):
    """Return a Parquet file, or all files of a directory, as a table and its embeddings."""
    table = pyarrow.parquet.read_table(path)
    return table, np.array(table["embedding"].to_pylist(), dtype=np.float32)
