"""Tests of neobert/training/optimization.py: decayed parameters and the default learning rate."""

import pytest
from helpers.reference import FIELDS

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.training.optimization import decay_parameter_names, default_learning_rate


def test_weight_decay_applies_to_matrices_and_embeddings():
    """Check that weight decay applies to all parameters but the vectors: norms and biases."""
    model = NeoBERTForMaskedLM(NeoBERTConfig(**FIELDS))
    names = decay_parameter_names(model)
    assert "model.encoder.weight" in names and "model.transformer_encoder.0.wo.weight" in names
    vectors = {name for name, value in model.named_parameters() if value.dim() == 1}
    assert vectors and set(names) == {name for name, _ in model.named_parameters()} - vectors


@pytest.mark.parametrize(
    ("hidden_size", "rate"),
    [(1024, 2e-5), (768, 2e-5), (384, 2e-5 * 2**5), (512, 2e-5 * 1.5**5), (192, 1e-3), (8, 1e-3)],
)
def test_the_default_learning_rate_by_hidden_size(hidden_size, rate):
    assert default_learning_rate(hidden_size) == pytest.approx(rate)
