"""Functions for scripts like those in examples/: checks of input and output, rows and errors.

    from neobert.scripts import check_model, check_new, load_rows, run_script

`run_script(main)` runs a script so that a `UserError` becomes one sentence and exit code 2.
"""

from .common.errors import UserError
from .common.folders import check_new
from .common.loading import check_model, copy_code
from .common.scripts import load_rows, run_script, training_parser
from .training.options import warmup_options


__all__ = [
    "UserError",
    "check_model",
    "check_new",
    "copy_code",
    "load_rows",
    "run_script",
    "training_parser",
    "warmup_options",
]
