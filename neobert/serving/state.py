"""Models, queues and metrics of one worker process."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from starlette.exceptions import HTTPException

from ..common.loading import choose_device
from .batcher import Batcher
from .inputs import Body
from .metrics import Metrics
from .models import Classifier, Encoder, Item, Tokens, check_characters
from .options import ServeOptions


ResultT = TypeVar("ResultT")


class State:
    """Models, queues and metrics of one worker process.

    Args:
        options: Options of the server.

    Raises:
        UserError: If a model cannot be loaded.
    """

    def __init__(self, options: ServeOptions) -> None:
        models = options.models
        self.options = options
        self.metrics = Metrics()
        self.device = choose_device(models.device)
        self.encoder = Encoder(options)
        self.dtype = self.encoder.packed_encoder.dtype_name
        # "auto" has been resolved, so all models have the dtype of the encoder.
        dtype = self.encoder.packed_encoder.dtype

        self._reranker: Classifier | None = None
        self._classifier: Classifier | None = None
        if models.reranker is not None:
            self._reranker = Classifier.load_reranker(models.reranker, dtype, options)
        if models.classifier is not None:
            self._classifier = Classifier.load_classifier(models.classifier, dtype, options)

        # One thread runs all models, so they do not compete for the cores. Another one runs the
        # tokenizers. A fast tokenizer stores truncation as mutable state, so two calls must not
        # overlap.
        self._model_thread = ThreadPoolExecutor(1, "models")
        self._tokenizer_thread = ThreadPoolExecutor(1, "tokenizers")

        self.embed_batcher: Batcher[Tokens, np.ndarray] = self._make_batcher(
            "encoder", self.encoder.embed
        )
        if self._reranker is not None:
            self.rerank_batcher: Batcher[np.ndarray, np.ndarray] = self._make_batcher(
                "reranker", self._reranker.logits
            )
        if self._classifier is not None:
            self.classify_batcher: Batcher[np.ndarray, np.ndarray] = self._make_batcher(
                "classifier", self._classifier.logits
            )

    def _make_batcher(self, name: str, function: Callable) -> Batcher:
        return Batcher(
            name,
            function,
            self._model_thread,
            self.encoder.packed_encoder.batch_tokens,
            self.options.requests.queue_tokens,
            self.metrics,
        )

    def close(self) -> None:
        """End the threads after the batch in progress."""
        self._model_thread.shutdown(cancel_futures=True)
        self._tokenizer_thread.shutdown(cancel_futures=True)

    def truncates(self, body: Body) -> bool:
        """Return whether long texts of a request are truncated."""
        return self.options.requests.truncate if body.truncate is None else body.truncate

    @property
    def reranker(self) -> Classifier:
        """Reranker of the server.

        Raises:
            HTTPException: If there is none.
        """
        if self._reranker is None:
            raise HTTPException(404, "no reranker is loaded. Start the server with --reranker.")
        return self._reranker

    @property
    def classifier(self) -> Classifier:
        """Classifier of the server.

        Raises:
            HTTPException: If there is none.
        """
        if self._classifier is None:
            raise HTTPException(404, "no classifier is loaded. Start the server with --classifier.")
        return self._classifier

    @property
    def names(self) -> list[str]:
        """Names of the models in the API."""
        # The properties would raise an error for a model that is not loaded.
        models = (self.encoder, self._reranker, self._classifier)
        return [model.name for model in models if model is not None]

    async def embed(
        self, items: Sequence[Item], prompt_name: str | None, body: Body
    ) -> tuple[list[np.ndarray], int]:
        """Return the embeddings of texts or token ids, and the number of their tokens."""
        tokens = await self._tokenize(
            self.encoder.tokenize, items, prompt_name, self.truncates(body)
        )
        return await self.embed_batcher.run(tokens), sum(map(len, tokens))

    async def rerank_logits(
        self, query: str, documents: Sequence[str], body: Body
    ) -> tuple[list[np.ndarray], int]:
        """Return the logits of documents for a query, and the number of tokens of the pairs.

        Raises:
            HTTPException: 413 if the pairs have too many characters.
        """
        check_characters(len(documents) * len(query) + sum(map(len, documents)))
        pairs = [(query, document) for document in documents]
        tokens = await self._tokenize(self.reranker.tokenize, pairs, self.truncates(body))
        return await self.rerank_batcher.run(tokens), sum(map(len, tokens))

    async def classify_logits(
        self, texts: Sequence[tuple[str, ...]], body: Body
    ) -> list[np.ndarray]:
        """Return the logits of texts and pairs.

        Raises:
            HTTPException: 413 if the texts have too many characters.
        """
        check_characters(sum(len(text) for item in texts for text in item))
        tokens = await self._tokenize(self.classifier.tokenize, texts, self.truncates(body))
        return await self.classify_batcher.run(tokens)

    async def _tokenize(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        # Long texts would block the event loop.
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizer_thread, function, *arguments)


def check_model_name(name: str | None, model: str, path: str | None) -> None:
    """Raise HTTPException unless a request names no model or this one.

    Args:
        name: Name in the request.
        model: Name of the model in the API.
        path: Value of the option that selects the model. It is accepted, too.
    """
    if name not in (None, model, path):
        raise HTTPException(404, f"`model` must be {model!r}, got {name!r}.")
