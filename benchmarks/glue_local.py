"""`neobert glue` on real local data in GLUE's schema: Table 3's layout without a network. The data is not GLUE's, and the table says so.

    python -m neobert.benchmarks.glue_local --output results/glue_local \\
        --run "neobert-small runs/neobert-small --learning-rate 1e-3 --classifier-pooling mean" \\
        --run "MiniLM-L6 FOLDER --learning-rate 1e-4"

A run is the row's name, the model, and options of `neobert glue` of its own. Data, written below --work:

- sst2: sentences of film reviews with the sign of their mean rating by 20 people (Hutto and Gilbert 2014; under 0.5 from zero left out);
- stsb: two noun definitions of WordNet 3.0, rated 5 x the path similarity of their synsets; dev is made of held-out synsets.
"""

import argparse
import json
import random
import shlex
import shutil
from pathlib import Path

from neobert.common.errors import UserError
from neobert.common.files import write_text
from neobert.common.local_text import sentiment_sentences
from neobert.embeddings.local_tasks import similarity_pairs
from neobert.finetuning import glue


def sst2_rows(archive, train_rows, dev_rows):
    """{split: rows} of film-review sentences, each sentence once."""
    rows = {row["text"]: row["label"] for row in sentiment_sentences("movie", archive) if abs(row["rating"]) >= 0.5}
    rows = [{"sentence": text, "label": label} for text, label in rows.items()]
    random.Random(0).shuffle(rows)
    return {"validation": rows[:dev_rows], "train": rows[dev_rows:][:train_rows]}


def stsb_rows(train_rows, dev_rows):
    """{split: rows} of definitions; a synset gives about four pairs."""

    def rows(count, held_out):
        pairs = similarity_pairs(count, held_out)[:count]
        return [{"sentence1": first, "sentence2": second, "label": 5 * similarity} for first, second, similarity in pairs]

    return {"validation": rows(dev_rows, True), "train": rows(train_rows, False)}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="append", required=True, help="'NAME MODEL [--key value ...]', once a row")
    parser.add_argument("--output", default="results/glue_local", help="gets table.md and table.json")
    parser.add_argument("--work", default="runs/glue_local", help="data and runs")
    parser.add_argument("--archive", help="vaderSentiment-3.3.2.tar.gz or its folder")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--epochs", default="3")
    parser.add_argument("--batch-size", default="32")
    parser.add_argument("--train-rows", type=int, default=1000)
    parser.add_argument("--dev-rows", type=int, default=400)
    args = parser.parse_args(argv)

    data = Path(args.work) / "reviews-and-wordnet"
    tasks = {"sst2": sst2_rows(args.archive, args.train_rows, args.dev_rows), "stsb": stsb_rows(args.train_rows, args.dev_rows)}
    for task, splits in tasks.items():
        for split, rows in splits.items():
            write_text(data / task / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    shared = [
        "--task",
        "sst2,stsb",
        "--data",
        str(data),
        "--output",
        str(Path(args.work) / "runs"),
        "--seeds",
        *args.seeds.split(","),
        "--start",
        "none",
    ]
    shared += ["--num-train-epochs", args.epochs, "--batch-size", args.batch_size, "--evaluations-per-epoch", "2", "--keep-models", "none"]
    for run in args.run:
        name, model, *options = shlex.split(run)
        glue.main([*shared, "--name", name, "--model", model, *options])
    Path(args.output).mkdir(parents=True, exist_ok=True)
    for name in ("table.md", "table.json"):
        shutil.copyfile(Path(args.work) / "runs" / name, Path(args.output) / name)
    print((Path(args.output) / "table.md").read_text())


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"glue_local: {error}") from None
