"""Compare the model with stored outputs of the published implementation (tests/golden).

The float32 rounding errors of the reference are about 1.5e-5. Only non-padding tokens are compared,
because outputs at padding positions are undefined.
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
    """Return the model in eval mode, the names of its missing weights, and the golden outputs."""
    fields |= {"attn_implementation": implementation, "dtype": torch.float32}
    model, info = model_class.from_pretrained(folder, output_loading_info=True, **fields)
    assert not info["unexpected_keys"]
    return model.eval(), set(info["missing_keys"]), load_file(folder / "expected.safetensors")


def close(actual, expected):
    """Return whether the largest difference is smaller than `TOLERANCE`."""
    return (actual - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("unpad_inputs", (True, False))
@every_implementation
@every_folder
@torch.no_grad()
def test_masked_lm(golden, name, implementation, unpad_inputs):
    """The logits and last hidden states equal the golden outputs, with and without padding."""
    model, missing, expected = load(
        neobert.NeoBERTForMaskedLM, golden / name, implementation, unpad_inputs=unpad_inputs
    )
    mask = expected["attention_mask"]
    assert not missing and 0 < mask.sum() < mask.numel(), "The golden batch must contain padding."

    padded = model(expected["input_ids"], attention_mask=mask, output_hidden_states=True)
    unpadded = model(expected["unpadded_input_ids"], output_hidden_states=True)

    not_padding = mask.bool()
    assert close(padded.logits[not_padding], expected["logits"][not_padding])
    assert close(padded.hidden_states[-1][not_padding], expected["last_hidden_state"][not_padding])
    assert close(unpadded.logits, expected["unpadded_logits"])
    assert close(unpadded.hidden_states[-1], expected["unpadded_last_hidden_state"])


@every_implementation
@every_folder
@torch.no_grad()
def test_base_model_loads_without_unexpected_keys(golden, name, implementation):
    """The base model loads a masked-LM checkpoint without reporting the decoder as unexpected.

    `load` checks that no key is unexpected.
    """
    model, missing, expected = load(neobert.NeoBERTModel, golden / name, implementation)
    mask = expected["attention_mask"]
    hidden = model(expected["input_ids"], attention_mask=mask).last_hidden_state
    assert not missing
    assert close(hidden[mask.bool()], expected["last_hidden_state"][mask.bool()])


@every_implementation
@every_folder
@torch.no_grad()
def test_sequence_classifier(golden, name, implementation):
    """The classifier reports its head as missing, and its logits equal the golden outputs."""
    model, missing, expected = load(
        neobert.NeoBERTForSequenceClassification, golden / name, implementation, num_labels=3
    )
    head = load_file(golden / name / "sequence_classification_head.safetensors")
    assert missing == set(head) and len(head) == 4
    model.load_state_dict(head, strict=False)
    logits = model(expected["input_ids"], attention_mask=expected["attention_mask"]).logits
    assert close(logits, expected["sequence_classification_logits"])


@every_folder
def test_reference_matches_golden_outputs(golden, name):
    """The reference in tests/helpers/reference.py, which other tests use, is correct."""
    model, _, expected = load(neobert.NeoBERTModel, golden / name)
    texts = expected["unpadded_input_ids"]
    assert_same(last_states(model, *texts), expected["unpadded_last_hidden_state"].flatten(0, 1))


def test_published_config_loads(golden):
    """The published config.json loads with its sizes, and its unused fields are not saved again."""
    published = json.loads((golden / "neobert_tiny" / "config.json").read_text())
    config = neobert.NeoBERTConfig.from_pretrained(golden / "neobert_tiny")
    assert published["max_length"] == config.max_position_embeddings == 128
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 4, 4)

    unused_fields = {"kwargs", "trust_remote_code", "pretrained_model_name_or_path", "dim_head"}
    assert "kwargs" in published, "The golden config.json must be the published file, unchanged."
    assert not (unused_fields | {"max_length"}) & set(json.loads(config.to_json_string()))

    ablation = neobert.NeoBERTConfig.from_pretrained(golden / "ablation_m0")
    types = (ablation.position_embedding_type, ablation.norm_type, ablation.hidden_act)
    assert types == ("learned", "layer", "gelu")


def test_published_architecture_has_the_published_size():
    """The default config gives the weight names, shapes and parameter counts of the checkpoint."""
    with torch.device("meta"):
        model = neobert.NeoBERTForMaskedLM(neobert.NeoBERTConfig())
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert len(shapes) == 172 and sum(p.numel() for p in model.parameters()) == 245_136_954
    assert sum(p.numel() for p in model.model.parameters()) == 221_665_536
    layer = {"qkv": (2304, 768), "wo": (768, 768), "ffn.w12": (4096, 768), "ffn.w3": (768, 2048)}
    for name, shape in layer.items():
        assert shapes[f"model.transformer_encoder.27.{name}.weight"] == shape
    assert shapes["decoder.weight"] == (30522, 768) and shapes["decoder.bias"] == (30522,)
