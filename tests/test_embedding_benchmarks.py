"""Pins the benchmarks of sentence encoders and names: each model is reported in its own best setting, `neobert encode` is compared with what it
replaces, padding included, and tagged text is read as it is written."""

import math

import pytest
import torch
from transformers import ModernBertConfig

from neobert.common.errors import UserError


pytest.importorskip("mteb")
pytest.importorskip("sentence_transformers")

from neobert.benchmarks import contrastive_wordnet, encode, named_entities
from neobert.embeddings.local_tasks import LOCAL_TASKS
from neobert.embeddings.packed_encoder import PackedEncoder

from .reference import count_rows


def scores(retrieval, others=50.0):
    return {task: retrieval if task == "WordNetRetrieval" else others for task in LOCAL_TASKS}


def test_each_model_is_asked_in_the_way_it_does_best():
    """A model that never saw an instruction is not measured with one: 4.2 % without, 1.2 % with."""
    models = {
        "before": [{"mteb": scores(1.2), "none": scores(4.2)}],
        "after": [{"mteb": scores(11.0), "none": scores(9.0)}, {"mteb": scores(13.0), "none": scores(14.0)}],
    }
    rows = contrastive_wordnet.rows_of(models)
    assert rows["before"]["way"] == "none" and rows["before"]["scores"]["WordNetRetrieval"]["mean"] == 4.2
    assert rows["before"]["other_way"]["WordNetRetrieval"]["mean"] == 1.2, "the other way is reported too"
    after = rows["after"]["scores"]["WordNetRetrieval"]
    assert rows["after"]["way"] == "mteb" and after["mean"] == 12.0 and after["sd"] == pytest.approx(math.sqrt(2)), "one way for all seeds"
    given = contrastive_wordnet.WordNetBenchmark("folder/small")
    page = contrastive_wordnet.page(given, rows, 1000, dict.fromkeys(LOCAL_TASKS, "score"))
    before, after, change = (
        next(line for line in page.splitlines() if line.startswith(f"| {name} ")) for name in ("before", "after", "change")
    )
    assert "| without | 4.20 |" in before and "| with instructions | 12.00 ± 1.41 |" in after and "+7.80" in change


def test_encode_is_compared_with_what_it_replaces(tmp_path, monkeypatch):
    """One row computes padding, as a model does that does not take it out; the vectors of all three rows of NeoBERT agree."""
    tiny = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64, "vocab_size": 30522}
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
    found = encode.measure_speed(given, encode.random_models(tmp_path, 1, 64), texts, "float32", tmp_path)
    lengths = [3, 4, 12]
    assert set(found["tokens_per_second"]) == {encode.OURS, encode.UNPADDED, encode.PADDED, encode.MODERN, encode.BERT}
    assert found["times_as_fast"][encode.OURS]["ratio"] == 1.0
    assert max(found["difference_of_vectors"].values()) < 1e-5
    assert found["tokens"] == sum(lengths)
    assert set(rows[0]) == {sum(lengths), 3 * max(lengths)}, "a row of real tokens alone, and one with padding"


def test_tagged_text_is_read_as_it_is_written(tmp_path):
    """CoNLL's first form tags a name's words I-; its second form begins each name with B-."""
    path = tmp_path / "tagged.txt"
    path.write_text("-DOCSTART- O\n\nAda I-PER\nByron I-PER\nof O\nBath B-LOC\nBath B-LOC\n\nBonn I-LOC\nSPD I-ORG\n-DOCSTART- O\n\nNo O\n")
    (first, second), (third,) = named_entities.read_tagged(path)
    assert first == (["Ada", "Byron", "of", "Bath", "Bath"], ["B-PER", "I-PER", "O", "B-LOC", "B-LOC"])
    assert second == (["Bonn", "SPD"], ["B-LOC", "B-ORG"]) and third == (["No"], ["O"])
    path.write_text("Ada I-PER\nByron\n")
    with pytest.raises(UserError, match="line 2: a word and its tag are expected, but this is 'Byron'"):
        named_entities.read_tagged(path)


def test_the_cost_of_uncased_tokens_is_a_difference_a_seed():
    given = named_entities.NamedEntityBenchmark("wikigold.conll.txt", seeds=[1, 2])
    page = named_entities.page(given, {"uncased": {1: 0.2, 2: 0.3}, "cased": {1: 0.5, 2: 0.4}}, {"train": 1200, "test": 400})
    assert "| uncased | 25.0 ± 7.1 | 20.0 | 30.0 |" in page and "| cased over uncased | +20.0 ± 14.1 | +30.0 | +10.0 |" in page
