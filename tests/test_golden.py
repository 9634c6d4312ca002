"""Pins the numbers: the published folder layout, loaded as it is, gives the published
construction's outputs (tests/golden).

The reference's own float32 rounding noise is about 1.5e-5; compared at real tokens.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

import neobert

from .reference import assert_same, reference_states


TOLERANCE = 5e-5
FOLDERS = ("neobert_tiny", "ablation_m0")
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")


def load(model_class, folder, implementation="sdpa", **fields):
    model, info = model_class.from_pretrained(
        folder,
        attn_implementation=implementation,
        dtype=torch.float32,
        output_loading_info=True,
        **fields,
    )
    return model.eval(), info


def difference(actual, expected, mask=None):
    gap = (actual - expected).abs()
    return (gap if mask is None else gap[mask.bool()]).max().item()


@pytest.mark.parametrize("unpad_inputs", (True, False))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FOLDERS)
@torch.no_grad()
def test_masked_lm(golden, name, implementation, unpad_inputs):
    model, info = load(
        neobert.NeoBERTForMaskedLM, golden / name, implementation, unpad_inputs=unpad_inputs
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = load_file(golden / name / "expected.safetensors")
    mask = expected["attention_mask"]
    assert 0 < mask.sum() < mask.numel(), (
        "The golden batch has no padding, so this test would be vacuous."
    )
    padded = model(expected["input_ids"], attention_mask=mask, output_hidden_states=True)
    whole = model(expected["unpadded_input_ids"], output_hidden_states=True)
    gaps = {
        "logits": difference(padded.logits, expected["logits"], mask),
        "last_hidden_state": difference(
            padded.hidden_states[-1], expected["last_hidden_state"], mask
        ),
        "unpadded_logits": difference(whole.logits, expected["unpadded_logits"]),
        "unpadded_last_hidden_state": difference(
            whole.hidden_states[-1], expected["unpadded_last_hidden_state"]
        ),
    }
    assert max(gaps.values()) < TOLERANCE, (
        f"{implementation} is further than {TOLERANCE} from the golden outputs: {gaps}"
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FOLDERS)
@torch.no_grad()
def test_base_model_drops_the_decoder_quietly(golden, name, implementation):
    model, info = load(neobert.NeoBERTModel, golden / name, implementation)
    assert not info["missing_keys"], f"The backbone is incomplete: {info['missing_keys']}"
    assert not info["unexpected_keys"]
    expected = load_file(golden / name / "expected.safetensors")
    mask = expected["attention_mask"]
    hidden = model(expected["input_ids"], attention_mask=mask).last_hidden_state
    gap = difference(hidden, expected["last_hidden_state"], mask)
    assert gap < TOLERANCE, f"last_hidden_state differs by {gap}."


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FOLDERS)
@torch.no_grad()
def test_sequence_classifier(golden, name, implementation):
    model, info = load(
        neobert.NeoBERTForSequenceClassification, golden / name, implementation, num_labels=3
    )
    assert set(info["missing_keys"]) == {
        "dense.weight",
        "dense.bias",
        "classifier.weight",
        "classifier.bias",
    }, info
    head = load_file(golden / name / "sequence_classification_head.safetensors")
    assert set(head) == {"dense.weight", "dense.bias", "classifier.weight", "classifier.bias"}
    model.load_state_dict(head, strict=False)
    expected = load_file(golden / name / "expected.safetensors")
    logits = model(expected["input_ids"], attention_mask=expected["attention_mask"]).logits
    gap = difference(logits, expected["sequence_classification_logits"])
    assert gap < TOLERANCE, f"The classifier's logits differ by {gap}."


@pytest.mark.parametrize("name", FOLDERS)
def test_the_formulas_give_the_golden_outputs(golden, name):
    """tests/reference.py, which other tests compare with, is itself right."""
    model, _ = load(neobert.NeoBERTModel, golden / name)
    expected = load_file(golden / name / "expected.safetensors")
    for row in range(2):
        states, _ = reference_states(model, expected["unpadded_input_ids"][row])
        assert_same(
            states[-1], expected["unpadded_last_hidden_state"][row], 1e-5, "float64 formula"
        )


def test_published_config_is_understood(golden):
    published = json.loads((golden / "neobert_tiny" / "config.json").read_text())
    assert published["max_length"] == 128 and "kwargs" in published, (
        "This test needs the published config as it is."
    )
    config = neobert.NeoBERTConfig.from_pretrained(golden / "neobert_tiny")
    assert config.max_position_embeddings == 128
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 4, 4)
    assert (
        config.tie_word_embeddings is False
        and config.rope_theta == 10000.0
        and config.norm_eps == 1e-5
    )
    written = json.loads(config.to_json_string())
    junk = {
        "kwargs",
        "trust_remote_code",
        "pretrained_model_name_or_path",
        "dim_head",
        "max_length",
    } & set(written)
    assert not junk, f"These fields say nothing about the model and must not be written: {junk}"
    rung = neobert.NeoBERTConfig.from_pretrained(golden / "ablation_m0")
    assert (rung.position_embedding_type, rung.norm_type, rung.hidden_act) == (
        "learned",
        "layer",
        "gelu",
    )


def test_published_architecture_has_the_published_size():
    config = neobert.NeoBERTConfig()
    with torch.device("meta"):
        model = neobert.NeoBERTForMaskedLM(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert len(shapes) == 172 and sum(p.numel() for p in model.parameters()) == 245_136_954
    assert sum(p.numel() for p in model.model.parameters()) == 221_665_536
    layer = "model.transformer_encoder.27"
    assert shapes[f"{layer}.qkv.weight"] == (2304, 768) and shapes[f"{layer}.wo.weight"] == (
        768,
        768,
    )
    assert shapes[f"{layer}.ffn.w12.weight"] == (4096, 768) and shapes[
        f"{layer}.ffn.w3.weight"
    ] == (768, 2048)
    assert shapes["decoder.weight"] == (30522, 768) and shapes["decoder.bias"] == (30522,)
