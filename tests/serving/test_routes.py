"""Test the routes of the server.

Responses have the format of their API: OpenAI, Cohere and Jina, or Text Embeddings Inference. The
embedding of a text has the same bits as if the text were encoded alone, whatever other requests
are processed at the same time. Errors are reported in one sentence.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.serving import (
    ENCODER,
    decode,
    embeddings_of,
    save_classifier,
    serving,
    texts_of_all_lengths,
)
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer, pipeline

from neobert.embeddings.packed_encoder import PackedEncoder


# ------------------------------------------------------------------------------------------------
# OpenAI


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_concurrent_embeddings_match_texts_encoded_alone(dtype):
    """Embeddings of concurrent requests have the bits of each text encoded alone."""
    encoder = PackedEncoder(str(ENCODER), dtype, "cpu")
    texts = texts_of_all_lengths(48)
    alone = {text: encoder.encode([text])[0] for text in texts}
    requests = [texts[i : i + 1 + i % 3] for i in range(0, 46)]

    with serving("--dtype", dtype) as client, ThreadPoolExecutor(12) as pool:

        def embed(request):
            body = {
                "model": "sentence-encoder",
                "input": request,
                "encoding_format": ("float", "base64")[len(request) % 2],
            }
            return client.post("/v1/embeddings", json=body)

        responses = list(pool.map(embed, requests))
        one = client.post("/v1/embeddings", json={"input": texts[0]})

    for request, response in zip(requests, responses, strict=True):
        for text, embedding in zip(request, embeddings_of(response), strict=True):
            assert embedding.tobytes() == alone[text].tobytes()

    tokens = sum(map(len, encoder.tokenize(requests[2])))
    assert responses[2].json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert embeddings_of(one)[0].tobytes() == alone[texts[0]].tobytes()


def test_model_list_token_ids_and_dimensions(client):
    """Check the list of models, token ids as input, and shortened embeddings."""
    models = client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["sentence-encoder", "reranker", "topics"]
    for model in models["data"]:
        assert client.get(f"/v1/models/{model['id']}").json() == model
    # The name of a model on the Hub contains a slash.
    response = client.get("/v1/models/user/other")
    assert response.status_code == 404
    assert "got 'user/other'" in response.json()["error"]["message"]

    texts = ["a bird of prey", "an eagle"]
    ids = AutoTokenizer.from_pretrained(ENCODER)(texts)["input_ids"]
    expected = embeddings_of(client.post("/v1/embeddings", json={"input": texts}))
    for request in (ids, [ids[0], texts[1]]):
        response = client.post("/v1/embeddings", json={"input": request, "model": str(ENCODER)})
        rows = embeddings_of(response)
        assert [row.tobytes() for row in rows] == [row.tobytes() for row in expected]
    # Null is the default format, a list of floats.
    body = {"input": ids[1], "encoding_format": None}
    (row,) = embeddings_of(client.post("/v1/embeddings", json=body))
    assert row.tobytes() == expected[1].tobytes()

    # Shortened embeddings are normalized again.
    body = {"input": ids[0], "dimensions": 96}
    (row,) = embeddings_of(client.post("/v1/embeddings", json=body))
    first = expected[0][:96]
    np.testing.assert_allclose(row, first / np.linalg.norm(first), rtol=1e-6)


# ------------------------------------------------------------------------------------------------
# Cohere and Jina


def test_rerank_scores_match_cross_encoder(client, reranker):
    """Both versions of the API return the sorted scores of CrossEncoder, limited by `top_n`."""
    query, *documents = (text[:50] for text in texts_of_all_lengths(12, seed=1))
    expected = CrossEncoder(reranker).predict([(query, document) for document in documents])
    assert np.ptp(expected) > 0.01, "The scores must differ, so that their order can be tested."

    for path, top_n in (("/v1/rerank", 20), ("/v2/rerank", 3), ("/v1/rerank", None)):
        body = {"query": query, "documents": documents, "top_n": top_n, "model": "reranker"}
        response = client.post(path, json=body).json()
        results = response["results"]
        order = np.argsort(-expected)[:top_n].tolist()
        assert [result["index"] for result in results] == order
        scores = [result["relevance_score"] for result in results]
        np.testing.assert_allclose(scores, expected[order], atol=1e-5)
        assert "document" not in results[0] and response["model"] == "reranker"

    body = {
        "query": query,
        # Texts and objects may be mixed.
        "documents": [*documents[:5], *({"text": document} for document in documents[5:])],
        "return_documents": True,
    }
    results = client.post("/v1/rerank", json=body).json()["results"]
    assert [result["document"]["text"] for result in results] == [documents[i] for i in order]


def test_rerank_score_does_not_depend_on_other_documents(client):
    """The score of a document is the same, bit for bit, with and without other documents."""
    query, *documents = texts_of_all_lengths(40, seed=2)
    body = {"query": query[:40], "truncate": True}
    together = client.post("/rerank", json={**body, "texts": documents, "raw_scores": True}).json()
    for result in together:
        alone = {**body, "texts": [documents[result["index"]]], "raw_scores": True}
        assert client.post("/rerank", json=alone).json()[0]["score"] == result["score"]
    assert len(together) == len(documents)


# ------------------------------------------------------------------------------------------------
# Text Embeddings Inference


def test_embed_matches_the_openai_route(client):
    """Check /embed and its alias /, and shortened embeddings."""
    texts = ["a bird of prey", "an eagle"]
    expected = embeddings_of(client.post("/v1/embeddings", json={"input": texts}))
    for path in ("/embed", "/"):
        rows = client.post(path, json={"inputs": texts}).json()
        assert [decode(row).tobytes() for row in rows] == [row.tobytes() for row in expected]

    body = {
        "inputs": texts[0],
        "dimensions": 32,
        "normalize": True,
        "truncation_direction": "Right",
    }
    (row,) = client.post("/embed", json=body).json()
    first = expected[0][:32]
    np.testing.assert_allclose(row, first / np.linalg.norm(first), rtol=1e-6)


def test_prompt_name_and_normalize(tmp_path):
    """Check `prompt_name` and `normalize` with a model that does not normalize its embeddings.

    `normalize` is true by default. The OpenAI route does not normalize the embeddings of this
    model.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    model = SentenceTransformer(str(ENCODER), device="cpu")
    modules = [model[0], Pooling(384, "mean")]
    model = SentenceTransformer(modules=modules, prompts={"query": "query: ", "document": ""})
    model.save(str(tmp_path / "plain"))
    encoder = PackedEncoder(str(tmp_path / "plain"), "float32", "cpu")
    plain = encoder.encode(["query: a bird"])[0]

    with serving(model=tmp_path / "plain") as client:
        body = {"inputs": "a bird", "prompt_name": "query"}
        (raw,) = client.post("/embed", json={**body, "normalize": False}).json()
        (normalized,) = client.post("/embed", json=body).json()
        openai = {"input": "a bird", "prompt_name": "query", "dimensions": 16}
        (short,) = embeddings_of(client.post("/v1/embeddings", json=openai))
        unknown = client.post("/embed", json={**body, "prompt_name": "passage"})
        ids = client.post("/embed", json={**body, "inputs": [101, 1037, 102]})

    assert decode(raw).tobytes() == plain.tobytes() and np.linalg.norm(plain) > 1.01
    np.testing.assert_allclose(normalized, plain / np.linalg.norm(plain), rtol=1e-6)
    assert short.tobytes() == plain[:16].tobytes(), (
        "The OpenAI route must not normalize the embeddings."
    )
    assert unknown.status_code == 400 and "(query, document)" in unknown.json()["error"]
    assert ids.status_code == 400 and "`prompt_name` requires text" in ids.json()["error"]


def test_tei_rerank(client, reranker):
    """Scores are the logits of CrossEncoder with `raw_scores`, otherwise their sigmoid."""
    documents = ["an eagle", "a violin", "soup"]
    model = CrossEncoder(reranker)
    pairs = [("a bird", document) for document in documents]
    logits = model.predict(pairs, activation_fn=torch.nn.Identity())
    body = {"query": "a bird", "texts": documents}

    raw = client.post("/rerank", json={**body, "raw_scores": True, "return_text": True}).json()
    order = np.argsort(-logits).tolist()
    assert [row["index"] for row in raw] == order
    assert [row["text"] for row in raw] == [documents[index] for index in order]
    np.testing.assert_allclose([row["score"] for row in raw], logits[order], atol=1e-5)

    rows = client.post("/rerank", json=body).json()
    np.testing.assert_allclose(
        [row["score"] for row in rows], 1 / (1 + np.exp(-logits[order])), atol=1e-5
    )
    assert "text" not in rows[0]


def test_predict_returns_the_probabilities_of_the_pipeline(client, classifier):
    """Check texts, batches and pairs against the pipeline of transformers.

    A list of two strings is one pair, and a list of lists is a batch.
    """
    texts = ["an eagle over the valley", "rain"]
    model = pipeline("text-classification", model=classifier, top_k=None)
    expected = [{row["label"]: row["score"] for row in rows} for rows in model(texts)]

    def check(rows, probabilities):
        assert {row["label"]: row["score"] for row in rows} == pytest.approx(
            probabilities, abs=1e-5
        )
        scores = [row["score"] for row in rows]
        assert scores == sorted(scores, reverse=True) and sum(scores) == pytest.approx(1, abs=1e-5)

    check(client.post("/predict", json={"inputs": texts[0]}).json(), expected[0])
    rows = client.post("/predict", json={"inputs": [[text] for text in texts]}).json()
    check(rows[0], expected[0])
    check(rows[1], expected[1])

    pair = model({"text": texts[0], "text_pair": texts[1]})
    pair = pair[0] if isinstance(pair[0], list) else pair
    expected_pair = {row["label"]: row["score"] for row in pair}
    check(client.post("/predict", json={"inputs": texts}).json(), expected_pair)
    mixed = client.post("/predict", json={"inputs": [texts, [texts[1]]]}).json()
    check(mixed[0], expected_pair)
    check(mixed[1], expected[1])

    # Raw scores are logits.
    raw = client.post("/predict", json={"inputs": texts[0], "raw_scores": True}).json()
    logits = np.array([row["score"] for row in raw])
    probabilities = np.exp(logits) / np.exp(logits).sum()
    check([{**row, "score": p} for row, p in zip(raw, probabilities)], expected[0])


def test_predict_with_the_parameters_of_the_inference_client(client):
    """Check the parameters `top_k` and `function_to_apply` of InferenceClient."""
    raw = client.post("/predict", json={"inputs": "rain", "raw_scores": True}).json()
    logits = np.array([row["score"] for row in raw])
    expected = {
        None: np.exp(logits) / np.exp(logits).sum(),
        "softmax": np.exp(logits) / np.exp(logits).sum(),
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "none": logits,
    }

    for function, scores in expected.items():
        parameters = {"top_k": 2} if function is None else {"function_to_apply": function}
        body = {"inputs": "rain", "parameters": parameters}
        (rows,) = client.post("/predict", json=body).json()
        assert len(rows) == parameters.get("top_k", 3)
        assert [row["label"] for row in rows] == [row["label"] for row in raw[: len(rows)]]
        np.testing.assert_allclose([row["score"] for row in rows], scores[: len(rows)], rtol=1e-5)


@pytest.mark.parametrize(
    ("problem_type", "num_labels", "function"),
    [
        ("multi_label_classification", 3, lambda x: 1 / (1 + np.exp(-x))),
        ("regression", 1, lambda x: x),
        ("regression", 2, lambda x: x),
    ],
)
def test_predict_for_multi_label_and_regression(tmp_path, problem_type, num_labels, function):
    """Scores are the sigmoid of the logits for several labels, and the logits for regression."""
    folder = save_classifier(tmp_path / "model", num_labels, problem_type=problem_type)
    with serving("--classifier", folder) as client:
        raw = client.post("/predict", json={"inputs": "an eagle", "raw_scores": True}).json()
        rows = client.post("/predict", json={"inputs": "an eagle"}).json()
    assert [row["label"] for row in rows] == [row["label"] for row in raw]
    logits = np.array([row["score"] for row in raw])
    np.testing.assert_allclose([row["score"] for row in rows], function(logits), rtol=1e-5)


def test_info_and_health(client):
    """Check the properties of the server at /info, and the status at /health."""
    info = client.get("/info").json()
    assert info["model_id"] == "sentence-encoder" and info["model_dtype"] == "float32"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["max_batch_tokens"]) == (256, 3072)
    assert info["auto_truncate"] is False
    assert client.get("/health").json() == {"status": "ok"}
    # `wget --spider` and monitors request the headers only.
    response = client.head("/health")
    assert response.status_code == 200 and not response.content


# ------------------------------------------------------------------------------------------------
# errors


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/embeddings", {}, 400, "`input` is required."),
        ("/v1/embeddings", b"{", 400, "the body must be valid JSON: "),
        ("/v1/embeddings", b"\xff", 400, "the body must be JSON in UTF-8, got other bytes"),
        ("/v1/embeddings", {"input": ""}, 400, "`input[0]` must have at least 1 character."),
        ("/v1/embeddings", {"input": 3}, 400, "`input` must be a string, a list of strings, a"),
        ("/v1/embeddings", {"input": [1, "a"]}, 400, "`input[0]` must be a string, a list of"),
        ("/v1/embeddings", {"input": [101, 30522, 102]}, 400, "must be below 30522, got 30522."),
        ("/v1/embeddings", {"input": [15339, 1917]}, 400, "--tiktoken-encoding of the client"),
        (
            "/v1/embeddings",
            {"input": [[101] + [1] * 255 + [102]]},
            400,
            "text 0 must have at most 256 tokens, got 257.",
        ),
        ("/v1/embeddings", {"input": [[-1]]}, 400, "`input[0][0]` must be greater than or equal"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "`input` must have at most 2048 items"),
        ("/v1/embeddings", {"input": "\ud800"}, 400, "`input[0]` must be a valid string"),
        ("/v1/embeddings", {"input": "a" * 100_001}, 400, "`input[0]` must have at most 100000"),
        ("/v1/embeddings", {"input": "a", "dimensions": 385}, 400, "must be at most 384, got 385."),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "`dimensions` must be greater"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "got 'other'."),
        ("/v1/embeddings", {"input": ["b " * 250] * 900}, 413, "at most 200000 tokens, got 226800"),
        (
            "/v1/embeddings",
            {"input": ["b " * 50_000] * 101},
            413,
            "must have at most 10000000 characters in total, got 10100000",
        ),
        ("/elsewhere", {}, 404, "Not Found"),
    ],
)
def test_openai_error_format(client, path, body, status, message):
    """Errors of the OpenAI route have its format, and the server continues to respond."""
    response = post(client, path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status)
    assert message in error["message"] and error["type"] == "invalid_request_error"
    assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "other"}, 404, "got 'other'."),
        ("/v2/rerank", {"query": "a", "documents": []}, 400, "must have at least 1 item"),
        ("/v2/rerank", {"documents": ["a"]}, 400, "`query` is required."),
        (
            "/v2/rerank",
            {"query": "a " * 50_000, "documents": ["b"] * 101, "truncate": True},
            413,
            "must have at most 10000000 characters in total, got 10100101. Send fewer or shorter",
        ),
    ],
)
def test_cohere_error_format(client, path, body, status, message):
    """Errors of the rerank routes have the format of Cohere."""
    response = post(client, path, body)
    assert response.status_code == status and message in response.json()["message"]


@pytest.mark.parametrize("document", [{"title": "x"}, {"text": 1}, 1, None, ["a"]])
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_a_document_without_text_is_refused(client, path, document):
    """A document must be a text or an object with a text."""
    response = post(client, path, {"query": "a", "documents": [document]})
    assert response.status_code == 400
    assert response.json()["message"] == "`documents[0]` must be a valid string."


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/embed", {"inputs": []}, 400, "`inputs` must have at least 1 item"),
        ("/embed", {"inputs": "a", "truncation_direction": "left"}, 400, "must be 'right' or"),
        ("/rerank", {"query": "a", "documents": ["b"]}, 400, "`texts` is required."),
        ("/rerank", {"query": "a", "texts": []}, 400, "`texts` must have at least 1 item, got 0."),
        ("/predict", {}, 400, "`inputs` is required."),
        ("/predict", {"inputs": 3}, 400, "`inputs` must be a valid list."),
        ("/predict", {"inputs": ["a", "b", "c"]}, 400, "`inputs[0]` must have at most 2 items"),
        ("/predict", {"inputs": [["a"], []]}, 400, "`inputs[1]` must have at least 1 item"),
        ("/predict", b"[]", 400, "the body must be a JSON object."),
    ],
)
def test_tei_error_format(client, path, body, status, message):
    """Errors of the other routes have the format of Text Embeddings Inference."""
    response = post(client, path, body)
    assert response.status_code == status and message in response.json()["error"]
    assert response.json()["error_type"] == "validation"


def test_a_body_without_a_content_type_is_refused(client):
    """A body without a JSON content type, and a wrong HTTP method, are errors."""
    for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
        response = client.post("/embed", content=b'{"inputs": "a"}', headers=headers)
        assert response.status_code == 400
        assert response.json()["error"] == (
            "the body must be a JSON object. Send it with `Content-Type: application/json`."
        )
    response = client.get("/embed")
    assert response.status_code == 405 and response.json()["error"] == "Method Not Allowed"


def post(client, path, body):
    """Send a POST request. A body of type bytes is sent unchanged, any other as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


def test_routes_of_models_that_are_not_loaded():
    """Routes without a model respond with the option that loads the model."""
    with serving() as client:
        response = client.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
        assert response.status_code == 404
        assert response.json()["message"].endswith("Start the server with --reranker.")
        response = client.post("/predict", json={"inputs": "a"})
        assert response.status_code == 404
        assert response.json()["error"].endswith("Start the server with --classifier.")


def test_model_exception_gives_status_500(client, monkeypatch):
    """An exception of the model gives status 500 with a message in one line.

    The next request succeeds.
    """

    def fail(batch):
        raise RuntimeError("out of memory\nat line 3")

    monkeypatch.setattr(client.app.state.serving.embed_batcher, "function", fail)
    # The exception is raised again, so that the server can log it.
    with pytest.raises(RuntimeError):
        client.post("/v1/embeddings", json={"input": "a"})
    monkeypatch.setattr(client._transport, "raise_server_exceptions", False)
    response = client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == (
        "unexpected RuntimeError: out of memory at line 3."
    )
    monkeypatch.undo()
    assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200


# ------------------------------------------------------------------------------------------------
# long texts

LONG = "b " * 255
REQUESTS_WITH_LONG_TEXTS = {
    "/v1/embeddings": {"input": ["a", LONG]},
    "/embed": {"inputs": ["a", LONG]},
    "/v1/rerank": {"query": "a", "documents": ["b", LONG]},
    "/v2/rerank": {"query": "a", "documents": ["b", LONG]},
    "/rerank": {"query": "a", "texts": ["b", LONG]},
    "/predict": {"inputs": [["a"], [LONG]]},
}


@pytest.mark.parametrize("path", REQUESTS_WITH_LONG_TEXTS)
def test_long_texts_are_refused_or_truncated_on_request(client, path):
    """Texts above the maximum length are an error, unless the request sets `truncate`."""
    body = REQUESTS_WITH_LONG_TEXTS[path]
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert "text 1 must have at most " in response.text and "--truncate" in response.text
    assert client.post(path, json={**body, "truncate": True}).status_code == 200


@pytest.mark.parametrize("count", [3, 254, 255, 400])
def test_truncated_token_ids_match_truncated_text(client, count):
    """Token ids above the maximum length are truncated like text: the last special token stays."""
    text = "b " * count
    tokenizer = AutoTokenizer.from_pretrained(ENCODER)
    ids = tokenizer(text, truncation=False, verbose=False)["input_ids"]
    expected = tokenizer(text, truncation=True, max_length=256)["input_ids"]
    before = list(ids)
    assert client.app.state.serving.encoder._truncated(ids) == expected
    assert ids == before

    body = {"input": [ids, text], "truncate": True}
    rows = embeddings_of(client.post("/v1/embeddings", json=body))
    assert rows[0].tobytes() == rows[1].tobytes()


def test_truncate_option_applies_to_every_route(reranker, classifier):
    """The option --truncate is the default of all routes, and a request can override it."""
    options = ["--truncate", "--reranker", reranker, "--classifier", classifier]
    with serving(*options) as client:
        for path, body in REQUESTS_WITH_LONG_TEXTS.items():
            assert client.post(path, json=body).status_code == 200
            assert client.post(path, json={**body, "truncate": False}).status_code == 400
        response = client.post("/v1/embeddings", json={"input": LONG})
        assert client.get("/info").json()["auto_truncate"] is True

        # The two documents differ only after the maximum length of the reranker.
        documents = ["b " * 100 + "c", "b " * 100 + "d"]
        ranks = client.post("/v1/rerank", json={"query": "a", "documents": documents}).json()

    (row,) = embeddings_of(response)
    expected = PackedEncoder(str(ENCODER), "float32", "cpu").encode([LONG])[0]
    assert row.tobytes() == expected.tobytes()
    expected = CrossEncoder(reranker).predict([("a", document) for document in documents])
    scores = [result["relevance_score"] for result in ranks["results"]]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert ranks["usage"]["prompt_tokens"] == 2 * 64
