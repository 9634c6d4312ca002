"""Tests of the average of encoders."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as modules
from transformers import AutoTokenizer

from benchmarks.average_encoders import align_channels, average_encoders
from neobert import NeoBERTConfig, NeoBERTModel
from neobert.common.errors import UserError
from neobert.quantization.smoothing import divide_inputs, linear_layers


FIELDS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


@pytest.fixture
def encoders(tmp_path, tokenizer_dir):
    """Return two encoders with similar weights and equal token embeddings."""
    torch.manual_seed(0)
    NeoBERTModel(NeoBERTConfig(**FIELDS)).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "model")
    transformer = modules.Transformer(str(tmp_path / "model"))
    first = SentenceTransformer(modules=[transformer, modules.Pooling(32, "mean")], device="cpu")
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second[0].auto_model.transformer_encoder.parameters():
            parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
    return first, second


@torch.no_grad()
def scale_channels(encoder):
    """Scale the channels of an encoder by random powers of two."""
    for block in encoder[0].auto_model.transformer_encoder:
        divisors = [
            torch.randint(-2, 3, (layer.in_features,)).float().exp2()
            for layer in linear_layers(block)
        ]
        divide_inputs(block, divisors)


def test_channels_are_aligned(encoders):
    """Channels that were scaled by powers of two get the scales of the other encoder."""
    first, second = encoders
    scaled = copy.deepcopy(second)
    scale_channels(scaled)
    align_channels(scaled, first)
    for name, value in second.state_dict().items():
        assert torch.equal(scaled.state_dict()[name], value), name


def test_average_is_the_mean_of_aligned_weights(encoders, tmp_path):
    """The output is the mean of the weights before the channels of the second were scaled."""
    first, second = encoders
    expected = {
        name: (value + second[0].auto_model.state_dict()[name]) / 2
        for name, value in first[0].auto_model.state_dict().items()
    }
    scale_channels(second)
    first.save_pretrained(str(tmp_path / "a"))
    second.save_pretrained(str(tmp_path / "b"))
    average_encoders([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "out"))

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=0, msg=name)
    embedding = first[0].auto_model.get_input_embeddings().weight
    assert torch.equal(tensors["encoder.weight"], embedding)
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu").encode("a cat").shape == (32,)


def test_invalid_encoders_are_refused(encoders, tmp_path, tokenizer_dir):
    """At least two encoders of the same shape are required, and the output must be new."""
    first, _ = encoders
    first.save_pretrained(str(tmp_path / "a"))
    with pytest.raises(UserError, match="at least two encoders"):
        average_encoders([str(tmp_path / "a")], str(tmp_path / "out"))

    small = NeoBERTModel(NeoBERTConfig(**{**FIELDS, "num_hidden_layers": 1}))
    small.save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match="must have the same shapes"):
        average_encoders([str(tmp_path / "a"), str(tmp_path / "small")], str(tmp_path / "out"))
    with pytest.raises(UserError, match="must not exist|exists"):
        average_encoders([str(tmp_path / "a")] * 2, str(tmp_path / "small"))
    assert not (tmp_path / "out").exists()
