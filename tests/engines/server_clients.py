"""Clients of OpenAI and Cohere against examples/serve.py: ADDRESS, and {"texts", "pid"} on stdin;
answers one line of JSON.

Each text is a request, of 32 clients at once; one in 20 is broken. Then /rerank, and last 32
requests of 40 texts while the server gets SIGTERM. Vectors are told in hexadecimal digits of their
bytes, and refusals by their status.
"""

import json
import os
import signal
import sys
import time
from array import array
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor

import cohere
import openai


BROKEN = [
    {"input": []},
    {"input": [10**6]},
    {"input": "word " * 300},
    {"dimensions": 385},
]
FORMS = [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}]


def ask(client, **asked):
    """Vectors of a request in hexadecimal digits, or the status of its refusal."""
    try:
        rows = client.embeddings.create(model="sentence-encoder", **asked).data
    except openai.APIStatusError as error:
        return [str(error.status_code)]
    vectors = [row.embedding for row in rows]
    return [
        (b64decode(vector) if isinstance(vector, str) else array("f", vector).tobytes()).hex()
        for vector in vectors
    ]


def main():
    (address,) = sys.argv[1:]
    given = json.load(sys.stdin)
    texts = given["texts"]
    clients = [
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300)
        for _ in range(32)
    ]

    def one_client(number):
        """{index: vector} of every 32nd text. Without a form the client asks for base64 and unpacks
        it."""
        found = {}
        for index in range(number, len(texts), 32):
            asked = {"input": texts[index]} | FORMS[index % 3]
            if index % 20 == 7:
                asked |= BROKEN[index // 20 % len(BROKEN)]
            (found[index],) = ask(clients[number], **asked)
        return found

    with ThreadPoolExecutor(32) as pool:
        found = {}
        for part in pool.map(one_client, range(32)):
            found |= part
        reranker = cohere.ClientV2("none", base_url=address)
        answer = reranker.rerank(
            model="reranker",
            query=texts[0][:50],
            documents=[text[:50] for text in texts[1:20]],
            top_n=5,
        )
        many = [texts[start : start + 40] for start in range(0, 1280, 40)]
        under_way = [pool.submit(ask, client, input=texts) for client, texts in zip(clients, many)]
        time.sleep(0.5)
        os.kill(given["pid"], signal.SIGTERM)
        at_the_stop = [vector for future in under_way for vector in future.result()]
    said = {
        "vectors": [found[index] for index in range(len(texts))],
        "ranks": [result.relevance_score for result in answer.results],
        "at_the_stop": at_the_stop,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
