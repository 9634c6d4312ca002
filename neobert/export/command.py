"""Command `neobert export TARGET FOLDER OUTPUT`: convert a model to the format of another engine.

The output is compared with torch before it appears, complete or not at all.
"""

import importlib
import sys
from collections.abc import Sequence

from ..common.errors import require
from ..common.options import log_options
from .options import OPTIONS
from .source import open_source


# {target: (module, (extra of setup.cfg, modules that it installs))}
# A module has `check_output(options)`, which refuses an output before any work, and
# `export(source, options)`, which writes it. Both raise UserError.
TARGETS = {
    "gguf": ("gguf", ("gguf", "gguf")),
    "onnx": ("onnx", ("onnx", "onnx", "onnxruntime", "onnxscript")),
    "openvino": ("openvino", ("openvino", "openvino")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert export` and return the exit code.

    Raises:
        UserError: If an option is invalid or the model cannot be exported.
        ImportError: If a package of the target is not installed.
    """
    target, options = OPTIONS["export"].read(sys.argv[1:] if argv is None else argv)
    name, needs = TARGETS[target]
    require(*needs)
    module = importlib.import_module(f".{name}", __package__)
    log_options(options)
    module.check_output(options)
    with open_source(options.model, options.card) as source:
        print(source.describe(), flush=True)
        module.export(source, options)
    return 0
