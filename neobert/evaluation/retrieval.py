"""Command `neobert retrieval`: recall and MRR of an encoder on pairs of queries and texts.

All texts of the file are ranked for every query.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..common.data import JSON_FORMATS, files, numbered_rows, replace_surrogates, rows, schema
from ..common.errors import UserError
from ..common.loading import choose_device
from ..common.options import log_options
from ..embeddings.options import check_limit
from ..embeddings.packed_encoder import load_sentence_transformer
from .options import OPTIONS


if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


logger = logging.getLogger("neobert.evaluation")

METRICS = ("recall@1", "recall@10", "mrr@10")
PAIR_COLUMNS = ("anchor", "positive")


@dataclass(frozen=True)
class Queries:
    """Queries and the texts that are ranked for them.

    Attributes:
        relevant: Texts that answer each query, {query: texts}.
        texts: All texts that are ranked.
    """

    relevant: dict[str, set[str]]
    texts: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert retrieval MODEL --pairs FILE` and return the exit code."""
    options = OPTIONS["retrieval"].read(argv or [])
    log_options(options)
    name = options.data.model
    # The file is read first, because an error in it should not wait for the model.
    queries = read_queries(options.data.pairs)
    device = choose_device(options.data.device)
    model = load_sentence_transformer(name, device, **options.encoder.settings())
    check_limit("max_length", options.encoder.max_length, model.max_seq_length)

    metrics = describe_metrics(evaluate_retrieval(model, queries))
    counts = f"{len(queries.relevant):,} queries among {len(queries.texts):,} texts"
    print(f"{name}: {counts}: {metrics}")
    return 0


def read_queries(path: str) -> Queries:
    """Read the queries of a file of pairs. Rows without both texts are left out, as in training.

    Raises:
        UserError: If the file cannot be read or has no usable row.
    """
    pairs = []
    total = 0
    missing: Counter[str] = Counter()
    for row in rows(path, PAIR_COLUMNS, optional_columns=negative_columns(path)):
        total += 1
        absent = next((name for name in PAIR_COLUMNS if not is_text(row[name])), None)
        if absent is None:
            pairs.append(row)
        else:
            missing[absent] += 1

    summary = ", ".join(f"{count:,} without {name}" for name, count in missing.items())
    if not pairs:
        reasons = f" ({summary}; both must be text)" if missing else ""
        raise UserError(
            f"{path} has no row with an anchor and a positive{reasons}. Pass a file with one pair "
            "per line."
        )
    if missing:
        left_out = f"{missing.total():,} of {total:,}"
        logger.warning("%s: %s rows are left out: %s.", path, left_out, summary)
    return queries_from_rows(pairs)


def queries_from_rows(pairs: Iterable[Mapping[str, Any]]) -> Queries:
    """Return the queries of rows with the columns anchor, positive, negative, negative_1, ..."""
    relevant: dict[str, set[str]] = {}
    texts: dict[str, None] = {}
    for row in pairs:
        query, positive = (replace_surrogates(row[name]) for name in PAIR_COLUMNS)
        relevant.setdefault(query, set()).add(positive)
        # A dictionary removes duplicates, and keeps the order of the texts.
        texts[positive] = None
        for name, value in row.items():
            if is_negative_column(name):
                values = value if isinstance(value, list) else [value]
                # Negatives may be missing or blank.
                texts |= dict.fromkeys(map(replace_surrogates, filter(is_text, values)))
    return Queries(relevant, list(texts))


def negative_columns(path: str) -> list[str]:
    """Return the columns of a file, a directory or a URL that contain negatives."""
    # A dictionary removes duplicates, and keeps the order of the columns.
    columns: dict[str, None] = {}
    for file in files(path):
        # In .jsonl each row has its own columns.
        if file.format in JSON_FORMATS:
            for _, row in numbered_rows(file):
                columns |= dict.fromkeys(row)
        else:
            columns |= dict.fromkeys(schema(file).names)
    return [name for name in columns if is_negative_column(name)]


def is_negative_column(name: str) -> bool:
    """Return whether a column contains negatives: negative, negative_1, negative_2, ..."""
    return re.fullmatch(r"negative(_\d+)?", name) is not None


def is_text(value: Any) -> bool:
    """Return whether a value is a text that is not blank."""
    return isinstance(value, str) and value.strip() != ""


def evaluate_retrieval(model: "SentenceTransformer", queries: Queries) -> dict[str, float]:
    """Return recall@1, recall@10 and MRR@10, and their standard errors as "recall@1_se", ...

    The similarity function and the prompts are those of the model.

    Args:
        model: Sentence encoder.
        queries: Queries and texts.
    """
    query_embeddings = model.encode_query(
        list(queries.relevant), convert_to_tensor=True, show_progress_bar=True
    )
    document_embeddings = model.encode_document(
        queries.texts, convert_to_tensor=True, show_progress_bar=True
    )
    return _metrics(
        queries, lambda part: model.similarity(query_embeddings[part], document_embeddings)
    )


def evaluate_tfidf(queries: Queries) -> dict[str, float]:
    """Return the metrics of TF-IDF of character n-grams, fitted on the ranked texts."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    # Character n-grams need no word segmentation or stemming, so they work for every language. The
    # rows have unit length, so their product is the cosine similarity.
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
    document_embeddings = vectorizer.fit_transform(queries.texts)
    query_embeddings = vectorizer.transform(list(queries.relevant))
    return _metrics(
        queries,
        lambda part: torch.from_numpy((query_embeddings[part] @ document_embeddings.T).toarray()),
    )


def _metrics(queries: Queries, similarity: Callable[[slice], torch.Tensor]) -> dict[str, float]:
    """Return the mean metrics and their standard errors.

    Args:
        queries: Queries and texts.
        similarity: Function that returns the similarities of a slice of the queries to all texts.
    """
    names = list(queries.relevant)
    texts = queries.texts
    values = []
    # At most 10^8 similarities are in memory at a time, 400 MB in float32.
    step = max(1, 10**8 // len(texts))
    for start in range(0, len(names), step):
        scores = similarity(slice(start, start + step))
        best = scores.topk(min(10, len(texts))).indices.tolist()
        for name, indices in zip(names[start:], best):
            positives = queries.relevant[name]
            hits = [texts[index] in positives for index in indices]

            # Without a positive among the first ten texts, the reciprocal rank is 0.
            rank = hits.index(True) + 1 if any(hits) else math.inf
            recalls = [sum(hits[:1]) / len(positives), sum(hits) / len(positives)]
            values.append([*recalls, 1 / rank])

    table = np.array(values)
    # With `ddof=0`, the standard deviation of a single query is 0 instead of NaN.
    errors = table.std(0, ddof=min(1, len(table) - 1)) / math.sqrt(len(table))
    means = dict(zip(METRICS, table.mean(0).tolist()))
    return means | {f"{name}_se": error for name, error in zip(METRICS, errors.tolist())}


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """Return the metrics with their standard errors in one line."""
    return ", ".join(
        f"{name.replace('mrr', 'MRR')} {metrics[name]:.3f} ± {metrics[f'{name}_se']:.3f}"
        for name in METRICS
    )
