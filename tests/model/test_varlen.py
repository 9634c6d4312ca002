"""Test the variable-length kernel without a GPU.

torch's wrapper `torch.nn.attention.varlen` runs on CPU kernels for its two operators. The call is
also compared with the signatures of other versions of torch.
"""

import inspect

import pytest
import torch
from helpers.reference import (
    assert_same,
    last_states,
    make_model,
    packed_batch,
    random_batch,
    texts_of,
)
from helpers.varlen_on_cpu import varlen_on_cpu

from neobert import NeoBERTForMaskedLM, NeoBERTModel, attention_neobert, modeling_neobert


varlen = pytest.importorskip(
    "torch.nn.attention.varlen", reason="torch.nn.attention.varlen needs torch 2.10 or newer"
)
PARAMETERS = inspect.signature(varlen.varlen_attn).parameters
has_num_splits = pytest.mark.skipif(
    "num_splits" not in PARAMETERS, reason="num_splits needs torch 2.12 or newer"
)


@pytest.fixture
def calls(monkeypatch):
    """Select the kernel as on a GPU, and yield the options of its calls."""
    for module in (modeling_neobert, attention_neobert):
        monkeypatch.setattr(module, "attention_kernel", lambda *args: ("varlen", None))
    with varlen_on_cpu() as calls:
        yield calls


def gradients(model, batches, count):
    """Return the gradients of all parameters for a loss that is averaged over `count` labels."""
    model.zero_grad()
    for batch in batches:
        model(**batch, num_items_in_batch=count).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layout", ["packed by the model", "packed by the caller"])
@torch.no_grad()
def test_outputs_match_the_reference(calls, layout):
    """The kernel gives the outputs of the float64 reference."""
    ids, mask = random_batch([12, 3, 12, 1, 7])
    model = make_model(NeoBERTModel)
    if layout == "packed by the model":
        hidden = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    else:
        hidden = model(**packed_batch(texts_of(ids, mask))).last_hidden_state[0]
    assert len(calls) == 3
    assert_same(hidden, last_states(model, *texts_of(ids, mask)))


def test_gradients_match_single_texts(calls, monkeypatch):
    """The kernel gives the gradients of the eager model for single texts."""
    ids, mask = random_batch([12, 3, 12, 1, 7])
    model = make_model(NeoBERTForMaskedLM)
    labels = ids.masked_fill(mask == 0, -100)
    padded = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    actual = gradients(model, [padded], 35)
    assert len(calls) == 3

    monkeypatch.undo()
    plain = make_model(NeoBERTForMaskedLM, attn_implementation="eager")
    alone = [{"input_ids": text[None], "labels": text[None]} for text in texts_of(ids, mask)]
    for name, expected in gradients(plain, alone, 35).items():
        assert_same(actual[name], expected, 2e-5, f"gradient of {name}")


@torch.no_grad()
def test_scale(calls):
    """The kernel applies the scale.

    torch 2.10 has no argument for the scale, so the default scale is not passed.
    """
    q, k, v = torch.randn(3, 1, 4, 12, 16).unbind(0)
    packing = modeling_neobert.Packing(torch.tensor([0, 4, 12], dtype=torch.int32), 8)
    attention = attention_neobert.AttentionDispatch("varlen", None, packing=packing)
    expected = attention_neobert.AttentionDispatch(
        "sequences", None, attention_neobert.eager_attention_forward, packing
    )

    module = torch.nn.Module()
    for scaling in (0.25, 0.2) if "scale" in PARAMETERS else (0.25,):
        outputs = [
            dispatch.wrap(None)(module, q, k, v, None, scaling=scaling, **packing.add_bounds({}))
            for dispatch in (attention, expected)
        ]
        assert outputs[0][1] is None and outputs[0][0].shape == (1, 12, 4, 16)
        assert_same(outputs[0][0], outputs[1][0], what=f"scale {scaling}")

    assert [call.get("scale") for call in calls] == [None, 0.2][: len(calls)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_dtype_reaches_the_kernel(calls, dtype):
    """The kernel runs in the dtype of the model."""
    ids, mask = random_batch([9, 5])
    model = make_model(NeoBERTModel).to(dtype)
    hidden = model(ids, attention_mask=mask).last_hidden_state
    assert {call["dtype"] for call in calls} == {dtype} and hidden.isfinite().all()


@has_num_splits
@torch.no_grad()
def test_num_splits_reaches_the_kernel(calls, warnings):
    """`num_splits` is passed to the kernel without a warning.

    With one split, a GPU computes the same bits for a sequence in any batch.
    """
    ids, mask = random_batch([9, 5])
    model = make_model(NeoBERTModel)
    for num_splits in (None, 1):
        calls.clear()
        model(ids, attention_mask=mask, num_splits=num_splits)
        assert [call.get("num_splits") for call in calls] == [num_splits] * 3
    assert not warnings("Check the spelling")


# Parameters after the first seven, by version of torch. Those of 2.12 and 2.13 are equal.
SIGNATURES = {
    "2.10": "is_causal=False, return_aux=None",
    "2.11": "*, return_aux=None, scale=None, window_size=(-1, -1)",
    "2.12": "*, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False, "
    "seqused_k=None, block_table=None, num_splits=None",
}
POSITIONAL = "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k"


@pytest.mark.parametrize("version", [*SIGNATURES, "installed"])
@torch.no_grad()
def test_call_matches_the_signature_of_each_torch_version(version, monkeypatch):
    """The call for the default scale is valid for every version of torch."""
    signature = inspect.signature(varlen.varlen_attn)
    if version in SIGNATURES:
        namespace = {}
        exec(f"def function({POSITIONAL}, {SIGNATURES[version]}): pass", namespace)
        signature = inspect.signature(namespace["function"])

    arguments = []

    def record(*args, **kwargs):
        arguments.append(signature.bind(*args, **kwargs).arguments)
        return torch.zeros_like(args[0])

    monkeypatch.setattr(attention_neobert, "varlen_attn", record)
    for module in (modeling_neobert, attention_neobert):
        monkeypatch.setattr(module, "attention_kernel", lambda *args: ("varlen", None))

    ids, mask = random_batch([9, 5])
    make_model(NeoBERTModel)(ids, attention_mask=mask)

    assert [*arguments[0]] == POSITIONAL.split(", ")
    assert arguments[0]["max_q"] == 9 and arguments[0]["cu_seq_q"].tolist() == [0, 5, 14]
