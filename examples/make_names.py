"""Write sentences with tagged names from WordNet, for token classification.

    apt-get install wordnet-base
    python examples/make_names.py --output runs/names

Writes train.jsonl and test.jsonl with rows {"tokens": ["Ada", "Byron", ...], "tags": ["B-PER",
"I-PER", ...]}: WordNet's definitions of people (PER), places (LOC) and groups (ORG). A name is
tagged if it is an entry of WordNet, so the tags are not verified by a person.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path


# The root of the clone contains the package `benchmarks`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.local_text import WORDNET, split_gloss  # noqa: E402
from neobert.scripts import check_new, run_script  # noqa: E402


# Lexicographer files of WordNet (lexnames(5)) that contain names: groups, places, natural objects
# such as rivers, and people.
ENTITY_TYPES = {"14": "ORG", "15": "LOC", "17": "LOC", "18": "PER"}


def split_words(text: str) -> list[str]:
    """Split a text into words and punctuation marks."""
    return re.findall(r"\w+(?:['-]\w+)*|[^\w\s]", text)


def read_names(folder: Path) -> tuple[dict[tuple[str, ...], str], list[str]]:
    """Read the names and their definitions.

    Args:
        folder: Directory of WordNet's database files (wndb(5)).

    Returns:
        The entity type of each name, {words of the name: type}, and the sentences
        "NAME: DEFINITION.".
    """
    types: dict[tuple[str, ...], set[str]] = {}
    sentences = []
    for line in (folder / "data.noun").read_text(encoding="utf-8", errors="replace").splitlines():
        head, _, gloss = line.partition(" | ")
        fields = head.split()

        # Names are instances (@i) of another synset.
        if line.startswith("  ") or fields[1] not in ENTITY_TYPES or "@i" not in fields:
            continue

        # A hexadecimal number of words precedes the words, and each has a sense number.
        end = 4 + 2 * int(fields[3], 16)
        names = [name.replace("_", " ") for name in fields[4:end:2]]
        for name in names:
            types.setdefault(tuple(split_words(name)), set()).add(ENTITY_TYPES[fields[1]])
        sentences.append(f"{max(names, key=len)}: {split_gloss(gloss)[0]}.")

    # Skip names of several types (Washington), and names that look like ordinary words.
    unique = {
        name: next(iter(name_types))
        for name, name_types in types.items()
        if len(name_types) == 1 and name[0][:1].isupper()
    }
    return unique, sentences


def tag(sentence: str, types: dict[tuple[str, ...], str], max_words: int) -> dict[str, list[str]]:
    """Return the words of a sentence and their BIO tags. The longest name at a position wins."""
    tokens = split_words(sentence)

    tags = ["O"] * len(tokens)
    start = 0
    while start < len(tokens):
        for length in range(min(max_words, len(tokens) - start), 0, -1):
            entity_type = types.get(tuple(tokens[start : start + length]))
            if entity_type:
                tags[start] = f"B-{entity_type}"
                tags[start + 1 : start + length] = [f"I-{entity_type}"] * (length - 1)
                break
        else:
            # No name starts here.
            length = 1
        start += length
    return {"tokens": tokens, "tags": tags}


def main(argv: list[str] | None = None) -> None:
    """Write the training and the test rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="New directory.")
    parser.add_argument(
        "--train",
        type=int,
        default=4000,
        help="Maximum number of training rows. (default: %(default)s)",
    )
    parser.add_argument(
        "--test", type=int, default=500, help="Maximum number of test rows. (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    check_new(args.output)

    types, sentences = read_names(Path(WORDNET))
    max_words = max(map(len, types))
    # The order by hash is random, and the same everywhere.
    sentences.sort(key=lambda text: hashlib.sha1(text.encode()).digest())
    lines = [json.dumps(tag(sentence, types, max_words)) + "\n" for sentence in sentences]
    splits = {
        "train": lines[args.test :][: args.train],
        "test": lines[: args.test],
    }

    args.output.mkdir(parents=True, exist_ok=True)
    for name, split in splits.items():
        path = args.output / f"{name}.jsonl"
        path.write_text("".join(split), encoding="utf-8")
        print(f"{path}: {len(split):,} rows")


if __name__ == "__main__":
    run_script(main)
