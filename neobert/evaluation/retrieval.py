"""Command `neobert retrieval`: recall and MRR of an encoder on pairs of questions and texts.

Every question is searched among all texts of the file.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..common.data import rows
from ..common.errors import UserError
from ..common.loading import choose_device
from ..common.options import log_options
from ..embeddings.packed_encoder import load_sentence_transformer
from .options import OPTIONS


if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


METRICS = ("recall@1", "recall@10", "mrr@10")


@dataclass(frozen=True)
class Questions:
    """Questions and the texts that are searched.

    Attributes:
        relevant: Texts that answer each question, {question: texts}.
        texts: All texts that are searched.
    """

    relevant: dict[str, set[str]]
    texts: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert retrieval MODEL --pairs FILE` and return the exit code."""
    options = OPTIONS["retrieval"].read(argv or [])
    log_options(options)
    name = options.data.model
    questions = read_questions(options.data.pairs)
    device = choose_device(options.data.device)
    model = load_sentence_transformer(name, device, **options.encoder.settings())

    metrics = describe_metrics(evaluate_retrieval(model, questions))
    counts = f"{len(questions.relevant):,} questions among {len(questions.texts):,} texts"
    print(f"{name}: {counts}: {metrics}")
    return 0


def read_questions(path: str) -> Questions:
    """Read the questions of a file of pairs.

    Raises:
        UserError: If the file cannot be read or has no usable row.
    """
    questions = questions_of_rows(rows(path, texts=["anchor", "positive"]))
    if not questions.relevant:
        raise UserError(
            f"{path} has no row with an anchor and a positive. Pass a file with one pair per line."
        )
    return questions


def questions_of_rows(pairs: Iterable[Mapping[str, Any]]) -> Questions:
    """Return the questions of rows with the columns anchor, positive, negative, negative_1, ..."""
    relevant: dict[str, set[str]] = {}
    texts: dict[str, None] = {}
    for row in pairs:
        if not row["anchor"].strip() or not row["positive"].strip():
            continue
        relevant.setdefault(row["anchor"], set()).add(row["positive"])
        texts[row["positive"]] = None
        for name, value in row.items():
            if name == "negative" or name.startswith("negative_"):
                texts |= dict.fromkeys(value if isinstance(value, list) else [value])
    return Questions(relevant, [text for text in texts if text and text.strip()])


def evaluate_retrieval(model: "SentenceTransformer", questions: Questions) -> dict[str, float]:
    """Return recall@1, recall@10 and MRR@10, and their standard errors as "recall@1_se", ...

    The similarity function and the prompts are those of the model.
    """
    queries = model.encode_query(
        list(questions.relevant), convert_to_tensor=True, show_progress_bar=True
    )
    documents = model.encode_document(
        questions.texts, convert_to_tensor=True, show_progress_bar=True
    )
    return _metrics(questions, lambda part: model.similarity(queries[part], documents))


def evaluate_tfidf(questions: Questions) -> dict[str, float]:
    """Return the metrics of TF-IDF of character n-grams, fitted on the searched texts."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
    documents = vectorizer.fit_transform(questions.texts)
    queries = vectorizer.transform(list(questions.relevant))
    return _metrics(
        questions, lambda part: torch.from_numpy((queries[part] @ documents.T).toarray())
    )


def _metrics(questions: Questions, similarity: Callable[[slice], torch.Tensor]) -> dict[str, float]:
    """Return the mean metrics and their standard errors.

    Args:
        questions: Questions and texts.
        similarity: Function that returns the similarities of a slice of the questions to all texts.
    """
    names = list(questions.relevant)
    texts = questions.texts
    values = []
    step = max(1, 10**8 // len(texts))  # Bounds the memory of the similarities.
    for start in range(0, len(names), step):
        scores = similarity(slice(start, start + step))
        best = scores.topk(min(10, len(texts))).indices.tolist()
        for name, numbers in zip(names[start:], best):
            positives = questions.relevant[name]
            hits = [texts[number] in positives for number in numbers]
            rank = hits.index(True) + 1 if any(hits) else math.inf
            recalls = [sum(hits[:1]) / len(positives), sum(hits) / len(positives)]
            values.append([*recalls, 1 / rank])

    table = np.array(values)
    errors = table.std(0, ddof=min(1, len(table) - 1)) / math.sqrt(len(table))
    means = dict(zip(METRICS, table.mean(0).tolist()))
    return means | {f"{name}_se": error for name, error in zip(METRICS, errors.tolist())}


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """Return the metrics with their standard errors in one line."""
    return ", ".join(
        f"{name.replace('mrr', 'MRR')} {metrics[name]:.3f} ± {metrics[f'{name}_se']:.3f}"
        for name in METRICS
    )
