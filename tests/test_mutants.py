"""Pins that the mutants of tests/tools/mutants.py can be made: each text that one replaces is in
the model, and its tests are there."""

import importlib.util
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("mutants", ROOT / "tests" / "tools" / "mutants.py")
mutants = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutants)


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_follows_the_code(name):
    changes, tests = mutants.MUTANTS[name]
    code = {
        file: (ROOT / file).read_text(encoding="utf-8")
        for file in (mutants.MODEL, mutants.ATTENTION, mutants.CONFIG)
    }
    assert mutants.apply(code, changes, name) != code and all(
        text != replacement for text, replacement, *_ in changes
    )
    assert all((ROOT / "tests" / f"test_{test}.py").is_file() for test in tests)
