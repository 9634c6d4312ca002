"""Test packed execution.

No layer computes padding, and all layouts agree on outputs and gradients, also in low precision.
Covers empty rows, a batch of one, scattered padding, compiled blocks, CPU slicing without
gradients, and the number of live tensors.

Tests of CUDA kernels are marked `gpu` and skipped without one.
"""

import pytest
import torch
from helpers.reference import (
    FlashReference,
    LiveTensors,
    assert_same,
    count_rows,
    install_flash,
    make_model,
    random_batch,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters

from neobert import NeoBERTModel, attention_neobert
from neobert import modeling_neobert as modeling
from neobert.common.packing import compile_blocks


def scattered_batch():
    """Four rows of 12: padding on the left, on the right and in between; one row is all padding."""
    rows = ("000111111111", "111100000000", "101100111010", "000000000000")
    return random_batch([12] * 4)[0], torch.tensor([[int(c) for c in row] for row in rows])


BATCHES = {
    "right": lambda: random_batch([9, 3, 7, 1]),
    "left": lambda: random_batch([9, 3, 7, 1], side="left"),
    "scattered and empty": scattered_batch,
    "one text": lambda: random_batch([5], length=9),
    "equal lengths": lambda: random_batch([6, 6, 6], length=9),
}


def outputs_and_gradients(model, ids, mask):
    """Outputs of the real tokens, and the gradients of all parameters of a fixed random weighting
    of them."""
    model.zero_grad()
    hidden = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))
    (hidden.float() * weights.to(hidden.device)).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------------------------
# layouts


def plain_model():
    return make_model(NeoBERTModel, attn_implementation="eager", unpad_inputs=False)


def deviation(model, ids, mask, exact):
    """Largest error of the outputs, and length of the error of all gradients."""
    outputs, grads = outputs_and_gradients(model, ids, mask)
    total = sum((grads[name].float() - grad).square().sum() for name, grad in exact[1].items())
    return (outputs.float() - exact[0]).abs().max(), total.sqrt()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
def test_layouts_agree_on_outputs_and_gradients(implementation, batch):
    ids, mask = BATCHES[batch]()
    model = make_model(NeoBERTModel, attn_implementation=implementation)
    packed, grads = outputs_and_gradients(model, ids, mask)
    expected, expected_grads = outputs_and_gradients(plain_model(), ids, mask)
    assert_same(packed, expected)
    assert any(grad.abs().max() > 0 for grad in expected_grads.values())
    for name, grad in expected_grads.items():
        assert_same(grads[name], grad, 1e-4, f"gradient of {name}")


@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
def test_low_precision_within_the_error_of_the_plain_implementation(implementation):
    """bfloat16 against float32: outputs within twice, gradients within three times the error of the
    padded eager model in bfloat16."""
    ids, mask = random_batch([9, 3, 7])
    exact = outputs_and_gradients(plain_model(), ids, mask)
    model = make_model(NeoBERTModel, attn_implementation=implementation).to(torch.bfloat16)
    plain, plain_grads = deviation(plain_model().to(torch.bfloat16), ids, mask, exact)
    packed, packed_grads = deviation(model, ids, mask, exact)
    assert plain > 0 and packed <= 2 * plain and packed_grads <= 3 * plain_grads


@pytest.mark.parametrize("inputs", ("input_ids", "inputs_embeds"))
@torch.no_grad()
def test_no_layer_computes_on_padding(inputs):
    ids, mask = random_batch([9, 3, 7, 1])
    model = make_model(NeoBERTModel)
    model_inputs = (
        {"input_ids": ids} if inputs == "input_ids" else {"inputs_embeds": model.encoder(ids)}
    )
    kinds = (nn.Linear, nn.Embedding, nn.RMSNorm)
    seen = count_rows(*(module for module in model.modules() if isinstance(module, kinds)))
    model(**model_inputs, attention_mask=mask)
    assert set(seen) == {20}, "all layers see the 20 real tokens of 36"


# ------------------------------------------------------------------------------------------------
# feed-forward


@pytest.mark.parametrize("shape", ((1, 1), (1, 4), (1, 5), (3, 3)))
@torch.no_grad()
def test_the_sliced_feed_forward(shape, monkeypatch):
    """On the CPU without gradients the feed-forward runs slice by slice; with gradients, or where
    its layers are not plain ones, in one piece."""
    tokens = shape[0] * shape[1]
    block = make_model(NeoBERTModel).transformer_encoder[0].ffn
    x = torch.randn(*shape, 64)
    gate, value = (x @ block.w12.weight.T).chunk(2, dim=-1)
    expected = (gate * torch.sigmoid(gate) * value) @ block.w3.weight.T
    seen, silu = [], modeling.F.silu

    def recorded(gate):
        seen.append(gate[..., 0].numel())
        return silu(gate)

    monkeypatch.setattr(attention_neobert, "CPU_TOKENS", 4)
    monkeypatch.setattr(modeling.F, "silu", recorded)
    assert_same(block(x), expected, what="sliced")
    assert max(seen) <= 4 and sum(seen) == tokens, "every token once, four at most at a time"
    with torch.enable_grad():
        assert_same(block(x), expected, what="in one piece")
    assert seen[-1] == tokens, "with gradients it is not sliced"

    class Adapted(nn.Linear):
        """As PEFT replaces a layer."""

        def forward(self, x):
            assert x.shape[:2] == shape, "an adapter's layer must see the batch axis"
            return super().forward(x)

    block.w12.__class__ = Adapted
    assert_same(block(x), expected, what="adapted")
    block.w12.__class__ = nn.Linear
    hooked = []
    block.w12.register_forward_hook(lambda module, args, output: hooked.append(output.shape[:2]))
    block(x)
    assert hooked == [shape], "a hook must see the batch in one piece"


CASES = ("short", "long", "without gradients", "float32", "bfloat16 weights")


@pytest.mark.parametrize("case", CASES)
def test_short_sequences_are_attended_in_float32_in_training_in_16_bits(case, monkeypatch):
    """The backward of torch's CPU kernel is several times slower in 16 bits there. Autocast, which
    would make them 16 bits again, is off."""
    kernel, seen = modeling.F.scaled_dot_product_attention, set()

    def recorded(query, key, value, **kwargs):
        seen.add((query.dtype, key.dtype, value.dtype, torch.is_autocast_enabled("cpu")))
        return kernel(query, key, value, **kwargs)

    monkeypatch.setattr(modeling.F, "scaled_dot_product_attention", recorded)
    model = make_model(NeoBERTModel, max_position_embeddings=1024)
    ids, mask = random_batch([700, 20] if case == "long" else [200, 20])
    if case == "bfloat16 weights":
        model = model.to(torch.bfloat16)
    autocast, trains = case in CASES[:3], case != "without gradients"
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(trains):
        hidden = model(ids, attention_mask=mask).last_hidden_state
    wide = case not in ("long", "without gradients")
    assert seen == {(torch.float32 if wide else torch.bfloat16,) * 3 + (not wide,)}
    if trains:
        hidden.float().sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@torch.no_grad()
def test_what_a_hook_keeps_of_q_and_k_is_not_rotated():
    """On the CPU without gradients q and k are rotated in place, unless somebody may hold them."""
    model, kept, inputs = make_model(NeoBERTModel), [], []
    layer = model.transformer_encoder[0].qkv

    def hook(module, args, output):
        inputs.append(args[0].clone())
        kept.append(output)

    layer.register_forward_hook(hook)
    model(random_batch([9])[0])
    assert torch.equal(kept[0], inputs[0] @ layer.weight.T)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@torch.no_grad()
def test_sliced_norms_are_those_of_torch(dtype):
    """On the CPU without gradients, where they run 128 tokens at a time."""
    norm = make_model(NeoBERTModel).layer_norm.to(dtype)
    x = (torch.randn(2, 150, 64) * 3 + 0.5).to(dtype)
    expected = nn.functional.rms_norm(x, (64,), norm.weight, norm.eps)
    assert_same(norm(x), expected, torch.finfo(dtype).eps)


# ------------------------------------------------------------------------------------------------
# torch.compile


@pytest.mark.slow
@torch.no_grad()
def test_compiled_blocks_keep_their_graphs():
    """Batches of different texts, lengths and numbers of texts run through the graphs of the first
    ones."""
    torch._dynamo.reset()
    counters.clear()
    eager = make_model(NeoBERTModel)
    model = compile_blocks(make_model(NeoBERTModel), backend="eager")
    graphs = []
    for lengths in ([9, 3], [7, 2, 5], [4, 4, 4, 1], [20, 1], [6, 3, 2, 2, 1], [11, 12, 13, 2]):
        ids, mask = random_batch(lengths)
        actual, expected = (m(ids, attention_mask=mask).last_hidden_state for m in (model, eager))
        assert_same(actual, expected, what="compiled")
        graphs.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert graphs[0] > 0 and graphs[-1] == graphs[1], f"a graph after the second batch: {graphs}"


@torch.library.custom_op("neobert_tests::varlen", mutates_args=())
def varlen_operation(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, s: float
) -> Tensor:
    """What dynamo sees of a variable-length kernel: one operation with tensors, two numbers and a
    scale."""
    assert max_q == max_k == cu_q.diff().max(), "the longest text of the batch that was compiled"
    bounds = cu_q, cu_k, max_q, max_k
    return FlashReference().varlen(q, k, v, *bounds, softmax_scale=s).contiguous()


@varlen_operation.register_fake
def _(q, k, v, cu_q, cu_k, max_q, max_k, s):
    return torch.empty_like(q)


@pytest.mark.parametrize("kernel", ("varlen", "flash_attention_2", "repadded"))
@torch.no_grad()
def test_no_graph_break_around_the_kernels_of_cuda(kernel, monkeypatch):
    """Blocks compile to one whole graph, which batches of any texts share. Only SDPA text by text
    (the CPU) runs between graphs."""
    is_flash = kernel == "flash_attention_2"
    # transformers warns about flash in float32, which alone would break the graph
    dtype, tolerance = (torch.bfloat16, 0.1) if is_flash else (torch.float32, 1e-5)
    if is_flash:

        def varlen(q, k, v, softmax_scale, **others):
            bounds = (others[name] for name in FlashReference.BOUNDS)
            return varlen_operation(q, k, v, *bounds, softmax_scale)

        install_flash(monkeypatch).varlen = varlen
    else:
        monkeypatch.setattr(
            attention_neobert, "varlen_attn", lambda *tensors: varlen_operation(*tensors, 0.25)
        )
        for module in (modeling, attention_neobert):
            monkeypatch.setattr(module, "attention_kernel", lambda *args: (kernel, None))
    torch._dynamo.reset()
    counters.clear()
    expected, model = (make_model(NeoBERTModel).to(dtype) for _ in range(2))
    if is_flash:
        model.config._attn_implementation = kernel
    compile_blocks(model, backend="eager", fullgraph=True)
    # Not two texts first: dynamo would take their number to be that of the halves of q and k.
    for lengths in ([9, 3, 2], [7, 5], [4, 4, 4, 1], [20, 1], [11, 12, 13, 2]):
        ids, mask = random_batch(lengths)
        actual, wanted = (m(ids, attention_mask=mask).last_hidden_state for m in (model, expected))
        assert_same(actual, wanted, tolerance, f"output of compiled blocks with {kernel}")
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert graphs == 1 and not counters["graph_break"]


@torch.no_grad()
@pytest.mark.parametrize("implementation", ("sdpa", "eager", "flex_attention"))
def test_empty_sequences_of_the_caller_change_nothing(implementation):
    model = make_model(NeoBERTModel).eval()
    model.set_attn_implementation(implementation)
    expected, actual = (
        model(
            torch.arange(5, 12)[None], cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32)
        ).last_hidden_state
        for bounds in ([0, 3, 7], [0, 0, 3, 3, 7, 7])
    )
    assert_same(actual, expected, what=implementation)


# ------------------------------------------------------------------------------------------------
# the CUDA layouts


@pytest.mark.parametrize("lengths", ([5, 1, 4], [3], [2, 2], [0, 5, 0, 4, 0]))
def test_repadded_equals_text_by_text_with_gradients(lengths):
    """What fp32 on CUDA runs (q, k, v scattered to a padded batch) against one call a text."""
    total = sum(lengths)
    packing = modeling.Packing(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths))
    module = nn.Module()
    module.is_causal = False
    inputs = [torch.randn(1, 2, total, 8, requires_grad=True) for _ in range(3)]
    weights = torch.randn(1, total, 2, 8)
    results = []
    for attention, where in (
        (attention_neobert._sequence_by_sequence, packing),
        (attention_neobert._repadded, packing.padding(total)),
    ):
        output = attention(modeling.eager_attention_forward, where, module, *inputs, scaling=0.3)[0]
        results.append((output, *torch.autograd.grad((output * weights).sum(), inputs)))
    assert results[0][0].shape == (1, total, 2, 8), "(1, T, H, K)"
    for actual, expected in zip(*results):
        assert_same(actual, expected)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: torch's variable-length kernel itself is not tested here",
)
def test_gradients_of_the_kernel_on_cuda():
    """bfloat16 through torch.nn.attention.varlen: gradients within three times the error of the
    padded eager model in bfloat16."""
    ids, mask = (x.cuda() for x in random_batch([60, 30, 7]))
    exact = outputs_and_gradients(plain_model().cuda(), ids, mask)
    plain = deviation(plain_model().cuda().to(torch.bfloat16), ids, mask, exact)
    model = make_model(NeoBERTModel).cuda().to(torch.bfloat16)
    packed = deviation(model, ids, mask, exact)
    assert "varlen" in model.attention_backend()
    assert packed[0] <= 2 * plain[0] and packed[1] <= 3 * plain[1]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 4096), (4, 1024), (16, 256)])
def test_at_most_8_hidden_vectors_a_token_are_alive_at_once(shape):
    """Counted in tensors of (tokens, D) float32, of the paper's width, whatever the number of
    blocks."""
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    model = make_model(NeoBERTModel, num_hidden_layers=2, **sizes)
    ids, mask = torch.randint(5, 100, shape), torch.ones(shape, dtype=torch.long)
    mask[:-1, -50:] = 0
    with torch.no_grad(), LiveTensors(ids, mask, *model.parameters()) as tensors:
        model(ids, attention_mask=mask)
    hidden_vectors = tensors.peak / 4 / 768 / mask.sum().item()
    assert 3 < hidden_vectors <= 8, f"{hidden_vectors:.2f} hidden vectors a token are alive at once"
