"""Test the middleware of the server: API key, limits, deadline, cancellation and metrics."""

import asyncio
import threading
import time

import pytest
from helpers.serving import ENCODER, serving

from neobert.common.errors import UserError
from neobert.serving import middleware
from neobert.serving.metrics import Metrics
from neobert.serving.middleware import RequestGate
from neobert.serving.options import OPTIONS


def test_an_api_key_is_required_except_for_health_and_metrics():
    """A missing or wrong key is refused with status 401, except for /health and /metrics."""
    with serving("--api-key", "schlüssel") as client:
        body = {"input": "a"}
        for key in (None, "Bearer schl", "schlüssel", "Bearer other", "Basic schlüssel"):
            headers = {} if key is None else {"Authorization": key.encode()}
            response = client.post("/v1/embeddings", json=body, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
            response = client.get("/info", headers=headers)
            assert response.json()["error_type"] == "unauthorized"

        # The name of the scheme is case-insensitive.
        for scheme in ("Bearer", "bearer", "BEARER"):
            headers = {"Authorization": f"{scheme} schlüssel".encode()}
            assert client.post("/v1/embeddings", json=body, headers=headers).status_code == 200
        assert client.get("/health").status_code == client.get("/metrics").status_code == 200


def test_api_key_from_environment(monkeypatch):
    """The option --api-key has priority over NEOBERT_API_KEY, which must not be empty."""
    monkeypatch.setenv("NEOBERT_API_KEY", "secret")
    server = OPTIONS["serve"].read(["--model", str(ENCODER)]).server
    assert server.key == "secret"
    server = OPTIONS["serve"].read(["--model", str(ENCODER), "--api-key", "option"]).server
    assert server.key == "option"

    # An empty variable is an error, because the server would accept all requests.
    monkeypatch.setenv("NEOBERT_API_KEY", "")
    server = OPTIONS["serve"].read(["--model", str(ENCODER)]).server
    with pytest.raises(UserError, match="NEOBERT_API_KEY must not be empty"):
        _ = server.key
    monkeypatch.delenv("NEOBERT_API_KEY")
    assert server.key is None


def test_request_timeout_removes_queued_texts():
    """A request that exceeds the deadline gets status 503, and its waiting texts are removed."""
    release = threading.Event()
    with serving("--timeout", "0.3") as client:
        queue = client.app.state.serving.embed_batcher
        function = queue.function

        def slow(batch):
            release.wait(30)
            return function(batch)

        queue.function = slow
        response = client.post("/v1/embeddings", json={"input": "a"})
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["message"] == (
            "the request took longer than 0.3 s. Retry later."
        )

        # The second request waits behind the running batch.
        response = client.post("/embed", json={"inputs": ["a", "b"]})
        assert response.json()["error_type"] == "overloaded"
        assert (queue.requests, queue.tokens) == (0, 3)

        # The server responds again when the batch has finished.
        release.set()
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def run_gate(route, messages, headers=(), timeout=5.0, path="/v1/embeddings"):
    """Return the ASGI messages that the middleware sends, and the text of its metrics.

    Args:
        route: ASGI application behind the middleware.
        messages: Messages that the middleware receives. A number is a pause in seconds.
        headers: Headers of the request.
        timeout: Deadline in seconds.
        path: Path of the request.
    """
    metrics = Metrics()
    sent = []

    async def send(message):
        sent.append(message)

    async def run():
        remaining = iter(messages)

        async def receive():
            for message in remaining:
                if isinstance(message, dict):
                    return message
                await asyncio.sleep(message)
            return await asyncio.Event().wait()

        scope = {"type": "http", "path": path, "headers": list(headers)}
        gate = RequestGate(route, None, timeout, ["/v1/embeddings"], metrics)
        await asyncio.wait_for(gate(scope, receive, send), 20)

    asyncio.run(run())
    return sent, metrics.render().decode()


def body_of(text, more_body=False):
    """Return an ASGI message with a part of the request's body."""
    return {"type": "http.request", "body": text, "more_body": more_body}


DISCONNECT = {"type": "http.disconnect"}


def test_a_disconnect_cancels_the_route():
    """A client that disconnects cancels the route, and counts as status 499."""
    bodies = []
    cancelled = []

    async def route(scope, receive, send):
        bodies.append((await receive())["body"])
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    start = time.monotonic()
    messages = [body_of(b"one ", True), body_of(b"two"), 0.05, DISCONNECT]
    sent, metrics = run_gate(route, messages)
    assert bodies == [b"one two"] and cancelled == [True] and sent == []
    assert time.monotonic() - start < 5
    assert 'neobert_requests_total{route="/v1/embeddings",status="499"} 1.0' in metrics


def test_disconnect_during_body_does_not_call_the_route():
    """The route is not called if the client disconnects before the body is complete."""

    async def route(scope, receive, send):
        raise AssertionError("the route has started")

    sent, metrics = run_gate(route, [body_of(b"one", True), DISCONNECT])
    assert sent == [] and 'status="499"' in metrics


def test_disconnect_after_response_is_not_a_cancellation():
    """A disconnect after the response counts as status 200, not as 499."""

    async def route(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})
        # An ASGI server reports a disconnect as soon as the response is complete.
        await asyncio.sleep(0.2)

    sent, metrics = run_gate(route, [body_of(b""), 0.05, DISCONNECT])
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert 'neobert_requests_total{route="/v1/embeddings",status="200"} 1.0' in metrics


@pytest.mark.parametrize(
    ("messages", "headers"),
    [
        ([body_of(b"12345", True), body_of(b"6789", True)], []),
        ([], [(b"content-length", b"9")]),
    ],
)
def test_a_large_body_is_refused(monkeypatch, messages, headers):
    """A body above the limit gets status 413, with or without a Content-Length header."""

    async def route(scope, receive, send):
        raise AssertionError("the route has started")

    monkeypatch.setattr(middleware, "MAX_REQUEST_BYTES", 8)
    sent, _ = run_gate(route, messages, headers)
    assert sent[0]["status"] == 413 and b"at most 8 bytes" in sent[1]["body"]


def test_a_slow_body_is_refused():
    """A body that is not complete before the deadline gets status 408."""

    async def route(scope, receive, send):
        raise AssertionError("the route has started")

    sent, _ = run_gate(route, [body_of(b"1", True), 30.0], timeout=0.1)
    assert sent[0]["status"] == 408 and b"within 0.1 s" in sent[1]["body"]


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_body_of_a_route_without_a_key_is_not_read(path):
    """A client without an API key cannot make the server store its bodies."""

    async def route(scope, receive, send):
        await send({"type": "http.response.start", "status": 405, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    # The rest of the body never arrives.
    sent, _ = run_gate(route, [body_of(b"1", True)], timeout=0.1, path=path)
    assert sent[0]["status"] == 405


def test_bodies_of_all_requests_share_a_limit(monkeypatch):
    """A request is refused while the bodies of other requests in progress fill the limit."""
    monkeypatch.setattr(middleware, "MAX_STORED_BYTES", 8)
    metrics = Metrics()

    async def run():
        may_finish = asyncio.Event()

        async def route(scope, receive, send):
            await may_finish.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})

        gate = RequestGate(route, None, 5.0, ["/embed"], metrics)

        async def post(*messages):
            remaining = iter(messages)
            statuses = []

            async def receive():
                for message in remaining:
                    return message
                return await asyncio.Event().wait()

            async def send(message):
                if message["type"] == "http.response.start":
                    statuses.append((message["status"], dict(message["headers"])))

            scope = {"type": "http", "path": "/embed", "headers": []}
            await gate(scope, receive, send)
            return statuses[0]

        first = asyncio.create_task(post(body_of(b"123", True), body_of(b"45")))
        await asyncio.sleep(0.05)
        # The first request waits in its route. Its body and the next one exceed the limit.
        status, headers = await post(body_of(b"67", True), body_of(b"89", True))
        assert status == 429 and headers[b"retry-after"] == b"1"
        # The refused request has released its bytes.
        second = asyncio.create_task(post(body_of(b"678")))
        await asyncio.sleep(0.05)
        may_finish.set()
        assert [(await first)[0], (await second)[0]] == [200, 200]
        # All bytes have been released.
        assert (await post(body_of(b"12345678")))[0] == 200

    asyncio.run(asyncio.wait_for(run(), 20))


def test_requests_are_counted_by_route_and_status(client):
    """Requests are counted by route and status. All unknown paths share the route "other"."""

    def count(route, status):
        line = f'neobert_requests_total{{route="{route}",status="{status}"}} '
        lines = client.get("/metrics").text.splitlines()
        return next((float(x.removeprefix(line)) for x in lines if x.startswith(line)), 0)

    labels = [("/embed", 200), ("/embed", 400), ("other", 404), ("/v1/models/{name}", 200)]
    before = [count(*label) for label in labels]
    client.post("/embed", json={"inputs": "a"})
    client.post("/embed", json={})
    client.get("/a")
    client.get("/b")
    name = client.get("/v1/models").json()["data"][0]["id"]
    assert client.get(f"/v1/models/{name}").status_code == 200
    after = [count(*label) for label in labels]
    assert [new - old for new, old in zip(after, before)] == [1, 1, 2, 1]
    assert 'route="/a"' not in client.get("/metrics").text
