"""Pins the benchmark of `neobert encode`: it is compared with what it replaces, padding included,
and all rows give the same vectors."""

import pytest
import torch
from transformers import ModernBertConfig


pytest.importorskip("mteb")
pytest.importorskip("sentence_transformers")

from neobert.benchmarks import encode
from neobert.embeddings.packed_encoder import PackedEncoder

from .reference import count_rows


def test_encode_is_compared_with_what_it_replaces(tmp_path, monkeypatch):
    """One row computes padding, as a model does that does not take it out; the vectors of all three
    rows of NeoBERT agree."""
    tiny = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 64,
        "vocab_size": 30522,
    }
    monkeypatch.setattr(encode, "ModernBertConfig", lambda **more: ModernBertConfig(**tiny, **more))
    rows = []

    class Counted(PackedEncoder):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            rows.append(count_rows(self.sentence_transformer[0].auto_model.layer_norm))

    monkeypatch.setattr(encode, "PackedEncoder", Counted)
    torch.manual_seed(0)
    given = encode.EncodeBenchmark(repeats=2, batch_sizes=[3], device="cpu")
    texts = ["one", "two words", "a text of rather more words than the others have"]
    found = encode.measure_speed(
        given, encode.random_models(tmp_path, 1, 64), texts, "float32", tmp_path
    )
    lengths = [3, 4, 12]
    assert set(found["tokens_per_second"]) == {
        encode.OURS,
        encode.UNPADDED,
        encode.PADDED,
        encode.MODERN,
        encode.BERT,
    }
    assert found["times_as_fast"][encode.OURS]["ratio"] == 1.0
    assert max(found["difference_of_vectors"].values()) < 1e-5
    assert found["tokens"] == sum(lengths)
    assert set(rows[0]) == {sum(lengths), 32, 3 * max(lengths)}, (
        "a row of real tokens alone, one of PackedEncoder's multiple of 16, and one with padding"
    )
