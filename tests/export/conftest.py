"""Fixtures for the export tests: directories of tiny models, and padded batches."""

import ctypes
import os
import sys

import pytest
import torch
from helpers.export_models import build, write_tokenizer

from neobert import NeoBERTModel
from neobert.common.sentence_transformers_files import save_for_all_versions


# Without this variable, the converter of OpenVINO sends usage data to Intel.
os.environ["CI"] = "true"


class SignalStack(ctypes.Structure):
    """The C structure `stack_t` of Linux."""

    _fields_ = [("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


@pytest.fixture(scope="module", autouse=True)
def keep_signal_stack():
    """Restore the alternative signal stack of the main thread after the tests of a file.

    OpenVINO 2026.4 installs a stack and frees it without restoring the previous one. Python handles
    signals on this stack, so a later test that sends a signal to its own process would crash with a
    segmentation fault.
    """
    if sys.platform != "linux":
        yield
        return

    sigaltstack = ctypes.CDLL(None).sigaltstack
    original = SignalStack()
    assert sigaltstack(None, ctypes.byref(original)) == 0
    yield
    assert sigaltstack(ctypes.byref(original), None) == 0


@pytest.fixture(scope="session")
def padded_batch():
    """Return a function that builds a random batch, padded on the right.

    The function takes the sequence lengths and returns (input_ids, attention_mask).
    """

    def make(*lengths):
        torch.manual_seed(3)
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        return torch.randint(5, 60, mask.shape) * mask, mask

    return make


@pytest.fixture(scope="session")
def hub_folder(tmp_path_factory):
    """Return a function that saves a tiny random model with its tokenizer.

    The function takes a model class and fields of its configuration, and returns the directory.
    """

    def make(model_class=NeoBERTModel, **changes):
        folder = tmp_path_factory.mktemp("model") / "model"
        build(model_class, **changes).save_pretrained(folder)
        write_tokenizer(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def sentence_folder(tmp_path_factory, hub_folder):
    """Return the directory of a sentence-transformers model.

    The model has mean pooling, a Dense module and normalized embeddings. It truncates texts to 120
    tokens, and has a prompt "query".
    """
    sentence_transformers = pytest.importorskip(
        "sentence_transformers", reason="needs sentence-transformers"
    )
    from sentence_transformers import models as modules

    torch.manual_seed(1)
    transformer = modules.Transformer(str(hub_folder()))
    encoder_modules = [
        transformer,
        modules.Pooling(64, "mean"),
        modules.Dense(64, 48, activation_function=torch.nn.Tanh()),
        modules.Normalize(),
    ]
    model = sentence_transformers.SentenceTransformer(
        modules=encoder_modules, device="cpu", prompts={"query": "a "}
    )
    model.max_seq_length = 120

    folder = tmp_path_factory.mktemp("sentences") / "model"
    folder.mkdir()
    save_for_all_versions(model, folder)
    return folder
