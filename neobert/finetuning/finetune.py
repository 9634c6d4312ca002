r"""`neobert finetune`: fine-tune an encoder on your own rows, and compare it with baselines.

    neobert finetune reviews.csv --text-column review --label-column stars \
        --model examples/sentence-encoder --output runs/reviews

The task is inferred from the rows: classification of texts or pairs, with one or several labels,
regression, or token classification. The output directory contains the model with its code and
tokenizer, README.md, metrics.json, plots, and task.json, which `neobert predict` reads.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import EvalPrediction

from ..common import __version__
from ..common.errors import UserError
from ..common.files import read_json, write_json
from ..common.folders import check_disjoint
from ..common.identity import model_fingerprint
from ..common.loading import (
    check_model,
    check_vocabulary,
    load_config,
    load_tokenizer,
    model_file,
    text_limit,
)
from ..common.options import identity, log_options
from ..common.output import Output
from ..common.sentence_transformers_files import pooling_mode
from ..common.task_file import (
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    TASK_FILE,
    TOKENS,
    TaskContent,
)
from ..training.checkpoints import training_time
from ..training.lora import trainable_parameters
from ..training.optimization import default_learning_rate
from ..training.options import result_options, training_arguments
from ..training.run import run_environment, run_once
from .calibration import calibrate
from .comparison import Baselines, Result, compare, measure, metrics_table
from .evaluation import (
    TokenizedSplit,
    calibration_inputs,
    confusion_matrix,
    decode_predictions,
    label_table,
    mean_distance,
    metric_values,
    tokenize,
)
from .finetune_card import write_card
from .finetune_options import FINETUNE, FinetuneOptions
from .model import encoder_hidden_size, load_classifier
from .plots import plot_confusion, plot_label_f1, plot_learning_curve, plot_values
from .splits import Splits, read_splits
from .text_tasks import TextTask
from .trainer import (
    FIXED,
    FinetuneTrainer,
    add_adapters,
    make_trainer,
    memory_result,
    output_layer,
    output_logits,
    process_state,
    save_model,
    scale_output,
)


logger = logging.getLogger("neobert.finetuning")

# Minimum default learning rate with LoRA.
LORA_LEARNING_RATE = 3e-4


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert finetune TRAIN --model M --output O`, and return the exit code."""
    options = FINETUNE.read(sys.argv[1:] if argv is None else argv)
    is_main = process_state().is_main_process
    logger.disabled = not is_main
    if is_main:
        log_options(options)
    # Every process trains; the main process prints the result.
    result = finetune(options)
    if is_main:
        print(metrics_table(result))
        logger.info(result["comparison"]["statement"])
        if result["warning"]:
            logger.warning("%s", result["warning"])
        logger.info(
            "%s: classify a file with: neobert predict INPUT OUTPUT --model %s",
            options.model.output,
            options.model.output,
        )
    return 0


def finetune(options: FinetuneOptions) -> dict[str, Any]:
    """Fine-tune a model and write its directory, unless the run has finished before.

    An interrupted run resumes from its last complete checkpoint.

    Returns:
        The content of result.json: task, metrics, baselines, calibration, history.

    Raises:
        UserError: If the input is not valid.
        Stopped: If SIGTERM was received; a checkpoint has been written.
    """
    model = options.model.model
    data = options.data
    output = options.model.output
    check_model(model)

    # The output directory must neither contain an input nor be a part of one.
    inputs = [data.train, data.validation_file, data.test_file, model]
    check_disjoint(output, *(name for name in inputs if name and Path(name).exists()))

    # The rows are read before the output directory is claimed, because the task depends on them.
    task, splits = read_splits(data, _known_labels(options))

    metric = options.evaluation.metric or task.metrics[0]
    if metric not in task.metrics:
        if task.name == TOKENS:
            raise UserError(
                f"`metric` has no effect on token classification, got {metric!r}. Omit --metric."
            )
        raise UserError(
            f"`metric` must be one of {', '.join(task.metrics)} for this task, got {metric!r}."
        )

    checkpoints = Path(output) / "checkpoints"
    training = _training_arguments(options, checkpoints)
    if training.label_smoothing_factor and task.name in (REGRESSION, MULTI_LABEL):
        raise UserError(
            f"`label_smoothing_factor` must be 0 for {task.name}, got "
            f"{training.label_smoothing_factor}. It applies to a single class per text or word."
        )
    settings = run_identity(options, task, splits, metric, training)
    run = Finetuning(options, task, splits, metric, training)
    return run_once(
        Output(output, "finetune", settings), run.build, run.save, checkpoint_folder=checkpoints
    )


def run_identity(
    options: FinetuneOptions,
    task: TextTask,
    splits: Splits,
    metric: str,
    training: TrainingArguments,
) -> dict[str, Any]:
    """Return what identifies a run: options, digests of the rows and of the model.

    Args:
        options: Options of the command.
        task: Task of the rows.
        splits: Rows.
        metric: Metric that selects the checkpoint.
        training: Arguments of the trainer.
    """
    task_settings = asdict(task)
    # The digests of the rows contain the words already. Runs of earlier versions lack this field.
    del task_settings["has_spaces"]
    return {
        **identity(options),
        **result_options(options.trainer),
        "metric": metric,
        "task": task_settings,
        "model": model_fingerprint(options.model.model),
        "rows": [part.digest() for part in (splits.train, splits.validation, splits.test)],
        "learning_rate": training.learning_rate,
        "processes": training.world_size,
    }


def _known_labels(options: FinetuneOptions) -> dict[str, int] | None:
    """Return the label numbers of a model that is a classifier already."""
    config = load_config(options.model.model, options.model.trust_remote_code)
    labels = getattr(config, "label2id", None)
    return {str(name): number for name, number in labels.items()} if labels else None


def _training_arguments(options: FinetuneOptions, folder: Path) -> TrainingArguments:
    """Return the TrainingArguments of a run, with the learning rate of the encoder's size."""
    trainer = dict(options.trainer)
    if trainer.get("eval_strategy") == "no":
        raise UserError(
            "`eval_strategy` must be epoch or steps, got no. The evaluations select the weights."
        )
    if trainer.get("eval_strategy") == "steps" and trainer.get("save_strategy") == "epoch":
        # Trainer requires a checkpoint for every evaluation that may select the weights.
        steps = trainer.get("eval_steps") or trainer.get("logging_steps", 500)
        trainer |= {"save_strategy": "steps", "save_steps": steps}
    if "learning_rate" not in trainer:
        hidden_size = encoder_hidden_size(options.model.model, options.model.trust_remote_code)
        # Adapters have few parameters, and need a larger rate than a complete model.
        rate = default_learning_rate(hidden_size or 768)
        trainer["learning_rate"] = max(rate, LORA_LEARNING_RATE) if options.lora.lora else rate
        logger.info(
            "Learning rate %.2g, the default for a hidden size of %s%s.",
            trainer["learning_rate"],
            hidden_size or "unknown",
            " with LoRA" if options.lora.lora else "",
        )
    import torch

    # On a CPU, torch warns that pinned memory has no use.
    trainer.setdefault("dataloader_pin_memory", torch.cuda.is_available())
    return training_arguments(folder, trainer, FIXED)


class Finetuning:
    """Run of `neobert finetune`: builds the trainer, and saves the model with its evaluation.

    Args:
        options: Options of the command.
        task: Task of the rows.
        splits: Rows.
        metric: Metric that selects the checkpoint.
        training: Arguments of the trainer.
    """

    tokenizer: PreTrainedTokenizerBase
    parts: dict[str, TokenizedSplit]
    max_length: int
    # Factor and offset of the labels of a regression, which is trained on standardized labels.
    scaling: tuple[float, float] | None = None

    def __init__(
        self,
        options: FinetuneOptions,
        task: TextTask,
        splits: Splits,
        metric: str,
        training: TrainingArguments,
    ) -> None:
        self.options = options
        self.task = task
        self.splits = splits
        self.metric = metric
        self.training = training

    @property
    def auto_class(self) -> Any:
        """Auto class of transformers that loads the model."""
        if self.task.name == TOKENS:
            return AutoModelForTokenClassification
        return AutoModelForSequenceClassification

    def build(self) -> FinetuneTrainer:
        """Load the model, with an adapter for LoRA, tokenize the rows, and return the trainer."""
        options = self.options
        name = options.model.model
        trust_remote_code = options.model.trust_remote_code
        self.tokenizer = self._load_tokenizer()

        # A new head is random, so the seed is set before the model is loaded.
        set_seed(self.training.seed)
        model, new_head = load_classifier(
            name,
            self.task.labels,
            self.task.problem_type,
            head_dropout=options.model.head_dropout,
            trust_remote_code=trust_remote_code,
            pooling=options.model.classifier_pooling or _encoder_pooling(name),
            auto_class=self.auto_class,
        )
        check_vocabulary(self.tokenizer, model, name)

        if self.task.name == REGRESSION:
            self._standardize_labels(model, new_head)

        # Texts cannot be longer than the positions of the model.
        limit = text_limit(model, self.tokenizer)
        self.max_length = min(options.data.max_length, limit or options.data.max_length)

        lora = options.lora.settings()
        if lora:
            task_type = "TOKEN_CLS" if self.task.name == TOKENS else "SEQ_CLS"
            model = add_adapters(model, lora, new_head, task_type)

        self._tokenize()
        return make_trainer(
            FinetuneTrainer,
            model=model,
            args=self.training,
            train_rows=self.parts["train"].dataset,
            evaluation_rows=self.parts["validation"].dataset,
            data_collator=self._collator(),
            compute_metrics=self._metrics,
            patience=options.evaluation.patience,
            new_head=new_head,
        )

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer of the model.

        Raises:
            UserError: If the task needs character offsets, and the tokenizer has none.
        """
        name = self.options.model.model
        tokenizer = load_tokenizer(name, self.options.model.trust_remote_code)
        if self.task.name == TOKENS and not tokenizer.is_fast:
            raise UserError(
                "token classification requires a tokenizer with character offsets (a "
                f"tokenizer.json), got one written in Python in {name}."
            )
        return tokenizer

    def _standardize_labels(self, model: PreTrainedModel, new_head: Sequence[str]) -> None:
        """Set the scaling of the labels for training, if the model has a known output layer.

        The saved model predicts in the unit of the labels again.
        """
        layer = output_layer(model)
        if layer is None:
            return
        self.scaling = _label_scaling(self.splits.train.labels)

        # The head of a regression model predicts labels in their unit. Training must start from the
        # same predictions in standardized units.
        new_parameters = [
            parameter for key, parameter in model.named_parameters() if key in new_head
        ]
        is_new = any(parameter is layer.weight for parameter in new_parameters)
        if not is_new and self._starts_from_regression():
            factor, offset = self.scaling
            scale_output(model, 1 / factor, -offset / factor)

    def _collator(self) -> Any:
        """Return the function that pads the rows of a batch. NeoBERT removes the padding again."""
        if self.task.name != TOKENS:
            return DataCollatorWithPadding(self.tokenizer)
        # The positions of the words count from the first token.
        self.tokenizer.padding_side = "right"
        return DataCollatorForTokenClassification(self.tokenizer)

    def _starts_from_regression(self) -> bool:
        """Return whether the initial model is a regression model.

        Other models with one output, such as rerankers, do not predict labels in their unit.
        """
        # `load_classifier` replaces the problem type of the model that it returns.
        config = load_config(self.options.model.model, self.options.model.trust_remote_code)
        return config.problem_type == self.task.problem_type

    def _tokenize(self) -> None:
        parts = {
            "train": self.splits.train,
            "validation": self.splits.validation,
            "test": self.splits.test,
        }
        self.parts = {
            name: tokenize(self.task, part, self.tokenizer, self.max_length, self.scaling)
            for name, part in parts.items()
        }
        counts = {name: part.truncated for name, part in self.parts.items()}
        if any(counts.values()):
            listing = ", ".join(f"{name} {count:,}" for name, count in counts.items())
            logger.warning(
                "Texts of more than %s tokens are truncated: %s. Raise --max-length to "
                "use all of their tokens.",
                f"{self.max_length:,}",
                listing,
            )

    def _metrics(self, output: EvalPrediction) -> dict[str, float]:
        # A regression predicts standardized labels here. Its metrics are correlations, which do not
        # depend on the unit.
        part = self.parts["validation"]
        predicted = decode_predictions(self.task, part, output_logits(output))
        values = metric_values(self.task, part.examples.labels, predicted)
        return {**values, "score": values[self.metric]}

    def save(self, trainer: FinetuneTrainer, folder: Path) -> dict[str, Any]:
        """Write the model and its evaluation into a directory, and return the result.

        Args:
            trainer: Trainer whose model has the selected weights.
            folder: Directory to write into.
        """
        # All processes predict; only the main process evaluates and writes.
        validation_logits, _ = trainer.predict_logits(self.parts["validation"].dataset)
        test_logits, _ = trainer.predict_logits(self.parts["test"].dataset)

        # Until the model is saved, it predicts standardized labels.
        if self.scaling is not None:
            test_logits = test_logits * self.scaling[0] + self.scaling[1]
        result = self._evaluate(trainer, validation_logits, test_logits)
        if not trainer.is_world_process_zero():
            return {}

        reload = save_model(
            trainer,
            self.tokenizer,
            model_folder=folder,
            adapter_folder=folder / "adapter" if self.options.lora.lora else None,
            auto_class=self.auto_class,
            trust_remote_code=self.options.model.trust_remote_code,
            scaling=self.scaling,
        )
        result.update(reload)

        # `neobert predict` reads the task and the temperature from this file.
        temperature = (result["calibration"] or {}).get("temperature", 1.0)
        write_json(folder / TASK_FILE, task_record(self.task, self.max_length, temperature))
        self._plot(result, test_logits, folder)
        write_json(folder / "metrics.json", result)
        write_card(folder, self.options, self.task, result, run_environment(self.training))
        return result

    def _evaluate(
        self, trainer: FinetuneTrainer, validation_logits: np.ndarray, test_logits: np.ndarray
    ) -> dict[str, Any]:
        """Return the result of a run, without its files."""
        task = self.task
        test = self.parts["test"]
        predicted = decode_predictions(task, test, test_logits)
        fine_tuned = measure(
            task, "fine-tuned", test.examples.labels, predicted, len(self.splits.train)
        )

        baselines: list[Result] = []
        if self.options.evaluation.baselines and trainer.is_world_process_zero():
            baselines = self._fit_baselines()
        calibration = None
        if task.name != REGRESSION:
            calibration = self._calibrate(validation_logits, test_logits)

        history = trainer.evaluation_history()
        # The weights are those of the best evaluation. Without a best step, those of the last.
        step = trainer.state.best_global_step
        selected = next((entry for entry in history if entry["step"] == step), history[-1])
        losses = [entry for entry in trainer.state.log_history if "loss" in entry]

        # With LoRA, few of the parameters are trained.
        model: Any = trainer.model
        trained, total = trainable_parameters(model)
        return {
            "task": task.name,
            "description": task.describe(),
            "data": Path(self.options.data.train.rstrip("/")).name,
            "start": self.options.model.model,
            "labels": list(task.labels),
            "metric": self.metric,
            "rows": self.splits.sizes(),
            "truncated": {name: part.truncated for name, part in self.parts.items()},
            "max_length": self.max_length,
            "fine_tuned": fine_tuned.record(),
            "baselines": [baseline.record() for baseline in baselines],
            "comparison": compare(self.metric, fine_tuned, baselines),
            "warning": _single_class_warning(task, predicted),
            "calibration": calibration,
            "mean_distance": mean_distance(task, test.examples.labels, predicted),
            "label_table": label_table(task, test.examples.labels, predicted),
            "confusion_matrix": confusion_matrix(task, test.examples.labels, predicted),
            "selected": {"step": selected["step"], "epoch": selected.get("epoch")},
            "history": history,
            "losses": [[entry["epoch"], entry["loss"]] for entry in losses],
            "learning_rate": self.training.learning_rate,
            "parameters": {"trained": trained, "all": total},
            "seconds": training_time(trainer)["seconds"],
            **memory_result(trainer.memory),
        }

    def _fit_baselines(self) -> list[Result]:
        """Fit the baselines on the training rows, and measure them on the test rows."""
        logger.info("Fitting the baselines on the training rows.")
        baselines = Baselines(self.task, self.splits, self.options, self.tokenizer, self.max_length)
        return baselines.results(self.metric)

    def _calibrate(self, validation_logits: np.ndarray, test_logits: np.ndarray) -> dict[str, Any]:
        """Fit a temperature on the validation rows, and measure its error on the test rows."""
        calibration = calibrate(
            calibration_inputs(self.task, self.parts["validation"], validation_logits),
            calibration_inputs(self.task, self.parts["test"], test_logits),
            multi_label=self.task.name == MULTI_LABEL,
        )
        return asdict(calibration)

    def _plot(self, result: dict[str, Any], test_logits: np.ndarray, folder: Path) -> None:
        plot_learning_curve(
            result["history"],
            result["losses"],
            self.metric,
            result["selected"]["epoch"],
            folder / "learning_curve.png",
        )
        if self.task.name == REGRESSION:
            labels = np.asarray(self.parts["test"].examples.labels)
            plot_values(labels, test_logits[:, 0], folder / "predictions.png")
        elif self.task.name == CLASSIFICATION:
            matrix = result["confusion_matrix"]
            plot_confusion(matrix, self.task.labels, folder / "confusion_matrix.png")
        else:
            plot_label_f1(result["label_table"], folder / "label_f1.png")


def task_record(task: TextTask, max_length: int, temperature: float) -> TaskContent:
    """Return the content of task.json, which `neobert predict` reads.

    Args:
        task: Task of the model.
        max_length: Maximum sequence length in tokens.
        temperature: Temperature that divides the logits.
    """
    return {
        "task": task.name,
        "text_columns": list(task.text_columns),
        "labels": list(task.labels),
        "bio": task.bio,
        "has_spaces": task.has_spaces,
        "max_length": max_length,
        "temperature": temperature,
        "version": __version__,
    }


def _label_scaling(labels: Sequence[float]) -> tuple[float, float]:
    """Return the standard deviation and the mean of the labels of a regression.

    A head that starts near 0 would need many steps to reach labels such as 500.
    """
    values = np.asarray(labels, dtype=np.float64)
    return float(values.std()) or 1.0, float(values.mean())


def _encoder_pooling(model: str) -> str | None:
    """Return the pooling of a sentence encoder if a head has it: "mean" or "cls", or None."""
    # sentence-transformers stores the settings of its pooling module in this directory.
    path = model_file(model, "1_Pooling/config.json")
    if path is None:
        return None
    mode = pooling_mode(read_json(path))
    return mode if mode in ("mean", "cls") else None


def _single_class_warning(task: TextTask, predicted: Any) -> str | None:
    """Return a warning if all predictions are equal, which means that nothing was learned."""
    if task.name == REGRESSION:
        is_constant = np.ptp(predicted) == 0
        what = "predicts the same value for"
    elif task.name == TOKENS:
        is_constant = len({tag for tags in predicted for tag in tags}) < 2
        what = "predicts the same tag for all words of"
    else:
        is_constant = len(np.unique(predicted, axis=0)) == 1
        what = "predicts the same label for"
    if not is_constant:
        return None
    return f"the model {what} every test row. Change --learning-rate, or raise --num-train-epochs."
