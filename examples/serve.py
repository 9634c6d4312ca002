"""An HTTP server: vectors in OpenAI's form, a reranker's scores in Cohere's and infinity's.

    pip install '.[eval,server]'
    python examples/serve.py --model examples/sentence-encoder --dtype int8
    python examples/serve.py --model examples/sentence-encoder --reranker runs/reranker

The waiting texts of all requests run together, oldest first and without padding, in batches of a
budget of tokens; one thread runs the models. A text's vector has the same bits alone and beside
others. What is refused gets one sentence: 400 for what is wrong, 429 while too many tokens wait,
413 for more tokens than may ever wait. A text is taken as it is: put a query's instruction before
it. SIGTERM takes nothing new and finishes what is under way.
"""

import argparse
import asyncio
import base64
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, Field
from sentence_transformers import CrossEncoder
from starlette.exceptions import HTTPException

from neobert import quantize_int8
from neobert.common.constants import CPU_TOKENS
from neobert.common.packing import pack
from neobert.embeddings.packed_encoder import PackedEncoder


Text = Annotated[str, Field(max_length=100_000)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=2048)]
OneOrMore = BeforeValidator(lambda given: [given] if isinstance(given, str) else given)


class Embeddings(BaseModel):
    """The body of /v1/embeddings; fields that are not here are ignored."""

    input: Annotated[Texts, OneOrMore]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None  # others than the model's are refused


class Rerank(BaseModel):
    """The body of /rerank."""

    query: Text
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


async def refused(request, error):
    """One sentence, in the form of OpenAI's errors."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = HTTPException(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    content = {"message": error.detail, "type": "invalid_request_error", "code": error.status_code}
    return JSONResponse({"error": content}, error.status_code, error.headers)


def make_app(args):
    """The application; `args` as of the command line."""
    app = FastAPI(exception_handlers={HTTPException: refused, RequestValidationError: refused})
    encoder = PackedEncoder(args.model, args.dtype, "cpu", args.tokens_per_batch)
    model, tokenizer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)  # one thread each
    limits = model, args.tokens_per_batch, args.queue
    vectors = Batches(encoder.embed, *limits)

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    @app.post("/v1/embeddings")
    async def embeddings(body: Embeddings):
        lengths = []
        tokenized = tokenizer.submit(encoder.tokenize, body.input, lengths=lengths)
        texts, most = await asyncio.wrap_future(tokenized), encoder.max_length
        if max(lengths) > most and not args.truncate:
            index = next(index for index, length in enumerate(lengths) if length > most)
            raise HTTPException(400, f"input.{index} has {lengths[index]} tokens, more than {most}")
        found, usage = await vectors.run(texts)
        if body.encoding_format == "base64":
            found = [base64.b64encode(vector.astype("<f4")).decode() for vector in found]
        else:
            found = [vector.tolist() for vector in found]
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(found)
        ]
        return JSONResponse({"object": "list", "data": data, "model": args.model, "usage": usage})

    if not args.reranker:
        return app
    reranker = CrossEncoder(args.reranker, device="cpu", model_kwargs={"dtype": torch.float32})
    if reranker.model.config.model_type != "neobert" or reranker.num_labels != 1:
        raise ValueError(f"{args.reranker} is no NeoBERT with one score for a pair")
    if args.dtype == "int8":
        quantize_int8(reranker.model)

    def tokenize_pairs(query, documents):
        cut = {"truncation": True, "max_length": reranker.max_seq_length}
        return reranker.tokenizer([query] * len(documents), documents, **cut)["input_ids"]

    @torch.inference_mode()
    def score(texts):
        logits = reranker.model(**pack(texts)).logits
        return reranker.activation_fn(logits)[:, 0].tolist()

    pairs = Batches(score, *limits)

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def rerank(body: Rerank):
        tokenized = tokenizer.submit(tokenize_pairs, body.query, body.documents)
        scores, usage = await pairs.run(await asyncio.wrap_future(tokenized))
        best = np.argsort(scores)[::-1][: body.top_n].tolist()
        results = [{"index": index, "relevance_score": scores[index]} for index in best]
        return {"object": "rerank", "results": results, "model": args.reranker, "usage": usage}

    return app


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a sentence encoder")
    parser.add_argument("--reranker", help="folder of a CrossEncoder: /rerank")
    parser.add_argument("--dtype", default="float32", choices=("float32", "int8"))
    parser.add_argument("--tokens-per-batch", type=int, default=CPU_TOKENS)
    parser.add_argument("--queue", type=int, default=200_000, help="tokens that may wait")
    help = "cut a text that is too long; by default it is refused"
    parser.add_argument("--truncate", action="store_true", help=help)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args(argv)


def main():
    args = parse()
    uvicorn.run(make_app(args), host=args.host, port=args.port, access_log=False)


if __name__ == "__main__":
    from one_line import run  # an error is one line; a copy of this file calls main()

    run(main)
