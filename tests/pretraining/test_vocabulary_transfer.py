"""Test vocabulary transfer.

Covers the old tokens that each new token is initialized from, the means of their rows in tied and
untied models, the exact resumption of such a run, and invalid input.
"""

import json
import shutil

import pytest
import torch
from helpers.pretrain_runs import TINY, arguments_of, log_of, make_corpus, run_of  # noqa: F401
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from neobert import NeoBERTConfig, NeoBERTForMaskedLM, cli
from neobert.common.loading import load_tokenizer, save_tokenizer
from neobert.pretraining.vocabulary_transfer import (
    COPIED,
    MEAN,
    REST,
    RowSources,
    find_rows,
    mean_rows,
    replace_vocabulary,
    wordpieces,
)


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NAMES = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL))


def wordpiece(tokens, special=SPECIAL, **normalizer):
    """Return a WordPiece tokenizer with these tokens after the special ones, by default uncased."""
    backend = Tokenizer(
        models.WordPiece(
            {token: i for i, token in enumerate([*special, *tokens])}, unk_token=special[1]
        )
    )
    backend.normalizer = normalizers.BertNormalizer(**normalizer)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    names = dict(zip(NAMES, special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def named(rows, old, new):
    """Return the sources of the rows as text, {new token: old tokens}."""
    return {
        token: old.convert_ids_to_tokens(rows.sources[token_id])
        for token, token_id in new.get_vocab().items()
    }


def test_a_word_is_tokenized_like_wordpiece():
    """Check the token ids of text at the start of a word and within a word."""
    vocabulary = {
        token: i for i, token in enumerate(["un", "##aff", "##able", "##a", "u", "##n", "able"])
    }
    assert wordpieces("unaffable", True, vocabulary) == ([0, 1, 2], True)
    # Within a word, "un" does not match, and "u" has no token.
    assert wordpieces("unaffable", False, vocabulary) == ([5, 1, 2], False)
    assert wordpieces("ableun", True, vocabulary) == ([6, 5], False)
    assert wordpieces("", True, vocabulary) == ([], False)


def test_transfer_from_uncased_to_cased_vocabulary():
    """Check the old tokens from which each token of a cased vocabulary is initialized."""
    old = wordpiece(
        ["haus", "##haus", "gross", "##e", "marz", "m", "##ar", "##z", "\u00df", "[unused3]", "gro"]
    )
    new = wordpiece(
        [
            *("haus", "Haus", "##haus", "M\u00e4rz", "Hause", "##Mar", "##\u00df", "[unused3]"),
            *("[unused4]", "\u03b1", "gro\u00df", "grosse", "##gro", "\u03b1haus"),
        ],
        special=["<pad>", "<unk>", "<s>", "</s>", "<mask>"],
        lowercase=False,
        strip_accents=False,
    )

    rows = find_rows(old, new)
    assert named(rows, old, new) == {
        **{"<pad>": ["[PAD]"], "<unk>": ["[UNK]"], "<s>": ["[CLS]"]},
        **{"</s>": ["[SEP]"], "<mask>": ["[MASK]"]},
        **{"haus": ["haus"], "##haus": ["##haus"], "[unused3]": ["[unused3]"]},
        "Haus": ["haus"],
        "M\u00e4rz": ["marz"],
        "Hause": ["haus", "##e"],
        # There is no "##m", so the text is tokenized like the start of a word.
        "##Mar": ["m", "##ar"],
        "##\u00df": ["\u00df"],
        "[unused4]": [],
        "\u03b1": [],
        # Characters without a token are omitted.
        "gro\u00df": ["gro"],
        "grosse": ["gross", "##e"],
        "##gro": ["gro"],
        "\u03b1haus": ["##haus"],
    }
    assert rows.counts == {COPIED: 10, MEAN: 7, REST: 2}
    assert [old.convert_ids_to_tokens(i) for i in rows.ordinary][0] == "haus"
    assert len(rows.ordinary) == 10, "special and unused tokens must be excluded"


def test_transfer_from_cased_to_uncased_vocabulary():
    """Check the transfer from a cased to an uncased vocabulary."""
    old = wordpiece(["Haus", "nato", "NATO", "UNO", "f", "##aus", "F"], lowercase=False)
    new = wordpiece(["haus", "nato", "uno", "faus", "##haus"])
    assert named(find_rows(old, new), old, new) == {
        **{token: [token] for token in SPECIAL},
        **{"haus": ["Haus"], "nato": ["nato"], "uno": ["UNO"], "faus": ["f", "##aus"]},
        "##haus": ["##aus"],
    }


def test_transfer_between_bpe_and_wordpiece():
    """Check the transfer from byte-level BPE to WordPiece and back.

    BPE marks tokens at the start of a word, and WordPiece marks tokens within a word.
    """
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "\u0120": 3, "\u0120ab": 4}, []))
    backend.model = models.BPE(
        {"a": 0, "b": 1, "ab": 2, "\u0120": 3, "\u0120ab": 4}, [("a", "b"), ("\u0120", "ab")]
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["[MASK]"])
    old = PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]")
    new = wordpiece(["ab", "##ab", "aab", "b"], lowercase=False)

    sources = named(find_rows(old, new), old, new)
    assert sources["[MASK]"] == ["[MASK]"] and sources["[PAD]"] == []
    assert sources["ab"] == ["\u0120ab"] and sources["##ab"] == ["ab"]
    assert sources["aab"] == ["\u0120", "a", "ab"] and sources["b"] == ["\u0120", "b"]

    reverse = named(find_rows(new, old), new, old)
    assert reverse["\u0120ab"] == ["ab"]
    assert reverse["ab"] == ["##ab"]


def test_the_row_of_the_unknown_token_is_never_used_for_text():
    """Check that only the new unknown token is initialized from the old one."""
    backend = Tokenizer(models.Unigram([("[UNK]", 0.0), ("\u2581a", -1.0), ("b", -2.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    old = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    new = wordpiece(["\u03b1", "ab", "a\u03b1"], lowercase=False)
    sources = named(find_rows(old, new), old, new)
    assert sources["ab"] == ["\u2581a", "b"] and sources["[UNK]"] == ["[UNK]"]
    assert "[UNK]" not in sources["\u03b1"] and sources["a\u03b1"] == ["\u2581a"]


def test_rows_are_means_and_bit_identical_copies():
    """Check a copied row, means of several rows, and rows without a source.

    A row without a source, or after the end of the vocabulary, is the mean of the ordinary rows.
    """
    torch.manual_seed(3)
    weight = torch.randn(6, 4)
    rows = RowSources([[2], [], [1, 5, 1], [0, 4]], [1, 3, 5], {})
    new = mean_rows(weight, rows, 6)
    ordinary_mean = (weight[1] + weight[3] + weight[5]) / 3
    expected = [
        weight[2],
        ordinary_mean,
        (2 * weight[1] + weight[5]) / 3,
        (weight[0] + weight[4]) / 2,
    ]
    assert new.shape == (6, 4) and torch.equal(new[0], weight[2])
    torch.testing.assert_close(new, torch.stack([*expected, ordinary_mean, ordinary_mean]))


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_decoder_and_bias_are_transferred(tied):
    """Check that the embedding, the decoder and its bias get the same copies and means.

    All other weights are unchanged, and tied weights stay tied.
    """
    config = NeoBERTConfig(**{**TINY, "tie_word_embeddings": tied}, vocab_size=7)
    model = NeoBERTForMaskedLM(config)
    with torch.no_grad():
        model.decoder.bias.copy_(torch.arange(7.0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = RowSources([[6], [0], [], [1, 2]], [1, 2, 3], {})
    replace_vocabulary(model, rows, 5, 1)

    after = model.state_dict()
    names = ("model.encoder.weight", "decoder.weight")
    for name in names:
        old = before[name]
        ordinary_mean = old[1:4].mean(0)
        expected = torch.stack(
            [old[6], old[0], ordinary_mean, (old[1] + old[2]) / 2, ordinary_mean]
        )
        torch.testing.assert_close(after[name], expected)
    assert after["decoder.bias"].tolist() == [6, 0, 2, 1.5, 2]
    for name in before.keys() - {*names, "decoder.bias"}:
        assert torch.equal(before[name], after[name]), f"{name} must be unchanged"
    assert (model.decoder.weight is model.get_input_embeddings().weight) is tied
    assert (model.config.vocab_size, model.config.pad_token_id) == (5, 1)
    assert model.get_input_embeddings().padding_idx == 1
    assert model(torch.tensor([[4, 3, 1]])).logits.shape == (1, 3, 5)


# ------------------------------------------------------------------------------------------------
# runs


@pytest.fixture(scope="module")
def folders(corpus, tmp_path_factory):
    """Return the directories of an old tokenizer, a new one, and a run with the old one.

    Returns:
        {"old": tokenizer, "new": tokenizer, "start": output of the run}.
    """
    folder = tmp_path_factory.mktemp("folders")
    letters = [c for c in "abcdefghijklmnopqrstuvwxyz."] + [
        f"##{c}" for c in "abcdefghilmnoprstuwy"
    ]
    save_tokenizer(wordpiece([*letters, "the", "has"]), folder / "old")
    words = ["river", "stone", "water", "##ter", "Paper"]
    save_tokenizer(wordpiece([*reversed(letters), "the", *words], lowercase=False), folder / "new")

    options = {"max_steps": 2, "warmup_steps": 0, "prepared": None, "tokenizer": folder / "old"}
    run_of(arguments_of(corpus, folder / "start", **options))
    return {name: folder / name for name in ("old", "new", "start")}


def transfer_options(folders, **overrides):
    """Return the options of a run that replaces the vocabulary of the initial model."""
    return {
        **{"init_from": folders["start"], "tokenizer": folders["new"], "model_config": None},
        **{"init_embeddings": "transfer", "prepared": None},
        **overrides,
    }


def test_run_with_new_vocabulary_resumes_exactly(corpus, folders, tmp_path, caplog):
    """Check the files of a run with a new vocabulary, and that the run is resumed exactly."""
    caplog.set_level("INFO")
    options = transfer_options(
        folders, max_steps=4, save_steps=2, validation=corpus / "validation.txt"
    )
    run_of(arguments_of(corpus, tmp_path / "one", **options))

    tokenizer = load_tokenizer(str(folders["new"]))
    assert f"Vocabulary of {len(tokenizer)} tokens: 53 copied, 5 mean of old tokens" in caplog.text
    result = json.loads((tmp_path / "one" / "result.json").read_text())
    assert result["init_rows"] == {COPIED: 53, MEAN: 5, REST: 0}
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert load_tokenizer(str(tmp_path / "one")).get_vocab() == tokenizer.get_vocab()

    # Copy the state of the run after step 2 to another directory, and resume it there.
    shutil.copytree(tmp_path / "one" / "checkpoint-2", tmp_path / "two" / "checkpoint-2")
    shutil.copy(tmp_path / "one" / "result.json", tmp_path / "two" / "run.json")
    run_of(arguments_of(corpus, tmp_path / "two", **options))
    assert log_of(tmp_path / "one") == log_of(tmp_path / "two")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two, "a resumed run must end with identical weights"


@pytest.mark.parametrize(
    "more, words",
    [
        ({"init_embeddings": None}, "or pass --init-embeddings transfer"),
        ({"init_from": None}, "needs `init_from`"),
        (
            {"model_config": '{"vocab_size": 20}'},
            "must be one of 58, 64, 128, 256, 512 for a tokenizer of 58 tokens, got 20.",
        ),
        ({"tokenizer": "{maskless}"}, "has no mask token"),
        ({"tokenizer": "{foreign}"}, "must contain a token that can be masked"),
        ({"init_from": "{bare}"}, "no tokenizer was found in"),
    ],
)
def test_invalid_input_is_reported(corpus, folders, tmp_path, capsys, more, words):
    """Check that invalid input is reported without a traceback before training."""
    # Write a tokenizer without a mask token, a tokenizer that covers no text, and a model without a
    # tokenizer.
    paths = {
        "new": folders["new"],
        **{folder: tmp_path / folder for folder in ("maskless", "foreign", "bare")},
    }
    maskless = load_tokenizer(str(folders["new"]))
    maskless.mask_token = None
    save_tokenizer(maskless, paths["maskless"])
    save_tokenizer(wordpiece(["\u03b1"]), paths["foreign"])
    paths["bare"].mkdir()
    for name in ("config.json", "model.safetensors"):
        (paths["bare"] / name).write_bytes((folders["start"] / name).read_bytes())

    # Replace placeholders such as {bare}, but not the braces of JSON values.
    options = {
        name: value.format(**paths)
        if isinstance(value, str) and value[0] == "{" and "}" in value and '"' not in value
        else value
        for name, value in transfer_options(folders, **more).items()
    }
    output = tmp_path / "out"
    assert cli.main(["pretrain", *arguments_of(corpus, output, **options)]) == 2

    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error, error
    assert not list(tmp_path.glob("out/checkpoint*"))
