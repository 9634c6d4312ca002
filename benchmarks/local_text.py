"""English text that comes in packages, to train and evaluate without a network.

- `wordnet_entries`: one row per synset with its words, hypernym, definition and examples. Debian
  package wordnet-base, WordNet 3.0 license, which permits to use, change and redistribute the text
  together with its notice.
- `wordnet_sentences`: the example sentences of WordNet alone.
- `gcide_entries`: one row per headword of Webster 1913 and its additions. Debian package
  dict-gcide, GPL-2+.
- `sentiment_sentences`: sentences with ratings. Source archive of vaderSentiment 3.3.2, MIT.

    python -m benchmarks.local_text wordnet --out data/wordnet

writes train.jsonl and heldout.jsonl with rows {"id", "text", ...}.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, NamedTuple

from neobert.common import data
from neobert.common.commands import guarded
from neobert.common.errors import UserError
from neobert.common.folders import new_file


WORDNET = "/usr/share/wordnet"
GCIDE = "/usr/share/dictd/gcide.dict.dz"
SENTIMENT_ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
# Files in the archive by name of the sentiment data set.
SENTIMENT_SETS = {
    "movie": "movieReviewSnippets_GroundTruth.txt",
    "amazon": "amazonReviewSnippets_GroundTruth.txt",
    "nyt": "nytEditorialSnippets_GroundTruth.txt",
    "tweets": "tweets_GroundTruth.txt",
}
# Percentage of the rows of a source held out from training, for the local tasks.
HELD_OUT_PERCENT = 2.0
# Python files with more characters are generated or contain data.
MAX_SOURCE_CHARACTERS = 100_000
_PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")


def is_held_out(key: str) -> bool:
    """Return whether the row with this id belongs to the held-out part of its source."""
    return data.is_held_out(key, HELD_OUT_PERCENT)


# ------------------------------------------------------------------------------------------------
# WordNet


@dataclass(frozen=True)
class Synset:
    """Synonyms with one meaning, an entry of WordNet.

    Attributes:
        part_of_speech: "noun", "verb", "adj" or "adv".
        offset: Position in the data file, 8 digits.
        words: Synonyms, the most frequent one first.
        hypernyms: Offsets of the more general synsets.
        is_instance: Whether the synset is an instance of its hypernyms, such as a person or a city,
            and not a kind of them.
        gloss: Definition and examples, see `split_gloss`.
    """

    part_of_speech: str
    offset: str
    words: list[str]
    hypernyms: list[str]
    is_instance: bool
    gloss: str

    @property
    def id(self) -> str:
        """Identifier in all parts of speech, such as "noun-00001740"."""
        return f"{self.part_of_speech}-{self.offset}"


def parse_synset(line: str, part_of_speech: str) -> Synset:
    """Return the synset in one line of a WordNet data file, whose format is that of wndb(5)."""
    entry, _, gloss = line.partition(" | ")
    fields = entry.split()

    # The number of words is hexadecimal. Each word is followed by its sense number.
    word_count = int(fields[3], 16)
    start = 4 + 2 * word_count
    # Adjectives end in a syntactic marker, as in "galore(ip)".
    words = [re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in fields[4:start:2]]

    # A pointer has four fields: symbol, offset, part of speech, and the words that it connects.
    pointer_count = int(fields[start])
    pointers = [fields[start + 1 + 4 * i : start + 5 + 4 * i] for i in range(pointer_count)]
    return Synset(
        part_of_speech=part_of_speech,
        offset=fields[0],
        words=words,
        hypernyms=[target for symbol, target, _, _ in pointers if symbol in ("@", "@i")],
        is_instance=any(pointer[0] == "@i" for pointer in pointers),
        gloss=gloss.strip(),
    )


def split_gloss(gloss: str) -> tuple[str, list[str]]:
    """Split a gloss into its definition and its example sentences.

    Args:
        gloss: Text such as `a definition; another; "an example"; "one more"`.
    """
    examples = [text.strip(" ;") for text in re.findall(r'"([^"]+)"', gloss)]
    definition = re.sub(r'"[^"]*"?', "", gloss)
    definition = re.sub(r"[\s;:,-]+$", "", re.sub(r"\s*;\s*(;\s*)+", "; ", definition)).strip()
    return definition, [text for text in examples if len(text) > 3]


def read_synsets(folder: str | Path = WORDNET) -> Iterator[Synset]:
    """Yield all synsets: nouns, verbs, adjectives and adverbs, each in file order.

    Raises:
        UserError: If WordNet is not installed.
    """
    folder = Path(folder)
    missing = [name for name in _PARTS_OF_SPEECH if not (folder / f"data.{name}").is_file()]
    if missing:
        raise UserError(
            f"there is no WordNet in {folder} (data.{missing[0]}); install it with: apt-get "
            "install wordnet-base"
        )

    for part in _PARTS_OF_SPEECH:
        lines = (folder / f"data.{part}").read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            # The lines of the license at the beginning of a file are indented.
            if line and not line.startswith("  "):
                yield parse_synset(line, part)


def wordnet_entries(folder: str | Path = WORDNET) -> Iterator[dict[str, str]]:
    """Yield a row per synset, in file order: {"id": "noun-00001740", "word", "text"}.

    The text reads "landing net: a bag-shaped fishnet on a long handle .... a landing net is a kind
    of fishnet. <examples>".

    Raises:
        UserError: If WordNet is not installed.
    """
    synsets = list(read_synsets(folder))
    first_words = {synset.id: synset.words[0] for synset in synsets}

    for synset in synsets:
        definition, examples = split_gloss(synset.gloss)
        if not definition:
            continue

        words = ", ".join(dict.fromkeys(synset.words))
        sentences = [_sentence(f"{words}: {definition}")]
        if synset.part_of_speech == "noun":
            hypernyms = [f"{synset.part_of_speech}-{offset}" for offset in synset.hypernyms]
            names = [first_words[hypernym] for hypernym in hypernyms if hypernym in first_words]
            if names:
                sentences.append(_hypernym_sentence(synset, names[0]))
        sentences += [_sentence(text) for text in examples]
        yield {"id": synset.id, "word": synset.words[0], "text": " ".join(sentences)}


def _hypernym_sentence(synset: Synset, hypernym: str) -> str:
    """Return a sentence such as "a landing net is a kind of fishnet."."""
    word = synset.words[0]
    if synset.is_instance or word[0].isupper():
        # Names have no article.
        article = ""
    elif word[0] in "aeiou":
        article = "an "
    else:
        article = "a "

    if synset.is_instance:
        hypernym_article = "an" if hypernym[0].lower() in "aeiou" else "a"
        return f"{article}{word} is {hypernym_article} {hypernym}."
    return f"{article}{word} is a kind of {hypernym}."


def wordnet_sentences(folder: str | Path = WORDNET) -> Iterator[dict[str, str]]:
    """Yield the distinct example sentences of WordNet: {"id", "word", "text"}.

    Raises:
        UserError: If WordNet is not installed.
    """
    seen = set()
    for synset in read_synsets(folder):
        _, examples = split_gloss(synset.gloss)
        for number, text in enumerate(examples):
            if len(text.split()) > 2 and text.lower() not in seen:
                seen.add(text.lower())
                yield {
                    "id": f"{synset.id}-{number}",
                    "word": synset.words[0],
                    "text": _sentence(text),
                }


def _sentence(text: str) -> str:
    """Return the text with a full stop at its end, unless it ends with a punctuation mark."""
    return text if text.endswith((".", "!", "?")) else text + "."


# ------------------------------------------------------------------------------------------------
# GCIDE


def gcide_entries(path: str | Path = GCIDE) -> Iterator[dict[str, str]]:
    """Yield a row per headword of the Collaborative International Dictionary of English.

    The rows are {"id", "word", "text"}. The text contains no pronunciation, etymology or source.

    Raises:
        UserError: If the dictionary is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"there is no dictionary {path}; install it with: apt-get install dict-gcide"
        )
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()

    # An entry starts with a line that is not indented and contains a pronunciation in backslashes.
    starts = [i for i, line in enumerate(lines) if line and not line[0].isspace() and "\\" in line]
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(lines)])):
        word = lines[start].split("\\")[0].strip()
        definition = _gcide_definition(" ".join(line.strip() for line in lines[start:stop]))
        if word and len(definition) > 10:
            yield {"id": f"gcide-{number}", "word": word, "text": f"{word}: {definition}"}


# Beginning of an entry, such as "Laminar \\Lam"i*nar\\, Laminal ..., a. ": words, pronunciations
# and the part of speech.
_GCIDE_HEAD = re.compile(
    r"^.{0,160}?[\s,](n|a|adj|adv|v|prep|conj|interj|pron|p|imp)\.(\s*(&|pl|t|i|p|a|n|sing|v|adv|pr)\.?)*\s*(;\s[^.]{0,80}\.)?\s+"
)


def _gcide_definition(entry: str) -> str:
    """Return the definitions and quotations of an entry.

    Pronunciation, part of speech, etymology, sources and names are removed.
    """
    entry = re.sub(r"\\[^\\]*\\", " ", entry)

    # Etymologies contain brackets within brackets, so the inner ones are removed first.
    for _ in range(2):
        entry = re.sub(r"\[[^\[\]]*\]", " ", entry)
    entry = _GCIDE_HEAD.sub("", re.sub(r"\s+", " ", entry), count=1)

    # Parentheses contain fields of knowledge, such as (Bot.), and the letters of senses.
    entry = re.sub(r"\([^()]{0,40}\)", " ", entry.replace("{", "").replace("}", ""))
    # The author of a quotation follows two hyphens.
    entry = re.sub(r"\s--\s?[A-Z][\w. ]*?\.(?=\s|$)", " ", entry)
    entry = re.sub(r"\b[Ss]yn:|--", "; ", entry)
    return re.sub(r"\s+([.,;])", r"\1", re.sub(r"\s+", " ", entry)).strip(" ;,")


# ------------------------------------------------------------------------------------------------
# sentences with ratings


def sentiment_sentences(name: str, path: str | Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield sentences with the mean rating of 20 people (Hutto and Gilbert 2014).

    The rows are {"id", "text", "rating", "label"}. The rating is between -4 and 4, and the label is
    1 for a positive rating and 0 for others.

    Args:
        name: "movie" (10,605 rows), "amazon" (3,708), "nyt" (5,190) or "tweets" (4,200).
        path: The archive or its directory. By default $NEOBERT_SENTIMENT, ~/.cache/neobert, data/
            and the current directory are searched.

    Raises:
        UserError: If the name is unknown or the archive does not exist.
    """
    if name not in SENTIMENT_SETS:
        raise UserError(
            f"there is no sentiment set {name!r}; choose one of {', '.join(SENTIMENT_SETS)}"
        )

    # The data are an archive within the source archive of the package.
    with tarfile.open(_sentiment_archive(path)) as outer:
        data_archive = io.BytesIO(_read_member(outer, "hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=data_archive) as inner:
            content = _read_member(inner, SENTIMENT_SETS[name])

    for line in content.decode("utf-8-sig", errors="replace").splitlines():
        fields = line.split("\t")
        if len(fields) == 3 and fields[2].strip():
            rating = float(fields[1])
            yield {
                "id": f"{name}-{fields[0]}",
                "text": fields[2].strip(),
                "rating": rating,
                "label": int(rating > 0),
            }


def _sentiment_archive(path: str | Path | None = None) -> Path:
    """Return the path of the archive of vaderSentiment.

    Raises:
        UserError: If no directory contains it.
    """
    candidates = [path]
    if not path:
        candidates = [
            os.environ.get("NEOBERT_SENTIMENT"),
            Path.home() / ".cache" / "neobert",
            "data",
            ".",
        ]

    for candidate in filter(None, candidates):
        candidate = Path(candidate)
        archive = candidate if candidate.is_file() else candidate / SENTIMENT_ARCHIVE
        if archive.is_file():
            return archive
    raise UserError(
        f"there is no {SENTIMENT_ARCHIVE}; get it with: pip download --no-deps --no-binary :all: "
        "vaderSentiment==3.3.2 -d ~/.cache/neobert"
    )


def _read_member(archive: tarfile.TarFile, ending: str) -> bytes:
    """Return the content of the first file in an archive whose path has this ending."""
    member = next(member for member in archive.getmembers() if member.name.endswith(ending))
    return _content_of(archive, member)


def _content_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Return the content of a regular file in an archive."""
    file = archive.extractfile(member)
    assert file is not None, f"{member.name} is not a file"
    return file.read()


# ------------------------------------------------------------------------------------------------
# files of packages


class Row(NamedTuple):
    """Short text and the long text that belongs to it.

    Attributes:
        package: Name of the package that contains the texts.
        short: Short text, such as a title.
        long: Long text, such as the section below the title.
    """

    package: str
    short: str
    long: str


def deb_files(path: str | Path) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of every regular file in a .deb file."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as process:
        # The mode "r|" reads a stream, so large packages need little memory.
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                if member.isfile():
                    yield member.name, _content_of(archive, member)


def python_rows(package: Distribution, max_files: int = 60) -> tuple[list[Row], list[Row]]:
    """Return the texts of a Python package.

    Args:
        package: Package.
        max_files: Maximum number of files to read. The selection depends on their paths only.

    Returns:
        The docstrings of several lines, first line and rest, and the functions with a docstring of
        one line, docstring and code without it.
    """
    docstrings: list[Row] = []
    code: list[Row] = []
    paths = [path for path in package.files or () if path.suffix == ".py"]
    paths = [path for path in paths if "test" not in str(path).lower()]

    for path in sorted(paths, key=lambda path: data.hash_fraction(str(path)))[:max_files]:
        try:
            source = path.read_text()
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            # Packages contain templates and files for other versions of Python.
            continue
        if len(source) >= MAX_SOURCE_CHARACTERS:
            continue

        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            first, _, rest = (ast.get_docstring(node) or "").partition("\n")
            if rest.strip():
                docstrings.append(Row(package.name, first, rest))
            elif first and isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                code.append(Row(package.name, first, _without_docstring(node, source)))
    return docstrings, code


def _without_docstring(function: ast.FunctionDef, source: str) -> str:
    """Return the lines of a function without its docstring, the first statement of its body."""
    lines = source.splitlines()
    docstring = function.body[0]
    before = lines[function.lineno - 1 : docstring.lineno - 1]
    after = lines[docstring.end_lineno : function.end_lineno]
    return "\n".join(before + after)


# ------------------------------------------------------------------------------------------------
# command


SOURCES = {
    "wordnet": wordnet_entries,
    "gcide": gcide_entries,
    **{f"sentiment-{name}": partial(sentiment_sentences, name) for name in SENTIMENT_SETS},
}


def split(rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows to train on and the held-out rows."""
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for row in rows:
        part = held_out if is_held_out(row["id"]) else train
        part.append(row)
    return train, held_out


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a JSON Lines file, completely or not at all, and print its number of rows."""
    with new_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    print(f"{path}: {len(rows):,} rows", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows of a source and return the exit code."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.local_text", description=description
    )
    parser.add_argument("source", choices=SOURCES, help="Source of the text.")
    parser.add_argument(
        "--out", required=True, type=Path, help="Directory of train.jsonl and heldout.jsonl."
    )
    arguments = parser.parse_args(argv)

    train, held_out = split(SOURCES[arguments.source]())
    write_rows(arguments.out / "train.jsonl", train)
    write_rows(arguments.out / "heldout.jsonl", held_out)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("local_text", main))
