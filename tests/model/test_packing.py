"""Test packed execution.

No layer computes padding, and all layouts agree on outputs and gradients, also in low precision.
Covers empty rows, a batch of one text, scattered padding, compiled blocks, slices on the CPU
without gradients, and the number of live tensors.

Tests of CUDA kernels are marked `gpu` and are skipped without a GPU.
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
    """Return four rows of 12 positions with padding on the left, on the right and in between.

    The last row contains only padding.
    """
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
    """Return the outputs of the non-padding tokens, and the gradients of all parameters.

    The gradients are those of a fixed, randomly weighted sum of the outputs.
    """
    model.zero_grad()
    hidden = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))
    (hidden.float() * weights.to(hidden.device)).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------------------------
# Layouts


def plain_model():
    """Return the padded eager model, which is the baseline of these tests."""
    return make_model(NeoBERTModel, attn_implementation="eager", unpad_inputs=False)


def deviation(model, ids, mask, exact):
    """Return the maximum error of the outputs, and the norm of the error of all gradients."""
    outputs, grads = outputs_and_gradients(model, ids, mask)
    total = sum((grads[name].float() - grad).square().sum() for name, grad in exact[1].items())
    return (outputs.float() - exact[0]).abs().max(), total.sqrt()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
def test_layouts_agree_on_outputs_and_gradients(implementation, batch):
    """A packed batch has the outputs and gradients of the padded eager model."""
    ids, mask = BATCHES[batch]()
    model = make_model(NeoBERTModel, attn_implementation=implementation)
    packed, grads = outputs_and_gradients(model, ids, mask)
    expected, expected_grads = outputs_and_gradients(plain_model(), ids, mask)
    assert_same(packed, expected)
    assert any(grad.abs().max() > 0 for grad in expected_grads.values())
    for name, grad in expected_grads.items():
        assert_same(grads[name], grad, 1e-4, f"gradient of {name}")


@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
def test_bfloat16_error_is_close_to_the_padded_model(implementation):
    """Packing in bfloat16 has about the rounding error of the padded eager model.

    Compared with float32, the error of the outputs is at most twice, and that of the gradients at
    most three times the error of the padded eager model in bfloat16.
    """
    ids, mask = random_batch([9, 3, 7])
    exact = outputs_and_gradients(plain_model(), ids, mask)
    model = make_model(NeoBERTModel, attn_implementation=implementation).to(torch.bfloat16)
    plain, plain_grads = deviation(plain_model().to(torch.bfloat16), ids, mask, exact)
    packed, packed_grads = deviation(model, ids, mask, exact)
    assert plain > 0 and packed <= 2 * plain and packed_grads <= 3 * plain_grads


@pytest.mark.parametrize("inputs", ("input_ids", "inputs_embeds"))
@torch.no_grad()
def test_no_layer_computes_on_padding(inputs):
    """Every layer computes only the non-padding tokens of a batch."""
    ids, mask = random_batch([9, 3, 7, 1])
    model = make_model(NeoBERTModel)
    model_inputs = (
        {"input_ids": ids} if inputs == "input_ids" else {"inputs_embeds": model.encoder(ids)}
    )
    layer_classes = (nn.Linear, nn.Embedding, nn.RMSNorm)
    counts = count_rows(
        *(module for module in model.modules() if isinstance(module, layer_classes))
    )
    model(**model_inputs, attention_mask=mask)
    assert set(counts) == {20}, "Every layer must compute exactly the 20 non-padding tokens."


# ------------------------------------------------------------------------------------------------
# Slices on the CPU


@pytest.mark.parametrize("shape", ((1, 1), (1, 4), (1, 5), (3, 3)))
@torch.no_grad()
def test_sliced_feed_forward(shape, monkeypatch):
    """The feed-forward layer runs in slices on the CPU without gradients.

    It runs in one piece with gradients, and if an adapter or a hook on a linear layer may depend on
    the shape of the batch.
    """
    tokens = shape[0] * shape[1]
    block = make_model(NeoBERTModel).transformer_encoder[0].ffn
    x = torch.randn(*shape, 64)
    gate, value = (x @ block.w12.weight.T).chunk(2, dim=-1)
    expected = (gate * torch.sigmoid(gate) * value) @ block.w3.weight.T
    slice_sizes = []
    silu = modeling.F.silu

    def recorded(gate):
        slice_sizes.append(gate[..., 0].numel())
        return silu(gate)

    monkeypatch.setattr(attention_neobert, "CPU_TOKENS", 4)
    monkeypatch.setattr(modeling.F, "silu", recorded)
    assert_same(block(x), expected, what="sliced")
    assert max(slice_sizes) <= 4 and sum(slice_sizes) == tokens, (
        "Every token must be computed once, in slices of at most 4 tokens."
    )

    with torch.enable_grad():
        assert_same(block(x), expected, what="in one piece")
    assert slice_sizes[-1] == tokens, "The layer must run in one piece with gradients."

    class Adapted(nn.Linear):
        """Subclass of Linear, like the layers of PEFT adapters."""

        def forward(self, x):
            assert x.shape[:2] == shape, "The layer of an adapter must receive the complete batch."
            return super().forward(x)

    block.w12.__class__ = Adapted
    assert_same(block(x), expected, what="adapted")
    block.w12.__class__ = nn.Linear

    hook_shapes = []
    block.w12.register_forward_hook(
        lambda module, args, output: hook_shapes.append(output.shape[:2])
    )
    block(x)
    assert hook_shapes == [shape], "A hook must receive the output of the complete batch."


CASES = ("short", "long", "without gradients", "float32", "bfloat16 weights")


@pytest.mark.parametrize("case", CASES)
def test_short_sequence_attention_is_float32_in_16_bit_training(case, monkeypatch):
    """Training in 16 bits on the CPU computes the attention of short sequences in float32.

    The backward pass of torch's CPU kernel is several times slower in 16 bits for short sequences.
    Autocast is disabled for the call, because it would convert the tensors back to 16 bits.
    """
    kernel = modeling.F.scaled_dot_product_attention
    calls = set()

    def recorded(query, key, value, **kwargs):
        calls.add((query.dtype, key.dtype, value.dtype, torch.is_autocast_enabled("cpu")))
        return kernel(query, key, value, **kwargs)

    monkeypatch.setattr(modeling.F, "scaled_dot_product_attention", recorded)

    model = make_model(NeoBERTModel, max_position_embeddings=1024)
    ids, mask = random_batch([700, 20] if case == "long" else [200, 20])
    if case == "bfloat16 weights":
        model = model.to(torch.bfloat16)

    autocast = case in CASES[:3]
    trains = case != "without gradients"
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(trains):
        hidden = model(ids, attention_mask=mask).last_hidden_state

    in_float32 = case not in ("long", "without gradients")
    assert calls == {(torch.float32 if in_float32 else torch.bfloat16,) * 3 + (not in_float32,)}

    if trains:
        hidden.float().sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@torch.no_grad()
def test_queries_and_keys_kept_by_a_hook_are_not_rotated():
    """Queries and keys that a hook keeps are not overwritten.

    On the CPU without gradients, queries and keys are rotated in place, unless a hook exists.
    """
    model = make_model(NeoBERTModel)
    outputs = []
    inputs = []
    layer = model.transformer_encoder[0].qkv

    def hook(module, args, output):
        inputs.append(args[0].clone())
        outputs.append(output)

    layer.register_forward_hook(hook)
    model(random_batch([9])[0])
    assert torch.equal(outputs[0], inputs[0] @ layer.weight.T)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@torch.no_grad()
def test_sliced_norm_matches_torch(dtype):
    """The sliced RMSNorm gives the outputs of torch's RMSNorm.

    On the CPU without gradients, it runs in slices of 128 tokens.
    """
    norm = make_model(NeoBERTModel).layer_norm.to(dtype)
    x = (torch.randn(2, 150, 64) * 3 + 0.5).to(dtype)
    expected = nn.functional.rms_norm(x, (64,), norm.weight, norm.eps)
    assert_same(norm(x), expected, torch.finfo(dtype).eps)


# ------------------------------------------------------------------------------------------------
# torch.compile


@pytest.mark.slow
@torch.no_grad()
def test_compiled_blocks_do_not_recompile():
    """Compiled blocks need no graphs beyond those of the first two batches.

    Later batches have other texts, lengths and numbers of texts.
    """
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
    assert graphs[0] > 0 and graphs[-1] == graphs[1], (
        f"A graph was compiled after the second batch: {graphs}."
    )


@torch.library.custom_op("neobert_tests::varlen", mutates_args=())
def varlen_operation(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, s: float
) -> Tensor:
    """Compute variable-length attention in one operation that dynamo does not trace into.

    Its arguments are tensors, two integers and a scale, like those of the kernels for GPUs.
    """
    assert max_q == max_k == cu_q.diff().max(), (
        "The maximum length must not be a constant of the compiled batch."
    )
    bounds = cu_q, cu_k, max_q, max_k
    return FlashReference().varlen(q, k, v, *bounds, softmax_scale=s).contiguous()


@varlen_operation.register_fake
def _(q, k, v, cu_q, cu_k, max_q, max_k, s):
    return torch.empty_like(q)


@pytest.mark.parametrize("kernel", ("varlen", "flash_attention_2", "repadded"))
@torch.no_grad()
def test_cuda_kernels_cause_no_graph_break(kernel, monkeypatch):
    """Blocks with the kernels for GPUs compile to one graph, which all batches use.

    Only the kernel for the CPU, SDPA text by text, causes a graph break.
    """
    is_flash = kernel == "flash_attention_2"
    # In float32, the warning of transformers about flash attention would break the graph.
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

    # The first batch must not have two texts. dynamo would assume that their number always equals
    # the size of the axis of queries and keys, which is two.
    for lengths in ([9, 3, 2], [7, 5], [4, 4, 4, 1], [20, 1], [11, 12, 13, 2]):
        ids, mask = random_batch(lengths)
        hidden, expected_hidden = (
            m(ids, attention_mask=mask).last_hidden_state for m in (model, expected)
        )
        assert_same(hidden, expected_hidden, tolerance, f"output of compiled blocks with {kernel}")

    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert graphs == 1 and not counters["graph_break"]


@torch.no_grad()
@pytest.mark.parametrize("implementation", ("sdpa", "eager", "flex_attention"))
def test_empty_sequences_do_not_change_outputs(implementation):
    """Empty sequences in `cu_seq_lens_q` do not change the outputs."""
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
# Layouts on a GPU


@pytest.mark.parametrize(
    "lengths", ([5, 1, 4], [3], [2, 2], [0, 5, 0, 4, 0], [1, 40, 2, 1, 0, 3, 1, 2, 1, 1, 37])
)
def test_repadded_kernel_matches_text_by_text(lengths):
    """The re-padded kernel gives the outputs and gradients of one call per text.

    It is used in float32 on a GPU: queries, keys and values are copied to a padded batch.
    """
    total = sum(lengths)
    packing = modeling.Packing(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths))
    module = nn.Module()
    module.is_causal = False
    inputs = [torch.randn(1, 2, total, 8, requires_grad=True) for _ in range(3)]
    weights = torch.randn(1, total, 2, 8)

    results = []
    for attention, where in (
        (attention_neobert._sequence_by_sequence, packing),
        (attention_neobert._repadded, packing.padded_groups(total)),
    ):
        output = attention(modeling.eager_attention_forward, where, module, *inputs, scaling=0.3)[0]
        results.append((output, *torch.autograd.grad((output * weights).sum(), inputs)))

    assert results[0][0].shape == (1, total, 2, 8), "The output must have the shape (1, T, H, K)."
    for actual, expected in zip(*results):
        assert_same(actual, expected)


def test_repadded_kernel_groups_sequences_of_similar_length():
    """Many short sequences beside a long one are not padded to its length."""
    lengths = [4] * 400 + [2000]
    packing = modeling.Packing(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), 2000)
    groups = packing.padded_groups(sum(lengths))
    assert [tuple(tokens.shape) for tokens in groups.tokens] == [(400, 4), (1, 2000)]
    tokens = torch.cat([tokens.flatten() for tokens in groups.tokens])
    assert torch.equal(tokens[groups.positions], torch.arange(sum(lengths)))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="torch's variable-length kernel needs a CUDA device",
)
def test_varlen_kernel_precision_on_cuda():
    """torch.nn.attention.varlen in bfloat16 has about the rounding error of the padded eager model.

    The error of the outputs is at most twice, and that of the gradients at most three times the
    error of the padded eager model in bfloat16.
    """
    ids, mask = (x.cuda() for x in random_batch([60, 30, 7]))
    exact = outputs_and_gradients(plain_model().cuda(), ids, mask)
    plain = deviation(plain_model().cuda().to(torch.bfloat16), ids, mask, exact)
    model = make_model(NeoBERTModel).cuda().to(torch.bfloat16)
    packed = deviation(model, ids, mask, exact)
    assert "varlen" in model.attention_backend()
    assert packed[0] <= 2 * plain[0] and packed[1] <= 3 * plain[1]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 4096), (4, 1024), (16, 256)])
def test_at_most_8_hidden_vectors_per_token_are_live(shape):
    """Without gradients, the live tensors have at most 8 hidden vectors per token.

    A hidden vector is D values in float32, with the hidden size D of the paper. The bound does not
    depend on the number of layers.
    """
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    model = make_model(NeoBERTModel, num_hidden_layers=2, **sizes)
    ids = torch.randint(5, 100, shape)
    mask = torch.ones(shape, dtype=torch.long)
    mask[:-1, -50:] = 0
    with torch.no_grad(), LiveTensors(ids, mask, *model.parameters()) as tensors:
        model(ids, attention_mask=mask)
    hidden_vectors = tensors.peak / 4 / 768 / mask.sum().item()
    assert 3 < hidden_vectors <= 8, (
        f"The live tensors have {hidden_vectors:.2f} hidden vectors per token."
    )
