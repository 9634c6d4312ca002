"""Pins the house: rooms import downward only, `common/` no room at all, and no command imports `__main__`."""

import ast
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
# From the top down; a room may import those after it. The last three are the Hub's own files.
ROOMS = (
    *("__main__", "benchmarks", "export", "convert_checkpoint", "conversion", "pretraining", "finetuning", "embeddings", "common"),
    *("modeling_neobert", "configuration_neobert", "attention_neobert"),
)
FILES = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0].removesuffix(".py") in ROOMS]


def imported_rooms(path):
    """Rooms of this package that a file imports, anywhere in it."""
    place = path.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            if node.level:
                parts = [*place[: len(place) - node.level], *parts]
            elif parts[:1] == ["neobert"]:
                parts = parts[1:]
            else:
                continue
            for alias in node.names:
                yield (*parts, alias.name)[0].removesuffix(".py")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("neobert."):
                    yield alias.name.split(".")[1]


def test_there_are_files_of_every_room():
    assert {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES} >= set(ROOMS) - {"export"}
    assert set(imported_rooms(ROOT / "convert_checkpoint.py")) >= {"common", "conversion"}, "the reader of imports sees none"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_downward_only(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    above = ROOMS[: ROOMS.index(own)]
    upward = sorted(room for room in imported_rooms(path) if room in above)
    assert not upward, f"{path.relative_to(ROOT)} imports {', '.join(upward)}, which is above {own}"
