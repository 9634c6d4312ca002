"""Pins what a BERT user may pass to the model and what comes back: masks, positions, hidden states,
attentions, return_dict, bad input."""

import logging

import pytest
import torch

from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
    modeling_neobert,
)

from .reference import FIELDS, LEARNED, assert_same, make_model, random_batch, reference_states


IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")


@pytest.fixture
def warnings(caplog):
    """Warnings that the model logs; each is given once a process, so the memory of that is
    cleared."""
    modeling_neobert.logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=modeling_neobert.logger.name):
        yield lambda text: [r for r in caplog.records if text in r.getMessage()]


@pytest.fixture(scope="module")
def model():
    return make_model(NeoBERTModel)


# ------------------------------------------------------------------------------------------------
# arithmetic


@pytest.mark.parametrize("variant", ("neobert", "learned", "mixed"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_hidden_states_are_the_formulas(implementation, variant):
    """n + 1 of them, the embedding first and the normed output last, at real tokens."""
    fields = {
        "neobert": {},
        "learned": LEARNED,
        "mixed": {"norm_type": "layer", "rope_theta": 500.0},
    }[variant]
    model = make_model(NeoBERTModel, attn_implementation=implementation, **fields)
    lengths = [17, 9, 1]
    ids, mask = random_batch(lengths)
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    for row, n in enumerate(lengths):
        expected, _ = reference_states(model, ids[row, :n])
        for i, state in enumerate(out.hidden_states):
            assert state.shape == (3, 17, 64)
            assert_same(state[row, :n], expected[i], 1e-5, f"hidden state {i} of text {row}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_attentions(implementation, warnings):
    """Weights of the formula under every implementation, also with padding; one warning where the
    implementation has none."""
    model = make_model(NeoBERTModel, attn_implementation=implementation)
    lengths = [11, 6]
    ids, mask = random_batch(lengths)
    out = model(ids, attention_mask=mask, output_attentions=True)
    model(ids, attention_mask=mask, output_attentions=True)
    found = warnings("eager function is used instead")
    assert len(found) == (0 if implementation == "eager" else 1)
    assert len(out.attentions) == 3
    for row, n in enumerate(lengths):
        states, attentions = reference_states(model, ids[row, :n])
        assert_same(out.last_hidden_state[row, :n], states[-1], 1e-5, "last hidden state")
        for actual, expected in zip(out.attentions, attentions):
            assert actual.shape == (2, 4, 11, 11)
            assert_same(actual[row, :, :n, :n], expected, 1e-5, "attention weights")
            assert actual[row, :, :n, n:].abs().sum() == 0, "A real token attends to padding."
    assert model(ids, attention_mask=mask).attentions is None


# ------------------------------------------------------------------------------------------------
# masks


@pytest.mark.parametrize(
    "dtype", (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float16)
)
@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_mask_dtypes_and_sides(implementation, side, dtype):
    lengths = [10, 4, 7]
    ids, mask = random_batch(lengths, side=side)
    for unpad in (True, False):
        model = make_model(NeoBERTModel, attn_implementation=implementation, unpad_inputs=unpad)
        out = model(ids, attention_mask=mask.to(dtype)).last_hidden_state
        for row in range(len(lengths)):
            real = mask[row].bool()
            expected = reference_states(model, ids[row][real])[0][-1]
            # On the left, the positions start later: the same up to rounding, as only relative
            # positions matter.
            assert_same(out[row][real], expected, 2e-5, f"text {row} ({side} padding, {dtype})")


@pytest.mark.parametrize("side", ("left", "right"))
@torch.no_grad()
def test_learned_positions_count_real_tokens(side):
    """From 1 over real tokens, wherever the padding is; tokens equal to pad_token_id are padding
    when no mask is given."""
    lengths = [10, 4]
    ids, mask = random_batch(lengths, side=side)
    for given in (mask, None):
        for unpad in (True, False):
            model = make_model(NeoBERTModel, unpad_inputs=unpad, **LEARNED)
            out = model(ids, attention_mask=given).last_hidden_state
            row = 1 if given is not None else 0
            real = mask[row].bool()
            assert_same(
                out[row][real],
                reference_states(model, ids[row][real])[0][-1],
                1e-5,
                "learned positions",
            )
    explicit = model(ids[:1], position_ids=torch.arange(10)[None] + 5).last_hidden_state
    assert_same(
        explicit[0],
        reference_states(model, ids[0], torch.arange(10) + 5)[0][-1],
        1e-5,
        "explicit learned positions",
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_scattered_masks_keep_positions(implementation):
    """Holes in the middle: the others see each other at their own positions."""
    ids, _ = random_batch([12, 12])
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, [0, 3, 4, 9]] = 0
    mask[1, 1:11] = 0
    for unpad in (True, False):
        model = make_model(NeoBERTModel, attn_implementation=implementation, unpad_inputs=unpad)
        out = model(ids, attention_mask=mask).last_hidden_state
        for row in range(2):
            real = mask[row].bool()
            expected = reference_states(model, ids[row][real], torch.arange(12)[real])[0][-1]
            assert_same(out[row][real], expected, 1e-5, f"row {row}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("unpad_inputs", (True, False))
def test_rows_of_padding_alone_are_finite(implementation, unpad_inputs):
    model = make_model(
        NeoBERTForMaskedLM, attn_implementation=implementation, unpad_inputs=unpad_inputs
    )
    ids, mask = random_batch([9, 0, 5])
    for given in (mask, torch.zeros_like(mask)):
        model.zero_grad()
        labels = torch.where(given == 1, ids, -100)
        # torch has no backward of flex_attention on the CPU.
        with torch.set_grad_enabled(implementation != "flex_attention"):
            out = model(ids, attention_mask=given, labels=labels, output_hidden_states=True)
        assert all(torch.isfinite(x).all() for x in (out.loss, out.logits, *out.hidden_states)), (
            "NaN or infinity in the outputs."
        )
        if implementation == "flex_attention":
            continue
        out.loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads and all(torch.isfinite(g).all() for g in grads), (
            "NaN or infinity in the gradients."
        )
    with torch.no_grad():
        out = model(ids, attention_mask=mask)
    for row, n in ((0, 9), (2, 5)):
        with torch.no_grad():
            hidden = model.model(ids[row : row + 1, :n]).last_hidden_state
        assert_same(out.logits[row, :n], model.decoder(hidden)[0], 1e-5, "row beside an empty row")


@torch.no_grad()
def test_padding_is_zero_where_the_model_packed_and_content_of_padding_is_irrelevant(model):
    ids, mask = random_batch([9, 5])
    out = model(ids, attention_mask=mask).last_hidden_state
    assert out[1, 5:].abs().sum() == 0
    ids[1, 5:] = 77
    assert torch.equal(model(ids, attention_mask=mask).last_hidden_state, out)


# ------------------------------------------------------------------------------------------------
# other inputs


@torch.no_grad()
def test_inputs_embeds(model):
    ids, mask = random_batch([9, 5])
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(
        model(inputs_embeds=embeds, attention_mask=mask)[0], model(ids, attention_mask=mask)[0]
    )
    assert torch.equal(model(inputs_embeds=embeds)[0], model(ids)[0])


@torch.no_grad()
def test_token_type_ids_are_ignored(model):
    ids, mask = random_batch([9, 5])
    out = model(ids, attention_mask=mask, token_type_ids=torch.ones_like(ids))
    assert torch.equal(out[0], model(ids, attention_mask=mask)[0])
    assert torch.equal(model(ids, mask, torch.ones_like(ids))[0], out[0]), (
        "The third positional argument is token_type_ids, as in BERT."
    )


@torch.no_grad()
def test_return_dict(model):
    ids, _ = random_batch([9])
    out = model(ids, return_dict=False)
    assert (
        isinstance(out, tuple)
        and len(out) == 1
        and torch.equal(out[0], model(ids).last_hidden_state)
    )
    everything = model(ids, return_dict=False, output_hidden_states=True, output_attentions=True)
    assert len(everything) == 3 and len(everything[1]) == 4 and len(everything[2]) == 3
    head = make_model(NeoBERTForMaskedLM)
    loss, logits = head(ids, labels=ids, return_dict=False)
    assert loss.dim() == 0 and logits.shape == (1, 9, 200)


@torch.no_grad()
def test_configuration_switches_outputs(model):
    config = model.config
    try:
        config.output_hidden_states = True
        assert len(model(random_batch([4])[0]).hidden_states) == 4
    finally:
        config.output_hidden_states = False


@torch.no_grad()
def test_int32_ids_and_1d_positions(model):
    ids, _ = random_batch([9, 9])
    assert torch.equal(model(ids.int(), position_ids=torch.arange(9))[0], model(ids)[0])


@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
@pytest.mark.parametrize("field", ("hidden_dropout", "attention_dropout"))
@torch.no_grad()
def test_dropout_acts_in_training_only(field, implementation):
    model = make_model(NeoBERTModel, attn_implementation=implementation, **{field: 0.3})
    ids, mask = random_batch([30, 20])

    def run():
        return model(ids, attention_mask=mask).last_hidden_state

    assert_same(run()[0], reference_states(model, ids[0])[0][-1], 1e-5, "output in eval")
    assert torch.equal(run(), run()), "Dropout is active in eval."
    model.train()
    assert not torch.allclose(run(), run()), (
        f"{field} does nothing in training, so the check in eval would be vacuous."
    )


@torch.no_grad()
def test_one_warning_past_the_trained_length(model, warnings):
    ids, _ = random_batch([140])
    out = model(ids).last_hidden_state
    model(ids)
    found = warnings("longer than the 128 of max_position_embeddings")
    assert len(found) == 1
    assert "yarn" in found[0].getMessage(), "The warning should say what to do."
    assert_same(out[0], reference_states(model, ids[0])[0][-1], 1e-5, "long text")


@torch.no_grad()
def test_the_warning_comes_past_what_scaling_extends_to(warnings):
    model = make_model(NeoBERTModel, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    assert model.config.context_length == 256 and model.config.max_position_embeddings == 128
    model(random_batch([256])[0])
    assert not warnings("longer than")
    model(random_batch([257])[0])
    assert len(warnings("longer than the 256 of max_position_embeddings and RoPE scaling")) == 1


def test_float64_stays_float64():
    """As gradient checks by finite differences need it."""
    model = make_model(NeoBERTForSequenceClassification, num_labels=3).double()
    ids, mask = random_batch([9, 4])
    out = model(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    assert out.loss.dtype == out.logits.dtype == torch.float64
    single = make_model(NeoBERTForSequenceClassification, num_labels=3)
    with torch.no_grad():
        assert_same(model(ids, attention_mask=mask).logits, out.logits, 1e-12, "without gradients")
        assert_same(single(ids, attention_mask=mask).logits.double(), out.logits, 1e-4, "float32")


def test_rms_norm_keeps_float32_inside():
    """The squares' mean is taken in float32: in bfloat16 256 + 1 is 256 and 8 bits of every norm
    would be lost."""
    norm = make_model(NeoBERTModel).layer_norm.to(torch.bfloat16)
    x = (torch.randn(64, 64) * 3 + 0.5).to(torch.bfloat16)
    exact = (
        x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    )
    # One rounding at the end, half a unit in 8 bits; a norm in bfloat16 rounds four times.
    relative = ((norm(x).double() - exact).abs() / exact.abs().clamp(min=1e-6)).max().item()
    assert relative <= 1.05 * 2**-8, f"RMSNorm's relative error in bfloat16 is {relative:.2e}."


# ------------------------------------------------------------------------------------------------
# bad input


IDS = torch.ones(2, 6, dtype=torch.long)
BAD_INPUTS = {
    "neither": ({}, "neither was given"),
    "lists": (
        {"input_ids": IDS.tolist()},
        "input_ids must be a tensor, but a list was given; .*return_tensors",
    ),
    "a mask in numpy": (
        {"input_ids": IDS, "attention_mask": IDS.numpy()},
        "attention_mask must be a tensor, but a ndarray",
    ),
    "both": ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 6, 64)}, "both were given"),
    "ids of 1 dimension": ({"input_ids": IDS[0]}, r"\(batch, length\).*\(6,\)"),
    "no token": ({"input_ids": IDS[:, :0]}, r"at least one token.*\(2, 0\)"),
    "id beyond the vocabulary": ({"input_ids": IDS * 200}, "between 0 and 199, but 200"),
    "negative id": ({"input_ids": -IDS}, "between 0 and 199, but -1"),
    "embeds of 2 dimensions": (
        {"inputs_embeds": torch.zeros(6, 64)},
        r"\(batch, length, 64\).*\(6, 64\)",
    ),
    "mask of another length": (
        {"input_ids": IDS, "attention_mask": torch.ones(2, 5)},
        r"\(2, 6\).*\(2, 5\)",
    ),
    "mask of another batch": (
        {"input_ids": IDS, "attention_mask": torch.ones(3, 6)},
        r"\(2, 6\).*\(3, 6\)",
    ),
    "4-D mask of another length": (
        {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 6, 5)},
        r"\(2, 6\).*\(2, 1, 6, 5\)",
    ),
    "additive mask": (
        {"input_ids": IDS, "attention_mask": torch.full((2, 6), -1e4)},
        "1 for real tokens and 0",
    ),
    "segment numbers as mask": (
        {"input_ids": IDS, "attention_mask": IDS * 2},
        "1 for real tokens and 0",
    ),
    "packed batch of two rows": (
        {"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 6])},
        r"packed batch.*\(2, 6\)",
    ),
    "bounds beyond the row": (
        {"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 3, 7])},
        r"number of tokens, 6.*\[0, 3, 7\]",
    ),
    "bounds that fall": (
        {"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 5, 3, 6])},
        r"\[0, 5, 3, 6\]",
    ),
    "bounds from 1": ({"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([1, 7])}, r"\[1, 7\]"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs(model, case):
    inputs, sentence = BAD_INPUTS[case]
    with pytest.raises(ValueError, match=sentence) as error:
        model(**inputs)
    assert "\n" not in str(error.value), "The message should be one sentence."


def test_bad_inputs_of_learned_positions():
    model = make_model(NeoBERTModel, **LEARNED)
    with pytest.raises(ValueError, match="200 tokens.*learned positions reach 128"):
        model(torch.ones(1, 200, dtype=torch.long))


def test_bad_labels():
    model = make_model(NeoBERTForMaskedLM)
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 6\), but \(2, 5\)"):
        model(IDS, labels=IDS[:, :5])
    with pytest.raises(ValueError, match="between 0 and 199, or be -100.*200"):
        model(IDS, labels=IDS * 200)
    with pytest.raises(ValueError, match="between 0 and 199.*-1 was"):
        model(IDS, labels=-IDS)
    with pytest.raises(ValueError, match="whole numbers.*float32"):
        model(IDS, labels=IDS.float())
    tokens = make_model(NeoBERTForTokenClassification, num_labels=3)
    with pytest.raises(ValueError, match="between 0 and 2.*3 was"):
        tokens(IDS, labels=IDS * 3)


def test_flex_attention_says_that_it_has_no_dropout():
    model = make_model(
        NeoBERTModel, attn_implementation="flex_attention", attention_dropout=0.1
    ).train()
    with pytest.raises(ValueError, match="dropout"):
        model(IDS)


YARN = {"rope_type": "yarn", "factor": 2.0}
BAD_CONFIGS = {
    "hidden size and heads": ({"hidden_size": 66}, "multiple of num_attention_heads.*66 and 4"),
    "odd head_dim": ({"hidden_size": 36}, "even head_dim.*36 / 4 = 9"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers.*positive.*0"),
    "no width": ({"intermediate_size": 1}, "intermediate_size must be at least 2.*1 was"),
    "fractional width": ({"intermediate_size": 1.5}, "intermediate_size.*whole number.*1.5"),
    "text as vocabulary": ({"vocab_size": "many"}, "vocab_size.*'many'"),
    "activation": ({"hidden_act": "relu"}, "hidden_act must be one of swiglu, gelu, but 'relu'"),
    "norm": ({"norm_type": "batch"}, "norm_type must be one of rms, layer"),
    "positions": (
        {"position_embedding_type": "alibi"},
        "position_embedding_type.*rope, learned.*alibi",
    ),
    "pooling": ({"classifier_pooling": "max"}, "classifier_pooling.*cls, mean.*max"),
    "logits": (
        {"sparse_prediction": "some"},
        "sparse_prediction must be True or False, but 'some'",
    ),
    "logits by the old name": (
        {"masked_lm_logits": "some"},
        "sparse_prediction must be True or False, but 'some'",
    ),
    "dynamic RoPE of head_dim 2": (
        {"hidden_size": 8, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "head_dim of at least 4.*2 was",
    ),
    "dropout of 1": ({"attention_dropout": 1.0}, "attention_dropout.*1.0"),
    "negative dropout": ({"dropout": -0.1}, "dropout.*-0.1"),
    "negative epsilon": ({"norm_eps": -1e-5}, "norm_eps"),
    "theta": ({"rope_theta": 0}, "rope_theta.*0"),
    "theta that is no number": ({"rope_theta": float("nan")}, "rope_theta.*nan"),
    "infinite factor": (
        {"rope_scaling": {"rope_type": "linear", "factor": float("inf")}},
        "factor.*inf",
    ),
    "rope type": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        "rope_type.*linear.*longrope",
    ),
    "rope factor": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor.*None"),
    "rope as number": ({"rope_scaling": 2.0}, "dictionary.*2.0"),
    "unpad": ({"unpad_inputs": "yes"}, "unpad_inputs.*'yes'"),
    "padding id": ({"pad_token_id": 200}, "pad_token_id.*199, but 200"),
    "ngpt": ({"ngpt": True}, "ngpt"),
    "theta of a dictionary": ({"rope_parameters": {"rope_theta": 0}}, "rope_theta.*0"),
    "YaRN of a length of True": (
        {"rope_scaling": {**YARN, "original_max_position_embeddings": True}},
        "positive whole number.*True",
    ),
    "YaRN of a length of 0": (
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
        "positive whole number.*0",
    ),
    "YaRN of equal betas": (
        {"rope_scaling": {**YARN, "beta_fast": 4, "beta_slow": 4}},
        "beta_fast above beta_slow",
    ),
    "YaRN of a beta of 0": ({"rope_scaling": {**YARN, "beta_slow": 0}}, "beta_slow above 0"),
    "dropout of the classifier": ({"classifier_dropout": 1.5}, "classifier_dropout.*1.5"),
    "padding id True": ({"pad_token_id": True}, "pad_token_id.*True"),
    "layers True": ({"num_hidden_layers": True}, "num_hidden_layers.*True"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_impossible_configurations(case):
    fields, sentence = BAD_CONFIGS[case]
    with pytest.raises(ValueError, match=sentence) as error:
        NeoBERTConfig(**{**FIELDS, **fields})
    assert "\n" not in str(error.value), "The message should be one sentence."


def test_training_configurations_are_understood():
    config = NeoBERTConfig(**FIELDS, rope=False, rms_norm=False, hidden_act="GELU", dropout=0.1)
    assert (config.position_embedding_type, config.norm_type, config.hidden_act) == (
        "learned",
        "layer",
        "gelu",
    )
    assert config.attention_dropout == config.hidden_dropout == 0.1
    config = NeoBERTConfig(
        vocab_size=10,
        rope=True,
        rms_norm=True,
        hidden_act="SwiGLU",
        dropout_prob=0,
        max_length=77,
        ngpt=False,
    )
    assert (config.position_embedding_type, config.norm_type, config.hidden_act) == (
        "rope",
        "rms",
        "swiglu",
    )
    assert config.max_position_embeddings == 77 and config.hidden_dropout == 0
    assert (
        NeoBERTConfig(**FIELDS)
        == NeoBERTConfig(**FIELDS)
        != NeoBERTConfig(**FIELDS, rope_theta=5.0)
    )
