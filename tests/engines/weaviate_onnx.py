"""Compute embeddings in the same way as the ONNX container of Weaviate (ONNXVectorizer).

    python tests/engines/weaviate_onnx.py FOLDER

The program runs in an environment with Optimum. stdin is a JSON list of texts. The program prints
one line of JSON with the embeddings and the version of Optimum.
"""

import importlib.metadata
import json
import sys

import torch
from optimum.onnxruntime import ORTModelForFeatureExtraction
from transformers import AutoTokenizer


def main():
    """Print the embeddings of the texts on stdin."""
    folder = sys.argv[1]
    texts = json.load(sys.stdin)
    model = ORTModelForFeatureExtraction.from_pretrained(
        folder, file_name="model_quantized.onnx", trust_remote_code=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)

    embeddings = []
    # The container encodes one text at a time.
    for text in texts:
        batch = tokenizer([text], padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**batch)[0]
        mask = batch["attention_mask"].unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        embeddings += torch.nn.functional.normalize(pooled, dim=1).tolist()

    version = importlib.metadata.version("optimum")
    print(json.dumps({"vectors": embeddings, "version": version}), flush=True)


if __name__ == "__main__":
    main()
