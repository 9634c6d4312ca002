"""Test the task heads.

Logits and losses are compared with float64 formulas. Covers `num_items_in_batch`, pooling of padded
and packed batches, `sparse_prediction`, gradient accumulation, and errors about invalid labels.
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
    """Return the sum of -log p(label) over labels other than -100, and their number."""
    logits = logits.double().flatten(0, -2)
    labels = labels.flatten()
    rows = [
        logits[i].exp().sum().log() - logits[i][label]
        for i, label in enumerate(labels.tolist())
        if label != -100
    ]
    return sum(rows, torch.zeros((), dtype=torch.float64)), len(rows)


def linear(module, x):
    """Apply a linear layer to float64 inputs."""
    return x @ module.weight.detach().double().T + module.bias.detach().double()


def close(actual, expected, what="loss"):
    """Check that scalars or tensors are equal up to rounding."""
    assert_same(torch.as_tensor(actual), torch.as_tensor(expected), 1e-5, what)


# ------------------------------------------------------------------------------------------------
# Masked LM


def mlm_batch():
    """Return a padded batch with 5 labeled tokens, among them the first and last of a text."""
    ids, mask = random_batch([14, 6])
    labels = torch.full_like(ids, -100)
    labels[0, [1, 5, 13]] = torch.tensor([7, 0, 199])
    labels[1, [0, 5]] = torch.tensor([100, 3])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@padded_and_packed
def test_masked_lm(unpad_inputs):
    """Check logits and loss against their formulas, also with `num_items_in_batch`."""
    model = make_model(NeoBERTForMaskedLM, unpad_inputs=unpad_inputs)
    batch = mlm_batch()
    is_token = batch["attention_mask"].bool()
    outputs = model(**batch)

    texts = texts_of(batch["input_ids"], batch["attention_mask"])
    logits = linear(model.decoder, last_states(model, *texts))
    close(outputs.logits[is_token], logits, "logits")
    total, count = cross_entropy(logits, batch["labels"][is_token])
    assert count == 5, "The labels of -100 must be ignored."
    close(outputs.loss, total / count)
    for items in (20, torch.tensor(20)):
        close(model(**batch, num_items_in_batch=items).loss, total / 20)


@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("mask", (False, True))
def test_masked_lm_loss_is_zero_without_labeled_tokens(sparse, mask):
    """A batch without labels has a loss of 0 and finite gradients.

    With gradient accumulation, a micro-batch may contain no masked token.
    """
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
    """With `sparse_prediction`, only the logits of labeled tokens are computed.

    Loss and gradients equal those of the dense model. Without labels, every token has logits.
    """
    dense = make_model(NeoBERTForMaskedLM)
    sparse = make_model(NeoBERTForMaskedLM, sparse_prediction=True)
    batch = mlm_batch()
    dense_outputs = dense(**batch)
    sparse_outputs = sparse(**batch)
    expected = dense_outputs.logits[batch["labels"] != -100]
    assert sparse_outputs.logits.shape == (5, 200)
    close(sparse_outputs.logits, expected, "logits of labeled tokens, in the order of the rows")

    # The hook turns packing off.
    decoder_inputs = []
    sparse.decoder.register_forward_hook(
        lambda module, args, out: decoder_inputs.append(args[0].numel())
    )
    sparse_outputs = sparse(**batch)
    assert decoder_inputs == [5 * 64], "The decoder must run on the 5 labeled tokens only."
    close(sparse_outputs.loss, dense_outputs.loss)
    close(sparse_outputs.logits, expected, "logits of labeled tokens")

    dense_outputs.loss.backward()
    sparse_outputs.loss.backward()
    for (name, p), q in zip(dense.named_parameters(), sparse.parameters()):
        assert_same(q.grad, p.grad, 1e-5, f"gradient of {name}")
    close(sparse(**batch, num_items_in_batch=9).loss, dense_outputs.loss * 5 / 9)

    del batch["labels"]
    assert sparse(**batch).logits.shape == (2, 14, 200), (
        "Without labels, every token must have logits."
    )


def test_sparse_prediction_of_a_packed_batch():
    """`sparse_prediction` gives the same loss and logits for a batch that the caller packed."""
    batch = mlm_batch()
    packed = packed_batch(texts_of(batch["input_ids"], batch["attention_mask"]))
    packed["labels"] = batch["labels"][batch["attention_mask"].bool()][None]
    dense = make_model(NeoBERTForMaskedLM)(**packed)
    sparse = make_model(NeoBERTForMaskedLM, sparse_prediction=True)(**packed)
    close(sparse.loss, dense.loss)
    close(sparse.logits, dense.logits[packed["labels"] != -100], "logits of the labeled tokens")


@pytest.mark.parametrize("head", (NeoBERTForMaskedLM, NeoBERTForTokenClassification))
@padded_and_packed
def test_labels_at_padding_do_not_change_the_loss(head, unpad_inputs):
    """Labels at padding do not change the loss.

    Trainer counts every label other than -100 for `num_items_in_batch`, also those at padding.
    """
    model = make_model(head, num_labels=3, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([14, 6])
    labels = torch.randint(0, 3, ids.shape)
    expected = model(ids, attention_mask=mask, labels=labels.masked_fill(mask == 0, -100)).loss
    for items in (None, 28, torch.tensor(28)):
        batch = {"attention_mask": mask, "labels": labels, "num_items_in_batch": items}
        close(model(ids, **batch).loss, expected)


def test_masked_lm_loss_is_computed_in_float32():
    """The loss of a bfloat16 model is computed in float32."""
    model = make_model(NeoBERTForMaskedLM)
    batch = mlm_batch()
    expected = model(**batch).loss
    outputs = model.to(torch.bfloat16)(**batch)
    assert outputs.logits.dtype == torch.bfloat16 and outputs.loss.dtype == torch.float32
    assert abs(outputs.loss - expected) < 0.05 * expected


# ------------------------------------------------------------------------------------------------
# Pooling and sequence classification


def classify(model, texts, pooling="cls"):
    """Return logits by their formula: tanh(dense(pooled)) -> classifier."""
    states = [reference_states(model, text)[0][-1] for text in texts]
    pooled = torch.stack([x[0] if pooling == "cls" else x.mean(0) for x in states])
    return linear(model.classifier, torch.tanh(linear(model.dense, pooled)))


@both_poolings
@padded_and_packed
@torch.no_grad()
def test_pooling(pooling, unpad_inputs):
    """Padding on either side and packing do not change the logits of pooled texts."""
    fields = {"num_labels": 3, "classifier_pooling": pooling, "unpad_inputs": unpad_inputs}
    model = make_model(NeoBERTForSequenceClassification, **fields)
    lengths = [10, 4, 7]
    right, mask = random_batch(lengths)
    left, left_mask = random_batch(lengths, side="left")
    texts = texts_of(right, mask)
    expected = classify(model, texts, pooling)
    assert (expected[0] - expected[1]).abs().max() > 0.01, "The logits of the texts must differ."

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
    """Check mean pooling of long texts in 16 bits, which needs a float32 sum.

    A running sum of 4,000 ones in bfloat16, with its 8 significant bits, stops at 256. The largest
    value of float16 is 65,504.
    """
    model = make_model(NeoBERTForSequenceClassification, classifier_pooling="mean").to(dtype)
    hidden = torch.full((1, 4000, 64), float(value), dtype=dtype)
    packing = Packing(torch.tensor([0, 1000, 4000], dtype=torch.int32), 3000)
    mask = torch.ones(1, 4000)
    for arguments in ({}, {"attention_mask": mask}, {"packing": packing}):
        pooled = model.pool(hidden, **arguments)
        assert pooled.dtype == dtype and ((pooled / value - 1).abs() < 0.01).all()


def check_loss(model, labels, loss, items=8):
    """Check a loss against its formula, with and without `num_items_in_batch`.

    Args:
        model: Sequence classifier.
        labels: Labels of the batch.
        loss: Function that returns the sum of the terms for logits and labels, and their number.
        items: Value of `num_items_in_batch`.
    """
    ids, mask = random_batch([6, 3, 5, 4][: len(labels)])
    outputs = model(ids, attention_mask=mask, labels=labels)
    total, count = loss(outputs.logits.double(), labels)
    close(outputs.loss, total / count)
    outputs = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=items)
    close(outputs.loss, total / items)


def squares(logits, labels):
    """Return the sum of squared errors, and their number."""
    terms = (logits.view(labels.shape) - labels) ** 2
    return terms.sum(), terms.numel()


def binary_cross_entropy(logits, labels):
    """Return the sum of binary cross entropies, and their number."""
    p = 1 / (1 + torch.exp(-logits))
    terms = -(labels * p.log() + (1 - labels) * (1 - p).log())
    return terms.sum(), terms.numel()


def sequence_model(problem, num_labels=3):
    """Return a sequence classifier with a problem type."""
    fields = {"num_labels": num_labels, "problem_type": problem}
    return make_model(NeoBERTForSequenceClassification, **fields)


@pytest.mark.parametrize("problem", (None, "single_label_classification"))
def test_single_label(problem):
    """Classes give the cross entropy, with labels of -100 ignored."""
    check_loss(sequence_model(problem), torch.tensor([2, 0, -100, 1]), cross_entropy)


@pytest.mark.parametrize("problem", (None, "single_label_classification"))
def test_label_of_a_single_text_without_a_batch_axis(problem):
    """As in BERT, the label of a batch of one text may have no axis."""
    model = sequence_model(problem)
    ids = torch.ones(1, 6, dtype=torch.long)
    loss = model(ids, labels=torch.tensor(2)).loss
    torch.testing.assert_close(loss, model(ids, labels=torch.tensor([2])).loss)


@pytest.mark.parametrize("problem", (None, "regression"))
def test_regression(problem):
    """Regression gives the squared error, for flat, (B, 1), integer and several labels."""
    for labels in (torch.tensor([0.5, -2.0]), torch.tensor([[0.5], [-2.0]]), torch.tensor([1, 4])):
        check_loss(sequence_model(problem, 1), labels, squares)
    check_loss(sequence_model("regression"), torch.randn(2, 3), squares)


@pytest.mark.parametrize("problem", (None, "multi_label_classification"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.int64))
def test_multi_label(problem, dtype):
    """Multi-label classification gives the binary cross entropy, for float and integer labels."""
    labels = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=dtype)
    check_loss(sequence_model(problem), labels, binary_cross_entropy)


TWO_LABELS = {
    "regression": ([[0.5, 1.25], [2.0, -1.0]], squares),
    "multi_label_classification": ([[1.0, 0.0], [0.0, 1.0]], binary_cross_entropy),
}


@pytest.mark.parametrize("problem", TWO_LABELS)
def test_regression_and_multi_label_losses_are_computed_in_float32(problem):
    """Regression and multi-label losses of a bfloat16 model are computed in float32."""
    labels, formula = TWO_LABELS[problem]
    model = sequence_model(problem, 2).to(torch.bfloat16)
    ids, mask = random_batch([9, 4])
    outputs = model(ids, attention_mask=mask, labels=torch.tensor(labels))
    total, count = formula(outputs.logits.double(), torch.tensor(labels))
    assert outputs.loss.dtype == torch.float32
    close(outputs.loss, total / count)


# ------------------------------------------------------------------------------------------------
# Token classification, question answering and multiple choice


@padded_and_packed
def test_token_classification(unpad_inputs):
    """Check logits and loss against their formulas, also with `num_items_in_batch`."""
    model = make_model(NeoBERTForTokenClassification, num_labels=5, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([9, 4])
    labels = torch.where(mask == 1, ids % 5, -100)
    labels[0, 2] = -100
    outputs = model(ids, attention_mask=mask, labels=labels)

    expected = linear(model.classifier, last_states(model, *texts_of(ids, mask)))
    close(outputs.logits[mask.bool()], expected, "logits")
    total, count = cross_entropy(outputs.logits, labels)
    assert count == 12
    close(outputs.loss, total / 12)
    close(model(ids, attention_mask=mask, labels=labels, num_items_in_batch=30).loss, total / 30)


def test_question_answering():
    """Check logits and loss against their formulas, also for positions of shape (B, 1)."""
    model = make_model(NeoBERTForQuestionAnswering)
    ids, mask = random_batch([9, 6, 8])
    start = torch.tensor([1, 5, 0])
    end = torch.tensor([3, 5, 7])

    def run(start, end, **others):
        labels = {"start_positions": start, "end_positions": end}
        return model(ids, attention_mask=mask, **labels, **others)

    outputs = run(start, end)
    logits = linear(model.qa_outputs, last_states(model, ids[1, :6]))
    close(outputs.start_logits[1, :6], logits[:, 0], "start logits")
    close(outputs.end_logits[1, :6], logits[:, 1], "end logits")

    start_loss = cross_entropy(outputs.start_logits, start)[0]
    end_loss = cross_entropy(outputs.end_logits, end)[0]
    close(outputs.loss, (start_loss + end_loss) / 2 / 3)
    close(run(start[:, None], end[:, None]).loss, outputs.loss)
    close(run(start, end, num_items_in_batch=6).loss, outputs.loss / 2)


@padded_and_packed
def test_question_answering_does_not_depend_on_padding(unpad_inputs):
    """The loss equals that of each text alone, and padding has probability 0 as an answer."""
    model = make_model(NeoBERTForQuestionAnswering, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([6, 15], length=20)
    start = torch.tensor([[1], [14]])
    end = torch.tensor([[5], [14]])
    outputs = model(ids, attention_mask=mask, start_positions=start, end_positions=end)
    alone = zip(texts_of(ids, mask), start, end)
    losses = [model(x[None], start_positions=s, end_positions=e).loss for x, s, e in alone]
    close(outputs.loss, sum(losses) / 2)
    for logits in (outputs.start_logits, outputs.end_logits):
        assert (logits.softmax(-1)[mask == 0] == 0).all()


@padded_and_packed
def test_question_answering_ignores_answers_outside_of_the_text(unpad_inputs):
    """Positions after the row, before it, and at padding do not count for the loss."""
    model = make_model(NeoBERTForQuestionAnswering, unpad_inputs=unpad_inputs)
    ids, mask = random_batch([9, 9, 5])

    def run(start, end):
        labels = {"start_positions": torch.tensor(start), "end_positions": torch.tensor(end)}
        return model(ids, attention_mask=mask, **labels)

    outputs = run([1, 9, 400], [3, -1, 2])
    start_loss = cross_entropy(outputs.start_logits[:1], torch.tensor([1]))[0]
    end_loss = cross_entropy(outputs.end_logits[[0, 2]], torch.tensor([3, 2]))[0] / 2
    close(outputs.loss, (start_loss + end_loss) / 2)

    # In the last row, positions 7 and 8 are padding, and 9 is outside of the row.
    close(run([1, 4, 8], [3, 4, 7]).loss, run([1, 4, 9], [3, 4, 9]).loss)
    assert run([9, 9, 9], [9, 9, 9]).loss.item() == 0


@both_poolings
def test_multiple_choice(pooling):
    """Check scores and loss against their formulas, also for `inputs_embeds`."""
    model = make_model(NeoBERTForMultipleChoice, classifier_pooling=pooling)
    ids, mask = random_batch([9, 4, 6, 7, 8, 3])
    labels = torch.tensor([2, 0])
    shape = (2, 3, 9)
    inputs = {"input_ids": ids.view(shape), "attention_mask": mask.view(shape)}
    outputs = model(**inputs, labels=labels, token_type_ids=torch.zeros(shape, dtype=torch.long))

    scores = classify(model, texts_of(ids, mask), pooling).view(2, 3)
    assert_same(outputs.logits, scores, 2e-5, "logits")
    total, _ = cross_entropy(scores, labels)
    close(outputs.loss, total / 2)
    close(model(**inputs, labels=labels, num_items_in_batch=8).loss, total / 8)

    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    positions = torch.arange(9).expand(shape)
    logits = model(inputs_embeds=embeds, position_ids=positions, **inputs).logits
    assert_same(logits, scores, 2e-5, "logits of inputs_embeds with position_ids")


# ------------------------------------------------------------------------------------------------
# Gradient accumulation


def batches():
    """Return {test id: (model class, configuration fields, labels of a batch of 5 texts)}."""
    ids, mask = random_batch([9, 4, 6, 7, 2])
    token_classes = torch.where(mask == 1, (ids * 3) % 3, -100)
    token_classes[0, 3:] = -100
    token_ids = torch.where(token_classes == -100, -100, ids)

    classifier = NeoBERTForSequenceClassification
    three = {"num_labels": 3}
    multi_labels = (torch.rand(5, 3) > 0.5).float()

    return {
        "masked LM": (NeoBERTForMaskedLM, {}, token_ids),
        "masked LM, sparse": (NeoBERTForMaskedLM, {"sparse_prediction": True}, token_ids),
        "single label": (classifier, three, torch.tensor([0, 2, 1, -100, 0])),
        "regression": (classifier, {"num_labels": 1}, torch.randn(5)),
        "multi label": (classifier, three, multi_labels),
        "tokens": (NeoBERTForTokenClassification, three, token_classes),
        "choices": (NeoBERTForMultipleChoice, {}, torch.tensor([0, 1, 1, 0, 1])),
    }


@pytest.mark.parametrize("items", (int, torch.tensor))
@pytest.mark.parametrize("head", list(batches()))
def test_accumulation_gives_the_gradients_of_the_whole_batch(head, items):
    """The gradients of two micro-batches add up to those of the whole batch.

    The micro-batches have 3 and 2 rows. Trainer passes the number of labels of the whole batch as
    `num_items_in_batch`.
    """
    model_class, fields, labels = batches()[head]
    model = make_model(model_class, **fields)
    ids, mask = random_batch([9, 4, 6, 7, 2])
    if head == "choices":
        ids = torch.stack([ids, ids * 2 % 200], 1)
        mask = torch.stack([mask, mask], 1)

    def gradients(micro_batches, **kwargs):
        model.zero_grad()
        total = 0
        for rows in micro_batches:
            loss = model(ids[rows], attention_mask=mask[rows], labels=labels[rows], **kwargs).loss
            loss.backward()
            total += loss.item()
        return total, {name: p.grad.clone() for name, p in model.named_parameters()}

    count = int((labels != -100).sum())
    loss, expected = gradients([slice(0, 5)])
    accumulated_loss, actual = gradients(
        [slice(0, 3), slice(3, 5)], num_items_in_batch=items(count)
    )
    assert abs(loss - accumulated_loss) < 1e-5 * abs(loss)
    for name, gradient in actual.items():
        # The gradient of the bias that all choices share is zero except for rounding.
        if expected[name].abs().max() > 1e-7:
            assert_same(gradient, expected[name], 2e-5, f"accumulated gradient of {name}")

    loss_without_count, _ = gradients([slice(0, 3), slice(3, 5)])
    assert abs(loss_without_count - loss) > 1e-3 * abs(loss), (
        "num_items_in_batch must make a difference for this test."
    )


# ------------------------------------------------------------------------------------------------
# Invalid labels


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
    (NeoBERTForMultipleChoice, {}, None, r"`input_ids` must have shape.*\(2, 6\)"),
    (NeoBERTForMultipleChoice, {}, ONE * 5, "from 0 to 1.*got 5"),
)


@pytest.mark.parametrize("head, fields, labels, sentence", BAD_LABELS)
def test_bad_labels(head, fields, labels, sentence):
    """Invalid labels and inputs raise an error of one line that states the rule and the value."""
    ids = IDS.view(1, 2, 6) if head is NeoBERTForMultipleChoice and labels is not None else IDS
    with pytest.raises(ValueError, match=sentence) as error:
        make_model(head, **{"num_labels": 3, **fields})(ids, labels=labels)
    assert "\n" not in str(error.value)


def test_mask_of_multiple_choice_has_the_axis_of_the_choices():
    """The message contains the shape that the caller has passed."""
    model = make_model(NeoBERTForMultipleChoice)
    with pytest.raises(ValueError, match=r"\(batch, choices, length\), got \(1, 2, 6, 6\)"):
        model(IDS.view(1, 2, 6), attention_mask=torch.ones(1, 2, 6, 6))


def test_answer_positions_must_match_the_batch_size():
    """Positions for fewer texts than the batch has raise an error."""
    with pytest.raises(ValueError, match=r"start_positions.*\(2,\).*\(1,\)"):
        make_model(NeoBERTForQuestionAnswering)(IDS, start_positions=ONE, end_positions=ONE)
