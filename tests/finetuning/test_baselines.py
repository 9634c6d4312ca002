"""Tests of the baselines of `neobert glue`: their predictions, standard errors and warnings."""

import logging
import math

import numpy as np
import pytest
from helpers.glue_runs import make_world, run  # noqa: F401

from neobert.finetuning import baselines, glue_data
from neobert.finetuning import glue_command as glue
from neobert.finetuning.glue_options import SelectionOptions
from neobert.finetuning.glue_tasks import TASKS


POSITIVE = [f"a good film about {i} houses" for i in range(40)]
NEGATIVE = [f"a bad film about {i} houses" for i in range(20)]
TEXTS = POSITIVE + NEGATIVE
LABELS = ["yes"] * 40 + ["no"] * 20
TEST_TEXTS = ["good house", "bad house", "a bad one", "very good"]
TEST_LABELS = ["yes", "no", "no", "no"]


# ------------------------------------------------------------------------------------------------
# baseline functions


def test_classification_baselines_match_hand_computed_values():
    """Check both baselines of a classification against values computed by hand."""
    majority, tfidf = baselines.baseline_results(TEXTS, LABELS, TEST_TEXTS, TEST_LABELS)

    assert majority == baselines.BaselineResult(
        name="majority class",
        metric="accuracy",
        value=1 / 4,
        standard_error=math.sqrt(1 / 4 * 3 / 4 / 4),
        train_rows=60,
    )

    # A single word determines the class, and the label of the last test row is wrong.
    assert (tfidf.name, tfidf.value) == ("TF-IDF + logistic regression", 3 / 4)


def test_the_features_are_word_and_character_ngrams():
    """The predictions are those of scikit-learn with word and character n-gram vectorizers."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    words = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]+", sublinear_tf=True)
    characters = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
    train_features = [np.hstack([v.fit_transform(TEXTS).toarray()]) for v in (words, characters)]
    test_features = [v.transform(TEST_TEXTS).toarray() for v in (words, characters)]
    model = LogisticRegression(C=10.0, max_iter=1000).fit(np.hstack(train_features), LABELS)

    _, tfidf = baselines.fit_baselines(TEXTS, LABELS, TEST_TEXTS)
    assert tfidf.predictions.tolist() == model.predict(np.hstack(test_features)).tolist()


def test_linear_baseline_uses_both_texts_of_a_pair():
    """Check that the linear model uses both texts of a pair.

    The label is 1 if the two texts are equal, so neither text alone determines the label.
    """
    words = [f"w{i}x{i * i}" for i in range(30)]
    pairs = [(a, b) for a in words[:15] for b in (a, words[words.index(a) - 1])]
    labels = [int(a == b) for a, b in pairs]
    test = [(a, b) for a in words[15:] for b in (a, words[words.index(a) - 1])]

    (_, tfidf) = baselines.baseline_results(pairs, labels, test, [int(a == b) for a, b in test])
    assert tfidf.value > 0.9

    similarities = [5.0 * label for label in labels]
    mean, ridge = baselines.baseline_results(
        pairs, similarities, test, [5.0 * (a == b) for a, b in test], "pearson", regression=True
    )
    assert (mean.name, mean.value) == ("mean label", 0.0)
    assert ridge.name == "TF-IDF + ridge regression" and ridge.value > 0.9


def test_training_rows_are_limited():
    """`max_train_rows` limits the rows of the linear model to a random sample."""
    # The labels are sorted, so the first 40 rows would have only one label.
    majority, tfidf = baselines.fit_baselines(TEXTS, LABELS, TEST_TEXTS, max_train_rows=40)
    assert (majority.train_rows, tfidf.train_rows) == (60, 40)
    assert tfidf.predictions.tolist() == ["yes", "no", "no", "yes"]


def test_training_characters_are_limited(monkeypatch):
    """The sample of the linear model ends before its texts exceed the number of characters."""
    characters = 20 * max(map(len, TEXTS))
    monkeypatch.setattr(baselines, "MAX_TRAIN_CHARACTERS", characters)
    _, tfidf = baselines.fit_baselines(TEXTS, LABELS, TEST_TEXTS)
    assert 20 <= tfidf.train_rows <= characters // min(map(len, TEXTS)) < 60


def test_coefficients_are_limited(monkeypatch):
    """The number of classes times the number of features is limited, also for pairs."""
    sizes = []
    logistic = baselines._logistic

    class Recorder:
        def __init__(self, *arguments, **options):
            self.model = logistic(*arguments, **options)

        def fit(self, features, labels):
            sizes.append(features.shape[1] * len(set(labels)))
            self.model.fit(features, labels)
            return self

        def predict(self, features):
            sizes.append(features.shape[0])
            return self.model.predict(features)

    _, unlimited = baselines.fit_baselines(TEXTS, LABELS, TEST_TEXTS)
    monkeypatch.setattr(baselines, "_logistic", Recorder)
    monkeypatch.setattr(baselines, "ROWS_AT_ONCE", 3)
    # The predictions in chunks are the same.
    _, chunked = baselines.fit_baselines(TEXTS, LABELS, TEST_TEXTS)
    assert sizes[1:] == [3, 1]
    assert chunked.predictions.tolist() == unlimited.predictions.tolist()

    monkeypatch.setattr(baselines, "MAX_COEFFICIENTS", 400)
    pairs = [(text, text) for text in TEXTS]
    for texts, tests in ((TEXTS, TEST_TEXTS), (pairs, [(text, text) for text in TEST_TEXTS])):
        sizes.clear()
        baselines.fit_baselines(texts, LABELS, tests)
        # Pairs also have two similarities.
        assert 300 <= sizes[0] <= 404


@pytest.mark.parametrize(("texts", "labels"), [(TEXTS, ["a"] * 60), ([" "] * 60, LABELS)])
def test_linear_baseline_is_skipped_if_it_cannot_be_fitted(texts, labels):
    """Only the constant baseline is returned if the linear model cannot be fitted."""
    assert len(baselines.fit_baselines(texts, labels, TEST_TEXTS)) == 1


def test_standard_errors_match_formulas():
    """Check the standard errors of metrics against their formulas."""
    labels = np.repeat([0, 1], [300, 100])
    predictions = np.zeros(400, dtype=int)
    assert baselines.value_and_error("accuracy", labels, predictions) == (
        0.75,
        pytest.approx(math.sqrt(0.75 * 0.25 / 400)),
    )

    # The bootstrap error of an accuracy agrees with the binomial formula. The bootstrap error of a
    # correlation of n normally distributed pairs agrees with (1 - r^2) / sqrt(n).
    accuracy = baselines.METRICS["accuracy"]
    error = baselines.bootstrap_error(accuracy, labels, predictions)
    assert error == pytest.approx(math.sqrt(0.75 * 0.25 / 400), rel=0.15)

    x, noise = np.random.default_rng(1).normal(size=(2, 1000))
    value, error = baselines.value_and_error("pearson", x + noise, x)
    assert value == pytest.approx(math.sqrt(1 / 2), abs=0.05)
    assert error == pytest.approx((1 - value**2) / math.sqrt(1000), rel=0.2)


def test_correlations_are_computed_in_double_precision():
    """Check the Pearson correlation of float32 values against the formula in float64."""
    labels = np.array([1.0, 2.0, 4.0, 3.5], dtype=np.float32)
    predictions = np.array([0.1, 0.7, 1.9, 1.1], dtype=np.float32)
    x, y = (values.astype(float) - values.astype(float).mean() for values in (labels, predictions))
    pearson = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
    value = baselines.METRICS["pearson"](labels, predictions)
    assert value == pytest.approx(pearson, abs=1e-14)


# ------------------------------------------------------------------------------------------------
# baselines of GLUE runs


def test_mnli_standard_error_combines_both_dev_splits():
    """Check the score and standard error of MNLI, the mean over its two dev splits."""
    labels = {
        "validation_matched": np.array([0, 1, 2, 0]),
        "validation_mismatched": np.array([0, 0, 1]),
    }
    predictions = {name: np.zeros(len(values), dtype=int) for name, values in labels.items()}
    value, error = glue_data.score_and_error(TASKS["mnli"], predictions, labels)
    assert value == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert error == pytest.approx(math.sqrt(1 / 4 / 4 + 2 / 9 / 3) / 2)


def test_baselines_exclude_held_out_rows():
    """The baselines are fitted on the training rows without the held-out rows."""
    texts = {"sentence": TEXTS, "label": [int(label == "yes") for label in LABELS]}
    splits = {"train": texts, "validation": {"sentence": TEST_TEXTS, "label": [1, 0, 0, 0]}}
    selection = SelectionOptions(heldout_fraction=0.5)

    majority, tfidf = glue_data.task_baselines(TASKS["sst2"], splits, selection)
    assert (majority.train_rows, majority.value) == (30, 1 / 4)
    assert (tfidf.metric, tfidf.value) == ("accuracy", 3 / 4)

    # No rows are held out if the dev set selects the checkpoint.
    majority, _ = glue_data.task_baselines(TASKS["sst2"], splits, SelectionOptions(selection="dev"))
    assert majority.train_rows == 60


def result_of(score, classes=2):
    """Return the fields of a run's result that `report_baselines` reads."""
    entries = [
        {"name": "majority class", "value": 0.5, "standard_error": 0.02},
        {"name": "TF-IDF + logistic regression", "value": 0.9, "standard_error": 0.01},
    ]
    return {
        "score": score,
        "standard_error": 0.015,
        "predicted_classes": classes,
        "baselines": entries,
    }


def test_warning_if_best_baseline_is_not_beaten(caplog):
    """The mean score over the seeds must be higher than that of the best baseline."""
    caplog.set_level(logging.INFO, "neobert")
    cases = [([result_of(0.91)], 0), ([result_of(0.9)], 1), ([result_of(0.95), result_of(0.8)], 1)]
    for results, warnings in cases:
        caplog.clear()
        glue.report_baselines(TASKS["sst2"], results)
        levels = [record.levelno for record in caplog.records]
        assert levels == [logging.INFO] + [logging.WARNING] * warnings, (
            f"Unexpected log for {results}."
        )

    assert "sst2, dev accuracy: fine-tuned 87.5 ± 1.5, majority class 50.0 ± 2.0" in caplog.text
    assert "does not beat the baseline 'TF-IDF + logistic regression'" in caplog.text
    assert "--learning-rate" in caplog.text and "--num-train-epochs" in caplog.text


def test_warning_if_a_single_class_is_predicted(caplog):
    """A run that predicts the same class for every row logs a warning."""
    glue.report_baselines(TASKS["sst2"], [result_of(0.95), result_of(0.95, classes=1)])
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "predicts the same class for every dev row" in record.getMessage()


def test_a_run_is_compared_with_its_baselines(world, tmp_path, caplog):
    """A run reports its baselines in the result, the table and the log.

    The learning rate is so low that the model does not beat the baseline.
    """
    caplog.set_level(logging.INFO, "neobert")
    runs = run(world, tmp_path, learning_rate=1e-12)
    result = runs["sst2", 1][1]

    majority, tfidf = result["baselines"]
    assert (majority["value"], majority["train_rows"]) == (0.5, 144)
    assert tfidf["value"] > 0.9, "A single word determines the class, so TF-IDF must be accurate."
    score = result["score"]
    assert result["standard_error"] == pytest.approx(math.sqrt(score * (1 - score) / 40))

    assert "Training: 9 steps, 1 epoch, 144 sequences, learning rate 1e-12" in caplog.text
    assert "does not beat the baseline" in caplog.text

    page = (tmp_path / "table.md").read_text()
    assert "| TF-IDF |" in page and f"{100 * score:.1f} ± " in page


def test_bootstrap_samples_with_one_label_do_not_warn(recwarn):
    """Check that bootstrap samples with a single label cause no warning of scikit-learn."""
    labels = np.array([0, 1, 1])
    baselines.bootstrap_error(baselines.METRICS["matthews"], labels, labels)
    assert not recwarn.list
