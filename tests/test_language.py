"""Check that pages, docstrings, help texts, messages and comments avoid retired expressions.

The expressions belong to an earlier style that could not be understood without reading the code.
CONTRIBUTING.md describes the current style.
"""

import ast
import re
import tokenize
from pathlib import Path

import pytest
from helpers.paths import ROOT


# Regular expressions and what to write instead.
RETIRED = {
    "alike": "identical",
    "anew": "again",
    "apart from": "except for",
    "bits a character": "bits per character",
    "by chance": "randomly",
    "goes? on|going on|went on": "resumes, continues",
    "held-?out set": "validation set",
    "in place of": "instead of",
    "known by": "identified by",
    "licen[c]e": "license",
    "real tokens?": "non-padding tokens",
    "so many": "N",
    "stranger'?s?'?": "untrusted",
    "tells|told": "states, contains",
    "times as fast": "speedup",
    "(tokens|texts|rows|lines) a (second|step|text|batch|line)": "per",
    "a scale a": "one scale per",
    "transplant(s|ed)?": "vocabulary transfer",
    "whoever": "anyone who",
}
PATTERN = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "results" / "README.md",
    ROOT / "examples" / "sentence-encoder" / "README.md",
    ROOT / "examples" / "checkpoint" / "README.md",
]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
SOURCES = [
    *sorted(ROOT.glob("*.py")),
    *sorted((ROOT / "neobert").rglob("*.py")),
    *sorted((ROOT / "benchmarks").glob("*.py")),
    *sorted((ROOT / "examples").glob("*.py")),
]


def prose_of(path: Path) -> list[tuple[int, str]]:
    """Return the docstrings, strings and comments of a Python file with their line numbers.

    Strings without a space are omitted, because they are names.
    """
    prose = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            prose.append((node.lineno, node.value))
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                prose.append((token.start[0], token.string))
    return prose


def retired_expressions(path: Path) -> list[str]:
    """Return "LINE: EXPRESSION" for each retired expression of a file."""
    if path.suffix == ".py":
        prose = prose_of(path)
    else:
        text = path.read_text(encoding="utf-8")
        # Code blocks of pages contain names and outputs. Keep their line breaks for the numbers.
        text = re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
        prose = [(number, line) for number, line in enumerate(text.splitlines(), 1)]
    return [f"{line}: {match[0]}" for line, text in prose for match in PATTERN.finditer(text)]


def test_the_pattern_recognizes_retired_expressions(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""Bits a character, as told."""\nx = 1  # goes on\n', encoding="utf-8")
    assert retired_expressions(path) == ["1: Bits a character", "1: told", "2: goes on"]


@pytest.mark.parametrize("path", [*PAGES, *RECIPES, *SOURCES], ids=lambda path: path.name)
def test_no_retired_expressions(path):
    expressions = retired_expressions(path)
    assert not expressions, (
        f"{path.relative_to(ROOT)} contains retired expressions: {', '.join(expressions)}"
    )
