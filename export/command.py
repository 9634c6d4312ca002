"""`neobert export TARGET FOLDER OUTPUT`: a Hub folder, or a raw checkpoint, in the form of another engine.

What is written is compared with torch before it is kept, and is complete or absent.
"""

import importlib
import sys

from ..common.arguments import read_arguments
from ..common.errors import UserError, require
from .check import Reference
from .source import open_source


# target: (module, (extra of setup.cfg, modules that it brings), what it makes).
# A module has `Options`, a dataclass derived from `source.ExportArguments`; `check_output(arguments)`, which refuses an output before any work;
# and `export(source, reference, arguments)`, which writes it. Both raise UserError.
TARGETS = {
    "gguf": ("gguf", ("gguf", "gguf"), "one file for llama.cpp and what is built on it"),
    "onnx": (
        "onnx",
        ("onnx", "onnx", "onnxruntime", "onnxscript"),
        "a folder for ONNX Runtime, transformers.js, text-embeddings-inference",
    ),
    "openvino": ("openvino", ("openvino", "openvino"), "a folder for OpenVINO"),
}


def usage():
    """The text of `neobert export --help`."""
    lines = [f"  {name:<9} {what}" for name, (_, _, what) in TARGETS.items()]
    return "\n".join(["usage: neobert export TARGET FOLDER OUTPUT [--option value ...]; neobert export TARGET --help", "", *lines])


def main(argv=None):
    """Runs the command; returns 0, or raises UserError or ImportError with one sentence."""
    target, *rest = (sys.argv[1:] if argv is None else argv) or [None]
    if target in ("-h", "--help"):
        print(usage())
        return 0
    if target not in TARGETS:
        given = "nothing was given" if target is None else f"{target!r} was given"
        raise UserError(f"the target must be one of {', '.join(TARGETS)}, but {given}")
    name, needs, _ = TARGETS[target]
    module = importlib.import_module(f".{name}", __package__)
    (arguments,) = read_arguments([module.Options], rest, prog=f"neobert export {target}", description=module.__doc__)
    require(*needs)
    module.check_output(arguments)
    with open_source(arguments) as source:
        print(source.describe(), flush=True)
        module.export(source, Reference(source), arguments)
    return 0
