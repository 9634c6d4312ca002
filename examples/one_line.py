"""Former helper of the examples; use `neobert.common.scripts.run_script`."""

from neobert.common.scripts import run_script as run  # noqa: F401
