"""Calibration of a classifier: temperature scaling and expected calibration error.

Guo et al., "On Calibration of Modern Neural Networks", arXiv 1706.04599.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit, log_softmax, softmax


NUM_BINS = 15
# Bounds of the temperature.
_LOWEST = 0.05
_HIGHEST = 20.0


@dataclass(frozen=True)
class Calibration:
    """Temperature of a classifier, and its calibration error without and with the temperature.

    Attributes:
        temperature: Number that logits are divided by; 1 changes nothing.
        error_before: Expected calibration error on the test rows without the temperature.
        error_after: Expected calibration error with the temperature.
    """

    temperature: float
    error_before: float
    error_after: float


def probabilities(logits: np.ndarray, temperature: float, multi_label: bool) -> np.ndarray:
    """Return the probabilities of logits of shape (..., C).

    Args:
        logits: Logits, (..., C).
        temperature: Temperature by which the logits are divided.
        multi_label: Whether every class has a probability of its own.
    """
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    return expit(scaled) if multi_label else softmax(scaled, axis=-1)


def fit_temperature(logits: np.ndarray, labels: np.ndarray, multi_label: bool) -> float:
    """Return the temperature with the smallest cross entropy.

    The temperature is 1 if all predictions are right. Without an error, every lower temperature has
    a smaller cross entropy, and the probabilities would become 0 and 1.

    Args:
        logits: (N, C) logits of validation rows.
        labels: (N,) class numbers, or (N, C) zeros and ones of a multi-label task.
        multi_label: Whether every class has a probability of its own.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if multi_label:
        is_right = (logits > 0) == (np.asarray(labels) > 0.5)
    else:
        is_right = logits.argmax(axis=-1) == labels
    # Without rows there is no error either.
    if np.all(is_right):
        return 1.0

    def loss(log_temperature: float) -> float:
        scaled = logits / np.exp(log_temperature)
        if multi_label:
            # The probability of a label y in {-1, 1} is sigmoid(y * logit).
            signs = np.where(labels > 0.5, 1.0, -1.0)
            return float(-log_expit(signs * scaled).mean())
        chosen = log_softmax(scaled, axis=-1)[np.arange(len(labels)), labels]
        return float(-chosen.mean())

    # On a logarithmic scale, temperatures below and above 1 have intervals of the same size.
    bounds = (np.log(_LOWEST), np.log(_HIGHEST))
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x))


def calibration_error(confidences: np.ndarray, correct: np.ndarray) -> float:
    """Return the expected calibration error: the mean distance of confidence and accuracy.

    The mean is over bins of equal width, weighted by their numbers of predictions.

    Args:
        confidences: Probabilities of the predictions.
        correct: Whether the predictions are right.
    """
    confidences = np.ravel(confidences)
    correct = np.ravel(correct)
    if not len(confidences):
        return 0.0
    # A confidence of 1 belongs to the last bin.
    bins = np.minimum((confidences * NUM_BINS).astype(int), NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    confidence_sums = np.bincount(bins, confidences, NUM_BINS)
    correct_sums = np.bincount(bins, correct.astype(float), NUM_BINS)
    # A bin has the distance |confidence_sum - correct_sum| / count and the weight count / N.
    return float(np.abs(confidence_sums - correct_sums).sum() / counts.sum())


def calibrate(
    validation: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    multi_label: bool,
) -> Calibration:
    """Fit the temperature on validation rows and measure it on test rows.

    Args:
        validation: Logits and labels, as for `fit_temperature`.
        test: Logits and labels.
        multi_label: Whether every class has a probability of its own.
    """
    temperature = fit_temperature(*validation, multi_label)
    logits, labels = test
    # The predictions do not change with the temperature, only their confidences.
    errors = []
    for value in (1.0, temperature):
        scores = probabilities(logits, value, multi_label)
        if multi_label:
            # Every decision about a class is a prediction.
            confidences = np.maximum(scores, 1 - scores)
            correct = (scores > 0.5) == (labels > 0.5)
        else:
            confidences = scores.max(axis=-1, initial=0.0)
            correct = logits.argmax(axis=-1) == labels
        errors.append(calibration_error(confidences, correct))
    return Calibration(temperature, *errors)
