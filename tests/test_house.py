"""Check the architecture: rooms import downward only, no imports are circular, and every package is
installed."""

import ast
import configparser
from pathlib import Path

import pytest
from helpers.paths import ROOT


# From the top down; a room may import those after it.
ROOMS = (
    *("__main__", "cli", "scripts", "serving", "throughput", "export", "pretraining"),
    *("prediction", "finetuning"),
    *("contrastive", "distillation", "evaluation", "encoding", "embeddings"),
    *("conversion", "training", "quantization", "__init__", "common", "_registration"),
    *("modeling_neobert", "configuration_neobert", "attention_neobert"),
)
PACKAGE = ROOT / "neobert"
FILES = {path.relative_to(PACKAGE): path for path in PACKAGE.rglob("*.py")}


def imported(place, source):
    """Files of this package that a file imports, anywhere in it: paths relative to the root,
    `__init__.py` for a package.

    Args:
        place: the file, relative to the root.
        source: its text.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [(alias.name.split("."), None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = (
                ["neobert", *place.parts][: 1 + len(place.parts) - node.level] if node.level else []
            )
            names = [
                ([*start, *(node.module or "").split(".")] if node.module else start, alias.name)
                for alias in node.names
            ]
        else:
            continue
        for (first, *parts), name in names:
            if first == "neobert":
                # `from .room import name`: a file room/name.py, or a name in room.py or
                # room/__init__.py.
                options = [
                    *([Path(*parts, f"{name}.py")] if name else []),
                    *([Path(*parts).with_suffix(".py")] if parts else []),
                ]
                yield next((path for path in options if path in FILES), Path(*parts, "__init__.py"))


IMPORTS = {
    place: set(imported(place, path.read_text(encoding="utf-8"))) for place, path in FILES.items()
}


def names_of(source):
    """Names that a module has after its import: defined, assigned or imported anywhere outside of
    functions and classes."""
    todo, found = [ast.parse(source)], set()
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.alias):
                found.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            else:
                todo.append(node)
    return found


NAMES = {place: names_of(path.read_text(encoding="utf-8")) for place, path in FILES.items()}


def circle(imports, start):
    """The first way from `start` back to it, as a list of files, or None."""
    ways, seen = [[start]], set()
    for way in ways:
        for following in imports.get(way[-1], ()):
            if following == start:
                return way
            if following not in seen:
                seen.add(following)
                ways.append([*way, following])
    return None


def test_the_reader_of_imports_sees_what_is_there():
    assert {place.parts[0].removesuffix(".py") for place in FILES} == set(ROOMS)
    source = (
        "from .onnx import x\nfrom . import c\nfrom .. import name\ndef f():\n    import "
        "neobert.common.data\n    from ..common import files"
    )
    found = set(map(str, imported(Path("export/a.py"), source)))
    assert found == {
        "export/onnx.py",
        "export/__init__.py",
        "__init__.py",
        "common/data.py",
        "common/files.py",
    }
    assert (
        circle({"a": {"b"}, "b": {"c"}, "c": {"b", "a"}}, "a") == ["a", "b", "c"]
        and circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}, "a") is None
    )


def test_every_room_is_installed():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    rooms = {place.parts[0] for place in FILES if len(place.parts) > 1} | {"recipes", "tokenizer"}
    packages = settings["options"]["packages"].split()
    assert sorted(packages) == sorted(["neobert", *(f"neobert.{room}" for room in rooms)])


@pytest.mark.parametrize("place", FILES, ids=str)
def test_a_file_imports_downward_and_in_no_circle(place):
    own = place.parts[0].removesuffix(".py")
    above = ROOMS[: ROOMS.index(own)]
    upward = [str(other) for other in IMPORTS[place] if other.parts[0].removesuffix(".py") in above]
    assert not upward, f"{place} imports {', '.join(upward)}, which is above {own}"
    assert Path("__init__.py") not in IMPORTS[place], (
        f"{place} imports the package, which imports everything"
    )
    assert circle(IMPORTS, place) is None, (
        f"a circle of imports: {' -> '.join(map(str, circle(IMPORTS, place)))}"
    )


@pytest.mark.parametrize("place", FILES, ids=str)
def test_what_a_file_imports_is_there(place):
    """Files that no other test imports were broken by a name that had moved."""
    for node in ast.walk(ast.parse(FILES[place].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            start = [*place.parts][: len(place.parts) - node.level]
            other = Path(*start, *node.module.split(".")).with_suffix(".py")
            missing = [
                alias.name
                for alias in node.names
                if other in NAMES and alias.name not in NAMES[other]
            ]
            assert not missing, f"{place} imports {', '.join(missing)}, which {other} does not have"
