"""Test the files of a converted folder.

Weights must have the same bytes as with `save_pretrained`. Covers the code, the model card, the
files for sentence-transformers, and the escaping of names from untrusted files.
"""

import json

import pytest
import torch
import yaml
from helpers.conversion_helpers import ROOT, convert, save
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel
from neobert.common.loading import CODE_FILES
from neobert.conversion.heads import HEADS
from neobert.conversion.hub_folder import usage_lines


def metadata_of(folder):
    """Return the metadata of the model card in a directory."""
    return yaml.safe_load((folder / "README.md").read_text().split("---")[1])


def test_hub_folder_for_sentence_transformers(tmp_path, tiny_config, capsys):
    """Check the files of `--sentence-transformers` and the embeddings of the loaded encoder.

    The tokenizer is the bundled one, and an embedding is the mean over the hidden states of all
    tokens of a text.
    """
    model = NeoBERTForMaskedLM(NeoBERTConfig(**{**tiny_config, "vocab_size": 30522})).eval()
    source = save(tmp_path / "run", model.state_dict(), **{**tiny_config, "vocab_size": 30522})

    assert convert(source, tmp_path / "tiny-neobert", "--sentence-transformers") == 0

    output = tmp_path / "tiny-neobert"
    weights = {"config.json", "model.safetensors", "README.md", *CODE_FILES}
    tokenizer_files = {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.txt",
    }
    pooling = {"modules.json", "1_Pooling", "sentence_bert_config.json"}
    pooling |= {"config_sentence_transformers.json"}
    assert {path.name for path in output.iterdir()} == weights | tokenizer_files | pooling
    for name in CODE_FILES:
        assert (output / name).read_bytes() == (ROOT / name).read_bytes()

    config = json.loads((output / "config.json").read_text())
    assert config["auto_map"] == NeoBERTConfig().to_dict()["auto_map"]
    assert config["architectures"] == ["NeoBERTLMHead", "NeoBERTForMaskedLM"]

    metadata = metadata_of(output)
    # A masked language model is not trained for sentence similarity.
    assert (metadata["pipeline_tag"], metadata["library_name"]) == ("fill-mask", "transformers")
    assert {"neobert", "custom_code", "fill-mask", "sentence-transformers"} <= set(metadata["tags"])

    tokenizer = AutoTokenizer.from_pretrained(output, trust_remote_code=True)
    assert tokenizer.model_max_length == 128, "the limit must be the context length of the model"
    assert "SentenceTransformer(" in capsys.readouterr().out

    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = ["a cat", "the quick brown fox jumps over the lazy dog"]
    options = {"trust_remote_code": True, "device": "cpu"}
    encoder = sentence_transformers.SentenceTransformer(str(output), **options)
    with torch.no_grad():
        ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        expected = torch.cat([model.model(row).last_hidden_state.mean(1) for row in ids])
    assert torch.allclose(torch.tensor(encoder.encode(texts)), expected, atol=1e-5)


# Model card next to the checkpoint.
MINE = "---\nlicense: cc-by-4.0\nbase_model: you/start\nbase_model_relation: finetune\n---\n"
OPTIONS = ["--license", "mit", "--base-model", "chandar-lab/NeoBERT"]


@pytest.mark.parametrize(
    "card, options, license, base",
    [
        (None, [], None, None),
        (MINE, [], "cc-by-4.0", "you/start"),
        (MINE, OPTIONS, "mit", "chandar-lab/NeoBERT"),
        ("# no metadata ---\n---\n: [", [], None, None),
    ],
    ids=["unknown", "of the source's card", "options", "damaged card"],
)
def test_license_and_base_model_in_the_model_card(
    tmp_path, checkpoint, without_proof, card, options, license, base
):
    """Check the license and the base model in the metadata of the model card.

    Options take precedence over the source's card. Without both, the fields are omitted.
    """
    if card is not None:
        (tmp_path / "run" / "README.md").write_text(card)
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none", *options)
    metadata = metadata_of(tmp_path / "out")
    assert (metadata.get("license"), metadata.get("base_model")) == (license, base)
    assert metadata.get("base_model_relation") == (base and "finetune")


def test_model_card_of_an_encoder_with_pooling(tmp_path, tiny_config, without_proof):
    """Check the task and the library of a base model with pooling in the model card."""
    model = NeoBERTModel(NeoBERTConfig(**{**tiny_config, "vocab_size": 30522}))
    source = save(tmp_path / "run", model.state_dict(), **{**tiny_config, "vocab_size": 30522})
    assert convert(source, tmp_path / "out", "--sentence-transformers", "--head", "base") == 0
    metadata = metadata_of(tmp_path / "out")
    library = "sentence-transformers"
    assert (metadata["pipeline_tag"], metadata["library_name"]) == ("sentence-similarity", library)


def test_same_bytes_as_save_pretrained(tmp_path, checkpoint, model, without_proof):
    """Weights, code and configuration are identical to those that `save_pretrained` writes."""
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    model.save_pretrained(tmp_path / "saved")
    for name in ("model.safetensors", *CODE_FILES):
        converted, saved = ((tmp_path / folder / name).read_bytes() for folder in ("out", "saved"))
        assert converted == saved, f"{name} differs from what save_pretrained writes"

    converted, saved = (
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "saved")
    )
    assert converted == saved, "config.json differs from what save_pretrained writes"


def test_untrusted_names_are_escaped_in_the_model_card(
    tmp_path, model, tiny_config, without_proof, capsys, caplog
):
    """Check that names of omitted tensors are neither HTML nor Markdown in the model card.

    The Hub renders the card as HTML. In the log and on the terminal, control characters are
    escaped.
    """
    caplog.set_level("INFO", "neobert.conversion")
    name = "classifier.</code><script>alert(1)</script>\n```\n[here](http://evil)\x1b[2J"
    source = save(tmp_path / "run", {**model.state_dict(), name: torch.zeros(1)}, **tiny_config)

    convert(source, tmp_path / "out", "--tokenizer", "none", "--head", "base")

    card = (tmp_path / "out" / "README.md").read_text()
    assert [line for line in card.splitlines() if line.startswith("```")] == [
        "```python",
        "```",
        "```text",
        "```",
    ]
    assert card.isascii() and "\x1b" not in card
    block = card.split("```text\n")[1].split("\n```")[0]
    assert "<script>" in block and "<script>" not in card.replace(block, "")
    assert "left out for --head base" in caplog.text
    assert "\x1b" not in caplog.text + capsys.readouterr().out


@pytest.mark.parametrize("name", ['a"; import os; os.system("x")  #', "a\\", "a\nb", "\udc80"])
def test_output_name_cannot_inject_python_code(tmp_path, checkpoint, without_proof, name):
    """Check that the name of the output cannot add statements to the Python code in the card."""
    import ast

    for line in usage_lines(name, HEADS["base"], True, True):
        (statement,) = ast.parse(line).body
        assert isinstance(statement, (ast.ImportFrom, ast.Assign))
    convert(checkpoint, tmp_path / name, "--tokenizer", "none")
    assert metadata_of(tmp_path / name)["pipeline_tag"] == "fill-mask"
