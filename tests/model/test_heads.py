"""Test the task heads.

Logits and losses equal float64 formulas. Covers `num_items_in_batch`, pooling of padded and packed
batches, `sparse_prediction`, and messages about wrong labels.
"""

import pytest
import torch
from helpers.reference import (
    assert_same,
    last_states,
    make_model,
    packed_batch,
    random_batch,
    reference_states,
    texts_of,
)

from neobert import (
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
)
from neobert.modeling_neobert import Packing


padded_and_packed = pytest.mark.parametrize("unpad_inputs", (True, False))
both_poolings = pytest.mark.parametrize("pooling", ("cls", "mean"))


def cross_entropy(logits, labels):
    """Sum over labels other than -100 of -log p(label), and their number."""
    logits, labels = logits.double().flatten(0, -2), labels.flatten()
    rows = [
        logits[i].exp().sum().log() - logits[i][label]
        for i, label in enumerate(labels.tolist())
        if label != -100
    ]
    return sum(rows, torch.zeros((), dtype=torch.float64)), len(rows)


def linear(module, x):
    return x @ module.weight.detach().double().T + module.bias.detach().double()


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


@padded_and_packed
def test_masked_lm(unpad_inputs):
    model = make_model(NeoBERTForMaskedLM, unpad_inputs=unpad_inputs)
    batch = mlm_batch()
    real, out = batch["attention_mask"].bool(), model(**batch)
    texts = texts_of(batch["input_ids"], batch["attention_mask"])
    logits = linear(model.decoder, last_states(model, *texts))
    close(out.logits[real], logits, "logits")
    total, count = cross_entropy(logits, batch["labels"][real])
    assert count == 5, "Ignored labels are counted."
    close(out.loss, total / count)
    for items in (20, torch.tensor(20)):
        close(model(**batch, num_items_in_batch=items).loss, total / 20)


@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("mask", (False, True))
def test_masked_lm_without_a_label_has_loss_zero(sparse, mask):
    """An accumulated batch in which no token is masked: the sum of its losses is zero."""
    model = make_model(NeoBERTForMaskedLM, sparse_prediction=sparse)
    batch = mlm_batch()
    batch["labels"].fill_(-100)
    if not mask:
        del batch["attention_mask"]
    for items in (None, 0, torch.tensor(0)):
        loss = model(**batch, num_items_in_batch=items).loss
        assert loss.item() == 0
        loss.backward()
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def test_sparse_prediction_gives_the_same_loss_and_gradients():
    everything = make_model(NeoBERTForMaskedLM)
    masked = make_model(NeoBERTForMaskedLM, sparse_prediction=True)
    batch = mlm_batch()
    first, second = everything(**batch), masked(**batch)
    expected = first.logits[batch["labels"] != -100]
    assert second.logits.shape == (5, 200)
    close(second.logits, expected, "logits of labeled tokens, in the order of the rows")
    seen = []
    masked.decoder.register_forward_hook(lambda module, args, out: seen.append(args[0].numel()))
    second = masked(**batch)  # whose hook sees a batch that is not packed
    assert seen == [5 * 64], "the decoder ran on other tokens than the 5 labeled ones"
    close(second.loss, first.loss)
    close(second.logits, expected, "logits of labeled tokens")
    first.loss.backward()
    second.loss.backward()
    for (name, p), q in zip(everything.named_parameters(), masked.parameters()):
        assert_same(q.grad, p.grad, 1e-5, f"gradient of {name}")
    close(masked(**batch, num_items_in_batch=9).loss, first.loss * 5 / 9)
    del batch["labels"]
    assert masked(**batch).logits.shape == (2, 14, 200), "without labels logits for every token"


def test_sparse_prediction_of_a_batch_that_the_caller_packed():
    batch = mlm_batch()
    packed = packed_batch(texts_of(batch["input_ids"], batch["attention_mask"]))
    packed["labels"] = batch["labels"][batch["attention_mask"].bool()][None]
    dense = make_model(NeoBERTForMaskedLM)(**packed)
    sparse = make_model(NeoBERTForMaskedLM, sparse_prediction=True)(**packed)
    close(sparse.loss, dense.loss)
    close(sparse.logits, dense.logits[packed["labels"] != -100], "logits of the labeled tokens")


@pytest.mark.parametrize("head", (NeoBERTForMaskedLM, NeoBERTForTokenClassification))
@padded_and_packed
def test_labels_at_padding_do_not_dilute_the_loss(head, unpad_inputs):
    """Trainer counts every label but -100 into num_items_in_batch, those at padding too."""
    model = make_model(head, num_labels=3, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([14, 6])
    labels = torch.randint(0, 3, ids.shape)
    expected = model(ids, attention_mask=mask, labels=labels.masked_fill(mask == 0, -100)).loss
    for items in (None, 28, torch.tensor(28)):
        batch = {"attention_mask": mask, "labels": labels, "num_items_in_batch": items}
        close(model(ids, **batch).loss, expected)


def test_losses_are_taken_in_float32():
    model, batch = make_model(NeoBERTForMaskedLM), mlm_batch()
    expected = model(**batch).loss
    out = model.to(torch.bfloat16)(**batch)
    assert out.logits.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    assert abs(out.loss - expected) < 0.05 * expected


# ------------------------------------------------------------------------------------------------
# pooling, sequences


def classify(model, texts, pooling="cls"):
    """Logits by their formula: tanh(dense(pooled)) -> classifier."""
    states = [reference_states(model, text)[0][-1] for text in texts]
    pooled = torch.stack([x[0] if pooling == "cls" else x.mean(0) for x in states])
    return linear(model.classifier, torch.tanh(linear(model.dense, pooled)))


@both_poolings
@padded_and_packed
@torch.no_grad()
def test_pooling(pooling, unpad_inputs):
    """Over real tokens: right, left, no padding, packed, or the text alone."""
    fields = {"num_labels": 3, "classifier_pooling": pooling, "unpad_inputs": unpad_inputs}
    model = make_model(NeoBERTForSequenceClassification, **fields)
    lengths = [10, 4, 7]
    right, mask = random_batch(lengths)
    left, left_mask = random_batch(lengths, side="left")
    texts = texts_of(right, mask)
    expected = classify(model, texts, pooling)
    assert (expected[0] - expected[1]).abs().max() > 0.01, "the texts must differ"
    positions = torch.cat([torch.arange(n) for n in lengths])
    packed = packed_batch(texts)
    for what, actual in {
        "right-padded": model(right, attention_mask=mask),
        "left-padded": model(left, attention_mask=left_mask),
        "packed": model(**packed),
        "restarting positions": model(packed["input_ids"], position_ids=positions[None]),
        "restarting positions (T,)": model(packed["input_ids"], position_ids=positions),
    }.items():
        assert_same(actual.logits, expected, 2e-5, f"{what} logits")
    assert_same(model(texts[0][None]).logits[0], expected[0], 2e-5, "logits of a text alone")


@torch.no_grad()
@pytest.mark.parametrize("dtype,value", ((torch.bfloat16, 1), (torch.float16, 100)))
def test_mean_pooling_sums_in_float32(dtype, value):
    """bfloat16 has 8 bits: a running sum of 4,000 ones stops at 256; float16 ends at 65,504."""
    model = make_model(NeoBERTForSequenceClassification, classifier_pooling="mean").to(dtype)
    hidden = torch.full((1, 4000, 64), float(value), dtype=dtype)
    packing = Packing(torch.tensor([0, 1000, 4000], dtype=torch.int32), 3000)
    mask = torch.ones(1, 4000)
    for arguments in ({}, {"attention_mask": mask}, {"packing": packing}):
        pooled = model.pool(hidden, **arguments)
        assert pooled.dtype == dtype and ((pooled / value - 1).abs() < 0.01).all()


def check_loss(model, labels, loss, items=8):
    """`loss` gives terms for logits and labels: their mean, or their sum divided by
    `num_items_in_batch`."""
    ids, mask = random_batch([6, 3, 5, 4][: len(labels)])
    out = model(ids, attention_mask=mask, labels=labels)
    total, count = loss(out.logits.double(), labels)
    close(out.loss, total / count)
    out = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=items)
    close(out.loss, total / items)


def squares(logits, labels):
    terms = (logits.view(labels.shape) - labels) ** 2
    return terms.sum(), terms.numel()


def binary_cross_entropy(logits, labels):
    p = 1 / (1 + torch.exp(-logits))
    terms = -(labels * p.log() + (1 - labels) * (1 - p).log())
    return terms.sum(), terms.numel()


def sequence_model(problem, num_labels=3):
    fields = {"num_labels": num_labels, "problem_type": problem}
    return make_model(NeoBERTForSequenceClassification, **fields)


@pytest.mark.parametrize("problem", (None, "single_label_classification"))
def test_single_label(problem):
    check_loss(sequence_model(problem), torch.tensor([2, 0, -100, 1]), cross_entropy)


@pytest.mark.parametrize("problem", (None, "regression"))
def test_regression(problem):
    for labels in (torch.tensor([0.5, -2.0]), torch.tensor([[0.5], [-2.0]]), torch.tensor([1, 4])):
        check_loss(sequence_model(problem, 1), labels, squares)
    check_loss(sequence_model("regression"), torch.randn(2, 3), squares)


@pytest.mark.parametrize("problem", (None, "multi_label_classification"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.int64))
def test_multi_label(problem, dtype):
    labels = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=dtype)
    check_loss(sequence_model(problem), labels, binary_cross_entropy)


SEVERAL = {
    "regression": ([[0.5, 1.25], [2.0, -1.0]], squares),
    "multi_label_classification": ([[1.0, 0.0], [0.0, 1.0]], binary_cross_entropy),
}


@pytest.mark.parametrize("problem", SEVERAL)
def test_these_losses_are_taken_in_float32_too(problem):
    labels, formula = SEVERAL[problem]
    model, (ids, mask) = sequence_model(problem, 2).to(torch.bfloat16), random_batch([9, 4])
    out = model(ids, attention_mask=mask, labels=torch.tensor(labels))
    total, count = formula(out.logits.double(), torch.tensor(labels))
    assert out.loss.dtype == torch.float32
    close(out.loss, total / count)


# ------------------------------------------------------------------------------------------------
# other heads


@padded_and_packed
def test_token_classification(unpad_inputs):
    model = make_model(NeoBERTForTokenClassification, num_labels=5, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([9, 4])
    labels = torch.where(mask == 1, ids % 5, -100)
    labels[0, 2] = -100
    out = model(ids, attention_mask=mask, labels=labels)
    expected = linear(model.classifier, last_states(model, *texts_of(ids, mask)))
    close(out.logits[mask.bool()], expected, "logits")
    total, count = cross_entropy(out.logits, labels)
    assert count == 12
    close(out.loss, total / 12)
    close(model(ids, attention_mask=mask, labels=labels, num_items_in_batch=30).loss, total / 30)


def test_question_answering():
    model = make_model(NeoBERTForQuestionAnswering)
    ids, mask = random_batch([9, 6, 8])
    start, end = torch.tensor([1, 5, 0]), torch.tensor([3, 5, 7])

    def run(start, end, **others):
        labels = {"start_positions": start, "end_positions": end}
        return model(ids, attention_mask=mask, **labels, **others)

    out = run(start, end)
    logits = linear(model.qa_outputs, last_states(model, ids[1, :6]))
    close(out.start_logits[1, :6], logits[:, 0], "start logits")
    close(out.end_logits[1, :6], logits[:, 1], "end logits")
    first, second = cross_entropy(out.start_logits, start)[0], cross_entropy(out.end_logits, end)[0]
    close(out.loss, (first + second) / 2 / 3)
    close(run(start[:, None], end[:, None]).loss, out.loss)
    close(run(start, end, num_items_in_batch=6).loss, out.loss / 2)


@padded_and_packed
def test_question_answering_does_not_depend_on_padding(unpad_inputs):
    """Loss and answers of a text are those of the text alone; no answer is padding."""
    model = make_model(NeoBERTForQuestionAnswering, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([6, 15], length=20)
    start, end = torch.tensor([[1], [14]]), torch.tensor([[5], [14]])
    out = model(ids, attention_mask=mask, start_positions=start, end_positions=end)
    alone = zip(texts_of(ids, mask), start, end)
    losses = [model(x[None], start_positions=s, end_positions=e).loss for x, s, e in alone]
    close(out.loss, sum(losses) / 2)
    for logits in (out.start_logits, out.end_logits):
        assert (logits.softmax(-1)[mask == 0] == 0).all()


@padded_and_packed
def test_question_answering_ignores_answers_outside_of_the_text(unpad_inputs):
    """Behind the row, before it, and at padding."""
    model = make_model(NeoBERTForQuestionAnswering, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([9, 9, 5])

    def run(start, end):
        labels = {"start_positions": torch.tensor(start), "end_positions": torch.tensor(end)}
        return model(ids, attention_mask=mask, **labels)

    out = run([1, 9, 400], [3, -1, 2])
    first = cross_entropy(out.start_logits[:1], torch.tensor([1]))[0]
    second = cross_entropy(out.end_logits[[0, 2]], torch.tensor([3, 2]))[0] / 2
    close(out.loss, (first + second) / 2)
    close(run([1, 4, 8], [3, 4, 7]).loss, run([1, 4, 9], [3, 4, 9]).loss)
    assert run([9, 9, 9], [9, 9, 9]).loss.item() == 0


@both_poolings
def test_multiple_choice(pooling):
    model = make_model(NeoBERTForMultipleChoice, classifier_pooling=pooling)
    ids, mask = random_batch([9, 4, 6, 7, 8, 3])
    labels, shape = torch.tensor([2, 0]), (2, 3, 9)
    shaped = {"input_ids": ids.view(shape), "attention_mask": mask.view(shape)}
    out = model(**shaped, labels=labels, token_type_ids=torch.zeros(shape, dtype=torch.long))
    scores = classify(model, texts_of(ids, mask), pooling).view(2, 3)
    assert_same(out.logits, scores, 2e-5, "logits")
    total, _ = cross_entropy(scores, labels)
    close(out.loss, total / 2)
    close(model(**shaped, labels=labels, num_items_in_batch=8).loss, total / 8)
    embeds = model.get_input_embeddings()(shaped.pop("input_ids"))
    positions = torch.arange(9).expand(shape)
    logits = model(inputs_embeds=embeds, position_ids=positions, **shaped).logits
    assert_same(logits, scores, 2e-5, "logits of inputs_embeds with position_ids")


# ----------------------------------------------------------------------------------------------
# gradient accumulation


def batches():
    """{name: head, fields, labels, copies of each text}."""
    ids, mask = random_batch([9, 4, 6, 7, 2])
    tokens = torch.where(mask == 1, (ids * 3) % 3, -100)
    tokens[0, 3:] = -100
    words = torch.where(tokens == -100, -100, ids)
    sequences, three = NeoBERTForSequenceClassification, {"num_labels": 3}
    several = (torch.rand(5, 3) > 0.5).float()
    return {
        "masked LM": (NeoBERTForMaskedLM, {}, words),
        "masked LM, sparse": (NeoBERTForMaskedLM, {"sparse_prediction": True}, words),
        "single label": (sequences, three, torch.tensor([0, 2, 1, -100, 0])),
        "regression": (sequences, {"num_labels": 1}, torch.randn(5)),
        "multi label": (sequences, three, several),
        "tokens": (NeoBERTForTokenClassification, three, tokens),
        "choices": (NeoBERTForMultipleChoice, {}, torch.tensor([0, 1, 1, 0, 1])),
    }


@pytest.mark.parametrize("items", (int, torch.tensor))
@pytest.mark.parametrize("head", list(batches()))
def test_accumulation_gives_the_gradients_of_the_whole_batch(head, items):
    """Micro-batches of 3 and 2 rows, divided by the label count that Trainer passes, add up to the
    batch of 5."""
    model_class, fields, labels = batches()[head]
    model = make_model(model_class, **fields)
    ids, mask = random_batch([9, 4, 6, 7, 2])
    if head == "choices":
        ids, mask = torch.stack([ids, ids * 2 % 200], 1), torch.stack([mask, mask], 1)

    def gradients(parts, **kwargs):
        model.zero_grad()
        total = 0
        for rows in parts:
            loss = model(ids[rows], attention_mask=mask[rows], labels=labels[rows], **kwargs).loss
            loss.backward()
            total += loss.item()
        return total, {name: p.grad.clone() for name, p in model.named_parameters()}

    count = int((labels != -100).sum())
    whole, expected = gradients([slice(0, 5)])
    parts, actual = gradients([slice(0, 3), slice(3, 5)], num_items_in_batch=items(count))
    assert abs(whole - parts) < 1e-5 * abs(whole)
    for name, gradient in actual.items():
        # The gradient of the choices' common bias is zero but for rounding.
        if expected[name].abs().max() > 1e-7:
            assert_same(gradient, expected[name], 2e-5, f"accumulated gradient of {name}")
    ignored, _ = gradients([slice(0, 3), slice(3, 5)])
    assert abs(ignored - whole) > 1e-3 * abs(whole), "num_items_in_batch makes no difference here"


# ------------------------------------------------------------------------------------------------
# bad labels


IDS = torch.ones(2, 6, dtype=torch.long)
ONE = torch.tensor([1])
BAD_LABELS = (
    (NeoBERTForMaskedLM, {}, IDS.T, r"`labels` must have shape \(2, 6\), got \(6, 2\)"),
    (NeoBERTForMaskedLM, {}, IDS * 200, "from 0 to 199, or -100.*200"),
    (NeoBERTForMaskedLM, {}, IDS.float(), "integers.*float32"),
    (NeoBERTForTokenClassification, {}, torch.tensor([0, 1]), r"\(2, 6\).*\(2,\)"),
    (NeoBERTForSequenceClassification, {}, torch.tensor([0, 3]), "from 0 to 2.*got 3"),
    (NeoBERTForSequenceClassification, {}, ONE, r"\(2,\).*\(1,\)"),
    (NeoBERTForSequenceClassification, {}, torch.ones(2, 4), r"\(2, 3\).*\(2, 4\)"),
    (
        NeoBERTForSequenceClassification,
        {},
        torch.ones(2, 3) * 2,
        "between 0 and 1 .*, got values from 2.0 to 2.0",
    ),
    (NeoBERTForSequenceClassification, {"num_labels": 1}, torch.ones(3), r"\(2,\).*\(3,\)"),
    (NeoBERTForMultipleChoice, {}, None, r"`input_ids` must have shape.*\(12,\)"),
    (NeoBERTForMultipleChoice, {}, ONE * 5, "from 0 to 1.*got 5"),
)


@pytest.mark.parametrize("head, fields, labels, sentence", BAD_LABELS)
def test_bad_labels(head, fields, labels, sentence):
    ids = IDS.view(1, 2, 6) if head is NeoBERTForMultipleChoice and labels is not None else IDS
    with pytest.raises(ValueError, match=sentence) as error:
        make_model(head, **{"num_labels": 3, **fields})(ids, labels=labels)
    assert "\n" not in str(error.value)


def test_answers_for_other_texts():
    with pytest.raises(ValueError, match=r"start_positions.*\(2,\).*\(1,\)"):
        make_model(NeoBERTForQuestionAnswering)(IDS, start_positions=ONE, end_positions=ONE)
