"""Sentences with tagged names, from WordNet, for the example of named entities.

    python examples/make_names.py --output runs/names

Writes train.jsonl and test.jsonl with rows {"tokens": ["Ada", "Byron", ...], "tags": ["B-PER",
"I-PER", ...]}: what WordNet says of people (PER), places (LOC) and groups (ORG). Names are found by
WordNet's own entries, so the tags are a rule's, not a person's. Needs WordNet: apt-get install
wordnet-base
"""

import argparse
import hashlib
import json
import re
from pathlib import Path

from benchmarks.local_text import WORDNET, split_gloss
from neobert.common.folders import check_new
from neobert.common.scripts import run_script


# Files of WordNet (lexnames(5)) that hold names: groups, places, natural objects such as rivers,
# people.
KINDS = {"14": "ORG", "15": "LOC", "17": "LOC", "18": "PER"}


def words_of(text):
    return re.findall(r"\w+(?:['-]\w+)*|[^\w\s]", text)


def read_names(folder):
    """{words of a name: its kind} and the sentences, from the noun synsets that are instances of
    something."""
    names, sentences = {}, []
    for line in (folder / "data.noun").read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, gloss = line.partition(" | ")
        fields = fields.split()
        if line.startswith("  ") or fields[1] not in KINDS or "@i" not in fields:
            continue
        words = [word.replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
        for word in words:
            names.setdefault(tuple(words_of(word)), set()).add(KINDS[fields[1]])
        definition = split_gloss(gloss)[0]
        sentences.append(f"{max(words, key=len)}: {definition}.")
    # A name of two kinds (Washington) is left out, and what is written like an ordinary word.
    return {
        name: next(iter(kinds))
        for name, kinds in names.items()
        if len(kinds) == 1 and name[0][:1].isupper()
    }, sentences


def tagged(sentence, names, longest):
    """The words of a sentence and their tags; the longest name wins."""
    tokens = words_of(sentence)
    tags = ["O"] * len(tokens)
    start = 0
    while start < len(tokens):
        width = next(
            (n for n in range(longest, 0, -1) if tuple(tokens[start : start + n]) in names), 0
        )
        kind = names.get(tuple(tokens[start : start + width]))
        tags[start : start + width] = [f"{'I' if i else 'B'}-{kind}" for i in range(width)]
        start += max(1, width)
    return {"tokens": tokens, "tags": tags}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train", type=int, default=4000, help="rows at most")
    parser.add_argument("--test", type=int, default=500, help="rows at most")
    args = parser.parse_args(argv)
    check_new(args.output)
    names, sentences = read_names(Path(WORDNET))
    longest, rows = max(map(len, names)), {"train": [], "test": []}
    for sentence in sorted(sentences, key=lambda text: hashlib.sha1(text.encode()).digest()):
        split = "test" if len(rows["test"]) < args.test else "train"
        rows[split].append(json.dumps(tagged(sentence, names, longest)) + "\n")
    args.output.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", args.train), ("test", args.test)):
        (args.output / f"{split}.jsonl").write_text("".join(rows[split][:count]), encoding="utf-8")
        print(f"{args.output}/{split}.jsonl: {len(rows[split][:count]):,} rows")


if __name__ == "__main__":
    run_script(main)
