"""Pins that the mutants of tests/mutants can be made: each text that one replaces is in its file,
what replaces it is another, and its tests are there."""

import pytest
from helpers.paths import ROOT
from tools import mutants


@pytest.mark.parametrize("mutant", mutants.read_mutants(), ids=lambda m: f"{m.file} {m.name}")
def test_a_mutant_follows_the_code(mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    for old, new in mutant.changes:
        assert old in text and old != new
    for test in mutant.tests:
        file, _, name = test.partition("::")
        tests = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in tests
