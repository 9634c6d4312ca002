"""Command `neobert pretrain`: masked-LM pre-training as in the paper (sections 3 and 4).

`--prepare` tokenizes the texts and exits, and `--evaluate-only` evaluates a model and exits.
Running the same command again resumes an interrupted run.
"""

import contextlib
import functools
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..common.errors import UserError
from ..common.files import write_text
from ..common.folders import locked
from ..common.identity import tokenizer_fingerprint
from ..common.loading import load_tokenizer
from ..common.options import log_options
from ..common.packing import compile_blocks
from ..modeling_neobert import NeoBERTForMaskedLM
from ..training.checkpoints import is_main
from ..training.run import run_once
from ..training.run_report import RunReport
from .batches import MicroBatches
from .model import (
    START,
    choose_tokenizer,
    is_raw_checkpoint,
    make_model,
    without_vocabulary,
)
from .model_card import comparison_table, write_card
from .run import (
    NothingToMask,
    PretrainingRun,
    check_run,
    check_texts,
    locate_start,
    read_run,
    resolve_options,
    run_output,
    tokenized_texts,
    training_batches,
    validation_batches,
)
from .streaming import StreamedBatches
from .trainer import PretrainingTrainer
from .validation import evaluate_batches, metric_name, most_frequent_token, token_characters
from .vocabulary_transfer import RowSources, find_rows


logger = logging.getLogger("neobert.pretraining")


# ------------------------------------------------------------------------------------------------
# command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert pretrain [RECIPE.yaml] [--option value ...]` and return the exit code."""
    # Tokenizers in several threads do not survive the fork of loader workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run = read_run(list(sys.argv[1:] if argv is None else argv))
    log_options(run.options)
    metrics = execute(run)
    if metrics and run.training.process_index == 0:
        print(json.dumps(metrics))
    return 0


def execute(run: PretrainingRun) -> dict[str, float]:
    """Run the command that the options select.

    Returns:
        Validation metrics; empty without validation texts, or if texts are prepared.
    """
    check_run(run)
    if run.options.data.prepare:
        prepare(run)
        return {}
    if run.options.validation.evaluate_only:
        return evaluate(run)
    return train(run)


def prepare(run: PretrainingRun) -> None:
    """Tokenize the training and validation texts."""
    with _locked_start(run):
        tokenizer = _choose_tokenizer(run, locate_start(run))
        for name in run.datasets:
            tokenized_texts(run, name, tokenizer)


def evaluate(run: PretrainingRun) -> dict[str, float]:
    """Evaluate a model on the validation texts.

    Returns:
        Validation metrics, {`metric_name`: value}. If the vocabulary is replaced, those of the
        initial model with its own tokenizer are called `start_...`.
    """
    # DeepSpeed prints messages when it is imported, but stdout is for the metrics.
    with _locked_start(run), contextlib.redirect_stdout(sys.stderr):
        setup = Setup.from_run(run)
        trainer = setup.make_trainer(train_dataset=None)
        setup.model.to(trainer.args.device)  # type: ignore[arg-type]
        return trainer.validation_metrics() | trainer.evaluate_start()


def train(run: PretrainingRun) -> dict[str, float]:
    """Train a model and write its directory, unless the run has finished before.

    An interrupted run resumes from its last complete checkpoint.

    Returns:
        Validation metrics of the final model, {`metric_name`: value}.

    Raises:
        UserError: If the input is invalid, or another process uses the output directory.
        Stopped: If SIGTERM was received; a checkpoint has been written.
    """
    pretraining = Pretraining(run)
    keep_every = run.options.output.keep_every
    result = run_once(run_output(run), pretraining.build, pretraining.save, keep_every=keep_every)
    _remove_start(run)
    return {name: value for name, value in result.items() if name.startswith("eval_")}


@contextlib.contextmanager
def _locked_start(run: PretrainingRun) -> Iterator[None]:
    """Lock the output directory if a raw checkpoint is converted in it, and remove the copy.

    A run that trains there holds the same lock, and needs its own copy until its end.
    """
    start = run.options.model.init_from
    if start is None or not is_raw_checkpoint(start) or not is_main():
        yield
        return
    with locked(run.options.output_folder):
        yield
        _remove_start(run)


def _remove_start(run: PretrainingRun) -> None:
    """Remove the converted copy of a raw checkpoint."""
    if is_main():
        shutil.rmtree(run.options.output_folder / START, ignore_errors=True)


def _choose_tokenizer(run: PretrainingRun, start: str | None) -> PreTrainedTokenizerBase:
    model = run.options.model
    return choose_tokenizer(model.tokenizer, start, model.init_embeddings)


# ------------------------------------------------------------------------------------------------
# model and trainer


@dataclass(frozen=True)
class Setup:
    """Model and validation batches of a run.

    Attributes:
        run: Run without `auto` values.
        start: Directory or Hub name of the initial model, or None.
        tokenizer: Tokenizer of the model.
        rows: Sources of the rows of a new vocabulary, or None.
        model: Model before training.
        validation: Micro-batches of each validation set.
    """

    run: PretrainingRun
    start: str | None
    tokenizer: PreTrainedTokenizerBase
    rows: RowSources | None
    model: NeoBERTForMaskedLM
    validation: dict[str, MicroBatches]

    @classmethod
    def from_run(cls, run: PretrainingRun) -> "Setup":
        """Load the model, and prepare the validation texts.

        Raises:
            UserError: If the texts or the model cannot be loaded, or do not match the options.
        """
        # Texts that cannot be read are reported before the model is loaded.
        check_texts(run)
        start = locate_start(run)
        tokenizer = _choose_tokenizer(run, start)
        run = resolve_options(run, start, tokenizer)
        options = run.options

        rows = None
        if start is not None and options.model.init_embeddings is not None:
            rows = find_rows(load_tokenizer(start), tokenizer)
            logger.info("Vocabulary of %s tokens: %s", f"{len(tokenizer):,}", rows)
        seed = run.training.seed
        model = make_model(options.model.model_config, start, tokenizer, seed, rows)

        # `model_config` may have changed the context length, so the loaded model determines it.
        context = model.config.context_length
        if options.batch.sequence_length > context:
            raise UserError(
                f"`max_length` must be at most {context}, the context length of the model, got "
                f"{options.batch.max_length}. Lower --max-length, or raise "
                "max_position_embeddings in `model_config`."
            )

        if options.optimization.compile:
            compile_blocks(model)
        if torch.cuda.is_available():
            # Use TF32 for matrix multiplications in float32.
            torch.set_float32_matmul_precision("high")
        return cls(run, start, tokenizer, rows, model, validation_batches(run, tokenizer))

    def make_trainer(
        self, train_dataset: MicroBatches | StreamedBatches | None
    ) -> PretrainingTrainer:
        """Return the trainer of the run; without training data, for evaluation."""
        training = self.run.training
        # A stream resumes at its position and is not read from the start.
        training.ignore_data_skip = training.ignore_data_skip or self.run.streams
        trainer = PretrainingTrainer(
            model=self.model,
            args=training,
            train_dataset=train_dataset,
            eval_dataset=self.validation or None,
            processing_class=self.tokenizer,
            peak_tflops=self.run.options.output.peak_tflops,
        )
        if self.rows is not None and self.validation and self.start is not None:
            trainer.evaluate_start = functools.partial(
                evaluate_start, self.run, self.start, trainer
            )
        return trainer


def evaluate_start(
    run: PretrainingRun, start: str, trainer: PretrainingTrainer
) -> dict[str, float]:
    """Return the validation metrics of the initial model with its own tokenizer, as `start_...`.

    The random state is left unchanged. A set that the old vocabulary cannot represent has no
    metrics.

    Args:
        run: Run that replaces the vocabulary of the initial model.
        start: Directory or Hub name of the initial model.
        trainer: Trainer whose device and processes are used.
    """
    tokenizer = load_tokenizer(start)
    fields = without_vocabulary(run.options.model.model_config)
    cuda_devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(cuda_devices):
        model = make_model(fields, start, tokenizer, run.training.seed)
    model.to(trainer.args.device)  # type: ignore[arg-type]

    characters = token_characters(tokenizer)
    metrics = {}
    for name, batches in _representable_batches(run, tokenizer).items():
        values = evaluate_batches(model, batches, characters, trainer.accelerator)
        for metric, value in values.items():
            metrics[metric_name(name, metric, "start")] = value
    return metrics


def _representable_batches(
    run: PretrainingRun, tokenizer: PreTrainedTokenizerBase
) -> dict[str, MicroBatches]:
    """Return the batches of the validation sets that contain a token of a vocabulary."""
    # Runs from different models may share the prepared texts.
    prefix = f"start-{tokenizer_fingerprint(tokenizer)[:8]}-"
    batches: dict[str, MicroBatches] = {}
    for name in run.validation:
        # A vocabulary may cover so little of a text in another script that only [UNK] remains,
        # which cannot be masked.
        try:
            batches |= validation_batches(run, tokenizer, prefix, [name])
        except NothingToMask:
            logger.info(
                "The vocabulary of the initial model does not cover the validation set%s.",
                f" {name}" if name else "",
            )
    return batches


# ------------------------------------------------------------------------------------------------
# training


class Pretraining:
    """Steps of `run_once`: building the trainer, and saving the final model.

    Args:
        run: Run with the options of the user.
    """

    def __init__(self, run: PretrainingRun) -> None:
        self.run = run
        self.rows: RowSources | None = None

    def build(self) -> PretrainingTrainer:
        """Load texts and model, and return the trainer."""
        setup = Setup.from_run(self.run)
        # The final files contain the values that `auto` has selected.
        self.run = setup.run
        self.rows = setup.rows
        batches = training_batches(setup.run, setup.tokenizer)
        trainer = setup.make_trainer(batches)
        trainer.add_callback(_run_report(batches))
        return trainer

    def save(self, trainer: PretrainingTrainer, folder: Path) -> dict[str, Any]:
        """Evaluate the final model, and write its files.

        All processes must call this method, because sharded weights are gathered from all of them.

        Returns:
            Fields of result.json; empty in other processes than the main process.

        Raises:
            UserError: If the weights were not saved.
        """
        metrics = trainer.evaluate()
        for name, batches in (trainer.eval_dataset or {}).items():
            # The accuracy of always predicting the most frequent token is the baseline of the
            # others.
            key = metric_name(name, "unigram_accuracy")
            metrics[key] = most_frequent_token(batches)[1]

        trainer.save_model(str(folder))
        if not is_main():
            return {}
        if not any(folder.glob("*.safetensors")):
            raise UserError(
                f"the final weights of {self.run.options.output_folder} were not saved with this "
                "configuration of accelerate. The last checkpoint contains them."
            )
        trainer.write_log()
        return self._write_pages(trainer, folder, metrics)

    def _write_pages(
        self, trainer: PretrainingTrainer, folder: Path, metrics: dict[str, float]
    ) -> dict[str, Any]:
        """Write the model card and adaptation.md, and return the fields of result.json."""
        result: dict[str, Any] = {
            "distributed": trainer.accelerator.distributed_type.value,
            "steps": trainer.state.global_step,
            "tokens_seen": trainer.state.num_input_tokens_seen,
            "max_length": self.run.options.batch.max_length,
            "learning_rate": self.run.training.learning_rate,
        }
        if trainer.args.load_best_model_at_end:
            result["best_step"] = trainer.state.best_global_step
        if self.rows is not None:
            result["init_rows"] = self.rows.counts
        result |= metrics

        comparison = ""
        has_start = self.run.options.model.init_from is not None
        if metrics:
            history = trainer.state.log_history
            comparison = comparison_table(history, metrics, has_start, self.rows is not None)
        if has_start and metrics:
            write_text(folder / "adaptation.md", f"# Before and after\n\n{comparison}")
        write_card(self.run, folder, result, comparison)
        return result


def _run_report(batches: MicroBatches | StreamedBatches) -> RunReport:
    """Return the callback that reports the number of sequences and epochs of a run."""
    if isinstance(batches, StreamedBatches):
        return RunReport()

    # The parts of a mixture have different numbers of epochs, so none is reported.
    epochs = batches.plans[0].epochs(len(batches)) if len(batches.plans) == 1 else None
    return RunReport(sequences=len(batches.windows), epochs=epochs)
