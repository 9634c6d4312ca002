"""Write pairs of questions and answers from the bundled definitions, for the training examples.

    python examples/make_pairs.py --output runs/pairs

Writes train.jsonl and test.jsonl with rows {"anchor": a definition, "positive": its words,
"negative": the words of another definition}.
"""

import argparse
import json
import random
from pathlib import Path

from neobert.scripts import UserError, check_new, run_script


DEFINITIONS = Path(__file__).resolve().parent / "definitions.tsv"


def make_rows(lines: list[str]) -> list[dict[str, str]]:
    """Return rows {"anchor", "positive", "negative"} in random order.

    Args:
        lines: Lines with words and their definition, separated by a tab.
    """
    # A fixed seed, so the test rows are the same in every run. In the order of the file,
    # neighbors are related, and the negatives would be nearly correct.
    lines = list(lines)
    random.Random(0).shuffle(lines)
    entries = [line.split("\t") for line in lines]

    # The negative of a definition is the word of the next one.
    rows = []
    for (words, definition), (next_words, _) in zip(entries, entries[1:]):
        rows.append({"anchor": definition, "positive": words, "negative": next_words})
    return rows


def main(argv: list[str] | None = None) -> None:
    """Write the training and the test rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="New directory.")
    parser.add_argument(
        "--train", type=int, default=6000, help="Number of training rows. (default: %(default)s)"
    )
    parser.add_argument(
        "--test", type=int, default=500, help="Number of test rows. (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    check_new(args.output)

    rows = make_rows(DEFINITIONS.read_text(encoding="utf-8").splitlines())
    if args.train + args.test > len(rows):
        raise UserError(
            f"`--train` and `--test` must be at most {len(rows):,} rows together, got "
            f"{args.train + args.test:,}. Lower one of them."
        )
    splits = {
        "train": rows[: args.train],
        "test": rows[args.train :][: args.test],
    }

    args.output.mkdir(parents=True, exist_ok=True)
    for name, split in splits.items():
        path = args.output / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in split), encoding="utf-8")
        print(f"{path}: {len(split):,} rows")


if __name__ == "__main__":
    run_script(main)
