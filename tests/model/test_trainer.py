"""Test the model with Trainer, LoRA, pipelines and sentence-transformers.

For Trainer, covers gradient accumulation, saving and resuming, and gradient checkpointing.
"""

import pytest
import torch
import transformers
from helpers.reference import (
    FIELDS,
    LEARNED,
    assert_same,
    install_flash,
    last_states,
    make_model,
    random_batch,
)
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, Trainer, TrainingArguments

import neobert
from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTModel,
)
from neobert.training.lora import default_targets


TARGET_MODULES = ["qkv", "wo", "w12", "w3"]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    """Return the tokenizer of this repository."""
    return AutoTokenizer.from_pretrained(tokenizer_dir)


# ------------------------------------------------------------------------------------------------
# Trainer


def examples(head, count=16):
    """Return texts of uneven length, so that micro-batches have uneven numbers of labels."""
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
    """Pad the texts and the labels of tokens of a batch."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = [row["labels"] for row in rows]
    if labels[0].dim():
        labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    else:
        labels = torch.stack(labels)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


CLASSES = {"num_labels": 3, "classifier_dropout": 0.0}
HEADS = {
    "masked LM": (NeoBERTForMaskedLM, {}),
    "classification": (NeoBERTForSequenceClassification, CLASSES),
}


def trainer(head, folder, seed=0, **arguments):
    """Return a Trainer for a tiny model that runs on the CPU with SGD."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    model_class, fields = HEADS[head]

    defaults = {
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

    args = TrainingArguments(str(folder), **{**defaults, **arguments})
    model = make_model(model_class, seed=seed, **fields)
    return Trainer(model, args, data_collator=collate, train_dataset=examples(head))


def losses(finished_trainer):
    """Return the losses that a Trainer has logged."""
    return [entry["loss"] for entry in finished_trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("head", HEADS)
def test_accumulation_does_not_change_training(head, tmp_path):
    """One batch of 8 texts and four micro-batches of 2 give the same logged loss and weights."""
    sizes = (8, 1), (2, 4)
    single, accumulated = (
        trainer(
            head,
            tmp_path / str(size),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=2,
        )
        for size, steps in sizes
    )
    start = {name: p.detach().clone() for name, p in single.model.named_parameters()}
    single.train()
    accumulated.train()

    assert (
        losses(accumulated) == pytest.approx(losses(single), rel=1e-3) and len(losses(single)) == 2
    )
    max_update = 0
    for (name, p), q in zip(single.model.named_parameters(), accumulated.model.parameters()):
        max_update = max(max_update, (p - start[name]).abs().max().item())
        assert_same(q - start[name], p - start[name], 1e-3, f"update of {name}")
    assert max_update > 1e-3, "Training did not change the weights."


@pytest.mark.parametrize("head", HEADS)
def test_saving_and_resuming(head, tmp_path):
    """A run that is resumed from a checkpoint ends with the weights of an uninterrupted run.

    The resumed run uses a new Trainer and a model of another seed, as in a new process.
    """
    arguments = {"optim": "adamw_torch", "learning_rate": 1e-3}
    uninterrupted = trainer(head, tmp_path / "straight", max_steps=4, **arguments)
    uninterrupted.train()

    folder = tmp_path / "resumed"
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer(head, folder, max_steps=2, **saving, **arguments).train()
    checkpoint = folder / "checkpoint-2"
    assert (checkpoint / "modeling_neobert.py").exists()

    resumed = trainer(head, folder, seed=9, max_steps=4, **arguments)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for (name, p), q in zip(uninterrupted.model.named_parameters(), resumed.model.parameters()):
        assert_same(q, p, 1e-6, f"{name} after resuming")


def test_gradient_checkpointing_in_trainer(tmp_path):
    """Gradient checkpointing does not change the trained weights."""
    plain = trainer("masked LM", tmp_path / "a", max_steps=1)
    checkpointed = trainer("masked LM", tmp_path / "b", max_steps=1, gradient_checkpointing=True)
    plain.train()
    checkpointed.train()
    for (name, p), q in zip(plain.model.named_parameters(), checkpointed.model.parameters()):
        assert_same(q, p, 1e-6, f"{name} under checkpointing")


# ------------------------------------------------------------------------------------------------
# PEFT


ANSWERS = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
# {head: (task type of PEFT, labels)}. Sequence classifiers are in test_clients.py.
PEFT_HEADS = {
    "NeoBERTModel": ("FEATURE_EXTRACTION", {}),
    "NeoBERTForMaskedLM": (None, {"labels": random_batch([9, 5])[0]}),
    "NeoBERTForTokenClassification": ("TOKEN_CLS", {"labels": torch.ones(2, 9).long()}),
    "NeoBERTForQuestionAnswering": ("QUESTION_ANS", ANSWERS),
}


@pytest.mark.parametrize("head", PEFT_HEADS)
def test_lora(head, tmp_path):
    """Check LoRA adapters on every linear layer of the blocks.

    The base weights get no gradients, and the saved adapter and the merged model give the same
    outputs.
    """
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    model_class = getattr(neobert, head)
    task, labels = PEFT_HEADS[head]
    options = {"r": 4, "lora_alpha": 8, "target_modules": TARGET_MODULES}
    config = peft.LoraConfig(task_type=task, init_lora_weights=False, **options)
    model = peft.get_peft_model(make_model(model_class), config)
    modules = model.named_modules()
    adapted = {name.rpartition(".")[2] for name, module in modules if hasattr(module, "lora_A")}
    assert adapted == set(TARGET_MODULES)

    ids, mask = random_batch([9, 5])
    batch = {"input_ids": ids, "attention_mask": mask}
    model.train()(**batch, **labels)[0].sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == p.requires_grad
        assert p.requires_grad or "lora_" not in name
        assert not p.requires_grad or "base_layer" not in name

    model.eval()
    with torch.no_grad():
        unmerged = model(**batch)[0]
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(make_model(model_class), tmp_path).eval()
        if task in (None, "FEATURE_EXTRACTION"):
            assert_same(loaded(**batch)[0], unmerged, what="output of the saved adapter")
        with model.disable_adapter():
            assert (model(**batch)[0] - unmerged).abs().max() > 1e-3, (
                "The adapter must change the output."
            )
        merged = model.merge_and_unload()
        assert type(merged) is model_class
        assert_same(merged(**batch)[0], unmerged, what="merged output")


# ------------------------------------------------------------------------------------------------
# Pipelines


TEXTS = [
    "The capital of France is [MASK].",
    "A very much longer sentence about nothing in particular, with a [MASK] in it.",
]


def pipeline(task, model_class, tokenizer, **fields):
    """Return a pipeline and its tiny model, or skip the test if there is no such pipeline."""
    model = make_model(model_class, vocab_size=30522, num_hidden_layers=2, **fields)
    try:
        return transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu"), model
    except KeyError as error:
        if "question-answering" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} has no {task} pipeline.")


def ids_of(tokenizer, text):
    """Return the token IDs of a text, (1, L)."""
    return tokenizer(text, return_tensors="pt")["input_ids"]


@torch.no_grad()
def test_fill_mask(tokenizer):
    """The fill-mask pipeline returns the most probable tokens and their probabilities."""
    pipe, model = pipeline("fill-mask", NeoBERTForMaskedLM, tokenizer)

    for text, answers in zip(TEXTS, pipe(TEXTS, batch_size=2, top_k=3)):
        ids = ids_of(tokenizer, text)
        (logits,) = model(ids).logits[ids == tokenizer.mask_token_id]
        best = logits.softmax(-1).topk(3)
        assert [answer["token"] for answer in answers] == best.indices.tolist()
        scores = [answer["score"] for answer in answers]
        assert scores == pytest.approx(best.values.tolist(), rel=1e-3)


def test_feature_extraction(tokenizer):
    """The feature-extraction pipeline returns the last hidden states."""
    pipe, model = pipeline("feature-extraction", NeoBERTModel, tokenizer)
    for text, features in zip(TEXTS, pipe(TEXTS)):
        assert_same(torch.tensor(features)[0], last_states(model, ids_of(tokenizer, text)[0]))


@torch.no_grad()
def test_token_classification(tokenizer):
    """The token-classification pipeline returns the label with the largest logit for each token."""
    labels = {0: "O", 1: "PER", 2: "LOC"}
    fields = {"num_labels": 3, "id2label": labels}
    pipe, model = pipeline(
        "token-classification", neobert.NeoBERTForTokenClassification, tokenizer, **fields
    )

    for text, entities in zip(TEXTS, pipe(TEXTS, batch_size=2)):
        classes = model(ids_of(tokenizer, text)).logits[0].argmax(-1).tolist()[1:-1]
        expected = {i + 1: labels[label] for i, label in enumerate(classes) if label}
        predicted = {entity["index"]: entity["entity"] for entity in entities}
        assert {index: name for index, name in predicted.items() if name != "O"} == expected


def test_question_answering(tokenizer):
    """The question-answering pipeline returns a span of the context."""
    pipe, model = pipeline("question-answering", neobert.NeoBERTForQuestionAnswering, tokenizer)
    context = "NeoBERT has 28 layers. It was trained on RefinedWeb."
    answer = pipe(question="How many layers?", context=context)
    assert context[answer["start"] : answer["end"]] == answer["answer"]


# ------------------------------------------------------------------------------------------------
# sentence-transformers


@pytest.fixture
def sentence_model(tmp_path, tokenizer):
    """Return a SentenceTransformer of a plain model, and a function that checks its embeddings.

    sentence-transformers adds mean pooling to a plain model. The function encodes several texts in
    one batch and compares each embedding with the mean of the reference states.
    """
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = make_model(NeoBERTModel, vocab_size=30522, num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = sentence_transformers.SentenceTransformer(
        str(tmp_path), trust_remote_code=True, device="cpu"
    )

    def check():
        texts = [text.replace("[MASK]", "word") for text in TEXTS] + ["Short."]
        embeddings = encoder.encode(texts, batch_size=3, convert_to_tensor=True)
        for text, embedding in zip(texts, embeddings):
            assert_same(embedding, last_states(model, ids_of(tokenizer, text)[0]).mean(0))

    return encoder, check


def test_sentence_transformer_packs_with_flash_attention(sentence_model, monkeypatch):
    """With flash attention, sentence-transformers packs the batch itself.

    The model gets a single row with the arguments of a packed batch, and the embeddings are right.
    """
    encoder, check = sentence_model
    flash = install_flash(monkeypatch)
    if not hasattr(encoder[0], "unpad_inputs"):
        pytest.skip("This version of sentence-transformers does not pack batches.")

    (backbone,) = (module for module in encoder.modules() if isinstance(module, NeoBERTModel))
    backbone.config._attn_implementation = "flash_attention_2"
    encoder[0].unpad_inputs = True
    assert encoder[0].can_flatten_inputs

    shapes = []
    backbone.encoder.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    check()
    assert len(shapes) == 1 and shapes[0][0] == 1, (
        f"The inputs must be a single packed row, got inputs of shapes {shapes}."
    )
    assert len(flash.calls[0]["cu_seqlens_q"]) == 4


def test_default_lora_targets():
    """The default LoRA targets are all linear layers of a block, for SwiGLU and for GELU."""
    assert default_targets(NeoBERTConfig(**FIELDS)) == ["qkv", "wo", "w12", "w3"]
    assert default_targets(NeoBERTConfig(**FIELDS, **LEARNED)) == ["qkv", "wo", "ffn.0", "ffn.2"]
