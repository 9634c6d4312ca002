"""Tests of what the commands check about Trainer's options before they begin."""

import huggingface_hub
import pytest

from neobert.common.errors import UserError
from neobert.training.options import training_arguments


def test_a_tracker_that_is_not_installed_is_refused(tmp_path):
    output = tmp_path / "out"
    with pytest.raises(UserError, match="names swanlab, which is not installed. Run `pip install"):
        training_arguments(output, {"report_to": ["none", "swanlab"]}, {})
    assert training_arguments(output, {"report_to": "none"}, {}).report_to == []
    assert not output.exists()


def test_a_hub_that_cannot_be_reached_is_refused(tmp_path, monkeypatch):
    def whoami(self):
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", whoami)
    message = "`push_to_hub` needs a connection .*: .*not known. Run `hf auth login`, or omit"
    with pytest.raises(UserError, match=message):
        training_arguments(tmp_path / "out", {"push_to_hub": True}, {})
    assert not (tmp_path / "out").exists()

    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", lambda self: {"name": "me"})
    assert training_arguments(tmp_path / "out", {"push_to_hub": True}, {}).push_to_hub
