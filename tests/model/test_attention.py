"""Test attention.

The eager, sdpa, flex, flash and user-defined functions agree, padded, packed and for single texts,
forward and backward. Packed texts are isolated, and sdpa allocates no tensor of shape (B, H, L, L).
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

from neobert import NeoBERTForMaskedLM, NeoBERTModel, attention_neobert


LENGTHS = [12, 3, 12, 1, 7]


@pytest.fixture
def batch():
    """input_ids, attention_mask and the texts in them."""
    ids, mask = random_batch(LENGTHS)
    return ids, mask, texts_of(ids, mask)


# ------------------------------------------------------------------------------------------------
# implementations


@pytest.fixture
def flash(monkeypatch):
    return install_flash(monkeypatch)


def my_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """What a user registers: plain attention with the boolean mask it is given."""
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
    model = make_model(model_class, **fields)
    if implementation == "flash_attention_2":  # the flash-attn package is not asked for
        model.config._attn_implementation = implementation
    else:
        model.set_attn_implementation(implementation)
    return model


# ------------------------------------------------------------------------------------------------
# forwards


@pytest.mark.parametrize("fields", ({}, LEARNED), ids=("neobert", "learned"))
@every_implementation
@torch.no_grad()
def test_padded_packed_and_alone_agree(implementation, fields, flash, batch):
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
def test_the_flattening_collator(implementation, flash_kwargs, flash, batch, warnings):
    """With and without its flash arguments: without them the positions alone tell the texts
    apart, and a warning says that this ends."""
    *_, texts = batch
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash_kwargs)
    flat = collator([{"input_ids": text.tolist()} for text in texts])
    del flat["labels"]
    assert ("cu_seq_lens_q" in flat) == flash_kwargs
    model = build(NeoBERTModel, implementation)
    assert_same(model(**flat).last_hidden_state[0], last_states(model, *texts))
    assert len(warnings("Pass cu_seq_lens_q")) == (not flash_kwargs)


# ------------------------------------------------------------------------------------------------
# gradients


@with_gradients
def test_gradients_agree(implementation, flash, batch):
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
# what a function receives


@torch.no_grad()
def test_a_registered_function_gets_everything_untouched():
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
        # With position_ids flash attention would look for packing in every layer.
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
        assert kwargs[name] is packed[name], f"{name} was not handed down as it is."
    expected = torch.block_diag(torch.ones(5, 5), torch.ones(3, 3)).bool()
    assert torch.equal(allowed.expand(1, 1, 8, 8)[0, 0], expected)


@torch.no_grad()
def test_a_function_with_additive_masks():
    """A name registered with the eager mask function gets 0 and the lowest number in place of
    booleans, in the model's dtype."""
    seen = []

    def additive(module, query, key, value, attention_mask, scaling=None, **kwargs):
        seen.append(attention_mask.dtype)
        scores = query @ key.transpose(-1, -2) * scaling + attention_mask
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("my_additive", additive)
    ALL_MASK_ATTENTION_FUNCTIONS.register("my_additive", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    ids, mask = random_batch([9, 5])
    model = build(NeoBERTModel, "my_additive")
    hidden = model(ids, attention_mask=mask)[0]
    assert_same(hidden[mask.bool()], last_states(model, *texts_of(ids, mask)))
    assert torch.isfinite(model.to(torch.bfloat16)(ids, attention_mask=mask)[0]).all()
    assert seen == [torch.float32] * 3 + [torch.bfloat16] * 3


@torch.no_grad()
def test_no_token_is_without_a_token_to_see():
    """A softmax over nothing is not a number in many kernels: a row of padding alone sees all of
    itself."""
    seen = []

    def boolean(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return query.transpose(1, 2), None

    AttentionInterface.register("my_boolean", boolean)
    ids, mask = random_batch([9, 5, 9])
    mask[2] = 0
    build(NeoBERTModel, "my_boolean")(ids, attention_mask=mask)
    allowed = seen[0].expand(3, 1, 9, 9)
    assert allowed.any(dim=-1).all() and torch.equal(allowed[1, 0, 0], mask[1].bool())


@pytest.mark.parametrize("unpad_inputs", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@torch.no_grad()
def test_flash_contract(flash, dtype, unpad_inputs, batch):
    """What the kernel takes: int32 offsets, a scale, and numbers as longest lengths, since a tensor
    costs a device synchronization a layer."""
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
        # Of a 2-D mask, some versions of transformers make a tensor.
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
    assert flash.calls[0]["q"].shape == (1, 12, 4, 16), "Without padding the dense kernel runs."
    assert flash.calls[0]["causal"] is False and flash.calls[0]["softmax_scale"] == 0.25


@torch.no_grad()
def test_a_hub_kernel_is_packed_like_flash(flash, batch):
    """The library registers a kernel from the Hub under its repository's name, with flash
    attention's mask function."""
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
# what a caller packs


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
def test_ways_to_say_packed(implementation, packing, flash):
    model = build(NeoBERTModel, implementation)
    hidden = model(torch.cat(PACKED_TEXTS)[None], **packing).last_hidden_state
    assert_same(hidden[0], last_states(model, *PACKED_TEXTS))
    for call in flash.calls:
        assert call["cu_seqlens_q"].dtype == call["cu_seqlens_k"].dtype == torch.int32


@pytest.mark.parametrize(
    "packing,words",
    (
        ({"cu_seq_lens_k": BOUNDS}, "must be passed with `cu_seq_lens_k`"),
        ({**PACKED, "cu_seq_lens_k": torch.tensor([0, 10, 12, 19])}, "must equal `cu_seq_lens_q`"),
        ({"cu_seq_lens_q": torch.tensor([0, 12, 9, 19])}, "must rise from 0 to .* tokens, 19"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 12])}, "must rise from 0 to .* tokens, 19"),
        ({"cu_seq_lens_q": torch.tensor([1, 9, 19])}, "must rise from 0 to .* tokens, 19"),
        ({**PACKED, "max_length_q": 3}, "at least the length of the longest sequence, 9, got 3"),
        ({**PACKED, "max_length_k": 8}, "`max_length_k` must be at least"),
        ({**PACKED, "attention_mask": torch.tensor([[1] * 18 + [0]])}, "has no padding"),
    ),
)
def test_packing_that_does_not_fit_is_one_sentence(packing, words):
    """Each of these would let a text see another, or hide a part of it, without a word."""
    with pytest.raises(ValueError, match=words):
        make_model(NeoBERTModel)(torch.cat(PACKED_TEXTS)[None], **packing)


@pytest.mark.parametrize("implementation", ("sdpa", "flash_attention_2", "eager"))
@torch.no_grad()
def test_hidden_states_and_weights_of_a_packed_batch(implementation, flash):
    """In the caller's packed shape; weights between texts are zero."""
    model = build(NeoBERTModel, implementation)
    packed = packed_batch(PACKED_TEXTS[:2])
    out = model(**packed, output_hidden_states=True, output_attentions=True)
    first, second = (reference_states(model, text) for text in PACKED_TEXTS[:2])
    for layer, state in enumerate(out.hidden_states):
        assert_same(state[0], torch.cat([first[0][layer], second[0][layer]]))
    for weights, expected in zip(out.attentions, second[1]):
        assert (weights[0, :, :9, 9:] == 0).all() and (weights[0, :, 9:, :9] == 0).all()
        assert_same(weights[0, :, 9:, 9:], expected, what="weights")


# ------------------------------------------------------------------------------------------------
# which kernel runs


@torch.no_grad()
def test_switching_the_implementation_of_a_loaded_model(flash, batch):
    """The next forward uses it, and the sentence names it."""
    ids, mask, _ = batch
    model = make_model(NeoBERTForMaskedLM)
    expected, sentences = model(ids, attention_mask=mask).logits[mask.bool()], {}
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
    assert (kernel, reason) == ("flash", None), "transformers 5 has kernels for xpu and npu too"


@pytest.mark.parametrize("width,words", [(512, None), (528, "a head_dim of at most 256, not 264")])
def test_flash_attention_2_names_an_unsupported_head_dim(width, words):
    """At 256 nothing is missing."""
    config = make_model(NeoBERTModel, hidden_size=width, num_attention_heads=2).config
    kernel, reason = attention_neobert.attention_kernel(
        config, "flash_attention_2", torch.device("cuda"), torch.bfloat16, training=False
    )
    assert (kernel, reason) == ("flash", words and f"they need {words}")


@pytest.mark.parametrize("variable,expected", [("0", False), ("1", True)])
def test_flash_attention_2_receives_dropout_and_determinism(flash, monkeypatch, variable, expected):
    """Dropout only in training, and what `FLASH_ATTENTION_DETERMINISTIC` says."""
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
NARROW, WIDE = {"num_attention_heads": 16}, {"hidden_size": 528, "num_attention_heads": 2}
# dtype, fields, whether torch has the kernel, capability of the GPU, words.
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
def test_the_sentence_on_cuda(dtype, fields, torch_has_it, capability, words, monkeypatch):
    """With a stand-in for the device: which kernel, and what keeps it from torch's own."""
    model = make_model(NeoBERTModel, **fields).to(dtype).train()
    monkeypatch.setattr(attention_neobert, "varlen_attn", object() if torch_has_it else None)
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert words in model.attention_backend(), model.attention_backend()


def test_an_implementation_that_does_not_exist():
    model = make_model(NeoBERTModel)
    with pytest.raises(ValueError, match="nosuch"):
        model.set_attn_implementation("nosuch")
    assert model.config._attn_implementation == "sdpa", "the model keeps what it had"
    model.config._attn_implementation = "nosuch"
    words = "`attn_implementation` must be a registered attention function, got 'nosuch'."
    assert model.attention_backend().startswith(words)
    with pytest.raises(ValueError, match=f"{words} .*`model.set_attn_implementation`"):
        model(random_batch([4])[0])


# ------------------------------------------------------------------------------------------------
# memory


class LargestTensor(TorchDispatchMode):
    """Elements of the largest storage that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("layout", ("padded", "packed by the model", "packed by the caller"))
def test_sdpa_makes_no_square_tensor(layout):
    length = 600
    ids, mask = random_batch([length, 500])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if layout == "packed by the caller":
        inputs = packed_batch(texts_of(ids, mask))
    fields = {"max_position_embeddings": length, "unpad_inputs": layout != "padded"}
    with LargestTensor() as seen:
        hidden = make_model(NeoBERTModel, attn_implementation="sdpa", **fields)(**inputs)[0]
        hidden.sum().backward()
    assert seen.largest <= 2 * length * 3 * 64 < length * length
    with LargestTensor() as seen, torch.no_grad():
        make_model(NeoBERTModel, attn_implementation="eager", **fields)(**inputs)
    assert seen.largest >= 4 * 500 * 500, "the eager function should be seen here"


# -------------------------------------------------------------------------------------------
# on a GPU, and under autocast


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@torch.no_grad()
def test_packed_on_cuda(dtype):
    """Forward in low precision: error at most twice that of the plain implementation in the same
    dtype."""
    ids, mask = random_batch([100, 7, 64], length=128)
    expected = make_model(NeoBERTModel)(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    ids, mask = ids.cuda(), mask.cuda()

    def error(**fields):
        model = make_model(NeoBERTModel, **fields).to("cuda", dtype)
        out = model(ids, attention_mask=mask).last_hidden_state[mask.bool()].float().cpu()
        return (out - expected).abs().max().item()

    plain = error(attn_implementation="eager", unpad_inputs=False)
    packed = error(attn_implementation="sdpa")
    floor = 1e-5 * expected.abs().max().item()
    assert packed <= max(2 * plain, floor)


@with_gradients
def test_autocast(implementation, flash, batch):
    """Mixed precision, as Trainer's bf16=True runs it: float32 weights and loss, bfloat16 products,
    padded, packed and backward."""
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
