"""Errors of the server: one sentence, in the format of the API of the route."""

import re
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ..common.errors import UserError, one_line


# Routes whose errors do not have the format of OpenAI's API.
COHERE_ROUTES = ("/v1/rerank", "/v2/rerank")
TEI_ROUTES = ("/", "/embed", "/rerank", "/predict", "/info")

_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_TEI_TYPES = {401: "unauthorized", 429: "overloaded", 503: "overloaded"}


def error_response(
    path: str, status: int, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return the response about an error.

    Args:
        path: Path of the request, which determines the format.
        status: HTTP status.
        message: One sentence.
        headers: Further headers.
    """
    # The libraries of these APIs read the message from different fields.
    content: dict[str, Any]
    if path in COHERE_ROUTES:
        content = {"message": message}
    elif path in TEI_ROUTES:
        default = "validation" if status < 500 else "backend"
        content = {"error": message, "error_type": _TEI_TYPES.get(status, default)}
    else:
        default = "invalid_request_error" if status < 500 else "server_error"
        content = {
            "error": {
                "message": message,
                "type": _OPENAI_TYPES.get(status, default),
                "param": None,
                "code": status,
            }
        }

    return JSONResponse(content, status, headers)


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    """Return the response about an exception of a route."""
    path = request.url.path
    if isinstance(error, HTTPException):
        headers = dict(error.headers) if error.headers else None
        message = error.detail
        # FastAPI only reports that the body could not be parsed.
        if isinstance(error.__cause__, UnicodeDecodeError):
            message = f"the body must be JSON in UTF-8, got other bytes ({error.__cause__.reason})."
        return error_response(path, error.status_code, message, headers)
    if isinstance(error, RequestValidationError):
        # The first error is enough for a client to correct the request.
        return error_response(path, 400, describe_validation(error.errors()[0]))
    if isinstance(error, UserError):
        return error_response(path, 500, str(error))
    return error_response(path, 500, f"unexpected {type(error).__name__}: {one_line(error)}.")


def describe_validation(error: dict[str, Any]) -> str:
    """Return an error of pydantic as one sentence."""
    if error["type"] == "json_invalid":
        return f"the body must be valid JSON: {error['ctx']['error']}."
    if error["loc"] == ("body",) and error["type"] != "missing":
        return "the body must be a JSON object. Send it with `Content-Type: application/json`."

    path = ""
    # The location starts with the source of the value, which is not part of the path.
    for part in error["loc"][1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        # "text" and "tokens" are the tags of the union of texts and token ids.
        elif part not in ("text", "tokens"):
            path += f".{part}" if path else part

    name = f"`{path}`" if path else "the body"
    if error["type"] == "missing":
        return f"{name} is required."
    # pydantic describes a rule with should, the messages of this package with must.
    rule = re.sub(r"^(Input|List|String|Value) should ", "must ", error["msg"])
    rule = re.sub(r" after validation, not (\d+)$", r", got \1", rule)
    return f"{name} {rule}."
