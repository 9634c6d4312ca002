"""Question and answer pairs from the bundled definitions, for the examples that train.

    python examples/make_pairs.py --output runs/pairs

Writes train.jsonl and test.jsonl with rows {"anchor": a definition, "positive": its words,
"negative": the words of another definition}.
"""

import argparse
import json
import random
from pathlib import Path

from neobert.scripts import check_new, run_script


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train", type=int, default=6000, help="rows")
    parser.add_argument("--test", type=int, default=500, help="rows")
    args = parser.parse_args(argv)
    check_new(args.output)
    lines = (
        (Path(__file__).resolve().parent / "definitions.tsv")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    random.Random(0).shuffle(lines)
    entries = [line.split("\t") for line in lines]
    rows = [
        {"anchor": text, "positive": words, "negative": other}
        for (words, text), (other, _) in zip(entries, entries[1:])
    ]
    args.output.mkdir(parents=True, exist_ok=True)
    for split, part in (("train", rows[: args.train]), ("test", rows[args.train :][: args.test])):
        (args.output / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in part), encoding="utf-8"
        )
        print(f"{args.output}/{split}.jsonl: {len(part):,} rows")


if __name__ == "__main__":
    run_script(main)
