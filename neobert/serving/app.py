"""Application of one worker process: the routes around its models."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from . import openai, rerank, tei
from .errors import handle_error
from .middleware import OPEN_ROUTES, RequestGate
from .options import ServeOptions
from .state import State


def create_app(options: ServeOptions) -> FastAPI:
    """Load the models, and return the application.

    Raises:
        UserError: If a model cannot be loaded.
    """
    state = State(options)

    # The models are loaded before the application starts, and only their threads must be ended.
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    handlers: dict[int | type[Exception], Any] = {
        HTTPException: handle_error,
        RequestValidationError: handle_error,
        Exception: handle_error,
    }
    # The pages of FastAPI load their scripts from the internet.
    app = FastAPI(
        title="neobert serve",
        docs_url=None,
        redoc_url=None,
        exception_handlers=handlers,
        lifespan=lifespan,
    )
    # The command describes the models in its log.
    app.state.serving = state
    routers = [module.make_router(state) for module in (openai, rerank, tei)]
    for router in routers:
        app.include_router(router)

    # Monitors and `wget --spider` send HEAD, which FastAPI does not add to routes of GET.
    @app.head("/health")
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type="text/plain; version=0.0.4")

    # Requests to other paths than these routes share one label in the metrics.
    app.add_middleware(
        RequestGate,
        api_key=options.server.key,
        timeout=options.requests.timeout,
        routes=[*OPEN_ROUTES, *(route.path for router in routers for route in router.routes)],
        metrics=state.metrics,
    )
    return app
