"""`neobert retrieval MODEL --pairs FILE`: how often an encoder finds the text that belongs to a
question, among all texts of the file."""

import math
import sys
from collections.abc import Callable

import numpy as np
import torch

from ..common.data import rows
from ..common.errors import UserError
from ..common.loading import choose_device
from ..embeddings.packed_encoder import load_sentence_transformer
from .options import OPTIONS


METRICS = ("recall@1", "recall@10", "mrr@10")


def read_questions(path):
    """({question: its positives}, all positives and negatives) of a file of pairs.

    Raises:
        UserError: it cannot be read, or has no usable row.
    """
    relevant, texts = {}, {}
    for row in rows(path, texts=["anchor", "positive"]):
        if row["anchor"].strip() and row["positive"].strip():
            relevant.setdefault(row["anchor"], set()).add(row["positive"])
            texts[row["positive"]] = None
            for name, value in row.items():
                if name == "negative" or name.startswith("negative_"):
                    texts |= dict.fromkeys(value if isinstance(value, list) else [value])
    if not relevant:
        raise UserError(f"{path} has no row with an anchor and a positive")
    return relevant, [text for text in texts if text and text.strip()]


def measure(model, relevant, texts):
    """{"recall@1", "recall@10", "mrr@10": mean over the questions} and, with "_se" after each name,
    its standard error; by the model's own similarity and its prompts.

    Args:
        model: SentenceTransformer.
        relevant: {question: set of those of `texts` that belong to it}.
        texts: what is searched.
    """
    questions = list(relevant)
    queries, documents = (
        encode(part, convert_to_tensor=True, show_progress_bar=True)
        for encode, part in ((model.encode_query, questions), (model.encode_document, texts))
    )
    return _metrics(relevant, texts, lambda rows: model.similarity(queries[rows], documents))


def _metrics(
    relevant: dict[str, set[str]], texts: list[str], similarity: Callable[[slice], torch.Tensor]
) -> dict[str, float]:
    """Return the mean metrics and their standard errors.

    Args:
        relevant: Positives of each question.
        texts: Texts that are searched.
        similarity: Function that returns the similarities of a slice of the questions to all texts.
    """
    questions, values = list(relevant), []
    step = max(1, 10**8 // len(texts))  # bounds the memory of the similarities
    for start in range(0, len(questions), step):
        scores = similarity(slice(start, start + step))
        best = scores.topk(min(10, len(texts))).indices.tolist()
        for question, numbers in zip(questions[start:], best):
            right = relevant[question]
            hits = [texts[number] in right for number in numbers]
            rank = hits.index(True) + 1 if any(hits) else math.inf
            values.append([sum(hits[:1]) / len(right), sum(hits) / len(right), 1 / rank])
    values = np.array(values)
    errors = values.std(0, ddof=min(1, len(values) - 1)) / math.sqrt(len(values))
    means = dict(zip(METRICS, values.mean(0).tolist()))
    return means | {f"{name}_se": error for name, error in zip(METRICS, errors.tolist())}


def measure_tfidf(relevant: dict[str, set[str]], texts: list[str]) -> dict[str, float]:
    """Return the metrics of `measure` for TF-IDF of character n-grams, fitted on `texts`."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
    documents = vectorizer.fit_transform(texts)
    questions = vectorizer.transform(list(relevant))
    return _metrics(
        relevant, texts, lambda rows: torch.from_numpy((questions[rows] @ documents.T).toarray())
    )


def described(measures):
    """The measures as one text."""
    return ", ".join(
        f"{name.replace('mrr', 'MRR')} {measures[name]:.3f} ± {measures[f'{name}_se']:.3f}"
        for name in METRICS
    )


def main(argv=None):
    """`neobert retrieval MODEL --pairs FILE`; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    (arguments,) = OPTIONS["retrieval"].read(argv)
    relevant, texts = read_questions(arguments.pairs)
    device = choose_device(arguments.device)
    model = load_sentence_transformer(arguments.model, device, **arguments.loading())
    print(
        f"{arguments.model}: {len(relevant):,} questions among {len(texts):,} texts: "
        f"{described(measure(model, relevant, texts))}"
    )
    return 0
