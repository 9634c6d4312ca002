"""Test the interfaces that serving engines use.

Covers the way vLLM calls the model, eager and compiled, registered attention and mask functions,
4-D masks, unused arguments, recompilation, and synchronization with a GPU.
"""

import ast
import inspect
import re
import textwrap

import pytest
import torch
from helpers.reference import (
    FIELDS,
    FlashReference,
    assert_same,
    last_states,
    make_model,
    packed_batch,
    packing_arguments,
    random_batch,
    texts_of,
)
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
    attention_neobert,
)
from neobert import modeling_neobert as modeling


by_torch = pytest.mark.parametrize("implementation", ("eager", "sdpa"))


def packed_ids(lengths):
    """Return the token ids and positions of packed texts, (1, T) each.

    The positions restart at 0 for every text, as in the batches of serving engines.
    """
    ids, mask = random_batch(lengths)
    return ids[mask.bool()][None], torch.cat([torch.arange(n) for n in lengths])[None]


# ------------------------------------------------------------------------------------------------
# vLLM


# Sequence lengths of the current batch. In vLLM, the attention layers get them from the scheduler.
RUNNING = {"lengths": []}


@torch.library.custom_op("neobert_tests::engine", mutates_args=())
def engine_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute attention in one opaque operation, like vLLM: (T, H * K) each -> (T, H * K).

    The lengths of the sequences are not arguments.
    """
    heads = [x.view(-1, 4, 16).split(RUNNING["lengths"]) for x in (query, key, value)]
    return torch.cat([FlashReference.attend(*part, 0.25) for part in zip(*heads)]).flatten(1)


@engine_attention.register_fake
def _(query, key, value):
    return torch.empty_like(query)


class Instance:
    """Replacement for vLLM's attention layer.

    It receives no sequence boundaries from the model.
    """

    def forward(self, query, key, value):
        return engine_attention(query, key, value)


INSTANCES = {layer: Instance() for layer in range(3)}


def vllm_attention(
    module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs
):
    """Call an attention layer with the shapes that vLLM uses.

    Queries, keys and values have the shape (1, H, T, K) and the output (T, H * K). No mask is used.
    """
    assert attention_mask is None, "The model built a mask that vLLM does not use."
    query, key, value = (x.transpose(1, 2).reshape(-1, 64) for x in (query, key, value))
    return attention_instances[module.layer_idx].forward(query, key, value), None


@pytest.fixture
def vllm():
    """Register the attention function of vLLM for one test."""
    AttentionInterface.register("vllm", vllm_attention)
    yield
    ALL_ATTENTION_FUNCTIONS._global_mapping.pop("vllm", None)


def call_of_vllm(model, ids, positions, lengths):
    """Call a model with the arguments that vLLM passes."""
    RUNNING["lengths"] = lengths
    return model(
        input_ids=ids,
        position_ids=positions,
        attention_instances=INSTANCES,
        use_cache=False,
        return_dict=False,
    )[0]


@pytest.mark.parametrize("compiled", (False, True))
@torch.no_grad()
def test_vllm_call_matches_sdpa(vllm, compiled):
    """The model gives the outputs of sdpa when vLLM calls it.

    Compiled, it has one graph for all numbers of tokens. vLLM's profile run has positions that are
    all zero.
    """
    model = make_model(NeoBERTModel)
    engine = make_model(NeoBERTModel)
    engine.config._attn_implementation = "vllm"
    run = torch.compile(engine, backend="eager", dynamic=True) if compiled else engine
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()

    for lengths in ([9, 3, 7], [5, 5], [30], [1, 2, 3, 4]):
        ids, positions = packed_ids(lengths)
        torch._dynamo.mark_dynamic(ids, 1)
        torch._dynamo.mark_dynamic(positions, 1)
        actual = call_of_vllm(run, ids, positions, lengths)
        expected = model(ids, position_ids=positions).last_hidden_state
        assert actual.shape == expected.shape
        assert_same(actual, expected, what=f"texts of {lengths}")

    assert not compiled or counters["stats"]["unique_graphs"] == 1

    ids, _ = packed_ids([12])
    assert torch.isfinite(call_of_vllm(engine, ids, torch.zeros_like(ids), [12])).all()
    torch._dynamo.reset()


def test_source_has_the_attention_call_that_vllm_expects():
    """vLLM can find the attention call in the source of the block's `forward`.

    vLLM requires a single call of a local variable that was assigned from ALL_ATTENTION_FUNCTIONS,
    and reads the scaling from this call.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(modeling.NeoBERTBlock.forward)))
    names = set()
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            if re.match(r"ALL_ATTENTION_FUNCTIONS[.\[]", ast.unparse(node.value)):
                names |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.Call):
            calls.append(node)

    (call,) = (node for node in calls if ast.unparse(node.func) in names)
    scalings = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "scaling"]
    assert scalings == ["self.scaling"] and NeoBERTModel._supports_attention_backend


# ------------------------------------------------------------------------------------------------
# Masks of the caller


@by_torch
@pytest.mark.parametrize("kind", ("boolean", "whole numbers", "additive", "additive per head"))
@torch.no_grad()
def test_4d_mask_separates_packed_sequences(implementation, kind):
    """A (1, 1, L, L) mask separates sequences that the caller packed itself.

    The caller also passes the positions.
    """
    lengths = [6, 4]
    ids, positions = packed_ids(lengths)
    model = make_model(NeoBERTModel, attn_implementation=implementation)

    mask = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()[None, None]
    if kind.startswith("additive"):
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    if kind == "additive per head":
        mask = mask.expand(1, 4, 10, 10)
    if kind == "whole numbers":
        mask = mask.long()

    hidden = model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    assert_same(hidden[0], last_states(model, *ids[0].split(lengths)))


@by_torch
@torch.no_grad()
def test_extended_attention_mask_of_bert(implementation):
    """A boolean or additive mask of shape (B, 1, 1, L) masks the same keys for all queries.

    `get_extended_attention_mask` of BERT returns such masks. Other 4-D shapes raise a ValueError.
    """
    ids, mask = random_batch([8, 5])
    model = make_model(NeoBERTModel, attn_implementation=implementation)
    for extended in (mask[:, None, None].bool(), (1 - mask[:, None, None].float()) * -1e4):
        hidden = model(ids, attention_mask=extended).last_hidden_state
        assert_same(hidden[mask.bool()], last_states(model, *texts_of(ids, mask)))
    for shape in ((2, 1, 2, 8), (3, 1, 8, 8)):
        with pytest.raises(ValueError, match=f"must have shape .* got {re.escape(str(shape))}"):
            model(ids, attention_mask=torch.ones(shape))


def test_flex_attention_rejects_4d_masks():
    """A 4-D mask raises a ValueError for flex_attention, which does not support it."""
    model = make_model(NeoBERTModel, attn_implementation="flex_attention")
    with pytest.raises(
        ValueError, match="must have shape .batch, length. for flex_attention.*'sdpa' or 'eager'"
    ):
        model(random_batch([8])[0], attention_mask=torch.ones(1, 1, 8, 8))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@torch.no_grad()
def test_a_registered_mask_function_is_called(dtype):
    """The model calls a function that was registered with `AttentionMaskInterface`.

    The function receives the arguments that transformers passes, and its result is passed to the
    attention function.
    """
    calls = []

    def my_mask(batch_size, kv_length, mask_function, attention_mask=None, dtype=None, **kwargs):
        calls.append((batch_size, kv_length, dtype, sorted(kwargs)))
        tokens = torch.arange(kv_length)
        index = (torch.arange(batch_size)[:, None, None, None], torch.zeros(1, 1, 1, 1).long())
        allowed = mask_function(*index, tokens[None, None, :, None], tokens[None, None, None, :])
        mask = torch.zeros(batch_size, 1, kv_length, kv_length, dtype=dtype)
        return mask.masked_fill(~allowed, torch.finfo(dtype).min)

    def my_function(module, query, key, value, attention_mask, scaling=None, **kwargs):
        scores = query @ key.transpose(-1, -2) * scaling
        assert attention_mask.dtype == dtype and attention_mask.shape[-2:] == scores.shape[-2:]
        weights = (scores + attention_mask).softmax(-1, dtype=torch.float32).to(value.dtype)
        return (weights @ value).transpose(1, 2), None

    AttentionInterface.register("with_a_mask", my_function)
    AttentionMaskInterface.register("with_a_mask", my_mask)
    model, expected = (make_model(NeoBERTModel).to(dtype) for _ in range(2))
    model.config._attn_implementation = "with_a_mask"

    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    ids, mask = random_batch([9, 5])
    outputs = (m(ids, attention_mask=mask)[0][mask.bool()] for m in (model, expected))
    assert_same(*outputs, tolerance, "padded")

    packed, positions = packed_ids([6, 4])
    outputs = (m(packed, position_ids=positions)[0] for m in (model, expected))
    assert_same(*outputs, tolerance, "packed")

    assert [call[:3] for call in calls] == [(2, 9, dtype), (1, 10, dtype)], (
        "The mask function must run once per forward pass."
    )
    assert {"cache_position", "config", "q_length", "kv_offset"} <= set(calls[0][3])


# ------------------------------------------------------------------------------------------------
# Arguments and labels


def test_unused_arguments_are_reported_once(warnings):
    """One warning lists all arguments that the model does not use.

    Arguments of transformers and serving engines, and None, cause no warning.
    """
    model = make_model(NeoBERTModel)
    ids = random_batch([5])[0]
    known = {"use_cache": False, "attention_instances": {}, "past_key_values": None}
    model(ids, num_items_in_batch=3, output_router_logits=False, **known)
    assert not warnings(""), "Known arguments and None must not cause a warning."
    for _ in range(2):
        model(ids, head_mask=torch.ones(4), attentionmask=torch.ones(1, 5), past_key_values=())
    (message,) = warnings("Check their spelling")
    assert "attentionmask, head_mask, past_key_values" in message


@pytest.mark.parametrize("unpad_inputs", (True, False))
def test_flat_and_single_column_labels(unpad_inputs):
    """Labels may have the shapes that BERT accepts, and labels at padding are ignored.

    The shapes are (B * L,) for tokens and (B, 1) for classes.
    """
    ids, mask = random_batch([9, 5])

    def loss(model, labels):
        return model(ids, attention_mask=mask, labels=labels).loss

    for model_class, classes in ((NeoBERTForMaskedLM, 200), (NeoBERTForTokenClassification, 3)):
        model = make_model(model_class, num_labels=3, unpad_inputs=unpad_inputs)
        labels = torch.where(mask == 1, ids % classes, -100)
        assert_same(loss(model, labels.flatten()), loss(model, labels), 1e-6, "flat")
        assert_same(loss(model, ids % classes), loss(model, labels), 1e-6, "labels at padding")

    model = make_model(NeoBERTForSequenceClassification, num_labels=3)
    labels = torch.tensor([2, 0])
    assert_same(loss(model, labels[:, None]), loss(model, labels), 1e-6, "one column")


# ------------------------------------------------------------------------------------------------
# Compilation


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("eager", "inductor"))
@torch.no_grad()
def test_packed_rows_of_all_lengths_share_one_graph(backend):
    """Packed rows of any number of tokens use the same graph.

    `F.pad` with a symbolic fill value made the length a constant. After eight recompilations, torch
    did not compile the model any more.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()

    model = make_model(NeoBERTModel, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)

    for lengths in ([5, 7], [9, 3, 7], [12], [4, 4, 4, 4], [20, 11]):
        ids, positions = packed_ids(lengths)
        actual, expected = (m(ids, position_ids=positions)[0] for m in (compiled, model))
        assert_same(actual, expected, what=f"texts of {lengths}")

    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert graphs == 1


@pytest.mark.parametrize("pooling", ("cls", "mean"))
@torch.no_grad()
def test_sequence_head_with_positions_compiles_to_one_graph(pooling):
    """A sequence head compiles to a single graph that handles one or more packed texts.

    Only the values of position_ids determine whether a row is one text or several.
    """
    torch._dynamo.reset()
    model = make_model(NeoBERTForSequenceClassification, num_labels=3, classifier_pooling=pooling)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for lengths in ([12], [5, 7]):
        ids, positions = packed_ids(lengths)
        actual, expected = (m(ids, position_ids=positions).logits for m in (compiled, model))
        assert actual.shape == (len(lengths), 3)
        assert_same(actual, expected, what=f"texts of {lengths}")
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------
# Simulated GPU


@pytest.fixture
def cuda(monkeypatch):
    """Select kernels as on a GPU of compute capability 9.0, and return the calls of the kernel.

    The variable-length kernel is replaced by a function that returns zeros.
    """
    device = torch.device("cuda")
    kernel = modeling.attention_kernel
    calls = []

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, **kwargs):
        calls.append((cu_q, max_q, kwargs))
        return torch.zeros_like(q)

    monkeypatch.setattr(attention_neobert, "varlen_attn", varlen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in (modeling, attention_neobert):
        monkeypatch.setattr(
            module,
            "attention_kernel",
            lambda config, name, _, dtype, training: kernel(config, name, device, dtype, training),
        )
        monkeypatch.setattr(module, "has_host_values", lambda x: False)
        monkeypatch.setattr(module, "is_cpu_inference", lambda x: False)
    return calls


# Functions of torch.Tensor that read values of a tensor on the host.
READS = "item tolist __bool__ __int__ __float__ __index__ nonzero numpy cpu".split()


def count_waits(monkeypatch):
    """Patch all functions that read values of a tensor on the host, and return the list of calls.

    Each of these calls would wait for a GPU.
    """
    waits = []

    def recorded(function):
        def read(*args, **kwargs):
            waits.append(function.__name__)
            return function(*args, **kwargs)

        return read

    for owner, name in (*((torch.Tensor, name) for name in READS), (torch, "equal")):
        monkeypatch.setattr(owner, name, recorded(getattr(owner, name)))
    return waits


HEADS = (
    NeoBERTModel,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
)


@pytest.mark.parametrize("model_class", HEADS)
def test_number_of_gpu_synchronizations(model_class, cuda, monkeypatch):
    """Check how often a forward pass would wait for a GPU, for any number of layers.

    A padded batch waits once, for the lengths of its rows. A packed batch whose maximum lengths are
    integers and a batch without a mask never wait. Labels do not add a wait.
    """
    ids, mask = random_batch([9, 3, 7])
    padded = {"input_ids": ids, "attention_mask": mask}
    packed = packed_batch(texts_of(ids, mask))
    if model_class is NeoBERTForSequenceClassification:
        packed["labels"] = padded["labels"] = torch.tensor([0, 2, 1])
    elif model_class is not NeoBERTModel:
        padded["labels"] = torch.where(mask == 1, ids % 3, -100)
        packed["labels"] = padded["labels"][mask.bool()][None]

    fields = {"num_labels": 3, "problem_type": "single_label_classification"}
    for batch, allowed in ((padded, 1), (packed, 0), ({**padded, "attention_mask": None}, 0)):
        for layers in (1, 4):
            model = make_model(model_class, num_hidden_layers=layers, **fields)
            model = model.to(torch.bfloat16).train()
            with monkeypatch.context() as patch:
                waits = count_waits(patch)
                model(**batch)
            assert len(waits) == allowed, f"{layers} layers wait {len(waits)} times: {waits}."

    assert cuda and all(call[1] == 9 and isinstance(call[1], int) for call in cuda)


def test_attention_dropout_on_cuda(cuda):
    """Attention dropout is applied when training in bfloat16 on a GPU.

    torch's kernel has no dropout, so the re-padded kernel runs in training. In eval mode, torch's
    kernel runs.
    """
    ids, mask = random_batch([9, 3, 7])
    model = make_model(NeoBERTModel, attention_dropout=0.5).to(torch.bfloat16).train()
    with torch.no_grad():
        first, second = (model(ids, attention_mask=mask).last_hidden_state for _ in range(2))
    assert not cuda and not torch.equal(first, second), "Attention dropout has no effect."
    model.eval()(ids, attention_mask=mask)
    assert len(cuda) == 3


@pytest.mark.parametrize("longest", (6, torch.tensor(6)))
def test_tensor_max_length_selects_masked_kernel_while_tracing(cuda, longest, monkeypatch):
    """While tracing, a maximum length that is a tensor selects the masked kernel.

    The number of columns of a re-padded batch must be an integer while tracing. With a tensor, a
    mask separates the sequences.
    """
    monkeypatch.setattr(attention_neobert, "is_tracing", lambda: True)
    packing = modeling.Packing(torch.tensor([0, 4, 10], dtype=torch.int32), longest)
    attention = modeling.dispatch_attention(
        NeoBERTConfig(**FIELDS), "sdpa", torch.zeros(1, 10, 64), None, packing, False
    )
    assert attention.kernel == ("masked" if torch.is_tensor(longest) else "repadded")


@torch.no_grad()
def test_compiled_packed_batch_on_cuda_has_no_square_mask(cuda, monkeypatch):
    """A packed batch compiles to one graph with the variable-length kernel.

    With 600 tokens, no tensor of the graph has 600 x 600 elements.
    """
    from .test_packing import varlen_operation

    monkeypatch.setattr(
        attention_neobert, "varlen_attn", lambda *tensors: varlen_operation(*tensors, 0.25)
    )

    fields = {"num_hidden_layers": 1, "max_position_embeddings": 600}
    model, expected = (make_model(NeoBERTModel, **fields).to(torch.bfloat16) for _ in range(2))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    ids, _ = random_batch([600])
    packed = packing_arguments([250, 350])
    hidden, expected_hidden = (m(ids, **packed)[0].float() for m in (compiled, expected))
    torch._dynamo.reset()

    assert_same(hidden, expected_hidden, 0.1, "compiled")

    values = (node.meta.get("example_value") for node in graphs[0].graph.nodes)
    sizes = [int(value.numel()) for value in values if torch.is_tensor(value)]
    assert 0 < max(sizes) < 600 * 600, "The graph contains a mask of all pairs of tokens."
