"""Test the model in third-party libraries that inspect it or save a part of it.

Covers adapters of PEFT with a newly initialized head, hooks and patches on inner modules (Opacus,
NEFTune, Captum), pipelines, SPLADE and bert-score on saved models, the losses of
sentence-transformers, and KeyBERT, SetFit and GLiNER.
"""

from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers.reference import (
    FIELDS,
    assert_same,
    count_rows,
    make_model,
    packed_batch,
    random_batch,
    texts_of,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    pipeline,
)

from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert import modeling_neobert as modeling


TARGETS = ["qkv", "wo", "w12", "w3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a directory with a masked LM, from which a sequence classifier is fine-tuned.

    The head of the classifier is missing in the checkpoint and is initialized when it is loaded.
    """
    folder = tmp_path_factory.mktemp("base")
    make_model(NeoBERTForMaskedLM).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------
# PEFT


# {test id: (prefix of the configuration class in PEFT, its options without the task)}.
BLOCKS = {"target_modules": TARGETS, "r": 4}
METHODS = {
    "LoRA": ("Lora", BLOCKS),
    "LoRA on all linear layers": ("Lora", {"target_modules": "all-linear", "r": 4}),
    "LoRA without a task": ("Lora", {**BLOCKS, "modules_to_save": ["classifier"]}),
    "DoRA": ("Lora", {**BLOCKS, "use_dora": True}),
    "rsLoRA": ("Lora", {**BLOCKS, "use_rslora": True}),
    "AdaLoRA": (
        "AdaLora",
        {"target_modules": TARGETS, "init_r": 4, "target_r": 2, "total_step": 10},
    ),
    "VeRA": ("Vera", BLOCKS),
    "LoHa": ("LoHa", BLOCKS),
    "LoKr": ("LoKr", BLOCKS),
    "OFT": ("OFT", {"target_modules": TARGETS, "r": 0, "oft_block_size": 16}),
    "BOFT": ("BOFT", {"target_modules": TARGETS, "boft_block_size": 4}),
    "IA3": ("IA3", {"target_modules": ["qkv", "w3"], "feedforward_modules": ["w3"]}),
    "prompt tuning": ("PromptTuning", {"num_virtual_tokens": 3}),
    "p-tuning": ("PromptEncoder", {"num_virtual_tokens": 3, "encoder_hidden_size": 16}),
}


@pytest.mark.parametrize("method", METHODS)
def test_reloaded_peft_adapter_gives_the_same_logits(base, tmp_path, method):
    """Check that a reloaded adapter gives the logits of the trained model.

    Three training steps change everything that PEFT trains. The adapter is then loaded onto a base
    model whose head was initialized with another seed, as in another process. PEFT saves
    `classifier` by default but not `dense`, so `dense` must be initialized identically.
    """
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    ids, mask = random_batch([9, 4, 7])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 2, 1])}
    name, options = METHODS[method]
    task = {} if "modules_to_save" in options else {"task_type": "SEQ_CLS"}

    def load_base(seed):
        torch.manual_seed(seed)
        classifier = AutoModelForSequenceClassification
        return classifier.from_pretrained(base, dtype=torch.float32, num_labels=3)

    model = peft.get_peft_model(load_base(1), getattr(peft, f"{name}Config")(**task, **options))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path)

    with torch.no_grad():
        expected = model.eval()(**batch).logits
        # With labels, AdaLoRA in PEFT computes a loss from attributes that an adapter loaded for
        # inference does not have.
        del batch["labels"]
        actual = peft.PeftModel.from_pretrained(load_base(2), tmp_path).eval()(**batch).logits
        untrained = load_base(2).eval()(**batch).logits
    assert_same(actual, expected, what="logits of a reloaded adapter")
    assert (untrained - expected).abs().max() > 1e-2, "Training did not change the logits."


def test_token_embedding_in_modules_to_save(base):
    """Check the name of the token embedding in `modules_to_save` of PEFT.

    PEFT compares the end of module names. `encoder`, the token embedding, is also the end of
    `transformer_encoder`, so the embedding must be selected as `model.encoder`.
    """
    peft = pytest.importorskip("peft", reason="PEFT is not installed")

    def adapted(name):
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
        options = {"target_modules": ["wo"], "modules_to_save": [name], "task_type": "SEQ_CLS"}
        return peft.get_peft_model(model, peft.LoraConfig(**options))

    with pytest.raises(TypeError, match="ModuleList"):
        adapted("encoder")

    saved_modules = {
        name.rpartition(".")[2]
        for name, module in adapted("model.encoder").named_modules()
        if type(module).__name__ == "ModulesToSaveWrapper"
    }
    assert saved_modules == {"encoder", "classifier"}


def test_dense_initialization_does_not_depend_on_the_seed():
    """`dense` is initialized with the same values in every process, unlike `classifier`.

    Both are sampled from normal(0, classifier_init_range), but only `classifier` depends on the
    seed of the process. PEFT does not save `dense` by default.
    """
    config = NeoBERTConfig(**{**FIELDS, "hidden_size": 256}, classifier_init_range=0.05)
    torch.manual_seed(1)
    first = NeoBERTForSequenceClassification(config)
    torch.manual_seed(2)
    second = NeoBERTForSequenceClassification(config)

    weight = first.dense.weight
    assert torch.equal(weight, second.dense.weight)
    assert not torch.equal(first.classifier.weight, second.classifier.weight)
    assert abs(weight.std() / 0.05 - 1) < 0.02 and abs(weight.mean()) < 0.001
    assert (first.dense.bias == 0).all()

    # Adapters that were saved without `dense` depend on exactly these values.
    expected = torch.tensor([-1.12583983, -1.15236020, -0.25057858, -0.43387881]) * 0.05
    assert torch.allclose(weight[0, :4], expected, atol=1e-7)


def test_trained_dense_weights_are_loaded(tmp_path):
    """The reproducible initialization of `dense` never overwrites weights of a checkpoint."""
    model = make_model(NeoBERTForSequenceClassification, num_labels=3)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    loaded = NeoBERTForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(loaded.dense.weight, model.dense.weight)

    # transformers 4 initializes the whole layer again if one of its tensors is missing.
    if not transformers.__version__.startswith("4."):
        del weights["dense.bias"]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        loaded = NeoBERTForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
        assert (
            torch.equal(loaded.dense.weight, model.dense.weight) and (loaded.dense.bias == 0).all()
        )


def test_mixed_batch_uses_one_adapter_per_row():
    """With `adapter_names` of PEFT, each row of a padded batch runs through its own adapter."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False)
    model = peft.get_peft_model(make_model(NeoBERTModel), config, adapter_name="a")
    model.add_adapter("b", config)
    model.eval()

    ids, mask = random_batch([9, 4, 7, 9])
    names = ["a", "b", "a", "__base__"]
    with torch.no_grad():
        mixed = model(input_ids=ids, attention_mask=mask, adapter_names=names)[0]
        for row, text in enumerate(texts_of(ids, mask)[:3]):
            model.set_adapter(names[row])
            alone = model(input_ids=text[None])[0][0]
            assert_same(mixed[row, : len(text)], alone, what=f"row {row}")
        with model.disable_adapter():
            assert_same(mixed[3], model(input_ids=ids[3:])[0][0], what="row of the base model")


# ------------------------------------------------------------------------------------------------
# Hooks, patches and replaced modules


def _on_all_blocks(model, shapes):
    """Register a global forward hook that records the output shape of each block."""

    def record(module, args, output):
        if isinstance(module, modeling.NeoBERTBlock):
            shapes.append(output.shape)

    return nn.modules.module.register_module_forward_hook(record)


def _patch(block, shapes):
    """Patch the `forward` of a block to record its input shapes; return a handle to undo it."""
    forward = block.forward

    def patched(hidden, *args, **kwargs):
        shapes.append(hidden.shape)
        return forward(hidden, *args, **kwargs)

    block.forward = patched
    return SimpleNamespace(remove=lambda: delattr(block, "forward"))


class Steered(nn.Module):
    """Wrapper with which steering libraries replace a block."""

    def __init__(self, block, shapes):
        super().__init__()
        self.block = block
        self.seen = shapes

    def forward(self, hidden, *args, **kwargs):
        self.seen.append(hidden.shape)
        return self.block(hidden, *args, **kwargs)


def _replace(blocks, shapes):
    """Replace the second block with a `Steered` wrapper; return a handle to undo it."""
    block = blocks[1]
    blocks[1] = Steered(block, shapes)
    return SimpleNamespace(remove=lambda: blocks.__setitem__(1, block))


def _shape_hook(shapes):
    """Return a hook that records the shape of the first tensor of its last argument."""

    def record(module, *arguments):
        tensor = arguments[-1]
        shapes.append((tensor[0] if isinstance(tensor, tuple) else tensor).shape)

    return record


# Each function gets the backbone and a list, installs a hook that appends tensor shapes to the
# list, and returns a handle with `remove`.
HOOKS = {
    "a patched block": lambda m, shapes: _patch(m.transformer_encoder[1], shapes),
    "a replaced block": lambda m, shapes: _replace(m.transformer_encoder, shapes),
    "all modules": _on_all_blocks,
    "the embedding": lambda m, shapes: m.encoder.register_forward_hook(_shape_hook(shapes)),
    "a block": lambda m, shapes: m.transformer_encoder[1].register_forward_hook(
        _shape_hook(shapes)
    ),
    "before a layer": lambda m, shapes: m.transformer_encoder[0].wo.register_forward_pre_hook(
        _shape_hook(shapes)
    ),
    "gradients": lambda m, shapes: m.transformer_encoder[2].ffn.register_full_backward_hook(
        _shape_hook(shapes)
    ),
}


@pytest.mark.parametrize("what", HOOKS)
@pytest.mark.parametrize("model_class", (NeoBERTModel, NeoBERTForTokenClassification))
def test_hooks_disable_packing(what, model_class, warnings):
    """With a hook or replacement inside the model, padded batches are not packed.

    The hook gets tensors of shape (B, L, D), the outputs stay the same, and a single warning is
    logged. The model packs again after the hook was removed.
    """
    ids, mask = random_batch([9, 3, 7])
    model = make_model(model_class)
    backbone = getattr(model, "model", model)
    expected = model(ids, attention_mask=mask)[0]

    shapes = []
    handle = HOOKS[what](backbone, shapes)
    # A global hook that remains would make other tests fail.
    try:
        for _ in range(2):
            actual = model(ids, attention_mask=mask)[0]
        actual.sum().backward()
    finally:
        handle.remove()
    assert shapes and set(shapes) == {torch.Size((3, 9, 64))}, (
        f"The hook ({what}) got tensors of shape {set(shapes)}."
    )
    assert_same(actual[mask.bool()], expected[mask.bool()], what=f"output with a hook ({what})")
    assert len(warnings("is a hook or a replaced block")) == 1

    token_counts = count_rows(backbone.layer_norm)
    model(ids, attention_mask=mask)
    assert token_counts == [19], "The model does not pack again after the hook was removed."


@pytest.mark.parametrize("by", ("cu_seq_lens_q", "position_ids"))
@pytest.mark.parametrize(
    "model_class", (NeoBERTForSequenceClassification, NeoBERTForTokenClassification)
)
def test_hooks_keep_packed_sequences_separate(model_class, by):
    """With a hook inside the model, a batch that the caller packed keeps its sequences separate.

    The model itself packs no padded batch while there is a hook.
    """
    packed = packed_batch(texts_of(*random_batch([9, 3, 7])))
    packed["position_ids"] = torch.cat([torch.arange(n) for n in (9, 3, 7)])[None]
    packed = {name: packed[name] for name in ("input_ids", by)}
    model = make_model(model_class, num_labels=5)
    expected = model(**packed).logits

    for module in (model.classifier, model.model.encoder, model.model.transformer_encoder[1].wo):
        handle = module.register_forward_hook(lambda module, args, output: None)
        assert_same(model(**packed).logits, expected, what="logits under a hook")
        handle.remove()


@pytest.mark.parametrize("model_class", (NeoBERTModel, NeoBERTForSequenceClassification))
def test_hidden_states_are_part_of_the_autograd_graph(model_class):
    """Gradients with respect to hidden states work, as in BERT, and equal those without packing.

    Hidden states of a packed batch are unpacked copies outside of the graph. A batch is therefore
    not packed if its hidden states are requested with gradients; without gradients it is.
    """
    ids, mask = random_batch([9, 3, 7])
    results = []
    for unpad_inputs in (True, False):
        model = make_model(model_class, unpad_inputs=unpad_inputs)
        outputs = model(ids, attention_mask=mask, output_hidden_states=True)
        output = outputs[0][mask.bool()] if model_class is NeoBERTModel else outputs[0]
        gradients = torch.autograd.grad(output.sum(), outputs.hidden_states[:2], retain_graph=True)
        outputs.hidden_states[1].retain_grad()
        output.sum().backward()
        assert torch.equal(outputs.hidden_states[1].grad, gradients[1])
        results.append(gradients)
    for actual, expected in zip(*results):
        assert expected.abs().max() > 0
        assert_same(actual, expected, what="gradient of a hidden state")

    model = make_model(model_class)
    token_counts = count_rows(getattr(model, "model", model).layer_norm)
    with torch.no_grad():
        model(ids, attention_mask=mask, output_hidden_states=True)
    assert token_counts == [19]


def test_get_encoder_returns_the_blocks():
    """`get_encoder`, which libraries call, returns the blocks.

    The attribute `model.encoder` is the token embedding, as in the published model.
    """
    for model in (make_model(NeoBERTModel), make_model(NeoBERTForMaskedLM)):
        assert model.get_encoder() is getattr(model, "model", model).transformer_encoder


@torch.no_grad()
def test_unpad_inputs_argument_takes_precedence():
    """The argument `unpad_inputs` takes precedence over hooks and the configuration.

    A caller whose hook accepts packed tensors can request packing, and any caller can turn packing
    off.
    """
    ids, mask = random_batch([9, 3, 7])

    for model_class in (NeoBERTModel, NeoBERTForTokenClassification):
        for has_hook, unpad_inputs, tokens in (
            (True, True, 19),
            (True, None, 27),
            (False, False, 27),
        ):
            model = make_model(model_class)
            token_counts = count_rows(getattr(model, "model", model).layer_norm)
            if has_hook:
                block = getattr(model, "model", model).transformer_encoder[0]
                block.register_forward_hook(lambda module, args, output: None)
            model(ids, attention_mask=mask, unpad_inputs=unpad_inputs)
            assert token_counts == [tokens], (model_class, has_hook, unpad_inputs)


# Hooks and patches that training and loading install, which do not depend on the batch layout.
MACHINERY = {
    "gradients for the inputs": lambda m: m.enable_input_require_grads(),
    "accelerate": lambda m: add_hook_to_module(m.transformer_encoder[0], ModelHook()),
    "spectral norm of torch": lambda m: nn.utils.spectral_norm(
        m.transformer_encoder[0].wo, n_power_iterations=1
    ),
    "compiled blocks": lambda m: m.transformer_encoder[0].compile(backend="eager"),
}


@pytest.mark.parametrize("what", MACHINERY)
@torch.no_grad()
def test_training_hooks_do_not_disable_packing(what, warnings):
    """Hooks of torch, accelerate and transformers for training leave packing on."""
    model = make_model(NeoBERTModel)
    MACHINERY[what](model)
    token_counts = count_rows(model.layer_norm)
    ids, mask = random_batch([9, 3, 7])
    model(ids, attention_mask=mask)
    assert token_counts == [19] and not warnings("not packed"), (
        f"With {what}, the model computed {token_counts} tokens instead of 19, or it logged a "
        "warning."
    )


@pytest.mark.parametrize("norm_type", ["layer", "rms"])
def test_opacus_per_sample_gradients(norm_type):
    """The per-sample gradients of Opacus equal the gradients of each text alone."""
    grad_sample = pytest.importorskip("opacus.grad_sample", reason="Opacus is not installed")
    ids, mask = random_batch([9, 4, 6])
    labels = torch.tensor([0, 2, 1])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    fields = {"num_labels": 3, "classifier_dropout": 0.0, "norm_type": norm_type}

    def model():
        return make_model(NeoBERTForSequenceClassification, **fields).train()

    private = grad_sample.GradSampleModule(model(), loss_reduction="sum")
    private(**batch, num_items_in_batch=1).loss.backward()

    for row in range(3):
        alone = model()
        sample = {name: value[row : row + 1] for name, value in batch.items()}
        alone(**sample, num_items_in_batch=1).loss.backward()
        for (name, p), q in zip(alone.named_parameters(), private._module.parameters()):
            assert q.grad_sample.shape[0] == 3, name
            if p.grad.abs().max() > 1e-6:
                assert_same(q.grad_sample[row], p.grad, 1e-4, f"gradient of {name} for text {row}")


def test_neftune_noise_uses_the_padded_length(base, tmp_path):
    """NEFTune scales its noise with the length of the padded batch, not of the packed row.

    The noise is alpha / sqrt(L * D) (Jain et al. 2023). The hook that Trainer adds to the embedding
    turns packing off, so that L is the length of the padded batch.
    """
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    ids, mask = random_batch([11, 5, 9, 3])
    rows = [{"input_ids": i, "attention_mask": m, "labels": 1} for i, m in zip(ids, mask)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        neftune_noise_alpha=5.0,
        report_to=[],
        use_cpu=True,
        per_device_train_batch_size=4,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)

    # The counters count as hooks of torch, which alone would leave the batch packed.
    token_counts = count_rows(model.get_input_embeddings(), model.model.layer_norm)
    trainer.train()
    assert token_counts == [44, 44]


@pytest.mark.slow
def test_captum():
    """Check attributions of Captum.

    Integrated gradients of the embedding add up to the change of the logit, and the layer methods
    can read the output of each block.
    """
    attr = pytest.importorskip("captum.attr", reason="Captum is not installed")
    model = make_model(NeoBERTForSequenceClassification, num_labels=3)
    ids, mask = random_batch([9, 4])
    baseline = torch.ones_like(ids)

    def logit(ids, mask):
        return model(input_ids=ids, attention_mask=mask).logits[:, 1]

    integrated_gradients = attr.LayerIntegratedGradients(logit, model.model.encoder)
    options = {"additional_forward_args": (mask,), "n_steps": 200, "internal_batch_size": 2}
    scores = integrated_gradients.attribute(ids, baseline, **options)
    assert scores.shape == (2, 9, 64)
    change = (logit(ids, mask) - logit(baseline, mask)).detach()
    assert_same(scores.sum(dim=(1, 2)), change, 0.05, "sum of the attributions")

    for block in model.model.transformer_encoder:
        activation = attr.LayerActivation(logit, block).attribute(
            ids, additional_forward_args=(mask,)
        )
        assert activation.shape == (2, 9, 64), "A block must return only its hidden states."


# ------------------------------------------------------------------------------------------------
# Saved models in pipelines, SPLADE and bert-score


SEVERAL = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])


@pytest.mark.parametrize(
    "labels, num_labels, problem",
    [
        (SEVERAL, 3, "multi_label_classification"),
        (torch.tensor([2, 0]), 3, "single_label_classification"),
        (torch.tensor([[2], [0]]), 3, "single_label_classification"),
        (torch.tensor([0.5, 1.5]), 1, "regression"),
    ],
)
def test_inferred_problem_type_is_saved(labels, num_labels, problem, tmp_path, tokenizer_dir):
    """The problem type that is inferred from the labels is saved with the model.

    The text-classification pipeline reads it to select its output function, for example a sigmoid
    for multi-label classification.
    """
    model = make_model(NeoBERTForSequenceClassification, num_labels=num_labels, vocab_size=30522)
    ids, mask = random_batch([9, 4])
    assert model.config.problem_type is None
    model(ids, attention_mask=mask, labels=labels)
    assert model.config.problem_type == problem

    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(**tokenizer("a fine film", return_tensors="pt")).logits[0]
    functions = {"multi_label_classification": torch.sigmoid, "regression": torch.clone}
    expected = functions.get(problem, lambda x: x.softmax(-1))(logits)

    classify = pipeline("text-classification", model=loaded, tokenizer=tokenizer, top_k=None)
    (answers,) = classify(["a fine film"])
    scores = [answer["score"] for answer in sorted(answers, key=lambda answer: answer["label"])]
    assert_same(torch.tensor(scores), expected, what="scores of the pipeline")


@pytest.fixture
def save(tmp_path, tokenizer_dir):
    """Return a function that saves a random model of a class with its tokenizer.

    The function returns the directory and the model.
    """

    def save(model_class):
        model = make_model(model_class, vocab_size=30522)
        model.save_pretrained(tmp_path / "model")
        AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model"), model

    return save


@pytest.fixture
def sentence_transformers():
    """Return the sentence_transformers module, or skip the test if it is not installed."""
    return pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed"
    )


def test_masked_lm_loads_as_splade_encoder(save, sentence_transformers, tokenizer_dir):
    """sentence-transformers loads a saved masked LM as a SPLADE encoder.

    It looks for a name that ends in ForMaskedLM in `architectures`, where the published name comes
    first.
    """
    folder, model = save(NeoBERTForMaskedLM)
    encoder = sentence_transformers.SparseEncoder(folder, device="cpu")
    assert type(encoder[1]).__name__ == "SpladePooling"

    text = "a bird of prey"
    (vector,) = encoder.encode([text], convert_to_sparse_tensor=False)
    with torch.no_grad():
        logits = model(**AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")).logits[0]
    assert_same(vector, torch.log1p(logits.relu()).max(dim=0).values, what="SPLADE vector")


def test_bert_score(save):
    """bert-score scores texts with a saved model.

    bert-score sets `n_layers`, which drops the blocks above the layer that it reads. The output of
    the truncated model is the hidden state of that layer after the final norm.
    """
    bert_score = pytest.importorskip("bert_score", reason="bert-score is not installed")
    folder, model = save(NeoBERTModel)
    texts = ["a bird of prey", "the hawk is a kind of bird"]

    def score(candidates):
        options = {"model_type": folder, "num_layers": 2, "device": "cpu"}
        return bert_score.score(candidates, texts, **options)

    precision, recall, f1 = score(texts[::-1])
    assert ((score(texts)[2] - 1).abs() < 1e-5).all() and (f1 < 0.999).all()
    assert torch.equal(precision, recall.flip(0))

    ids, _ = random_batch([6])
    with torch.no_grad():
        expected = model.layer_norm(model(ids, output_hidden_states=True).hidden_states[2])
        model.n_layers = 2
        assert_same(model(ids).last_hidden_state, expected, 1e-6)
    assert model.config.num_hidden_layers == model.n_layers == 2


# ------------------------------------------------------------------------------------------------
# Losses of sentence-transformers


TEXTS = [
    "a bird of prey with long wings",
    "the hawk is a kind of bird",
    "stone",
    "a hard mineral that is found in the ground",
]


def sentence_losses(model):
    """Return (loss, number of text columns, labels) for the losses of sentence-transformers."""
    from sentence_transformers import losses

    classes = torch.tensor([0, 1, 0, 1])
    scores = torch.tensor([0.1, 0.9, 0.4, 0.6])
    width = model.get_sentence_embedding_dimension()
    ranking = losses.MultipleNegativesRankingLoss(model)
    return (
        (ranking, 2, None),
        (losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2), 2, None),
        (losses.MultipleNegativesSymmetricRankingLoss(model), 2, None),
        (losses.MegaBatchMarginLoss(model, use_mini_batched_version=False), 2, None),
        (losses.MatryoshkaLoss(model, ranking, [width, 16]), 2, None),
        (losses.GISTEmbedLoss(model, model), 2, None),
        (losses.CosineSimilarityLoss(model), 2, scores),
        (losses.CoSENTLoss(model), 2, scores),
        (losses.AnglELoss(model), 2, scores),
        (losses.ContrastiveLoss(model), 2, classes),
        (losses.OnlineContrastiveLoss(model), 2, classes),
        (losses.SoftmaxLoss(model, width, 2), 2, classes),
        (losses.TripletLoss(model), 3, None),
        (losses.MarginMSELoss(model), 3, scores),
        (losses.BatchAllTripletLoss(model), 1, classes),
        (losses.BatchHardTripletLoss(model), 1, classes),
        (losses.MSELoss(model), 1, torch.linspace(-1, 1, 4 * width).view(4, width)),
    )


def test_losses_of_sentence_transformers(save, sentence_transformers):
    """Packing does not change the losses of sentence-transformers or their gradients."""
    model = sentence_transformers.SentenceTransformer(save(NeoBERTModel)[0], device="cpu")
    backbone = model[0].auto_model
    for loss, columns, labels in sentence_losses(model):
        results = []
        for backbone.config.unpad_inputs in (True, False):
            model.zero_grad()
            # Each column is the list of texts, rotated by one more position.
            rotated = [TEXTS[i:] + TEXTS[:i] for i in range(columns)]
            value = loss([model.preprocess(column) for column in rotated], labels)
            value.backward()
            gradient = backbone.transformer_encoder[0].wo.weight.grad
            results.append((value.detach(), gradient.clone()))

        name = type(loss).__name__
        assert_same(results[0][0], results[1][0], 1e-5, f"loss {name}")
        assert_same(results[0][1], results[1][1], 2e-4, f"gradient of {name}")
        assert results[0][1].abs().max() > 0, f"{name} has no gradient."


# ------------------------------------------------------------------------------------------------
# Libraries that build on sentence encoders


def test_keybert(save, sentence_transformers):
    """The scores of KeyBERT are the cosines of the embeddings of keywords and text."""
    keybert = pytest.importorskip("keybert", reason="KeyBERT is not installed")
    model = sentence_transformers.SentenceTransformer(save(NeoBERTModel)[0], device="cpu")
    keywords = dict(keybert.KeyBERT(model).extract_keywords(TEXTS[0], stop_words=None, top_n=5))
    embeddings = model.encode(
        [TEXTS[0], *keywords], normalize_embeddings=True, convert_to_tensor=True
    )
    assert len(keywords) >= 4
    assert_same(torch.tensor([*keywords.values()]), embeddings[1:] @ embeddings[0], 1e-3)


def test_setfit(save, tmp_path, monkeypatch):
    """SetFit trains the encoder, and a saved classifier gives the same probabilities."""
    setfit = pytest.importorskip("setfit", reason="SetFit is not installed")
    import datasets

    # Files that SetFit writes to the working directory end up in the directory of the test.
    monkeypatch.chdir(tmp_path)
    model = setfit.SetFitModel.from_pretrained(save(NeoBERTModel)[0], device="cpu")
    rows = datasets.Dataset.from_dict({"text": TEXTS, "label": [0, 0, 1, 1]})
    arguments = setfit.TrainingArguments(
        str(tmp_path / "run"), batch_size=4, max_steps=4, report_to="none", body_learning_rate=1e-3
    )

    before = torch.tensor(model.model_body.encode(TEXTS))
    setfit.Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert (torch.tensor(model.model_body.encode(TEXTS)) - before).abs().max() > 1e-3

    model.save_pretrained(tmp_path / "saved")
    loaded = setfit.SetFitModel.from_pretrained(str(tmp_path / "saved"), device="cpu")
    actual, expected = (torch.as_tensor(m.predict_proba(TEXTS)) for m in (loaded, model))
    assert_same(actual, expected, what="probabilities of a reloaded SetFit model")


def test_gliner(save, tmp_path):
    """The entity scores of GLiNER do not depend on packing, and a saved model gives the same."""
    gliner = pytest.importorskip("gliner", reason="GLiNER is not installed")
    sizes = {"hidden_size": 64, "max_width": 4, "max_len": 64}
    config = gliner.GLiNERConfig(model_name=save(NeoBERTModel)[0], span_mode="markerV0", **sizes)
    model = gliner.GLiNER.from_config(config, backbone_from_pretrained=True).eval()

    def scores(model):
        options = {"threshold": 0.0, "flat_ner": False, "multi_label": True}
        predictions = model.inference(TEXTS, ["animal", "thing"], **options)
        return torch.tensor(
            sorted(entity["score"] for entities in predictions for entity in entities)
        )

    (backbone,) = [module for module in model.modules() if isinstance(module, NeoBERTModel)]
    expected = scores(model)
    assert len(expected) > 20
    backbone.config.unpad_inputs = False
    assert_same(scores(model), expected, what="scores of a padded batch")

    model.save_pretrained(tmp_path / "saved")
    loaded = gliner.GLiNER.from_pretrained(str(tmp_path / "saved")).eval()
    assert_same(scores(loaded), expected, what="scores of a reloaded model")
