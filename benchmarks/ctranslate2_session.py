"""CTranslate2 for benchmarks/peers.py, in an environment with ctranslate2.

    python ctranslate2_session.py MODEL COMPUTE_TYPE THREADS

Every line of stdin is a list of batches of texts, which are lists of token ids. The answer is a
line of JSON with the mean-pooled embeddings of the texts and the CPU seconds.
"""

import json
import sys
import time

import ctranslate2
import numpy as np


def embed(encoder: ctranslate2.Encoder, batches: list[list[list[int]]]) -> list[np.ndarray]:
    """Return the mean-pooled embeddings of all texts, (D,) each."""
    embeddings = []
    for batch in batches:
        output = encoder.forward_batch(batch).last_hidden_state
        hidden = np.array(output.to(ctranslate2.DataType.float32))
        # The batch is padded on the right, so the first rows are those of the text.
        embeddings += [rows[: len(ids)].mean(0) for rows, ids in zip(hidden, batch)]
    return embeddings


def main() -> None:
    """Answer every line of stdin."""
    model, compute_type, threads = sys.argv[1:]
    try:
        encoder = ctranslate2.Encoder(
            model,
            device="cpu",
            compute_type=compute_type,
            inter_threads=1,
            intra_threads=int(threads),
        )
    except ValueError as error:
        # The processor or the build has no fast product for the compute type.
        print(json.dumps({"error": str(error)}), flush=True)
        return
    # The caller waits for this line before it measures.
    print(json.dumps({"version": ctranslate2.__version__}), flush=True)

    for line in sys.stdin:
        batches = json.loads(line)
        start = time.process_time()
        embeddings = embed(encoder, batches)
        seconds = time.process_time() - start
        vectors = [embedding.tolist() for embedding in embeddings]
        print(json.dumps({"vectors": vectors, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
