"""Fixtures and runs of `neobert pretrain` on a tiny corpus."""

import contextlib
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from neobert.pretraining import command as pretrain
from neobert.pretraining.trainer import PretrainingTrainer


SUBJECTS = ["river", "stone", "music", "paper", "table", "winter"]
OTHERS = ["cold water", "hard rock", "sweet sound", "white sheets", "four legs", "deep snow"]
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module", name="corpus")
def make_corpus(tmp_path_factory):
    """Return a directory with train.txt and validation.txt.

    The subject of a sentence determines its other words, so that the loss falls in a few steps.
    """
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(400):
        pairs = [int(pick) for pick in rng.integers(len(SUBJECTS), size=rng.integers(1, 4))]
        lines.append(". ".join(f"the {SUBJECTS[i]} has {OTHERS[i]}" for i in pairs))
    (folder / "train.txt").write_text("\n".join(lines[:360]) + "\n")
    (folder / "validation.txt").write_text("\n".join(lines[360:]) + "\n")
    return folder


def arguments_of(corpus, out, **overrides):
    """Return the arguments of a run of 8 steps that writes to `out`.

    Further values override those below, and None removes an argument.
    """
    values = {
        "model_config": json.dumps(TINY),
        "dataset": corpus / "train.txt",
        "prepared": corpus / "prepared",
        "output": out,
        "max_length": 32,
        "micro_batch_tokens": 256,
        "max_steps": 8,
        "warmup_steps": 2,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": "none",
        "disable_tqdm": "true",
        "seed": 7,
        "peak_tflops": 0.01,
        **overrides,
    }

    options = [
        (name.replace("_", "-"), str(value)) for name, value in values.items() if value is not None
    ]
    return [word for name, value in options for word in (f"--{name}", value)]


def run_of(arguments):
    """Run pre-training with these arguments in this process, and return its result."""
    return pretrain.execute(pretrain.read_run(arguments))


def log_of(out):
    """Return the logged records of the steps, without the values that depend on the time."""
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    timed = ("tokens_per_second", "mfu", "seconds", "cpu_seconds")
    return [
        {name: value for name, value in record.items() if name not in timed}
        for record in records
        if "loss" in record
    ]


class Killed(BaseException):
    """Exception that ends a run without cleanup, like a killed process."""


@contextlib.contextmanager
def signaled(step, number=None):
    """Interrupt the runs within the block before their first step from `step` on.

    Args:
        step: Number of finished steps after which the run is interrupted.
        number: Signal that the process sends to itself. If it is None, `Killed` is raised.
    """
    inner = PretrainingTrainer.training_step

    def training_step(self, *args, **kwargs):
        if self.state.global_step >= step:
            if number is None:
                raise Killed
            os.kill(os.getpid(), number)
        return inner(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PretrainingTrainer, "training_step", training_step)
        yield


def same_weights(first_folder, second_folder):
    """Return whether the models of two runs have the same tensors, bit for bit."""
    first, second = (
        load_file(folder / "model.safetensors") for folder in (first_folder, second_folder)
    )
    return all(torch.equal(first[name], second[name]) for name in first)


def save_bpe(texts, folder, size=300):
    """Train a cased byte-level BPE tokenizer on texts, and write it to a directory."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(texts, vocab_size=size, special_tokens=special)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, **names)
    tokenizer.save_pretrained(str(folder))
