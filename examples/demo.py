"""Convert the bundled training checkpoint, fill masks with it, and search definitions by meaning.

make demo
python examples/demo.py --output runs/demo
"""

import argparse
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
# The bundled model was pre-trained on a dictionary for two hours, so the texts are definitions.
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
# The queries share hardly a word with the definitions that answer them.
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


def print_heading(text: str) -> None:
    """Print the heading of a step."""
    print(f"\n=== {text}\n", flush=True)


def convert(output: Path) -> None:
    """Convert the bundled checkpoint to a folder that is ready for the Hub."""
    # A separate process runs the command as a user would.
    print_heading("1. python convert_checkpoint.py examples/checkpoint")
    if (output / "config.json").exists():
        print(f"{output} exists from an earlier run. Delete it to convert the checkpoint again.")
        return

    subprocess.run(
        [
            sys.executable,
            str(ROOT / "convert_checkpoint.py"),
            str(ROOT / "examples" / "checkpoint"),
            str(output),
            "--dtype=float32",
            "--sentence-transformers",
        ],
        check=True,
    )


def fill_masks(folder: Path) -> None:
    """Load the masked language model, and print its predictions for `MASKED`."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

    print_heading("2. AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForMaskedLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).eval()

    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{type(model).__name__}, {parameters / 1e6:.1f}M parameters, {model.attention_backend()}"
    )

    print_heading("3. pipeline('fill-mask')")
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
    width = max(map(len, MASKED))
    for text in MASKED:
        guesses = ", ".join(
            f"{guess['token_str']} ({guess['score']:.0%})" for guess in fill(text, top_k=4)
        )
        print(f"{text:<{width}}  {guesses}")


def compare_hidden_states(folder: Path) -> None:
    """Compare the hidden states of a text in a padded batch with those of the text alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    print_heading("4. AutoModel: one padded batch, packed inside the model")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()

    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        in_batch = model(**batch).last_hidden_state
        alone = model(**tokenizer(SENTENCES[-1], return_tensors="pt")).last_hidden_state

    # The last text is shorter than others, so its row in the batch contains padding.
    difference = (in_batch[-1, : alone.shape[1]] - alone[0]).abs().max().item()
    non_padding = batch["attention_mask"].float().mean().item()
    print(
        f"hidden states {tuple(in_batch.shape)}, {non_padding:.0%} non-padding tokens; largest "
        f"difference between a text alone and in the batch: {difference:.1e}"
    )


def search(folder: Path, path: Path) -> None:
    """Search the definitions of a file by meaning, with the bundled sentence encoder."""
    import torch
    from sentence_transformers import SentenceTransformer

    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    print_heading(
        "5. SentenceTransformer('examples/sentence-encoder', trust_remote_code=True): search "
        f"{len(rows):,} definitions"
    )
    model = SentenceTransformer(str(folder), trust_remote_code=True)

    start = time.perf_counter()
    definitions = model.encode(
        [definition for _, definition in rows], convert_to_tensor=True, show_progress_bar=False
    )
    print(f"{len(rows):,} definitions encoded in {time.perf_counter() - start:.0f} s\n")

    # The first call after a large batch is slower than the following ones.
    model.encode(["warm-up"])
    times = []
    for query in QUERIES:
        start = time.perf_counter()
        scores = model.similarity(model.encode(query, convert_to_tensor=True), definitions)[0]
        best = torch.topk(scores, 3)
        times.append(1000 * (time.perf_counter() - start))

        print(query)
        for score, index in zip(best.values.tolist(), best.indices.tolist()):
            words, definition = rows[index]
            print(f"   {score:.2f}  {words}: {definition}")

    median = sorted(times)[len(times) // 2]
    print(f"\n{len(QUERIES)} queries, median {median:.0f} ms per query")


def main() -> None:
    """Run all steps of the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "runs" / "demo",
        help="Directory of the converted model.",
    )
    folder = parser.parse_args().output

    # All files are in the clone, so nothing is downloaded.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore")

    start = time.time()
    folder.parent.mkdir(parents=True, exist_ok=True)
    convert(folder)

    # transformers reads the variables above when it is imported.
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    fill_masks(folder)
    compare_hidden_states(folder)
    search(ROOT / "examples" / "sentence-encoder", ROOT / "examples" / "definitions.tsv")
    print(
        f"\nDone in {time.time() - start:.0f} s. The folder is ready for the Hub: "
        f"{os.path.relpath(folder)}"
    )


if __name__ == "__main__":
    main()
