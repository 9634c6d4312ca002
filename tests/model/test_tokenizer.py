"""Test tokenizer/.

The uncased WordPiece of BERT with a context of 4,096, loaded as a fast tokenizer and unchanged by
saving.
"""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from neobert.common.loading import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return AutoTokenizer.from_pretrained(tokenizer_dir)


def test_is_bert_uncased(tokenizer, tokenizer_dir):
    vocabulary = (tokenizer_dir / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert tokenizer.is_fast and len(tokenizer) == len(vocabulary) == 30522
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.convert_tokens_to_ids(special) == [0, 100, 101, 102, 103]
    # Lower case, accents stripped, punctuation split, longest word pieces first: worked out by hand
    # from vocab.txt.
    ids = tokenizer("Naïve Café, playing NeoBERT!")["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert ids == [vocabulary.index(token) for token in tokens]
    tail = ["cafe", ",", "playing", "neo", "##bert", "!", "[SEP]"]
    assert tokens in (["[CLS]", "na", "##ive", *tail], ["[CLS]", "naive", *tail])


def test_settings(tokenizer, tokenizer_dir):
    assert tokenizer.model_max_length == 4096
    # token_type_ids would be computed in vain
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]
    assert tokenizer.padding_side == "right"
    batch = tokenizer(["a", "a b c"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"] == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    # transformers 4 does not know the class that 5 would write
    assert config["tokenizer_class"] == "BertTokenizer"


def test_survives_a_save(tokenizer_dir, tmp_path):
    # A copy: transformers 5.0 takes a folder with "neobert" in its path for a model's and picks
    # another class.
    tokenizer = AutoTokenizer.from_pretrained(
        shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    )
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.is_fast and again.model_max_length == 4096 and again.padding_side == "right"
    assert again.model_input_names == ["input_ids", "attention_mask"]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"].startswith("BertTokenizer")
    text = "Masks are [MASK] by the model; 3.14 is pi."
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])


@pytest.mark.parametrize("space", [True, False])
def test_a_tokenizer_is_saved_for_both_major_versions(tmp_path, space):
    """What transformers 4 does not read, or reads otherwise without a word: the class, a list of
    special tokens, the space before a text."""
    backend = Tokenizer(models.BPE({"a": 0, "\u0120": 1, "[PAD]": 2, "<x>": 3}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        additional_special_tokens=["<x>"],
        add_prefix_space=space,
    )
    save_tokenizer(tokenizer, tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["pad_token"] == "[PAD]" and written["add_prefix_space"] is space
    assert not isinstance(written.get("extra_special_tokens"), list)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("a<x>")["input_ids"] == ([1, 0, 3] if space else [0, 3])
    assert "<x>" in again.all_special_tokens
