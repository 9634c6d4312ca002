"""Pins the task heads: logits and losses against formulas in float64, `num_items_in_batch`
(accumulated gradients are the whole batch's), pooling under any padding and packed,
`sparse_prediction`, and the sentences about wrong labels.
"""

import pytest
import torch

from neobert import (
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
)
from neobert.modeling_neobert import Packing

from .reference import assert_same, make_model, packing_arguments, random_batch, reference_states


def log_softmax(logits):
    logits = logits.double()
    return logits - logits.exp().sum(-1, keepdim=True).log()


def cross_entropy(logits, labels):
    """Sum over labels other than -100 of -log p(label), and their number."""
    logits, labels = logits.flatten(0, -2), labels.flatten()
    rows = [
        -log_softmax(logits[i])[label] for i, label in enumerate(labels.tolist()) if label != -100
    ]
    return sum(rows, torch.zeros((), dtype=torch.float64)), len(rows)


def hidden_of(model, ids):
    return reference_states(model, ids)[0][-1]


def weights(module):
    return module.weight.detach().double(), module.bias.detach().double()


def linear(module, x):
    weight, bias = weights(module)
    return x @ weight.T + bias


def close(actual, expected, what="loss"):
    assert_same(torch.as_tensor(actual), torch.as_tensor(expected), 1e-5, what)


# ------------------------------------------------------------------------------------------------
# masked LM


def mlm_batch():
    ids, mask = random_batch([14, 6])
    labels = torch.full_like(ids, -100)
    labels[0, [1, 5, 13]] = torch.tensor([7, 0, 199])
    labels[1, [0, 5]] = torch.tensor([100, 3])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("unpad_inputs", (True, False))
def test_masked_lm(unpad_inputs):
    model = make_model(NeoBERTForMaskedLM, unpad_inputs=unpad_inputs)
    batch = mlm_batch()
    out = model(**batch)
    total, count = 0, 0
    for row, n in enumerate((14, 6)):
        logits = linear(model.decoder, hidden_of(model, batch["input_ids"][row, :n]))
        close(out.logits[row, :n], logits, "logits")
        loss, number = cross_entropy(logits, batch["labels"][row, :n])
        total, count = total + loss, count + number
    assert count == 5, "Ignored labels are counted."
    close(out.loss, total / count)
    close(model(**batch, num_items_in_batch=20).loss, total / 20)
    close(model(**batch, num_items_in_batch=torch.tensor(20)).loss, total / 20)


def test_masked_lm_without_a_label_has_loss_zero():
    for sparse in (False, True):
        model = make_model(NeoBERTForMaskedLM, sparse_prediction=sparse)
        batch = mlm_batch()
        batch["labels"].fill_(-100)
        for items in (None, 0, torch.tensor(0)):
            loss = model(**batch, num_items_in_batch=items).loss
            assert loss.item() == 0, f"The loss of no label is {loss.item()}."
            loss.backward()
            assert all(
                torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None
            )


def test_sparse_prediction_gives_the_same_loss_and_gradients():
    everything, masked = (
        make_model(NeoBERTForMaskedLM),
        make_model(NeoBERTForMaskedLM, sparse_prediction=True),
    )
    batch = mlm_batch()
    seen = []
    first, second = everything(**batch), masked(**batch)
    close(
        second.logits,
        first.logits[batch["labels"] != -100],
        "logits of labelled tokens, in the order of the rows",
    )
    masked.decoder.register_forward_hook(
        lambda module, args, out: seen.append(args[0].numel() // 64)
    )
    first, second = everything(**batch), masked(**batch)
    assert seen == [5], f"The decoder ran on {seen} tokens in place of the 5 labelled ones."
    close(second.loss, first.loss)
    assert second.logits.shape == (5, 200)
    close(second.logits, first.logits[batch["labels"] != -100], "logits of labelled tokens")
    first.loss.backward()
    second.loss.backward()
    for (name, p), q in zip(everything.named_parameters(), masked.parameters()):
        assert_same(q.grad, p.grad, 1e-5, f"gradient of {name}")
    labels = batch.pop("labels")
    assert masked(**batch).logits.shape == (2, 14, 200), (
        "Without labels there are logits for every token."
    )
    close(masked(**batch, labels=labels, num_items_in_batch=9).loss, first.loss * 5 / 9)


@pytest.mark.parametrize("head", (NeoBERTForMaskedLM, NeoBERTForTokenClassification))
@pytest.mark.parametrize("unpad_inputs", (True, False))
def test_labels_at_padding_do_not_dilute_the_loss(head, unpad_inputs):
    """Trainer counts every label but -100 into num_items_in_batch, those at padding too."""
    model = make_model(head, num_labels=3, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([14, 6])
    labels = torch.randint(0, 3, ids.shape)
    expected = model(ids, attention_mask=mask, labels=labels).loss
    close(
        expected, model(ids, attention_mask=mask, labels=labels.masked_fill(mask == 0, -100)).loss
    )
    for items in (28, torch.tensor(28)):
        close(
            model(ids, attention_mask=mask, labels=labels, num_items_in_batch=items).loss, expected
        )


def test_losses_are_taken_in_float32():
    model = make_model(NeoBERTForMaskedLM)
    batch = mlm_batch()
    expected = model(**batch).loss
    out = model.to(torch.bfloat16)(**batch)
    assert out.logits.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    assert abs(out.loss.item() - expected.item()) < 0.05 * expected.item()


# ------------------------------------------------------------------------------------------------
# pooling, sequences


def classify(model, pooled):
    return linear(model.classifier, torch.tanh(linear(model.dense, pooled)))


@pytest.mark.parametrize("pooling", ("cls", "mean"))
@pytest.mark.parametrize("unpad_inputs", (True, False))
@torch.no_grad()
def test_pooling(pooling, unpad_inputs):
    """tanh(dense(pooled)) -> classifier, pooled over real tokens: right, left, no padding, packed,
    or the text alone."""
    model = make_model(
        NeoBERTForSequenceClassification,
        num_labels=3,
        classifier_pooling=pooling,
        unpad_inputs=unpad_inputs,
    )
    lengths = [10, 4, 7]
    right, right_mask = random_batch(lengths)
    left, left_mask = random_batch(lengths, side="left")
    texts = [right[row, :n] for row, n in enumerate(lengths)]
    assert all(
        torch.equal(left[row][left_mask[row].bool()], text) for row, text in enumerate(texts)
    )
    hidden = [hidden_of(model, text) for text in texts]
    expected = torch.stack(
        [classify(model, h[0] if pooling == "cls" else h.mean(0)) for h in hidden]
    )
    assert (expected[0] - expected[1]).abs().max() > 0.01, (
        "The texts must differ for this test to mean something."
    )
    assert_same(
        model(right, attention_mask=right_mask).logits, expected, 2e-5, "right-padded logits"
    )
    assert_same(model(left, attention_mask=left_mask).logits, expected, 2e-5, "left-padded logits")
    assert_same(model(texts[0][None]).logits[0], expected[0], 2e-5, "logits of a text alone")
    packed = packing_arguments(lengths)
    assert_same(model(torch.cat(texts)[None], **packed).logits, expected, 2e-5, "packed logits")
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    assert_same(
        model(torch.cat(texts)[None], position_ids=positions).logits,
        expected,
        2e-5,
        "logits of restarting positions",
    )
    assert_same(
        model(torch.cat(texts)[None], position_ids=positions[0]).logits,
        expected,
        2e-5,
        "logits of restarting positions (T,)",
    )


@pytest.mark.parametrize("pooling", ("cls", "mean"))
@torch.no_grad()
def test_pooling_of_empty_packed_texts(pooling):
    """They pool to zero, wherever they lie, and their neighbours to what they are without them."""
    model = make_model(NeoBERTForSequenceClassification, num_labels=3, classifier_pooling=pooling)
    ids, _ = random_batch([9])
    full = model(ids, cu_seq_lens_q=torch.tensor([0, 4, 9])).logits
    empty = classify(model, torch.zeros(model.config.hidden_size, dtype=torch.double))
    for bounds, rows in (([0, 0, 4, 9], (1, 2)), ([0, 4, 4, 9], (0, 2)), ([0, 4, 9, 9], (0, 1))):
        logits = model(ids, cu_seq_lens_q=torch.tensor(bounds)).logits
        assert_same(logits[list(rows)], full, 2e-5, f"texts of {bounds}")
        (left,) = {0, 1, 2} - set(rows)
        assert_same(logits[left], empty, 2e-5, f"the empty text of {bounds}")


@torch.no_grad()
@pytest.mark.parametrize("dtype,value", ((torch.bfloat16, 1), (torch.float16, 100)))
def test_mean_pooling_sums_in_float32(dtype, value):
    """bfloat16 has 8 bits: a running sum of 4,000 ones stops at 256; float16 ends at 65,504."""
    model = make_model(
        NeoBERTForSequenceClassification, num_labels=2, classifier_pooling="mean"
    ).to(dtype)
    hidden = torch.full((1, 4000, 64), float(value), dtype=dtype)
    packing = Packing(torch.tensor([0, 1000, 4000], dtype=torch.int32), 3000)
    for pooled in (
        model.pool(hidden),
        model.pool(hidden, attention_mask=torch.ones(1, 4000)),
        model.pool(hidden, packing=packing),
    ):
        assert pooled.dtype == dtype
        assert ((pooled / value - 1).abs() < 0.01).all()


def sequence_model(**fields):
    return make_model(NeoBERTForSequenceClassification, **fields)


@pytest.mark.parametrize("problem", (None, "single_label_classification"))
def test_single_label(problem):
    model = sequence_model(num_labels=3, problem_type=problem)
    ids, mask = random_batch([6, 3, 5, 4])
    labels = torch.tensor([2, 0, -100, 1])
    out = model(ids, attention_mask=mask, labels=labels)
    total, count = cross_entropy(out.logits, labels)
    assert count == 3
    close(out.loss, total / 3)
    close(model(ids, attention_mask=mask, labels=labels, num_items_in_batch=7).loss, total / 7)


@pytest.mark.parametrize("problem", (None, "regression"))
def test_regression(problem):
    ids, mask = random_batch([6, 3])
    one = sequence_model(num_labels=1, problem_type=problem)
    for labels in (torch.tensor([0.5, -2.0]), torch.tensor([[0.5], [-2.0]]), torch.tensor([1, 4])):
        out = one(ids, attention_mask=mask, labels=labels)
        squares = (out.logits.double().flatten() - labels.flatten()) ** 2
        close(out.loss, squares.mean())
        close(
            one(ids, attention_mask=mask, labels=labels, num_items_in_batch=8).loss,
            squares.sum() / 8,
        )
    several = sequence_model(num_labels=3, problem_type="regression")
    labels = torch.randn(2, 3)
    out = several(ids, attention_mask=mask, labels=labels)
    close(out.loss, ((out.logits.double() - labels) ** 2).mean())


@pytest.mark.parametrize("problem", (None, "multi_label_classification"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.int64))
def test_multi_label(problem, dtype):
    model = sequence_model(num_labels=3, problem_type=problem)
    ids, mask = random_batch([6, 3])
    labels = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=dtype)
    out = model(ids, attention_mask=mask, labels=labels)
    p = 1 / (1 + torch.exp(-out.logits.double()))
    terms = -(labels * p.log() + (1 - labels) * (1 - p).log())
    close(out.loss, terms.mean())
    close(
        model(ids, attention_mask=mask, labels=labels, num_items_in_batch=12).loss, terms.sum() / 12
    )


# ------------------------------------------------------------------------------------------------
# other heads


@pytest.mark.parametrize("unpad_inputs", (True, False))
def test_token_classification(unpad_inputs):
    model = make_model(NeoBERTForTokenClassification, num_labels=5, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([9, 4])
    labels = torch.where(mask == 1, ids % 5, -100)
    labels[0, 2] = -100
    out = model(ids, attention_mask=mask, labels=labels)
    for row, n in enumerate((9, 4)):
        close(
            out.logits[row, :n], linear(model.classifier, hidden_of(model, ids[row, :n])), "logits"
        )
    total, count = cross_entropy(out.logits, labels)
    assert count == 12
    close(out.loss, total / 12)
    close(model(ids, attention_mask=mask, labels=labels, num_items_in_batch=30).loss, total / 30)


def test_question_answering():
    model = make_model(NeoBERTForQuestionAnswering)
    ids, mask = random_batch([9, 6, 8])
    start, end = torch.tensor([1, 5, 0]), torch.tensor([3, 5, 7])
    out = model(ids, attention_mask=mask, start_positions=start, end_positions=end)
    logits = linear(model.qa_outputs, hidden_of(model, ids[1, :6]))
    close(out.start_logits[1, :6], logits[:, 0], "start logits")
    close(out.end_logits[1, :6], logits[:, 1], "end logits")
    first, second = cross_entropy(out.start_logits, start)[0], cross_entropy(out.end_logits, end)[0]
    close(out.loss, (first + second) / 2 / 3)
    column = model(
        ids, attention_mask=mask, start_positions=start[:, None], end_positions=end[:, None]
    )
    close(column.loss, out.loss)
    close(
        model(
            ids, attention_mask=mask, start_positions=start, end_positions=end, num_items_in_batch=6
        ).loss,
        out.loss / 2,
    )


@pytest.mark.parametrize("unpad_inputs", (True, False))
def test_question_answering_does_not_depend_on_padding(unpad_inputs):
    """Loss and answers of a text are those of the text alone; no answer is padding."""
    model = make_model(NeoBERTForQuestionAnswering, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([6, 15], length=20)
    start, end = torch.tensor([1, 14]), torch.tensor([5, 14])
    alone = [
        model(
            ids[i : i + 1, :n], start_positions=start[i : i + 1], end_positions=end[i : i + 1]
        ).loss
        for i, n in enumerate((6, 15))
    ]
    out = model(ids, attention_mask=mask, start_positions=start, end_positions=end)
    close(out.loss, sum(alone) / 2)
    padding = mask == 0
    assert (out.start_logits.softmax(-1)[padding] == 0).all() and (
        out.end_logits.softmax(-1)[padding] == 0
    ).all()


@pytest.mark.parametrize("unpad_inputs", (True, False))
def test_question_answering_ignores_answers_outside_of_the_text(unpad_inputs):
    """Behind the row, before it, and at padding."""
    model = make_model(NeoBERTForQuestionAnswering, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([9, 9, 5])

    def run(start, end):
        start, end = torch.tensor(start), torch.tensor(end)
        return model(ids, attention_mask=mask, start_positions=start, end_positions=end)

    out = run([1, 9, 400], [3, -1, 2])
    first = cross_entropy(out.start_logits[:1], torch.tensor([1]))[0]
    second = cross_entropy(out.end_logits[[0, 2]], torch.tensor([3, 2]))[0] / 2
    close(out.loss, (first + second) / 2)
    close(run([1, 4, 8], [3, 4, 7]).loss, run([1, 4, 9], [3, 4, 9]).loss)
    assert run([9, 9, 9], [9, 9, 9]).loss.item() == 0


@pytest.mark.parametrize("pooling", ("cls", "mean"))
def test_multiple_choice(pooling):
    model = make_model(NeoBERTForMultipleChoice, classifier_pooling=pooling)
    lengths = [9, 4, 6, 7, 8, 3]
    ids, mask = random_batch(lengths)
    labels = torch.tensor([2, 0])
    shaped = {
        "input_ids": ids.view(2, 3, 9),
        "attention_mask": mask.view(2, 3, 9),
        "token_type_ids": torch.zeros(2, 3, 9, dtype=torch.long),
    }
    out = model(**shaped, labels=labels)
    hidden = [hidden_of(model, ids[row, :n]) for row, n in enumerate(lengths)]
    scores = torch.stack(
        [classify(model, h[0] if pooling == "cls" else h.mean(0)) for h in hidden]
    ).view(2, 3)
    assert_same(out.logits, scores, 2e-5, "logits")
    total, _ = cross_entropy(scores, labels)
    close(out.loss, total / 2)
    close(model(**shaped, labels=labels, num_items_in_batch=8).loss, total / 8)
    embeds = model.get_input_embeddings()(shaped["input_ids"])
    assert_same(
        model(inputs_embeds=embeds, attention_mask=shaped["attention_mask"]).logits,
        scores,
        2e-5,
        "logits of inputs_embeds",
    )
    positions = torch.arange(9).expand(2, 3, 9)
    assert_same(
        model(**shaped, position_ids=positions).logits, scores, 2e-5, "logits with position_ids"
    )


@torch.no_grad()
def test_one_choice_is_not_taken_for_a_packed_batch():
    model = make_model(NeoBERTForMultipleChoice)
    ids, _ = random_batch([6])
    expected = model(ids.view(1, 1, 6)).logits
    assert expected.shape == (1, 1)
    assert model(
        ids.view(1, 1, 6), position_ids=torch.tensor([0, 1, 2, 0, 1, 2]).view(1, 1, 6)
    ).logits.shape == (1, 1)


@torch.no_grad()
def test_labels_of_a_quantised_model():
    """torch's dynamic int8 layers have no weight tensor."""
    model = make_model(NeoBERTForMaskedLM)
    ids, mask = random_batch([9, 4])
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    loss, expected = (m(ids, attention_mask=mask, labels=ids).loss for m in (quantised, model))
    assert abs(loss - expected) < 0.1 * expected


# ----------------------------------------------------------------------------------------------
# gradient accumulation


def batches():
    ids, mask = random_batch([9, 4, 6, 7, 2])
    tokens = torch.where(mask == 1, (ids * 3) % 3, -100)
    tokens[0, 3:] = -100
    common = {"input_ids": ids, "attention_mask": mask}
    words = torch.where(tokens == -100, -100, ids)
    candidates = {name: value[:, None].expand(-1, 2, -1).clone() for name, value in common.items()}
    candidates["input_ids"][:, 1] = candidates["input_ids"][:, 1] * 2 % 200
    return {
        "masked LM": (NeoBERTForMaskedLM, {}, {**common, "labels": words}),
        "masked LM, labelled logits": (
            NeoBERTForMaskedLM,
            {"sparse_prediction": True},
            {**common, "labels": words},
        ),
        "single label": (
            NeoBERTForSequenceClassification,
            {"num_labels": 3},
            {**common, "labels": torch.tensor([0, 2, 1, -100, 0])},
        ),
        "regression": (
            NeoBERTForSequenceClassification,
            {"num_labels": 1},
            {**common, "labels": torch.randn(5)},
        ),
        "multi label": (
            NeoBERTForSequenceClassification,
            {"num_labels": 3},
            {**common, "labels": (torch.rand(5, 3) > 0.5).float()},
        ),
        "tokens": (NeoBERTForTokenClassification, {"num_labels": 3}, {**common, "labels": tokens}),
        "choices": (
            NeoBERTForMultipleChoice,
            {},
            {**candidates, "labels": torch.tensor([0, 1, 1, 0, 1])},
        ),
    }


@pytest.mark.parametrize("items", ("int", "tensor"))
@pytest.mark.parametrize("head", list(batches()))
def test_accumulation_gives_the_gradients_of_the_whole_batch(head, items):
    """Micro-batches of 3 and 2 rows, divided by the label count that Trainer passes, add up to the
    batch of 5."""
    model_class, fields, batch = batches()[head]
    model = make_model(model_class, **fields)

    def gradients(parts, **kwargs):
        model.zero_grad()
        losses = []
        for rows in parts:
            out = model(**{name: value[rows] for name, value in batch.items()}, **kwargs)
            out.loss.backward()
            losses.append(out.loss.item())
        return sum(losses), {name: p.grad.clone() for name, p in model.named_parameters()}

    count = (batch["labels"] != -100).sum()
    whole, expected = gradients([slice(0, 5)])
    parts, actual = gradients(
        [slice(0, 3), slice(3, 5)], num_items_in_batch=count if items == "tensor" else count.item()
    )
    assert abs(whole - parts) < 1e-5 * abs(whole)
    for name, gradient in actual.items():
        # The gradient of the choices' common bias is zero but for rounding.
        if expected[name].abs().max() > 1e-7:
            assert_same(gradient, expected[name], 2e-5, f"accumulated gradient of {name}")
    ignored, _ = gradients([slice(0, 3), slice(3, 5)])
    assert abs(ignored - whole) > 1e-3 * abs(whole), (
        "num_items_in_batch makes no difference here, so this test would be vacuous."
    )


# ------------------------------------------------------------------------------------------------
# bad labels


IDS = torch.ones(2, 6, dtype=torch.long)


BAD_LABELS = {
    "class beyond the last": (
        NeoBERTForSequenceClassification,
        {"num_labels": 3},
        {"labels": torch.tensor([0, 3])},
        "between 0 and 2.*3 was",
    ),
    "one label for two texts": (
        NeoBERTForSequenceClassification,
        {"num_labels": 3},
        {"labels": torch.tensor([0])},
        r"\(2,\).*\(1,\)",
    ),
    "float classes": (
        NeoBERTForSequenceClassification,
        {"num_labels": 3, "problem_type": "single_label_classification"},
        {"labels": torch.tensor([0.0, 1.0])},
        "whole numbers.*float32",
    ),
    "multi-label width": (
        NeoBERTForSequenceClassification,
        {"num_labels": 3},
        {"labels": torch.ones(2, 4)},
        r"\(2, 3\).*\(2, 4\)",
    ),
    "multi-label range": (
        NeoBERTForSequenceClassification,
        {"num_labels": 3},
        {"labels": torch.ones(2, 3) * 2},
        "between 0 and 1, but others",
    ),
    "regression length": (
        NeoBERTForSequenceClassification,
        {"num_labels": 1},
        {"labels": torch.ones(3)},
        r"\(2,\).*\(3,\)",
    ),
    "token labels per text": (
        NeoBERTForTokenClassification,
        {"num_labels": 3},
        {"labels": torch.tensor([0, 1])},
        r"\(2, 6\).*\(2,\)",
    ),
    "one answer for two texts": (
        NeoBERTForQuestionAnswering,
        {},
        {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([1])},
        r"start_positions.*\(2,\).*\(1,\)",
    ),
}


@pytest.mark.parametrize("case", BAD_LABELS)
def test_bad_labels(case):
    model_class, fields, inputs, sentence = BAD_LABELS[case]
    with pytest.raises(ValueError, match=sentence) as error:
        make_model(model_class, **fields)(IDS, **inputs)
    assert "\n" not in str(error.value)


def test_bad_choices():
    model = make_model(NeoBERTForMultipleChoice)
    with pytest.raises(ValueError, match=r"input_ids of shape.*\(12,\)"):
        model(IDS)
    with pytest.raises(ValueError, match="between 0 and 1.*5 was"):
        model(IDS.view(2, 2, 3), labels=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="input_ids"):
        model()


@pytest.mark.parametrize(
    "problem, labels",
    [
        ("regression", [[0.5, 1.25], [2.0, -1.0]]),
        ("multi_label_classification", [[1.0, 0.0], [0.0, 1.0]]),
    ],
)
def test_these_losses_are_taken_in_float32_too(problem, labels):
    model = make_model(NeoBERTForSequenceClassification, num_labels=2, problem_type=problem).to(
        torch.bfloat16
    )
    ids, mask = random_batch([9, 4])
    labels = torch.tensor(labels)
    outputs = model(ids, attention_mask=mask, labels=labels)
    logits = outputs.logits.double()
    expected = (
        (logits - labels).square()
        if problem == "regression"
        else (1 + logits.exp()).log() - labels * logits
    )
    assert outputs.loss.dtype == torch.float32
    close(outputs.loss, expected.mean())


def test_sparse_prediction_of_a_batch_that_the_caller_packed():
    batch = mlm_batch()
    mask = batch["attention_mask"].bool()
    packed = {"input_ids": batch["input_ids"][mask][None], "labels": batch["labels"][mask][None]}
    packed["cu_seq_lens_q"] = torch.tensor([0, 14, 20], dtype=torch.int32)
    sparse, dense = (
        make_model(NeoBERTForMaskedLM, sparse_prediction=True)(**packed),
        make_model(NeoBERTForMaskedLM)(**packed),
    )
    close(sparse.loss, dense.loss)
    close(sparse.logits, dense.logits[packed["labels"] != -100], "logits of the labelled tokens")


def test_labels_of_exchanged_axes_are_refused():
    ids, mask = random_batch([9, 4])
    for model_class in (NeoBERTForMaskedLM, NeoBERTForTokenClassification):
        with pytest.raises(
            ValueError, match=r"labels must have shape \(2, 9\), but \(9, 2\) was given"
        ):
            make_model(model_class, num_labels=3)(
                ids, attention_mask=mask, labels=torch.zeros(9, 2, dtype=torch.long)
            )


@pytest.mark.parametrize("items", (0, torch.tensor(0)))
def test_a_batch_without_items_has_a_finite_loss(items):
    """An accumulated batch in which no token is masked: the sum of its losses is zero. With padding
    and without."""
    batch = {**mlm_batch(), "num_items_in_batch": items}
    batch["labels"] = torch.full_like(batch["labels"], -100)
    model = make_model(NeoBERTForMaskedLM)
    for mask in (batch["attention_mask"], None):
        assert model(**{**batch, "attention_mask": mask}).loss.item() == 0
