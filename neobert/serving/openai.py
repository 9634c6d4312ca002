"""Routes of the OpenAI API: `/v1/embeddings`, `/v1/models` and `/v1/models/{name}`."""

import base64
from typing import Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

from .inputs import Body, Dimensions, Input
from .state import State, check_model_name


class EmbeddingsBody(Body):
    """Body of `/v1/embeddings`.

    Attributes:
        encoding_format: Format of the embeddings; null means "float", as in the API.
        prompt_name: Name of a prompt of the model to prepend to each text, an extension.
    """

    input: Input
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions = None
    prompt_name: str | None = None


def json_response(content: Any) -> Response:
    """Return a JSON response, encoded by msgspec, which is fast for many numbers."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def make_router(state: State) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsBody) -> Response:
        check_model_name(body.model, state.encoder.name, state.options.models.model)
        state.encoder.check_dimensions(body.dimensions)

        rows, tokens = await state.embed(body.input, body.prompt_name, body)
        rows = state.encoder.truncate_and_normalize(rows, body.dimensions)
        data = [
            {"object": "embedding", "index": index, "embedding": encode(row, body.encoding_format)}
            for index, row in enumerate(rows)
        ]
        return json_response(
            {
                "object": "list",
                "data": data,
                "model": state.encoder.name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [describe_model(name) for name in state.names]}

    # The name of a model on the Hub contains a slash.
    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in state.names:
            names = ", ".join(state.names)
            raise HTTPException(404, f"the model must be one of {names}, got {name!r}.")
        return describe_model(name)

    return router


def describe_model(name: str) -> dict[str, Any]:
    """Return a model in the format of the API."""
    # The format has a time of creation, which is not stored.
    return {"id": name, "object": "model", "created": 0, "owned_by": "neobert"}


def encode(embedding: np.ndarray, encoding_format: str | None) -> list[float] | str:
    """Return an embedding as a list of floats, or as base64 of little-endian float32."""
    # The Python client of OpenAI requests base64 by default, which is smaller than JSON numbers.
    if encoding_format == "base64":
        return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
    return embedding.tolist()
