"""Question and answer pairs from the bundled definitions, for the examples that train: python examples/make_pairs.py --output runs/pairs

Writes train.jsonl and test.jsonl with rows {"anchor": a definition, "positive": its words, "negative": the words of its neighbour in WordNet},
which often means nearly the same. A definition goes to one of the two files by its hash.
"""

import argparse
import hashlib
import json
from pathlib import Path


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train", type=int, default=6000, help="rows at most")
    parser.add_argument("--test", type=int, default=500, help="rows at most")
    args = parser.parse_args(argv)
    lines = (Path(__file__).resolve().parent / "definitions.tsv").read_text(encoding="utf-8").splitlines()
    entries, rows = [line.split("\t") for line in lines], {"train": [], "test": []}
    for (words, definition), (neighbour, _) in zip(entries, entries[1:]):
        split = "test" if hashlib.sha1(definition.encode()).digest()[0] < 20 else "train"
        rows[split].append(json.dumps({"anchor": definition, "positive": words, "negative": neighbour}) + "\n")
    args.output.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", args.train), ("test", args.test)):
        (args.output / f"{split}.jsonl").write_text("".join(rows[split][:count]), encoding="utf-8")
        print(f"{args.output}/{split}.jsonl: {len(rows[split][:count]):,} rows")


if __name__ == "__main__":
    main()
