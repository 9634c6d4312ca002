"""Fixtures for all tests.

All tests run without network access, on one thread and with a fixed seed. The fixtures provide the
configuration of a tiny model, the golden outputs, the tokenizer and a converted checkpoint.
"""

import logging
import os
import signal
import time
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from helpers.reference import FIELDS

from neobert import modeling_neobert


ROOT = Path(__file__).resolve().parent.parent

# A shell starts background jobs with SIGINT ignored, but the tests of interruptions send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip the slow tests that would start after `SLOW_TESTS_END`, in seconds since 1970.

    `.ci/run` sets this variable, so that the CI ends in time on slow machines.
    """
    end = os.environ.get("SLOW_TESTS_END")
    if end and item.get_closest_marker("slow") and time.time() > float(end):
        pytest.skip("The time for slow tests is over.")


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _log_level():
    """Reset the log level, which the tests of distributed runs change."""
    logging.getLogger("neobert").setLevel(logging.INFO)


@pytest.fixture
def tiny_config():
    """Return the arguments of a `NeoBERTConfig` with 3 layers and a hidden size of 64."""
    return dict(FIELDS)


@pytest.fixture
def warnings(caplog):
    """Return a function that lists the logged warnings of the model that contain a text."""
    # The model logs each warning once per process. Clear the cache, so that earlier tests do not
    # hide warnings.
    modeling_neobert.logger.warning_once.cache_clear()
    with caplog.at_level("WARNING", logger=modeling_neobert.logger.name):
        yield lambda text: [message for message in caplog.messages if text in message]


@pytest.fixture(scope="session")
def golden():
    return ROOT / "tests" / "golden"


@pytest.fixture(scope="session")
def tokenizer_dir():
    return ROOT / "tokenizer"


@pytest.fixture(scope="session")
def bundled(tmp_path_factory):
    """Convert the bundled checkpoint of examples/ and return its folder.

    The folder also contains a pooling layer for sentence-transformers.
    """
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
    ), "The conversion of the bundled checkpoint failed."
    return folder
