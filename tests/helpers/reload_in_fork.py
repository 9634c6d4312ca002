"""Run `neobert/conversion/fresh_model.py` in a fork of a process that has imported the libraries.

A fork takes 0.1 seconds, and a new process 8 seconds. As in a new process, the `neobert` package
is not imported in the fork.
"""

import multiprocessing
import runpy
from pathlib import Path


# Modules that are imported when a model is loaded.
LIBRARIES = [
    "torch",
    "safetensors.torch",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "torch._dynamo",
]
SCRIPT = Path(__file__).resolve().parents[2] / "neobert" / "conversion" / "fresh_model.py"


def _main(folder, auto_class, inputs, outputs, scratch):
    """Run the script in the fork, and write the reason for a failure to `scratch/reason`."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.HF_MODULES_CACHE = str(scratch / "modules")
    try:
        runpy.run_path(str(SCRIPT))["main"](folder, auto_class, inputs, outputs)
    except BaseException as error:
        (scratch / "reason").write_text(str(error))
        raise SystemExit(1) from None


def reload(folder, auto_class, inputs, outputs, scratch):
    """Replace `verify._reload` in tests.

    Returns:
        The reason for a failure, or None.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    process = context.Process(
        target=_main, args=(str(folder), auto_class, str(inputs), str(outputs), scratch)
    )
    process.start()
    process.join()
    return (scratch / "reason").read_text() if process.exitcode else None
