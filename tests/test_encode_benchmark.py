"""Pins the benchmark of `neobert encode`: it is compared with what it replaces, padding included,
and all rows give the same vectors; and the figures of small vectors."""

import numpy as np
import pytest
import torch
from transformers import ModernBertConfig


pytest.importorskip("mteb")
pytest.importorskip("sentence_transformers")

from neobert.benchmarks import encode, small_vectors
from neobert.embeddings.packed_encoder import PackedEncoder

from .reference import count_rows


def test_encode_is_compared_with_what_it_replaces(tmp_path, monkeypatch):
    """One row computes padding, as a model does that does not take it out; the vectors of all three
    rows of NeoBERT agree."""
    tiny = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    tiny |= {"intermediate_size": 64, "vocab_size": 30522}
    monkeypatch.setattr(encode, "ModernBertConfig", lambda **more: ModernBertConfig(**tiny, **more))
    rows = []

    class Counted(PackedEncoder):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            rows.append(count_rows(self.sentence_transformer[0].auto_model.layer_norm))

    monkeypatch.setattr(encode, "PackedEncoder", Counted)
    torch.manual_seed(0)
    options = encode.EncodeBenchmark(repeats=2, batch_sizes=[3], device="cpu")
    texts = ["one", "two words", "a text of rather more words than the others have"]
    models = encode.random_models(tmp_path, 1, 64)
    found = encode.measure_speed(options, models, texts, "float32", tmp_path)
    lengths = [3, 4, 12]
    ways = {encode.OURS, encode.UNPADDED, encode.PADDED, encode.MODERN, encode.BERT}
    assert set(found["tokens_per_second"]) == ways
    assert found["times_as_fast"][encode.OURS]["ratio"] == 1.0
    assert max(found["difference_of_vectors"].values()) < 1e-5
    assert found["tokens"] == sum(lengths)
    assert set(rows[0]) == {sum(lengths), 32, 3 * max(lengths)}, (
        "a row of real tokens alone, one of PackedEncoder's multiple of 16, and one with padding"
    )


def test_small_vectors_are_searched_and_rescored():
    """48 unit vectors, of which the 45th alone has the signs of the query, and not its numbers."""
    queries, documents = np.full((1, 8), 8**-0.5, np.float32), -np.eye(8, dtype=np.float32)
    documents = np.concatenate([np.tile(documents, (6, 1))])
    documents[44] = np.array([1, *[0.01] * 7]) / np.linalg.norm([1, *[0.01] * 7])
    documents[0] = -documents[0]  # as near by its number, with one sign
    made = small_vectors.ways(queries, documents)
    sizes = {name: size for name, (size, _) in made.items()}
    assert sizes["int8"] == "8" and sizes["binary"] == "1" and sizes["float32"] == "32"
    assert sizes["half of the dimensions"] == "16"
    np.testing.assert_allclose(made["float32"][1], queries @ documents.T)
    assert made["binary"][1][0, [0, 1, 44]].tolist() == [-6, -8, 8]
    rescored = made["binary, rescored"][1][0]
    assert np.isfinite(rescored).sum() == small_vectors.BEST and rescored.argmax() == 44
    tests = {"a": (["q"] * 4, range(4))}
    vectors = np.eye(4, 8, dtype=np.float32)[[0, 1, 2, 2]]
    _, found = small_vectors.measure(lambda part: vectors, tests)
    assert found["a"]["float32"]["mrr"] == pytest.approx((1 + 1 + 2 / 1.5) / 4)
