"""Command `neobert export TARGET FOLDER OUTPUT`: convert a model to the format of another engine.

The output is compared with torch first, and appears complete or not at all.
"""

import importlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..common.errors import require
from ..common.options import log_options
from .options import OPTIONS
from .source import open_source


logger = logging.getLogger("neobert.export")


@dataclass(frozen=True)
class Target:
    """Target of an export.

    Attributes:
        module: Module of this subpackage. It has `check_output(options)`, which checks OUTPUT
            before the model is loaded, and `export(source, options)`, which writes OUTPUT. Both
            raise UserError.
        extra: Extra of setup.cfg that installs the dependencies.
        packages: Modules that must be installed.
    """

    module: str
    extra: str
    packages: tuple[str, ...]


TARGETS = {
    "gguf": Target("gguf", "gguf", ("gguf",)),
    "onnx": Target("onnx", "onnx", ("onnx", "onnxruntime", "onnxscript")),
    "openvino": Target("openvino", "openvino", ("openvino",)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert export` and return the exit code.

    Raises:
        UserError: If an option is invalid or the model cannot be exported.
        ImportError: If a package of the target is not installed.
    """
    name, options = OPTIONS["export"].read(sys.argv[1:] if argv is None else argv)
    # The module of the target imports its packages, so it is imported after their check.
    target = TARGETS[name]
    require(target.extra, *target.packages)
    module = importlib.import_module(f".{target.module}", __package__)

    log_options(options)
    module.check_output(options)
    with open_source(options.model, options.card) as source:
        logger.info("%s", source.describe())
        module.export(source, options)
    return 0
