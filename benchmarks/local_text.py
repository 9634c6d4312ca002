"""English text that comes in packages, for training and measuring without a network, as rows {"id",
"text", ...}.

- `wordnet_entries`: a row a synset: words, kind, definition, examples. Debian package wordnet-base;
  WordNet 3.0 license (free to use, change and pass on with its notice).
- `wordnet_sentences`: the example sentences of WordNet alone.
- `gcide_entries`: a row a headword of Webster 1913 and its additions. Debian package dict-gcide;
  GPL-2+.
- `sentiment_sentences`: rated sentences. Source archive of vaderSentiment 3.3.2; MIT.

    python -m benchmarks.local_text wordnet --out data/wordnet  # train and heldout .jsonl
"""

import argparse
import ast
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

from neobert.common import data
from neobert.common.commands import guarded
from neobert.common.errors import UserError
from neobert.common.folders import new_file


WORDNET = "/usr/share/wordnet"
GCIDE = "/usr/share/dictd/gcide.dict.dz"
SENTIMENT_ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
# name: (file in the archive, its sentences)
SENTIMENT_SETS = {
    "movie": "movieReviewSnippets_GroundTruth.txt",
    "amazon": "amazonReviewSnippets_GroundTruth.txt",
    "nyt": "nytEditorialSnippets_GroundTruth.txt",
    "tweets": "tweets_GroundTruth.txt",
}
# Percentage of the rows of a source held out from training, for the local tasks.
HELD_OUT_PERCENT = 2.0
_PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")


def is_held_out(key):
    """Whether a row of a source belongs to the held-out part."""
    return data.is_held_out(key, HELD_OUT_PERCENT)


def parse_synset(line):
    """(offset, words, offsets of its hypernyms, whether it is an instance, gloss) of one line of a
    WordNet data file (wndb(5))."""
    fields, _, gloss = line.partition(" | ")
    fields = fields.split()
    offset, count = fields[0], int(fields[3], 16)
    words = [
        re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ")
        for word in fields[4 : 4 + 2 * count : 2]
    ]
    start = 4 + 2 * count
    pointers = [fields[start + 1 + 4 * i : start + 5 + 4 * i] for i in range(int(fields[start]))]
    kinds = [target for symbol, target, part, _ in pointers if symbol in ("@", "@i")]
    instance = any(pointer[0] == "@i" for pointer in pointers)
    return offset, words, kinds, instance, gloss.strip()


def split_gloss(gloss):
    """Definition and example sentences of a gloss: `a definition; another; "an example"; "one
    more"`."""
    examples = [text.strip(" ;") for text in re.findall(r'"([^"]+)"', gloss)]
    definition = re.sub(r'"[^"]*"?', "", gloss)
    definition = re.sub(r"[\s;:,-]+$", "", re.sub(r"\s*;\s*(;\s*)+", "; ", definition)).strip()
    return definition, [text for text in examples if len(text) > 3]


def _sentence(text):
    return text if text.endswith((".", "!", "?")) else text + "."


def read_synsets(folder):
    folder = Path(folder)
    missing = [name for name in _PARTS_OF_SPEECH if not (folder / f"data.{name}").is_file()]
    if missing:
        raise UserError(
            f"there is no WordNet in {folder} (data.{missing[0]}); install it with: apt-get "
            "install wordnet-base"
        )
    for part in _PARTS_OF_SPEECH:
        lines = (folder / f"data.{part}").read_text(encoding="utf-8", errors="replace").splitlines()
        rows = [parse_synset(line) for line in lines if line and not line.startswith("  ")]
        first_word = {offset: words[0] for offset, words, *_ in rows}
        for offset, words, kinds, instance, gloss in rows:
            yield (
                part,
                offset,
                words,
                [first_word[kind] for kind in kinds if kind in first_word],
                instance,
                gloss,
            )


def wordnet_entries(folder=WORDNET):
    """One row a synset, in file order: `{"id": "noun-00001740", "word", "text"}`.

    The text reads "landing net: a bag-shaped fishnet on a long handle .... a landing net is a kind
    of fishnet. <examples>".

    Raises:
        UserError: WordNet is not installed.
    """
    for part, offset, words, kinds, instance, gloss in read_synsets(folder):
        definition, examples = split_gloss(gloss)
        if not definition:
            continue
        parts = [_sentence(f"{', '.join(dict.fromkeys(words))}: {definition}")]
        if part == "noun" and kinds:
            article = (
                ""
                if instance or words[0][0].isupper()
                else ("an " if words[0][0] in "aeiou" else "a ")
            )
            kind_article = "an" if kinds[0][0].lower() in "aeiou" else "a"
            relation = f"is {kind_article} {kinds[0]}" if instance else f"is a kind of {kinds[0]}"
            parts.append(f"{article}{words[0]} {relation}.")
        parts += [_sentence(text) for text in examples]
        yield {"id": f"{part}-{offset}", "word": words[0], "text": " ".join(parts)}


def wordnet_sentences(folder=WORDNET):
    """The example sentences of WordNet, each once: `{"id", "word", "text"}`. Raises UserError when
    it is not installed."""
    seen = set()
    for part, offset, words, _, _, gloss in read_synsets(folder):
        for i, text in enumerate(split_gloss(gloss)[1]):
            if len(text.split()) > 2 and text.lower() not in seen:
                seen.add(text.lower())
                yield {"id": f"{part}-{offset}-{i}", "word": words[0], "text": _sentence(text)}


def gcide_entries(path=GCIDE):
    """One row a headword of the Collaborative International Dictionary of English: `{"id", "word",
    "text"}`.

    Pronunciation, etymology and source marks are left out.

    Raises:
        UserError: the dictionary is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"there is no dictionary {path}; install it with: apt-get install dict-gcide"
        )
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    starts = [i for i, line in enumerate(lines) if line and not line[0].isspace() and "\\" in line]
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(lines)])):
        word = lines[start].split("\\")[0].strip()
        body = _gcide_definition(" ".join(line.strip() for line in lines[start:stop]))
        if word and len(body) > 10:
            yield {"id": f"gcide-{number}", "word": word, "text": f"{word}: {body}"}


# "Laminar \\Lam"i*nar\\, Laminal ..., a. " of an entry: words, pronunciations and the part of
# speech.
_GCIDE_HEAD = re.compile(
    r"^.{0,160}?[\s,](n|a|adj|adv|v|prep|conj|interj|pron|p|imp)\.(\s*(&|pl|t|i|p|a|n|sing|v|adv|pr)\.?)*\s*(;\s[^.]{0,80}\.)?\s+"
)


def _gcide_definition(block):
    """The definitions and quotations of an entry, without pronunciation, part of speech, etymology,
    sources and names."""
    block = re.sub(r"\\[^\\]*\\", " ", block)
    for _ in range(2):  # brackets within brackets
        block = re.sub(r"\[[^\[\]]*\]", " ", block)
    block = _GCIDE_HEAD.sub("", re.sub(r"\s+", " ", block), count=1)
    # fields of knowledge, letters of senses
    block = re.sub(r"\([^()]{0,40}\)", " ", block.replace("{", "").replace("}", ""))
    block = re.sub(r"\s--\s?[A-Z][\w. ]*?\.(?=\s|$)", " ", block)  # who is quoted
    block = re.sub(r"\b[Ss]yn:|--", "; ", block)
    return re.sub(r"\s+([.,;])", r"\1", re.sub(r"\s+", " ", block)).strip(" ;,")


def deb_files(path):
    """(path, bytes) of the regular files of a .deb file."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                if member.isfile():
                    yield member.name, archive.extractfile(member).read()


class Row(NamedTuple):
    """A short text and the long one that belongs to it; `package` is where they come from."""

    package: str
    short: str
    long: str


def python_rows(package, most_files=60):
    """(rows of docstrings, rows of code) of a Python package, an `importlib.metadata.Distribution`:
    first line and rest; docstring of one line and the function without it."""
    docstrings, code = [], []
    paths = [path for path in package.files or () if path.suffix == ".py"]
    paths = [path for path in paths if "test" not in str(path).lower()]
    for path in sorted(paths, key=lambda path: data.fraction(str(path)))[:most_files]:
        try:
            source = path.read_text()
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree) if len(source) < 100_000 else ():
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            first, _, rest = (ast.get_docstring(node) or "").partition("\n")
            if rest.strip():
                docstrings.append(Row(package.name, first, rest))
            elif first and isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                lines, text = source.splitlines(), node.body[0]
                kept = (
                    lines[node.lineno - 1 : text.lineno - 1]
                    + lines[text.end_lineno : node.end_lineno]
                )
                code.append(Row(package.name, first, "\n".join(kept)))
    return docstrings, code


def _sentiment_archive(path=None):
    places = (
        [path]
        if path
        else [os.environ.get("NEOBERT_SENTIMENT"), Path.home() / ".cache" / "neobert", "data", "."]
    )
    for place in filter(None, places):
        place = Path(place)
        found = place if place.is_file() else place / SENTIMENT_ARCHIVE
        if found.is_file():
            return found
    raise UserError(
        f"there is no {SENTIMENT_ARCHIVE}; get it with: pip download --no-deps --no-binary :all: "
        "vaderSentiment==3.3.2 -d ~/.cache/neobert"
    )


def sentiment_sentences(name, path=None):
    """Sentences with the mean rating of 20 people, from -4 to 4 (Hutto and Gilbert 2014): `{"id",
    "text", "rating", "label"}`.

    `label` is 1 for a positive rating and 0 for a negative one.

    Args:
        name: "movie" (10,605 rows), "amazon" (3,708), "nyt" (5,190) or "tweets" (4,200).
        path: the archive or its folder; otherwise $NEOBERT_SENTIMENT, ~/.cache/neobert, data/ and
            the current folder are tried.
    Raises:
        UserError: an unknown name, or the archive is not there.
    """
    if name not in SENTIMENT_SETS:
        raise UserError(
            f"there is no sentiment set {name!r}; choose one of {', '.join(SENTIMENT_SETS)}"
        )
    with tarfile.open(_sentiment_archive(path)) as outer:
        inner = next(
            member
            for member in outer.getmembers()
            if member.name.endswith("hutto_ICWSM_2014.tar.gz")
        )
        with tarfile.open(fileobj=io.BytesIO(outer.extractfile(inner).read())) as archive:
            member = next(
                member
                for member in archive.getmembers()
                if member.name.endswith(SENTIMENT_SETS[name])
            )
            raw = archive.extractfile(member).read()
    for line in raw.decode("utf-8-sig", errors="replace").splitlines():
        fields = line.split("\t")
        if len(fields) == 3 and fields[2].strip():
            rating = float(fields[1])
            yield {
                "id": f"{name}-{fields[0]}",
                "text": fields[2].strip(),
                "rating": rating,
                "label": int(rating > 0),
            }


SOURCES = {
    "wordnet": wordnet_entries,
    "gcide": gcide_entries,
    **{f"sentiment-{name}": partial(sentiment_sentences, name) for name in SENTIMENT_SETS},
}


def split(rows):
    """(rows to train on, held-out rows), in lists."""
    parts = [], []
    for row in rows:
        parts[is_held_out(row["id"])].append(row)
    return parts


def write_rows(path, rows):
    """Writes a jsonl file, completely or not at all, and prints its size."""
    with new_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    print(f"{path}: {len(rows):,} rows", flush=True)


def main(argv=None):
    """`python -m benchmarks.local_text SOURCE --out FOLDER`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.local_text", description=__doc__.splitlines()[0]
    )
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("--out", required=True, type=Path, help="folder of the .jsonl files")
    arguments = parser.parse_args(argv)
    for name, rows in zip(("train", "heldout"), split(SOURCES[arguments.source]())):
        write_rows(arguments.out / f"{name}.jsonl", rows)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("local_text", main))
