"""Test temperature scaling and the expected calibration error against formulas."""

import numpy as np
import pytest


pytest.importorskip("scipy")
from scipy.special import softmax  # noqa: E402

from neobert.finetuning.calibration import (  # noqa: E402
    calibrate,
    calibration_error,
    fit_temperature,
    probabilities,
)


def sampled(temperature, rows=4000):
    """Return logits that need a known temperature, and their labels.

    The labels are sampled from the probabilities of the original logits. The returned logits are
    the original ones multiplied by `temperature`.
    """
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(rows, 3)) * 2
    class_probabilities = softmax(logits, axis=1)
    labels = np.array([generator.choice(3, p=row) for row in class_probabilities])
    return logits * temperature, labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_fit_temperature_recovers_known_temperature(temperature):
    """Check that `fit_temperature` returns the factor by which the logits were multiplied."""
    logits, labels = sampled(temperature)
    assert fit_temperature(logits, labels, False) == pytest.approx(temperature, rel=0.1)


def test_temperature_is_1_if_all_predictions_are_correct():
    """The temperature stays 1 if all predictions are correct.

    A lower temperature would reduce the loss without limit.
    """
    logits = np.array([[2.0, -1.0], [0.5, 1.5], [3.0, 0.0]])
    assert fit_temperature(logits, np.array([0, 1, 0]), False) == 1
    assert fit_temperature(logits, np.array([1, 1, 0]), False) > 1
    assert fit_temperature(logits, np.array([[1, 0], [1, 1], [1, 0]]), True) == 1


def test_fit_temperature_of_multi_label_logits():
    """Check that the temperature of sigmoid outputs is recovered."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(4000, 2))
    labels = (generator.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(float)
    assert fit_temperature(2 * logits, labels, True) == pytest.approx(2.0, rel=0.1)


def test_calibration_error_matches_hand_computed_values():
    """Check the expected calibration error against values computed by hand."""
    # The first bin has confidence 0.9 and accuracy 0.5, the second one 0.6 and 1.0.
    confidences = np.array([0.9, 0.9, 0.6, 0.6])
    correct = np.array([True, False, True, True])
    assert calibration_error(confidences, correct) == pytest.approx((0.4 + 0.4) / 2)
    assert calibration_error(np.ones(3), np.ones(3)) == 0.0
    assert calibration_error(np.zeros(0), np.zeros(0)) == 0.0


def test_calibration_reduces_the_error():
    """The temperature of one half of the rows reduces the calibration error of the other half."""
    logits, labels = sampled(4.0)
    result = calibrate((logits[:2000], labels[:2000]), (logits[2000:], labels[2000:]), False)
    assert result.error_before > 0.1 > 0.04 > result.error_after

    # Probabilities are computed from the logits divided by the temperature.
    assert probabilities(np.array([[0.0, 0.0]]), 5.0, False).tolist() == [[0.5, 0.5]]
    assert probabilities(np.array([[2.0]]), 2.0, True)[0, 0] == pytest.approx(1 / (1 + np.exp(-1)))
