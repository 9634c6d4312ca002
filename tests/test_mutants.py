"""Test that the mutants of tests/mutants are up to date with the code and the tests.

tests/tools/mutants.py runs the mutants.
"""

import pytest
from helpers.paths import ROOT
from tools import mutants


@pytest.mark.parametrize("mutant", mutants.read_mutants(), ids=lambda m: f"{m.file} {m.name}")
def test_mutant_is_up_to_date(mutant):
    """The text that a mutant replaces occurs in its file, and the tests of the mutant exist."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    for old, new in mutant.changes:
        assert old in text and old != new
    for test in mutant.tests:
        file, _, name = test.partition("::")
        tests = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in tests
