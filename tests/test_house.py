"""Check the architecture of the package, and the time limit of the slow tests.

Modules import downward only, no imports are circular, every package is installed, and every
imported name exists.
"""

import ast
import configparser
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
from helpers.paths import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from neobert.cli import COMMANDS


# Top-level modules and subpackages, from the top down. Each may only import those after it.
LAYERS = (
    *("__main__", "cli", "scripts", "serving", "throughput", "export", "pretraining"),
    *("prediction", "finetuning"),
    *("contrastive", "distillation", "evaluation", "encoding", "embeddings"),
    *("conversion", "training", "quantization", "__init__", "common", "_registration"),
    *("modeling_neobert", "configuration_neobert", "attention_neobert"),
)
PACKAGE = ROOT / "neobert"
# The Python files of the package, by their path relative to it.
FILES = {path.relative_to(PACKAGE): path for path in PACKAGE.rglob("*.py")}


def imported_files(file, source):
    """Yield the files of this package that a file imports at any level, such as in functions.

    A subpackage is given by its `__init__.py`.

    Args:
        file: Path of the file, relative to the package.
        source: Text of the file.

    Yields:
        Paths relative to the package.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [(alias.name.split("."), None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = (
                ["neobert", *file.parts][: 1 + len(file.parts) - node.level] if node.level else []
            )
            names = [
                ([*start, *(node.module or "").split(".")] if node.module else start, alias.name)
                for alias in node.names
            ]
        else:
            continue

        for (first, *parts), name in names:
            if first == "neobert":
                # In `from .package import name`, the name is a file package/name.py, or a name in
                # package.py or package/__init__.py.
                candidates = [
                    *([Path(*parts, f"{name}.py")] if name else []),
                    *([Path(*parts).with_suffix(".py")] if parts else []),
                ]
                yield next(
                    (path for path in candidates if path in FILES), Path(*parts, "__init__.py")
                )


IMPORTS = {
    file: set(imported_files(file, path.read_text(encoding="utf-8")))
    for file, path in FILES.items()
}


def names_of(source):
    """Return the names that a module defines, assigns or imports outside of functions and classes.

    Args:
        source: Text of the module.
    """
    todo = [ast.parse(source)]
    names = set()
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            else:
                todo.append(node)
    return names


# Packages that other packages require, so that setup.cfg need not name them.
PROVIDED = {
    "transformers": {"numpy", "packaging", "tokenizers", "tqdm", "yaml"},
    "huggingface-hub": {"fsspec"},
    "datasets": {"pandas", "pyarrow"},
    "sentence-transformers": {"scipy", "sklearn"},
    "scikit-learn": {"scipy", "sklearn"},
    "fastapi": {"pydantic", "pydantic_core", "starlette"},
}


def external_imports(source):
    """Return the external packages that a module imports outside of functions.

    Args:
        source: Text of the module.
    """
    todo = [ast.parse(source)]
    names = set()
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_typing:
                continue
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.partition(".")[0])
            else:
                todo.append(node)
    return names - sys.stdlib_module_names - {"neobert"}


NAMES = {file: names_of(path.read_text(encoding="utf-8")) for file, path in FILES.items()}


def import_cycle(imports, start):
    """Return the shortest import cycle that contains `start` as a list of files, or None.

    Args:
        imports: {file: files that it imports}.
        start: First file of the cycle.
    """
    chains = [[start]]
    seen = set()
    for chain in chains:
        for following in imports.get(chain[-1], ()):
            if following == start:
                return chain
            if following not in seen:
                seen.add(following)
                chains.append([*chain, following])
    return None


def test_import_helpers_and_layers():
    """Check the helper functions of this file, and that `LAYERS` lists the whole package."""
    assert {file.parts[0].removesuffix(".py") for file in FILES} == set(LAYERS)

    source = (
        "from .onnx import x\nfrom . import c\nfrom .. import name\ndef f():\n    import "
        "neobert.common.data\n    from ..common import files"
    )
    imports = set(map(str, imported_files(Path("export/a.py"), source)))
    assert imports == {
        "export/onnx.py",
        "export/__init__.py",
        "__init__.py",
        "common/data.py",
        "common/files.py",
    }

    assert (
        import_cycle({"a": {"b"}, "b": {"c"}, "c": {"b", "a"}}, "a") == ["a", "b", "c"]
        and import_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}, "a") is None
    )


def test_every_subpackage_is_installed():
    """setup.cfg lists every subpackage, so that an installed wheel is complete."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {file.parts[0] for file in FILES if len(file.parts) > 1} | {"recipes", "tokenizer"}
    packages = setup["options"]["packages"].split()
    assert sorted(packages) == sorted(["neobert", *(f"neobert.{folder}" for folder in folders)])


def requirements_of(extra):
    """Return the requirements of an extra of setup.cfg, {name: Requirement}."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    requirements = map(Requirement, setup["options.extras_require"][extra].split())
    return {requirement.name: requirement for requirement in requirements}


def requirements_of_package():
    """Return the names of the packages that an installation without extras contains."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split()
    return {canonicalize_name(Requirement(line).name) for line in lines}


@pytest.mark.parametrize("name", COMMANDS)
def test_extras_install_what_a_command_imports(name):
    """The imports of all files that a command uses are installed by its extra in setup.cfg."""
    command = COMMANDS[name]
    installed = requirements_of_package()
    for extra in command.requirements[:1]:
        installed |= set(map(canonicalize_name, requirements_of(extra)))
    allowed = {package.replace("-", "_") for package in installed}
    allowed = allowed.union(*(PROVIDED.get(package, ()) for package in installed))

    # The files that a function imports may be used, too. The plots of throughput are optional.
    files = [Path(*command.module.split(".")).with_suffix(".py")]
    optional = {Path("throughput/plots.py")}
    for file in files:
        files += IMPORTS[file] - optional - set(files)
    for file in files:
        missing = external_imports(FILES[file].read_text(encoding="utf-8")) - allowed
        assert not missing, f"{name} imports {file}, which imports {', '.join(missing)}."


@pytest.mark.parametrize("extra", ["serve", "test"])
def test_minimum_of_uvicorn_is_that_of_the_command(extra):
    """setup.cfg installs the version of uvicorn that `neobert serve` requires."""
    requirements = {r.name: r for r in map(Requirement, COMMANDS["serve"].requirements)}
    minimum = requirements["uvicorn"].specifier
    assert minimum and requirements_of(extra)["uvicorn"].specifier == minimum


def test_extras_of_commands_install_zstandard():
    """All commands that read data files can read those with the suffix .zst."""
    extras = {command.requirements[0] for command in COMMANDS.values() if command.requirements}
    for extra in extras - {"serve"}:
        assert "zstandard" in requirements_of(extra), f"The extra {extra} lacks zstandard."


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_are_downward_and_not_circular(file):
    layer = file.parts[0].removesuffix(".py")
    above = LAYERS[: LAYERS.index(layer)]
    upward = [str(other) for other in IMPORTS[file] if other.parts[0].removesuffix(".py") in above]
    assert not upward, f"{file} imports {', '.join(upward)}, which is above {layer} in LAYERS."
    assert Path("__init__.py") not in IMPORTS[file], (
        f"{file} imports the package `neobert` itself, which imports all other files."
    )
    assert import_cycle(IMPORTS, file) is None, (
        f"The imports are circular: {' -> '.join(map(str, import_cycle(IMPORTS, file)))}"
    )


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imported_names_exist(file):
    """Every name of a relative import exists in the module that it is imported from.

    Most files are imported by other tests, but a file without such a test can be broken when a
    name moves to another module.
    """
    for node in ast.walk(ast.parse(FILES[file].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            start = [*file.parts][: len(file.parts) - node.level]
            other = Path(*start, *node.module.split(".")).with_suffix(".py")
            missing = [
                alias.name
                for alias in node.names
                if other in NAMES and alias.name not in NAMES[other]
            ]
            assert not missing, (
                f"{file} imports {', '.join(missing)}, but {other} does not have it."
            )


def test_one_process_of_all_machines_writes_first():
    """`main_process_first` lets one process of each machine write, unless `local` is False.

    The machines of a run share its output directory.
    """
    calls = [
        f"{file}: {ast.unparse(node)}"
        for file, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".main_process_first")
    ]
    assert calls
    assert [call for call in calls if "local=False" not in call] == []


@pytest.mark.parametrize(
    ("end", "mark", "skipped"),
    [("0", "slow", True), ("9e9", "slow", False), ("0", None, False), (None, "slow", False)],
)
def test_slow_tests_are_skipped_when_ci_is_late(end, mark, skipped, monkeypatch):
    """After the time in `SLOW_TESTS_END`, slow tests are skipped, and other tests are not."""
    if end is None:
        monkeypatch.delenv("SLOW_TESTS_END", raising=False)
    else:
        monkeypatch.setenv("SLOW_TESTS_END", end)
    item = SimpleNamespace(get_closest_marker=lambda name: name if name == mark else None)

    with pytest.raises(pytest.skip.Exception) if skipped else nullcontext():
        conftest.pytest_runtest_setup(item)
