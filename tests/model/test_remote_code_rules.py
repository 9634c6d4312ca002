"""Test the rules of remote code.

There are three flat files that import only torch, transformers and the standard library, in a form
that every version of the remote-code loader accepts.
"""

import ast
import hashlib
import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import (
    get_imports,
    get_relative_import_files,
    get_relative_imports,
)

from neobert import attention_neobert, modeling_neobert
from neobert.common.loading import CODE_FILES
from neobert.configuration_neobert import AUTO_MAP


ROOT = Path(modeling_neobert.__file__).resolve().parents[1]
FILES = CODE_FILES
CONFIGURATION, ATTENTION, MODELING = FILES


def tree(name):
    return ast.parse((ROOT / name).read_text())


def imported(name):
    """(module, level) of every import statement, wherever it stands."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module, node.level


def called(node):
    """Names of all functions that are called below a node."""
    calls = (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))
    return {ast.unparse(call.func) for call in calls}


@pytest.mark.parametrize("name", FILES)
def test_only_torch_and_transformers(name):
    """And of the standard library what reaches no network and no process, as SECURITY.md says; also
    by transformers' own reading, which asks users to install what it finds."""
    harmless = "collections dataclasses functools inspect itertools math pathlib typing".split()
    known = {"torch", "transformers", *harmless}
    assert {module.split(".")[0] for module, level in imported(name) if level == 0} <= known
    assert set(get_imports(ROOT / name)) <= known


def test_three_flat_files():
    """The modeling file itself imports the other two: transformers 4.57 copies only what it names.
    The configuration names the attention file."""
    relative = {name: {module for module, level in imported(name) if level > 0} for name in FILES}
    both = {"configuration_neobert", "attention_neobert"}
    named = {CONFIGURATION: {"attention_neobert"}, ATTENTION: set(), MODELING: both}
    assert relative == named
    assert {level for name in FILES for _, level in imported(name)} == {0, 1}
    for name in FILES:
        assert set(get_relative_imports(ROOT / name)) == relative[name]
    copied = {Path(path).name for path in get_relative_import_files(ROOT / MODELING)}
    assert copied == {CONFIGURATION, ATTENTION}


def test_the_version_of_the_attention_file():
    """Its digest, which the modeling file compares: one process of transformers 4 keeps the first
    attention file of two folders."""
    text = (ROOT / ATTENTION).read_text()
    (line,) = [line for line in text.splitlines(keepends=True) if line.startswith("VERSION = ")]
    digest = hashlib.sha256(text.replace(line, "").encode()).hexdigest()[:8]
    assert attention_neobert.VERSION == modeling_neobert.VERSION == digest


def test_attention_files_of_two_folders(tmp_path):
    """What transformers 4 does with a second folder of one name: today's modeling file beside
    another attention file."""
    for name in FILES:
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "__init__.py").touch()
    version = f'VERSION = "{attention_neobert.VERSION}"'
    other = (ROOT / ATTENTION).read_text().replace(version, 'VERSION = "of another"')
    (tmp_path / ATTENTION).write_text(other)
    spec = importlib.util.spec_from_file_location(
        "stale", tmp_path / "__init__.py", submodule_search_locations=[str(tmp_path)]
    )
    sys.modules["stale"] = importlib.util.module_from_spec(spec)
    try:
        with pytest.raises(ImportError, match="another version of attention_neobert.py"):
            importlib.import_module("stale.modeling_neobert")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "stale"]:
            del sys.modules[name]


@pytest.mark.parametrize("name", FILES)
def test_no_future_annotations(name):
    """With them, transformers cannot read the config class of a remote model."""
    assert ("__future__", 0) not in list(imported(name))


@pytest.mark.parametrize("name", FILES)
def test_optional_imports_are_guarded(name):
    """A name that some supported torch or transformers lacks stands in a `try:` block or inside the
    function that needs it."""
    nodes = [node for node in tree(name).body if isinstance(node, ast.ImportFrom)]
    late = {"torch.nn.attention.varlen", "torch.nn.attention.flex_attention"}
    assert not {node.module for node in nodes} & late


def classes(name):
    return {node.name for node in tree(name).body if isinstance(node, ast.ClassDef)}


def test_auto_map_names_what_exists():
    for target in AUTO_MAP.values():
        module, _, class_name = target.partition(".")
        assert class_name in classes(f"{module}.py")


@pytest.mark.parametrize("name", FILES)
def test_no_module_does_what_a_loader_minds(name):
    """No files, network or code; no buffers, which transformers 5 leaves uninitialised; no class
    named ...Attention, in whose text transformers looks for a literal that differs per version."""
    calls = called(tree(name))
    harmful = "open eval exec __import__ load unlink read_text write_text system import_module"
    harmful = {*harmful.split(), "register_buffer"}
    assert "compile" not in calls and not {call.rpartition(".")[2] for call in calls} & harmful
    assert not [class_name for class_name in classes(name) if class_name.endswith("Attention")]


def test_initialization_uses_torch_nn_init():
    """In-place writes (`weight.data.uniform_()`) overwrite loaded weights on transformers 5;
    torch.nn.init is skipped for them."""
    nodes = [node for node in ast.walk(tree(MODELING)) if isinstance(node, ast.FunctionDef)]
    functions = [node for node in nodes if node.name == "_init_weights"]
    assert len(functions) == 3
    in_place = set().union(*map(called, functions))
    in_place = {name for name in in_place if re.search(r"\.[a-z]\w*_$", name)}
    assert in_place and all(name.startswith("nn.init.") for name in in_place)
