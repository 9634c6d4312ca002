"""Tests of the deeper encoder with fewer gates."""

import pytest
import torch
from helpers.jsonl import write_jsonl
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as modules
from transformers import AutoTokenizer

from benchmarks.deepen_encoder import DeepenOptions, deepen_encoder, remove_gates, select_gates
from neobert import NeoBERTConfig, NeoBERTModel
from neobert.common.errors import UserError


TEXTS = [f"the {color} bird sings in tree {i}" for i in range(12) for color in ("red", "blue")]


@pytest.fixture
def folder(tmp_path, tokenizer_dir):
    """Return the directory of an encoder with 3 blocks of 32 gates, of which 21 have an effect."""
    torch.manual_seed(0)
    config = NeoBERTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    model = NeoBERTModel(config)
    with torch.no_grad():
        for block in model.transformer_encoder:
            block.ffn.w3.weight[:, ::3] = 0
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "model")
    transformer = modules.Transformer(str(tmp_path / "model"))
    encoder = SentenceTransformer(modules=[transformer, modules.Pooling(32, "mean")], device="cpu")
    encoder.save(str(tmp_path / "encoder"))
    return tmp_path / "encoder"


def test_the_gates_with_an_effect_are_kept():
    """Elimination finds the inputs that the outputs depend on, although another one correlates."""
    torch.manual_seed(0)
    activations = torch.randn(500, 40)
    activations[:, 1] += activations[:, 0]
    weights = torch.zeros(8, 40)
    used = [0, 3, 5, 17, 31, 39]
    weights[:, used] = torch.randn(8, len(used))
    kept = select_gates(activations, activations @ weights.T, len(used))
    assert kept.tolist() == used


def test_embeddings_do_not_change_without_gates_that_have_no_effect(folder, tmp_path):
    """The inserted block is the identity, and gates without an effect are removed first."""
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    options = DeepenOptions(
        str(folder), str(tmp_path / "texts.jsonl"), str(tmp_path / "deeper"), position=1, gates=24
    )
    errors = deepen_encoder(options)
    assert len(errors) == 3 and max(errors) < 1e-2

    before = SentenceTransformer(str(folder), device="cpu")
    after = SentenceTransformer(str(tmp_path / "deeper"), device="cpu")
    blocks = after[0].auto_model.transformer_encoder
    assert len(blocks) == 4 and blocks[3].ffn.w3.weight.shape == (32, 24)
    assert not blocks[1].wo.weight.any() and not blocks[1].ffn.w3.weight.any()
    cosines = torch.nn.functional.cosine_similarity(
        before.encode(TEXTS, convert_to_tensor=True), after.encode(TEXTS, convert_to_tensor=True)
    )
    assert cosines.min() > 0.999


def test_the_error_is_the_unexplained_variance():
    """With all gates, nothing is unexplained; with few, the error is that of the fit."""
    torch.manual_seed(0)
    block = NeoBERTModel(
        NeoBERTConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
        )
    ).transformer_encoder[0]
    inputs = torch.randn(400, 32)
    expected = block.ffn(inputs).detach()
    assert remove_gates(block.ffn, inputs, 32) < 1e-4

    error = remove_gates(block.ffn, inputs, 8)
    difference = (block.ffn(inputs).detach() - expected).square().sum()
    variance = (expected - expected.mean(0)).square().sum()
    assert error == pytest.approx(float(difference / variance), rel=1e-2) and 0.01 < error < 1


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("position", 3, "at most 2"),
        ("gates", 40, "a multiple of 8 and at most 32"),
        ("gates", 20, "a multiple of 8"),
    ],
)
def test_invalid_shapes_are_refused(folder, tmp_path, name, value, rule):
    """A position or a number of gates that is not possible is refused, and nothing is written."""
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    values = {"position": 1, "gates": 16, name: value}
    output = tmp_path / "deeper"
    options = DeepenOptions(str(folder), str(tmp_path / "texts.jsonl"), str(output), **values)
    with pytest.raises(UserError, match=f"`{name}` must be {rule}"):
        deepen_encoder(options)
    assert not output.exists()
