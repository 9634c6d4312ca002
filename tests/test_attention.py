"""Pins attention: eager, sdpa, flex, flash and user functions agree, padded, packed or alone,
forward and backward; packed texts never see each other; what reaches an attention function; and
that sdpa makes no B x H x L x L tensor.
"""

import inspect
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DataCollatorWithFlattening
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from neobert import (
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
    attention_neobert,
    modeling_neobert,
)

from .reference import (
    LEARNED,
    FlashReference,
    assert_same,
    install_flash,
    make_model,
    packing_arguments,
    random_batch,
    reference_states,
)


LENGTHS = [12, 3, 12, 1, 7]


def texts_of(lengths, seed=1):
    ids, mask = random_batch(lengths, seed=seed)
    return [row[real.bool()] for row, real in zip(ids, mask)]


def packed_batch(texts):
    """input_ids (1, T) and the four packing arguments."""
    return {"input_ids": torch.cat(texts)[None], **packing_arguments([*map(len, texts)])}


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


def build(model_class, implementation, **fields):
    model = make_model(model_class, **fields)
    if implementation == "flash_attention_2":
        model.config._attn_implementation = (
            implementation  # the flash-attn package is not asked for
        )
    else:
        model.set_attn_implementation(implementation)
    return model


# ------------------------------------------------------------------------------------------------
# forwards


@pytest.mark.parametrize("variant", ("neobert", "learned"))
@pytest.mark.parametrize("implementation", ALL)
@torch.no_grad()
def test_padded_packed_and_alone_agree(implementation, variant, flash):
    fields = LEARNED if variant == "learned" else {}
    model = build(NeoBERTModel, implementation, **fields)
    dense = build(NeoBERTModel, implementation, unpad_inputs=False, **fields)
    texts = texts_of(LENGTHS)
    ids, mask = random_batch(LENGTHS)
    layouts = {
        "padded, packed by the model": model(ids, attention_mask=mask).last_hidden_state[
            mask.bool()
        ],
        "padded, not packed": dense(ids, attention_mask=mask).last_hidden_state[mask.bool()],
        "packed by the caller": model(**packed_batch(texts)).last_hidden_state[0],
        "alone": torch.cat([model(text[None]).last_hidden_state[0] for text in texts]),
    }
    expected = torch.cat([reference_states(model, text)[0][-1] for text in texts])
    for name, actual in layouts.items():
        assert_same(actual, expected, 1e-5, f"output of {implementation}, {name},")


@pytest.mark.parametrize("flash_kwargs", (True, False))
@pytest.mark.parametrize("implementation", ALL)
@torch.no_grad()
def test_the_flattening_collator(implementation, flash_kwargs, flash, caplog):
    """With and without its flash arguments: without them the positions alone tell the texts
    apart, and a warning says that this ends."""
    texts = texts_of(LENGTHS)
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=flash_kwargs)(
        [{"input_ids": text.tolist()} for text in texts]
    )
    batch.pop("labels")
    assert ("cu_seq_lens_q" in batch) == flash_kwargs
    modeling_neobert.logger.warning_once.cache_clear()
    with caplog.at_level("WARNING", logger=modeling_neobert.logger.name):
        hidden = build(NeoBERTModel, implementation)(**batch).last_hidden_state[0]
    warnings = [text for text in caplog.messages if "give cu_seq_lens_q" in text]
    assert len(warnings) == (0 if flash_kwargs else 1)
    model = make_model(NeoBERTModel)
    expected = torch.cat([reference_states(model, text)[0][-1] for text in texts])
    assert_same(hidden, expected, 1e-5, f"packed output of {implementation}")


@pytest.mark.parametrize("implementation", ALL)
@torch.no_grad()
def test_packed_heads(implementation, flash):
    texts = texts_of(LENGTHS)
    packed = packed_batch(texts)
    ids, mask = random_batch(LENGTHS)
    for model_class, per_token in (
        (NeoBERTForMaskedLM, True),
        (NeoBERTForTokenClassification, True),
        (NeoBERTForSequenceClassification, False),
    ):
        model = build(model_class, implementation, num_labels=3)
        actual, padded = model(**packed).logits, model(ids, attention_mask=mask).logits
        expected = padded[mask.bool()][None] if per_token else padded
        assert actual.shape == expected.shape
        assert_same(actual, expected, 1e-5, f"packed {model_class.__name__}")


@torch.no_grad()
def test_every_token_sees_every_other():
    """Bidirectional: the last token changes the first output, and the first token the last
    output."""
    ids, _ = random_batch([10])
    for implementation in ("eager", "sdpa", "flex_attention"):
        model = build(NeoBERTModel, implementation)
        before = model(ids).last_hidden_state[0]
        for changed, seen in ((9, 0), (0, 9)):
            other = ids.clone()
            other[0, changed] = 1 + other[0, changed] % 198
            assert (model(other).last_hidden_state[0, seen] - before[seen]).abs().max() > 1e-3, (
                f"{seen} does not see {changed}."
            )


@torch.no_grad()
def test_dynamic_length_of_positions_that_are_not_packing():
    """Several rows, or positions that do not restart at 0, are an ordinary batch."""
    model = make_model(NeoBERTModel)
    ids, _ = random_batch([8, 8])
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    two = model(ids, position_ids=positions).last_hidden_state
    assert_same(
        two[0],
        reference_states(model, ids[0], positions)[0][-1],
        1e-5,
        "two rows with restarting positions",
    )
    odd = torch.tensor([0, 1, 5, 3, 0, 1, 2, 9])
    one = model(ids[:1], position_ids=odd).last_hidden_state
    assert_same(
        one[0], reference_states(model, ids[0], odd)[0][-1], 1e-5, "one row with odd positions"
    )


# ------------------------------------------------------------------------------------------------
# gradients


@pytest.mark.parametrize("implementation", ("eager", "sdpa", "flash_attention_2", "my_attention"))
def test_gradients_agree(implementation, flash):
    texts = texts_of(LENGTHS)
    ids, mask = random_batch(LENGTHS)
    labels = torch.where(mask == 1, (ids * 7) % 200, -100)
    count = int((labels != -100).sum())

    def gradients(model, *batches):
        model.zero_grad()
        for batch in batches:
            model(**batch, num_items_in_batch=count).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    model = build(NeoBERTForMaskedLM, implementation)
    alone = [{"input_ids": text[None], "labels": (text[None] * 7) % 200} for text in texts]
    expected = gradients(build(NeoBERTForMaskedLM, "eager"), *alone)
    packed = {**packed_batch(texts), "labels": labels[mask.bool()][None]}
    padded = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    for name, given in {
        "alone": gradients(model, *alone),
        "packed by the caller": gradients(model, packed),
        "packed by the model": gradients(model, padded),
        "padded": gradients(build(NeoBERTForMaskedLM, implementation, unpad_inputs=False), padded),
    }.items():
        for parameter, gradient in given.items():
            assert_same(
                gradient,
                expected[parameter],
                2e-5,
                f"gradient of {parameter} ({implementation}, {name})",
            )


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
    assert len(calls) == 3, f"The function ran {len(calls)} times in 3 layers."
    for layer, (module, query, key, value, allowed, kwargs) in enumerate(calls):
        assert (
            module.is_causal is False
            and module.layer_idx == layer
            and module.config is model.config
        )
        assert query.shape == key.shape == value.shape == (2, 4, 9, 16)
        assert kwargs["attention_instances"] is token, (
            "A caller's keyword argument must arrive as it is."
        )
        assert kwargs["scaling"] == 0.25 and kwargs["dropout"] == 0.0
        assert "position_ids" not in kwargs, (
            "position_ids make flash attention look for packing in every layer."
        )
        assert (
            allowed.dtype == torch.bool
            and allowed.shape == (2, 1, 1, 9)
            and torch.equal(allowed[:, 0, 0], mask.bool())
        )
    calls.clear()
    model.train()(ids, attention_mask=mask)
    assert calls[0][-1]["dropout"] == 0.5
    model.eval()
    calls.clear()
    packed = packed_batch(texts_of([5, 3]))
    model(**packed)
    *_, allowed, kwargs = calls[0]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        assert kwargs[name] is packed[name], f"{name} was not handed down as it is."
    expected = torch.block_diag(torch.ones(5, 5), torch.ones(3, 3)).bool()
    assert torch.equal(allowed.expand(1, 1, 8, 8)[0, 0], expected), (
        "The mask of a packed batch must be block-diagonal."
    )


@torch.no_grad()
def test_a_function_with_additive_masks():
    """A name registered with the eager mask function gets 0 and the lowest number in place of
    booleans."""
    seen = []

    def additive(module, query, key, value, attention_mask, scaling=None, **kwargs):
        seen.append(attention_mask)
        scores = query @ key.transpose(-1, -2) * scaling + attention_mask
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("my_additive", additive)
    ALL_MASK_ATTENTION_FUNCTIONS.register("my_additive", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    ids, mask = random_batch([9, 5])
    model = build(NeoBERTModel, "my_additive")
    out = model(ids, attention_mask=mask).last_hidden_state
    assert seen[0].dtype == torch.float32
    for row, n in enumerate((9, 5)):
        assert_same(out[row, :n], reference_states(model, ids[row, :n])[0][-1], 1e-5, f"text {row}")
    seen.clear()
    assert torch.isfinite(
        model.to(torch.bfloat16)(ids, attention_mask=mask).last_hidden_state
    ).all()
    assert seen[0].dtype == torch.bfloat16, (
        "a mask of another dtype would turn the scores into float32"
    )


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
def test_flash_contract(flash, dtype, unpad_inputs):
    model = build(
        NeoBERTModel, "flash_attention_2", unpad_inputs=unpad_inputs, attention_dropout=0.25
    ).to(dtype)
    ids, mask = random_batch(LENGTHS)
    order = sorted(LENGTHS) if unpad_inputs else LENGTHS
    model(ids, attention_mask=mask)
    assert len(flash.calls) == 3
    for call in flash.calls:
        for offsets in (call["cu_seqlens_q"], call["cu_seqlens_k"]):
            assert offsets.dtype == torch.int32 and offsets.is_contiguous(), (
                "The kernel takes int32 offsets."
            )
            assert offsets.diff().tolist() == order and offsets[0] == 0
        assert call["max_seqlen_q"] == call["max_seqlen_k"] == 12
        # Of a 2-D mask, some versions of transformers make a tensor.
        assert isinstance(call["max_seqlen_q"], int) or not unpad_inputs, (
            "A tensor here costs a device synchronisation per layer."
        )
        for name in "qkv":
            assert (
                call[name].shape == (sum(LENGTHS), 4, 16)
                and call[name].dtype == dtype
                and call[name].stride(-1) == 1
            )
        assert (
            call["softmax_scale"] == 0.25 and call["causal"] is False and call["dropout_p"] == 0.0
        )
    flash.calls.clear()
    model.train()(**packed_batch(texts_of(LENGTHS)))
    assert (
        flash.calls[0]["dropout_p"] == 0.25 and flash.calls[0]["cu_seqlens_q"].dtype == torch.int32
    )
    flash.calls.clear()
    model.eval()(ids[:1])
    assert flash.calls[0]["q"].shape == (1, 12, 4, 16), "Without padding the dense kernel runs."
    assert attention_neobert._mask_convention("flash_attention_3") == "flash"
    assert flash.calls[0]["causal"] is False and flash.calls[0]["softmax_scale"] == 0.25


@torch.no_grad()
def test_a_hub_kernel_is_packed_like_flash(flash):
    """The library registers a kernel from the Hub under its repository's name, with flash
    attention's mask function."""
    calls = []

    def kernel(module, query, key, value, attention_mask, **kwargs):
        calls.append((attention_mask, kwargs))
        texts = kwargs["cu_seq_lens_q"].tolist()
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return torch.cat(
            [
                flash.attend(q[a:b], k[a:b], v[a:b], kwargs["scaling"])
                for a, b in zip(texts, texts[1:])
            ]
        )[None], None

    AttentionInterface.register("some/kernel", kernel)
    ALL_MASK_ATTENTION_FUNCTIONS.register(
        "some/kernel", ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"]
    )
    model = make_model(NeoBERTModel)
    model.config._attn_implementation = "some/kernel"
    ids, mask = random_batch(LENGTHS)
    out = model(ids, attention_mask=mask).last_hidden_state
    assert calls[0][0] is None and calls[0][1]["max_length_q"] == 12
    for row, n in enumerate(LENGTHS):
        assert_same(out[row, :n], reference_states(model, ids[row, :n])[0][-1], 1e-5, f"text {row}")


# ------------------------------------------------------------------------------------------------
# what a caller packs


PACKED = {"cu_seq_lens_q": torch.tensor([0, 9, 12, 19], dtype=torch.int32)}


@pytest.mark.parametrize(
    "given",
    (
        {**PACKED, "cu_seq_lens_k": None, "max_length_q": None, "max_length_k": None},
        {"cu_seq_lens_q": torch.tensor([0, 9, 12, 19])},
        {"cu_seq_lens_q": torch.tensor([0, 0, 9, 9, 12, 19, 19])},
        {**PACKED, "max_length_q": torch.tensor(9), "max_length_k": torch.tensor(9)},
        {**PACKED, "attention_mask": torch.ones(1, 19, dtype=torch.long)},
        {"position_ids": torch.cat([torch.arange(n, dtype=torch.int32) for n in (9, 3, 7)])},
    ),
    ids=(
        "offsets alone",
        "int64 offsets",
        "empty texts",
        "tensors as longest lengths",
        "a mask of ones",
        "positions alone",
    ),
)
@pytest.mark.parametrize("implementation", ("sdpa", "flash_attention_2"))
@torch.no_grad()
def test_ways_to_say_packed(implementation, given, flash):
    model = build(NeoBERTModel, implementation)
    texts = texts_of([9, 3, 7])
    expected = torch.cat([reference_states(model, text)[0][-1] for text in texts])
    assert_same(
        model(torch.cat(texts)[None], **given).last_hidden_state[0], expected, 1e-5, "packed output"
    )
    for call in flash.calls:
        assert call["cu_seqlens_q"].dtype == call["cu_seqlens_k"].dtype == torch.int32, (
            "The kernel takes int32 offsets."
        )


@pytest.mark.parametrize(
    "given,words",
    (
        ({"cu_seq_lens_k": PACKED["cu_seq_lens_q"]}, "without cu_seq_lens_q"),
        ({**PACKED, "cu_seq_lens_k": torch.tensor([0, 10, 12, 19])}, "must equal cu_seq_lens_q"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 12, 9, 19])},
            "must rise from 0 to the number of tokens, 19",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 9, 12])},
            "must rise from 0 to the number of tokens, 19",
        ),
        (
            {**PACKED, "max_length_q": 3},
            "max_length_q must be at least the longest text, 9 tokens, but 3",
        ),
        ({**PACKED, "max_length_k": 8}, "max_length_k must be at least"),
        ({**PACKED, "attention_mask": torch.tensor([[1] * 18 + [0]])}, "no padding"),
    ),
)
def test_packing_that_does_not_fit_is_one_sentence(given, words):
    """Each of these would let a text see another, or hide a part of it, without a word."""
    with pytest.raises(ValueError, match=words):
        make_model(NeoBERTModel)(torch.cat(texts_of([9, 3, 7]))[None], **given)


@torch.no_grad()
def test_hidden_states_and_weights_of_a_packed_batch(flash):
    """In the caller's packed shape; weights between texts are zero."""
    texts = texts_of([9, 3])
    for implementation in ("sdpa", "flash_attention_2", "eager"):
        model = build(NeoBERTModel, implementation)
        out = model(**packed_batch(texts), output_hidden_states=True, output_attentions=True)
        alone = [reference_states(model, text) for text in texts]
        for layer in range(4):
            assert_same(
                out.hidden_states[layer][0],
                torch.cat([states[layer] for states, _ in alone]),
                1e-5,
                f"state {layer}",
            )
        for layer in range(3):
            weights = out.attentions[layer][0]
            assert (weights[:, :9, 9:] == 0).all() and (weights[:, 9:, :9] == 0).all(), (
                "a text sees another"
            )
            assert_same(weights[:, 9:, 9:], alone[1][1][layer], 1e-5, f"weights of layer {layer}")


# ------------------------------------------------------------------------------------------------
# which kernel runs


@torch.no_grad()
def test_switching_the_implementation_of_a_loaded_model(flash):
    """The next forward uses it, and the sentence names it."""
    ids, mask = random_batch(LENGTHS)
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
        assert_same(
            model(ids, attention_mask=mask).logits[mask.bool()],
            expected,
            1e-5,
            f"logits under {name}",
        )
        sentences[name] = model.attention_backend()
        assert (
            sentences[name].startswith(f"{name} on cpu in float32: ") and words in sentences[name]
        ), sentences[name]
    assert (
        "attn_implementation='sdpa' is faster" in sentences["eager"]
        and "need a CUDA device" in sentences["sdpa"]
    ), "why nothing faster runs"
    with torch.autocast("cpu", torch.bfloat16):
        assert "on cpu in bfloat16" in model.attention_backend(), (
            "under autocast the kernels run in its dtype"
        )
    model.config.unpad_inputs = False
    assert "unpad_inputs is off" in model.attention_backend()
    model.config._attn_implementation = "flash_attention_2"
    assert "need a GPU and float16 or bfloat16" in model.attention_backend(), (
        "flash-attn cannot run here, and the sentence says why"
    )
    kernel, reason = attention_neobert.attention_kernel(
        model.config, "flash_attention_2", torch.device("xpu"), torch.bfloat16, training=False
    )
    assert (kernel, reason) == ("flash", None), "transformers 5 has kernels for xpu and npu too"


REPADDED = "re-padded q, k, v; not torch.nn.attention.varlen, since "


VARLEN = "torch.nn.attention.varlen (flash kernels of torch itself)"
NARROW, WIDE = {"num_attention_heads": 16}, {"hidden_size": 528, "num_attention_heads": 2}
# dtype, fields, whether torch has the kernel, capability of the GPU, words.
KERNELS_OF_CUDA = (
    (torch.bfloat16, {}, True, (9, 0), VARLEN),
    (torch.float16, {}, True, (8, 0), VARLEN),
    (
        torch.float32,
        {},
        True,
        (9, 0),
        f"{REPADDED}the kernel takes float16 and bfloat16, not float",
    ),
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
    assert "There is no attention implementation 'nosuch'" in model.attention_backend()
    with pytest.raises(
        ValueError,
        match=(
            "There is no attention implementation 'nosuch'; set one with "
            "model.set_attn_implementation"
        ),
    ):
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
    texts = [ids[0], ids[1, :500]]
    batch = (
        packed_batch(texts)
        if layout == "packed by the caller"
        else {"input_ids": ids, "attention_mask": mask}
    )
    build_model = partial(
        make_model, NeoBERTModel, max_position_embeddings=length, unpad_inputs=layout != "padded"
    )
    with LargestTensor() as seen:
        build_model(attn_implementation="sdpa")(**batch).last_hidden_state.sum().backward()
    widest = 2 * length * max(3 * 64, 2 * 64)
    assert seen.largest <= widest < length * length
    with LargestTensor() as seen, torch.no_grad():
        build_model(attn_implementation="eager")(**batch)
    assert seen.largest >= 4 * 500 * 500, (
        "The eager function should be seen here, or this test is vacuous."
    )


# -------------------------------------------------------------------------------------------
# layouts, on any device


@torch.no_grad()
def test_the_call_of_torchs_variable_length_kernel(monkeypatch):
    varlen = pytest.importorskip(
        "torch.nn.attention.varlen", reason="torch before 2.10 has no variable-length attention"
    )
    names = list(inspect.signature(varlen.varlen_attn).parameters)
    assert (
        names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
        and "scale" in names
    ), names
    calls = []

    def stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=None, **kwargs):
        calls.append((cu_seq_q, max_q, scale, kwargs))
        return FlashReference().varlen(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, softmax_scale=scale
        )

    monkeypatch.setattr(attention_neobert, "varlen_attn", stand_in)
    packing = modeling_neobert.Packing(torch.tensor([0, 4, 12], dtype=torch.int32), 8)
    q, k, v = torch.randn(3, 1, 4, 12, 16).unbind(0)
    out, weights = attention_neobert._varlen(
        q, k, v, dropout=0.0, scaling=0.2, **packing.kwargs({})
    )
    assert weights is None and out.shape == (1, 12, 4, 16)
    expected = torch.cat(
        [
            FlashReference.attend(*(x[0, :, a:b].transpose(0, 1) for x in (q, k, v)), 0.2)
            for a, b in ((0, 4), (4, 12))
        ]
    )
    assert_same(out[0], expected, 1e-5, "variable-length attention")
    offsets, longest, scale, others = calls[0]
    assert offsets.dtype == torch.int32 and longest == 8 and scale == 0.2
    assert not set(others) - set(names), f"torch's kernel takes no {set(others) - set(names)}."

    # torch 2.10 knows no scale, and its default is ours: head_dim^-0.5.
    def plain(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k):
        return stand_in(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale=0.25)

    monkeypatch.setattr(attention_neobert, "varlen_attn", plain)
    attention_neobert._varlen(q, k, v, dropout=0.0, scaling=0.25, **packing.kwargs({}))
    assert calls[1][2] == 0.25


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


@pytest.mark.parametrize("implementation", ("eager", "sdpa", "flash_attention_2", "my_attention"))
def test_autocast(implementation, flash):
    """Mixed precision, as Trainer's bf16=True runs it: float32 weights and loss, bfloat16 products,
    padded, packed and backward."""
    ids, mask = random_batch(LENGTHS)
    labels = torch.where(mask == 1, ids, -100)
    expected = build(NeoBERTForMaskedLM, "eager")(
        ids, attention_mask=mask, labels=labels
    ).loss.item()
    packed = {**packed_batch(texts_of(LENGTHS)), "labels": labels[mask.bool()][None]}
    for unpad, batch in (
        (True, {"input_ids": ids, "attention_mask": mask, "labels": labels}),
        (False, {"input_ids": ids, "attention_mask": mask, "labels": labels}),
        (True, packed),
    ):
        model = build(NeoBERTForMaskedLM, implementation, unpad_inputs=unpad)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        assert loss.dtype == torch.float32 and abs(loss.item() - expected) < 0.05 * expected
        assert all(
            p.grad is not None and p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all()
            for p in model.parameters()
        )
