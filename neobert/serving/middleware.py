"""Access, limits, deadline, cancellation and metrics of every request."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Collection

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import error_response
from .metrics import Metrics
from .options import MAX_REQUEST_BYTES, MAX_STORED_BYTES


# Routes that need no API key and read no body.
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
        # Regular expression of each route, with the label of the route in the metrics.
        self._labels = [compile_path(path)[:2] for path in routes]
        self.metrics = metrics
        self._api_key = None if api_key is None else api_key.encode()
        # Size of the bodies of all requests in progress.
        self._stored_bytes = 0

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
            route = self._label(scope["path"])
            # Starlette answers with 500 after an exception.
            status = response.status or 500
            self.metrics.requests.labels(route, status).inc()
            self.metrics.request_seconds.labels(route).observe(time.perf_counter() - start)

    def _label(self, path: str) -> str:
        """Return the label of a path in the metrics, such as "/v1/models/{name}"."""
        # Arbitrary paths would create a time series each.
        return next((label for pattern, label in self._labels if pattern.match(path)), "other")

    async def _handle(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        """Read the body of a request, and run its route or refuse the request."""
        # These bodies are not read, because clients without a key must not fill the memory.
        if scope["path"] in OPEN_ROUTES:
            await self.app(scope, receive, response.send)
            return

        # Reading the body and running the route share one deadline.
        deadline = time.monotonic() + self.timeout
        try:
            self._check_key(scope)
            async with self._stored_body(scope, receive) as body:
                if body is None:
                    response.status = CLIENT_CLOSED
                else:
                    await self._run_route(scope, receive, response, body, deadline)
        except _Refused as error:
            answer = error_response(scope["path"], error.status, error.message, error.headers)
            await answer(scope, receive, response.send)

    async def _run_route(
        self,
        scope: Scope,
        receive: Receive,
        response: "_Response",
        body: bytes,
        deadline: float,
    ) -> None:
        """Run the route of a request until the deadline, or until the client disconnects.

        Raises:
            _Refused: If the deadline passes before the response has started.
        """
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
                raise _Refused(503, message, {"Retry-After": "1"})
        finally:
            # Neither task may outlive the request, even if the server cancels the request.
            await _cancel(disconnect)
            await _cancel(route)

    def _check_key(self, scope: Scope) -> None:
        """Raise _Refused unless a request has the API key of the server."""
        if self._api_key is None:
            return
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        # The name of the scheme is case-insensitive (RFC 7235).
        scheme, _, key = authorization.partition(b" ")
        # The comparison takes the same time for all keys, so a key cannot be guessed bytewise.
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key, self._api_key):
            message = "the API key must be sent as a bearer token, got none or another key."
            raise _Refused(401, message, {"WWW-Authenticate": "Bearer"})

    @contextlib.asynccontextmanager
    async def _stored_body(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes | None]:
        """Yield the body of a request, which is stored until the end of the block.

        Yields:
            Body; None if the client has disconnected.

        Raises:
            _Refused: If the body is too large or too slow, or if all bodies are too large together.
        """
        # A large body is refused before it is read, if its length is announced.
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > MAX_REQUEST_BYTES:
            raise _too_large()

        size = 0

        async def read() -> bytes | None:
            nonlocal size
            received = bytearray()
            # A client may announce no length or a wrong one, so the received bytes are counted.
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                chunk = message.get("body", b"")
                received += chunk
                size += len(chunk)
                self._stored_bytes += len(chunk)

                if size > MAX_REQUEST_BYTES:
                    raise _too_large()
                if self._stored_bytes > MAX_STORED_BYTES:
                    raise _Refused(
                        429,
                        "the bodies of all requests in progress must have at most "
                        f"{MAX_STORED_BYTES} bytes. Retry later.",
                        {"Retry-After": "1", "Connection": "close"},
                    )
                if not message.get("more_body"):
                    return bytes(received)

        try:
            try:
                body = await asyncio.wait_for(read(), self.timeout)
            except asyncio.TimeoutError:
                message = f"the body must arrive within {self.timeout:g} s. Send a smaller request."
                raise _Refused(408, message, {"Connection": "close"}) from None
            yield body
        finally:
            self._stored_bytes -= size


class _Refused(Exception):
    """Error response of the middleware. Without a complete body, the connection must be closed."""

    def __init__(self, status: int, message: str, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers


def _too_large() -> _Refused:
    message = f"the body must have at most {MAX_REQUEST_BYTES} bytes. Send fewer texts."
    return _Refused(413, message, {"Connection": "close"})


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
