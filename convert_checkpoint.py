"""Turns a raw training checkpoint into a folder for the Hugging Face Hub: `neobert convert
CHECKPOINT OUTPUT`, or from a bare checkout `python convert_checkpoint.py CHECKPOINT OUTPUT`. The
work is in conversion/, the options are in neobert/conversion/options.py.
"""

import importlib
import importlib.util
import sys
from pathlib import Path


def main(argv=None):
    """Runs the command; returns 0, or raises UserError."""
    from neobert.conversion import command

    return command.main(argv)


def _run_script():
    """Runs this file by its path: its folder is the package `neobert`."""
    here = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        "neobert", here / "__init__.py", submodule_search_locations=[str(here)]
    )
    package = sys.modules["neobert"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    from neobert.common.commands import guarded

    return guarded(
        "convert_checkpoint.py",
        lambda: importlib.import_module("neobert.convert_checkpoint").main(),
    )


if __name__ == "__main__":
    sys.exit(_run_script())
