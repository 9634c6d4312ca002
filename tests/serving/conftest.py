"""Fixtures of the server tests: a reranker, a classifier and a client of a running server."""

import pytest


pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("sentence_transformers")

from helpers.serving import save_classifier, serving


LABELS = {0: "sports", 1: "politics", 2: "weather"}


@pytest.fixture(scope="session")
def reranker(tmp_path_factory):
    """Return the path of a reranker with a maximum length of 64 tokens."""
    return save_classifier(tmp_path_factory.mktemp("models") / "reranker", 1)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    """Return the path of a classifier with three labels and a maximum length of 64 tokens."""
    folder = tmp_path_factory.mktemp("models") / "topics"
    return save_classifier(
        folder, 3, id2label=LABELS, label2id={name: i for i, name in LABELS.items()}
    )


@pytest.fixture(scope="session")
def client(reranker, classifier):
    """Yield a client of a server with all models in float32."""
    with serving("--reranker", reranker, "--classifier", classifier) as client:
        yield client
