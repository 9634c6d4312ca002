"""Request embeddings from an HTTP server with the client of OpenAI.

    python tests/engines/openai_client.py ADDRESS MODEL

stdin is a JSON list of texts. The program prints one line of JSON with two embeddings per text: one
from a request with several texts, and one from a request with this text only. Eight requests run at
once.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai


def main():
    """Print the embeddings of the texts on stdin."""
    address, model = sys.argv[1:]
    texts = json.load(sys.stdin)
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=300)

    def embed(batch):
        response = client.embeddings.create(model=model, input=batch, encoding_format="float")
        rows = sorted(response.data, key=lambda row: row.index)
        return [row.embedding for row in rows]

    # The first four requests contain several texts each, and the others one text.
    requests = [texts[start::4] for start in range(4)] + [[text] for text in texts]
    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(embed, requests))

    together = [None] * len(texts)
    for start in range(4):
        together[start::4] = responses[start]
    alone = [embeddings[0] for embeddings in responses[4:]]
    print(json.dumps({"vectors": together + alone, "version": openai.__version__}), flush=True)


if __name__ == "__main__":
    main()
