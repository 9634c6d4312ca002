"""Test the effect of each configuration field.

Covers the published defaults, aliases and their precedence, every dropout, learned positions and
RoPE settings.
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


def test_defaults_match_the_published_model():
    """The defaults equal config.json of this repository, and the published model.

    The published configuration has other field names, so its values are written out here.
    """
    config = NeoBERTConfig()
    repository_config = json.loads((ROOT / "config.json").read_text())
    defaults = config.to_dict()
    for name, value in repository_config.items():
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


def test_head_dim_must_be_that_of_the_sizes():
    """`head_dim`, a field of other models, is accepted if it has the only possible value."""
    config = NeoBERTConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    assert config.head_dim == 16 and "head_dim" not in config.to_dict()
    with pytest.raises(ValueError, match="`head_dim` must be .* = 16, got 32."):
        NeoBERTConfig(hidden_size=64, num_attention_heads=4, head_dim=32)


SIZES = [(3072, 2048), (13, 8), (12, 8), (15, 16), (96, 64), (100, 72), (512, 344), (2, 8)]


@pytest.mark.parametrize("intermediate_size, inner", SIZES)
def test_swiglu_inner_size(intermediate_size, inner):
    """The inner size of SwiGLU is 8 * ceil(int(2 * intermediate_size / 3) / 8)."""
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
    ({"classifier_dropout": None, "hidden_dropout_prob": 0.3}, "classifier_dropout", 0.3),
    ({"classifier_dropout": 0.0, "hidden_dropout_prob": 0.3}, "classifier_dropout", 0.0),
    ({"masked_lm_logits": "masked"}, "sparse_prediction", True),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": LINEAR},
        "rope_parameters",
        LINEAR,
    ),
    ({"rope_theta": 5.0, "rope_parameters": LINEAR}, "rope_theta", 7.0),
)


@pytest.mark.parametrize("fields, name, value", PRECEDENCE)
def test_current_names_take_precedence_over_aliases(fields, name, value):
    """If a field is passed under two names, the current name takes precedence over the alias."""
    sizes = {key: size for key, size in FIELDS.items() if key != "max_position_embeddings"}
    assert getattr(NeoBERTConfig(**sizes, **fields), name) == value


@pytest.mark.parametrize("rope_type", ("linear", "dynamic", "yarn"))
def test_setting_rope_theta_keeps_the_scaling(rope_type):
    """Setting `rope_theta` keeps the scaling, and removing the scaling keeps `rope_theta`."""
    config = NeoBERTConfig(**FIELDS, rope_scaling={"rope_type": rope_type, "factor": 4.0})
    before = dict(config.rope_parameters)
    config.rope_theta = 500.0
    assert config.rope_parameters == {**before, "rope_theta": 500.0}
    config.rope_scaling = None
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}


def test_rope_scaling_has_the_form_of_transformers_4():
    """`rope_scaling` has the form of transformers 4, without `rope_theta`.

    `rope_type` takes precedence over the older name `type`.
    """
    scaling = {"type": "linear", "rope_type": "yarn", "factor": 2.0, "rope_theta": 5000.5}
    config = NeoBERTConfig(rope_scaling=scaling)
    expected = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    assert config.rope_scaling == expected and config.rope_theta == 5000.5
    assert config.rope_parameters == {**expected, "rope_theta": 5000.5}


def test_max_length_of_zero_is_rejected():
    """A `max_length` of 0, the alias of `max_position_embeddings`, raises an error."""
    with pytest.raises(ValueError, match="`max_position_embeddings` must be .*, got 0"):
        NeoBERTConfig(max_length=0)


def test_context_length_is_at_least_max_position_embeddings():
    """The context length is never below `max_position_embeddings`, even if YaRN extends to less."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    assert NeoBERTConfig(max_position_embeddings=8192, rope_scaling=yarn).context_length == 8192
    assert NeoBERTConfig(max_position_embeddings=1024, rope_scaling=yarn).context_length == 2048


@pytest.mark.parametrize("factor", (1.0, 1))
def test_rope_factor_bounds(factor):
    """A RoPE factor of 1 is allowed; smaller, huge and non-numeric factors raise an error."""
    NeoBERTConfig(**FIELDS, rope_scaling={"rope_type": "yarn", "factor": factor})
    for bad in (0.99, 0, -2.0, 1e308, True, "2"):
        with pytest.raises(ValueError, match="`factor` must be a number from 1 to 1,000,000"):
            NeoBERTConfig(**FIELDS, rope_scaling={"rope_type": "yarn", "factor": bad})


# ------------------------------------------------------------------------------------------------
# Dropout


def record_zeros(module):
    """Return a list to which each call of a module appends the fraction of zeros in its output."""
    fractions = []
    module.register_forward_hook(
        lambda module, args, out: fractions.append((out == 0).float().mean())
    )
    return fractions


@pytest.mark.parametrize("calls", (1, 2))
def test_hidden_dropout_is_applied_to_embedding_and_blocks(calls):
    """Hidden dropout is applied once to the embedding and twice per block.

    In a block it follows the attention and the feed-forward.
    """
    model = make_model(NeoBERTModel, hidden_dropout=0.4).train()
    blocks = [block.dropout for block in model.transformer_encoder]
    zeros_per_module = [
        record_zeros(module) for module in ([model.embedding_dropout] if calls == 1 else blocks)
    ]
    model(random_batch([60, 60])[0])
    for fractions in zeros_per_module:
        assert len(fractions) == calls and all(abs(fraction - 0.4) < 0.04 for fraction in fractions)


@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
@torch.no_grad()
def test_attention_dropout_drops_weights(implementation):
    """Attention dropout drops attention weights, and scales the others by 1 / (1 - p).

    All values are one, so without dropout every output is 1.
    """
    model = make_model(NeoBERTModel, attn_implementation=implementation, attention_dropout=0.5)
    block = model.transformer_encoder[0]
    outputs = []
    inner = block.wo.forward
    block.wo.forward = lambda x: (outputs.append(x), inner(x))[1]
    block.qkv.weight.view(4, 3, 16, 64)[:, 2] = 0
    block.qkv.bias = nn.Parameter(torch.zeros(192))
    block.qkv.bias.view(4, 3, 16)[:, 2] = 1

    model.train()(random_batch([100])[0])
    sums = outputs[0].view(100, 4, 16)[..., 0]
    assert (sums - 1).abs().max() > 0.05 and abs(sums.mean().item() - 1) < 0.05
    model.eval()(random_batch([100])[0])
    assert (outputs[1] - 1).abs().max() < 1e-5


@pytest.mark.parametrize(
    "model_class", (NeoBERTForSequenceClassification, NeoBERTForMultipleChoice)
)
def test_pooled_heads_apply_dropout_twice(model_class):
    """The pooled heads apply dropout twice: before `dense` and before `classifier`."""
    model = make_model(model_class, classifier_dropout=0.4, num_labels=3).train()
    fractions = record_zeros(model.dropout)
    ids = random_batch([8] * 40)[0]
    model(ids if model_class is NeoBERTForSequenceClassification else ids.view(20, 2, 8))
    assert len(fractions) == 2 and all(abs(fraction - 0.4) < 0.05 for fraction in fractions)


def test_token_classifier_applies_dropout_once():
    """The token classifier applies dropout once."""
    model = make_model(NeoBERTForTokenClassification, classifier_dropout=0.4, num_labels=3).train()
    fractions = record_zeros(model.dropout)
    model(random_batch([30] * 10)[0])
    assert len(fractions) == 1 and abs(fractions[0] - 0.4) < 0.05


# ------------------------------------------------------------------------------------------------
# Positions and outputs


@torch.no_grad()
def test_last_learned_position():
    """128 learned positions can be used, and a text of 129 tokens raises an error.

    The embedding has `max_position_embeddings` + 1 rows, because row 0 is for padding.
    """
    model = make_model(NeoBERTModel, **LEARNED)
    assert model.positional_embedding.weight.shape[0] == 129
    ids, _ = random_batch([128])
    assert_same(model(ids)[0][0], last_states(model, ids[0]))
    last = torch.tensor([127])
    alone = model(ids[:, :1], position_ids=last)[0][0]
    assert_same(
        alone,
        reference_states(model, ids[0, :1], last)[0][-1],
        what="output at the last position",
    )

    with pytest.raises(ValueError, match="at most 128, the number of learned positions, got 129"):
        model(random_batch([129])[0])
    for position in (-1, 128):
        with pytest.raises(ValueError, match=f"from 0 to 127, the last .* got {position}"):
            model(ids[:, :1], position_ids=torch.tensor([position]))


def test_rope_scaling_does_not_extend_learned_positions():
    yarn = {"rope_type": "yarn", "factor": 2.0}
    model = make_model(NeoBERTModel, rope_scaling=yarn, **LEARNED)
    assert model.config.context_length == 128
    with pytest.raises(ValueError, match="at most 128, the number of learned positions"):
        model(random_batch([129])[0])


@pytest.mark.parametrize("shape", [(6, 4), (2, 6), (4, 6, 1), (24,)])
def test_position_ids_of_another_shape_are_refused(shape):
    """Transposed positions have the right number of values, and would be wrong silently."""
    model = make_model(NeoBERTModel)
    ids, _ = random_batch([6] * 4)
    with pytest.raises(ValueError, match=r"must have shape \(1, 6\) or \(4, 6\), got"):
        model(ids, position_ids=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("unpad_inputs", (True, False))
@torch.no_grad()
def test_padding_beyond_the_learned_positions(unpad_inputs):
    """The limit of learned positions applies to the texts, not to the padded length of the rows."""
    model = make_model(NeoBERTModel, unpad_inputs=unpad_inputs, **LEARNED)
    ids, mask = random_batch([100, 128], length=200)
    hidden = model(ids, attention_mask=mask).last_hidden_state
    assert_same(hidden[mask.bool()], last_states(model, *texts_of(ids, mask)))


@torch.no_grad()
def test_multiple_choice_uses_position_ids():
    """Multiple choice uses the positions of each candidate."""
    model = make_model(NeoBERTForMultipleChoice)
    ids, _ = random_batch([8, 8])
    positions = torch.stack((torch.arange(8) * 5, torch.arange(8).flip(0)))[None]
    logits = model(ids[None], position_ids=positions).logits[0]
    dense = model.dense.double()
    classifier = model.classifier.double()
    for choice in range(2):
        hidden = reference_states(model, ids[choice], positions[0, choice])[0][-1][0]
        expected = classifier(torch.tanh(dense(hidden)))
        assert_same(logits[choice], expected[0], 2e-5, f"logit of candidate {choice}")


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
def test_heads_return_hidden_states_and_attentions(model_class, by_config):
    """Every head returns hidden states and attention weights in the shape of the padded batch.

    They are requested by arguments or by the configuration.
    """
    model = make_model(model_class, num_labels=3, attn_implementation="eager")
    ids, mask = random_batch([9, 5])
    states, weights = reference_states(model, ids[1, :5])
    if model_class is NeoBERTForMultipleChoice:
        ids = ids[None]
        mask = mask[None]

    options = {"output_hidden_states": True, "output_attentions": True}
    if by_config:
        for name in options:
            setattr(model.config, name, True)
    outputs = model(ids, attention_mask=mask, **({} if by_config else options))

    assert len(outputs.hidden_states) == 4 and len(outputs.attentions) == 3
    for actual, expected in zip(outputs.hidden_states, states):
        assert actual.shape == (2, 9, 64)
        assert_same(actual[1, :5], expected)
    assert outputs.attentions[0].shape == (2, 4, 9, 9)
    assert_same(outputs.attentions[2][1, :, :5, :5], weights[2], what="attention weights")


@torch.no_grad()
def test_bfloat16_norm_is_identical_without_gradients():
    """RMSNorm in bfloat16 gives the same bits with and without gradients.

    Without gradients, the CPU uses another implementation, which also rounds only once.
    """
    norm = make_model(NeoBERTModel).layer_norm.to(torch.bfloat16)
    x = (torch.randn(3, 300, 64) * 3 + 0.5).to(torch.bfloat16)
    with torch.enable_grad():
        expected = norm(x)
    assert torch.equal(norm(x), expected)
