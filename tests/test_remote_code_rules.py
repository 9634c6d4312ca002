"""Pins what lets the code travel with the weights: two flat files that import torch, transformers and the standard library alone, under guards that
transformers' remote-code loader understands, and nothing that one of its versions refuses.
"""

import ast
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports

from neobert import modeling_neobert
from neobert.configuration_neobert import AUTO_MAP


ROOT = Path(modeling_neobert.__file__).resolve().parent
FILES = ("configuration_neobert.py", "modeling_neobert.py")


def tree(name):
    return ast.parse((ROOT / name).read_text())


def imported(name):
    """(module, level) of every import statement, wherever it stands."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module, node.level


@pytest.mark.parametrize("name", FILES)
def test_only_torch_and_transformers(name):
    known = {"torch", "transformers", *sys.stdlib_module_names}
    others = {module for module, level in imported(name) if level == 0 and module.split(".")[0] not in known}
    assert not others, f"{name} may import torch, transformers and the standard library only, but imports {others}."


@pytest.mark.parametrize("name", FILES)
def test_the_loader_asks_for_nothing_else(name):
    packages = set(get_imports(ROOT / name)) - sys.stdlib_module_names
    assert packages <= {"torch", "transformers"}, f"Loading {name} would ask the user to install {packages - {'torch', 'transformers'}}."


def test_two_flat_files():
    relative = {name: [module for module, level in imported(name) if level > 0] for name in FILES}
    assert relative == {FILES[0]: [], FILES[1]: ["configuration_neobert"]}, f"Relative imports: {relative}"
    levels = {level for name in FILES for _, level in imported(name)}
    assert levels == {0, 1}, "A second-level relative import is not copied by transformers 4.57."
    assert get_relative_imports(ROOT / FILES[0]) == []
    assert get_relative_imports(ROOT / FILES[1]) == ["configuration_neobert"]
    assert [Path(path).name for path in get_relative_import_files(ROOT / FILES[1])] == [FILES[0]]


@pytest.mark.parametrize("name", FILES)
def test_no_future_annotations(name):
    assert ("__future__", 0) not in list(imported(name)), "With it, transformers cannot read the config class of a remote model."


@pytest.mark.parametrize("name", FILES)
def test_optional_imports_are_guarded(name):
    """A name that some supported torch or transformers lacks stands in a `try:` block or inside the function that needs it."""
    nodes = [node for node in tree(name).body if isinstance(node, ast.ImportFrom)]
    late = {"torch.nn.attention.varlen", "torch.nn.attention.flex_attention"}
    unguarded = {node.module for node in nodes} & late
    assert not unguarded, f"{unguarded} must be imported in a try block."


def test_auto_map_names_what_exists():
    for auto_class, target in AUTO_MAP.items():
        module, _, class_name = target.partition(".")
        classes = {node.name for node in tree(f"{module}.py").body if isinstance(node, ast.ClassDef)}
        assert class_name in classes, f"auto_map[{auto_class!r}] names {target}, which {module}.py does not define."


def test_no_module_reads_files_or_the_network():
    calls = {
        node.func.id for name in FILES for node in ast.walk(tree(name)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "exec", "eval", "__import__", "compile"}, f"Remote code must not call {calls}."


def test_no_class_that_set_attn_implementation_misreads():
    """transformers reads the file's text: a class named ...Attention(nn.Module) must hold a literal that differs per version."""
    classes = [node.name for node in tree(FILES[1]).body if isinstance(node, ast.ClassDef)]
    assert not [name for name in classes if name.endswith("Attention")]


def test_no_buffers_and_no_tensor_attributes():
    """transformers 5 leaves non-persistent buffers uninitialised and tensor attributes on the meta device."""
    calls = {node.attr for node in ast.walk(tree(FILES[1])) if isinstance(node, ast.Attribute)}
    assert "register_buffer" not in calls


@pytest.mark.parametrize("method", ("_init_weights",))
def test_initialisation_uses_torch_nn_init(method):
    """In-place writes (`weight.data.uniform_()`) overwrite loaded weights on transformers 5; torch.nn.init is skipped for them."""
    functions = [node for node in ast.walk(tree(FILES[1])) if isinstance(node, ast.FunctionDef) and node.name == method]
    assert len(functions) == 3
    for function in functions:
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            if call.func.attr.endswith("_") and not call.func.attr.startswith("_"):
                owner = ast.unparse(call.func.value)
                assert owner in ("nn.init", "torch.nn.init"), f"{ast.unparse(call.func)} writes in place."
