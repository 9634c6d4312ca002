"""Test the client libraries of other projects against a running server.

The clients are installed by `make test-server` into an environment of their own. In every format,
the embedding of a text must have the same bits as if the text were encoded alone.
"""

import json
import os
import re
import subprocess

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.serving import ENCODER, server_process
from sentence_transformers import CrossEncoder
from transformers import pipeline

from neobert.embeddings.packed_encoder import PackedEncoder


pytestmark = pytest.mark.slow
CLIENTS = ROOT / ".cache" / "engines" / "server"
SCRIPT = ROOT / "tests" / "engines" / "server_clients.py"
# LiteLLM contains the encoding of tiktoken that LangChain sends.
TOKENIZERS = "lib/python3*/site-packages/litellm/litellm_core_utils/tokenizers"
NAMES = (
    *("openai", "cohere", "huggingface_hub", "langchain-openai", "langchain-huggingface"),
    *("llama-index", "litellm", "haystack"),
)
TEXTS = ["a bird of prey", "an eagle", "a violin", "soup with rice", "Vögel, naïve – 42"]
KEY = "a key"


@pytest.fixture(scope="module")
def address(reranker, classifier):
    """Yield the address of a server with all models and an API key."""
    if not (CLIENTS / ".ready").exists():
        pytest.skip("The clients are not installed. Install them with `make test-server`.")
    (folder,) = CLIENTS.glob(TOKENIZERS)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        monkeypatch.setenv("NEOBERT_API_KEY", KEY)
        arguments = ["--reranker", reranker, "--classifier", classifier]
        with server_process(*arguments, "--tiktoken-encoding", "cl100k_base") as (_, address):
            yield address


@pytest.fixture(scope="module")
def embeddings():
    """Return the embeddings of the texts, each encoded alone."""
    encoder = PackedEncoder(str(ENCODER), "float32", "cpu")
    return np.stack([encoder.encode([text])[0] for text in TEXTS])


@pytest.fixture(scope="module")
def scores(reranker):
    """Return the reranker's scores. The first text is the query, and the others are documents."""
    return CrossEncoder(reranker).predict([(TEXTS[0], text) for text in TEXTS[1:]])


@pytest.mark.parametrize("name", NAMES)
def test_client(name, address, embeddings, scores, classifier):
    """Check the embeddings and scores that a client library receives from the server."""
    process = subprocess.run(
        [CLIENTS / "bin" / "python", SCRIPT, address, name],
        input=json.dumps({"texts": TEXTS, "key": KEY}),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, f"The client {name} failed:\n{process.stderr[-3000:]}"
    results = json.loads(process.stdout.splitlines()[-1])["results"]

    for result, values in results.items():
        if result.startswith("embeddings"):
            # Some clients convert the embeddings to float64.
            rows = np.array(values, np.float32)
            np.testing.assert_allclose(rows, embeddings, rtol=1e-6, atol=1e-8, err_msg=result)
            if not result.startswith("embeddings of token ids"):
                assert rows.tobytes() == embeddings.tobytes(), f"The bits of {result} differ."
        elif "scores" in result:
            # The server and CrossEncoder both apply a sigmoid to the logits.
            order = np.argsort(-scores).tolist()
            assert [index for index, _ in values] == order, f"The order of {result} differs."
            np.testing.assert_allclose([score for _, score in values], scores[order], atol=1e-5)

    check = CHECKS.get(name)
    if check is not None:
        check(results, embeddings, scores, classifier)


PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(
    r"^<!-- run: \S+::test_serving_page_snippets -->\n```python\n(.*?)^```$", PAGE, re.M | re.S
)
# This code is appended to a snippet, and prints its results as JSON.
RESULTS = """
import json
import numpy

names = globals()
if "embeddings" in names:
    print(json.dumps({"embeddings": numpy.array(embeddings).tolist()}))
if "scores" in names:
    print(json.dumps({"scores": scores}))
if "predictions" in names:
    print(json.dumps({"labels": [item.label for item in predictions]}))
"""


@pytest.mark.parametrize(
    "snippet", SNIPPETS, ids=lambda text: re.search(r"\w+$", text.split()[1])[0]
)
def test_serving_page_snippets(snippet, address, reranker, classifier):
    """Run a snippet of docs/serving.md against the server, and check its results."""
    assert "http://localhost:8000" in snippet and "KEY" in snippet
    code = snippet.replace("http://localhost:8000", address).replace("KEY", KEY)
    process = subprocess.run(
        [CLIENTS / "bin" / "python", "-c", code + RESULTS],
        env={**os.environ, "HF_HUB_OFFLINE": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, f"The snippet failed:\n{process.stderr[-3000:]}"
    results = {}
    for line in process.stdout.splitlines():
        if line.startswith("{"):
            results.update(json.loads(line))
    assert results

    documents = ["an eagle", "a violin"]
    if "embeddings" in results:
        encoder = PackedEncoder(str(ENCODER), "float32", "cpu")
        np.testing.assert_allclose(results["embeddings"], encoder.encode(documents), atol=1e-6)
    if "scores" in results:
        expected = CrossEncoder(reranker).predict([("a bird of prey", text) for text in documents])
        scores = {index: score for index, score in results["scores"]}
        np.testing.assert_allclose([scores[0], scores[1]], expected, atol=1e-5)
    if "labels" in results:
        (expected,) = pipeline("text-classification", model=classifier, top_k=None)(["an eagle"])
        assert results["labels"] == [row["label"] for row in expected]


def test_the_page_has_a_snippet_per_client():
    assert len(SNIPPETS) == 8


def check_openai(results, embeddings, scores, classifier):
    """Check shortened embeddings, the list of models, and the exceptions of the client."""
    expected = embeddings[:, :96] / np.linalg.norm(embeddings[:, :96], axis=1, keepdims=True)
    np.testing.assert_allclose(results["dimensions"], expected, rtol=1e-5, atol=1e-7)
    assert results["models"] == ["sentence-encoder", "reranker", "topics"]
    errors = results["errors"]
    assert errors["model"] == [
        "NotFoundError",
        404,
        "`model` must be 'sentence-encoder', got 'other'.",
    ]
    assert errors["input"][:2] == ["BadRequestError", 400]
    assert errors["key"][:2] == ["AuthenticationError", 401]


def check_cohere(results, embeddings, scores, classifier):
    """Check `top_n` in both versions of the API, and the message about an unknown model."""
    best = np.argsort(-scores)[:2].tolist()
    assert results["best v1"] == results["best v2"] == best
    assert results["errors"]["model"][2] == "`model` must be 'reranker', got 'other'."


def check_huggingface_hub(results, embeddings, scores, classifier):
    """Check the predictions of the classifier against those of the pipeline."""
    expected = pipeline("text-classification", model=classifier, top_k=None)(TEXTS)
    for rows, prediction in zip(expected, results["predictions"], strict=True):
        assert prediction == pytest.approx({row["label"]: row["score"] for row in rows}, abs=1e-5)
    assert results["best predictions"] == [rows[0]["label"] for rows in expected]


CHECKS = {
    "openai": check_openai,
    "cohere": check_cohere,
    "huggingface_hub": check_huggingface_hub,
}
