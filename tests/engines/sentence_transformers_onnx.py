"""Compute embeddings with the ONNX backend of sentence-transformers.

    python tests/engines/sentence_transformers_onnx.py FOLDER

The program runs in an environment of its own. stdin is a JSON list of texts. It prints one line of
JSON with the hidden states, the embeddings, the CPU seconds for the embeddings and the version.
"""

import json
import sys
import time

import sentence_transformers
import torch


torch.set_num_threads(1)
folder = sys.argv[1]
texts = json.load(sys.stdin)
model = sentence_transformers.SentenceTransformer(
    folder,
    backend="onnx",
    trust_remote_code=True,
    model_kwargs={"provider": "CPUExecutionProvider"},
)
tokens = [x.tolist() for x in model.encode(texts, output_value="token_embeddings", batch_size=8)]

# The first call is not measured.
model.encode(texts)
start = time.process_time()
pooled = model.encode(texts, batch_size=1)
print(
    json.dumps(
        {
            "tokens": tokens,
            "pooled": pooled.tolist(),
            "seconds": time.process_time() - start,
            "version": sentence_transformers.__version__,
        }
    )
)
