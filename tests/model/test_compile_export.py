"""Test torch.compile (one graph), torch.export with dynamic shapes, and gradient checkpointing."""

import pytest
import torch
from helpers.reference import LEARNED, assert_same, make_model, packing_arguments, random_batch

from neobert import (
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
    attention_neobert,
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Remove all compiled graphs before and after each test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_agree(actual, expected, mask, *batch, **inputs):
    """Assert that two models have the same outputs at the non-padding tokens of a batch."""
    with torch.no_grad():
        outputs = [model(*batch, **inputs)[0][mask.bool()] for model in (actual, expected)]
    assert_same(*outputs)


# ------------------------------------------------------------------------------------------------
# Compilation


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
# (attention implementation, fields of the configuration)
FORMS = (("sdpa", {}), ("eager", {}), ("sdpa", LEARNED), ("sdpa", YARN))


@pytest.mark.slow
@pytest.mark.parametrize("implementation,fields", FORMS)
def test_model_compiles_to_a_single_graph(implementation, fields):
    """The complete model compiles to a single graph, with and without an attention mask."""
    fields = {"attn_implementation": implementation, "num_hidden_layers": 2, **fields}
    model = make_model(NeoBERTForMaskedLM, **fields)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for lengths in ([12, 7], [12, 12], [20, 3, 9]):
        ids, mask = random_batch(lengths)
        assert_agree(compiled, model, mask, ids, attention_mask=mask)
        assert_agree(compiled, model, torch.ones_like(mask), ids)
    # A warning about the kernel of the weights would be a second graph.
    with torch.no_grad():
        weights = [part(ids, output_attentions=True).attentions[-1] for part in (compiled, model)]
    assert_same(*weights)


def test_compiled_training_step():
    """A compiled training step has the gradients of an eager one."""
    model = make_model(NeoBERTForMaskedLM)
    ids, mask = random_batch([12, 7])
    labels = torch.where(mask == 1, ids, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}

    model(**batch).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}

    model.zero_grad()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch).loss
    loss.backward()

    for name, p in model.named_parameters():
        assert_same(p.grad, expected[name], 2e-5, f"compiled gradient of {name}")


def test_compiled_packed_batch():
    """A batch that the caller packed compiles to a single graph."""
    model = make_model(NeoBERTModel)
    ids = random_batch([12])[0]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_agree(compiled, model, torch.ones_like(ids), ids, **packing_arguments([5, 7]))


@pytest.mark.slow
@pytest.mark.parametrize("model_class", (NeoBERTModel, NeoBERTForSequenceClassification))
@pytest.mark.parametrize("implementation", ("sdpa", "eager", "flex_attention"))
@torch.no_grad()
def test_compiled_batch_packed_by_positions(implementation, model_class):
    """Compiled and exported models separate packed texts by their positions.

    Texts whose positions restart at 0 attend to themselves only. Other positions, such as 3 to 14,
    belong to a single text.
    """
    model = make_model(model_class, attn_implementation=implementation, classifier_pooling="mean")
    compiled = torch.compile(model, backend="eager")

    for positions in (
        [*range(5), *range(7)],
        [*range(12)],
        [0, *range(4), *range(6), 0],
        [*range(3, 15)],
        [0, 1, 2, 0, 1, 5, 6, 7, 0, 1, 2, 3],
    ):
        ids = random_batch([12])[0]
        positions = torch.tensor(positions)
        actual, expected = (m(ids, position_ids=positions)[0] for m in (compiled, model))
        assert_same(actual, expected, what=f"output of positions {positions.tolist()}")
        if model_class is NeoBERTModel and positions.tolist() == [*range(5), *range(7)]:
            assert_same(actual[:, :5], model(ids[:, :5])[0], what="the first text alone")

    if model_class is NeoBERTModel and implementation == "sdpa":
        inputs = {"input_ids": ids, "position_ids": positions[None]}
        exported = torch.export.export(model, (), inputs).module()
        inputs["position_ids"] = torch.tensor([[*range(8), *range(4)]])
        assert_same(exported(**inputs)[0], model(**inputs)[0], what="exported")


def test_compiled_dynamic_rope_ignores_padding():
    """Compiled dynamic scaling depends on the longest text and not on the padding."""
    rope = {"rope_type": "dynamic", "factor": 2.0}
    model = make_model(NeoBERTModel, max_position_embeddings=16, rope_scaling=rope)
    ids, mask = random_batch([20, 9], length=40)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_agree(compiled, model, mask, ids, attention_mask=mask)


@pytest.mark.parametrize(
    "model_class", (NeoBERTForSequenceClassification, NeoBERTForTokenClassification)
)
def test_compiled_heads(model_class):
    """A task head with labels compiles to a single graph."""
    model = make_model(model_class, num_labels=3, classifier_pooling="mean")
    ids, mask = random_batch([12, 7])
    batch = {"attention_mask": mask, "labels": torch.where(mask == 1, ids % 3, -100)}
    if model_class is NeoBERTForSequenceClassification:
        batch["labels"] = torch.tensor([0, 2])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_same(compiled(ids, **batch).loss, model(ids, **batch).loss)


# ------------------------------------------------------------------------------------------------
# Export


BATCH = torch.export.Dim("batch", min=1, max=64)
LENGTH = torch.export.Dim("length", min=2, max=128)
DYNAMIC = {"input_ids": {0: BATCH, 1: LENGTH}, "attention_mask": {0: BATCH, 1: LENGTH}}


@pytest.mark.parametrize(
    "model_class", (NeoBERTModel, NeoBERTForMaskedLM, NeoBERTForSequenceClassification)
)
def test_export_with_dynamic_batch_and_length(model_class, monkeypatch):
    """An exported program accepts batches of other sizes and lengths than its example."""
    # The example has 24 tokens, and the last batch has more tokens than a slice of the feed-forward
    # layer on the CPU. The program must not depend on the number of slices of the example.
    monkeypatch.setattr(attention_neobert, "CPU_TOKENS", 50)
    model = make_model(model_class)
    ids, mask = random_batch([12, 7])
    inputs = {"input_ids": ids, "attention_mask": mask}
    program = torch.export.export(model, (), inputs, dynamic_shapes=DYNAMIC).module()

    for lengths in ([12, 7], [5], [31, 2, 17, 30]):
        ids, mask = random_batch(lengths)
        rows = mask.any(dim=1) if model_class is NeoBERTForSequenceClassification else mask
        assert_agree(program, model, rows, input_ids=ids, attention_mask=mask)


# ------------------------------------------------------------------------------------------------
# Gradient checkpointing


@pytest.mark.parametrize("packed", (True, False))
@pytest.mark.parametrize("use_reentrant", (True, False))
def test_gradient_checkpointing(use_reentrant, packed):
    """Gradient checkpointing does not change the gradients.

    Every block runs a second time in the backward pass.
    """
    ids, mask = random_batch([12, 7])
    labels = torch.where(mask == 1, ids, -100)
    gradients = []
    counts = []

    for checkpointing in (False, True):
        model = make_model(NeoBERTForMaskedLM, unpad_inputs=packed).train()
        calls = []
        if checkpointing:
            # transformers 5.24 renamed the method and deprecates the older name.
            older_method = model.gradient_checkpointing_enable
            enable = getattr(model, "activation_checkpointing_enable", older_method)
            enable({"use_reentrant": use_reentrant})
        for block in model.model.transformer_encoder:
            block.ffn.register_forward_pre_hook(lambda *args, calls=calls: calls.append(1))
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        counts.append(len(calls))
        gradients.append({name: p.grad for name, p in model.named_parameters()})

    assert counts == [3, 6]
    for name, gradient in gradients[1].items():
        assert_same(gradient, gradients[0][name], 1e-6, f"checkpointed gradient of {name}")
