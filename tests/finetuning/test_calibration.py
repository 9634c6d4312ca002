"""Test temperature scaling and the expected calibration error by formulas."""

import numpy as np
import pytest
from scipy.special import softmax


pytest.importorskip("scipy")

from neobert.finetuning.calibration import (  # noqa: E402
    calibrate,
    calibration_error,
    fit_temperature,
    probabilities,
)


def sampled(temperature, rows=4000):
    """Return logits that are `temperature` times too large, and labels of their probabilities."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(rows, 3)) * 2
    chances = softmax(logits, axis=1)
    labels = np.array([generator.choice(3, p=row) for row in chances])
    return logits * temperature, labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_distorted_the_logits_is_recovered(temperature):
    logits, labels = sampled(temperature)
    assert fit_temperature(logits, labels, False) == pytest.approx(temperature, rel=0.1)


def test_predictions_without_an_error_keep_their_temperature():
    logits = np.array([[2.0, -1.0], [0.5, 1.5], [3.0, 0.0]])
    assert fit_temperature(logits, np.array([0, 1, 0]), False) == 1
    assert fit_temperature(logits, np.array([1, 1, 0]), False) > 1
    assert fit_temperature(logits, np.array([[1, 0], [1, 1], [1, 0]]), True) == 1


def test_multi_label_logits_have_a_temperature():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(4000, 2))
    labels = (generator.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(float)
    assert fit_temperature(2 * logits, labels, True) == pytest.approx(2.0, rel=0.1)


def test_the_calibration_error_by_hand():
    # One bin with confidence 0.9 and accuracy 1/2, one with 0.6 and 1.
    confidences = np.array([0.9, 0.9, 0.6, 0.6])
    correct = np.array([True, False, True, True])
    assert calibration_error(confidences, correct) == pytest.approx((0.4 + 0.4) / 2)
    assert calibration_error(np.ones(3), np.ones(3)) == 0.0
    assert calibration_error(np.zeros(0), np.zeros(0)) == 0.0


def test_calibration_reduces_the_error():
    logits, labels = sampled(4.0)
    result = calibrate((logits[:2000], labels[:2000]), (logits[2000:], labels[2000:]), False)
    assert result.error_before > 0.1 > 0.04 > result.error_after
    assert probabilities(np.array([[0.0, 0.0]]), 5.0, False).tolist() == [[0.5, 0.5]]
    assert probabilities(np.array([[2.0]]), 2.0, True)[0, 0] == pytest.approx(1 / (1 + np.exp(-1)))
