"""Pins examples/serve.py: answers in the forms of OpenAI and Cohere, vectors with the bits of a
text alone whatever is asked for beside it, batches within their budget, one sentence for each
refusal. Slow, by `make test-server`: 2,000 requests of OpenAI's own client, and SIGTERM.
"""

import asyncio
import base64
import importlib.util
import json
import random
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTForSequenceClassification
from neobert.embeddings.packed_encoder import PackedEncoder


pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from starlette.testclient import TestClient  # noqa: E402


ROOT = Path(__file__).resolve().parents[2]
ENCODER = ROOT / "examples" / "sentence-encoder"
CLIENTS = ROOT / ".cache" / "engines" / "server"
WORDS = (ROOT / "examples" / "definitions.tsv").read_text(encoding="utf-8").split()


def load():
    spec = importlib.util.spec_from_file_location("serve", ROOT / "examples" / "serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


serve = load()


def texts_of_all_lengths(count, seed=0):
    """Of 1 to 150 words, most of them short."""
    draw = random.Random(seed)
    starts = [draw.randrange(len(WORDS) - 200) for _ in range(count)]
    return [" ".join(WORDS[i : i + 1 + int(150 * draw.random() ** 3)]) for i in starts]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "reranker"
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    more = {"num_labels": 1, "num_hidden_layers": 2, "classifier_pooling": "mean"}
    config = NeoBERTConfig(
        **shape,
        **more,
        max_position_embeddings=64,
        embedding_init_range=0.5,
        classifier_init_range=1.0,
    )
    NeoBERTForSequenceClassification(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tokenizer", model_max_length=64)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def client(reranker):
    args = serve.parse(["--model", str(ENCODER), "--reranker", reranker])
    with TestClient(serve.make_app(args)) as client:
        yield client


def vectors_of(answer):
    rows = [row["embedding"] for row in answer.json()["data"]]
    assert [row["index"] for row in answer.json()["data"]] == list(range(len(rows)))
    return [
        np.frombuffer(base64.b64decode(row), "<f4") if isinstance(row, str) else np.float32(row)
        for row in rows
    ]


def test_requests_at_once_get_the_bits_of_each_text_alone(client):
    encoder = PackedEncoder(str(ENCODER), "float32", "cpu")
    texts = texts_of_all_lengths(48)
    alone = {text: encoder.encode([text])[0] for text in texts}
    batches = [texts[i : i + 1 + i % 3] for i in range(0, 46)]

    def ask(given):
        form = ("float", "base64")[len(given) % 2]
        body = {"model": "sentence-encoder", "input": given, "encoding_format": form}
        return client.post("/v1/embeddings", json=body)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, batches))
    for given, answer in zip(batches, answers):
        for text, vector in zip(given, vectors_of(answer), strict=True):
            assert vector.tobytes() == alone[text].tobytes()
    tokens = sum(map(len, encoder.tokenize(batches[2])))
    assert answers[2].json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    (one,) = vectors_of(client.post("/v1/embeddings", json={"input": texts[0]}))
    assert one.tobytes() == alone[texts[0]].tobytes(), "a string is a list of one"


def test_a_reranker_scores_as_its_cross_encoder_does(client, reranker):
    query, *documents = (text[:50] for text in texts_of_all_lengths(12, seed=1))
    expected = CrossEncoder(reranker).predict([(query, document) for document in documents])
    for path, best in (("/rerank", None), ("/v1/rerank", 20), ("/v2/rerank", 3)):
        body = {"query": query, "documents": documents, "top_n": best}
        results = client.post(path, json=body).json()["results"]
        order = np.argsort(-expected)[:best].tolist()
        assert [found["index"] for found in results] == order
        scores = [found["relevance_score"] for found in results]
        np.testing.assert_allclose(scores, expected[order], atol=1e-5)
    assert np.ptp(expected) > 0.01, "the scores differ"


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/v1/embeddings", {}, 400, "`input` is required."),
        ("/v1/embeddings", b"{", 400, "the body must be valid JSON: "),
        ("/v1/embeddings", {"input": ""}, 400, "`input[0]` must have at least 1 character."),
        ("/v1/embeddings", {"input": 3}, 400, "`input` must be a string, a list of strings, a"),
        ("/v1/embeddings", {"input": [1, "a"]}, 400, "`input[0]` must be a string, a list of"),
        ("/v1/embeddings", {"input": [30522]}, 400, "must have token IDs below 30522, got 30522."),
        ("/v1/embeddings", {"input": [[1] * 257]}, 400, "`input[0]` must have at most 256 tokens"),
        ("/v1/embeddings", {"input": [[-1]]}, 400, "`input[0][0]` must be greater than or equal"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "`input` must have at most 2048 items"),
        ("/v1/embeddings", {"input": "\ud800"}, 400, "`input[0]` must be a valid string"),
        ("/v1/embeddings", {"input": "a" * 100_001}, 400, "`input[0]` must have at most 100000"),
        (
            "/v1/embeddings",
            {"input": ["a", "b " * 255]},
            400,
            "`input[1]` must have at most 256 tokens, got 257.",
        ),
        (
            "/v1/embeddings",
            {"input": "a", "dimensions": 385},
            400,
            "`dimensions` must be at most 384, got 385.",
        ),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "`dimensions` must be greater"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "got 'other'."),
        ("/rerank", {"query": "a", "documents": ["b"], "model": "other"}, 404, "got 'other'."),
        (
            "/rerank",
            {"query": "a", "documents": ["b", "c " * 64]},
            400,
            "`documents[1]` must have at most 64 tokens, got 68.",
        ),
        ("/v1/embeddings", {"input": ["b " * 250] * 900}, 413, "0 tokens wait; with these 226800"),
        ("/v1/embeddings", b"\xff", 400, "There was an error parsing the body"),
        ("/rerank", {"query": "a", "documents": []}, 400, "`documents` must have at least 1 item"),
        ("/elsewhere", {}, 404, "Not Found"),
    ],
)
def test_a_refusal_is_one_sentence_in_openais_form(client, path, body, status, told):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status) and told in error["message"]
    assert client.get("/health").json() == {"status": "ok"}


def test_truncate_cuts_as_the_encoder_does():
    args = serve.parse(["--model", str(ENCODER), "--truncate"])
    with TestClient(serve.make_app(args)) as client:
        answer = client.post("/rerank", json={"query": "a", "documents": ["b"]})
        assert answer.status_code == 404
        assert "Start the server with --reranker." in answer.json()["error"]["message"]
        long = "b " * 255
        (vector,) = vectors_of(client.post("/v1/embeddings", json={"input": long}))
    expected = PackedEncoder(str(ENCODER), "float32", "cpu").encode([long])[0]
    assert vector.tobytes() == expected.tobytes()


def test_truncated_pairs_score_as_in_cross_encoder(reranker):
    """The two documents differ after the last token that the reranker reads."""
    args = serve.parse(["--model", str(ENCODER), "--reranker", reranker, "--truncate"])
    documents = ["b " * 100 + "c", "b " * 100 + "d"]
    with TestClient(serve.make_app(args)) as client:
        answer = client.post("/rerank", json={"query": "a", "documents": documents}).json()
    expected = CrossEncoder(reranker).predict([("a", document) for document in documents])
    scores = [result["relevance_score"] for result in answer["results"]]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == 2 * 64


def test_models_token_ids_and_dimensions(client, reranker):
    names = [row["id"] for row in client.get("/v1/models").json()["data"]]
    assert names == [str(ENCODER), reranker]
    ids = AutoTokenizer.from_pretrained(ENCODER)(["a bird of prey", "an eagle"])["input_ids"]
    texts = client.post("/v1/embeddings", json={"input": ["a bird of prey", "an eagle"]})
    full = vectors_of(texts)
    for given in (ids, [ids[0], "an eagle"]):
        answer = client.post("/v1/embeddings", json={"input": given})
        assert [row.tobytes() for row in vectors_of(answer)] == [row.tobytes() for row in full]
    (one,) = vectors_of(client.post("/v1/embeddings", json={"input": ids[1]}))
    assert one.tobytes() == full[1].tobytes()
    (short,) = vectors_of(client.post("/v1/embeddings", json={"input": ids[0], "dimensions": 96}))
    np.testing.assert_allclose(short, full[0][:96] / np.linalg.norm(full[0][:96]), rtol=1e-6)


def test_batches_keep_their_budget_and_order_and_a_full_queue_refuses():
    """Strings stand for texts of so many tokens; one of them breaks its batch."""
    seen = []

    def function(texts):
        seen.append(texts)
        if "broken!" in texts:
            raise ValueError("it breaks its batch")
        return [text.upper() for text in texts]

    async def ask_all():
        with ThreadPoolExecutor(1) as thread:
            batches = serve.Batches(function, thread, budget=10, limit=33)
            given = [["aa", "bbb"], ["cccc", "dddd"], ["broken!"], ["e" * 12]]
            tasks = map(batches.run, [*given, ["f"], ["g"], ["h" * 34]])
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            return [*answers, batches.tokens]

    first, second, broken, long, last, full, never, waiting = asyncio.run(ask_all())
    assert (first[0], second[0]) == (["AA", "BBB"], ["CCCC", "DDDD"])
    assert isinstance(broken, ValueError) and (long[0], last[0]) == (["E" * 12], ["F"])
    assert (full.status_code, full.headers, never.status_code) == (429, {"Retry-After": "1"}, 413)
    assert seen == [("aa", "bbb", "cccc"), ("dddd",), ("broken!",), ("e" * 12,), ("f",)]
    assert waiting == 0


# ------------------------------------------------------------------------------------------------
# a real process, and the clients of others


@pytest.fixture(params=("float32", "int8"))
def server(request, reranker):
    """(process, address) of a server on a free port."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    script = [sys.executable, ROOT / "examples" / "serve.py"]
    options = ["--model", ENCODER, "--reranker", reranker, "--dtype", request.param]
    process = subprocess.Popen([*script, *options, "--port", str(port)], stderr=subprocess.PIPE)
    try:
        while b"running on" not in process.stderr.readline():
            assert process.poll() is None, "the server did not start"
        yield process, f"http://127.0.0.1:{port}", request.param
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_2000_requests_of_openais_client_and_sigterm(server):
    """None lost, none mixed, and the same bits as alone; then a stop with requests under way."""
    if not (CLIENTS / ".ready").exists():
        pytest.skip("the clients are not installed: make test-server")
    process, address, dtype = server
    texts = texts_of_all_lengths(2000)
    encoder = PackedEncoder(str(ENCODER), dtype, "cpu")
    alone = [encoder.encode([text])[0].tobytes().hex() for text in texts]
    client = [CLIENTS / "bin" / "python", ROOT / "tests" / "engines" / "server_clients.py", address]
    given = json.dumps({"texts": texts, "pid": process.pid}).encode()
    done = subprocess.run(client, input=given, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    said = json.loads(done.stdout)
    for index, (vector, expected) in enumerate(zip(said["vectors"], alone, strict=True)):
        if index % 20 == 7:
            assert vector == "400", "a broken request is refused"
        else:
            assert vector == expected, f"text {index} has not the bits that it has alone"
    assert said["ranks"] == sorted(said["ranks"], reverse=True) and len(said["ranks"]) == 5
    assert said["at_the_stop"] == alone[:1280], "what was under way is finished"
    assert process.wait(60) == -signal.SIGTERM
