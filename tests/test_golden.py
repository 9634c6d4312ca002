"""Compare the model with the outputs of the published implementation (tests/golden).

The float32 rounding noise of the reference is about 1.5e-5. Only non-padding tokens are compared.
"""

import json

import pytest
import torch
from helpers.reference import assert_same, last_states
from safetensors.torch import load_file

import neobert


TOLERANCE = 5e-5
FOLDERS = ("neobert_tiny", "ablation_m0")
every_implementation = pytest.mark.parametrize(
    "implementation", ("eager", "sdpa", "flex_attention")
)
every_folder = pytest.mark.parametrize("name", FOLDERS)


def load(model_class, folder, implementation="sdpa", **fields):
    fields |= {"attn_implementation": implementation, "dtype": torch.float32}
    model, info = model_class.from_pretrained(folder, output_loading_info=True, **fields)
    assert not info["unexpected_keys"]
    return model.eval(), set(info["missing_keys"]), load_file(folder / "expected.safetensors")


def close(actual, expected):
    return (actual - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("unpad_inputs", (True, False))
@every_implementation
@every_folder
@torch.no_grad()
def test_masked_lm(golden, name, implementation, unpad_inputs):
    model, missing, expected = load(
        neobert.NeoBERTForMaskedLM, golden / name, implementation, unpad_inputs=unpad_inputs
    )
    mask = expected["attention_mask"]
    assert not missing and 0 < mask.sum() < mask.numel(), "without padding this shows little"
    padded = model(expected["input_ids"], attention_mask=mask, output_hidden_states=True)
    whole = model(expected["unpadded_input_ids"], output_hidden_states=True)
    real = mask.bool()
    assert close(padded.logits[real], expected["logits"][real])
    assert close(padded.hidden_states[-1][real], expected["last_hidden_state"][real])
    assert close(whole.logits, expected["unpadded_logits"])
    assert close(whole.hidden_states[-1], expected["unpadded_last_hidden_state"])


@every_implementation
@every_folder
@torch.no_grad()
def test_base_model_drops_the_decoder_quietly(golden, name, implementation):
    model, missing, expected = load(neobert.NeoBERTModel, golden / name, implementation)
    mask = expected["attention_mask"]
    hidden = model(expected["input_ids"], attention_mask=mask).last_hidden_state
    assert not missing
    assert close(hidden[mask.bool()], expected["last_hidden_state"][mask.bool()])


@every_implementation
@every_folder
@torch.no_grad()
def test_sequence_classifier(golden, name, implementation):
    model, missing, expected = load(
        neobert.NeoBERTForSequenceClassification, golden / name, implementation, num_labels=3
    )
    head = load_file(golden / name / "sequence_classification_head.safetensors")
    assert missing == set(head) and len(head) == 4
    model.load_state_dict(head, strict=False)
    logits = model(expected["input_ids"], attention_mask=expected["attention_mask"]).logits
    assert close(logits, expected["sequence_classification_logits"])


@every_folder
def test_the_formulas_give_the_golden_outputs(golden, name):
    """tests/helpers/reference.py, which other tests compare with, is itself right."""
    model, _, expected = load(neobert.NeoBERTModel, golden / name)
    texts = expected["unpadded_input_ids"]
    assert_same(last_states(model, *texts), expected["unpadded_last_hidden_state"].flatten(0, 1))


def test_published_config_is_understood(golden):
    published = json.loads((golden / "neobert_tiny" / "config.json").read_text())
    config = neobert.NeoBERTConfig.from_pretrained(golden / "neobert_tiny")
    assert published["max_length"] == config.max_position_embeddings == 128
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 4, 4)
    junk = {"kwargs", "trust_remote_code", "pretrained_model_name_or_path", "dim_head"}
    assert "kwargs" in published, "this test needs the published config as it is"
    assert not (junk | {"max_length"}) & set(json.loads(config.to_json_string()))
    rung = neobert.NeoBERTConfig.from_pretrained(golden / "ablation_m0")
    kinds = (rung.position_embedding_type, rung.norm_type, rung.hidden_act)
    assert kinds == ("learned", "layer", "gelu")


def test_published_architecture_has_the_published_size():
    with torch.device("meta"):
        model = neobert.NeoBERTForMaskedLM(neobert.NeoBERTConfig())
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert len(shapes) == 172 and sum(p.numel() for p in model.parameters()) == 245_136_954
    assert sum(p.numel() for p in model.model.parameters()) == 221_665_536
    layer = {"qkv": (2304, 768), "wo": (768, 768), "ffn.w12": (4096, 768), "ffn.w3": (768, 2048)}
    for name, shape in layer.items():
        assert shapes[f"model.transformer_encoder.27.{name}.weight"] == shape
    assert shapes["decoder.weight"] == (30522, 768) and shapes["decoder.bias"] == (30522,)
