"""Write examples/definitions.tsv: the most frequent nouns of WordNet with their definitions.

    apt-get install wordnet-base
    python examples/make_definitions.py

The frequency of a noun is that in WordNet's annotated texts.
"""

import argparse
import sys
from pathlib import Path


# The root of the clone contains the package `benchmarks`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.local_text import WORDNET, split_gloss  # noqa: E402
from neobert.common.files import write_text  # noqa: E402
from neobert.scripts import run_script  # noqa: E402


def read_counts(folder: Path) -> dict[str, int]:
    """Return the frequency of each sense in annotated texts, {sense key: count} (cntlist(5))."""
    counts = {}
    for line in (folder / "cntlist.rev").read_text().splitlines():
        key, _, count = line.split()
        counts[key] = int(count)
    return counts


def most_frequent_nouns(folder: Path, num_synsets: int) -> list[tuple[str, str]]:
    """Return the words and the definition of the most frequent noun synsets, in file order.

    Args:
        folder: Directory of WordNet's database files (wndb(5)).
        num_synsets: Number of synsets.
    """
    counts = read_counts(folder)
    synsets = []
    for line in (folder / "data.noun").read_text(encoding="utf-8", errors="replace").splitlines():
        # The license at the top of the file is indented.
        if line.startswith("  "):
            continue

        head, _, gloss = line.partition(" | ")
        fields = head.split()
        lexicographer_file = int(fields[1])
        # A hexadecimal number of words precedes the words, and each has a sense number.
        end = 4 + 2 * int(fields[3], 16)
        words = fields[4:end:2]
        definition, _ = split_gloss(gloss)
        # Words in upper case are names.
        if not definition or words[0][0].isupper():
            continue

        # The key of a sense is WORD%1:FILE:SENSE::, where 1 stands for nouns (senseidx(5)).
        count = 0
        for word, sense in zip(words, fields[5:end:2]):
            key = f"{word.lower()}%1:{lexicographer_file:02d}:{int(sense, 16):02d}::"
            count += counts.get(key, 0)
        synsets.append((count, ", ".join(words).replace("_", " "), definition))

    # sorted() is stable, so synsets with equal counts keep their order.
    by_count = sorted(range(len(synsets)), key=lambda index: -synsets[index][0])
    return [synsets[index][1:] for index in sorted(by_count[:num_synsets])]


def main() -> None:
    """Write the file of definitions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--count", type=int, default=8000, help="Number of definitions. (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).resolve().parent / "definitions.tsv",
        help="File to write.",
    )
    args = parser.parse_args()

    rows = most_frequent_nouns(Path(WORDNET), args.count)
    write_text(args.output, "".join(f"{words}\t{definition}\n" for words, definition in rows))
    print(f"{args.output}: {len(rows):,} definitions")


if __name__ == "__main__":
    run_script(main)
