"""Test attention.

The eager, sdpa, flex, flash and user-defined functions give the same outputs and gradients for
padded batches, packed batches and single texts. Texts in a packed batch do not affect each other,
and sdpa allocates no tensor of shape (B, H, L, L).
"""

import pytest
import torch
from helpers.reference import (
    LEARNED,
    assert_same,
    install_flash,
    last_states,
    make_model,
    packed_batch,
    random_batch,
    reference_states,
    texts_of,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DataCollatorWithFlattening
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neobert import NeoBERTForMaskedLM, NeoBERTModel, attention_neobert


LENGTHS = [12, 3, 12, 1, 7]


@pytest.fixture
def batch():
    """Return input_ids, attention_mask and the list of unpadded texts."""
    ids, mask = random_batch(LENGTHS)
    return ids, mask, texts_of(ids, mask)


# ------------------------------------------------------------------------------------------------
# Implementations


@pytest.fixture
def flash(monkeypatch):
    """Replace the flash-attn package with a reference implementation."""
    return install_flash(monkeypatch)


def my_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Compute attention with a boolean mask, as a function that a user registers."""
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("my_attention", my_attention)
ALL = ("eager", "sdpa", "flex_attention", "flash_attention_2", "my_attention")


every_implementation = pytest.mark.parametrize("implementation", ALL)
with_gradients = pytest.mark.parametrize(
    "implementation", [name for name in ALL if name != "flex_attention"]
)


def build(model_class, implementation, **fields):
    """Return a tiny model with this attention implementation."""
    model = make_model(model_class, **fields)
    if implementation == "flash_attention_2":
        # `set_attn_implementation` would require the flash-attn package.
        model.config._attn_implementation = implementation
    else:
        model.set_attn_implementation(implementation)
    return model


# ------------------------------------------------------------------------------------------------
# Outputs


@pytest.mark.parametrize("fields", ({}, LEARNED), ids=("neobert", "learned"))
@every_implementation
@torch.no_grad()
def test_all_layouts_match_the_reference(implementation, fields, flash, batch):
    """Every layout of a batch gives the outputs of the float64 reference."""
    ids, mask, texts = batch
    model = build(NeoBERTModel, implementation, **fields)
    dense = build(NeoBERTModel, implementation, unpad_inputs=False, **fields)
    expected = last_states(model, *texts)
    for name, actual in {
        "padded, packed by the model": model(ids, attention_mask=mask)[0][mask.bool()],
        "padded, not packed": dense(ids, attention_mask=mask)[0][mask.bool()],
        "packed by the caller": model(**packed_batch(texts))[0][0],
        "alone": torch.cat([model(text[None])[0][0] for text in texts]),
    }.items():
        assert_same(actual, expected, what=f"output of {implementation}, {name},")


@pytest.mark.parametrize("flash_kwargs", (True, False))
@every_implementation
@torch.no_grad()
def test_flattening_collator(implementation, flash_kwargs, flash, batch, warnings):
    """Batches of `DataCollatorWithFlattening` are packed, with and without its flash arguments.

    Without the flash arguments, only the positions mark the boundaries between texts. A warning
    states that this is deprecated.
    """
    *_, texts = batch
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash_kwargs)
    flat = collator([{"input_ids": text.tolist()} for text in texts])
    del flat["labels"]
    assert ("cu_seq_lens_q" in flat) == flash_kwargs
    model = build(NeoBERTModel, implementation)
    assert_same(model(**flat).last_hidden_state[0], last_states(model, *texts))
    assert len(warnings("Pass cu_seq_lens_q")) == (not flash_kwargs)


# ------------------------------------------------------------------------------------------------
# Gradients


@with_gradients
def test_gradients_match_single_texts(implementation, flash, batch):
    """Every layout of a batch gives the gradients of single texts."""
    ids, mask, texts = batch
    labels = torch.where(mask == 1, (ids * 7) % 200, -100)
    count = int((labels != -100).sum())

    def gradients(model, *batches):
        model.zero_grad()
        for batch in batches:
            model(**batch, num_items_in_batch=count).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    model = build(NeoBERTForMaskedLM, implementation)
    dense = build(NeoBERTForMaskedLM, implementation, unpad_inputs=False)
    alone = [{"input_ids": text[None], "labels": (text[None] * 7) % 200} for text in texts]
    expected = gradients(build(NeoBERTForMaskedLM, "eager"), *alone)
    packed = {**packed_batch(texts), "labels": labels[mask.bool()][None]}
    padded = {"input_ids": ids, "attention_mask": mask, "labels": labels}

    for layout, actual in {
        "alone": gradients(model, *alone),
        "packed by the caller": gradients(model, packed),
        "packed by the model": gradients(model, padded),
        "padded": gradients(dense, padded),
    }.items():
        for name, gradient in actual.items():
            assert_same(gradient, expected[name], 2e-5, f"gradient of {name}, {layout},")


# ------------------------------------------------------------------------------------------------
# Arguments of attention functions


@torch.no_grad()
def test_registered_function_receives_unchanged_arguments():
    """Check the arguments of a registered attention function.

    It receives queries, keys, values, a boolean mask, the scaling, the dropout, and the arguments
    of the caller, which the model passes on without changing or copying them.
    """
    calls = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        calls.append((module, query, key, value, attention_mask, kwargs))
        return my_attention(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("spy", spy)
    model = build(NeoBERTModel, "spy", attention_dropout=0.5)

    ids, mask = random_batch([9, 5])
    token = object()
    model(ids, attention_mask=mask, attention_instances=token)

    assert len(calls) == 3
    for layer, (module, query, key, value, allowed, kwargs) in enumerate(calls):
        assert not module.is_causal and module.layer_idx == layer
        assert module.config is model.config
        assert query.shape == key.shape == value.shape == (2, 4, 9, 16)
        assert kwargs["attention_instances"] is token
        assert kwargs["scaling"] == 0.25 and kwargs["dropout"] == 0.0
        # With position_ids, flash attention would search them for packed texts in every layer.
        assert "position_ids" not in kwargs
        assert allowed.dtype == torch.bool and allowed.shape == (2, 1, 1, 9)
        assert torch.equal(allowed[:, 0, 0], mask.bool())

    calls.clear()
    model.train()(ids, attention_mask=mask)
    assert calls[0][-1]["dropout"] == 0.5

    calls.clear()
    packed = packed_batch([ids[0, :5], ids[0, :3]])
    model.eval()(**packed)
    *_, allowed, kwargs = calls[0]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        assert kwargs[name] is packed[name], f"The model did not pass {name} on unchanged."
    expected = torch.block_diag(torch.ones(5, 5), torch.ones(3, 3)).bool()
    assert torch.equal(allowed.expand(1, 1, 8, 8)[0, 0], expected)


@torch.no_grad()
def test_registered_function_receives_additive_masks():
    """A function registered with the mask function of eager receives an additive mask.

    The mask has the dtype of the model. It is 0 where attention is allowed, and the lowest finite
    value elsewhere.
    """
    mask_dtypes = []

    def additive(module, query, key, value, attention_mask, scaling=None, **kwargs):
        mask_dtypes.append(attention_mask.dtype)
        scores = query @ key.transpose(-1, -2) * scaling + attention_mask
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("my_additive", additive)
    ALL_MASK_ATTENTION_FUNCTIONS.register("my_additive", ALL_MASK_ATTENTION_FUNCTIONS["eager"])

    ids, mask = random_batch([9, 5])
    model = build(NeoBERTModel, "my_additive")

    hidden = model(ids, attention_mask=mask)[0]
    assert_same(hidden[mask.bool()], last_states(model, *texts_of(ids, mask)))
    assert torch.isfinite(model.to(torch.bfloat16)(ids, attention_mask=mask)[0]).all()
    assert mask_dtypes == [torch.float32] * 3 + [torch.bfloat16] * 3


@torch.no_grad()
def test_paged_eager_function_receives_additive_masks():
    """The paged eager functions of transformers add the mask, and have no mask function."""
    name = next(name for name in ALL_ATTENTION_FUNCTIONS if "paged" in name and "eager" in name)
    ids, mask = random_batch([9, 5])
    model = build(NeoBERTModel, name)
    hidden = model(ids, attention_mask=mask)[0]
    assert_same(hidden[mask.bool()], last_states(build(NeoBERTModel, "sdpa"), *texts_of(ids, mask)))


def test_eager_attention_is_exact_in_float64():
    """In float64, the weights are not rounded to float32."""
    query, key, value = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    output, weights = attention_neobert.eager_attention_forward(
        torch.nn.Module(), query, key, value, None
    )
    expected = (query @ key.mT / 2).softmax(-1)
    assert (weights - expected).abs().max() < 1e-15
    assert (output - (expected @ value).transpose(1, 2)).abs().max() < 1e-14


@torch.no_grad()
def test_packing_ignores_the_default_device(batch):
    """The indices of a batch are on its device, whatever device new tensors have."""
    ids, mask, texts = batch
    model = build(NeoBERTModel, "sdpa")
    with torch.device("meta"):
        hidden = model(ids, attention_mask=mask)[0]
    assert_same(hidden[mask.bool()], last_states(model, *texts))


@torch.no_grad()
def test_every_token_attends_to_at_least_one_token():
    """Every token may attend to at least one token, also in a row that contains only padding.

    Many kernels return NaN for a softmax over no values, so such a row attends to all its tokens.
    """
    masks = []

    def boolean(module, query, key, value, attention_mask, **kwargs):
        masks.append(attention_mask)
        return query.transpose(1, 2), None

    AttentionInterface.register("my_boolean", boolean)

    ids, mask = random_batch([9, 5, 9])
    mask[2] = 0
    build(NeoBERTModel, "my_boolean")(ids, attention_mask=mask)

    allowed = masks[0].expand(3, 1, 9, 9)
    assert allowed.any(dim=-1).all() and torch.equal(allowed[1, 0, 0], mask[1].bool())


@pytest.mark.parametrize("unpad_inputs", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@torch.no_grad()
def test_flash_attention_arguments(flash, dtype, unpad_inputs, batch):
    """Check the arguments of the flash-attn kernels.

    They take int32 offsets and a scale. The maximum lengths are integers, because a tensor would
    require a synchronization with the device in every layer.
    """
    fields = {"unpad_inputs": unpad_inputs, "attention_dropout": 0.25}
    model = build(NeoBERTModel, "flash_attention_2", **fields).to(dtype)
    ids, mask, texts = batch
    model(ids, attention_mask=mask)

    assert len(flash.calls) == 3
    for call in flash.calls:
        for offsets in (call["cu_seqlens_q"], call["cu_seqlens_k"]):
            assert offsets.dtype == torch.int32 and offsets.is_contiguous() and offsets[0] == 0
            assert offsets.diff().tolist() == (sorted(LENGTHS) if unpad_inputs else LENGTHS)
        assert call["max_seqlen_q"] == call["max_seqlen_k"] == 12
        # Some versions of transformers compute a tensor from a 2-D mask.
        assert isinstance(call["max_seqlen_q"], int) or not unpad_inputs
        for x in (call[name] for name in "qkv"):
            assert x.shape == (sum(LENGTHS), 4, 16) and x.dtype == dtype and x.stride(-1) == 1
        assert not call["causal"] and (call["softmax_scale"], call["dropout_p"]) == (0.25, 0.0)

    flash.calls.clear()
    model.train()(**packed_batch(texts))
    assert flash.calls[0]["dropout_p"] == 0.25
    assert flash.calls[0]["cu_seqlens_q"].dtype == torch.int32

    flash.calls.clear()
    model.eval()(ids[:1])
    assert flash.calls[0]["q"].shape == (1, 12, 4, 16), (
        "The dense kernel must run for a batch without padding."
    )
    assert flash.calls[0]["causal"] is False and flash.calls[0]["softmax_scale"] == 0.25


@torch.no_grad()
def test_hub_kernel_receives_packed_batches(flash, batch):
    """A kernel from the Hub receives packed batches.

    transformers registers such a kernel under the name of its repository, with the mask function of
    flash attention.
    """
    calls = []

    def kernel(module, query, key, value, attention_mask, **kwargs):
        calls.append((attention_mask, kwargs))
        bounds = kwargs["cu_seq_lens_q"].diff().tolist()
        parts = zip(*(x[0].transpose(0, 1).split(bounds) for x in (query, key, value)))
        return torch.cat([flash.attend(*part, kwargs["scaling"]) for part in parts])[None], None

    AttentionInterface.register("some/kernel", kernel)
    mask_function = ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"]
    ALL_MASK_ATTENTION_FUNCTIONS.register("some/kernel", mask_function)
    model = make_model(NeoBERTModel)
    model.config._attn_implementation = "some/kernel"

    ids, mask, texts = batch
    hidden = model(ids, attention_mask=mask).last_hidden_state

    assert calls[0][0] is None and calls[0][1]["max_length_q"] == 12
    assert_same(hidden[mask.bool()], last_states(model, *texts))


# ------------------------------------------------------------------------------------------------
# Batches that the caller packed


BOUNDS = torch.tensor([0, 9, 12, 19], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": BOUNDS}
PACKED_TEXTS = texts_of(*random_batch([9, 3, 7]))
WAYS = {
    "offsets alone": {**PACKED, "cu_seq_lens_k": None, "max_length_q": None, "max_length_k": None},
    "int64 offsets": {"cu_seq_lens_q": BOUNDS.long()},
    "empty texts": {"cu_seq_lens_q": torch.tensor([0, 0, 9, 9, 12, 19, 19])},
    "tensors": {**PACKED, "max_length_q": torch.tensor(9), "max_length_k": torch.tensor(9)},
    "a mask of ones": {**PACKED, "attention_mask": torch.ones(1, 19, dtype=torch.long)},
    "positions": {"position_ids": torch.cat([torch.arange(n).int() for n in (9, 3, 7)])},
}


@pytest.mark.parametrize("packing", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("implementation", ("sdpa", "flash_attention_2"))
@torch.no_grad()
def test_packing_argument_formats(implementation, packing, flash):
    """Every supported form of the packing arguments gives the outputs of single texts."""
    model = build(NeoBERTModel, implementation)
    hidden = model(torch.cat(PACKED_TEXTS)[None], **packing).last_hidden_state
    assert_same(hidden[0], last_states(model, *PACKED_TEXTS))
    for call in flash.calls:
        assert call["cu_seqlens_q"].dtype == call["cu_seqlens_k"].dtype == torch.int32


@pytest.mark.parametrize(
    "packing,words",
    (
        ({"cu_seq_lens_k": BOUNDS}, "must be passed with `cu_seq_lens_k`"),
        ({"cu_seq_lens_q": [0, 9, 12, 19]}, r"of shape \(sequences \+ 1,\), got list."),
        ({**PACKED, "cu_seq_lens_k": [0, 9, 12, 19]}, "`cu_seq_lens_k` must be .*, got list."),
        ({"cu_seq_lens_q": torch.tensor([[0, 19]])}, r"sequences \+ 1,\), got \[1, 2\]."),
        ({**PACKED, "cu_seq_lens_k": torch.tensor([0, 10, 12, 19])}, "must equal `cu_seq_lens_q`"),
        ({"cu_seq_lens_q": torch.tensor([0, 12, 9, 19])}, "must rise from 0 to .* tokens, 19"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 12])}, "must rise from 0 to .* tokens, 19"),
        ({"cu_seq_lens_q": torch.tensor([1, 9, 19])}, "must rise from 0 to .* tokens, 19"),
        ({**PACKED, "max_length_q": 3}, "at least the length of the longest sequence, 9, got 3"),
        ({**PACKED, "max_length_k": 8}, "`max_length_k` must be at least"),
        ({**PACKED, "attention_mask": torch.tensor([[1] * 18 + [0]])}, "has no padding"),
    ),
)
def test_inconsistent_packing_arguments_are_rejected(packing, words):
    """Packing arguments that contradict each other raise a ValueError with an explanation.

    Without the check, each case would silently mix texts or hide a part of one.
    """
    with pytest.raises(ValueError, match=words):
        make_model(NeoBERTModel)(torch.cat(PACKED_TEXTS)[None], **packing)


@pytest.mark.parametrize("implementation", ("sdpa", "flash_attention_2", "eager"))
@torch.no_grad()
def test_hidden_states_and_attentions_of_a_packed_batch(implementation, flash):
    """Hidden states and attention weights keep the packed shape of the caller.

    The weights between different texts are zero.
    """
    model = build(NeoBERTModel, implementation)
    packed = packed_batch(PACKED_TEXTS[:2])
    outputs = model(**packed, output_hidden_states=True, output_attentions=True)

    first, second = (reference_states(model, text) for text in PACKED_TEXTS[:2])
    for layer, state in enumerate(outputs.hidden_states):
        assert_same(state[0], torch.cat([first[0][layer], second[0][layer]]))
    for weights, expected in zip(outputs.attentions, second[1]):
        assert (weights[0, :, :9, 9:] == 0).all() and (weights[0, :, 9:, :9] == 0).all()
        assert_same(weights[0, :, 9:, 9:], expected, what="weights")


# ------------------------------------------------------------------------------------------------
# Kernel selection


@torch.no_grad()
def test_switching_the_implementation_of_a_loaded_model(flash, batch):
    """`set_attn_implementation` takes effect in the next forward pass.

    `attention_backend` describes the kernel of the new implementation.
    """
    ids, mask, _ = batch
    model = make_model(NeoBERTForMaskedLM)
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    sentences = {}

    for name, words in (
        ("eager", "eager sequence by sequence"),
        ("flex_attention", "block mask"),
        ("my_attention", "not packed"),
        ("sdpa", "sequence by sequence"),
    ):
        model.set_attn_implementation(name)
        assert_same(model(ids, attention_mask=mask).logits[mask.bool()], expected, what=name)
        sentences[name] = model.attention_backend()
        assert sentences[name].startswith(f"{name} on cpu in float32: ")
        assert words in sentences[name]

    assert "attn_implementation='sdpa' is faster" in sentences["eager"]
    assert "need a CUDA device" in sentences["sdpa"]

    with torch.autocast("cpu", torch.bfloat16):
        assert "on cpu in bfloat16" in model.attention_backend()
    model.config.unpad_inputs = False
    assert "unpad_inputs is off" in model.attention_backend()
    model.config._attn_implementation = "flash_attention_2"
    assert "need a GPU and float16 or bfloat16" in model.attention_backend()

    kernel, reason = attention_neobert.attention_kernel(
        model.config, "flash_attention_2", torch.device("xpu"), torch.bfloat16, training=False
    )
    assert (kernel, reason) == ("flash", None), "transformers 5 has flash kernels for xpu."


@pytest.mark.parametrize("width,words", [(512, None), (528, "a head_dim of at most 256, not 264")])
def test_flash_attention_2_unsupported_head_dim(width, words):
    """flash_attention_2 supports a head_dim of at most 256.

    `attention_kernel` returns a reason why the kernel cannot run with a larger one.
    """
    config = make_model(NeoBERTModel, hidden_size=width, num_attention_heads=2).config
    kernel, reason = attention_neobert.attention_kernel(
        config, "flash_attention_2", torch.device("cuda"), torch.bfloat16, training=False
    )
    assert (kernel, reason) == ("flash", words and f"they need {words}")


@pytest.mark.parametrize("variable,expected", [("0", False), ("1", True)])
def test_flash_attention_2_receives_dropout_and_determinism(flash, monkeypatch, variable, expected):
    """flash_attention_2 applies dropout in training only, and is deterministic on request.

    The environment variable `FLASH_ATTENTION_DETERMINISTIC` of transformers requests determinism.
    """
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", variable)
    model = make_model(NeoBERTModel, attention_dropout=0.25).to(torch.bfloat16)
    model.config._attn_implementation = "flash_attention_2"

    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    for training, dropout in ((True, 0.25), (False, 0.0)):
        flash.calls.clear()
        model.train(training)(torch.arange(5, 12)[None], cu_seq_lens_q=bounds)
        assert flash.calls
        assert {call["dropout_p"] for call in flash.calls} == {dropout}
        assert {call["deterministic"] for call in flash.calls} == {expected}


REPADDED = "re-padded q, k, v; not torch.nn.attention.varlen, since "
VARLEN = "torch.nn.attention.varlen (flash kernels of torch itself)"
NARROW = {"num_attention_heads": 16}
WIDE = {"hidden_size": 528, "num_attention_heads": 2}
# (dtype, fields, whether torch has the kernel, compute capability of the GPU, expected words)
KERNELS_OF_CUDA = (
    (torch.bfloat16, {}, True, (9, 0), VARLEN),
    (torch.float16, {}, True, (8, 0), VARLEN),
    (torch.float32, {}, True, (9, 0), f"{REPADDED}the kernel takes float16 and bfloat16, not"),
    (torch.bfloat16, {"attention_dropout": 0.1}, True, (9, 0), f"{REPADDED}the kernel has no drop"),
    (torch.bfloat16, {}, False, (9, 0), "has no torch.nn.attention.varlen (2.10 or newer has)"),
    (torch.float16, {}, True, (7, 5), f"{REPADDED}the kernel needs compute capability 8.0, and"),
    (torch.bfloat16, NARROW, True, (9, 0), f"{REPADDED}the kernel takes a head_dim that is a mult"),
    (torch.bfloat16, WIDE, True, (9, 0), "at most 256, not 264"),
)


@pytest.mark.parametrize("dtype,fields,torch_has_it,capability,words", KERNELS_OF_CUDA)
def test_attention_backend_on_cuda(dtype, fields, torch_has_it, capability, words, monkeypatch):
    """`attention_backend` names the kernel for a GPU, and why it is not the kernel of torch.

    The device is simulated, so the test needs no GPU.
    """
    model = make_model(NeoBERTModel, **fields).to(dtype).train()
    monkeypatch.setattr(attention_neobert, "varlen_attn", object() if torch_has_it else None)
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert words in model.attention_backend(), model.attention_backend()


def test_unknown_implementation_is_rejected():
    """An unknown attention implementation raises a ValueError and changes nothing."""
    model = make_model(NeoBERTModel)
    with pytest.raises(ValueError, match="nosuch"):
        model.set_attn_implementation("nosuch")
    assert model.config._attn_implementation == "sdpa", (
        "The failed call changed the implementation."
    )

    model.config._attn_implementation = "nosuch"
    words = "`attn_implementation` must be a registered attention function, got 'nosuch'."
    assert model.attention_backend().startswith(words)
    with pytest.raises(ValueError, match=f"{words} .*`model.set_attn_implementation`"):
        model(random_batch([4])[0])


# ------------------------------------------------------------------------------------------------
# Memory


class LargestTensor(TorchDispatchMode):
    """Dispatch mode that records the number of elements of the largest storage."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for x in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return output


@pytest.mark.parametrize("layout", ("padded", "packed by the model", "packed by the caller"))
def test_sdpa_allocates_no_attention_matrix(layout):
    """Check that sdpa allocates no tensor with the size of an attention matrix.

    The eager function allocates one, which shows that the measurement detects it.
    """
    length = 600
    ids, mask = random_batch([length, 500])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if layout == "packed by the caller":
        inputs = packed_batch(texts_of(ids, mask))

    fields = {"max_position_embeddings": length, "unpad_inputs": layout != "padded"}
    with LargestTensor() as mode:
        hidden = make_model(NeoBERTModel, attn_implementation="sdpa", **fields)(**inputs)[0]
        hidden.sum().backward()
    assert mode.largest <= 2 * length * 3 * 64 < length * length

    with LargestTensor() as mode, torch.no_grad():
        make_model(NeoBERTModel, attn_implementation="eager", **fields)(**inputs)
    assert mode.largest >= 4 * 500 * 500, (
        "The attention matrix of the eager function was not measured."
    )


# ------------------------------------------------------------------------------------------------
# GPU and autocast


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@torch.no_grad()
def test_packing_precision_on_cuda(dtype):
    """Packing on a GPU does not increase the rounding error.

    The error is at most twice that of the padded eager model in the same dtype.
    """
    ids, mask = random_batch([100, 7, 64], length=128)
    expected = make_model(NeoBERTModel)(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    ids, mask = ids.cuda(), mask.cuda()

    def error(**fields):
        model = make_model(NeoBERTModel, **fields).to("cuda", dtype)
        hidden = model(ids, attention_mask=mask).last_hidden_state[mask.bool()].float().cpu()
        return (hidden - expected).abs().max().item()

    plain = error(attn_implementation="eager", unpad_inputs=False)
    packed = error(attn_implementation="sdpa")
    floor = 1e-5 * expected.abs().max().item()
    assert packed <= max(2 * plain, floor)


@with_gradients
def test_autocast(implementation, flash, batch):
    """Training works under autocast, which Trainer uses with bf16=True.

    Weights, gradients and the loss are float32, and matrix products are bfloat16.
    """
    ids, mask, texts = batch
    padded = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    packed = {**packed_batch(texts), "labels": torch.cat(texts)[None]}
    expected = build(NeoBERTForMaskedLM, "eager")(**padded).loss.item()

    for unpad, inputs in ((True, padded), (False, padded), (True, packed)):
        model = build(NeoBERTForMaskedLM, implementation, unpad_inputs=unpad)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        assert loss.dtype == torch.float32 and abs(loss.item() - expected) < 0.05 * expected
        for p in model.parameters():
            assert p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all()
