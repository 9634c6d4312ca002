"""Test the masking of tokens, the learning rate schedules and the optimizer groups.

The results are compared with their formulas.
"""

import math

import pytest
import torch
from transformers import AutoTokenizer, TrainingArguments

from neobert.common.errors import UserError
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.schedule import paper_schedule
from neobert.pretraining.trainer import PretrainingTrainer
from neobert.training.optimization import make_schedule


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return AutoTokenizer.from_pretrained(tokenizer_dir)


def _text(tokenizer, count=100_000):
    """Return 100 rows of token ids, of which 70 % are ordinary tokens and 30 % special tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1996, 20_000, (count,), generator=generator)
    ids[::10] = tokenizer.cls_token_id
    ids[1::10] = tokenizer.pad_token_id
    ids[2::10] = tokenizer.unk_token_id
    return ids.view(100, -1)


def test_20_percent_are_replaced_by_the_mask_token(tokenizer):
    """Check that 20 % of the ordinary tokens are predicted, and all of them become [MASK]."""
    ids = _text(tokenizer)
    masked, labels = TokenMasking(tokenizer)(ids, torch.Generator().manual_seed(0))
    selected = labels != -100
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    assert not (selected & special).any(), "special tokens must never be predicted"
    # The standard deviation of the fraction of 70,000 tokens is 0.0015.
    assert abs(selected[~special].float().mean() - 0.2) < 0.006

    assert (masked[selected] == tokenizer.mask_token_id).all()
    assert torch.equal(masked[~selected], ids[~selected]), "other tokens must not change"
    assert torch.equal(labels[selected], ids[selected]), "the label must be the original token"


def test_bert_masking_15_percent_80_10_10(tokenizer):
    """Check the masking of BERT.

    15 % of the ordinary tokens are predicted. Of these, 80 % become [MASK], 10 % become a random
    token, and 10 % are unchanged.
    """
    ids = _text(tokenizer)
    masked, labels = TokenMasking(tokenizer, 0.15, 0.8, 0.1)(ids, torch.Generator().manual_seed(0))
    selected = labels != -100
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    assert abs(selected[~special].float().mean() - 0.15) < 0.006

    is_mask = masked == tokenizer.mask_token_id
    is_unchanged = masked == ids
    assert abs(is_mask[selected].float().mean() - 0.8) < 0.02
    assert abs(is_unchanged[selected].float().mean() - 0.1) < 0.015

    replaced = masked[selected & ~is_unchanged & ~is_mask]
    assert len(replaced) > 800, "about 10 % must be replaced by other tokens"
    assert not torch.isin(replaced, torch.tensor(tokenizer.all_special_ids)).any()


def test_masks_are_reproducible_and_never_empty(tokenizer):
    masking = TokenMasking(tokenizer)
    ids = _text(tokenizer, 1000)
    first, again, other = [
        masking(ids, torch.Generator().manual_seed(seed))[1] for seed in (1, 1, 2)
    ]
    assert torch.equal(first, again), "the masks must be a function of the seed"
    assert not torch.equal(first, other), "another seed must yield other masks"

    # In a text with a single ordinary token, this token is always masked.
    text = torch.tensor([[tokenizer.cls_token_id, 2000, tokenizer.sep_token_id]])
    for seed in range(20):
        labels = masking(text, torch.Generator().manual_seed(seed))[1]
        assert labels.tolist() == [[-100, 2000, -100]]


def test_the_mask_schedule_is_linear(tokenizer):
    """Check the fraction of masked tokens at the start, in the middle and at the end of a run."""
    masking = TokenMasking(tokenizer, schedule=[0.3, 0.15])
    ids = _text(tokenizer)
    ordinary = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    for progress, expected in ((0.0, 0.3), (0.5, 0.225), (1.0, 0.15)):
        labels = masking(ids, torch.Generator().manual_seed(0), progress)[1]
        assert abs((labels != -100)[ordinary].float().mean() - expected) < 0.006

    with pytest.raises(UserError, match="`mask_schedule` must contain two fractions"):
        TokenMasking(tokenizer, schedule=[0.3, 0.2, 0.1])


def _rates(kind, warmup, steps, kwargs=None, peak=1.0):
    """Return the learning rate of each step of a run, as the optimizer applies it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = make_schedule(kind, optimizer, warmup, steps, kwargs)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def _paper_rate(step, warmup, steps):
    """Return the learning rate of the paper (section 4), relative to the peak.

    The schedule is a linear warmup, a cosine to 10 % of the peak that ends after 90 % of the steps,
    and a constant.
    """
    if step < warmup:
        return step / warmup
    t = min(1.0, (step - warmup) / (0.9 * steps - warmup))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * t)) / 2


@pytest.mark.parametrize("warmup, steps", [(20, 1000), (0, 100), (1, 10), (100, 2800)])
def test_schedule_matches_the_formula_of_the_paper(warmup, steps):
    schedule = paper_schedule(steps, warmup)
    rates = _rates(
        schedule["lr_scheduler_type"], warmup, steps, schedule["lr_scheduler_kwargs"], peak=6e-4
    )
    expected = [6e-4 * _paper_rate(step, warmup, steps) for step in range(steps)]
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_the_schedule_of_the_paper_at_its_turning_points():
    """Check the schedule of one million steps, with a peak of 1, at single steps."""
    schedule = paper_schedule(1_000_000, 2000)
    assert schedule["lr_scheduler_kwargs"]["num_decay_steps"] == 898_000
    scheduler = make_schedule(
        schedule["lr_scheduler_type"],
        torch.optim.SGD([torch.zeros(1)], 1.0),
        2000,
        1_000_000,
        schedule["lr_scheduler_kwargs"],
    )

    (factor,) = scheduler.lr_lambdas
    assert [factor(0), factor(1000), factor(2000)] == [0, 0.5, 1]
    # In the middle of the cosine, the learning rate is the mean of 1 and 0.1.
    assert math.isclose(factor(451_000), 0.55)
    assert math.isclose(factor(226_500), 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert math.isclose(factor(900_000), 0.1)
    assert math.isclose(factor(999_999), 0.1)


def test_warmup_stable_decay():
    """Check the schedule of 10 warmup steps, 70 constant steps and 20 decay steps."""
    rates = _rates(
        "warmup_stable_decay",
        10,
        100,
        {"num_decay_steps": 20, "decay_type": "1-sqrt", "min_lr_ratio": 0.0},
    )
    expected = [i / 10 for i in range(10)] + [1.0] * 70 + [1 - math.sqrt(i / 20) for i in range(20)]
    assert rates == pytest.approx(expected)


def test_the_warmup_rises_from_zero():
    """Check that `min_lr_ratio` does not change the warmup, and that `warmup_type` selects it."""
    fractions = [i / 4 for i in range(4)]
    warmups = {
        "linear": fractions,
        "cosine": [(1 - math.cos(math.pi * x)) / 2 for x in fractions],
        "1-sqrt": [1 - math.sqrt(1 - x) for x in fractions],
    }
    for warmup_type, expected in warmups.items():
        kwargs = {"num_decay_steps": 4, "min_lr_ratio": 0.5, "warmup_type": warmup_type}
        rates = _rates("warmup_stable_decay", 4, 10, kwargs)
        assert rates[:6] == pytest.approx([*expected, 1.0, 1.0]), warmup_type
        assert rates[8] == pytest.approx(0.75), "the decay must end at `min_lr_ratio`"


@pytest.mark.parametrize(
    "extra",
    [{}, {"norm_type": "layer", "position_embedding_type": "learned", "hidden_act": "gelu"}],
)
def test_norms_and_biases_do_not_decay(tiny_config, tmp_path, extra):
    """Check the groups of the optimizer, and the effect of weight decay on a weight and a norm."""
    model = NeoBERTForMaskedLM(NeoBERTConfig(**tiny_config, **extra))
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        weight_decay=0.1,
        learning_rate=6e-4,
        report_to="none",
        use_cpu=True,
    )
    optimizer = PretrainingTrainer(model=model, args=arguments).create_optimizer()

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, not_decayed = [
        {names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert decayed | not_decayed == set(names.values())
    assert not decayed & not_decayed
    assert all("norm" in name or name.endswith("bias") for name in not_decayed)
    assert not any("norm" in name or name.endswith("bias") for name in decayed)

    # With zero gradients, only decoupled weight decay changes a weight, to w * (1 - lr * decay).
    before = model.decoder.weight.detach().clone()
    norm = model.model.layer_norm.weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.decoder.weight.detach(), before * (1 - 6e-4 * 0.1))
    assert torch.equal(model.model.layer_norm.weight.detach(), norm)
