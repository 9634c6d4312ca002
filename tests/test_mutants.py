"""Test that the mutants of tests/mutants apply.

Each replaced text occurs in its file, and the named tests exist.
"""

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
