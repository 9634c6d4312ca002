"""Scores of several search systems joined into one: by ranks, and by standardised scores.

Ranks throw away how far apart two documents are. A weighted sum of standardised scores keeps it
(Bruch, Gai and Ingber 2023, "An analysis of fusion functions for hybrid retrieval").
"""

import numpy as np


WEIGHTS = np.arange(21) / 20  # 0 to 1


def ranks_of(scores):
    """Rank of every document for every query, the best 1; equal scores share the mean of their
    ranks."""
    from scipy.stats import rankdata

    return rankdata(-scores, axis=1)


def fused(*ranks, k=60):
    """Reciprocal rank fusion (Cormack, Clarke and Büttcher 2009): scores from the ranks that
    several systems give."""
    return sum(1 / (k + rank) for rank in ranks)


def standardised(scores):
    """(queries, documents) scores with mean 0 and deviation 1 for every query; a query with equal
    scores has zeros."""
    deviation = scores.std(axis=1, keepdims=True)
    return (scores - scores.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1)


def weighted(vectors, words, weight):
    """Convex combination: `weight` of the standardised scores of vectors, the rest of those of
    words.

    Args:
        vectors, words: (queries, documents) arrays, more is better.
        weight: 0 is words alone, 1 vectors alone.
    """
    return weight * standardised(vectors) + (1 - weight) * standardised(words)


def reciprocal_ranks(scores):
    """(N,) 1 / rank of document i for query i, of (N, N) scores."""
    return 1 / np.diag(ranks_of(scores))


def best_weight(tests):
    """(weight, mean MRR over the tests) of the best of `WEIGHTS` for `weighted`.

    Args:
        tests: list of (vectors, words), each (N, N) with document i the answer to query i. The
        weight fits them: figures are taken on other tests.
    """
    found = [
        np.mean([reciprocal_ranks(weighted(*test, weight)).mean() for test in tests])
        for weight in WEIGHTS
    ]
    return float(WEIGHTS[np.argmax(found)]), float(max(found))
