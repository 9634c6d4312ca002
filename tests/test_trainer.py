"""Pins the model in the hands of the libraries around it: Trainer (accumulation, saving, resuming),
PEFT LoRA, the pipelines and sentence-transformers.
"""

import pytest
import torch
import transformers
from transformers import AutoTokenizer, Trainer, TrainingArguments

import neobert
from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTModel,
)
from neobert.training.lora import default_targets

from .reference import (
    FIELDS,
    LEARNED,
    assert_same,
    install_flash,
    make_model,
    random_batch,
    reference_states,
)


TARGET_MODULES = ["qkv", "wo", "w12", "w3"]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return AutoTokenizer.from_pretrained(tokenizer_dir)


# ------------------------------------------------------------------------------------------------
# Trainer


def examples(head, count=16):
    """Texts of uneven length, so that micro-batches hold uneven numbers of labels."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(count):
        n = 3 + (5 * i) % 11
        ids = torch.randint(1, 200, (n,), generator=generator)
        labels = ids.clone() if head == "masked LM" else torch.tensor(i % 3)
        if head == "masked LM":
            labels[torch.rand(n, generator=generator) > 0.4] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def collate(rows):
    length = max(len(row["input_ids"]) for row in rows)

    def pad(x, value):
        return torch.nn.functional.pad(x, (0, length - len(x)), value=value) if x.dim() else x

    ids = torch.stack([pad(row["input_ids"], 0) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.stack([pad(row["labels"], -100) for row in rows]),
    }


HEADS = {
    "masked LM": (NeoBERTForMaskedLM, {}),
    "classification": (
        NeoBERTForSequenceClassification,
        {"num_labels": 3, "classifier_dropout": 0.0},
    ),
}


def trainer(head, folder, model=None, **arguments):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    model_class, fields = HEADS[head]
    defaults = {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(**{**defaults, **arguments})
    return Trainer(
        model or make_model(model_class, **fields),
        args,
        data_collator=collate,
        train_dataset=examples(head),
    )


def losses(trained):
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


@pytest.mark.parametrize("head", HEADS)
def test_accumulation_does_not_change_training(head, tmp_path):
    """One batch of 8, or 4 of 2 accumulated: the same loss is logged and the same weights come
    out."""
    whole = trainer(
        head,
        tmp_path / "1",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_steps=2,
    )
    parts = trainer(
        head,
        tmp_path / "4",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=2,
    )
    start = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    whole.train()
    parts.train()
    assert losses(whole) and all(
        abs(a - b) < 1e-3 * a for a, b in zip(losses(whole), losses(parts))
    ), (losses(whole), losses(parts))
    moved = 0
    for (name, p), q in zip(whole.model.named_parameters(), parts.model.parameters()):
        moved = max(moved, (p - start[name]).abs().max().item())
        assert_same(q - start[name], p - start[name], 1e-3, f"update of {name}")
    assert moved > 1e-3, "Nothing was learned, so this test would be vacuous."


@pytest.mark.parametrize("head", HEADS)
def test_saving_and_resuming(head, tmp_path):
    """Four steps at once, or two, a checkpoint, a new process' Trainer and two more: the same
    weights."""
    arguments = {"optim": "adamw_torch", "learning_rate": 1e-3}
    straight = trainer(head, tmp_path / "straight", max_steps=4, **arguments)
    straight.train()
    trainer(
        head, tmp_path / "resumed", max_steps=2, save_strategy="steps", save_steps=2, **arguments
    ).train()
    checkpoint = tmp_path / "resumed" / "checkpoint-2"
    assert {"config.json", "model.safetensors", "modeling_neobert.py", "trainer_state.json"} <= {
        path.name for path in checkpoint.iterdir()
    }
    model_class, fields = HEADS[head]
    resumed = trainer(
        head,
        tmp_path / "resumed",
        model=make_model(model_class, seed=9, **fields),
        max_steps=4,
        **arguments,
    )
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for (name, p), q in zip(straight.model.named_parameters(), resumed.model.parameters()):
        assert_same(q, p, 1e-6, f"{name} after resuming")
    reloaded = model_class.from_pretrained(checkpoint, dtype=torch.float32)
    assert all(torch.isfinite(p).all() for p in reloaded.parameters())


def test_training_learns_and_evaluates(tmp_path):
    run = trainer(
        "classification", tmp_path, num_train_epochs=8, optim="adamw_torch", learning_rate=2e-3
    )
    before = run.evaluate(examples("classification"))["eval_loss"]
    run.train()
    after = run.evaluate(examples("classification"))["eval_loss"]
    assert after < 0.3 * before, f"The loss of 16 examples went from {before} to {after} only."
    predictions = run.predict(examples("classification")).predictions
    assert (predictions.argmax(-1) == [i % 3 for i in range(16)]).mean() > 0.9


def test_gradient_checkpointing_in_trainer(tmp_path):
    plain = trainer("masked LM", tmp_path / "a", max_steps=1)
    checkpointed = trainer("masked LM", tmp_path / "b", max_steps=1, gradient_checkpointing=True)
    plain.train()
    checkpointed.train()
    for (name, p), q in zip(plain.model.named_parameters(), checkpointed.model.parameters()):
        assert_same(q, p, 1e-6, f"{name} under checkpointing")


# ------------------------------------------------------------------------------------------------
# PEFT


PEFT_HEADS = {
    "NeoBERTModel": ("FEATURE_EXTRACTION", {}),
    "NeoBERTForMaskedLM": (None, {}),
    "NeoBERTForSequenceClassification": ("SEQ_CLS", {"num_labels": 3}),
    "NeoBERTForTokenClassification": ("TOKEN_CLS", {"num_labels": 3}),
    "NeoBERTForQuestionAnswering": ("QUESTION_ANS", {}),
    "NeoBERTForMultipleChoice": (None, {}),
}


@pytest.mark.parametrize("head", PEFT_HEADS)
def test_lora(head, tmp_path):
    """Adapters on every matrix of the body: they learn, they travel alone, and merged they give the
    same outputs."""
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    task, fields = PEFT_HEADS[head]
    base = make_model(getattr(neobert, head), **fields)
    config = peft.LoraConfig(
        task_type=task, r=4, lora_alpha=8, target_modules=TARGET_MODULES, init_lora_weights=False
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config)
    adapted = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    assert adapted == set(TARGET_MODULES), f"LoRA reached {adapted} only."
    ids, mask = random_batch([9, 5])
    if head == "NeoBERTForMultipleChoice":
        ids, mask = ids[None], mask[None]
    labels = {
        "NeoBERTModel": {},
        "NeoBERTForMaskedLM": {"labels": ids},
        "NeoBERTForSequenceClassification": {"labels": torch.tensor([0, 2])},
        "NeoBERTForTokenClassification": {"labels": ids % 3},
        "NeoBERTForQuestionAnswering": {
            "start_positions": torch.tensor([1, 2]),
            "end_positions": torch.tensor([3, 4]),
        },
        "NeoBERTForMultipleChoice": {"labels": torch.tensor([1])},
    }[head]
    out = model.train()(input_ids=ids, attention_mask=mask, **labels)
    (out[0].sum() if head == "NeoBERTModel" else out.loss).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in trained) and not any(
        "base_layer" in name for name in trained
    )
    model.eval()
    with torch.no_grad():
        unmerged = model(input_ids=ids, attention_mask=mask)[0]
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(
            make_model(getattr(neobert, head), **fields), tmp_path
        ).eval()
        if task in (None, "FEATURE_EXTRACTION"):
            assert_same(
                again(input_ids=ids, attention_mask=mask)[0],
                unmerged,
                1e-5,
                "output of the saved adapter",
            )
        with model.disable_adapter():
            assert (model(input_ids=ids, attention_mask=mask)[0] - unmerged).abs().max() > 1e-3, (
                "The adapter does nothing."
            )
        merged = model.merge_and_unload()
        assert type(merged) is getattr(neobert, head)
        assert_same(merged(input_ids=ids, attention_mask=mask)[0], unmerged, 1e-5, "merged output")


# ------------------------------------------------------------------------------------------------
# pipelines


TEXTS = [
    "The capital of France is [MASK].",
    "A very much longer sentence about nothing in particular, with a [MASK] in it.",
]


def pipeline(task, model_class, tokenizer, **fields):
    model = make_model(model_class, vocab_size=30522, num_hidden_layers=2, **fields)
    try:
        return transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu"), model
    except KeyError as error:
        if "question-answering" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} has no {task} pipeline")


def run(model, tokenizer, *texts):
    with torch.no_grad():
        return model(**tokenizer(*texts, return_tensors="pt"))


def test_fill_mask(tokenizer):
    pipe, model = pipeline("fill-mask", NeoBERTForMaskedLM, tokenizer)
    for text, answers in zip(TEXTS, pipe(TEXTS, batch_size=2, top_k=3)):
        where = (
            (tokenizer(text, return_tensors="pt")["input_ids"][0] == tokenizer.mask_token_id)
            .nonzero()
            .item()
        )
        best = run(model, tokenizer, text).logits[0, where].softmax(-1).topk(3)
        assert [answer["token"] for answer in answers] == best.indices.tolist()
        assert [answer["score"] for answer in answers] == pytest.approx(
            best.values.tolist(), rel=1e-3
        )


def test_feature_extraction(tokenizer):
    pipe, model = pipeline("feature-extraction", NeoBERTModel, tokenizer)
    for text, features in zip(TEXTS, pipe(TEXTS)):
        expected = reference_states(model, tokenizer(text, return_tensors="pt")["input_ids"][0])[0][
            -1
        ]
        assert_same(torch.tensor(features)[0], expected, 1e-5, "features")


def test_text_classification(tokenizer):
    pipe, model = pipeline(
        "text-classification", NeoBERTForSequenceClassification, tokenizer, num_labels=3
    )
    for text, answers in zip(TEXTS, pipe(TEXTS, batch_size=2, top_k=None)):
        expected = run(model, tokenizer, text).logits[0].softmax(-1).sort(descending=True)
        assert [answer["label"] for answer in answers] == [
            f"LABEL_{i}" for i in expected.indices.tolist()
        ]
        assert [answer["score"] for answer in answers] == pytest.approx(
            expected.values.tolist(), rel=1e-3
        )


def test_token_classification(tokenizer):
    labels = {0: "O", 1: "PER", 2: "LOC"}
    pipe, model = pipeline(
        "token-classification",
        neobert.NeoBERTForTokenClassification,
        tokenizer,
        num_labels=3,
        id2label=labels,
    )
    for text, entities in zip(TEXTS, pipe(TEXTS, batch_size=2)):
        expected = [
            labels[i] for i in run(model, tokenizer, text).logits[0].argmax(-1).tolist()[1:-1]
        ]
        found = {entity["index"]: entity["entity"] for entity in entities}
        assert [found.get(i + 1, "O") for i in range(len(expected))] == [
            label.replace("LABEL_0", "O") for label in expected
        ]


def test_question_answering(tokenizer):
    pipe, model = pipeline("question-answering", neobert.NeoBERTForQuestionAnswering, tokenizer)
    context = "NeoBERT has 28 layers. It was trained on RefinedWeb."
    answer = pipe(question="How many layers?", context=context)
    assert (
        answer["answer"] in context and context[answer["start"] : answer["end"]] == answer["answer"]
    )
    batch = tokenizer("How many layers?", context, return_tensors="pt")
    assert "token_type_ids" not in batch, "The tokenizer should give what the model uses."


# ------------------------------------------------------------------------------------------------
# sentence-transformers


@pytest.fixture
def sentence_model(tmp_path, tokenizer):
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    from sentence_transformers import SentenceTransformer

    model = make_model(NeoBERTModel, vocab_size=30522, num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # A plain model folder gets mean pooling.
    return SentenceTransformer(str(tmp_path), trust_remote_code=True, device="cpu"), model


def test_sentence_transformer(sentence_model, tokenizer):
    encoder, model = sentence_model
    texts = [text.replace("[MASK]", "word") for text in TEXTS] + ["Short."]
    embeddings = encoder.encode(texts, batch_size=3, convert_to_tensor=True)
    for text, embedding in zip(texts, embeddings):
        hidden = reference_states(model, tokenizer(text, return_tensors="pt")["input_ids"][0])[0][
            -1
        ]
        assert_same(embedding, hidden.mean(0), 1e-5, "embedding")


def test_sentence_transformer_packs_for_flash(sentence_model, monkeypatch, tokenizer):
    """Asked for flash attention, sentence-transformers sends one packed row with the packing
    arguments."""
    encoder, model = sentence_model
    flash = install_flash(monkeypatch)
    inner = next(module for module in encoder.modules() if isinstance(module, NeoBERTModel))
    if not hasattr(encoder[0], "unpad_inputs"):
        pytest.skip("this sentence-transformers does not pack")
    texts = [text.replace("[MASK]", "word") for text in TEXTS] + ["Short."]
    inner.config._attn_implementation = "flash_attention_2"
    encoder[0].unpad_inputs = True
    assert encoder[0].can_flatten_inputs, (
        "sentence-transformers does not take the model for one that packs."
    )
    shapes = []
    inner.encoder.register_forward_pre_hook(
        lambda module, args: shapes.append(tuple(args[0].shape))
    )
    embeddings = encoder.encode(texts, batch_size=3, convert_to_tensor=True)
    assert len(shapes) == 1 and shapes[0][0] == 1, f"The batch arrived as {shapes}, not packed."
    assert flash.calls and len(flash.calls[0]["cu_seqlens_q"]) == 4
    for text, embedding in zip(texts, embeddings):
        hidden = reference_states(model, tokenizer(text, return_tensors="pt")["input_ids"][0])[0][
            -1
        ]
        assert_same(embedding, hidden.mean(0), 1e-5, "embedding of a packed text")


def test_configuration_of_a_task_travels(tmp_path):
    """id2label and problem_type, which the pipelines and the inference servers read."""
    config = NeoBERTConfig(
        **FIELDS,
        id2label={0: "no", 1: "yes"},
        label2id={"no": 0, "yes": 1},
        problem_type="single_label_classification",
    )
    NeoBERTForSequenceClassification(config).save_pretrained(tmp_path)
    again = NeoBERTConfig.from_pretrained(tmp_path)
    assert (
        again.id2label == {0: "no", 1: "yes"}
        and again.num_labels == 2
        and again.problem_type == "single_label_classification"
    )


def test_adapters_are_on_every_linear_layer_of_a_block():
    assert default_targets(NeoBERTConfig(**FIELDS)) == ["qkv", "wo", "w12", "w3"]
    assert default_targets(NeoBERTConfig(**FIELDS, **LEARNED)) == ["qkv", "wo", "ffn.0", "ffn.2"]
