"""Reference embeddings."""

import torch
from transformers import AutoTokenizer

import neobert


def mean_embeddings(folder, texts):
    """Return the normalized mean of the last hidden states of each text, (N, D).

    Every text is computed alone, so that neither padding nor packing affects the result.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = neobert.NeoBERTModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = [
            model(tokenizer(text, return_tensors="pt")["input_ids"]).last_hidden_state[0].mean(0)
            for text in texts
        ]
    return torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()
