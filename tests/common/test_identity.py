"""Test the fingerprint of a model.

The fingerprint depends on all files that determine the outputs of the model, and on no others.
"""

import json

import pytest

from neobert.common.errors import UserError
from neobert.common.identity import files_digest, model_digest


MODEL_FILES = (
    *("config.json", "modules.json", "tokenizer.json", "vocab.txt", "model.safetensors"),
    *("config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json"),
    *("1_Pooling/config.json", "2_Dense/model.safetensors"),
)
OTHER_FILES = ("README.md", "log.jsonl")


@pytest.fixture
def folder(tmp_path):
    """Return a directory with the files of a sentence encoder, whose contents are placeholders."""
    for name in (*MODEL_FILES, *OTHER_FILES):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"of": name}))
    return tmp_path


@pytest.mark.parametrize("name", MODEL_FILES)
def test_digest_depends_on_model_files(folder, name):
    """Check that the digest changes if a file of the model is changed or removed."""
    before = model_digest(folder)
    assert model_digest(str(folder)) == before and len(before) == 12
    (folder / name).write_text("{}")
    assert model_digest(folder) != before

    (folder / name).unlink()
    if name not in ("config.json", "modules.json"):
        assert model_digest(folder) != before


@pytest.mark.parametrize("name", OTHER_FILES)
def test_digest_does_not_depend_on_model_card_and_log(folder, name):
    """Check that the digest does not depend on the model card and log files."""
    before = model_digest(folder)
    (folder / name).write_text("other")
    assert model_digest(folder) == before


def test_files_digest_sorts_files_by_name(tmp_path):
    (tmp_path / "b").write_bytes(b"two")
    (tmp_path / "a").write_bytes(b"one ")
    # The expected value is the output of: printf 'one two' | sha256sum
    assert files_digest([tmp_path / "b", tmp_path / "a"]) == "8ab63e29a4ba"


def test_digest_of_a_directory_without_a_model(tmp_path):
    """Check that the digest of a directory without a model raises an error."""
    with pytest.raises(UserError, match="there is no model"):
        model_digest(str(tmp_path))
