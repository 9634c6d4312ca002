"""Metrics and baselines for text classification and regression, with standard errors.

    for result in baseline_results(train_texts, train_labels, test_texts, test_labels):
        print(result.name, result.metric, result.value, result.standard_error)

A fine-tuned encoder is only worth its cost if it beats the majority class and a linear model on
TF-IDF features, which take seconds. Texts are strings or pairs of strings. Labels are class numbers
or names, floats for regression, or rows of 0 and 1 for several labels per text.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import scipy.stats
from sklearn import metrics
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import FeatureUnion


Texts = Sequence[str] | Sequence[tuple[str, ...]]
Labels = Sequence | np.ndarray
Metric = Callable[[np.ndarray, np.ndarray], float]

# A linear model on more rows would take minutes, and the baselines should take seconds.
MAX_TRAIN_ROWS = 20_000
# The features of long documents would take gigabytes.
MAX_TRAIN_CHARACTERS = 20_000_000
# The optimizer stores about 25 copies of the coefficients, one per class and feature: 2 GB.
MAX_COEFFICIENTS = 10_000_000
MAX_CHARACTER_FEATURES = 200_000
# The features of test rows are computed in chunks, because there may be millions of rows.
ROWS_AT_ONCE = 1000
BOOTSTRAP_SAMPLES = 200

# Functions of labels and predictions. A correlation with constant predictions is not defined and
# counts as 0.
METRICS: dict[str, Metric] = {
    "accuracy": metrics.accuracy_score,
    "f1": lambda labels, predictions: metrics.f1_score(labels, predictions, zero_division=0.0),
    "macro_f1": lambda labels, predictions: metrics.f1_score(
        labels, predictions, average="macro", zero_division=0.0
    ),
    "micro_f1": lambda labels, predictions: metrics.f1_score(
        labels, predictions, average="micro", zero_division=0.0
    ),
    "matthews": metrics.matthews_corrcoef,
    "pearson": lambda labels, predictions: _correlation(scipy.stats.pearsonr, labels, predictions),
    "spearman": lambda labels, predictions: _correlation(
        scipy.stats.spearmanr, labels, predictions
    ),
    # The predictions of a text are its numbers of correct, predicted and true entities or words,
    # (N, 3), so a bootstrap resamples texts. The labels are not used.
    "entity_f1": lambda labels, counts: _ratio(2 * counts[:, 0].sum(), counts[:, 1:].sum()),
    "word_accuracy": lambda labels, counts: _ratio(counts[:, 0].sum(), counts[:, 2].sum()),
}


def metric_title(metric: str) -> str:
    """Return the name of a metric for people, such as "macro F1" for "macro_f1"."""
    return metric.replace("_", " ").replace("f1", "F1")


@dataclass(frozen=True)
class Baseline:
    """Predictions of a baseline for the test rows.

    Attributes:
        name: Name for a table, such as "majority class".
        predictions: One label per test row.
        train_rows: Number of rows that the baseline was fitted on.
    """

    name: str
    predictions: np.ndarray
    train_rows: int


@dataclass(frozen=True)
class BaselineResult:
    """Value of one metric of a baseline on the test rows.

    Attributes:
        name: Name of the baseline.
        metric: Name of the metric.
        value: Value of the metric, a fraction and not a percentage.
        standard_error: Standard error of the value over test rows.
        train_rows: Number of rows that the baseline was fitted on.
    """

    name: str
    metric: str
    value: float
    standard_error: float
    train_rows: int


def baseline_results(
    train_texts: Texts,
    train_labels: Labels,
    test_texts: Texts,
    test_labels: Labels,
    metric: str = "accuracy",
    regression: bool = False,
    max_train_rows: int = MAX_TRAIN_ROWS,
) -> list[BaselineResult]:
    """Fit the baselines on the training rows and measure them on the test rows.

    Args:
        train_texts: Texts or pairs of texts of the training rows.
        train_labels: Labels of the training rows.
        test_texts: Texts or pairs of texts of the test rows.
        test_labels: Labels of the test rows.
        metric: Key of `METRICS`.
        regression: Whether labels are floats.
        max_train_rows: Maximum number of training rows of the linear model, whose characters are
            limited, too. A seeded sample is used if there are more.

    Returns:
        The result of a constant prediction, then the result of a linear model on TF-IDF features.
    """
    results = []
    for baseline in fit_baselines(
        train_texts, train_labels, test_texts, regression, max_train_rows
    ):
        value, error = value_and_error(metric, test_labels, baseline.predictions)
        results.append(
            BaselineResult(baseline.name, metric, value, error, train_rows=baseline.train_rows)
        )
    return results


def fit_baselines(
    train_texts: Texts,
    train_labels: Labels,
    test_texts: Texts,
    regression: bool = False,
    max_train_rows: int = MAX_TRAIN_ROWS,
) -> list[Baseline]:
    """Fit the baselines on the training rows and predict the labels of the test rows.

    The constant baseline uses all rows. The linear model uses a seeded sample of at most
    `max_train_rows` rows and MAX_TRAIN_CHARACTERS characters. It is left out if the sample has a
    single label or no characters.

    Args:
        train_texts: Texts or pairs of texts of the training rows.
        train_labels: Labels of the training rows.
        test_texts: Texts or pairs of texts of the test rows.
        regression: Whether labels are floats.
        max_train_rows: Maximum number of training rows of the linear model.
    """
    labels = np.asarray(train_labels)
    baselines = [_constant_baseline(labels, len(test_texts), regression)]

    # scikit-learn refuses labels of one class, and texts without a single feature.
    texts, labels = _sample_rows(train_texts, labels, max_train_rows)
    has_characters = any(text.strip() for row in texts for text in _parts(row))
    if len(np.unique(labels)) > 1 and has_characters:
        baselines.append(_linear_baseline(texts, labels, test_texts, regression))
    return baselines


def _constant_baseline(labels: np.ndarray, test_rows: int, regression: bool) -> Baseline:
    """Predict the mean label or the majority class for every test row."""
    # The constant baseline needs no features, but scikit-learn requires an array of them.
    constant = DummyRegressor() if regression else DummyClassifier(strategy="most_frequent")
    constant.fit(np.zeros((len(labels), 1)), labels)
    predictions = constant.predict(np.zeros((test_rows, 1)))
    name = "mean label" if regression else "majority class"
    return Baseline(name, predictions, len(labels))


def _sample_rows(texts: Texts, labels: np.ndarray, max_train_rows: int) -> tuple[Texts, np.ndarray]:
    """Return a seeded sample of at most `max_train_rows` rows and MAX_TRAIN_CHARACTERS characters.

    Rows that need no sample keep their order.
    """
    order = np.random.default_rng(0).permutation(len(labels))[:max_train_rows]
    sizes = [sum(map(len, _parts(texts[i]))) for i in order]
    count = int(np.searchsorted(np.cumsum(sizes), MAX_TRAIN_CHARACTERS, side="right"))
    # A linear model needs two labels, and so at least two rows.
    sample = order[: max(2, count)]
    if len(sample) == len(labels):
        return texts, labels
    return [texts[i] for i in sample], labels[sample]


def _linear_baseline(
    texts: Texts, labels: np.ndarray, test_texts: Texts, regression: bool
) -> Baseline:
    """Fit a linear model on TF-IDF features and predict the labels of the test rows."""
    # Rows of several labels have one column per class. A regression has one output.
    outputs = 1
    if not regression:
        outputs = labels.shape[1] if labels.ndim == 2 else len(np.unique(labels))
    features = _TextFeatures(MAX_COEFFICIENTS // outputs).fit(texts)
    linear = _ridge(1.0) if regression else _logistic(10.0, labels)
    linear.fit(features.transform(texts), labels)

    chunks = [
        linear.predict(features.transform(test_texts[start : start + ROWS_AT_ONCE]))
        for start in range(0, len(test_texts), ROWS_AT_ONCE)
    ]
    name = f"TF-IDF + {'ridge' if regression else 'logistic'} regression"
    return Baseline(name, np.concatenate(chunks), len(labels))


def fit_embedding_baseline(
    train_embeddings: np.ndarray,
    train_labels: Labels,
    validation_embeddings: np.ndarray,
    validation_labels: Labels,
    test_embeddings: np.ndarray,
    metric: str,
    regression: bool = False,
) -> Baseline:
    """Fit a linear model on embeddings, with the regularization that suits the validation rows.

    Args:
        train_embeddings: Embeddings of the training rows, (N, D).
        train_labels: Labels of the training rows.
        validation_embeddings: Embeddings of the validation rows, (M, D).
        validation_labels: Labels of the validation rows.
        test_embeddings: Embeddings of the rows to predict, (K, D).
        metric: Key of `METRICS`.
        regression: Whether labels are floats.
    """
    labels = np.asarray(train_labels)
    # With inputs of unit variance, the same candidates suit every encoder.
    scale = train_embeddings.std() or 1.0
    # From strong to weak regularization, so the stronger of two equal ones is selected.
    if regression:
        candidates = [_ridge(alpha) for alpha in (100.0, 10.0, 1.0, 0.1)]
    else:
        candidates = [_logistic(c, labels) for c in (0.01, 0.1, 1.0, 10.0)]

    best_value = -math.inf
    for candidate in candidates:
        candidate.fit(train_embeddings / scale, labels)
        predictions = candidate.predict(validation_embeddings / scale)
        value = METRICS[metric](np.asarray(validation_labels), predictions)
        # The regularization is selected on the validation rows, like the checkpoint of fine-tuning.
        if value > best_value:
            best_value = value
            linear = candidate
    name = f"frozen embeddings + {'ridge' if regression else 'logistic'} regression"
    return Baseline(name, linear.predict(test_embeddings / scale), len(labels))


def _ridge(alpha: float) -> Ridge:
    """Return a ridge regression with the strength `alpha` of the regularization."""
    return Ridge(alpha=alpha)


def _logistic(c: float, labels: np.ndarray) -> Any:
    """Return a logistic regression with the inverse strength `c` of the regularization."""
    # Labels of shape (N, C) are those of a multi-label task, with one model per class.
    model = LogisticRegression(C=c, max_iter=1000)
    return OneVsRestClassifier(model) if labels.ndim == 2 else model


def value_and_error(metric: str, labels: Labels, predictions: Labels) -> tuple[float, float]:
    """Return the value of a metric and its standard error.

    The standard error of an accuracy is that of a binomial proportion. Other metrics are
    bootstrapped over rows.

    Args:
        metric: Key of `METRICS`.
        labels: Labels of the rows, (N,) or (N, C).
        predictions: Predictions for the rows, as the metric takes them, see `METRICS`.
    """
    truth = np.asarray(labels)
    predicted = np.asarray(predictions)
    value = float(METRICS[metric](truth, predicted))
    # The bootstrap would estimate the same value for a mean of zeros and ones.
    if metric == "accuracy":
        return value, math.sqrt(value * (1 - value) / len(truth))
    return value, bootstrap_error(METRICS[metric], truth, predicted)


def difference_and_error(
    metric: str, labels: Labels, predictions: Labels, other_predictions: Labels
) -> tuple[float, float]:
    """Return the difference of a metric between two models, and its standard error over rows.

    The difference is positive if `predictions` are better than `other_predictions`. Both are
    measured on the same rows, so the error is that of the paired difference.

    Args:
        metric: Key of `METRICS`.
        labels: Labels of the rows, (N,) or (N, C).
        predictions: Predictions for the rows, as the metric takes them, see `METRICS`.
        other_predictions: Predictions of the other model for the same rows.
    """
    truth = np.asarray(labels)
    # Predictions of both models in one array are resampled together, by the same rows.
    both = np.stack([np.asarray(predictions), np.asarray(other_predictions)], axis=1)

    def difference(labels: np.ndarray, both: np.ndarray) -> float:
        return METRICS[metric](labels, both[:, 0]) - METRICS[metric](labels, both[:, 1])

    return float(difference(truth, both)), bootstrap_error(difference, truth, both)


def bootstrap_error(metric: Metric, labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the standard deviation of a metric over bootstrap samples of the rows.

    Args:
        metric: Function of labels and predictions.
        labels: Labels of the rows, (N, ...).
        predictions: Predictions for the rows, (N, ...).
    """
    generator = np.random.default_rng(0)
    values = []
    with warnings.catch_warnings():
        # A sample of few rows may contain a single label.
        warnings.filterwarnings("ignore", message="A single label was found")
        for _ in range(BOOTSTRAP_SAMPLES):
            rows = generator.integers(len(labels), size=len(labels))
            values.append(metric(labels[rows], predictions[rows]))
    return float(np.std(values, ddof=1))


class _TextFeatures:
    """TF-IDF features of words and characters, for texts or pairs of texts.

    A pair is represented by the features of both texts, their absolute difference, their product
    and the cosine similarity of words and of characters.

    Args:
        max_features: Maximum number of features of a row. The most frequent ones are used.
    """

    def __init__(self, max_features: int) -> None:
        self.max_features = max_features
        # Unlike the default, the pattern keeps words of one letter and punctuation.
        self.words = TfidfVectorizer(
            ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]+", sublinear_tf=True
        )
        self.characters = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
        self.union = FeatureUnion([("words", self.words), ("characters", self.characters)])

    def fit(self, texts: Texts) -> "_TextFeatures":
        # A pair has the features of a text four times.
        limit = self.max_features // (4 if len(_parts(texts[0])) == 2 else 1)
        self.characters.max_features = max(1, min(MAX_CHARACTER_FEATURES, limit // 2))
        self.words.max_features = max(1, limit - self.characters.max_features)
        # Both texts of a pair have the same vocabulary, so their features can be compared.
        self.union.fit([text for row in texts for text in _parts(row)])
        return self

    def transform(self, texts: Texts) -> scipy.sparse.csr_matrix:
        columns = list(zip(*(_parts(row) for row in texts)))
        if len(columns) == 1:
            return self.union.transform(columns[0])

        first, second = (self.union.transform(column) for column in columns)
        # The rows of each vectorizer have length 1, so the sum of a product is a cosine.
        product = first.multiply(second).tocsr()
        words = len(self.words.vocabulary_)
        similarities = np.hstack([product[:, :words].sum(axis=1), product[:, words:].sum(axis=1)])
        return scipy.sparse.hstack(
            [first, second, abs(first - second), product, similarities], format="csr"
        )


def _parts(row: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the texts of a row."""
    return (row,) if isinstance(row, str) else tuple(row)


def _ratio(part: float, whole: float) -> float:
    """Return part / whole, 0 for an empty whole."""
    return float(part / whole) if whole else 0.0


def _correlation(function: Callable, labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return a correlation in double precision, 0 if it is not defined."""
    labels = np.asarray(labels, dtype=np.float64)
    predictions = np.asarray(predictions, dtype=np.float64)
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    return float(np.nan_to_num(function(labels, predictions).statistic))
