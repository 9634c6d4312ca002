"""Writes examples/definitions.tsv for the demo: the nouns that WordNet's annotated texts use most,
with their definitions.

python examples/make_definitions.py          (needs WordNet: apt-get install wordnet-base)
"""

import argparse
from pathlib import Path

from benchmarks.local_text import WORDNET, split_gloss
from neobert.common.files import write_text


def used_most(folder, count):
    """(words, definition) of the `count` noun synsets with most annotated uses, in the order of the
    file (wndb(5), cntlist(5))."""
    uses = {}
    for line in (folder / "cntlist.rev").read_text().splitlines():
        key, _, times = line.split()
        uses[key] = int(times)
    rows = []
    for line in (folder / "data.noun").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("  "):
            continue
        fields, _, gloss = line.partition(" | ")
        fields = fields.split()
        words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
        ids = fields[5 : 5 + 2 * int(fields[3], 16) : 2]
        keys = [
            f"{word.lower()}%1:{int(fields[1]):02d}:{int(number, 16):02d}::"
            for word, number in zip(words, ids)
        ]
        definition, _ = split_gloss(gloss)
        if definition and not words[0][0].isupper():
            rows.append(
                (
                    sum(uses.get(key, 0) for key in keys),
                    len(rows),
                    ", ".join(words).replace("_", " "),
                    definition,
                )
            )
    chosen = sorted(rows, key=lambda row: (-row[0], row[1]))[:count]
    return [
        (words, definition) for _, _, words, definition in sorted(chosen, key=lambda row: row[1])
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parent / "definitions.tsv"
    )
    arguments = parser.parse_args()
    rows = used_most(Path(WORDNET), arguments.count)
    write_text(arguments.output, "".join(f"{words}\t{definition}\n" for words, definition in rows))
    print(f"{arguments.output}: {len(rows):,} definitions")


if __name__ == "__main__":
    main()
