"""`neobert export TARGET FOLDER OUTPUT`: a Hub folder, or a raw checkpoint, in the form of another
engine.

What is written is compared with torch before it is kept, and is complete or absent.
"""

import importlib
import sys

from ..common.errors import require
from .options import OPTIONS
from .source import open_source


# target: (module, (extra of setup.cfg, modules that it brings)).
# A module has `check_output(arguments)`, which refuses an output before any work, and
# `export(source, arguments)`, which writes it. Both raise UserError.
TARGETS = {
    "gguf": ("gguf", ("gguf", "gguf")),
    "onnx": ("onnx", ("onnx", "onnx", "onnxruntime", "onnxscript")),
    "openvino": ("openvino", ("openvino", "openvino")),
}


def main(argv=None):
    """Runs the command; returns 0, or raises UserError or ImportError with one sentence."""
    target, arguments = OPTIONS["export"].read(sys.argv[1:] if argv is None else argv)
    name, needs = TARGETS[target]
    require(*needs)
    module = importlib.import_module(f".{name}", __package__)
    module.check_output(arguments)
    with open_source(arguments) as source:
        print(source.describe(), flush=True)
        module.export(source, arguments)
    return 0
