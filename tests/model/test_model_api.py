"""Test the inputs and outputs that users of BERT expect.

Covers masks, positions, hidden states, attention weights, `return_dict`, dtypes and invalid input.
"""

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

from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTModel,
)


IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture(scope="module")
def model():
    """Return a tiny backbone."""
    return make_model(NeoBERTModel)


# ------------------------------------------------------------------------------------------------
# Hidden states and attention weights


VARIANTS = {"neobert": {}, "learned": LEARNED, "mixed": {"norm_type": "layer", "rope_theta": 500.0}}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@every_implementation
@torch.no_grad()
def test_hidden_states_match_the_reference(implementation, fields):
    """The hidden states of non-padding tokens equal the reference.

    There are num_hidden_layers + 1 of them: the embedding first and the normalized output last.
    """
    model = make_model(NeoBERTModel, attn_implementation=implementation, **fields)
    ids, mask = random_batch([17, 9, 1])
    outputs = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(outputs.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)

    for row, text in enumerate(texts_of(ids, mask)):
        expected, _ = reference_states(model, text)
        for i, state in enumerate(outputs.hidden_states):
            assert state.shape == (3, 17, 64)
            assert_same(state[row, : len(text)], expected[i], what=f"state {i} of text {row}")


@every_implementation
@torch.no_grad()
def test_attentions(implementation, warnings):
    """Every implementation returns the attention weights of the reference, with 0 at padding.

    Other implementations than "eager" return no weights, so the model uses "eager" and warns once.
    """
    model = make_model(NeoBERTModel, attn_implementation=implementation)
    ids, mask = random_batch([11, 6])
    for _ in range(2):
        outputs = model(ids, attention_mask=mask, output_attentions=True)
    assert len(warnings("so the eager function is used")) == (implementation != "eager")
    assert len(outputs.attentions) == 3

    for row, text in enumerate(texts_of(ids, mask)):
        states, attentions = reference_states(model, text)
        n = len(text)
        assert_same(outputs.last_hidden_state[row, :n], states[-1])
        for actual, expected in zip(outputs.attentions, attentions):
            assert actual.shape == (2, 4, 11, 11)
            assert_same(actual[row, :, :n, :n], expected, what="attention weights")
            assert actual[row, :, :n, n:].abs().sum() == 0, "A token attends to padding."
    assert model(ids, attention_mask=mask).attentions is None


# ------------------------------------------------------------------------------------------------
# Masks


DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ("left", "right"))
@every_implementation
@torch.no_grad()
def test_mask_dtypes_and_padding_sides(implementation, side, dtype):
    """Masks of any dtype, with padding on either side, give the reference states.

    With padding on the left, positions start later. The states are equal up to rounding because
    RoPE depends on relative positions only.
    """
    ids, mask = random_batch([10, 4, 7], side=side)
    for unpad in (True, False):
        model = make_model(NeoBERTModel, attn_implementation=implementation, unpad_inputs=unpad)
        hidden = model(ids, attention_mask=mask.to(dtype)).last_hidden_state
        assert_same(hidden[mask.bool()], last_states(model, *texts_of(ids, mask)), 2e-5)


@pytest.mark.parametrize("side", ("left", "right"))
@torch.no_grad()
def test_learned_positions_count_non_padding_tokens(side):
    """Learned positions count from 1 over non-padding tokens, on whichever side the padding is.

    Without a mask, tokens equal to `pad_token_id` are padding. Explicit positions are used as they
    are.
    """
    ids, mask = random_batch([10, 4], side=side)
    for argument, row in ((mask, 1), (None, 0)):
        for unpad in (True, False):
            model = make_model(NeoBERTModel, unpad_inputs=unpad, **LEARNED)
            hidden = model(ids, attention_mask=argument).last_hidden_state
            is_token = mask[row].bool()
            assert_same(hidden[row][is_token], last_states(model, ids[row][is_token]))

    positions = torch.arange(10) + 5
    explicit = model(ids[:1], position_ids=positions[None]).last_hidden_state
    assert_same(explicit[0], reference_states(model, ids[0], positions)[0][-1])


@every_implementation
@torch.no_grad()
def test_scattered_masks_keep_positions(implementation):
    """Tokens around masked ones in the middle of a text keep their positions in the row."""
    ids, mask = random_batch([12, 12])
    mask[0, [0, 3, 4, 9]] = 0
    mask[1, 1:11] = 0
    for unpad in (True, False):
        model = make_model(NeoBERTModel, attn_implementation=implementation, unpad_inputs=unpad)
        hidden = model(ids, attention_mask=mask).last_hidden_state
        for row, tokens in enumerate(mask.bool()):
            expected = reference_states(model, ids[row][tokens], torch.arange(12)[tokens])[0][-1]
            assert_same(hidden[row][tokens], expected)


@every_implementation
@pytest.mark.parametrize("unpad_inputs", (True, False))
def test_rows_of_only_padding_give_finite_outputs(implementation, unpad_inputs):
    """Rows and batches that are all padding give finite outputs, losses and gradients.

    They do not change the logits of the other rows.
    """
    model = make_model(
        NeoBERTForMaskedLM, attn_implementation=implementation, unpad_inputs=unpad_inputs
    )
    ids, mask = random_batch([9, 0, 5])
    # torch has no backward pass of flex_attention on the CPU.
    trains = implementation != "flex_attention"
    for attention_mask in (torch.zeros_like(mask), mask):
        model.zero_grad()
        labels = torch.where(attention_mask == 1, ids, -100)
        with torch.set_grad_enabled(trains):
            outputs = model(
                ids, attention_mask=attention_mask, labels=labels, output_hidden_states=True
            )
        assert all(
            torch.isfinite(x).all() for x in (outputs.loss, outputs.logits, *outputs.hidden_states)
        )
        if trains:
            outputs.loss.backward()
            assert all(torch.isfinite(p.grad).all() for p in model.parameters())

    for row, n in ((0, 9), (2, 5)):
        with torch.no_grad():
            alone = model(ids[row : row + 1, :n]).logits[0]
        assert_same(outputs.logits[row, :n], alone, what="row next to an empty row")


@torch.no_grad()
def test_padding_outputs_are_zero_and_padding_ids_are_ignored(model):
    """Outputs at padding are zero in a packed batch, and the token IDs at padding do not matter."""
    ids, mask = random_batch([9, 5])
    hidden = model(ids, attention_mask=mask).last_hidden_state
    assert hidden[1, 5:].abs().sum() == 0
    ids[1, 5:] = 77
    assert torch.equal(model(ids, attention_mask=mask).last_hidden_state, hidden)


# ------------------------------------------------------------------------------------------------
# Other inputs, dropout and dtypes


@torch.no_grad()
def test_equivalent_inputs_give_equal_outputs(model):
    """Equivalent inputs give equal outputs.

    Covers embeddings instead of IDs, `token_type_ids` (BERT's third argument, which is ignored),
    int32 IDs and positions of shape (L,).
    """
    ids, mask = random_batch([9, 5])
    expected = model(ids, attention_mask=mask)[0]
    token_types = torch.ones_like(ids)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask)[0], expected)
    assert torch.equal(model(inputs_embeds=embeds)[0], model(ids)[0])
    assert torch.equal(model(ids, attention_mask=mask, token_type_ids=token_types)[0], expected)
    assert torch.equal(model(ids, mask, token_types)[0], expected)
    assert torch.equal(model(ids.int(), position_ids=torch.arange(9))[0], model(ids)[0])


@torch.no_grad()
def test_return_dict(model):
    """With `return_dict=False`, the outputs are tuples of the requested values."""
    ids, _ = random_batch([9])
    (hidden,) = model(ids, return_dict=False)
    assert torch.equal(hidden, model(ids).last_hidden_state)
    outputs = model(ids, return_dict=False, output_hidden_states=True, output_attentions=True)
    assert len(outputs) == 3 and len(outputs[1]) == 4 and len(outputs[2]) == 3
    loss, logits = make_model(NeoBERTForMaskedLM)(ids, labels=ids, return_dict=False)
    assert loss.dim() == 0 and logits.shape == (1, 9, 200)


@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
@pytest.mark.parametrize("field", ("hidden_dropout", "attention_dropout"))
@torch.no_grad()
def test_dropout_acts_in_training_only(field, implementation):
    """Dropout changes the outputs in training mode, and not in evaluation mode."""
    model = make_model(NeoBERTModel, attn_implementation=implementation, **{field: 0.3})
    ids, mask = random_batch([30, 20])

    def run():
        return model(ids, attention_mask=mask).last_hidden_state

    assert_same(run()[0], last_states(model, ids[0]), what="output in evaluation mode")
    model.train()
    assert not torch.allclose(run(), run()), f"{field} has no effect in training mode."


@torch.no_grad()
def test_warn_once_beyond_the_context_length(model, warnings):
    """Texts longer than the context give a single warning, and the outputs are still correct.

    The context is `max_position_embeddings`, or its extension by RoPE scaling.
    """
    (ids,), _ = random_batch([140])
    # Texts of other lengths give no further warnings.
    for length in (140, 130, 140):
        hidden = model(ids[None, :length]).last_hidden_state
    (message,) = warnings("longer than the 128 tokens of max_position_embeddings")
    assert "yarn" in message, "The warning must state how to extend the context."
    assert_same(hidden[0], last_states(model, ids))

    scaled = make_model(NeoBERTModel, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    assert scaled.config.context_length == 256 and scaled.config.max_position_embeddings == 128
    scaled(random_batch([256])[0])
    assert not warnings("longer than the 256")
    scaled(random_batch([257])[0])
    assert (
        len(warnings("longer than the 256 tokens of max_position_embeddings and RoPE scaling")) == 1
    )


def test_float64_stays_float64():
    """A float64 model computes in float64, which finite-difference gradient checks need."""
    model = make_model(NeoBERTForSequenceClassification, num_labels=3).double()
    ids, mask = random_batch([9, 4])
    outputs = model(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    assert outputs.loss.dtype == outputs.logits.dtype == torch.float64

    single = make_model(NeoBERTForSequenceClassification, num_labels=3)
    with torch.no_grad():
        assert_same(
            model(ids, attention_mask=mask).logits,
            outputs.logits,
            1e-12,
            "float64 output without gradients",
        )
        assert_same(
            single(ids, attention_mask=mask).logits.double(),
            outputs.logits,
            1e-4,
            "float32 output",
        )


def test_rms_norm_computes_in_float32():
    """RMSNorm computes the mean of squares in float32, also for bfloat16 inputs.

    In bfloat16, 256 + 1 is 256, so a sum of squares would lose precision.
    """
    norm = make_model(NeoBERTModel).layer_norm.to(torch.bfloat16)
    x = (torch.randn(64, 64) * 3 + 0.5).to(torch.bfloat16)
    scale = (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = x.double() * scale * norm.weight.double()

    # A single rounding at the end is half a unit in the last of 8 bits. A norm in bfloat16 rounds
    # four times.
    relative = ((norm(x).double() - exact).abs() / exact.abs().clamp(min=1e-6)).max().item()
    assert relative <= 1.05 * 2**-8, f"RMSNorm has a relative error of {relative:.2e} in bfloat16."


# ------------------------------------------------------------------------------------------------
# Invalid input


IDS = torch.ones(2, 6, dtype=torch.long)
BAD_INPUTS = (
    ({}, "got neither"),
    ({"input_ids": IDS.tolist()}, "`input_ids` must be a tensor, got list.*return_tensors"),
    ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 6, 64)}, "got both"),
    ({"input_ids": IDS[0]}, r"\(batch, length\).*\(6,\)"),
    ({"input_ids": IDS[:, :0]}, r"at least one token.*\(2, 0\)"),
    ({"input_ids": IDS * 200}, "from 0 to 199, got 200"),
    ({"input_ids": -IDS}, "from 0 to 199, got -1"),
    ({"inputs_embeds": torch.zeros(6, 64)}, r"\(batch, length, 64\).*\(6, 64\)"),
    ({"input_ids": IDS, "attention_mask": torch.ones(2, 5)}, r"\(2, 6\).*\(2, 5\)"),
    ({"input_ids": IDS, "attention_mask": torch.ones(3, 6)}, r"\(2, 6\).*\(3, 6\)"),
    ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 6, 5)}, r"\(2, 6\).*\(2, 1, 6, 5\)"),
    ({"input_ids": IDS, "attention_mask": torch.full((2, 6), -1e4)}, "1 for tokens and 0"),
    ({"input_ids": IDS, "attention_mask": IDS * 2}, "1 for tokens and 0"),
    ({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 6])}, r"packed batch.*\(2, 6\)"),
)


@pytest.mark.parametrize("inputs, sentence", BAD_INPUTS)
def test_bad_inputs(model, inputs, sentence):
    """Invalid inputs raise an error of one line that states the rule and the value."""
    with pytest.raises(ValueError, match=sentence) as error:
        model(**inputs)
    assert "\n" not in str(error.value), "The message should be one line."


def test_flex_attention_rejects_dropout():
    """Training with attention dropout under flex_attention, which has none, raises an error."""
    model = make_model(
        NeoBERTModel, attn_implementation="flex_attention", attention_dropout=0.1
    ).train()
    with pytest.raises(ValueError, match="dropout"):
        model(IDS)


def rope(rope_type="yarn", factor=2.0, **others):
    """Return the configuration fields of RoPE scaling."""
    return {"rope_scaling": {"rope_type": rope_type, "factor": factor, **others}}


BAD_CONFIGS = (
    ({"hidden_size": 66}, "multiple of `num_attention_heads`.*66 and 4"),
    ({"hidden_size": 36}, "even for RoPE.*36 / 4 = 9"),
    ({"num_hidden_layers": 0}, "num_hidden_layers.*positive.*0"),
    ({"intermediate_size": 1}, "`intermediate_size` must be at least 2.*got 1"),
    ({"vocab_size": "many"}, "vocab_size.*'many'"),
    ({"hidden_act": "relu"}, "`hidden_act` must be one of swiglu, gelu, got 'relu'"),
    ({"position_embedding_type": "alibi"}, "position_embedding_type.*rope, learned.*alibi"),
    ({"sparse_prediction": "some"}, "`sparse_prediction` must be True or False, got 'some'"),
    ({"attention_dropout": 1.0}, "attention_dropout.*1.0"),
    ({"classifier_dropout": 1.5}, "classifier_dropout.*1.5"),
    ({"norm_eps": -1e-5}, "norm_eps"),
    ({"pad_token_id": 200}, "`pad_token_id`.*199, got 200"),
    ({"pad_token_id": True}, "pad_token_id.*True"),
    ({"unpad_inputs": "yes"}, "unpad_inputs.*'yes'"),
    ({"ngpt": True}, "ngpt"),
    ({"rope_theta": 0}, "rope_theta.*0"),
    ({"rope_theta": float("nan")}, "rope_theta.*nan"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor.*None"),
    ({"rope_scaling": 2.0}, "dictionary.*2.0"),
    (rope("longrope"), "rope_type.*linear.*longrope"),
    (rope("linear", float("inf")), "factor.*inf"),
    ({"hidden_size": 8, **rope("dynamic")}, "at least 4 .*, got 2"),
    (rope(original_max_position_embeddings=0), "positive integer.*0"),
    (rope(beta_fast=4, beta_slow=4), "`beta_fast` must be above `beta_slow`"),
    (rope(beta_slow=0), "`beta_slow` above 0"),
)


@pytest.mark.parametrize("fields, sentence", BAD_CONFIGS)
def test_invalid_configurations_are_rejected(fields, sentence):
    """Invalid configurations raise an error of one line that states the rule and the value."""
    with pytest.raises(ValueError, match=sentence) as error:
        NeoBERTConfig(**{**FIELDS, **fields})
    assert "\n" not in str(error.value), "The message should be one line."
