"""Pins each setting of the configuration by what it does: the published defaults, which of two
names wins, every dropout on its own, learned positions at their last row, and RoPE settings in any
order.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)

from .reference import FIELDS, LEARNED, assert_same, make_model, random_batch, reference_states


ROOT = Path(__file__).resolve().parent.parent


def test_the_defaults_are_the_published_model():
    """config.json of the repository, and the published one's fields of the golden folder by their
    meaning."""
    config = NeoBERTConfig()
    written = json.loads((ROOT / "config.json").read_text())
    defaults = config.to_dict()
    for name, value in written.items():
        if name not in ("architectures", "transformers_version", "dtype", "torch_dtype"):
            assert defaults.get(name) == value
    published = {"hidden_size": 768, "num_hidden_layers": 28, "num_attention_heads": 12}
    published |= {"intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 4096}
    published |= {"ffn_inner_size": 2048, "head_dim": 64}
    published |= {"norm_eps": 1e-5, "rope_theta": 10000.0, "classifier_dropout": 0.1}
    published |= dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0)
    published |= {f"{part}_init_range": 0.02 for part in ("embedding", "decoder", "classifier")}
    published |= {"tie_word_embeddings": False, "unpad_inputs": True, "sparse_prediction": False}
    published |= {"pad_token_id": 0, "hidden_act": "swiglu", "norm_type": "rms"}
    published |= {"classifier_pooling": "cls", "position_embedding_type": "rope"}
    for name, value in published.items():
        assert getattr(config, name) == value


@pytest.mark.parametrize(
    "intermediate_size, inner",
    [(3072, 2048), (13, 8), (12, 8), (15, 16), (96, 64), (100, 72), (512, 344), (2, 8)],
)
def test_the_swiglu_width(intermediate_size, inner):
    """8 * ceil(int(2 n / 3) / 8)."""
    assert (
        NeoBERTConfig(**{**FIELDS, "intermediate_size": intermediate_size}).ffn_inner_size == inner
    )


PRECEDENCE = {
    "max_position_embeddings over max_length": (
        {"max_position_embeddings": 77, "max_length": 99},
        "max_position_embeddings",
        77,
    ),
    "max_length alone": ({"max_length": 99}, "max_position_embeddings", 99),
    "norm_type over rms_norm": ({"norm_type": "rms", "rms_norm": False}, "norm_type", "rms"),
    "rms_norm alone": ({"rms_norm": False}, "norm_type", "layer"),
    "position_embedding_type over rope": (
        {"position_embedding_type": "rope", "rope": False},
        "position_embedding_type",
        "rope",
    ),
    "attention_dropout over dropout": (
        {"attention_dropout": 0.0, "dropout": 0.3},
        "attention_dropout",
        0.0,
    ),
    "hidden_dropout over dropout": ({"hidden_dropout": 0.2, "dropout": 0.3}, "hidden_dropout", 0.2),
    "dropout for the other": ({"attention_dropout": 0.0, "dropout": 0.3}, "hidden_dropout", 0.3),
    "dropout over dropout_prob": ({"dropout": 0.1, "dropout_prob": 0.3}, "hidden_dropout", 0.1),
    "rope_parameters over rope_scaling": (
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7.0},
        },
        "rope_parameters",
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 7.0},
    ),
    "theta of rope_parameters over rope_theta": (
        {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        "rope_theta",
        7.0,
    ),
    "sparse_prediction by its older name": (
        {"masked_lm_logits": "masked"},
        "sparse_prediction",
        True,
    ),
}


@pytest.mark.parametrize("case", PRECEDENCE)
def test_which_of_two_names_wins(case):
    fields, name, value = PRECEDENCE[case]
    sizes = {key: size for key, size in FIELDS.items() if key != "max_position_embeddings"}
    assert getattr(NeoBERTConfig(**sizes, **fields), name) == value


@pytest.mark.parametrize("rope_type", ("linear", "dynamic", "yarn"))
def test_setting_theta_keeps_the_scaling(rope_type):
    config = NeoBERTConfig(**FIELDS, rope_scaling={"rope_type": rope_type, "factor": 4.0})
    before = dict(config.rope_parameters)
    config.rope_theta = 500.0
    assert config.rope_parameters == {**before, "rope_theta": 500.0}
    config.rope_scaling = None
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}, (
        "theta must outlive the scaling too"
    )


def test_the_view_of_the_scaling():
    """As transformers 4 writes it: without theta, and with one name for the type, of which
    `rope_type` wins."""
    given = {"type": "linear", "rope_type": "yarn", "factor": 2.0, "rope_theta": 5000.5}
    config = NeoBERTConfig(rope_scaling=given)
    assert config.rope_scaling == {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
    }
    assert (
        config.rope_parameters == {**config.rope_scaling, "rope_theta": 5000.5}
        and config.rope_theta == 5000.5
    )


def test_a_max_length_of_zero_is_refused():
    with pytest.raises(
        ValueError, match="max_position_embeddings must be a positive whole number, but 0 was given"
    ):
        NeoBERTConfig(max_length=0)


def test_yarn_that_extends_to_less_than_the_context():
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    assert NeoBERTConfig(max_position_embeddings=8192, rope_scaling=yarn).context_length == 8192
    assert NeoBERTConfig(max_position_embeddings=1024, rope_scaling=yarn).context_length == 2048


@pytest.mark.parametrize("factor", (1.0, 1))
def test_a_factor_of_one_is_allowed_and_one_below_is_not(factor):
    NeoBERTConfig(**FIELDS, rope_scaling={"rope_type": "yarn", "factor": factor})
    for bad in (0.99, 0, -2.0, 1e308, True, "2"):
        with pytest.raises(ValueError, match="factor must be a number from 1 to 1,000,000"):
            NeoBERTConfig(**FIELDS, rope_scaling={"rope_type": "yarn", "factor": bad})


# ------------------------------------------------------------------------------------------------
# each dropout


def zeroed(module):
    """Share of zeros in what a module returns while the model runs."""
    shares = []
    module.register_forward_hook(
        lambda module, args, out: shares.append((out == 0).float().mean().item())
    )
    return shares


@pytest.mark.parametrize("where", ("embedding", "after attention and feed-forward"))
def test_hidden_dropout_acts_where_it_should(where):
    """On the embedding, after attention and after the feed-forward: each drops its own share."""
    model = make_model(NeoBERTModel, hidden_dropout=0.4).train()
    modules = (
        [model.embedding_dropout]
        if where == "embedding"
        else [block.dropout for block in model.transformer_encoder]
    )
    shares = [zeroed(module) for module in modules]
    model(random_batch([60, 60])[0])
    expected = 1 if where == "embedding" else 2
    for seen in shares:
        assert len(seen) == expected, f"{where}: called {len(seen)} times a forward"
        assert all(abs(share - 0.4) < 0.04 for share in seen), seen


def test_residuals_pass_around_the_dropout():
    """With almost everything dropped, a block is nearly the identity."""
    model = make_model(NeoBERTModel, hidden_dropout=0.999, num_hidden_layers=1).train()
    hidden = torch.randn(1, 50, 64)
    seen = []
    block = model.transformer_encoder[0]
    block.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    model(inputs_embeds=hidden)
    before, after = seen[0]
    assert ((after - before).abs() < 1e-6).float().mean() > 0.95


@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
@torch.no_grad()
def test_attention_dropout_drops_weights(implementation):
    """Values of one: without dropout every output is 1, with it the kept weights are scaled by 1 /
    (1 - p)."""
    model = make_model(
        NeoBERTModel, attn_implementation=implementation, attention_dropout=0.5
    ).train()
    seen = []
    wo = model.transformer_encoder[0].wo
    inner = wo.forward
    wo.forward = lambda x: (seen.append(x), inner(x))[1]
    weight = model.transformer_encoder[0].qkv.weight
    weight.view(4, 3, 16, 64)[:, 2] = 0
    norm = nn.Linear(64, 192, bias=True)
    norm.weight.copy_(weight)
    norm.bias.zero_().view(4, 3, 16)[:, 2] = 1
    model.transformer_encoder[0].qkv = norm
    model(random_batch([100])[0])
    sums = seen[0].view(100, 4, 16)[..., 0]
    assert (sums - 1).abs().max() > 0.05 and abs(sums.mean().item() - 1) < 0.05, (
        "dropout of the weights keeps their mean and changes each"
    )
    seen.clear()
    model.eval()(random_batch([100])[0])
    assert (seen[0] - 1).abs().max() < 1e-5


@pytest.mark.parametrize(
    "model_class", (NeoBERTForSequenceClassification, NeoBERTForMultipleChoice)
)
def test_both_dropouts_of_a_pooled_head(model_class):
    model = make_model(model_class, classifier_dropout=0.4, num_labels=3).train()
    shares = zeroed(model.dropout)
    ids = random_batch([8] * 40)[0]
    model(ids if model_class is NeoBERTForSequenceClassification else ids.view(20, 2, 8))
    assert len(shares) == 2 and all(abs(share - 0.4) < 0.05 for share in shares)


def test_the_dropout_of_a_token_head():
    model = make_model(NeoBERTForTokenClassification, classifier_dropout=0.4, num_labels=3).train()
    shares = zeroed(model.dropout)
    model(random_batch([30] * 10)[0])
    assert len(shares) == 1 and abs(shares[0] - 0.4) < 0.05


# ------------------------------------------------------------------------------------------------
# positions


@torch.no_grad()
def test_learned_positions_at_their_last_row():
    """Row 0 is padding, so max_position_embeddings + 1 rows: 128 positions fit, the 129th does
    not."""
    model = make_model(NeoBERTModel, **LEARNED)
    assert model.positional_embedding.weight.shape[0] == 129
    ids, _ = random_batch([128])
    assert_same(
        model(ids).last_hidden_state[0],
        reference_states(model, ids[0])[0][-1],
        1e-5,
        "text of the full length",
    )
    last = torch.tensor([127])
    assert_same(
        model(ids[:, :1], position_ids=last)[0][0],
        reference_states(model, ids[0, :1], last)[0][-1],
        1e-5,
        "the last position",
    )
    with pytest.raises(ValueError, match="129 tokens"):
        model(random_batch([129])[0])


@pytest.mark.parametrize("unpad_inputs", (True, False))
@torch.no_grad()
def test_padding_beyond_the_learned_positions(unpad_inputs):
    """A row of 200 whose text has 100 tokens fits into 128 positions."""
    model = make_model(NeoBERTModel, unpad_inputs=unpad_inputs, **LEARNED)
    ids, mask = random_batch([100, 128], length=200)
    out = model(ids, attention_mask=mask).last_hidden_state
    for row, n in enumerate((100, 128)):
        assert_same(out[row, :n], reference_states(model, ids[row, :n])[0][-1], 1e-5, f"row {row}")


@torch.no_grad()
def test_multiple_choice_uses_position_ids():
    model = make_model(NeoBERTForMultipleChoice)
    ids, _ = random_batch([8, 8])
    positions = torch.stack((torch.arange(8) * 5, torch.arange(8).flip(0)))[None]
    logits = model(ids[None], position_ids=positions).logits[0]
    for choice in range(2):
        hidden = reference_states(model, ids[choice], positions[0, choice])[0][-1][0]
        dense, classifier = (
            (layer.weight.double(), layer.bias.double())
            for layer in (model.dense, model.classifier)
        )
        expected = classifier[0] @ torch.tanh(dense[0] @ hidden + dense[1]) + classifier[1]
        assert_same(logits[choice], expected[0], 2e-5, f"candidate {choice}")


HEADS = (
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTForQuestionAnswering,
)


@pytest.mark.parametrize("model_class", (*HEADS, NeoBERTForMultipleChoice))
@pytest.mark.parametrize("by_config", (True, False))
@torch.no_grad()
def test_every_head_returns_states_and_weights(model_class, by_config):
    model = make_model(model_class, num_labels=3, attn_implementation="eager")
    ids, mask = random_batch([9, 5])
    ids, mask = (ids[None], mask[None]) if model_class is NeoBERTForMultipleChoice else (ids, mask)
    wanted = {"output_hidden_states": True, "output_attentions": True}
    if by_config:
        for name, value in wanted.items():
            setattr(model.config, name, value)
    out = model(ids, attention_mask=mask, **({} if by_config else wanted))
    assert len(out.hidden_states) == 4 and len(out.attentions) == 3
    states, weights = reference_states(model, (ids[0, 1] if ids.dim() == 3 else ids[1])[:5])
    for layer in range(4):
        assert_same(out.hidden_states[layer][1, :5], states[layer], 1e-5, f"state {layer}")
    assert_same(out.attentions[2][1, :, :5, :5], weights[2], 1e-5, "weights")
    assert (out.hidden_states[0].shape, out.attentions[0].shape) == ((2, 9, 64), (2, 4, 9, 9)), (
        "in the shape of the padded batch"
    )


def test_the_padding_row_of_the_embedding_has_no_gradient():
    for pad_token_id, frozen in ((0, 0), (5, 5), (None, None)):
        model = make_model(NeoBERTModel, pad_token_id=pad_token_id)
        ids = torch.tensor([[0, 5, 7, 9]])
        model(ids).last_hidden_state.square().sum().backward()
        rows = model.encoder.weight.grad.abs().sum(dim=1)
        for row in (0, 5, 7, 9):
            assert (rows[row] == 0) == (row == frozen), (
                f"row {row} with pad_token_id {pad_token_id}"
            )


@torch.no_grad()
def test_norms_in_low_precision_without_gradients_are_those_with():
    """The form of the CPU without gradients rounds once, like torch's own."""
    norm = make_model(NeoBERTModel).layer_norm.to(torch.bfloat16)
    x = (torch.randn(3, 300, 64) * 3 + 0.5).to(torch.bfloat16)
    with torch.enable_grad():
        expected = norm(x)
    assert torch.equal(norm(x), expected)
