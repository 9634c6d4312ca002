"""Run clients of other projects with `neobert serve`.

    python tests/engines/server_clients.py ADDRESS [CLIENT ...]

stdin is JSON, {"texts", "key"}. The program prints one line of JSON per client, {"client",
"version", "results"}.

Texts must be short. The first text is the query of the rerankers, and the others are the documents.
Embeddings are lists of floats. Scores are lists of [index, score] in the order of the client.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


# LangChain would download an encoding for tiktoken, which LiteLLM contains.
(_TOKENIZERS,) = Path(sys.prefix).glob("lib/python3*/site-packages/litellm/*/tokenizers")
os.environ["TIKTOKEN_CACHE_DIR"] = str(_TOKENIZERS)
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
# In its offline mode, huggingface_hub sends no requests at all, not even to a local server.
os.environ["HF_HUB_OFFLINE"] = "0"
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

MODEL = "sentence-encoder"
RERANKER = "reranker"


def use_openai(address: str, texts: list[str], key: str) -> dict[str, Any]:
    """Use the synchronous and the asynchronous client of OpenAI."""
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)

    def embed(**body: Any) -> list[list[float]]:
        response = client.embeddings.create(model=MODEL, **body)
        return [item.embedding for item in response.data]

    async def embed_async() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key) as client:
            response = await client.embeddings.create(model=MODEL, input=texts)
            return [item.embedding for item in response.data]

    errors = {}
    requests = {
        "model": (client, {"model": "other", "input": "a"}),
        "input": (client, {"model": MODEL, "input": []}),
        "key": (client.with_options(api_key="other"), {"model": MODEL, "input": "a"}),
    }
    for name, (caller, body) in requests.items():
        try:
            caller.embeddings.create(**body)
        except openai.APIStatusError as error:
            errors[name] = [type(error).__name__, error.status_code, error.body["message"]]
    return {
        "embeddings": embed(input=texts),
        "embeddings of floats": embed(input=texts, encoding_format="float"),
        "embeddings one by one": [embed(input=text)[0] for text in texts],
        "embeddings async": asyncio.run(embed_async()),
        "dimensions": embed(input=texts, dimensions=96),
        "models": [model.id for model in client.models.list()],
        "errors": errors,
    }


def use_cohere(address: str, texts: list[str], key: str) -> dict[str, Any]:
    """Use the clients of Cohere for versions 1 and 2 of its API."""
    import cohere

    results = {}
    for name, client_class in (("v1", cohere.Client), ("v2", cohere.ClientV2)):
        client = client_class(key, base_url=address)
        response = client.rerank(model=RERANKER, query=texts[0], documents=texts[1:])
        results[f"scores {name}"] = [
            [result.index, result.relevance_score] for result in response.results
        ]
        best = client.rerank(model=RERANKER, query=texts[0], documents=texts[1:], top_n=2)
        results[f"best {name}"] = [result.index for result in best.results]
    try:
        client.rerank(model="other", query=texts[0], documents=texts[1:])
    except cohere.NotFoundError as error:
        results["errors"] = {"model": ["NotFoundError", 404, error.body["message"]]}
    return results


def use_huggingface_hub(address: str, texts: list[str], key: str) -> dict[str, Any]:
    """Use the synchronous and the asynchronous InferenceClient of Hugging Face."""
    from huggingface_hub import AsyncInferenceClient, InferenceClient

    client = InferenceClient(address, token=key)
    classifier = InferenceClient(f"{address}/predict", token=key)

    async def embed_async() -> list[list[float]]:
        async with AsyncInferenceClient(address, token=key) as client:
            return (await client.feature_extraction(texts)).tolist()

    return {
        "embeddings": client.feature_extraction(texts).tolist(),
        "embeddings one by one": [client.feature_extraction(text)[0].tolist() for text in texts],
        "embeddings async": asyncio.run(embed_async()),
        "predictions": [
            {item.label: item.score for item in classifier.text_classification(text)}
            for text in texts
        ],
        "best predictions": [
            classifier.text_classification(text, top_k=1)[0].label for text in texts
        ],
    }


def use_langchain_openai(address: str, texts: list[str], key: str) -> dict[str, Any]:
    """Use LangChain's OpenAIEmbeddings, which sends token ids of cl100k_base, or text."""
    from langchain_openai import OpenAIEmbeddings

    ids = OpenAIEmbeddings(model=MODEL, base_url=f"{address}/v1", api_key=key)
    text = OpenAIEmbeddings(
        model=MODEL, base_url=f"{address}/v1", api_key=key, check_embedding_ctx_length=False
    )
    return {
        "embeddings of token ids": ids.embed_documents(texts),
        "embeddings of token ids one by one": [ids.embed_query(text) for text in texts],
        "embeddings": text.embed_documents(texts),
    }


def use_langchain_huggingface(address: str, texts: list[str], key: str) -> dict[str, Any]:
    """Use LangChain's HuggingFaceEndpointEmbeddings, whose `model` cannot be an address."""
    from huggingface_hub import InferenceClient
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    embeddings = HuggingFaceEndpointEmbeddings()
    embeddings.client = InferenceClient(address, token=key)
    return {
        "embeddings": embeddings.embed_documents(texts),
        "embeddings one by one": [embeddings.embed_query(text) for text in texts],
    }


def use_llama_index(address: str, texts: list[str], key: str) -> dict[str, Any]:
    """Use LlamaIndex with the APIs of OpenAI and of Text Embeddings Inference."""
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    openai = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{address}/v1", api_key=key)
    tei = TextEmbeddingsInference(model_name=MODEL, base_url=address, auth_token=key)
    reranker = TextEmbeddingInference(
        base_url=address, auth_token=f"Bearer {key}", top_n=len(texts)
    )
    nodes = [
        NodeWithScore(node=TextNode(text=text, id_=str(i))) for i, text in enumerate(texts[1:])
    ]
    ranked = reranker.postprocess_nodes(nodes, QueryBundle(texts[0]))
    return {
        "embeddings": openai.get_text_embedding_batch(texts),
        "embeddings of TEI": tei.get_text_embedding_batch(texts),
        "embeddings of TEI one by one": [tei.get_query_embedding(text) for text in texts],
        "sigmoid scores": [[int(node.node.node_id), node.score] for node in ranked],
    }


def use_litellm(address: str, texts: list[str], key: str) -> dict[str, Any]:
    """Use LiteLLM with the APIs of OpenAI, Cohere, Jina, vLLM and Hugging Face."""
    import litellm

    response = litellm.embedding(
        model=f"openai/{MODEL}", input=texts, api_base=f"{address}/v1", api_key=key
    )
    results = {"embeddings": [item["embedding"] for item in response.data]}
    providers = {
        "cohere": f"{address}/v1/rerank",
        "jina_ai": f"{address}/v1/rerank",
        "hosted_vllm": f"{address}/v1",
        "huggingface": address,
    }
    for provider, api_base in providers.items():
        response = litellm.rerank(
            model=f"{provider}/{RERANKER}",
            query=texts[0],
            documents=texts[1:],
            top_n=len(texts) - 1,
            api_base=api_base,
            api_key=key,
        )
        name = "sigmoid scores" if provider == "huggingface" else "scores"
        results[f"{name} {provider}"] = [
            [result["index"], result["relevance_score"]] for result in response.results
        ]
    return results


def use_haystack(address: str, texts: list[str], key: str) -> dict[str, Any]:
    """Use Haystack with the APIs of OpenAI and of Text Embeddings Inference."""
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPIDocumentEmbedder,
        HuggingFaceAPITextEmbedder,
    )
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    secret = Secret.from_token(key)
    documents = [Document(content=text, id=str(index)) for index, text in enumerate(texts)]
    openai = OpenAIDocumentEmbedder(model=MODEL, api_base_url=f"{address}/v1", api_key=secret)
    one = OpenAITextEmbedder(model=MODEL, api_base_url=f"{address}/v1", api_key=secret)
    tei = {
        "api_type": "text_embeddings_inference",
        "api_params": {"url": address},
        "token": secret,
    }
    tei_documents = HuggingFaceAPIDocumentEmbedder(**tei)
    tei_one = HuggingFaceAPITextEmbedder(**tei)
    ranker = HuggingFaceTEIRanker(url=address, token=secret)
    ranked = ranker.run(query=texts[0], documents=documents[1:])["documents"]
    return {
        "embeddings": [doc.embedding for doc in openai.run(documents)["documents"]],
        "embeddings one by one": [one.run(text)["embedding"] for text in texts],
        "embeddings of TEI": [doc.embedding for doc in tei_documents.run(documents)["documents"]],
        "embeddings of TEI one by one": [tei_one.run(text)["embedding"] for text in texts],
        "sigmoid scores": [[int(doc.id) - 1, doc.score] for doc in ranked],
    }


CLIENTS: dict[str, tuple[str, Callable[[str, list[str], str], dict[str, Any]]]] = {
    "openai": ("openai", use_openai),
    "cohere": ("cohere", use_cohere),
    "huggingface_hub": ("huggingface_hub", use_huggingface_hub),
    "langchain-openai": ("langchain-openai", use_langchain_openai),
    "langchain-huggingface": ("langchain-huggingface", use_langchain_huggingface),
    "llama-index": ("llama-index-core", use_llama_index),
    "litellm": ("litellm", use_litellm),
    "haystack": ("haystack-ai", use_haystack),
}


def main() -> None:
    """Run the clients, and print their results."""
    address, *names = sys.argv[1:]
    request = json.load(sys.stdin)
    for name in names or CLIENTS:
        package, function = CLIENTS[name]
        results = function(address, request["texts"], request["key"])
        print(json.dumps({"client": name, "version": version(package), "results": results}))


if __name__ == "__main__":
    main()
