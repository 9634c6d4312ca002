"""Runs of `neobert encode` with a tiny encoder, for its tests."""

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
    generator = random.Random(0)
    return [
        " ".join(generator.choices(WORDS, k=generator.choice((1, 2, 5, 9, 30, 90))))
        for _ in range(count)
    ]


@pytest.fixture(scope="module", name="model_folder")
def make_model_folder(tmp_path_factory, tokenizer_dir):
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
    torch.set_num_threads(1)
    return PackedEncoder(str(model_folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module", name="reference")
def make_reference(model_folder):
    transformer = Transformer(str(model_folder), max_seq_length=64)
    return SentenceTransformer(modules=[transformer, Pooling(64, "mean")], device="cpu")


@pytest.fixture(name="corpus")
def make_corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [
        {"id": f"row-{i}", "text": text, "n": i} for i, text in enumerate(texts_of_many_lengths(70))
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def embed(source, output, model, encoder=None, **settings):
    """Run `neobert encode`, in float32, which has the same bits on every CPU."""
    settings = {"dtype": "float32", **settings}
    options = make_options(source=str(source), output=str(output), model=str(model), **settings)
    return encode(options, progress_bar=False, encoder=encoder)


def make_options(**values):
    """Return `EncodeOptions` with these values of options, whichever group has them."""
    groups = {}
    for name, group in get_type_hints(EncodeOptions).items():
        names = values.keys() & {item.name for item in fields(group)}
        groups[name] = group(**{item: values.pop(item) for item in names})
    assert not values
    return EncodeOptions(**groups)


def bits(folder, pattern="**/*"):
    """{name: bytes} of the files of a folder."""
    paths = [path for path in folder.glob(pattern) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def cut_of(model_folder, texts, limit=64):
    """What a limit on the tokens costs, by the definition: every text tokenized without one."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    lengths = [len(tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    lost = [max(0, length - limit) for length in lengths]
    return {"texts": sum(map(bool, lost)), "tokens": sum(lost), "longest": max(lengths)}


def read_parquet(path):
    table = pyarrow.parquet.read_table(path)  # a file, or a folder as one table
    return table, np.array(table["embedding"].to_pylist(), dtype=np.float32)
