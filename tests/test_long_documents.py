"""Pins the measurement of long documents: what is a section's score, ranks and their errors against
figures worked out by hand, and how manual pages and info files are read."""

import gzip
import math

import numpy as np
import pytest

from neobert.benchmarks.long_documents import (
    Document,
    Question,
    chosen,
    figures,
    info_chapters,
    manual_pages,
    page,
    questions_of,
    reciprocal_ranks,
    section_scores,
    verdict,
)


def test_the_score_of_a_section_is_the_best_of_its_windows():
    """Two sections of 10 and 100 characters, and one of another document."""
    first = Document("k", "a", "x" * 110, [("one", 0, 10), ("two", 10, 110)])
    second = Document("k", "b", "y" * 50, [("three", 0, 50)])
    windows = [(0, 0, 40), (0, 30, 70), (0, 60, 110)]  # the first holds "one", and is of "two"
    scores = np.array([[0.3, 0.2, 0.1], [0.1, 0.5, 0.9]])
    found = section_scores(scores, windows, [first, second])
    assert found.tolist() == [[0.3, 0.3, -np.inf], [0.1, 0.9, -np.inf]]


def test_ranks_and_errors():
    questions = [Question(i // 2, i, "h", "q") for i in range(4)]
    scores = np.array([[3, 1, 1, 0], [3, 2, 1, 0], [1, 1, 1, 1], [0, 9, 5, -np.inf]])
    ranks = reciprocal_ranks(scores, questions)
    assert ranks.tolist() == [1, 1 / 2, 1 / 2.5, 1 / 4]
    found = figures(ranks, questions, np.full(4, 0.25))
    assert found["mrr"] == pytest.approx(ranks.mean())
    assert found["gain"] == pytest.approx(ranks.mean() - 0.25)
    # Two documents of means 0.75 and 0.325: of two draws, their deviation over the root of two.
    expected = np.std([0.75, 0.325]) / math.sqrt(2)
    assert found["se"] == pytest.approx(expected, rel=0.1) == found["gain_se"]


MANUAL = (
    '.TH BIRD 1\n.SH NAME\nbird \\- sing\n.SH "DESCRIPTION"\n.PP\n\\fBbird\\fR sings.\n'
    ".SS Songs of the morning\n{}\n.SH SEE ALSO\nno\n"
)


def test_manual_pages_are_read(tmp_path):
    (tmp_path / "man1").mkdir()
    song = " ".join(f"A song of {i}." for i in range(600))
    for name in ("bird-sing.1.gz", "perlfunc.1.gz"):
        (tmp_path / "man1" / name).write_bytes(gzip.compress(MANUAL.format(song).encode()))
    (found,) = chosen(manual_pages(tmp_path), 5) or manual_pages(tmp_path)
    parts = [(heading, found.text[start:end]) for heading, start, end in found.sections]
    assert parts == [
        ("NAME", "bird - sing"),
        ("DESCRIPTION", "bird sings."),
        ("Songs of the morning", song),
    ]
    assert [(q.document, q.section, q.heading) for q in questions_of([found])] == [
        (0, 2, "songs of the morning")
    ]
    assert questions_of([found])[0].named == (
        "what does the manual of bird-sing say about songs of the morning?"
    )
    assert not questions_of([found, found]), "a heading that two sections have asks for none"


def test_info_files_are_read(tmp_path):
    nodes = ["This is bird.info.\n"]
    for name in ("Top", "Songs", "Nests"):
        menu = "* Menu:\n\n* Songs::\n" if name == "Top" else "Text of  it.\n\n\nMore.\n"
        nodes.append(f"File: bird.info,  Node: {name}\n\n1.2 {name} of birds\n*****\n\n{menu}\n")
    (tmp_path / "bird.info.gz").write_bytes(gzip.compress("\x1f\n".join(nodes).encode()))
    (found,) = info_chapters(tmp_path)
    assert (found.name, found.text) == ("bird", "Text of it.\n\nMore.\n\nText of it.\n\nMore.")
    assert [heading for heading, *_ in found.sections] == ["Songs of birds", "Nests of birds"]


def test_the_page_says_whether_late_windows_help():
    row = {"mrr": 0.5, "se": 0.1}
    late = {"vectors": 9, "heading": row | {"gain": 0.3, "gain_se": 0.1}}
    late["question"] = row | {"gain": -0.3, "gain_se": 0.2}
    found = {
        "ours": {"windows of 9": {"vectors": 9, "heading": row, "question": row}, "late": late},
        "BM25": {"of sections": {"vectors": 3, "heading": row, "question": row}},
    }
    assert verdict(found) == (
        "ours: of 2 comparisons, late windows are better than windows read alone by more than two "
        "standard errors in 1, and worse in 0."
    )
    document = Document("manual page", "a", "x", [("one", 0, 1)])
    text = page(found, [document], [Question(0, 0, "one", "q")])
    assert "1 manual pages without their headings, 1 sections, 1 of them asked for" in text
    assert "| ours | late | 9 | 0.50 ± 0.10 | 0.50 ± 0.10 | +0.30 ± 0.10 | -0.30 ± 0.20 |" in text
