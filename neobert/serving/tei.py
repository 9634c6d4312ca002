"""Routes of Text Embeddings Inference: `/embed`, `/rerank`, `/predict` and `/info`."""

from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Response
from pydantic import BaseModel, Field, model_validator

from ..common import __version__
from .inputs import Body, Dimensions, Input, Items, Text
from .openai import json_response
from .options import MAX_TEXTS
from .rerank import best_first
from .state import State


class TeiBody(Body):
    """Fields of all bodies of Text Embeddings Inference.

    Attributes:
        truncation_direction: Side at which long texts are truncated.
    """

    # Clients of this API use both spellings.
    truncation_direction: Literal["right", "Right"] = "right"


class EmbedBody(TeiBody):
    """Body of `/embed`."""

    inputs: Input
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: Dimensions = None


class RerankBody(TeiBody):
    """Body of `/rerank`."""

    query: Text
    texts: Items[Text]
    raw_scores: bool = False
    return_text: bool = False


class PredictParameters(BaseModel):
    """Parameters of the text classification of Hugging Face's InferenceClient."""

    top_k: Annotated[int, Field(ge=1)] | None = None
    function_to_apply: Literal["none", "sigmoid", "softmax"] | None = None


class PredictBody(TeiBody):
    """Body of `/predict`.

    Attributes:
        inputs: Texts and pairs, lists of one string or two strings. A string and a pair of strings
            are accepted, too.
        parameters: Parameters of InferenceClient, which expects a list of lists for one text, too.
        is_batch: Whether the response has a list of predictions per text or pair; set by `inputs`.
    """

    inputs: Items[Annotated[list[Text], Field(min_length=1, max_length=2, fail_fast=True)]]
    raw_scores: bool = False
    parameters: PredictParameters | None = None
    is_batch: bool = True

    @model_validator(mode="before")
    @classmethod
    def _wrap_single(cls, data: Any) -> Any:
        # pydantic reports a body that is no object, and one without inputs.
        if not isinstance(data, dict) or "inputs" not in data:
            return data

        inputs = data["inputs"]
        if isinstance(inputs, str):
            return {**data, "inputs": [[inputs]], "is_batch": False}

        # A list of strings is one pair, and a list of lists is a batch.
        is_pair = isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], str)
        return {**data, "inputs": [inputs] if is_pair else inputs, "is_batch": not is_pair}


def make_router(state: State) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/")
    @router.post("/embed")
    async def embed(body: EmbedBody) -> Response:
        state.encoder.check_dimensions(body.dimensions)
        rows, _ = await state.embed(body.inputs, body.prompt_name, body)
        rows = state.encoder.truncate_and_normalize(rows, body.dimensions, body.normalize)
        return json_response([row.tolist() for row in rows])

    @router.post("/rerank")
    async def rerank(body: RerankBody) -> list[dict[str, Any]]:
        # Unlike the routes of Cohere, this API applies a sigmoid, whatever the model applies.
        logits, _ = await state.rerank_logits(body.query, body.texts, body)
        scores = np.stack(logits)[:, 0]
        if not body.raw_scores:
            scores = torch.from_numpy(scores).sigmoid().numpy()

        results = []
        for index in best_first(scores):
            result: dict[str, Any] = {"index": index, "score": float(scores[index])}
            if body.return_text:
                result["text"] = body.texts[index]
            results.append(result)
        return results

    @router.post("/predict")
    async def predict(body: PredictBody) -> list[Any]:
        classifier = state.classifier
        parameters = body.parameters or PredictParameters()
        function = "none" if body.raw_scores else parameters.function_to_apply

        logits = await state.classify_logits([tuple(item) for item in body.inputs], body)
        # Labels are sorted by their score, as in the API.
        predictions = [
            [
                {"score": float(row[index]), "label": classifier.labels[index]}
                for index in best_first(row)[: parameters.top_k]
            ]
            for row in classifier.probabilities(logits, function)
        ]
        # InferenceClient sends parameters, and expects a list of lists for one text.
        is_batch = body.is_batch or body.parameters is not None
        return predictions if is_batch else predictions[0]

    @router.get("/info")
    async def info() -> dict[str, Any]:
        # Fields without a counterpart in this server are None.
        encoder = state.encoder
        return {
            "model_id": encoder.name,
            "model_sha": None,
            "model_dtype": state.dtype,
            "model_type": {"embedding": {"pooling": encoder.packed_encoder.pooling}},
            "max_concurrent_requests": None,
            "max_input_length": encoder.max_length,
            "max_batch_tokens": encoder.packed_encoder.batch_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": MAX_TEXTS,
            "auto_truncate": state.options.requests.truncate,
            "tokenization_workers": 1,
            "version": __version__,
        }

    return router
