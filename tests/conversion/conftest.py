"""Fixtures of the tests of conversion/."""

import pytest
from conversion_helpers import save

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.conversion import command


@pytest.fixture
def without_proof(monkeypatch):
    """Leaves out the reload in a fresh process, which takes seconds; test_command.py and test_verify.py have it."""
    monkeypatch.setattr(command, "verify", lambda folder, conversion, expected, scratch: expected)


@pytest.fixture
def model(tiny_config):
    return NeoBERTForMaskedLM(NeoBERTConfig(**tiny_config)).eval()


@pytest.fixture
def checkpoint(tmp_path, model, tiny_config):
    return save(tmp_path / "run", model.state_dict(), **tiny_config)
