"""Fixtures for all tests.

No network, one thread, a tiny model, the golden data and the tokenizer.
"""

import os
import signal
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from helpers.reference import FIELDS

from neobert import modeling_neobert


ROOT = Path(__file__).resolve().parent.parent

# A shell starts what it runs in the background with Ctrl-C ignored; tests of interruptions need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def tiny_config():
    """Keyword arguments of a NeoBERTConfig with 3 layers of 64."""
    return dict(FIELDS)


@pytest.fixture
def warnings(caplog):
    """Function of words: the messages with them that the model has logged. Each is given once a
    process, so the memory of that is cleared."""
    modeling_neobert.logger.warning_once.cache_clear()
    with caplog.at_level("WARNING", logger=modeling_neobert.logger.name):
        yield lambda words: [message for message in caplog.messages if words in message]


@pytest.fixture(scope="session")
def golden():
    return ROOT / "tests" / "golden"


@pytest.fixture(scope="session")
def tokenizer_dir():
    return ROOT / "tokenizer"


@pytest.fixture(scope="session")
def bundled(tmp_path_factory):
    """Folder of the bundled checkpoint of examples/, converted, with a pooling layer for
    sentence-transformers."""
    from neobert.conversion.command import main

    folder = tmp_path_factory.mktemp("bundled") / "model"
    assert not main(
        [
            str(ROOT / "examples" / "checkpoint"),
            str(folder),
            "--sentence-transformers",
            "--dtype",
            "float32",
        ]
    ), "the converter failed"
    return folder
