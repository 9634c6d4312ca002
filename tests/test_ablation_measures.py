"""Pins how a rung of the ablation ladder is measured: features, probe, masked-LM quality, and the
texts and seeds that runs are given."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer


pytest.importorskip("datasets")
pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.common import local_text
from neobert.pretraining import ablation_data, ablation_measures, ablation_recipes, heldout


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return AutoTokenizer.from_pretrained(tokenizer_dir)


@pytest.fixture(scope="module", params=["rope", "learned"])
def model(request):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 16,
    }
    return NeoBERTForMaskedLM(NeoBERTConfig(**sizes, position_embedding_type=request.param)).eval()


def test_features_are_means_over_the_tokens_of_each_text(model, tokenizer):
    texts = ["river stone music", "river", "north " * 30, "paper table", "green"]
    found = ablation_measures.features(model, tokenizer, texts, length=16, batch_size=2)
    for text, row in zip(texts, found):
        ids = tokenizer(text, truncation=True, max_length=16, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = model.model(ids).last_hidden_state[0].mean(dim=0)
        np.testing.assert_allclose(row, expected.numpy(), atol=1e-5, err_msg=text)


def test_the_probe_learns_from_three_quarters_alone():
    x, labels = np.zeros((16, 1)), [1, 0] * 8
    x[12:, 0] = [1, -1, 1, -1]  # what tells the labels apart is in the last quarter
    assert ablation_measures.probe_accuracy(x, np.array(labels)) == 0.5
    x[:, 0] = np.array(labels) * 2 - 1
    assert ablation_measures.probe_accuracy(x, np.array(labels)) == 1.0


def test_the_majority_is_that_of_the_test_sentences():
    assert ablation_measures.majority([0] * 12 + [1, 1, 1, 0]) == 0.75


def test_bits_are_those_of_a_hidden_character(model, tokenizer, monkeypatch):
    """Every rung is measured with 20 % of the tokens hidden, always by [MASK]; the marks of word
    pieces are no characters."""
    pieces = tokenizer.tokenize("river unaffable")
    letters = [len(piece.removeprefix("##")) for piece in pieces]
    assert len(pieces) > 2 and sum(letters) == len("riverunaffable"), (
        "a word must have several pieces, or this test shows nothing"
    )
    seen = []

    def evaluate(model, batches, **more):
        seen.extend(batches[i] for i in range(len(batches)))
        return heldout.evaluate_batches(model, batches, **more)

    monkeypatch.setattr(ablation_measures, "evaluate_batches", evaluate)
    probe = [
        {"text": word, "label": label}
        for word, label in zip(("river", "stone", "music", "paper") * 2, [0, 1] * 4)
    ]
    found = ablation_measures.measure(model, tokenizer, ["river unaffable"] * 400, probe, 16)
    labels, ids = (
        torch.cat([batch[name].flatten() for batch in seen]) for name in ("labels", "input_ids")
    )
    hidden = labels != -100
    assert (ids[hidden] == tokenizer.mask_token_id).all()
    words = 400 * len(pieces)
    assert hidden.sum() / words == pytest.approx(0.2, abs=4 * math.sqrt(0.2 * 0.8 / words))
    lengths = dict(zip(tokenizer.convert_tokens_to_ids(pieces), letters))
    characters = sum(lengths[token] for token in labels[hidden].tolist())
    nats = found["masked_loss"] * int(hidden.sum())
    assert found["masked_bits_per_character"] == pytest.approx(nats / math.log(2) / characters)


def test_every_seed_is_a_run_of_its_own():
    paths = {"curated": "c", "diverse": "d", "wordpiece": "w", "bpe": "b"}
    for seed in (0, 2):
        values = ablation_recipes.rung_values(
            "m9", ablation_recipes.SCALES["tiny"], paths, Path("out"), seed
        )
        assert values["trainer"]["seed"] == seed


def test_held_out_texts_are_no_rungs_training_texts(tmp_path, monkeypatch):
    for name in ("wordnet_entries", "gcide_entries"):
        rows = [{"id": f"{name}-{i}", "text": f"{name} {i}"} for i in range(3000)]
        monkeypatch.setattr(local_text, name, lambda rows=rows: iter(rows))
    monkeypatch.setattr(
        local_text, "sentiment_sentences", lambda kind: iter([{"text": "good", "label": 1}])
    )
    paths = ablation_data.make_data(
        dict.fromkeys(ablation_data.COLUMNS), ablation_recipes.SCALES["tiny"], tmp_path
    )
    texts = {
        name: paths[name].read_text().splitlines() for name in ("curated", "diverse", "heldout")
    }
    assert texts["heldout"] and not set(texts["heldout"]) & {*texts["curated"], *texts["diverse"]}
    assert all("wordnet" in line for line in texts["curated"])
    kinds = {name: sum(name in line for line in texts["diverse"]) for name in ("wordnet", "gcide")}
    assert min(kinds.values()) > 30, (
        f"the diverse texts must be drawn from both sources, not {kinds} of 150"
    )
