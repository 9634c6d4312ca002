"""HTTP server with embeddings in the form of OpenAI, and reranker scores in that of Cohere.

    pip install '.[eval,server]'
    python examples/serve.py --model examples/sentence-encoder --dtype int8
    python examples/serve.py --model examples/sentence-encoder --reranker runs/reranker

Waiting texts of all requests run together, oldest first and without padding, in batches with a
token budget; one thread runs the models. The embedding of a text has the same bits alone and beside
other texts. Errors are one sentence: 400 for an invalid request, 404 for an unknown model, 429 if
too many tokens are waiting, 413 for more tokens than may ever wait. No prompt is added to a text.
After SIGTERM the server accepts no new requests and finishes those in progress.

Token IDs in `input` are IDs of this model's tokenizer, with its special tokens. Clients that send
IDs of other tokenizers must send text (LangChain: `check_embedding_ctx_length=False`).
"""

import argparse
import asyncio
import base64
import re
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from sentence_transformers import CrossEncoder
from starlette.exceptions import HTTPException

from neobert import quantize_int8
from neobert.common.constants import CPU_TOKENS
from neobert.common.errors import UserError
from neobert.common.loading import check_model
from neobert.common.packing import pack
from neobert.common.scripts import run_script
from neobert.embeddings.packed_encoder import PackedEncoder


INPUT_RULE = "must be a string, a list of strings, a list of token IDs or a list of such lists"


def as_list(value: Any) -> list:
    """Return the `input` of a request as a list of texts or of lists of token IDs."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("input", INPUT_RULE)
    return [value] if value and all(isinstance(item, int) for item in value) else value


def type_of(item: Any) -> str | None:
    return "text" if isinstance(item, str) else "tokens" if isinstance(item, list) else None


Text = Annotated[str, Field(max_length=100_000)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=2048)]
InputText = Annotated[str, Field(min_length=1, max_length=100_000), Tag("text")]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, strict=True)]],
    Field(min_length=1, max_length=100_000),
    Tag("tokens"),
]
Item = Annotated[
    InputText | TokenIds,
    Discriminator(type_of, custom_error_type="input", custom_error_message=INPUT_RULE),
]


class Embeddings(BaseModel):
    """Body of /v1/embeddings; unknown fields are ignored."""

    input: Annotated[list[Item], Field(min_length=1, max_length=2048), BeforeValidator(as_list)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None


class Rerank(BaseModel):
    """Body of /rerank; unknown fields are ignored."""

    query: Text
    model: str | None = None
    documents: Texts
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: Literal[False] = False


class Batches:
    """Tokenized texts that wait for `function`, which takes at most `budget` tokens at once.

    Args:
        function: a list of token arrays to a result each.
        thread: an executor of one thread, where it runs.
        budget: a longer text is a batch of its own.
        limit: tokens that may wait.
    """

    def __init__(self, function, thread, budget, limit):
        self.function, self.thread, self.budget, self.limit = function, thread, budget, limit
        self.waiting, self.tokens, self.worker = deque(), 0, None

    async def run(self, texts):
        """Results of token arrays, once their turn has come, and their tokens."""
        tokens = sum(map(len, texts))
        if self.tokens + tokens > self.limit:
            told = f"{self.tokens} tokens wait; with these {tokens} more than {self.limit} would"
            raise HTTPException(413 if tokens > self.limit else 429, told, {"Retry-After": "1"})
        futures = [asyncio.get_running_loop().create_future() for _ in texts]
        self.waiting.extend(zip(texts, futures))
        self.tokens += tokens
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self.work())
        return await asyncio.gather(*futures), {"prompt_tokens": tokens, "total_tokens": tokens}

    async def work(self):
        while self.waiting:
            batch, tokens = [], 0
            while self.waiting and (not batch or tokens + len(self.waiting[0][0]) <= self.budget):
                batch.append(self.waiting.popleft())
                tokens += len(batch[-1][0])
            texts, futures = zip(*batch)
            try:
                results = await asyncio.wrap_future(self.thread.submit(self.function, texts))
            except Exception as error:
                results = [error] * len(futures)
            for future, result in zip(futures, results):
                if future.done():  # its client has gone
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
            self.tokens -= tokens


def describe(error: dict[str, Any]) -> str:
    """Return an error of pydantic as one sentence."""
    if error["type"] == "json_invalid":
        return f"the body must be valid JSON: {error['ctx']['error']}."
    path = ""
    for part in error["loc"][1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("text", "tokens"):  # the tags of the union
            path += f".{part}" if path else part
    name = f"`{path}`" if path else "the body"
    if error["type"] == "missing":
        return f"{name} is required."
    rule = re.sub(r"^(Input|List|String|Value) should ", "must ", error["msg"])
    return f"{name} {rule}."


async def refused(request: Request, error: Exception) -> JSONResponse:
    """Return an error as one sentence, in the form of OpenAI."""
    if isinstance(error, RequestValidationError):
        error = HTTPException(400, describe(error.errors()[0]))
    content = {"message": error.detail, "type": "invalid_request_error", "code": error.status_code}
    return JSONResponse({"error": content}, error.status_code, error.headers)


def check_name(name: str | None, model: str) -> None:
    """Raise 404 unless `name` is absent, the path of the model or the last part of its path."""
    if name not in (None, model, Path(model).name):
        raise HTTPException(404, f"`model` must be {model!r}, got {name!r}.")


def shortened(embeddings: list[np.ndarray], dimensions: int, normalize: bool) -> list[np.ndarray]:
    """Return the first `dimensions` values of each embedding, scaled to length 1 again."""
    embeddings = [embedding[:dimensions] for embedding in embeddings]
    if not normalize:
        return embeddings
    smallest = np.finfo(np.float32).tiny
    return [embedding / max(np.linalg.norm(embedding), smallest) for embedding in embeddings]


def load_reranker(args: argparse.Namespace) -> CrossEncoder:
    """Load the CrossEncoder of `--reranker`."""
    check_model(args.reranker)
    reranker = CrossEncoder(args.reranker, device="cpu", model_kwargs={"dtype": torch.float32})
    if reranker.model.config.model_type != "neobert" or reranker.num_labels != 1:
        raise UserError(f"{args.reranker} must be a NeoBERT reranker with one score per pair.")
    if args.dtype == "int8":
        quantize_int8(reranker.model)
    return reranker


def make_app(args: argparse.Namespace) -> FastAPI:
    """Return the application for the options of the command line."""
    app = FastAPI(exception_handlers={HTTPException: refused, RequestValidationError: refused})
    if args.reranker:
        check_model(args.reranker)
    encoder = PackedEncoder(args.model, args.dtype, "cpu", args.tokens_per_batch)
    reranker = load_reranker(args) if args.reranker else None
    names = [args.model, args.reranker] if reranker else [args.model]
    vocabulary_size = encoder.sentence_transformer[0].auto_model.config.vocab_size

    # One thread each for the models and the tokenizers.
    model, tokenizer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    waiting_texts = Batches(encoder.embed, model, args.tokens_per_batch, args.queue)

    def tokenize_input(items):
        """Return the token IDs of all items of `input`, and their lengths before truncation."""
        texts = [item for item in items if isinstance(item, str)]
        text_lengths = []
        text_tokens = iter(encoder.tokenize(texts, lengths=text_lengths) if texts else [])
        text_lengths = iter(text_lengths)

        tokens, lengths = [], []
        for item in items:
            if isinstance(item, str):
                tokens.append(next(text_tokens))
                lengths.append(next(text_lengths))
            else:
                tokens.append(np.asarray(item[: encoder.max_length], dtype=np.int32))
                lengths.append(len(item))
        return tokens, lengths

    def check_lengths(name, lengths, limit):
        for index, length in enumerate(lengths):
            if limit and length > limit and not args.truncate:
                raise HTTPException(
                    400,
                    f"`{name}[{index}]` must have at most {limit} tokens, got {length}. Shorten "
                    "it, or start the server with --truncate.",
                )

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models():
        data = [{"id": name, "object": "model", "created": 0, "owned_by": ""} for name in names]
        return {"object": "list", "data": data}

    @app.post("/v1/embeddings")
    async def embeddings(body: Embeddings):
        check_name(body.model, args.model)
        if body.dimensions and body.dimensions > encoder.embedding_dimension:
            raise HTTPException(
                400,
                f"`dimensions` must be at most {encoder.embedding_dimension}, got "
                f"{body.dimensions}.",
            )
        for index, item in enumerate(body.input):
            if isinstance(item, list) and max(item) >= vocabulary_size:
                raise HTTPException(
                    400,
                    f"`input[{index}]` must have token IDs below {vocabulary_size}, got "
                    f"{max(item)}. Send IDs of this model's tokenizer, or text.",
                )

        tokens, lengths = await asyncio.wrap_future(tokenizer.submit(tokenize_input, body.input))
        check_lengths("input", lengths, encoder.max_length)
        results, usage = await waiting_texts.run(tokens)

        if body.dimensions:
            results = shortened(results, body.dimensions, encoder.normalizes)
        if body.encoding_format == "base64":
            results = [base64.b64encode(row.astype("<f4")).decode() for row in results]
        else:
            results = [row.tolist() for row in results]
        data = [
            {"object": "embedding", "index": index, "embedding": row}
            for index, row in enumerate(results)
        ]
        return JSONResponse({"object": "list", "data": data, "model": args.model, "usage": usage})

    def tokenize_pairs(query, documents):
        """Return the token IDs of all pairs, and their lengths before truncation."""
        queries = [query] * len(documents)
        limit = reranker.max_seq_length
        tokens = reranker.tokenizer(queries, documents, truncation=True, max_length=limit)
        complete = reranker.tokenizer(queries, documents, verbose=False)
        return tokens["input_ids"], list(map(len, complete["input_ids"]))

    @torch.inference_mode()
    def score(tokens):
        logits = reranker.model(**pack(tokens)).logits
        return reranker.activation_fn(logits)[:, 0].tolist()

    waiting_pairs = Batches(score, model, args.tokens_per_batch, args.queue)

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def rerank(body: Rerank):
        if reranker is None:
            raise HTTPException(404, "no reranker is loaded. Start the server with --reranker.")
        check_name(body.model, args.reranker)
        tokenized = tokenizer.submit(tokenize_pairs, body.query, body.documents)
        tokens, lengths = await asyncio.wrap_future(tokenized)
        check_lengths("documents", lengths, reranker.max_seq_length)
        scores, usage = await waiting_pairs.run(tokens)
        best = np.argsort(scores)[::-1][: body.top_n].tolist()
        results = [{"index": index, "relevance_score": scores[index]} for index in best]
        return {"object": "rerank", "results": results, "model": args.reranker, "usage": usage}

    print(
        f"model {args.model}, {args.dtype}, {encoder.embedding_dimension} dimensions, at most "
        f"{encoder.max_length} tokens per text; reranker {args.reranker or 'none'}; "
        f"http://{args.host}:{args.port}",
        file=sys.stderr,
    )
    return app


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Folder of a sentence encoder.")
    parser.add_argument("--reranker", help="Folder of a CrossEncoder for /rerank.")
    parser.add_argument("--dtype", default="float32", choices=("float32", "int8"))
    parser.add_argument(
        "--tokens-per-batch", type=int, default=CPU_TOKENS, help="Maximum tokens per batch."
    )
    parser.add_argument("--queue", type=int, default=200_000, help="Maximum tokens that wait.")
    parser.add_argument(
        "--truncate", action="store_true", help="Truncate long texts instead of refusing them."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    uvicorn.run(make_app(args), host=args.host, port=args.port, access_log=False)


if __name__ == "__main__":
    run_script(main)
