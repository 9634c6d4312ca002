"""Test the texts of installed packages: WordNet entries as sentences, and the held-out rows."""

from benchmarks import local_text
from neobert.common.data import is_held_out


def test_wordnet_lines_become_sentences(tmp_path):
    """Entries contain the words, the definition, the hypernym and the examples of a synset.

    Comment lines of the files are skipped. `wordnet_sentences` returns the examples of at least
    three words.
    """
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


def test_held_out_rows_depend_on_the_id_only():
    """About 2 % of the rows are held out, by a hash of their ID and not by their position."""
    rows = [{"id": f"noun-{i:08d}"} for i in range(5000)]
    train, held_out = local_text.split(rows)
    assert len(train) + len(held_out) == 5000 and 60 < len(held_out) < 140, (
        f"About 100 of 5,000 rows must be held out, got {len(held_out)}."
    )
    assert local_text.split(rows[::-1])[1] == held_out[::-1], (
        "The held-out rows must not depend on the order of the rows."
    )
    # The SHA-1 of "a" starts with 86f7, and 0x86f7 / 2^16 is 0.527.
    assert is_held_out("a", 53) and not is_held_out("a", 52)
