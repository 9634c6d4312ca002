"""Runs of `neobert pretrain` on a tiny corpus, for the tests of pre-training."""

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
    """Folder with train.txt and validation.txt, in which words determine the following ones."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(400):
        pairs = [int(pick) for pick in rng.integers(len(SUBJECTS), size=rng.integers(1, 4))]
        lines.append(". ".join(f"the {SUBJECTS[i]} has {OTHERS[i]}" for i in pairs))
    (folder / "train.txt").write_text("\n".join(lines[:360]) + "\n")
    (folder / "validation.txt").write_text("\n".join(lines[360:]) + "\n")
    return folder


def arguments_of(corpus, out, **more):
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
        **more,
    }
    given = [
        (name.replace("_", "-"), str(value)) for name, value in values.items() if value is not None
    ]
    return [piece for name, value in given for piece in (f"--{name}", value)]


def run_of(arguments):
    return pretrain.execute(pretrain.read_run(arguments))


def log_of(out):
    """Logged records of the steps, without what the clock decides."""
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    timed = ("tokens_per_second", "mfu", "seconds", "cpu_seconds")
    return [
        {name: value for name, value in record.items() if name not in timed}
        for record in records
        if "loss" in record
    ]


class Killed(BaseException):
    """Ends a run as a killed process does."""


@contextlib.contextmanager
def signaled(step, number=None):
    """Runs get this signal before the first step from `step` on; without one they are killed
    there."""
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


def same_weights(one, two):
    """Whether the models of two runs have the same bits."""
    first, second = (load_file(folder / "model.safetensors") for folder in (one, two))
    return all(torch.equal(first[name], second[name]) for name in first)


def save_bpe(texts, folder, size=300):
    """Puts a cased byte-level BPE tokenizer that was learned from texts into a folder."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(texts, vocab_size=size, special_tokens=special)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, **names)
    tokenizer.save_pretrained(str(folder))
