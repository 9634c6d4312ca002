"""Access, limits, deadline, cancellation and metrics of every request."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import error_response
from .metrics import Metrics
from .options import MAX_REQUEST_BYTES


# Routes that need no API key.
OPEN_ROUTES = ("/health", "/metrics")
# Status of nginx for a client that disconnected. It appears in the metrics only.
CLIENT_CLOSED = 499


class RequestGate:
    """ASGI middleware around the routes.

    The body is read completely before the route runs, so the route can be cancelled as soon as
    the client disconnects.

    Args:
        app: Application.
        api_key: API key, None for an open server.
        timeout: Deadline of a request in seconds.
        routes: Paths of the application, the labels in the metrics.
        metrics: Metrics of the process.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        timeout: float,
        routes: Collection[str],
        metrics: Metrics,
    ) -> None:
        self.app = app
        self.timeout = timeout
        self.routes = frozenset(routes)
        self.metrics = metrics
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        start = time.perf_counter()
        response = _Response(send)
        try:
            await self._handle(scope, receive, response)
        finally:
            # Arbitrary paths would create a time series each.
            route = scope["path"] if scope["path"] in self.routes else "other"
            # Starlette answers with 500 after an exception.
            status = response.status or 500
            self.metrics.requests.labels(route, status).inc()
            self.metrics.request_seconds.labels(route).observe(time.perf_counter() - start)

    async def _handle(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        async def refuse(status: int, message: str, headers: dict[str, str]) -> None:
            answer = error_response(scope["path"], status, message, headers)
            await answer(scope, receive, response.send)

        if not self._is_authorized(scope):
            message = "the API key must be sent as a bearer token, got none or another key."
            await refuse(401, message, {"WWW-Authenticate": "Bearer"})
            return

        # Reading the body and running the route share one deadline.
        deadline = time.monotonic() + self.timeout
        try:
            body = await asyncio.wait_for(_read_body(scope, receive), self.timeout)
        except asyncio.TimeoutError:
            message = f"the body must arrive within {self.timeout:g} s. Send a smaller request."
            await refuse(408, message, {"Connection": "close"})
            return
        except _TooLarge:
            # The rest of the body is not read, so the connection cannot be used again.
            message = f"the body must have at most {MAX_REQUEST_BYTES} bytes. Send fewer texts."
            await refuse(413, message, {"Connection": "close"})
            return

        if body is None:
            response.status = CLIENT_CLOSED
            return

        # The route and a watcher of the connection run at the same time; the first to end decides.
        route = asyncio.ensure_future(self.app(scope, _replay(body), response.send))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait(
                (route, disconnect),
                timeout=deadline - time.monotonic(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if route.done():
                # A finished route raises its exception here.
                await route
                return

            # The deadline has passed, or the client has disconnected, maybe after its response.
            await _cancel(route)
            if response.is_complete:
                return
            if disconnect.done():
                response.status = CLIENT_CLOSED
            # A response that has started cannot be replaced by an error.
            elif response.status is None:
                message = f"the request took longer than {self.timeout:g} s. Retry later."
                await refuse(503, message, {"Retry-After": "1"})
        finally:
            # Neither task may outlive the request, even if the server cancels the request.
            await _cancel(disconnect)
            await _cancel(route)

    def _is_authorized(self, scope: Scope) -> bool:
        if self._api_key is None or scope["path"] in OPEN_ROUTES:
            return True
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        # The name of the scheme is case-insensitive (RFC 7235).
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # The comparison takes the same time for all keys, so a key cannot be guessed bytewise.
        return hmac.compare_digest(key, self._api_key)


class _Response:
    """Response of a request.

    Attributes:
        status: HTTP status; None before the response has started.
        is_complete: Whether the response has been sent.
    """

    def __init__(self, send: Send) -> None:
        self.status: int | None = None
        self.is_complete = False
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.is_complete = True


class _TooLarge(Exception):
    """Body above the limit."""


async def _read_body(scope: Scope, receive: Receive) -> bytes | None:
    """Return the body of a request; None if the client has disconnected.

    Raises:
        _TooLarge: If the body is too large.
    """
    # A large body is refused before it is read, if its length is announced.
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > MAX_REQUEST_BYTES:
        raise _TooLarge

    # A client may announce no length or a wrong one, so the received bytes are counted, too.
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_REQUEST_BYTES:
            raise _TooLarge
        if not message.get("more_body"):
            return bytes(body)


def _replay(body: bytes) -> Receive:
    """Return a `receive` that yields a body which has been read."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        # The middleware waits for the client to disconnect, and cancels the route.
        return await asyncio.get_running_loop().create_future()

    return receive


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(future: "asyncio.Future[None]") -> None:
    future.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await future
