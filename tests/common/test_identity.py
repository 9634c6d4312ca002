"""Test the fingerprint of a model.

It depends on everything that changes the outputs, and on nothing else.
"""

import json

import pytest

from neobert.common.errors import UserError
from neobert.common.identity import files_digest, model_digest


NUMBERS = (
    *("config.json", "modules.json", "tokenizer.json", "vocab.txt", "model.safetensors"),
    *("config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json"),
    *("1_Pooling/config.json", "2_Dense/model.safetensors"),
)
OTHERS = ("README.md", "log.jsonl")


@pytest.fixture
def folder(tmp_path):
    """A sentence encoder's folder, its files without sense."""
    for name in (*NUMBERS, *OTHERS):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"of": name}))
    return tmp_path


@pytest.mark.parametrize("name", NUMBERS)
def test_whatever_changes_the_numbers_changes_the_digest(folder, name):
    before = model_digest(folder)
    assert model_digest(str(folder)) == before and len(before) == 12
    (folder / name).write_text("{}")
    assert model_digest(folder) != before
    (folder / name).unlink()
    if name not in ("config.json", "modules.json"):
        assert model_digest(folder) != before


@pytest.mark.parametrize("name", OTHERS)
def test_the_card_and_the_log_do_not(folder, name):
    before = model_digest(folder)
    (folder / name).write_text("other")
    assert model_digest(folder) == before


def test_the_digest_is_that_of_the_contents_in_the_order_of_names(tmp_path):
    (tmp_path / "b").write_bytes(b"two")
    (tmp_path / "a").write_bytes(b"one ")
    # printf 'one two' | sha256sum
    assert files_digest([tmp_path / "b", tmp_path / "a"]) == "8ab63e29a4ba"


def test_a_folder_without_a_model_has_none(tmp_path):
    with pytest.raises(UserError, match="there is no model"):
        model_digest(str(tmp_path))
