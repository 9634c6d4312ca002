"""Pins what lets the code travel with the weights: three flat files that import torch, transformers
and the standard library alone, under guards that transformers' remote-code loader understands, and
nothing that one of its versions refuses.
"""

import ast
import hashlib
import importlib.util
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


ROOT = Path(modeling_neobert.__file__).resolve().parent
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


@pytest.mark.parametrize("name", FILES)
def test_only_torch_and_transformers(name):
    known = {"torch", "transformers", *sys.stdlib_module_names}
    others = {
        module
        for module, level in imported(name)
        if level == 0 and module.split(".")[0] not in known
    }
    assert not others, (
        f"{name} may import torch, transformers and the standard library only, but imports "
        f"{others}."
    )


@pytest.mark.parametrize("name", FILES)
def test_the_loader_asks_for_nothing_else(name):
    packages = set(get_imports(ROOT / name)) - sys.stdlib_module_names
    assert packages <= {"torch", "transformers"}, (
        f"Loading {name} would ask the user to install {packages - {'torch', 'transformers'}}."
    )


def test_three_flat_files():
    """The modeling file itself imports the other two: transformers 4.57 copies only what it names.
    The configuration names the attention file."""
    relative = {name: {module for module, level in imported(name) if level > 0} for name in FILES}
    named = {
        CONFIGURATION: {"attention_neobert"},
        ATTENTION: set(),
        MODELING: {"configuration_neobert", "attention_neobert"},
    }
    assert relative == named, f"Relative imports: {relative}"
    assert {level for name in FILES for _, level in imported(name)} == {0, 1}
    for name in FILES:
        assert set(get_relative_imports(ROOT / name)) == relative[name]
    assert {Path(path).name for path in get_relative_import_files(ROOT / MODELING)} == {
        CONFIGURATION,
        ATTENTION,
    }


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
    other = (
        (tmp_path / ATTENTION)
        .read_text()
        .replace(f'VERSION = "{attention_neobert.VERSION}"', 'VERSION = "of another"')
    )
    (tmp_path / ATTENTION).write_text(other)
    spec = importlib.util.spec_from_file_location(
        "stale", tmp_path / "__init__.py", submodule_search_locations=[str(tmp_path)]
    )
    sys.modules["stale"] = importlib.util.module_from_spec(spec)
    try:
        with pytest.raises(
            ImportError,
            match=(
                "another version of attention_neobert.py from a folder of the same name; "
                "start Python anew"
            ),
        ):
            importlib.import_module("stale.modeling_neobert")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "stale"]:
            del sys.modules[name]


@pytest.mark.parametrize("name", FILES)
def test_no_future_annotations(name):
    assert ("__future__", 0) not in list(imported(name)), (
        "With it, transformers cannot read the config class of a remote model."
    )


@pytest.mark.parametrize("name", FILES)
def test_optional_imports_are_guarded(name):
    """A name that some supported torch or transformers lacks stands in a `try:` block or inside the
    function that needs it."""
    nodes = [node for node in tree(name).body if isinstance(node, ast.ImportFrom)]
    late = {"torch.nn.attention.varlen", "torch.nn.attention.flex_attention"}
    unguarded = {node.module for node in nodes} & late
    assert not unguarded, f"{unguarded} must be imported in a try block."


def test_auto_map_names_what_exists():
    for auto_class, target in AUTO_MAP.items():
        module, _, class_name = target.partition(".")
        classes = {
            node.name for node in tree(f"{module}.py").body if isinstance(node, ast.ClassDef)
        }
        assert class_name in classes, (
            f"auto_map[{auto_class!r}] names {target}, which {module}.py does not define."
        )


def test_no_module_reads_files_or_the_network():
    calls = {
        node.func.id
        for name in FILES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "exec", "eval", "__import__", "compile"}


def test_no_class_that_set_attn_implementation_misreads():
    """transformers reads the file's text: a class named ...Attention(nn.Module) must hold a literal
    that differs per version."""
    classes = [
        node.name for name in FILES for node in tree(name).body if isinstance(node, ast.ClassDef)
    ]
    assert not [name for name in classes if name.endswith("Attention")]


def test_no_buffers_and_no_tensor_attributes():
    """transformers 5 leaves non-persistent buffers uninitialised and tensor attributes on the meta
    device."""
    calls = {
        node.attr
        for name in FILES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute)
    }
    assert "register_buffer" not in calls


@pytest.mark.parametrize("method", ("_init_weights",))
def test_initialisation_uses_torch_nn_init(method):
    """In-place writes (`weight.data.uniform_()`) overwrite loaded weights on transformers 5;
    torch.nn.init is skipped for them."""
    functions = [
        node
        for node in ast.walk(tree(MODELING))
        if isinstance(node, ast.FunctionDef) and node.name == method
    ]
    assert len(functions) == 3
    for function in functions:
        for call in (
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ):
            if call.func.attr.endswith("_") and not call.func.attr.startswith("_"):
                owner = ast.unparse(call.func.value)
                assert owner in ("nn.init", "torch.nn.init"), (
                    f"{ast.unparse(call.func)} writes in place."
                )
