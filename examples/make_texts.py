"""Texts and pairs for training an encoder, from Python packages with permissive licences.

    python examples/make_texts.py wheels --output data/texts

    pip download --no-deps -d wheels django flask sqlalchemy scrapy nltk ...

Writes pairs.jsonl (docstring's first line and rest, docstring and code, summary and README),
texts.jsonl (both sides of every pair) and sources.md (licence and share of every package). Left out
are packages of other or unknown licences, packages that
`neobert.benchmarks.open_text` measures on (they are named in results/open_text.json), and near
duplicates of each other and of what it measures on here.
"""

import argparse
import importlib.metadata
import json
import re
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from neobert.benchmarks.open_text import chosen, corpus, python_rows, readmes
from neobert.common.files import write_text
from neobert.common.results import markdown_table


ROOT = Path(__file__).resolve().parent.parent
PERMISSIVE = (
    r"(0BSD|Apache|BSD|CC0|HPND|ISC|MIT|PSF|Python Software Foundation|Unlicense|Public "
    r"Domain|Zlib)"
)
PACKAGES_EACH = 400  # rows of a kind that one package may give


def normal(name):
    """A package's name in the form that PyPI compares, without the prefix that Debian gives."""
    return re.sub(r"[-_.]+", "-", name).lower().removeprefix("python-")


def licence(metadata):
    """The permissive licence that a package states, or "" where it states another or none."""
    told = metadata.get("License-Expression") or ""
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or ()
        if line.startswith("License ::")
    ]
    parts = (
        re.split(r" AND | OR |[()]", told)
        if told
        else classifiers or [metadata.get("License") or ""]
    )
    parts = [part.strip() for part in parts if part.strip() not in ("", "OSI Approved")]
    return (
        " / ".join(parts)
        if parts and all(re.match(PERMISSIVE, part, re.I) and len(part) < 60 for part in parts)
        else ""
    )


class NearDuplicates:
    """Tells whether a text is nearly one that it was asked about before: MinHash of five-word
    shingles, by bands (Broder 1997).

    Two texts with Jaccard similarity s share one of 16 bands of 4 with probability 1 - (1 -
    s^4)^16: 0.99 at 0.7, 0.10 at 0.3.
    """

    def __init__(self, seed=0):
        generator = np.random.default_rng(seed)
        self.factors = generator.integers(1, 2**31, size=(64, 1), dtype=np.uint64) | np.uint64(1)
        self.bands = [set() for _ in range(16)]

    def seen(self, text):
        words = re.findall(r"\w+", text.lower())
        shingles = [
            zlib.crc32(" ".join(words[i : i + 5]).encode()) for i in range(max(1, len(words) - 4))
        ]
        least = ((self.factors * np.array(shingles, dtype=np.uint64)) % np.uint64(2**61 - 1)).min(1)
        keys = [least[i : i + 4].tobytes() for i in range(0, 64, 4)]
        found = any(key in band for key, band in zip(keys, self.bands))
        for key, band in zip(keys, self.bands):
            band.add(key)
        return found


def pairs(wheels, measured):
    """Rows {"kind", "anchor", "positive", "package", "license"} of the wheels of a folder.

    Args:
        wheels: folder with .whl files.
        measured: names of packages that are left out.
    """
    held_out, near = {normal(name) for name in measured}, NearDuplicates()
    for row in (row for rows in corpus(400).values() for row in rows):
        near.seen(row.long)
    for wheel in sorted(Path(wheels).glob("*.whl")):
        (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
        permitted = licence(distribution.metadata)
        if not permitted or normal(distribution.name) in held_out:
            print(f"{distribution.name}: left out ({'measured on' if permitted else 'licence'})")
            continue
        package = {distribution.name: distribution}
        docstrings, code = python_rows(package, most_files=10_000)
        for kind, rows in (("docstring", docstrings), ("code", code), ("readme", readmes(package))):
            for row in chosen(rows, PACKAGES_EACH, PACKAGES_EACH):
                if not near.seen(row.long):
                    yield {
                        "kind": kind,
                        "anchor": row.short,
                        "positive": row.long,
                        "package": row.package,
                        "license": permitted,
                    }


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, help="folder with .whl files")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    sources = json.loads((ROOT / "results" / "open_text.json").read_text(encoding="utf-8"))[
        "sources"
    ]
    rows = list(pairs(args.wheels, {name for names in sources.values() for name in names}))
    texts = dict.fromkeys(text for row in rows for text in (row["anchor"], row["positive"]))
    for name, lines in (("pairs", rows), ("texts", [{"text": text} for text in texts])):
        write_text(
            args.output / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines)
        )
    words = Counter()
    for row in rows:
        words[row["package"], row["license"]] += len(row["positive"].split())
    table = [
        [*key, f"{count:,}", f"{count / words.total():.1%}"] for key, count in words.most_common()
    ]
    write_text(
        args.output / "sources.md", markdown_table(["package", "licence", "words", "share"], table)
    )
    print(f"{args.output}: {len(rows):,} pairs, {len(texts):,} texts of {len(words)} packages")


if __name__ == "__main__":
    main()
