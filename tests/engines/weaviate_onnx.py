"""The steps of Weaviate's ONNX container (ONNXVectorizer), in an environment with Optimum: FOLDER,
a JSON list of texts on stdin; answers one line of JSON."""

import importlib.metadata
import json
import sys

import torch
from optimum.onnxruntime import ORTModelForFeatureExtraction
from transformers import AutoTokenizer


def main():
    folder, texts = sys.argv[1], json.load(sys.stdin)
    model = ORTModelForFeatureExtraction.from_pretrained(
        folder, file_name="model_quantized.onnx", trust_remote_code=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    vectors = []
    for text in texts:  # it encodes one text at a time
        batch = tokenizer([text], padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**batch)[0]
        mask = batch["attention_mask"].unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        vectors += torch.nn.functional.normalize(pooled, dim=1).tolist()
    version = importlib.metadata.version("optimum")
    print(json.dumps({"vectors": vectors, "version": version}), flush=True)


if __name__ == "__main__":
    main()
