"""Turns a raw training checkpoint into a folder for the Hugging Face Hub: `neobert convert CHECKPOINT OUTPUT`, or from a bare checkout
`python convert_checkpoint.py CHECKPOINT OUTPUT`. The work is in conversion/, the options in conversion/command.py.
"""

import importlib.util
import sys
from pathlib import Path


def main(argv=None, prog="neobert convert"):
    """Runs the command; returns 0, or raises UserError."""
    from .conversion import command

    return command.main(argv, prog)


def _run_script():
    """Runs this file by its path: its folder is the package `neobert`. The guard comes first, for the imports take seconds."""
    here = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location("neobert", here / "__init__.py", submodule_search_locations=[str(here)])
    package = sys.modules["neobert"] = importlib.util.module_from_spec(spec)
    from neobert.common.commands import guarded

    def run():
        spec.loader.exec_module(package)
        from neobert.convert_checkpoint import main

        return main(prog="convert_checkpoint.py")

    return guarded("convert_checkpoint.py", run)


if __name__ == "__main__":
    sys.exit(_run_script())
