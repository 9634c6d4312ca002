"""Fixtures for the tests of export: folders of tiny models."""

import ctypes
import os
import sys

import pytest
import torch
from helpers.export_models import build, write_tokenizer

from neobert import NeoBERTModel
from neobert.common.pooling import save_for_all_versions


# Otherwise OpenVINO's converter sends usage data to Intel.
os.environ["CI"] = "true"


class SignalStack(ctypes.Structure):
    """The C structure `stack_t` of Linux."""

    _fields_ = [("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


@pytest.fixture(scope="module", autouse=True)
def keep_signal_stack():
    """Restore the alternative signal stack of the main thread after the tests of a file.

    OpenVINO 2026.4 leaves a stack there that it has freed. Python handles signals on it, so that a
    later test in the same process that sends itself a signal would end in a segmentation fault.
    """
    if sys.platform != "linux":
        yield
        return
    sigaltstack = ctypes.CDLL(None).sigaltstack
    before = SignalStack()
    assert sigaltstack(None, ctypes.byref(before)) == 0
    yield
    assert sigaltstack(ctypes.byref(before), None) == 0


@pytest.fixture(scope="session")
def padded_batch():
    """Function of texts' lengths that returns (input_ids, attention_mask), padded on the right."""

    def make(*lengths):
        torch.manual_seed(3)
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        return torch.randint(5, 60, mask.shape) * mask, mask

    return make


@pytest.fixture(scope="session")
def hub_folder(tmp_path_factory):
    """Function of a model class and fields of its configuration that returns a Hub folder."""

    def make(model_class=NeoBERTModel, **changes):
        folder = tmp_path_factory.mktemp("model") / "model"
        build(model_class, **changes).save_pretrained(folder)
        write_tokenizer(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def sentence_folder(tmp_path_factory, hub_folder):
    """A folder of sentence-transformers with mean pooling, a Dense module, vectors of length 1, and
    texts of up to 120 tokens."""
    sentence_transformers = pytest.importorskip(
        "sentence_transformers", reason="needs sentence-transformers"
    )
    from sentence_transformers import models as modules

    torch.manual_seed(1)
    transformer = modules.Transformer(str(hub_folder()))
    parts = [
        transformer,
        modules.Pooling(64, "mean"),
        modules.Dense(64, 48, activation_function=torch.nn.Tanh()),
        modules.Normalize(),
    ]
    model = sentence_transformers.SentenceTransformer(
        modules=parts, device="cpu", prompts={"query": "a "}
    )
    model.max_seq_length = 120
    folder = tmp_path_factory.mktemp("sentences") / "model"
    folder.mkdir()
    save_for_all_versions(model, folder)
    return folder
