"""The main job in one go: convert the bundled raw training checkpoint, load it as a user would,
fill masks; then search by meaning.

make demo        or        python examples/demo.py [--output runs/demo]
"""

import argparse
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
# The bundled model has read a dictionary for two hours: it knows how definitions go.
MASKED = [
    "of or [MASK] to the sea.",
    "the quality of [MASK] honest.",
    "happiness: the [MASK] of being happy.",
    "piano: a keyboard [MASK]. a piano is a kind of instrument.",
    "surgeon: a [MASK] who performs operations.",
    "rose: a shrub with [MASK] flowers.",
    "the president of the United [MASK].",
]
SENTENCES = [
    "a large bird of prey",
    "a kind of hawk or eagle",
    "a musical instrument with strings",
    "an instrument played with a bow, like the violin",
    "a person who works on a ship",
]
# As people type them; hardly a word of an answer is in its query.
QUERIES = [
    "someone who flies planes",
    "someone who writes novels",
    "longing for the past",
    "where do i borrow books",
    "baby cat",
    "doctor for teeth",
    "person who repairs pipes",
    "someone who studies rocks",
]


def heading(text):
    print(f"\n=== {text}\n", flush=True)


def convert(output):
    """The bundled checkpoint to a folder that is ready for the Hub."""
    heading("1. python convert_checkpoint.py examples/checkpoint")
    if (output / "config.json").exists():
        print(f"{output} is there from an earlier run; rm -r {output} converts anew")
        return
    options = ["--dtype", "float32", "--sentence-transformers"]
    script, checkpoint = ROOT / "convert_checkpoint.py", ROOT / "examples" / "checkpoint"
    subprocess.run(
        [sys.executable, str(script), str(checkpoint), str(output), *options], check=True
    )


def fill_masks(folder):
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

    heading("2. AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForMaskedLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).eval()
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{type(model).__name__}, {parameters / 1e6:.1f}M parameters, {model.attention_backend()}"
    )

    heading("3. pipeline('fill-mask')")
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
    width = max(map(len, MASKED))
    for text in MASKED:
        guesses = ", ".join(
            f"{guess['token_str']} ({guess['score']:.0%})" for guess in fill(text, top_k=4)
        )
        print(f"{text:<{width}}  {guesses}")


def hidden_states(folder):
    import torch
    from transformers import AutoModel, AutoTokenizer

    heading("4. AutoModel: one padded batch, packed inside the model")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        together = model(**batch).last_hidden_state
        alone = model(**tokenizer(SENTENCES[-1], return_tensors="pt")).last_hidden_state
    difference = (together[-1, : alone.shape[1]] - alone[0]).abs().max().item()
    fill = batch["attention_mask"].float().mean().item()
    print(
        f"hidden states {tuple(together.shape)}, {fill:.0%} real tokens; a text alone and in the "
        f"batch differ by {difference:.1e}"
    )


def search(folder, path):
    """Semantic search over the dictionary's definitions with the bundled sentence encoder."""
    import torch
    from sentence_transformers import SentenceTransformer

    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    heading(
        "5. SentenceTransformer('examples/sentence-encoder', trust_remote_code=True): which of "
        f"{len(rows):,} definitions is meant?"
    )
    model = SentenceTransformer(str(folder), trust_remote_code=True)
    started = time.perf_counter()
    definitions = model.encode(
        [definition for _, definition in rows], convert_to_tensor=True, show_progress_bar=False
    )
    print(f"{len(rows):,} definitions read in {time.perf_counter() - started:.0f} s\n")
    model.encode(["warm-up"])
    times = []
    for query in QUERIES:
        started = time.perf_counter()
        scores = model.similarity(model.encode(query, convert_to_tensor=True), definitions)[0]
        best = torch.topk(scores, 3)
        times.append(1000 * (time.perf_counter() - started))
        print(f"{query}")
        for score, index in zip(best.values.tolist(), best.indices.tolist()):
            words, definition = rows[index]
            print(f"   {score:.2f}  {words}: {definition}")
    print(f"\n{len(QUERIES)} queries, {sorted(times)[len(times) // 2]:.0f} ms each")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "runs" / "demo",
        help="where the converted folder goes",
    )
    folder = parser.parse_args().output
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore")
    started = time.time()
    folder.parent.mkdir(parents=True, exist_ok=True)
    convert(folder)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    fill_masks(folder)
    hidden_states(folder)
    search(ROOT / "examples" / "sentence-encoder", ROOT / "examples" / "definitions.tsv")
    print(
        f"\nDone in {time.time() - started:.0f} s. The folder is ready for the Hub: "
        f"{os.path.relpath(folder)}"
    )


if __name__ == "__main__":
    main()
