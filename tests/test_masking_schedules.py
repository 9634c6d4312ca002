"""Pins masking (rates, kinds, special tokens, seeds) and schedules and optimizer groups against the paper's formulas."""

import math

import pytest
import torch
from transformers import AutoTokenizer

from neobert.common.errors import UserError
from neobert.common.optimisation import check_schedule, learning_rate_factor, make_optimizer, make_schedule
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM
from neobert.pretraining.masking import TokenMasking


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return AutoTokenizer.from_pretrained(tokenizer_dir)


def _text(tokenizer, count=100_000):
    """Ordinary tokens with every special token in between."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1996, 20_000, (count,), generator=generator)
    ids[::10] = tokenizer.cls_token_id
    ids[1::10] = tokenizer.pad_token_id
    ids[2::10] = tokenizer.unk_token_id
    return ids.view(100, -1)


def test_20_percent_always_by_the_mask_token(tokenizer):
    ids = _text(tokenizer)
    hidden, labels = TokenMasking(tokenizer)(ids, torch.Generator().manual_seed(0))
    chosen = labels != -100
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    assert not (chosen & special).any(), "special tokens must never be predicted"
    # 70,000 real tokens: the standard deviation of the share is 0.0015.
    assert abs(chosen[~special].float().mean() - 0.2) < 0.006, "20 % of the real tokens must be predicted"
    assert (hidden[chosen] == tokenizer.mask_token_id).all(), "every predicted token must be replaced by [MASK]"
    assert torch.equal(hidden[~chosen], ids[~chosen]), "all other tokens must stay as they are"
    assert torch.equal(labels[chosen], ids[chosen]), "the label must be the token that was there"


def test_bert_masking_15_percent_80_10_10(tokenizer):
    ids = _text(tokenizer)
    hidden, labels = TokenMasking(tokenizer, 0.15, 0.8, 0.1)(ids, torch.Generator().manual_seed(0))
    chosen = labels != -100
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    assert abs(chosen[~special].float().mean() - 0.15) < 0.006, "15 % of the real tokens must be predicted"
    masked = (hidden == tokenizer.mask_token_id)[chosen].float().mean()
    kept = (hidden == ids)[chosen].float().mean()
    assert abs(masked - 0.8) < 0.02 and abs(kept - 0.1) < 0.015, f"expected 80/10/10, got {masked:.3f} masked and {kept:.3f} kept"
    replaced = hidden[chosen & (hidden != ids) & (hidden != tokenizer.mask_token_id)]
    assert len(replaced) > 800, "about 10 % must be replaced by other tokens"
    assert not torch.isin(replaced, torch.tensor(tokenizer.all_special_ids)).any(), "a random token must be an ordinary one"


def test_masks_follow_the_generator_and_are_never_empty(tokenizer):
    masking, ids = TokenMasking(tokenizer), _text(tokenizer, 1000)
    first, again, other = (masking(ids, torch.Generator().manual_seed(seed))[1] for seed in (1, 1, 2))
    assert torch.equal(first, again), "one seed must give one mask"
    assert not torch.equal(first, other), "another seed must give another mask"
    text = torch.tensor([[tokenizer.cls_token_id, 2000, tokenizer.sep_token_id]])
    for seed in range(20):
        labels = masking(text, torch.Generator().manual_seed(seed))[1]
        assert labels.tolist() == [[-100, 2000, -100]], "a batch with one real token must predict it"


@pytest.mark.parametrize("shares", [(0.0, 1, 0), (1.0, 1, 0), (0.2, 0.9, 0.2), (0.2, -0.1, 0)])
def test_impossible_shares_are_named(tokenizer, shares):
    with pytest.raises(UserError, match="must"):
        TokenMasking(tokenizer, *shares)


def test_paper_schedule_at_its_turning_points():
    def factor(step):
        return learning_rate_factor(step, warmup_steps=2000, max_steps=1_000_000)

    assert factor(0) == 0 and factor(1000) == 0.5 and factor(2000) == 1.0
    middle = (2000 + 900_000) / 2
    assert math.isclose(factor(middle), 0.55), "half-way down the cosine the rate is the mean of 1 and 0.1"
    quarter = 2000 + (900_000 - 2000) / 4
    assert math.isclose(factor(quarter), 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert math.isclose(factor(900_000), 0.1) and math.isclose(factor(999_999), 0.1), "10 % from 90 % of the steps on"


def test_linear_and_constant_schedules():
    assert [learning_rate_factor(step, 10, 110, "linear") for step in (0, 5, 10, 60, 110)] == [0, 0.5, 1, 0.5, 0]
    assert [learning_rate_factor(step, 10, 110, "constant") for step in (5, 10, 109)] == [0.5, 1, 1]


def test_scheduler_sets_the_optimizers_rate():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=6e-4)
    scheduler = make_schedule(optimizer, 4, 100)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0, 1.5e-4, 3e-4, 4.5e-4, 6e-4])


@pytest.mark.parametrize(
    "wrong",
    [
        ("step", 1, 10, 0.9, 0.1),
        ("cosine", 9, 10, 0.9, 0.1),
        ("linear", 10, 10, 0.9, 0.1),
        ("cosine", 1, 0, 0.9, 0.1),
        ("cosine", 1, 10, 1.5, 0.1),
    ],
)
def test_impossible_schedules_are_named(wrong):
    with pytest.raises(UserError, match="must"):
        check_schedule(*wrong)


@pytest.mark.parametrize("extra", [{}, {"norm_type": "layer", "position_embedding_type": "learned", "hidden_act": "gelu"}])
def test_norms_and_biases_do_not_decay(tiny_config, extra):
    model = NeoBERTForMaskedLM(NeoBERTConfig(**tiny_config, **extra))
    optimizer = make_optimizer(model, "adamw", 6e-4, (0.9, 0.95), 1e-8, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, free = ({names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert decayed | free == set(names.values()) and not decayed & free, "every parameter must be in one group"
    assert all("norm" in name or name.endswith("bias") for name in free), f"only norms and biases are free of decay, not {free}"
    assert not any("norm" in name or name.endswith("bias") for name in decayed)
    # With zero gradients decoupled decay alone moves a weight: w (1 - lr * decay).
    before = model.decoder.weight.detach().clone()
    norm = model.model.layer_norm.weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.decoder.weight.detach(), before * (1 - 6e-4 * 0.1))
    assert torch.equal(model.model.layer_norm.weight.detach(), norm)
