"""Test the effect of each configuration field.

Covers the published defaults, aliases, every dropout, learned positions and RoPE settings in any
order.
"""

import json
from pathlib import Path

import pytest
import torch
from helpers.reference import (
    FIELDS,
    LEARNED,
    assert_same,
    last_states,
    make_model,
    random_batch,
    reference_states,
    texts_of,
)
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


ROOT = Path(__file__).resolve().parents[2]


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


SIZES = [(3072, 2048), (13, 8), (12, 8), (15, 16), (96, 64), (100, 72), (512, 344), (2, 8)]


@pytest.mark.parametrize("intermediate_size, inner", SIZES)
def test_the_swiglu_width(intermediate_size, inner):
    """8 * ceil(int(2 n / 3) / 8)."""
    fields = {**FIELDS, "intermediate_size": intermediate_size}
    assert NeoBERTConfig(**fields).ffn_inner_size == inner


LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 7.0}
PRECEDENCE = (
    ({"max_position_embeddings": 77, "max_length": 99}, "max_position_embeddings", 77),
    ({"max_length": 99}, "max_position_embeddings", 99),
    ({"norm_type": "rms", "rms_norm": False}, "norm_type", "rms"),
    ({"rms_norm": False}, "norm_type", "layer"),
    ({"position_embedding_type": "rope", "rope": False}, "position_embedding_type", "rope"),
    ({"attention_dropout": 0.0, "dropout": 0.3}, "attention_dropout", 0.0),
    ({"attention_dropout": 0.0, "dropout": 0.3}, "hidden_dropout", 0.3),
    ({"hidden_dropout": 0.2, "dropout": 0.3}, "hidden_dropout", 0.2),
    ({"dropout": 0.1, "dropout_prob": 0.3}, "hidden_dropout", 0.1),
    ({"masked_lm_logits": "masked"}, "sparse_prediction", True),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": LINEAR},
        "rope_parameters",
        LINEAR,
    ),
    ({"rope_theta": 5.0, "rope_parameters": LINEAR}, "rope_theta", 7.0),
)


@pytest.mark.parametrize("fields, name, value", PRECEDENCE)
def test_which_of_two_names_wins(fields, name, value):
    sizes = {key: size for key, size in FIELDS.items() if key != "max_position_embeddings"}
    assert getattr(NeoBERTConfig(**sizes, **fields), name) == value


@pytest.mark.parametrize("rope_type", ("linear", "dynamic", "yarn"))
def test_setting_theta_keeps_the_scaling(rope_type):
    config = NeoBERTConfig(**FIELDS, rope_scaling={"rope_type": rope_type, "factor": 4.0})
    before = dict(config.rope_parameters)
    config.rope_theta = 500.0
    assert config.rope_parameters == {**before, "rope_theta": 500.0}
    config.rope_scaling = None
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}


def test_the_view_of_the_scaling():
    """As transformers 4 writes it: without theta, and with one name for the type, of which
    `rope_type` wins."""
    scaling = {"type": "linear", "rope_type": "yarn", "factor": 2.0, "rope_theta": 5000.5}
    config = NeoBERTConfig(rope_scaling=scaling)
    expected = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    assert config.rope_scaling == expected and config.rope_theta == 5000.5
    assert config.rope_parameters == {**expected, "rope_theta": 5000.5}


def test_a_max_length_of_zero_is_refused():
    with pytest.raises(ValueError, match="`max_position_embeddings` must be .*, got 0"):
        NeoBERTConfig(max_length=0)


def test_yarn_that_extends_to_less_than_the_context():
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    assert NeoBERTConfig(max_position_embeddings=8192, rope_scaling=yarn).context_length == 8192
    assert NeoBERTConfig(max_position_embeddings=1024, rope_scaling=yarn).context_length == 2048


@pytest.mark.parametrize("factor", (1.0, 1))
def test_a_factor_of_one_is_allowed_and_one_below_is_not(factor):
    NeoBERTConfig(**FIELDS, rope_scaling={"rope_type": "yarn", "factor": factor})
    for bad in (0.99, 0, -2.0, 1e308, True, "2"):
        with pytest.raises(ValueError, match="`factor` must be a number from 1 to 1,000,000"):
            NeoBERTConfig(**FIELDS, rope_scaling={"rope_type": "yarn", "factor": bad})


# ------------------------------------------------------------------------------------------------
# each dropout


def zeroed(module):
    """Share of zeros in what a module returns while the model runs."""
    shares = []
    module.register_forward_hook(lambda module, args, out: shares.append((out == 0).float().mean()))
    return shares


@pytest.mark.parametrize("calls", (1, 2))
def test_hidden_dropout_acts_where_it_should(calls):
    """On the embedding, once; after attention and after the feed-forward: each drops its share."""
    model = make_model(NeoBERTModel, hidden_dropout=0.4).train()
    blocks = [block.dropout for block in model.transformer_encoder]
    seen = [zeroed(module) for module in ([model.embedding_dropout] if calls == 1 else blocks)]
    model(random_batch([60, 60])[0])
    for shares in seen:
        assert len(shares) == calls and all(abs(share - 0.4) < 0.04 for share in shares)


@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
@torch.no_grad()
def test_attention_dropout_drops_weights(implementation):
    """Values of one: without dropout every output is 1, with it the kept weights are scaled by 1 /
    (1 - p)."""
    model = make_model(NeoBERTModel, attn_implementation=implementation, attention_dropout=0.5)
    block, seen = model.transformer_encoder[0], []
    inner = block.wo.forward
    block.wo.forward = lambda x: (seen.append(x), inner(x))[1]
    block.qkv.weight.view(4, 3, 16, 64)[:, 2] = 0
    block.qkv.bias = nn.Parameter(torch.zeros(192))
    block.qkv.bias.view(4, 3, 16)[:, 2] = 1
    model.train()(random_batch([100])[0])
    sums = seen[0].view(100, 4, 16)[..., 0]
    assert (sums - 1).abs().max() > 0.05 and abs(sums.mean().item() - 1) < 0.05
    model.eval()(random_batch([100])[0])
    assert (seen[1] - 1).abs().max() < 1e-5


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
    assert_same(model(ids)[0][0], last_states(model, ids[0]))
    last = torch.tensor([127])
    alone = model(ids[:, :1], position_ids=last)[0][0]
    assert_same(alone, reference_states(model, ids[0, :1], last)[0][-1], what="the last position")
    with pytest.raises(ValueError, match="at most 128, the number of learned positions, got 129"):
        model(random_batch([129])[0])


@pytest.mark.parametrize("unpad_inputs", (True, False))
@torch.no_grad()
def test_padding_beyond_the_learned_positions(unpad_inputs):
    """A row of 200 whose text has 100 tokens fits into 128 positions."""
    model = make_model(NeoBERTModel, unpad_inputs=unpad_inputs, **LEARNED)
    ids, mask = random_batch([100, 128], length=200)
    hidden = model(ids, attention_mask=mask).last_hidden_state
    assert_same(hidden[mask.bool()], last_states(model, *texts_of(ids, mask)))


@torch.no_grad()
def test_multiple_choice_uses_position_ids():
    model = make_model(NeoBERTForMultipleChoice)
    ids, _ = random_batch([8, 8])
    positions = torch.stack((torch.arange(8) * 5, torch.arange(8).flip(0)))[None]
    logits = model(ids[None], position_ids=positions).logits[0]
    dense, classifier = model.dense.double(), model.classifier.double()
    for choice in range(2):
        hidden = reference_states(model, ids[choice], positions[0, choice])[0][-1][0]
        expected = classifier(torch.tanh(dense(hidden)))
        assert_same(logits[choice], expected[0], 2e-5, f"candidate {choice}")


HEADS = (
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTForQuestionAnswering,
    NeoBERTForMultipleChoice,
)


@pytest.mark.parametrize("model_class", HEADS)
@pytest.mark.parametrize("by_config", (True, False))
@torch.no_grad()
def test_every_head_returns_states_and_weights(model_class, by_config):
    """In the shape of the padded batch."""
    model = make_model(model_class, num_labels=3, attn_implementation="eager")
    ids, mask = random_batch([9, 5])
    states, weights = reference_states(model, ids[1, :5])
    if model_class is NeoBERTForMultipleChoice:
        ids, mask = ids[None], mask[None]
    wanted = {"output_hidden_states": True, "output_attentions": True}
    if by_config:
        for name in wanted:
            setattr(model.config, name, True)
    out = model(ids, attention_mask=mask, **({} if by_config else wanted))
    assert len(out.hidden_states) == 4 and len(out.attentions) == 3
    for actual, expected in zip(out.hidden_states, states):
        assert actual.shape == (2, 9, 64)
        assert_same(actual[1, :5], expected)
    assert out.attentions[0].shape == (2, 4, 9, 9)
    assert_same(out.attentions[2][1, :, :5, :5], weights[2], what="weights")


@torch.no_grad()
def test_norms_in_low_precision_without_gradients_are_those_with():
    """The form of the CPU without gradients rounds once, like torch's own."""
    norm = make_model(NeoBERTModel).layer_norm.to(torch.bfloat16)
    x = (torch.randn(3, 300, 64) * 3 + 0.5).to(torch.bfloat16)
    with torch.enable_grad():
        expected = norm(x)
    assert torch.equal(norm(x), expected)
