"""Test the table of heads.

Every head of the package must be in the table. Heads are recognized by their tensors, converted and
verified.
"""

import json
from typing import get_args

import pytest
import torch
from helpers.conversion_helpers import convert, save
from safetensors.torch import load_file

import neobert
from neobert import NeoBERTConfig, NeoBERTForSequenceClassification
from neobert.common.errors import UserError
from neobert.configuration_neobert import AUTO_MAP
from neobert.conversion import verify
from neobert.conversion.heads import HEAD_PREFIXES, HEADS, HeadName, choose_head


def test_the_table_has_every_head_of_the_model():
    assert {head.auto_class for head in HEADS.values()} == AUTO_MAP.keys() - {"AutoConfig"}
    assert HEADS["masked-lm"].architectures[0] == "NeoBERTLMHead" and HEADS[
        "base"
    ].architectures == ["NeoBERT"]
    assert HEADS["question-answering"].model_class is neobert.NeoBERTForQuestionAnswering


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_prefixes_match_the_tensors_of_the_model(head, tiny_config):
    """Check the prefixes of each head against the names of the tensors in its model class."""
    with torch.device("meta"):
        names = head.model_class(NeoBERTConfig(**tiny_config)).state_dict()
    head_names = (
        {name for name in names if not name.startswith(head.backbone)} if head.backbone else set()
    )
    assert {name.partition(".")[0] + "." for name in head_names} == set(head.prefixes)
    backbone = [name for name in names if name not in head_names]
    assert len(backbone) == 20 and not any(name.startswith(HEAD_PREFIXES) for name in backbone)


# Number of outputs that are compared, by head. The inputs are two sequences of 32 tokens, of which
# the second has 10 padding tokens. test_verify.py and test_command.py verify the other heads.
NUM_OUTPUTS = {"token-classification": 54 * 3, "question-answering": 54 * 2, "multiple-choice": 2}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_every_head_converts(tmp_path, tiny_config, capsys, monkeypatch, head):
    """Check that each head is recognized, converted with its weights, and verified.

    Multiple choice has the tensors of sequence classification, and is recognized by the
    configuration.
    """
    verified_outputs = []
    original = verify.verify

    def record_outputs(folder, conversion, expected, scratch):
        if head.option in NUM_OUTPUTS:
            expected = original(folder, conversion, expected, scratch)
        verified_outputs.append(expected)
        return expected

    monkeypatch.setattr(verify, "verify", record_outputs)

    labels = {}
    if head.has_labels:
        labels = {"id2label": {0: "x", 1: "y", 2: "z"}, "label2id": {"x": 0, "y": 1, "z": 2}}
    model = head.model_class(NeoBERTConfig(**tiny_config, **labels))
    fields = {**tiny_config, **labels, "architectures": head.architectures}
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    source = save(tmp_path / "run", state, **fields)

    assert convert(source, tmp_path / "out", "--tokenizer", "none") == 0

    assert f"{head.auto_class}.from_pretrained" in capsys.readouterr().out
    (outputs,) = verified_outputs
    assert (
        outputs.numel() == NUM_OUTPUTS.get(head.option, outputs.numel()) and outputs.abs().max() > 0
    )

    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in written.items())

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == head.architectures and config["auto_map"] == AUTO_MAP
    assert ("id2label" in config and config["id2label"]["2"] == "z") == head.has_labels
    assert f"pipeline_tag: {head.pipeline_tag}\n" in (tmp_path / "out" / "README.md").read_text()


def names(*prefixes):
    """Return the names of the embedding and of one weight per prefix."""
    return ["model.encoder.weight", *(f"{prefix}weight" for prefix in prefixes)]


@pytest.mark.parametrize(
    "prefixes, architectures, option",
    [
        ((), [], "base"),
        (("decoder.",), [], "masked-lm"),
        (("dense.", "classifier."), [], "sequence-classification"),
        (("dense.", "classifier."), ["NeoBERTForMultipleChoice"], "multiple-choice"),
        (("dense.", "classifier."), ["NeoBERTLMHead", "Other"], "sequence-classification"),
        (("classifier.",), ["NeoBERTForSequenceClassification"], "token-classification"),
        (("qa_outputs.",), [], "question-answering"),
    ],
)
def test_head_is_chosen_from_tensors_then_architectures(prefixes, architectures, option):
    """Check the head that is chosen from tensors and `architectures`.

    A contradicting `architectures` is ignored. The field decides only between heads with the same
    tensors.
    """
    head, others = choose_head(names(*prefixes), None, architectures)
    assert head.option == option and others == []


@pytest.mark.parametrize(
    "prefixes", [("dense.",), ("decoder.", "qa_outputs."), ("classifier.", "qa_outputs.")]
)
def test_ambiguous_tensors_require_the_head_option(prefixes):
    """Ambiguous tensors require `--head`. Tensors of other heads are then returned as unused."""
    with pytest.raises(UserError, match=r"tensors of one head, got .*\. Choose --head"):
        choose_head(names(*prefixes))
    head, others = choose_head(names(*prefixes), "base")
    assert head.option == "base" and others == sorted(f"{prefix}weight" for prefix in prefixes)


def test_base_head_of_a_masked_lm(tmp_path, checkpoint, model, without_proof, caplog):
    """Check that `--head base` omits the decoder and logs the omitted tensors."""
    caplog.set_level("INFO", "neobert")
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none", "--head", "base")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == model.model.state_dict().keys()
    assert "left out for --head base: decoder.bias, decoder.weight" in caplog.text


def test_classifier_with_decoder_requires_the_head_option(
    tmp_path, model, tiny_config, without_proof
):
    """Check that a checkpoint with a classifier and a decoder requires `--head`."""
    classifier = NeoBERTForSequenceClassification(NeoBERTConfig(**tiny_config, num_labels=5))
    state = {**model.state_dict(), **classifier.state_dict()}
    source = save(tmp_path / "run", state, **tiny_config)

    message = r"of one head, got decoder\.\*, dense\.\*, classifier\.\*\. Choose --head"
    with pytest.raises(UserError, match=message):
        convert(source, tmp_path / "out", "--tokenizer", "none")

    convert(source, tmp_path / "out", "--tokenizer", "none", "--head", "sequence-classification")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == classifier.state_dict().keys()
    # The number of labels is derived from the rows of the classifier.
    assert NeoBERTConfig.from_pretrained(tmp_path / "out").num_labels == 5


def test_head_option_choices_match_the_table():
    assert get_args(HeadName) == tuple(HEADS)
