"""Test the configuration file next to a checkpoint.

Covers the selection of the file, the fields that are read, and the rejection of damaged and
malicious files.
"""

import json

import pytest

from neobert import NeoBERTConfig
from neobert.common.errors import UserError
from neobert.conversion.config_files import find_config, read_config
from neobert.conversion.locate import open_checkpoint


def test_hydra_configuration(run):
    """Check that the configuration of a Hydra run is found and its references are resolved."""
    path, fields = find_config(open_checkpoint(run, 9).folders)
    assert path == run / ".hydra" / "config.yaml"
    assert fields == {
        "hidden_size": 64,
        "norm_eps": 1e-6,
        "rope": True,
        "vocab_size": 200,
        "max_length": 128,
    }
    # The maximum length of the tokenizer is an alias of `max_position_embeddings`.
    assert NeoBERTConfig(num_attention_heads=4, **fields).max_position_embeddings == 128


def test_precedence_of_config_sections(tmp_path):
    """Check the precedence of `model` over the top level, and of the top level over `tokenizer`.

    A field that is null does not take precedence. Of the tokenizer's section, only the vocabulary
    size and the maximum length are read.
    """
    sections = (
        "hidden_size: 16\nmax_length: 64\nmodel: {hidden_size: 32, norm_eps: "
        "null}\ntokenizer: {max_length: 128, vocab_size: 9, hidden_size: 8}"
    )
    (tmp_path / "config.yaml").write_text(f"norm_eps: 0.1\n{sections}\n")
    assert read_config(tmp_path / "config.yaml") == {
        "hidden_size": 32,
        "norm_eps": 0.1,
        "max_length": 64,
        "vocab_size": 9,
    }


def test_names_of_bert_are_read(tmp_path):
    """The names of BERT's configuration, which NeoBERTConfig accepts, are read from a file."""
    fields = {"layer_norm_eps": 1e-6, "hidden_dropout_prob": 0.1, "initializer_range": 0.3}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "hidden_size": 32}))
    assert read_config(tmp_path / "config.json") == {**fields, "hidden_size": 32}


def test_config_above_the_run_is_ignored(run, tmp_path):
    """A configuration in the directory above the run does not belong to the run."""
    (tmp_path / "config.json").write_text('{"hidden_size": 32}')
    assert find_config(open_checkpoint(run, 9).folders)[1]["hidden_size"] == 64


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.json", "{", "is not valid JSON"),
        ("a.yaml", "- 1", "must be a mapping of names to values, got list"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "is not valid YAML"),
        (
            "a.json",
            '{"model_type": "bert", "hidden_size": 2}',
            "must have the model_type neobert, got 'bert'",
        ),
        ("a.json", '{"color": 2}', "must have a field of a NeoBERT configuration"),
        ("a.yaml", "id2label: &a [*a]", "id2label in .* must be a value|is not valid YAML"),
    ],
)
def test_bad_configurations(tmp_path, name, text, message):
    """Check that a malformed, malicious or unrelated configuration raises an error."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path / name)


def test_config_path_is_missing_or_a_directory(tmp_path):
    """Check the errors about a directory and a missing file."""
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(UserError, match="not a file|no file"):
            read_config(path)


def test_damaged_file_beside_a_checkpoint(tmp_path):
    """A damaged configuration raises an error, although the configuration is optional."""
    assert find_config([tmp_path]) == (None, {})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json is not valid JSON"):
        find_config([tmp_path])
