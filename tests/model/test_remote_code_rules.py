"""Test the rules for files that are loaded as remote code.

The three files of the model are in one directory and import only torch, transformers, the standard
library and each other, in a form that the loader of every supported version of transformers
accepts.
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
    """Return the syntax tree of a model file."""
    return ast.parse((ROOT / name).read_text())


def imported(name):
    """Yield (module, level) for every import statement, also inside functions."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module, node.level


def called(node):
    """Return the names of all functions that are called inside a node."""
    calls = (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))
    return {ast.unparse(call.func) for call in calls}


@pytest.mark.parametrize("name", FILES)
def test_only_allowed_modules_are_imported(name):
    """The files import torch, transformers and harmless modules of the standard library only.

    Harmless modules have no access to the network or to processes, as SECURITY.md states. The
    imports that transformers reads from the source are checked as well, because transformers asks
    users to install the packages that it finds there.
    """
    harmless = "collections dataclasses functools inspect itertools math pathlib typing".split()
    allowed = {"torch", "transformers", *harmless}
    assert {module.split(".")[0] for module, level in imported(name) if level == 0} <= allowed
    assert set(get_imports(ROOT / name)) <= allowed


def test_relative_imports_of_the_model_files():
    """The modeling file imports the other two, and the configuration file the attention file.

    transformers 4.57 copies only the files that the modeling file names itself.
    """
    relative = {name: {module for module, level in imported(name) if level > 0} for name in FILES}
    both = {"configuration_neobert", "attention_neobert"}
    expected = {CONFIGURATION: {"attention_neobert"}, ATTENTION: set(), MODELING: both}
    assert relative == expected
    assert {level for name in FILES for _, level in imported(name)} == {0, 1}
    for name in FILES:
        assert set(get_relative_imports(ROOT / name)) == relative[name]
    copied = {Path(path).name for path in get_relative_import_files(ROOT / MODELING)}
    assert copied == {CONFIGURATION, ATTENTION}


def test_version_is_the_digest_of_the_attention_file():
    """`VERSION` in both files is the digest of the attention file without that line.

    A process of transformers 4 that loads two directories of the same name uses the attention file
    of the first one for both. The modeling file compares `VERSION` to detect this.
    """
    text = (ROOT / ATTENTION).read_text()
    (line,) = [line for line in text.splitlines(keepends=True) if line.startswith("VERSION = ")]
    digest = hashlib.sha256(text.replace(line, "").encode()).hexdigest()[:8]
    assert attention_neobert.VERSION == modeling_neobert.VERSION == digest


def test_mismatched_attention_file_is_rejected(tmp_path):
    """The modeling file raises ImportError next to another version of the attention file.

    transformers 4 combines such files if a process loads two directories of the same name.
    """
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
    """The files do not import `annotations` from `__future__`.

    With string annotations, transformers cannot read the configuration class of a remote model.
    """
    assert ("__future__", 0) not in list(imported(name))


@pytest.mark.parametrize("name", FILES)
def test_optional_imports_are_guarded(name):
    """Modules that some supported version of torch lacks are not imported unconditionally.

    They are imported in a `try` block or in the function that needs them.
    """
    nodes = [node for node in tree(name).body if isinstance(node, ast.ImportFrom)]
    optional = {"torch.nn.attention.varlen", "torch.nn.attention.flex_attention"}
    assert not {node.module for node in nodes} & optional


def classes(name):
    """Return the names of the classes of a model file."""
    return {node.name for node in tree(name).body if isinstance(node, ast.ClassDef)}


def test_auto_map_classes_exist():
    """Each entry of the auto_map names a class that its file defines."""
    for target in AUTO_MAP.values():
        module, _, class_name = target.partition(".")
        assert class_name in classes(f"{module}.py")


@pytest.mark.parametrize("name", FILES)
def test_no_forbidden_calls_or_class_names(name):
    """The files avoid operations that a loader, or a reader of the code, would object to.

    These are access to files or the network, execution of code, buffers (transformers 5 leaves them
    uninitialized), and class names that end in "Attention" (transformers searches the source of
    such classes for a literal that depends on its version).
    """
    calls = called(tree(name))
    harmful = "open eval exec __import__ load unlink read_text write_text system import_module"
    harmful = {*harmful.split(), "register_buffer"}
    assert "compile" not in calls and not {call.rpartition(".")[2] for call in calls} & harmful
    assert not [class_name for class_name in classes(name) if class_name.endswith("Attention")]


def test_initialization_uses_torch_nn_init():
    """`_init_weights` writes to weights only with functions of torch.nn.init.

    transformers 5 skips these functions on loaded weights. Other in-place functions
    (`weight.data.uniform_()`) would overwrite them.
    """
    nodes = [node for node in ast.walk(tree(MODELING)) if isinstance(node, ast.FunctionDef)]
    functions = [node for node in nodes if node.name == "_init_weights"]
    assert len(functions) == 3
    in_place = set().union(*map(called, functions))
    in_place = {name for name in in_place if re.search(r"\.[a-z]\w*_$", name)}
    assert in_place and all(name.startswith("nn.init.") for name in in_place)
