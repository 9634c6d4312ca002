"""Test Muon: the update of a matrix, AdamW for other parameters, and resuming."""

import copy
import math

import pytest
import torch
from torch import nn

from neobert.common.errors import UserError
from neobert.training.muon import MuonAdamW, block_matrices


pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")

RATE = 0.01


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20, bias=False), nn.LayerNorm(20), nn.Linear(20, 4))


def optimizer_of(model):
    return MuonAdamW(*block_matrices(model, model[0]), RATE)


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(6, 12, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_update_of_matrix_is_orthogonalized_gradient():
    """The first update is U V^T of the gradient U S V^T, with the root mean square 0.2 of AdamW.

    Five Newton-Schulz iterations approximate the singular values 1 by 0.7 to 1.2.
    """
    model = small_model()
    optimizer = optimizer_of(model)
    weight = model[0].weight
    before = weight.detach().clone()
    model(torch.randn(30, 12)).square().sum().backward()
    left, _, right = torch.linalg.svd(weight.grad, full_matrices=False)
    optimizer.step()

    scale = RATE * 0.2 * math.sqrt(20)
    values = left.T @ (before - weight.detach()) @ right.T / scale
    diagonal = values.diagonal()
    assert 0.6 < diagonal.min() and diagonal.max() < 1.3
    # Newton-Schulz runs in bfloat16.
    assert (values - torch.diag(diagonal)).abs().max() < 0.05


def test_other_parameters_are_updated_by_adamw():
    model = small_model()
    reference = copy.deepcopy(model)
    adamw = torch.optim.AdamW(reference[1:].parameters(), lr=RATE, weight_decay=0.0)
    inputs = torch.randn(6, 12)
    for network, optimizer in ((model, optimizer_of(model)), (reference, adamw)):
        network(inputs).square().sum().backward()
        optimizer.step()

    for weight, expected in zip(model[1:].parameters(), reference[1:].parameters()):
        assert torch.equal(weight, expected)
    assert not torch.equal(model[0].weight, reference[0].weight)


def test_schedule_and_checkpoint():
    """Schedules change the rates of both parts, and a loaded state continues bit-identically."""
    model = small_model()
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(model, optimizer, 3)
    schedule.step()
    resumed_model = copy.deepcopy(model)
    resumed = optimizer_of(resumed_model)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [part.param_groups[0]["lr"] for part in resumed.parts] == [RATE / 2, RATE / 2]

    train(model, optimizer, 3, seed=1)
    train(resumed_model, resumed, 3, seed=1)
    for weight, expected in zip(resumed_model.parameters(), model.parameters()):
        assert torch.equal(weight, expected)


def test_only_trained_matrices_of_blocks():
    model = nn.ModuleDict({"embeddings": nn.Embedding(5, 4), "blocks": small_model()})
    model["blocks"][2].weight.requires_grad_(False)
    matrices, others = block_matrices(model, model["blocks"])
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert [names[id(weight)] for weight in matrices] == ["blocks.0.weight"]
    assert {names[id(weight)] for weight in others} == {
        "embeddings.weight",
        "blocks.1.weight",
        "blocks.1.bias",
        "blocks.2.bias",
    }


def test_error_without_muon(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UserError, match=r"--muon needs torch 2.9 or newer, got .* omit"):
        optimizer_of(small_model())
