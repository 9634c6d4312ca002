"""Compare the native class with this repository's model and golden outputs of the authors' code.

Covers outputs, losses, gradients, pipelines, files, and old configurations.
"""

import json
import numbers
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import load_file
from transformers import AutoTokenizer, pipeline
from transformers.core_model_loading import revert_weight_conversion

import native
import neobert
from neobert.conversion.command import main as convert


NATIVE = native.load()
ROOT = Path(neobert.__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "neobert_tiny"
HEADS = [name.removeprefix("NeoBert") for name in native.HEADS.values()]
NARROW = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 50, "num_hidden_layers": 3}
SHAPES = {"narrow": {**NARROW, "vocab_size": 99}, "published width": {"num_hidden_layers": 2}}


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the bundled checkpoint after `neobert convert`."""
    folder = tmp_path_factory.mktemp("converted") / "model"
    assert not convert([str(ROOT / "examples" / "checkpoint"), str(folder), "--dtype", "float32"])
    return folder


def build(head, folder, **fields):
    """Return this repository's model with random norms and biases, and save it to `folder`."""
    config = neobert.NeoBERTConfig(num_labels=3, classifier_dropout=0.0, **fields)
    ours = getattr(neobert, f"NeoBERT{head}")(config).eval()
    with torch.no_grad():
        for weight in ours.parameters():
            # Norms of 1 and biases of 0 would hide a wrong assignment.
            weight.add_(0.02 * torch.randn_like(weight))
    ours.save_pretrained(folder)
    return ours


def read(head, folder):
    """Return the native model of a folder, which must contain exactly its tensors."""
    theirs, info = getattr(NATIVE, f"NeoBert{head}").from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
    return theirs.eval()


def batch(head, vocabulary, padding_side="right"):
    """Return four texts of 12, 7, 5 and 1 tokens, with labels for the head."""
    lengths = torch.tensor([12, 7, 5, 1])
    mask = (torch.arange(12) < lengths[:, None]).long()
    if padding_side == "left":
        mask = mask.flip(1)
    ids = torch.randint(1, vocabulary, (4, 12)) * mask
    inputs = {"input_ids": ids, "attention_mask": mask}

    if head == "ForMultipleChoice":
        inputs = {name: value.view(2, 2, 12) for name, value in inputs.items()}
        return {**inputs, "labels": torch.tensor([1, 0])}
    if head == "ForQuestionAnswering":
        first = mask.argmax(dim=-1)
        return {**inputs, "start_positions": first, "end_positions": first + lengths - 1}
    if head == "ForSequenceClassification":
        return {**inputs, "labels": torch.tensor([0, 2, 1, 1])}
    if head == "Model":
        return inputs
    labels = torch.randint(0, 3, (4, 12)).masked_fill(mask == 0, -100)
    return {**inputs, "labels": labels}


def non_padding(output, mask):
    """Return the outputs without those at padding tokens, which are unspecified."""
    return output[mask.bool()] if output.shape[:2] == mask.shape else output


def assert_equal(outputs, mask):
    """Check that the outputs of two models at non-padding tokens differ by at most 1e-5."""
    names = {"last_hidden_state", "logits", "start_logits", "end_logits", "loss"} & outputs[0].keys()
    for name in names:
        first, second = (non_padding(output[name], mask) for output in outputs)
        assert torch.allclose(first, second, atol=1e-5, rtol=0), (name, (first - second).abs().max())


def compare(ours, theirs, head="Model", padding_side="right"):
    """Check that two models have equal outputs on one batch, and return the batch and the outputs."""
    inputs = batch(head, ours.config.vocab_size, padding_side)
    outputs = [model(**inputs) for model in (ours, theirs)]
    assert_equal(outputs, inputs["attention_mask"])
    return inputs, outputs


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", HEADS)
def test_outputs_and_gradients_are_equal(head, shape, padding_side, tmp_path):
    ours = build(head, tmp_path, **SHAPES[shape])
    theirs = read(head, tmp_path)
    inputs, outputs = compare(ours, theirs, head, padding_side)
    for output in outputs:
        loss = output.get("loss")
        if loss is None:
            loss = non_padding(output.last_hidden_state, inputs["attention_mask"]).square().mean()
        loss.backward()

    # Convert the gradients of the native weights to the published names and layouts.
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    gradients = revert_weight_conversion(theirs, gradients)
    for name, weight in ours.named_parameters():
        bound = 1e-5 * max(1.0, weight.grad.abs().max().item())
        assert (weight.grad - gradients[name]).abs().max() <= bound, name


@torch.no_grad()
def test_the_published_shape(tmp_path):
    ours = build("Model", tmp_path)
    assert (ours.config.num_hidden_layers, ours.config.hidden_size) == (28, 768)
    compare(ours, read("Model", tmp_path))


@torch.no_grad()
def test_golden_outputs():
    """The published folder layout gives the outputs of the authors' code (tests/golden)."""
    expected = load_file(GOLDEN / "expected.safetensors")
    mask = expected["attention_mask"]
    logits = read("ForMaskedLM", GOLDEN)(expected["input_ids"], mask).logits
    # The noise of the reference is about 1.5e-5.
    assert torch.allclose(non_padding(logits, mask), non_padding(expected["logits"], mask), atol=5e-5, rtol=0)


@torch.no_grad()
def test_the_bundled_checkpoint_and_back(checkpoint, tmp_path):
    """Trained weights; the decoder is tied to the embedding."""
    ours = neobert.NeoBERTForMaskedLM.from_pretrained(checkpoint)
    theirs = read("ForMaskedLM", checkpoint)
    compare(ours, theirs, "ForMaskedLM")
    theirs.save_pretrained(tmp_path)
    assert_same_weights(checkpoint, tmp_path)


@torch.no_grad()
def test_the_bundled_encoder():
    folder = ROOT / "examples" / "sentence-encoder"
    ours = neobert.NeoBERTModel.from_pretrained(folder, dtype=torch.float32).eval()
    compare(ours, read("Model", folder))


def assert_same_weights(*folders):
    """Check that the weight files of two folders have the same names and bits."""
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("head", HEADS)
def test_files_are_the_same_bit_for_bit_there_and_back(head, tmp_path):
    ours = build(head, tmp_path / "ours", **SHAPES["narrow"])
    read(head, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert_same_weights(tmp_path / "ours", tmp_path / "theirs")
    # This repository reads the file that transformers wrote.
    again = type(ours).from_pretrained(tmp_path / "theirs").state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in ours.state_dict().items())


@pytest.mark.parametrize(
    "saved, loaded",
    [("ForMaskedLM", "Model"), ("ForMaskedLM", "ForTokenClassification"), ("Model", "ForSequenceClassification")],
)
def test_the_backbone_of_another_head(saved, loaded, tmp_path):
    ours = build(saved, tmp_path, **SHAPES["narrow"])
    theirs = getattr(NATIVE, f"NeoBert{loaded}").from_pretrained(tmp_path).eval()
    compare(ours.base_model, theirs.base_model)


@pytest.mark.parametrize(
    "fields",
    [
        {"classifier_pooling": "mean"},
        {"rope_theta": 5000.0},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000.0},
    ],
    ids=["mean pooling", "RoPE base", "YaRN", "linear"],
)
def test_old_configurations(fields, tmp_path):
    """Configurations of the authors' code and of transformers 4 are read."""
    head = "ForSequenceClassification"
    ours = build(head, tmp_path, **SHAPES["narrow"], **fields, max_length=256)
    names = (*NARROW, "vocab_size", "num_labels", "id2label", "label2id", "classifier_dropout")
    old = {name: value for name, value in ours.config.to_dict().items() if name in names}
    old |= {"model_type": "neobert", "hidden_act": "SwiGLU", "max_length": 256, "rope": True, **fields}
    (tmp_path / "config.json").write_text(json.dumps(old))

    theirs = read(head, tmp_path)
    compare(ours, theirs, head)

    theirs.config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["max_position_embeddings"] == 256 and "max_length" not in saved


def test_the_published_configuration():
    config, ours = (kind.from_pretrained(GOLDEN) for kind in (NATIVE.NeoBertConfig, neobert.NeoBERTConfig))
    for name in ("vocab_size", "norm_eps", "num_hidden_layers", "max_position_embeddings", "pad_token_id"):
        assert getattr(config, name) == getattr(ours, name)


def test_an_ablation_is_refused():
    with pytest.raises(StrictDataclassFieldValidationError, match="hidden_act"):
        NATIVE.NeoBertConfig(hidden_act="gelu")


def leaves(result):
    """Return the result of a pipeline as a flat list."""
    if isinstance(result, dict):
        result = list(result.values())
    return [leaf for part in result for leaf in leaves(part)] if isinstance(result, list) else [result]


@pytest.mark.parametrize(
    "task, head, more",
    [
        ("fill-mask", "ForMaskedLM", {}),
        ("feature-extraction", "Model", {}),
        ("text-classification", "ForSequenceClassification", {"top_k": None}),
        ("token-classification", "ForTokenClassification", {}),
        ("zero-shot-classification", "ForSequenceClassification", {"candidate_labels": ["art", "law"]}),
    ],
)
def test_pipelines(task, head, more, tmp_path):
    ours = build(head, tmp_path, **NARROW)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tokenizer")
    results = [
        leaves(pipeline(task, model=model, tokenizer=tokenizer)("a [MASK] of paintings", **more))
        for model in (ours, read(head, tmp_path))
    ]
    for first, second in zip(*results, strict=True):
        # Scores may be NumPy numbers, which are no instances of float.
        assert first == (pytest.approx(second, abs=1e-5) if isinstance(second, numbers.Number) else second)


def test_both_load_in_one_process(tmp_path):
    """The conversion does not apply to this repository's classes."""
    ours = build("ForMaskedLM", tmp_path, **SHAPES["narrow"])
    again = neobert.NeoBERTForMaskedLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters()))
