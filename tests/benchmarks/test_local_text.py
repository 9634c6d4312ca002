"""Test the texts of Debian and PyPI packages.

Covers WordNet and GCIDE as sentences, messages about packages that are not installed, and held-out
parts by key.
"""

from benchmarks import local_text
from neobert.common.data import is_held_out


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


def test_the_held_out_part_is_a_function_of_the_key():
    rows = [{"id": f"noun-{i:08d}"} for i in range(5000)]
    train, held_out = local_text.split(rows)
    assert len(train) + len(held_out) == 5000 and 60 < len(held_out) < 140, "2 %"
    assert local_text.split(rows[::-1])[1] == held_out[::-1], "the order does not matter"
    assert is_held_out("a", 53) and not is_held_out("a", 52), "SHA-1 86f7...: 0x86f7 / 2^16 = 0.527"
