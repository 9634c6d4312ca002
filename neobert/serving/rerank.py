"""Routes of Cohere and Jina: `/v1/rerank` and `/v2/rerank`."""

import uuid
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter
from pydantic import BeforeValidator, Field

from .inputs import Body, Items, Text
from .state import State, check_model_name


def _text_of(document: Any) -> Any:
    """Return the text of a document that is an object, as older clients of Cohere and Jina send."""
    return document.get("text") if isinstance(document, dict) else document


class RerankBody(Body):
    """Body of the rerank routes."""

    query: Text
    documents: Items[Annotated[Text, BeforeValidator(_text_of)]]
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False


def make_router(state: State) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    async def rerank(body: RerankBody) -> dict[str, Any]:
        check_model_name(body.model, state.reranker.name, state.options.models.reranker)
        logits, tokens = await state.rerank_logits(body.query, body.documents, body)
        scores = state.reranker.scores(logits)
        results = []
        # Without `top_n`, the slice contains all documents.
        for index in best_first(scores)[: body.top_n]:
            result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
            if body.return_documents:
                result["document"] = {"text": body.documents[index]}
            results.append(result)
        return {
            "id": str(uuid.uuid4()),
            "object": "list",
            "model": state.reranker.name,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    return router


def best_first(scores: np.ndarray) -> list[int]:
    """Return the indices of scores in descending order; equal scores keep their order."""
    # Negated scores, because reversing an ascending order would reverse equal scores.
    return np.argsort(-scores, kind="stable").tolist()
