"""Models, texts, clients and server processes for the tests of `neobert serve`."""

import base64
import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.paths import ROOT
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTForSequenceClassification
from neobert.serving.app import create_app
from neobert.serving.options import OPTIONS


ENCODER = ROOT / "examples" / "sentence-encoder"
WORDS = (ROOT / "examples" / "definitions.tsv").read_text(encoding="utf-8").split()


def texts_of_all_lengths(count: int, seed: int = 0) -> list[str]:
    """Return texts of 1 to 150 words, most of them short."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        start = generator.randrange(len(WORDS) - 200)
        length = 1 + int(150 * generator.random() ** 3)
        texts.append(" ".join(WORDS[start : start + length]))
    return texts


def save_classifier(folder: Path, num_labels: int, **fields: Any) -> str:
    """Write a small classifier with random weights and its tokenizer. Return the path."""
    torch.manual_seed(0)
    config = NeoBERTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
        embedding_init_range=0.5,
        classifier_init_range=1.0,
        classifier_pooling="mean",
        num_labels=num_labels,
        **fields,
    )
    NeoBERTForSequenceClassification(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tokenizer", model_max_length=64)
    tokenizer.save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def serving(*words: str, model: Path = ENCODER) -> Iterator[TestClient]:
    """Yield a test client of an application that runs with these options."""
    options = OPTIONS["serve"].read(["--model", str(model), "--device", "cpu", *words])
    with TestClient(create_app(options)) as client:
        yield client


def embeddings_of(response: Any) -> list[np.ndarray]:
    """Return the embeddings in a response of /v1/embeddings."""
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [decode(item["embedding"]) for item in data]


def decode(embedding: list[float] | str) -> np.ndarray:
    """Return an embedding of a response as float32."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4")
    return np.array(embedding, np.float32)


@contextlib.contextmanager
def server_process(*words: str, env: dict[str, str] | None = None) -> Iterator[tuple[Any, str]]:
    """Start a server on a free port, and yield its process and its address."""
    command = [sys.executable, "-m", "neobert", "serve", "--model", str(ENCODER), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--threads", "1", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        line = ""
        while not line.startswith("Serving model"):
            line = process.stderr.readline()
            assert line, f"The server exited with code {process.wait()} before it was ready."
        yield process, line.split()[-1]
    finally:
        process.terminate()
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()
