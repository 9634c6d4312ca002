"""Pins the text of packages: WordNet and GCIDE as sentences, absent sources that say what to
install, and held-out parts by key."""

import gzip

import pytest

from neobert.benchmarks import local_text
from neobert.common.data import is_held_out
from neobert.common.errors import UserError


def test_wordnet_lines_become_sentences(tmp_path):
    head = "  1 This software and database is being provided\n"
    (tmp_path / "data.noun").write_text(
        head
        + "00000002 03 n 01 fishnet 0 000 | a net for catching fish  \n"
        + (
            "00000010 06 n 02 landing_net 0 gaff 1 001 @ 00000002 n 0000 | a bag-shaped net; "
            'lifts a fish; "he used a landing net"; "his net"  \n'
        )
    )
    (tmp_path / "data.verb").write_text(
        head + '00000020 29 v 01 take_in 2 000 01 + 08 00 | fool or hoax; "The man took me in"  \n'
    )
    (tmp_path / "data.adj").write_text(
        head + "00000030 00 a 01 galore(ip) 0 000 | existing in abundance  \n"
    )
    (tmp_path / "data.adv").write_text(head)
    rows = {row["id"]: row["text"] for row in local_text.wordnet_entries(tmp_path)}
    assert rows == {
        "noun-00000002": "fishnet: a net for catching fish.",
        "noun-00000010": (
            "landing net, gaff: a bag-shaped net; lifts a fish. a landing net is a kind of "
            "fishnet. he used a landing net. his net."
        ),
        "verb-00000020": "take in: fool or hoax. The man took me in.",
        "adj-00000030": "galore: existing in abundance.",
    }
    assert [row["text"] for row in local_text.wordnet_sentences(tmp_path)] == [
        "he used a landing net.",
        "The man took me in.",
    ]


def test_dictionary_entries_lose_their_apparatus(tmp_path):
    entries = (
        'Laminar \\Lam"i*nar\\, Laminal \\Lam"i*nal\\, a. [Cf. F. laminaire.\n   See {Lamina}]\n   '
        "In, or consisting of, thin plates or layers.\n"
        "   [1913 Webster]\n\nDowse \\Dowse\\, v. t. [imp. & p. p. {Dowsed} (doust).] [Cf. OD. "
        "doesen to strike.]\n   1. To plunge, or duck into water.\n"
        "      [1913 Webster]\n\n            A poor man was dowsed.   --Tillotson.\n"
    )
    with gzip.open(tmp_path / "gcide.dict.dz", "wt") as file:
        file.write(entries)
    assert [row["text"] for row in local_text.gcide_entries(tmp_path / "gcide.dict.dz")] == [
        "Laminar: In, or consisting of, thin plates or layers.",
        "Dowse: 1. To plunge, or duck into water. A poor man was dowsed.",
    ]


def test_absent_sources_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NEOBERT_SENTIMENT", raising=False)
    for read, words in (
        (lambda: local_text.wordnet_entries(tmp_path), "apt-get install wordnet-base"),
        (
            lambda: local_text.gcide_entries(tmp_path / "gcide.dict.dz"),
            "apt-get install dict-gcide",
        ),
        (lambda: local_text.sentiment_sentences("movie"), "pip download .* vaderSentiment==3.3.2"),
        (lambda: local_text.sentiment_sentences("films"), "choose one of movie"),
    ):
        with pytest.raises(UserError, match=words):
            next(iter(read()))


def test_the_held_out_part_is_a_function_of_the_key():
    rows = [{"id": f"noun-{i:08d}"} for i in range(5000)]
    train, held_out = local_text.split(rows)
    assert len(train) + len(held_out) == 5000 and 60 < len(held_out) < 140, "2 %"
    assert local_text.split(rows[::-1])[1] == held_out[::-1], "the order does not matter"
    assert is_held_out("a", 53) and not is_held_out("a", 52), "SHA-1 86f7...: 0x86f7 / 2^16 = 0.527"


def test_the_command_writes_both_parts(tmp_path, monkeypatch):
    rows = [{"id": f"noun-{i:08d}", "text": f"text {i}"} for i in range(1000)]
    monkeypatch.setitem(local_text.SOURCES, "wordnet", lambda: rows)
    assert local_text.main(["wordnet", "--out", str(tmp_path / "new")]) == 0
    lines = {path.stem: path.read_text().splitlines() for path in (tmp_path / "new").iterdir()}
    assert len(lines["train"]) + len(lines["heldout"]) == 1000
