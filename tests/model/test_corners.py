"""Test rare inputs that usual batches do not cover.

Covers strides, dtypes, four-dimensional masks, rows that are all padding, learned positions, rare
arguments of the heads, fake and meta tensors, and names of BERT's configuration.
"""

import pytest
import torch
import transformers
from helpers.reference import (
    FIELDS,
    LEARNED,
    assert_same,
    count_rows,
    last_states,
    make_model,
    random_batch,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, vmap
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
    attention_neobert,
)
from neobert import modeling_neobert as modeling


# ------------------------------------------------------------------------------------------------
# Numerics


@torch.no_grad()
def test_non_contiguous_inputs_embeds():
    """`inputs_embeds` may be a view that is not contiguous."""
    model = make_model(NeoBERTModel)
    embeds = torch.randn(9, 2, 64).transpose(0, 1)
    expected = model(inputs_embeds=embeds.contiguous())[0]
    assert_same(model(inputs_embeds=embeds)[0], expected, 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, LEARNED], ids=["rms", "layer"])
def test_norm_eps(fields):
    """`norm_eps` is used by both types of norms."""
    model = make_model(NeoBERTModel, norm_eps=0.5, **fields)
    ids = random_batch([9])[0]
    assert_same(model(ids)[0][0], last_states(model, ids[0]))


def test_eager_computes_softmax_in_float32():
    """The eager function computes its softmax in float32, also for bfloat16 inputs."""
    query, key, value = (torch.randn(1, 2, 300, 16).to(torch.bfloat16) for _ in range(3))
    weights = modeling.eager_attention_forward(nn.Module().eval(), query, key, value, None)[1]
    scores = query @ key.transpose(-1, -2) * 0.25
    assert torch.equal(weights, scores.float().softmax(-1).to(torch.bfloat16))


@torch.no_grad()
def test_zero_positions_are_not_a_packed_batch():
    """Positions that are all zero do not identify a packed batch of one-token texts.

    The result for one row, which could be a packed batch, equals that for two rows, which cannot.
    """
    model = make_model(NeoBERTModel)
    ids = random_batch([9])[0]
    alone = model(ids, position_ids=torch.zeros(1, 9, dtype=torch.long))[0]
    twice = model(ids.repeat(2, 1), position_ids=torch.zeros(2, 9, dtype=torch.long))[0]
    assert_same(alone[0], twice[0])


def test_packing_from_restarting_positions():
    """Positions that restart give the lengths and the maximum length of a packed batch."""
    positions = torch.cat((torch.arange(4), torch.arange(6)))[None]
    packing = modeling.Packing.from_caller(torch.Size((1, 10)), None, positions, {})
    assert packing.max_length == 6 and packing.lengths == [4, 6]


# ------------------------------------------------------------------------------------------------
# Rows that are all padding, and layers that record their outputs


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_row_of_padding_is_pooled_to_zero(pooling):
    """A row that is all padding is pooled to zeros, with and without packing."""
    ids, mask = random_batch([9, 5, 7])
    mask[1] = 0
    fields = {"num_labels": 3, "classifier_pooling": pooling}
    model = make_model(NeoBERTForSequenceClassification, **fields)
    outputs = model.model(ids, mask, keep_packed=True)
    assert (model.pool(outputs.last_hidden_state, outputs.packing)[1] == 0).all()
    dense = make_model(NeoBERTForSequenceClassification, unpad_inputs=False, **fields)
    assert (dense.pool(dense.model(ids, mask)[0], attention_mask=mask)[1] == 0).all()


def test_the_padding_position_has_no_gradient():
    """The learned position of padding, row 0, gets no gradient, but those of tokens do."""
    model = make_model(NeoBERTModel, unpad_inputs=False, **LEARNED)
    ids, mask = random_batch([9, 5])
    model(ids, attention_mask=mask)[0].square().sum().backward()
    gradients = model.positional_embedding.weight.grad.abs().sum(dim=1)
    assert gradients[0] == 0 and (gradients[1:10] > 0).all()


@torch.no_grad()
def test_recorded_layer_outputs_are_not_overwritten():
    """Outputs that a patched layer records are not overwritten, and are not split into slices.

    On the CPU, RoPE rotates queries and keys in place and the feed-forward computes in slices, but
    only if no hook or patch can observe the layer.
    """
    model = make_model(NeoBERTModel)
    ids = random_batch([1100])[0]
    recorded = []
    for block in model.transformer_encoder:
        for layer in (block.qkv, block.ffn.w12):

            def forward_and_record(x, forward=layer.forward):
                recorded.append((output := forward(x), output.clone()))
                return output

            layer.forward = forward_and_record
    model(ids)
    assert len(recorded) == 6, "A layer computed its output in slices."
    assert all(torch.equal(output, copy) for output, copy in recorded)


# ------------------------------------------------------------------------------------------------
# Learned positions and four-dimensional masks


@torch.no_grad()
def test_learned_positions_skip_padding():
    """Learned positions skip padding: zeros of a 2-D mask, or else padding tokens.

    The positions of a text do not depend on the other texts of the batch.
    """
    model = make_model(NeoBERTModel, **LEARNED)
    ids = torch.tensor([[5, 0, 7, 8], [5, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    together = model(ids, attention_mask=mask)[0]
    alone = model(ids[:1], attention_mask=mask[:1])[0]
    assert_same(alone[0], together[0], what="output of a text that contains [PAD]")

    left = torch.tensor([[0, 0, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1]])
    dense = model(left, attention_mask=mask[:, None, None].bool())[0]
    assert_same(dense[0, 2:], model(left, attention_mask=mask)[0][0, 2:])


@torch.no_grad()
def test_learned_positions_with_embeddings_and_4d_masks():
    """Learned positions work with `inputs_embeds`, 4-D masks, and without a padding token."""
    model = make_model(NeoBERTModel, **LEARNED)
    ids, _ = random_batch([9, 9])
    expected = model(ids)[0]
    assert_same(model(inputs_embeds=model.encoder(ids))[0], expected, 1e-6)
    assert_same(model(ids, attention_mask=torch.ones(2, 1, 9, 9))[0], expected)
    model = make_model(NeoBERTModel, pad_token_id=None, **LEARNED)
    assert_same(model(ids)[0][0], last_states(model, ids[0]), what="output without a padding token")


@torch.no_grad()
def test_heads_accept_4d_masks():
    """The heads accept a 4-D mask of ones, which changes no result."""
    ids = random_batch([9, 9])[0]
    mask = torch.ones(2, 1, 9, 9)
    for pooling in ("cls", "mean"):
        model = make_model(NeoBERTForSequenceClassification, classifier_pooling=pooling)
        assert_same(
            model(ids, attention_mask=mask).logits, model(ids).logits, what=f"{pooling} logits"
        )

    qa_model = make_model(NeoBERTForQuestionAnswering)
    masked_lm = make_model(NeoBERTForMaskedLM)
    assert_same(qa_model(ids, attention_mask=mask).start_logits, qa_model(ids).start_logits)
    assert_same(
        masked_lm(ids, attention_mask=mask, labels=ids).loss, masked_lm(ids, labels=ids).loss
    )


@torch.no_grad()
def test_heads_pool_all_tokens_with_a_mask_of_pairs():
    """A mask of pairs of tokens contains no padding, so all tokens are pooled."""
    model = make_model(NeoBERTForSequenceClassification, classifier_pooling="mean")
    ids = random_batch([9, 9])[0]
    steps = torch.arange(9)
    near = ((steps[:, None] - steps).abs() <= 2).expand(2, 1, 9, 9)
    means = model.model(ids, attention_mask=near)[0].mean(dim=1)
    expected = model.classifier(torch.tanh(model.dense(means)))
    assert_same(model(ids, attention_mask=near).logits, expected, 1e-6)


@pytest.mark.parametrize("form", ["bool", "integer", "additive"])
@pytest.mark.parametrize("queries", [1, 9])
@torch.no_grad()
def test_heads_ignore_the_padding_of_extended_masks(form, queries):
    """The heads ignore the padding of (B, 1, 1, L) and (B, 1, L, L) masks.

    BERT and `transformers.masking_utils` make them of 2-D masks.
    """
    ids, mask = random_batch([9, 5])
    extended = mask[:, None, None].expand(-1, -1, queries, -1)
    if form == "bool":
        extended = extended.bool()
    elif form == "additive":
        extended = (1 - extended.float()) * torch.finfo(torch.float32).min

    for pooling in ("cls", "mean"):
        model = make_model(NeoBERTForSequenceClassification, classifier_pooling=pooling)
        expected = model(ids, attention_mask=mask).logits
        assert_same(model(ids, attention_mask=extended).logits, expected, 1e-6, pooling)

    qa_model = make_model(NeoBERTForQuestionAnswering)
    expected = qa_model(ids, attention_mask=mask).start_logits
    assert_same(qa_model(ids, attention_mask=extended).start_logits, expected, 1e-6)
    masked_lm = make_model(NeoBERTForMaskedLM)
    expected = masked_lm(ids, attention_mask=mask, labels=ids).loss
    assert_same(masked_lm(ids, attention_mask=extended, labels=ids).loss, expected, 1e-6)

    learned = make_model(NeoBERTModel, pad_token_id=None, **LEARNED)
    expected = learned(ids, attention_mask=mask)[0][mask.bool()]
    assert_same(learned(ids, attention_mask=extended)[0][mask.bool()], expected, 1e-6)


@torch.no_grad()
def test_4d_mask_is_broadcast_over_rows():
    """A 4-D mask of batch size 1 applies to all rows."""
    model = make_model(NeoBERTModel)
    steps = torch.arange(9)
    ids = random_batch([9, 9])[0]
    near = ((steps[:, None] - steps).abs() <= 2)[None, None]
    expected = model(ids, attention_mask=near.expand(2, 1, 9, 9))[0]
    assert_same(model(ids, attention_mask=near)[0], expected, 1e-6)


@torch.no_grad()
def test_2d_mask_is_broadcast_over_rows():
    """A 2-D mask of batch size 1 applies to all rows."""
    ids = random_batch([9, 9])[0]
    row = torch.tensor([[1] * 6 + [0] * 3])
    for head in (NeoBERTModel, NeoBERTForSequenceClassification, NeoBERTForQuestionAnswering):
        for unpad in (True, False):
            model = make_model(head, unpad_inputs=unpad)
            expected = model(ids, attention_mask=row.expand(2, 9))[0]
            assert_same(model(ids, attention_mask=row)[0], expected, 1e-6, head.__name__)


@torch.no_grad()
def test_registered_function_receives_additive_4d_mask_unchanged():
    """An additive 4-D mask is passed unchanged to a registered function that takes such masks."""
    AttentionInterface.register("additive_here", modeling.eager_attention_forward)
    AttentionMaskInterface.register("additive_here", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model = make_model(NeoBERTModel)
    ids = random_batch([8])[0]
    mask = torch.zeros(1, 1, 8, 8).masked_fill(torch.ones(8, 8).triu(3).bool(), -1e9)
    expected = model(ids, attention_mask=mask)[0]
    model.config._attn_implementation = "additive_here"
    assert_same(model(ids, attention_mask=mask)[0], expected, what="output with an additive mask")


def test_registered_mask_function_must_not_skip_the_mask():
    """A registered mask function is called with arguments that forbid it to skip the mask."""
    call = {}
    config = NeoBERTConfig(**FIELDS)
    hidden = torch.zeros(2, 9, 64)
    attention_neobert._registered_mask(
        lambda **arguments: call.update(arguments), None, None, config, hidden
    )
    assert call["allow_is_causal_skip"] is call["allow_is_bidirectional_skip"] is False


# ------------------------------------------------------------------------------------------------
# Labels and outputs


@torch.no_grad()
def test_int32_labels():
    """Labels of type int32 give the same losses as int64."""
    ids = random_batch([9])[0]
    position = torch.tensor([3])
    qa_model = make_model(NeoBERTForQuestionAnswering)
    masked_lm = make_model(NeoBERTForMaskedLM)
    short, long = ({"start_positions": p, "end_positions": p} for p in (position.int(), position))
    assert torch.equal(qa_model(ids, **short).loss, qa_model(ids, **long).loss)
    assert torch.equal(masked_lm(ids, labels=ids.int()).loss, masked_lm(ids, labels=ids).loss)


@pytest.mark.parametrize("unpad_inputs", [True, False])
def test_uint8_labels_at_padding(unpad_inputs):
    """Labels of type uint8, which cannot be -100, give the same loss as int64."""
    ids, mask = random_batch([9, 4])
    model = make_model(NeoBERTForTokenClassification, num_labels=2)
    labels = ids % 2
    batch = {"input_ids": ids, "attention_mask": mask, "unpad_inputs": unpad_inputs}
    expected = model(**batch, labels=labels).loss
    assert torch.equal(model(**batch, labels=labels.to(torch.uint8)).loss, expected)


def test_invalid_labels_are_rejected():
    """Boolean labels and multi-label values outside of [0, 1] raise errors."""
    ids = random_batch([9])[0]
    with pytest.raises(ValueError, match="integers.*bool"):
        make_model(NeoBERTForMaskedLM)(ids, labels=ids > 0)
    fields = {"num_labels": 3, "problem_type": "multi_label_classification"}
    with pytest.raises(ValueError, match="between 0 and 1 .*, got values from -1.0 to 1.0"):
        make_model(NeoBERTForSequenceClassification, **fields)(
            ids, labels=torch.tensor([[0.0, 1.0, -1.0]])
        )


@torch.no_grad()
def test_return_dict_false_in_configuration():
    """With `return_dict=False` in the configuration, the outputs are a tuple."""
    outputs = make_model(NeoBERTForMaskedLM, return_dict=False)(random_batch([9])[0])
    assert isinstance(outputs, tuple) and outputs[0].shape == (1, 9, 200)


@torch.no_grad()
def test_compiled_sparse_prediction_returns_all_logits():
    """A compiled model with `sparse_prediction` returns the logits of all tokens.

    The number of labeled tokens depends on values, so their logits would have no static shape.
    """
    torch.compiler.reset()
    model = make_model(NeoBERTForMaskedLM, sparse_prediction=True)
    ids = random_batch([9])[0]
    labels = ids.masked_fill(ids % 2 == 0, -100)
    outputs = torch.compile(model, backend="eager", fullgraph=True)(ids, labels=labels)
    assert_same(outputs.loss, model(ids, labels=labels).loss)
    assert outputs.logits.shape == (1, 9, 200)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unpad", [True, False])
def test_question_answering_logits_are_finite(dtype, unpad):
    """The logits of padding are finite in every use, and their probability is 0.

    Sums of logits in float16, a smoothed loss, and distillation at a low temperature would not be
    finite with logits of -inf or the minimum of the dtype.
    """
    model = make_model(NeoBERTForQuestionAnswering, unpad_inputs=unpad).to(dtype)
    ids, mask = random_batch([9, 5])
    logits = model(ids, attention_mask=mask).start_logits
    assert (logits + logits).half().isfinite().all()

    logits = logits.float()
    labels = torch.tensor([1, 1])
    assert nn.functional.cross_entropy(logits, labels, label_smoothing=0.1).isfinite()
    sharpened = (logits / 0.5).log_softmax(-1)
    assert nn.functional.kl_div(sharpened, sharpened.exp(), reduction="batchmean").isfinite()
    assert (logits.softmax(-1)[mask == 0] == 0).all()


# ------------------------------------------------------------------------------------------------
# Replaced modules, other devices, subclasses and the configuration


@torch.no_grad()
def test_input_id_check_uses_the_current_embedding():
    """The check of input IDs uses the size of the current embedding, not `vocab_size`."""
    model = make_model(NeoBERTModel)
    model.set_input_embeddings(nn.Embedding(300, 64))
    assert model(torch.full((1, 4), 299))[0].isfinite().all()


def test_dynamic_rope_on_the_meta_device():
    """Dynamic RoPE, which depends on the longest text, runs on the meta device without values."""
    rope = {"rope_type": "dynamic", "factor": 2.0}
    with torch.device("meta"):
        model = NeoBERTModel(NeoBERTConfig(**FIELDS, rope_scaling=rope))
    ids = torch.ones(2, 6, dtype=torch.long, device="meta")
    assert model(ids, attention_mask=torch.ones(2, 6, device="meta"))[0].shape == (2, 6, 64)


@pytest.mark.parametrize("model_class", (NeoBERTModel, NeoBERTForTokenClassification))
def test_hooks_of_the_model_itself_do_not_disable_packing(model_class):
    """A hook of the outermost model receives the batch of the caller, so blocks stay packed."""
    model = make_model(model_class)
    ids, mask = random_batch([9, 4])
    shapes = []
    model.register_forward_hook(lambda module, args, output: shapes.append(output[0].shape))
    token_counts = count_rows(getattr(model, "model", model).layer_norm)
    model(ids, attention_mask=mask)
    assert shapes[0][:2] == (2, 9)
    assert token_counts == [13]


def test_causal_attention_is_refused():
    model = make_model(NeoBERTModel)
    ids, _ = random_batch([9, 9])
    assert_same(model(ids, is_causal=False)[0], model(ids)[0])
    with pytest.raises(ValueError, match="`is_causal` must be False, got True"):
        model(ids, is_causal=True)


def test_unknown_problem_types_are_refused():
    """An unknown problem type is refused when the model is created, and when it is used."""
    with pytest.raises(ValueError, match="`problem_type`"):
        make_model(NeoBERTForSequenceClassification, problem_type="multi_label")

    model = make_model(NeoBERTForSequenceClassification, num_labels=3)
    model.config.problem_type = "multilabel"
    ids, _ = random_batch([9, 9])
    with pytest.raises(ValueError, match="`problem_type` must be .* got 'multilabel'"):
        model(ids, labels=torch.ones(2, 3))


def test_refused_labels_do_not_determine_the_problem_type():
    model = make_model(NeoBERTForSequenceClassification, num_labels=3)
    ids, _ = random_batch([9, 9])
    with pytest.raises(ValueError, match=r"must be integers \(int64\) for one label per text, or"):
        model(ids, labels=torch.tensor([0.0, 1.0]))
    assert model.config.problem_type is None
    assert torch.isfinite(model(ids, labels=torch.tensor([0, 1])).loss)


@pytest.mark.parametrize("unpad", [True, False])
@torch.no_grad()
def test_means_have_the_precision_of_the_model(unpad):
    """Means are computed in float64 for a float64 model, with any default dtype."""
    model = make_model(NeoBERTForSequenceClassification, classifier_pooling="mean")
    model = model.double()
    model.config.unpad_inputs = unpad
    ids, mask = random_batch([9, 4])
    hidden = model.model(ids, attention_mask=mask)[0]
    means = torch.stack([hidden[0, :9].mean(0), hidden[1, :4].mean(0)])
    expected = model.classifier(torch.tanh(model.dense(means)))

    torch.set_default_dtype(torch.bfloat16)
    try:
        logits = model(ids, attention_mask=mask).logits
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(logits, expected, atol=1e-13, rtol=0)


@torch.no_grad()
def test_multiple_choice_with_shared_positions_and_wrong_shapes():
    """Positions (L,) apply to all candidates, and inputs without candidates are refused."""
    model = make_model(NeoBERTForMultipleChoice)
    ids = random_batch([6] * 6)[0].view(2, 3, 6)
    expected = model(ids).logits
    assert_same(model(ids, position_ids=torch.arange(6)).logits, expected, 1e-6)
    with pytest.raises(ValueError, match=r"shape \(batch, choices, length\), .* got \(3, 6\)"):
        model(ids[0])
    with pytest.raises(ValueError, match=r"shape \(batch, choices, length\), got \(6, 6\)"):
        model(ids, attention_mask=torch.ones(6, 6))
    with pytest.raises(ValueError, match=r"broadcasts to .*, \(2, 3, 6\), got \(5,\)"):
        model(ids, position_ids=torch.arange(5))
    with pytest.raises((TypeError, ValueError), match="`attention_mask` must be a tensor"):
        model(ids, attention_mask=[[[1] * 6] * 3] * 2)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mask_dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_additive_masks_of_any_dtype(implementation, mask_dtype, dtype):
    """An additive mask may have another dtype than the model, also with values beyond its range."""
    model = make_model(NeoBERTModel).to(dtype)
    model.set_attn_implementation(implementation)
    ids, mask = random_batch([9, 5])
    additive = (1 - mask[:, None, None].to(mask_dtype)) * torch.finfo(mask_dtype).min
    expected = model(ids, attention_mask=mask, unpad_inputs=False)[0][mask.bool()]
    hidden = model(ids, attention_mask=additive)[0][mask.bool()]
    assert_same(hidden, expected, 1e-6 if dtype == torch.float32 else 2e-2)


def test_scaling_without_a_type_is_refused():
    with pytest.raises(ValueError, match="`rope_scaling` with a `factor` must have a `rope_type`"):
        NeoBERTConfig(rope_scaling={"factor": 2.0})


def test_hook_without_module_is_a_user_hook():
    """A hook whose `__module__` is None counts as a hook of the user."""

    def hook(*args):
        pass

    hook.__module__ = None
    assert not attention_neobert.is_machinery(hook)


def test_blocks_are_not_split_between_devices():
    """Loaders with a device map must keep each block on a single device."""
    assert "NeoBERTBlock" in make_model(NeoBERTModel)._no_split_modules


def test_varlen_kernel_supports_head_dim_256(monkeypatch):
    """torch's variable-length kernel supports a head dimension of 256, the maximum."""
    monkeypatch.setattr(attention_neobert, "varlen_attn", object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = NeoBERTConfig(**{**FIELDS, "hidden_size": 512, "num_attention_heads": 2})
    device = torch.device("cuda")
    assert attention_neobert._varlen_obstacle(config, device, torch.bfloat16, False) is None


class _OwnModules(modeling.NeoBERTPreTrainedModel):
    """Model of a user with further modules next to the backbone."""

    def __init__(self, config):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.convolution = nn.Conv1d(64, 8, 3)
        self.lstm = nn.LSTM(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.post_init()


def test_modules_of_a_subclass_are_initialized(tmp_path):
    """The further modules of a user's subclass are initialized when it is loaded.

    transformers 5 loads on the meta device, so a module without initialization would have the
    previous contents of the memory, which the test fills with 7.
    """
    make_model(NeoBERTModel).save_pretrained(tmp_path)
    filled = [torch.full((1536,), 7.0) for _ in range(50)]
    del filled
    model = _OwnModules.from_pretrained(tmp_path)
    assert 0.005 < model.convolution.weight.std() < 0.2 and model.convolution.weight.abs().max() < 1
    # Before 5.1, transformers does not initialize recurrent layers and running statistics.
    if not transformers.__version__.startswith(("4.", "5.0")):
        assert model.lstm.weight_hh_l0.abs().max() < 1
        assert (model.norm.running_mean == 0).all() and (model.norm.running_var == 1).all()


@torch.no_grad()
def test_fake_tensors():
    """The model runs on fake tensors, which have no values, with a mask or with positions."""
    model = make_model(NeoBERTForSequenceClassification, num_labels=2)
    ids, mask = random_batch([9, 5])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1])}
        outputs = model(**{name: mode.from_tensor(x) for name, x in inputs.items()})
        positions = mode.from_tensor(torch.arange(9)[None])
        with_positions = model(mode.from_tensor(ids[:1]), position_ids=positions)
    assert outputs.logits.shape == (2, 2) and with_positions.logits.shape == (1, 2)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["layer_norm", "transformer_encoder.0.ffn_norm", "transformer_encoder.1.qkv"]
)
def test_vmap_over_a_weight(name):
    """`torch.func.vmap` over values of a weight gives the outputs of each value.

    The slices and in-place operations of CPU inference do not support torch.func.
    """
    model = make_model(NeoBERTModel)
    ids = random_batch([9])[0]
    weight = model.get_parameter(f"{name}.weight")

    def run(weight):
        return functional_call(model, {f"{name}.weight": weight}, kwargs={"input_ids": ids})[0]

    both = torch.stack([weight, 2 * weight])
    assert_same(
        vmap(run)(both),
        torch.stack([run(weight) for weight in both]),
        what=f"output for two values of {name}",
    )


def test_configuration_equality_and_copy():
    """Configurations compare by their fields, and `to_dict` returns a copy.

    transformers 5 makes configurations dataclasses, whose generated comparison would ignore the
    fields of NeoBERTConfig.
    """
    config = NeoBERTConfig(**FIELDS)
    assert config == NeoBERTConfig(**FIELDS) != NeoBERTConfig(**FIELDS, rope_theta=5.0)
    assert config != "neobert" and config != None  # noqa: E711
    config.to_dict()["auto_map"].clear()
    assert config.to_dict()["auto_map"]


def test_bert_field_names(tmp_path):
    """BERT's names of fields can be read, passed and overridden, but are not saved."""
    names = {
        "hidden_dropout_prob": "hidden_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "norm_eps",
        "initializer_range": "classifier_init_range",
    }
    fields = dict(zip(names, (0.2, 0.3, 1e-3, 0.05)))
    config = NeoBERTConfig(**FIELDS, **fields)
    for name, value in fields.items():
        assert getattr(config, name) == getattr(config, names[name]) == value
    assert not set(fields) & set(config.to_dict()), "config.json must have one name per field."

    NeoBERTConfig(**FIELDS).save_pretrained(tmp_path)
    assert NeoBERTConfig.from_pretrained(tmp_path, **fields) == config
    assert config.bos_token_id is config.eos_token_id is None
    with pytest.raises(ValueError, match="`hidden_dropout` must be a probability"):
        NeoBERTConfig(hidden_dropout_prob=1.5)
