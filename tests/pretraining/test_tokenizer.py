"""Test `neobert tokenizer`.

Covers the training of WordPiece vocabularies, the BERT format of the output directory, the
extension of a tokenizer, the statistics that the command prints, and invalid input.
"""

import json
from collections import Counter

import pytest
from helpers.pretrain_runs import save_bpe
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from neobert import cli
from neobert.common.constants import TOKENIZER
from neobert.common.errors import UserError
from neobert.common.loading import load_tokenizer, vocabulary_size
from neobert.export.gguf_file import _bert_normalizer
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.tokenizer import (
    SPECIAL_TOKENS,
    build_vocabulary,
    filter_words,
    pad_vocabulary,
    select_useful_tokens,
    tokenizer_statistics,
    train_wordpiece,
)
from neobert.pretraining.tokenizer_options import VocabularyOptions
from neobert.pretraining.validation import token_characters


GERMAN = [
    "Die Gr\u00f6\u00dfe der Datei wird in Bytes angezeigt.",
    "Der Name der Datei darf nicht leer sein.",
    "Diese Option \u00e4ndert die Gr\u00f6\u00dfe der Ausgabe.",
    "Gibt die Version aus und beendet das Programm.",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a jsonl file of 400 different German texts."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [{"text": f"{GERMAN[i % 4]} Seite {i}"} for i in range(400)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments):
    """Run `neobert tokenizer`, and return the exit code."""
    return cli.main(["tokenizer", *map(str, arguments)])


def warnings_in(caplog):
    """Return the messages of the warnings that were logged."""
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture(scope="module")
def tokenizers(texts, tmp_path_factory):
    """Return a folder with trained tokenizers: uncased, cased, stripped and extended."""
    folder = tmp_path_factory.mktemp("tokenizers")
    options = {
        "uncased": ["--vocab-size", 250],
        "cased": ["--vocab-size", 320, "--cased"],
        "stripped": ["--vocab-size", 256, "--strip-accents"],
        "extended": ["--vocab-size", 30600, "--extend", TOKENIZER],
    }
    for name, words in options.items():
        assert run(texts, "--output", folder / name, *words) == 0
    return folder


# ------------------------------------------------------------------------------------------------
# words and tokens


def test_words_with_rare_characters_are_removed():
    """Check the words and the alphabet of characters that occur at least twice."""
    words = Counter({"haus": 3, "h\u00e4user": 1, "aus": 2, "x" * 101: 9})
    kept, alphabet = filter_words(words, 2)
    assert kept == {"haus": 3, "aus": 2}, (
        "\u00e4 occurs once, and WordPiece replaces a word of more than 100 characters by [UNK]"
    )
    assert alphabet == ["a", "h", "s", "u", "##a", "##s", "##u"]
    assert filter_words(words, 1)[0].keys() == {"haus", "h\u00e4user", "aus"}


def test_tokens_are_merged_in_the_order_of_their_frequency():
    """Check vocabularies with a maximum size and a minimum frequency of the pairs."""
    words, alphabet = filter_words(Counter({"ab": 5, "abc": 4, "bc": 3}), 1)
    # Frequencies of the pairs: a ##b 9, ##b ##c 4, b ##c 3; with "ab": ab ##c 4, b ##c 3.
    assert train_wordpiece(words, alphabet, 100, 1) == [*alphabet, "ab", "abc", "bc"]
    assert train_wordpiece(words, alphabet, 100, 4) == [*alphabet, "ab", "abc"]
    assert train_wordpiece(words, alphabet, len(alphabet) + 1, 1) == [*alphabet, "ab"]


def test_training_is_deterministic():
    """Check merges of equal frequency, whose order in `tokenizers` depends on a hash table."""
    words = Counter({f"{a}{b}{c}": 3 for a in "abcdefg" for b in "hijklmn" for c in "opqrst"})
    kept, alphabet = filter_words(words, 1)
    assert len({tuple(train_wordpiece(kept, alphabet, 150, 1)) for _ in range(4)}) == 1


def test_candidates_are_ordered_by_saved_tokens():
    """Check that candidates are ordered by the number of tokens that they save in all words.

    The words have counts, and the number of selected candidates is limited.
    """
    known = ["h", "##a", "##u", "##s", "##h", "t", "##t"]
    words = {"haus": 10, "haut": 2, "tau": 1, "haushaus": 3}
    candidates = ["haus", "haut", "##haus", "tau", "unseen"]
    # haus saves 13 * 3 tokens, haut 2 * 3, ##haus 3 * 3, and tau 1 * 2.
    assert select_useful_tokens(words, known, candidates, 9) == ["haus", "##haus", "haut", "tau"]
    assert select_useful_tokens(words, known, candidates, 2) == ["haus", "##haus"]
    # ab is used more often, but abcd saves more tokens.
    letters = ["a", "##b", "##c", "##d"]
    assert select_useful_tokens({"ab": 3, "abcd": 2}, letters, ["ab", "abcd"], 2) == ["abcd", "ab"]


def test_a_vocabulary_is_padded_to_a_multiple_of_64():
    """Check that padding adds [unused...] tokens that the vocabulary does not contain."""
    tokens = pad_vocabulary([*SPECIAL_TOKENS, "[unused99]", "a"])
    assert len(tokens) == len(set(tokens)) == 128
    assert tokens[106:108] == ["[unused100]", "[unused101]"]
    assert pad_vocabulary(tokens) == tokens


# ------------------------------------------------------------------------------------------------
# output directories


@pytest.mark.parametrize(
    "name, size, text, tokens",
    [
        ("uncased", 256, "GR\u00d6\u1e9eE Datei", ["gr\u00f6\u00dfe", "datei"]),
        ("cased", 320, "Gr\u00f6\u00dfe Datei", ["Gr\u00f6\u00dfe", "Datei"]),
        ("stripped", 256, "\u00c4ndert", ["andert"]),
    ],
)
def test_output_has_the_bert_format(tokenizers, name, size, text, tokens):
    """Check the class, the vocabulary, the special tokens and the normalization of a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizers / name)
    settings = json.loads((tokenizers / name / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "BertTokenizer"
    assert tokenizer.is_fast
    assert len(tokenizer) == size
    assert tokenizer.model_max_length == 4096
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert tokenizer.convert_tokens_to_ids(special) == [0, 100, 101, 102, 103]
    assert tokenizer.tokenize(text) == tokens
    lines = (tokenizers / name / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert [tokenizer.convert_ids_to_tokens(i) for i in range(size)] == lines

    ids = tokenizer("Datei [MASK]")["input_ids"]
    assert ids[0] == 101
    assert ids[-2:] == [103, 102]
    assert tokenizer.decode(ids, skip_special_tokens=True).lower() == "datei"

    # The GGUF export reads these settings from the tokenizer: lowercase, and stripped accents.
    assert _bert_normalizer(tokenizer) == (name != "cased", name == "stripped")


def test_an_extended_tokenizer_keeps_its_ids_and_needs_fewer_tokens(tokenizers):
    base = load_tokenizer(str(TOKENIZER))
    tokenizer = load_tokenizer(str(tokenizers / "extended"))
    assert len(tokenizer) == 30592
    assert base.get_vocab().items() <= tokenizer.get_vocab().items()

    text = "Die Gr\u00f6\u00dfe der Ausgabe wird angezeigt."
    tokens = ["die", "gro\u00dfe", "der", "ausgabe", "wird", "angezeigt", "."]
    assert tokenizer.tokenize(text) == tokens
    assert len(base.tokenize(text)) > 12

    english = "An unchanged English sentence, of course."
    assert base(english)["input_ids"] == tokenizer(english)["input_ids"]


# ------------------------------------------------------------------------------------------------
# statistics


def test_a_tokenizer_with_gaps_in_its_ids_is_not_extended():
    """Check that ids with a gap, as of a vocab.txt with a line twice, are refused."""
    special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: number for number, token in enumerate(special_tokens)} | {"a": 6, "b": 7}
    base = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]")),
        **{f"{name.strip('[]').lower()}_token": name for name in special_tokens},
    )
    assert vocabulary_size(base) == 8 and len(base) == 7

    options = VocabularyOptions(extend="mine", vocab_size=64)
    with pytest.raises(UserError, match="must have no gaps, got 7 tokens with ids up to 7"):
        build_vocabulary({"ab": 3}, ["a", "b"], options, base)
    # The tables over the ids of the tokenizer have a row for the last token.
    assert TokenMasking(base).is_ordinary.tolist() == [False] * 5 + [False, True, True]
    assert token_characters(base).tolist() == [0] * 5 + [0, 1, 1]


@pytest.mark.parametrize("has_pre_tokenizer", [True, False])
def test_a_tokenizer_without_normalizer_is_extended(tmp_path, has_pre_tokenizer):
    """Check that a tokenizer without a normalizer, or without a pre-tokenizer, can be extended."""
    special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special_tokens, "a", "##a"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    if has_pre_tokenizer:
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    roles = {f"{name.strip('[]').lower()}_token": name for name in special_tokens}
    PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(tmp_path / "base")

    (tmp_path / "texts.txt").write_text("Aab ab\n" * 60)
    arguments = ("--output", tmp_path / "out", "--vocab-size", 64, "--extend", tmp_path / "base")
    assert run(tmp_path / "texts.txt", *arguments) == 0
    extended = load_tokenizer(tmp_path / "out").get_vocab()
    assert extended.items() >= vocabulary.items()
    assert {"A", "##b", "Aab", "ab"} <= extended.keys()


def test_tokenizer_statistics(tokenizers):
    """Check the characters per token and the percentage of [UNK] of two texts."""
    tokenizer = load_tokenizer(str(tokenizers / "cased"))
    vocabulary = {"[UNK]": 0, "ab": 1, "##c": 2, "d": 3, ".": 4}
    tokenizer.backend_tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer.unk_token_id = 0
    # The 13 characters become 7 tokens: ab, ab ##c ., ab, [UNK], d.
    statistics = tokenizer_statistics(tokenizer, ["ab abc.", "ab \u03b1 d"])
    assert list(statistics.values())[1:] == [f"{13 / 7:.3f}", f"{1 / 7:.3%}"]


def test_a_vocabulary_smaller_than_requested_is_reported(tmp_path, capsys, caplog):
    """Check the warning, and the column names of the table.

    The new tokenizer and the bundled one are in directories of the same name.
    """
    (tmp_path / "texts.txt").write_text("Datei Seite\n" * 100)
    output = tmp_path / "tokenizer"
    assert run(tmp_path / "texts.txt", "--output", output, "--vocab-size", 1000) == 0
    (message,) = warnings_in(caplog)
    size = len(load_tokenizer(output))
    assert size < 1000 and message.startswith(
        f"The vocabulary has {size} tokens, but 1,000 were requested: 2 distinct words contain no "
        "more subwords that occur at least 2 times."
    )
    assert "|  | new (tokenizer) | compared with (tokenizer) |" in capsys.readouterr().out

    caplog.clear()
    assert run(tmp_path / "texts.txt", "--output", tmp_path / "small", "--vocab-size", 120) == 0
    assert not warnings_in(caplog)


def test_every_50th_text_is_a_validation_text(texts, tmp_path, capsys):
    """Check that every 50th text is not used for training, but for the statistics."""
    rows = [f"Datei {'Zebra Zebra' if number % 50 == 0 else 'Seite'}" for number in range(1, 201)]
    (tmp_path / "texts.txt").write_text("\n".join(rows) + "\n")
    assert run(tmp_path / "texts.txt", "--output", tmp_path / "out", "--vocab-size", 192) == 0
    assert not {"z", "##z", "zebra"} & {*(tmp_path / "out" / "vocab.txt").read_text().split()}

    # The tokens of a validation text are "datei", [UNK], [UNK]. The bundled tokenizer has letters.
    table = capsys.readouterr().out
    assert "| percentage of [UNK] | 66.667% | 0.000% |" in table, table


# ------------------------------------------------------------------------------------------------
# invalid input


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return a directory with invalid texts and a BPE tokenizer."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "empty.txt").write_text("")
    (folder / "once.txt").write_text("abcdefg\n")
    save_bpe(["a text", "one more"], folder / "bpe")
    return folder


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{inputs}/empty.txt"], "empty.txt has no word"),
        (["{inputs}/once.txt"], "has no word of which every character occurs at least 2 times"),
        (["{texts}", "--vocab-size", "128"], "tokens and the alphabet of the texts, got 128"),
        (["{texts}", "--vocab-size", "30464", "--extend", TOKENIZER], "must be at least 30,528"),
        (
            ["{texts}", "--extend", "{inputs}/bpe"],
            "must be a WordPiece tokenizer, got the BPE tokenizer",
        ),
        (["{texts}", "--extend", TOKENIZER, "--cased"], "cannot be combined with `extend`"),
    ],
)
def test_invalid_input_is_reported_and_nothing_is_written(
    texts, inputs, tmp_path, capsys, arguments, message
):
    words = [str(word).format(inputs=inputs, texts=texts) for word in arguments]
    if "--vocab-size" not in words:
        words += ["--vocab-size", "256"]
    assert run(*words, "--output", tmp_path / "a" / "out") == 2

    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("neobert tokenizer: ")
    assert message in error
    assert not list(tmp_path.iterdir())
