"""Pins the linear map that a distillation takes into its student's weights: ridge regression by its
formula, the same cosines as the map itself, and what it is not for."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F


pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer
from sentence_transformers import models as modules

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.common.errors import UserError
from neobert.common.packing import mean_of_sequences, pack
from neobert.embeddings import distill_fit


def test_the_map_is_that_of_ridge_regression():
    """Its gradient is zero: 2 X'(XW - Y) + 2 r (W - 1)."""
    generator = np.random.default_rng(0)
    own, teacher = generator.normal(size=(2, 50, 6))
    found = distill_fit.fit(own, teacher).numpy()
    held = distill_fit.RIDGE * np.square(own).sum(0).mean()
    gradient = own.T @ (own @ found - teacher) + held * (found - np.eye(6))
    assert np.abs(gradient).max() < 1e-9
    np.testing.assert_allclose(distill_fit.fit(own, own).numpy(), np.eye(6), atol=1e-9)


@pytest.mark.parametrize("fields", [{}, {"hidden_act": "gelu"}], ids=["swiglu", "gelu"])
def test_the_weights_hold_the_map_up_to_a_rotation(tiny_config, fields):
    """Every cosine between two texts is that of the mapped vectors."""
    torch.manual_seed(0)
    model = NeoBERTModel(NeoBERTConfig(**tiny_config, **fields, decoder_init_range=0.1)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2)
    sequences = [torch.randint(1, 200, (n,)).tolist() for n in (3, 9, 1, 20, 7)]

    def pooled():
        batch = pack(sequences)
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        return mean_of_sequences(hidden, batch["cu_seq_lens_q"]).double()

    width = model.config.hidden_size
    matrix = torch.eye(width, dtype=torch.float64) + 0.3 * torch.randn(width, width).double()
    wanted = F.normalize(pooled() @ matrix, dim=-1)
    before = F.normalize(pooled(), dim=-1)
    distill_fit.absorb(model, matrix)
    found = F.normalize(pooled(), dim=-1)
    torch.testing.assert_close(found @ found.T, wanted @ wanted.T, atol=1e-4, rtol=0)
    assert (found @ found.T - before @ before.T).abs().max() > 0.01


def test_what_it_is_not_for(tiny_config):
    class Backbone(torch.nn.Module):
        def __init__(self, **fields):
            super().__init__()
            self.auto_model = NeoBERTModel(NeoBERTConfig(**tiny_config, **fields))

    width = tiny_config["hidden_size"]

    def student(fields, pooling="mean", dense=False, normalize=True):
        parts = [Backbone(**fields), modules.Pooling(width, pooling)]
        parts += [modules.Dense(width, width)] if dense else []
        parts += [modules.Normalize()] if normalize else []
        return SentenceTransformer(modules=parts, device="cpu")

    distill_fit.check_fit(student({}))
    for bad in (
        student({"norm_type": "layer"}),
        student({"position_embedding_type": "learned"}),
        student({}, pooling="max"),
        student({}, dense=True),
        student({}, normalize=False),
    ):
        with pytest.raises(UserError, match="fit_texts is for a student with RMSNorm, RoPE"):
            distill_fit.check_fit(bad)
