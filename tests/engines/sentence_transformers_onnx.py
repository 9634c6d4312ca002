"""sentence-transformers' ONNX backend, in an environment of its own: FOLDER, a JSON list of texts
on stdin; answers one line of JSON."""

import json
import sys
import time

import sentence_transformers
import torch


torch.set_num_threads(1)
folder, texts = sys.argv[1], json.load(sys.stdin)
model = sentence_transformers.SentenceTransformer(
    folder,
    backend="onnx",
    trust_remote_code=True,
    model_kwargs={"provider": "CPUExecutionProvider"},
)
tokens = [x.tolist() for x in model.encode(texts, output_value="token_embeddings", batch_size=8)]
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
