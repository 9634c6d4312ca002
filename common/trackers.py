"""Experiment trackers that a recipe names: checked before any work, for every command that
trains."""

from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from .errors import UserError


def check_trackers(report_to):
    """Raises UserError for a tracker that Trainer does not know or that is not installed.

    Args:
        report_to: names, as a list or joined by commas; None for none.
    """
    names = report_to.split(",") if isinstance(report_to, str) else report_to or ()
    for name in names:
        if name in ("none", "all", *get_available_reporting_integrations()):
            continue
        installed = ", ".join(("none", *get_available_reporting_integrations()))
        if name in INTEGRATION_TO_CALLBACK:
            raise UserError(
                f"report_to {name!r} is not installed; installed are {installed}: pip install its "
                "package, or give one of these"
            )
        raise UserError(f"report_to {name!r} is unknown; installed are {installed}")
