"""The native class against this repository's model: outputs, gradients, files, old configs."""

import json
from pathlib import Path

import native
import pytest
import torch
from safetensors.torch import load_file

import neobert


NATIVE = native.load()
GOLDEN = Path(neobert.__file__).parent / "tests" / "golden" / "neobert_tiny"
HEADS = [name.removeprefix("NeoBert") for name in native.HEADS.values()]
NARROW = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 50, "vocab_size": 99}
PUBLISHED = {"vocab_size": 30522}  # 768 wide, 12 heads
SHAPES = {
    "narrow": {**NARROW, "num_hidden_layers": 3},
    "published": {**PUBLISHED, "num_hidden_layers": 2},
}


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


def build(head, folder, **fields):
    """This repository's model, with norms and biases that are not the initial ones, saved to
    `folder`, and the native one that reads it."""
    config = neobert.NeoBERTConfig(num_labels=3, classifier_dropout=0.0, **fields)
    ours = getattr(neobert, f"NeoBERT{head}")(config).eval()
    with torch.no_grad():
        for weight in ours.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    ours.save_pretrained(folder)
    theirs, info = getattr(NATIVE, f"NeoBert{head}").from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
    return ours, theirs.eval()


def batch(head, vocabulary, padding_side="right"):
    """Four texts of 12, 7, 5 and 1 tokens, with labels for the head."""
    lengths = torch.tensor([12, 7, 5, 1])
    mask = (torch.arange(12) < lengths[:, None]).long()
    mask = mask.flip(1) if padding_side == "left" else mask
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


def real(output, mask):
    """Of outputs per token those at real tokens: at padding nothing is promised."""
    return output[mask.bool()] if output.shape[:2] == mask.shape else output


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", HEADS)
def test_outputs_and_gradients_are_equal(head, shape, padding_side, tmp_path):
    ours, theirs = build(head, tmp_path, **SHAPES[shape])
    inputs = batch(head, ours.config.vocab_size, padding_side)
    outputs = [model(**inputs) for model in (ours, theirs)]
    names = [name for name in ("last_hidden_state", "logits", "loss") if name in outputs[0]]
    if head == "ForQuestionAnswering":
        names += ["start_logits", "end_logits"]
    for name in names:
        first, second = (real(output[name], inputs["attention_mask"]) for output in outputs)
        assert torch.allclose(first, second, atol=1e-5, rtol=0), (first - second).abs().max()

    for output in outputs:
        loss = output.get("loss")
        if loss is None:
            loss = real(output.last_hidden_state, inputs["attention_mask"]).square().mean()
        loss.backward()
    # The gradients of the native weights in the published names, by the library's own conversion.
    from transformers.core_model_loading import revert_weight_conversion

    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    gradients = revert_weight_conversion(theirs, gradients)
    for name, weight in ours.named_parameters():
        bound = 1e-5 * max(1.0, weight.grad.abs().max().item())
        assert (weight.grad - gradients[name]).abs().max() <= bound, name


@pytest.mark.parametrize("field", [{"classifier_pooling": "mean"}, {"rope_theta": 5000.0}])
def test_settings_of_a_saved_folder_count(field, tmp_path):
    ours, theirs = build("ForSequenceClassification", tmp_path, **SHAPES["narrow"], **field)
    inputs = batch("ForSequenceClassification", 99)
    assert torch.allclose(ours(**inputs).logits, theirs(**inputs).logits, atol=1e-5, rtol=0)


def test_yarn(tmp_path):
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    ours, theirs = build("Model", tmp_path, **SHAPES["narrow"], rope_scaling=rope)
    inputs = batch("Model", 99)
    first, second = (model(**inputs).last_hidden_state for model in (ours, theirs))
    mask = inputs["attention_mask"].bool()
    assert torch.allclose(first[mask], second[mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("head", HEADS)
def test_files_are_the_same_bit_for_bit_there_and_back(head, tmp_path):
    _, theirs = build(head, tmp_path / "ours", **SHAPES["narrow"])
    theirs.save_pretrained(tmp_path / "theirs")
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("ours", "theirs"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # What the library wrote, this repository reads.
    again = getattr(neobert, f"NeoBERT{head}").from_pretrained(tmp_path / "theirs")
    assert all(torch.equal(again.state_dict()[name], before[name]) for name in before)


def test_a_backbone_reads_a_masked_lm(tmp_path):
    ours, _ = build("ForMaskedLM", tmp_path, **SHAPES["narrow"])
    theirs = NATIVE.NeoBertModel.from_pretrained(tmp_path).eval()
    inputs = batch("Model", 99)
    first, second = (model(**inputs).last_hidden_state for model in (ours.model, theirs))
    mask = inputs["attention_mask"].bool()
    assert torch.allclose(first[mask], second[mask], atol=1e-5, rtol=0)


def test_the_published_config(tmp_path):
    fields = json.loads((GOLDEN / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = NATIVE.NeoBertConfig.from_pretrained(tmp_path)
    assert config.max_position_embeddings == fields["max_length"]
    assert not {"kwargs", "max_length", "trust_remote_code"} & config.to_dict().keys()
    ours = neobert.NeoBERTConfig.from_pretrained(GOLDEN)
    assert (config.swiglu_size, config.head_dim) == (ours.ffn_inner_size, ours.head_dim)
    for name in ("vocab_size", "norm_eps", "num_hidden_layers", "intermediate_size"):
        assert getattr(config, name) == getattr(ours, name)


def test_an_ablation_is_refused():
    with pytest.raises(ValueError, match="RoPE and RMS norms"):
        NATIVE.NeoBertConfig(rope=False)


def test_the_bundled_encoder():
    """Real weights, trained: the folder as it is."""
    folder = Path(neobert.__file__).parent / "examples" / "sentence-encoder"
    ours = neobert.NeoBERTModel.from_pretrained(folder, dtype=torch.float32).eval()
    theirs = NATIVE.NeoBertModel.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = batch("Model", ours.config.vocab_size)
    first, second = (model(**inputs).last_hidden_state for model in (ours, theirs))
    mask = inputs["attention_mask"].bool()
    assert torch.allclose(first[mask], second[mask], atol=1e-5, rtol=0)


def test_both_load_in_one_process(tmp_path):
    """The conversion is for the library's classes; this repository's read their own names."""
    ours, _ = build("ForMaskedLM", tmp_path, **SHAPES["narrow"])
    again = neobert.NeoBERTForMaskedLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters()))
