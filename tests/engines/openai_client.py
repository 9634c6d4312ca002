"""OpenAI client for an HTTP server: ADDRESS MODEL, a JSON list of texts on stdin.

Prints one line of JSON. Eight requests run at once: four with a list of texts, and four with one
text.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai


def main():
    address, model = sys.argv[1:]
    texts = json.load(sys.stdin)
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=300)

    def ask(batch):
        answer = client.embeddings.create(model=model, input=batch, encoding_format="float")
        rows = sorted(answer.data, key=lambda row: row.index)
        return [row.embedding for row in rows]

    # Every text twice: beside others, and alone.
    requests = [texts[start::4] for start in range(4)] + [[text] for text in texts]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, requests))
    together = [None] * len(texts)
    for start in range(4):
        together[start::4] = answers[start]
    alone = [answer[0] for answer in answers[4:]]
    print(json.dumps({"vectors": together + alone, "version": openai.__version__}), flush=True)


if __name__ == "__main__":
    main()
