"""`make test-serving`: a folder of sentence-transformers in vLLM itself, eager and compiled,
against torch in float32.

python tests/engines/serve_vllm.py FOLDER, in an environment of vLLM's own. Exit status 1 below a
cosine of 0.9999.
"""

import sys

import torch
import transformers
import vllm


TEXTS = [
    "a bird of prey",
    "rain",
    "The committee met again on Tuesday, and nothing was decided.",
    "The committee met again on Tuesday, and nothing was decided. " * 6,
]
BOUND = 0.9999


@torch.no_grad()
def torch_vectors(folder):
    """Mean over the tokens of each text, (texts, D), one text at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).eval()
    batches = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    return torch.cat([model(batch["input_ids"]).last_hidden_state.mean(1) for batch in batches])


def vllm_vectors(folder, eager):
    engine = vllm.LLM(
        folder,
        runner="pooling",
        convert="embed",
        trust_remote_code=True,
        dtype="float32",
        max_model_len=128,
        enforce_eager=eager,
    )
    return torch.tensor([answer.outputs.embedding for answer in engine.embed(TEXTS)])


def main():
    folder, worst = sys.argv[1], 1.0
    expected = torch_vectors(folder)
    print(
        f"vLLM {vllm.__version__}, transformers {transformers.__version__}, torch "
        f"{torch.__version__}, {folder}"
    )
    for name, eager in (("eager", True), ("compiled", False)):
        cosine = torch.cosine_similarity(vllm_vectors(folder, eager), expected).min().item()
        print(f"{name}: worst cosine to torch {cosine:.6f} over {len(TEXTS)} texts", flush=True)
        worst = min(worst, cosine)
    return 0 if worst >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
