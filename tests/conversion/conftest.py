"""Fixtures for the tests of the checkpoint conversion."""

import pytest
import torch
from helpers import reload_in_fork
from helpers.conversion_helpers import save

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.common.errors import UserError
from neobert.conversion import verify


@pytest.fixture(scope="session")
def reload_in_a_process():
    """Return the original `verify._reload`, which starts a new Python process."""
    return verify._reload


@pytest.fixture(autouse=True)
def _reload_in_a_fork(monkeypatch, reload_in_a_process):
    """Verify conversions in a forked process, because a new process takes seconds to start."""

    def reload(*arguments):
        if reason := reload_in_fork.reload(*arguments):
            raise UserError(f"the converted folder does not load, so it was discarded: {reason}")

    monkeypatch.setattr(verify, "_reload", reload)


@pytest.fixture
def without_proof(monkeypatch):
    """Skip the verification of the converted folder, which takes seconds.

    test_command.py and test_verify.py run the verification.
    """
    monkeypatch.setattr(verify, "verify", lambda folder, conversion, expected, scratch: expected)


@pytest.fixture
def model(tiny_config):
    """Return a tiny masked language model with random weights."""
    return NeoBERTForMaskedLM(NeoBERTConfig(**tiny_config)).eval()


@pytest.fixture
def checkpoint(tmp_path, model, tiny_config):
    """Write the model as a raw training checkpoint, and return its directory."""
    return save(tmp_path / "run", model.state_dict(), **tiny_config)


@pytest.fixture
def run(tmp_path):
    """Return the directory of a run with the checkpoints 2, 9 and 10 and a Hydra configuration.

    The checkpoints are in `run/model_checkpoints` and the configuration in `run/.hydra`. The weight
    of each checkpoint is the number of its step.
    """
    for step in (2, 10, 9):
        folder = tmp_path / "run" / "model_checkpoints" / str(step)
        folder.mkdir(parents=True)
        torch.save({"encoder.weight": torch.full((1,), float(step))}, folder / "state_dict.pt")

    (tmp_path / "run" / ".hydra").mkdir()
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text(
        "seed: 1\nmodel:\n  hidden_size: 64\n  norm_eps: 1e-6\n  rope: true\n  vocab_size: "
        "${tokenizer.vocab_size}\n"
        "tokenizer:\n  pretrained_model_name_or_path: google-bert/bert-base-uncased\n  max_length: "
        "128\n  vocab_size: 200\n"
    )
    return tmp_path / "run"
