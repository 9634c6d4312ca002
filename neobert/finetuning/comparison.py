"""Baselines of a run on the same rows, and their comparison with the fine-tuned model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..common.tables import markdown_table
from ..common.task_file import REGRESSION, TOKENS
from ..embeddings.packed_encoder import PackedEncoder
from .baselines import (
    MAX_TRAIN_ROWS,
    Baseline,
    difference_and_error,
    fit_baselines,
    fit_embedding_baseline,
    metric_title,
    value_and_error,
)
from .evaluation import metric_inputs
from .finetune_options import FinetuneOptions
from .splits import Splits
from .text_tasks import Examples, TextTask
from .token_baselines import fit_token_baselines


# A difference of fewer standard errors may be due to the sample of test rows.
CLEAR_ERRORS = 2.0


@dataclass(frozen=True)
class Result:
    """Metrics of a model on the test rows.

    Attributes:
        name: Name for a table.
        metrics: Values of the metrics.
        errors: Standard errors of the metrics over test rows.
        labels: Labels of the test rows, in the form that the metrics take.
        predictions: Predictions, in the form that the metrics take.
        train_rows: Number of rows that the model was fitted on.
    """

    name: str
    metrics: dict[str, float]
    errors: dict[str, float]
    labels: Any
    predictions: np.ndarray
    train_rows: int

    def record(self) -> dict[str, Any]:
        """Return the metrics in JSON types."""
        return {
            "name": self.name,
            "train_rows": self.train_rows,
            "metrics": {
                name: {"value": value, "standard_error": self.errors[name]}
                for name, value in self.metrics.items()
            },
        }


def measure(task: TextTask, name: str, labels: Sequence, predicted: Any, train_rows: int) -> Result:
    """Return all metrics of a model on the test rows, with standard errors.

    Args:
        task: Task of the rows.
        name: Name of the model for tables.
        labels: Labels of the test rows, as in `Examples`.
        predicted: Predictions for the test rows, as `decode_predictions` returns them.
        train_rows: Number of rows that the model was trained on.
    """
    truth, inputs = metric_inputs(task, labels, predicted)
    values = {}
    errors = {}
    for metric in task.metrics:
        values[metric], errors[metric] = value_and_error(metric, truth, inputs)
    return Result(name, values, errors, truth, inputs, train_rows)


def compare(metric: str, fine_tuned: Result, baselines: Sequence[Result]) -> dict[str, Any]:
    """Compare a fine-tuned model with the best of its baselines.

    Args:
        metric: Name of the metric that is compared.
        fine_tuned: Result of the fine-tuned model.
        baselines: Results of the baselines on the same test rows; may be empty.

    Returns:
        "baseline": name of the best baseline; "difference" and "standard_error" of the paired
        difference; "is_better"; and "statement", a sentence.
    """
    if not baselines:
        return {"baseline": None, "is_better": None, "statement": "No baseline was measured."}

    # The error is that of the paired difference on the same test rows.
    best = max(baselines, key=lambda baseline: baseline.metrics[metric])
    difference, error = difference_and_error(
        metric, fine_tuned.labels, fine_tuned.predictions, best.predictions
    )
    change = f"{metric_title(metric)} {difference:+.3f} ± {error:.3f}"
    if difference <= 0:
        statement = (
            f"Fine-tuning is not better than the best baseline, {best.name} ({change}). Use the "
            "baseline, use more rows, or change --learning-rate or --num-train-epochs."
        )
    elif difference < CLEAR_ERRORS * error:
        statement = (
            f"Fine-tuning is not clearly better than the best baseline, {best.name} ({change}): "
            "the difference is below two standard errors."
        )
    else:
        statement = f"Fine-tuning is better than the best baseline, {best.name} ({change})."
    return {
        "baseline": best.name,
        "difference": difference,
        "standard_error": error,
        "is_better": difference > 0,
        "statement": statement,
    }


def metrics_table(result: Mapping[str, Any]) -> str:
    """Return the metrics of a model and of its baselines as a table.

    Args:
        result: Content of metrics.json.
    """
    names = list(result["fine_tuned"]["metrics"])
    rows = []
    for entry in (result["fine_tuned"], *result["baselines"]):
        cells = [entry["name"]]
        for name in names:
            metric = entry["metrics"][name]
            cells.append(f"{metric['value']:.3f} ± {metric['standard_error']:.3f}")
        rows.append(cells)
    return markdown_table(["model", *(metric_title(name) for name in names)], rows)


class Baselines:
    """Baselines of a run: a constant, linear models on TF-IDF features and on frozen embeddings.

    Args:
        task: Task of the rows.
        splits: Rows.
        options: Options of the command.
        tokenizer: Tokenizer of the model.
        max_length: Maximum sequence length in tokens.
    """

    def __init__(
        self,
        task: TextTask,
        splits: Splits,
        options: FinetuneOptions,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
    ) -> None:
        self.task = task
        self.splits = splits
        self.options = options
        self.tokenizer = tokenizer
        self.max_length = max_length

    def results(self, metric: str) -> list[Result]:
        """Fit the baselines on the training rows and measure them on the test rows.

        Args:
            metric: Metric that selects the regularization of the model on embeddings.
        """
        test = self.splits.test
        # The baselines of tokens predict tags of words, all others one label per row.
        if self.task.name == TOKENS:
            token_baselines = fit_token_baselines(
                self.splits.train,
                test,
                self.options.model.model,
                self.tokenizer,
                self.max_length,
                self.options.model.trust_remote_code,
            )
            return [
                measure(self.task, baseline.name, test.labels, baseline.tags, baseline.train_rows)
                for baseline in token_baselines
            ]

        train = self.splits.train
        is_regression = self.task.name == REGRESSION
        baselines = fit_baselines(
            _texts(train), _labels(train), _texts(test), regression=is_regression
        )
        # The linear model learns from the same rows as that on TF-IDF features.
        count = min(MAX_TRAIN_ROWS, baselines[-1].train_rows)
        if len(train) > count:
            order = np.random.default_rng(0).permutation(len(train))
            train = train.select(order[:count])
        # scikit-learn refuses to fit a linear model on a single label.
        if len(np.unique(_labels(train), axis=0)) > 1:
            baselines.append(self._embedding_baseline(train, metric))
        return [
            measure(
                self.task,
                baseline.name,
                test.labels,
                baseline.predictions,
                baseline.train_rows,
            )
            for baseline in baselines
        ]

    def _embedding_baseline(self, train: Examples, metric: str) -> Baseline:
        # The encoder has the weights from before fine-tuning.
        encoder = PackedEncoder(
            self.options.model.model,
            dtype="float32",
            max_length=self.max_length,
            trust_remote_code=self.options.model.trust_remote_code,
        )

        validation = self.splits.validation
        return fit_embedding_baseline(
            _embeddings(encoder, train),
            _labels(train),
            _embeddings(encoder, validation),
            _labels(validation),
            _embeddings(encoder, self.splits.test),
            metric,
            regression=self.task.name == REGRESSION,
        )


def _labels(examples: Examples) -> np.ndarray:
    labels = np.asarray(examples.labels)
    # Labels of a multi-label task are floats, as the loss takes them; scikit-learn takes integers.
    return labels.astype(np.int64) if labels.ndim == 2 else labels


def _texts(examples: Examples) -> list[Any]:
    """Return texts, or pairs of texts."""
    is_pair = len(examples.texts[0]) > 1
    return examples.texts if is_pair else [text for (text,) in examples.texts]


def _embeddings(encoder: PackedEncoder, examples: Examples) -> np.ndarray:
    """Return the embeddings of texts, or the features of pairs: u, v, |u - v| and u * v."""
    columns = [
        np.asarray(encoder.encode(list(column), show_progress_bar=False))
        for column in zip(*examples.texts)
    ]
    if len(columns) == 1:
        return columns[0]
    # The usual features of a pair for a linear model, which cannot multiply its inputs itself.
    first, second = columns
    return np.hstack([first, second, abs(first - second), first * second])
