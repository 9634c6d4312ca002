"""Test the tokenizer in tokenizer/.

It is the uncased WordPiece tokenizer of BERT with a maximum length of 4,096 tokens. It loads as a
fast tokenizer, and saving does not change it.
"""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from neobert.common.loading import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    """Return the tokenizer of this repository."""
    return AutoTokenizer.from_pretrained(tokenizer_dir)


def test_is_bert_uncased(tokenizer, tokenizer_dir):
    """The tokenizer has the vocabulary, special tokens and normalization of BERT uncased."""
    vocabulary = (tokenizer_dir / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert tokenizer.is_fast and len(tokenizer) == len(vocabulary) == 30522
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.convert_tokens_to_ids(special) == [0, 100, 101, 102, 103]

    # Derived by hand from vocab.txt: lowercase, accents removed, split at punctuation, longest
    # subwords first.
    ids = tokenizer("Naïve Café, playing NeoBERT!")["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert ids == [vocabulary.index(token) for token in tokens]
    tail = ["cafe", ",", "playing", "neo", "##bert", "!", "[SEP]"]
    assert tokens in (["[CLS]", "na", "##ive", *tail], ["[CLS]", "naive", *tail])


def test_settings(tokenizer, tokenizer_dir):
    """Check the maximum length, the model inputs and the padding side."""
    assert tokenizer.model_max_length == 4096
    # The model ignores token_type_ids.
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]
    assert tokenizer.padding_side == "right"
    batch = tokenizer(["a", "a b c"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"] == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    # transformers 4 does not have the class that transformers 5 would write.
    assert config["tokenizer_class"] == "BertTokenizer"


def test_save_and_reload(tokenizer_dir, tmp_path):
    """A saved and reloaded tokenizer has the same settings and gives the same tokens."""
    # Load a copy: transformers 5.0 treats a path that contains "neobert" as a model, and selects
    # another tokenizer class.
    tokenizer = AutoTokenizer.from_pretrained(
        shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    )
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.is_fast and loaded.model_max_length == 4096 and loaded.padding_side == "right"
    assert loaded.model_input_names == ["input_ids", "attention_mask"]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"].startswith("BertTokenizer")

    text = "Masks are [MASK] by the model; 3.14 is pi."
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == tokenizer.decode(
        tokenizer(text)["input_ids"]
    )


@pytest.mark.parametrize("space", [True, False])
def test_a_tokenizer_is_saved_for_both_major_versions(tmp_path, space):
    """`save_tokenizer` writes a configuration that both major versions of transformers read.

    transformers 4 ignores or silently misreads three settings in the form of transformers 5: the
    class, a list of special tokens, and the space before a text.
    """
    backend = Tokenizer(models.BPE({"a": 0, "\u0120": 1, "[PAD]": 2, "<x>": 3}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        additional_special_tokens=["<x>"],
        add_prefix_space=space,
    )
    save_tokenizer(tokenizer, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["pad_token"] == "[PAD]" and config["add_prefix_space"] is space
    assert not isinstance(config.get("extra_special_tokens"), list)

    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("a<x>")["input_ids"] == ([1, 0, 3] if space else [0, 3])
    assert "<x>" in loaded.all_special_tokens
