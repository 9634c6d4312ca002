"""One run of the GLUE protocol (paper, section 4.2): training, best weights, result."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import EvalPrediction

from ..common.errors import UserError
from ..common.loading import check_vocabulary, text_limit
from ..common.output import Output
from ..training.lora import trainable_parameters
from ..training.options import check_trainer_options, training_arguments
from ..training.run import run_once
from .baselines import BaselineResult
from .glue_data import evaluation_metrics, prepare, score_and_error
from .glue_options import GlueRun, Hyperparameters
from .glue_tasks import GlueRows, Task, predicted_labels
from .model import load_classifier
from .trainer import (
    FIXED,
    FinetuneTrainer,
    add_adapters,
    make_trainer,
    memory_result,
    output_logits,
    process_state,
    save_model,
)


def check_sizes(task: Task, combinations: list[Hyperparameters], trainer: dict[str, Any]) -> None:
    """Check that the processes can share a batch of every combination of hyperparameters.

    Args:
        task: GLUE task.
        combinations: Hyperparameters of its runs.
        trainer: Options of Trainer.

    Raises:
        UserError: If a batch size is not divisible, or an option of Trainer is out of range.
    """
    check_trainer_options(trainer)
    # A global batch is divided among the processes, and into micro-batches.
    parts = process_state().num_processes * trainer.get("gradient_accumulation_steps", 1)
    for hyperparameters in combinations:
        if hyperparameters.batch_size % parts:
            raise UserError(
                f"`batch_size` of {task.name} must be a multiple of processes x "
                f"gradient_accumulation_steps = {parts}, got {hyperparameters.batch_size}."
            )


@dataclass(frozen=True)
class GlueJob:
    """What the result of a GLUE run needs beside its trainer.

    Attributes:
        run: Definition of the run.
        train_rows: Training rows.
        evaluation_rows: Held-out rows and dev splits.
        slices: Slice of every part of the evaluation rows.
        planned_steps: Number of steps without early stopping.
    """

    run: GlueRun
    train_rows: Dataset
    evaluation_rows: Dataset
    slices: dict[str, slice]
    planned_steps: int


class GlueTrainer(FinetuneTrainer):
    """Trainer of a GLUE run."""

    job: GlueJob


def trainer_arguments(run: GlueRun, folder: Path, rows: int) -> tuple[TrainingArguments, int]:
    """Return the TrainingArguments of a run, and its number of steps.

    Args:
        run: Run.
        folder: Directory of the checkpoints.
        rows: Number of training rows.
    """
    hyperparameters = run.hyperparameters
    trainer = run.options.trainer
    selection = run.options.selection

    # The options are ratios of an epoch or of the run, and Trainer takes numbers of steps.
    batches = math.ceil(rows / hyperparameters.batch_size)
    steps = trainer.get("max_steps", -1)
    if steps < 1:
        steps = math.ceil(batches * trainer["num_train_epochs"])

    # The appendix of the paper evaluates every min(500, batches // 10) steps.
    part_of_epoch = batches // selection.evaluations_per_epoch
    interval = max(1, min(selection.max_eval_interval, part_of_epoch))

    # A global batch is divided among the processes, and into micro-batches.
    parts = process_state().num_processes * trainer.get("gradient_accumulation_steps", 1)
    # Options of the protocol cannot be changed; the others are defaults.
    fixed = {
        "per_device_train_batch_size": hyperparameters.batch_size // parts,
        "learning_rate": hyperparameters.learning_rate,
        "weight_decay": hyperparameters.weight_decay,
        "warmup_steps": math.ceil(run.options.optimization.warmup_ratio * steps),
        "seed": run.seed,
        "eval_strategy": "steps",
        "eval_steps": interval,
        "save_strategy": "best",
        **FIXED,
    }
    options = {
        "save_total_limit": 1,
        "logging_steps": interval,
        "dataloader_pin_memory": torch.cuda.is_available(),
        **trainer,
    }
    return training_arguments(folder, options, fixed), steps


def fine_tune(
    run: GlueRun,
    model: str,
    splits: GlueRows,
    tokenizer: PreTrainedTokenizerBase,
    best_score: float,
    baselines: Callable[[], list[BaselineResult]],
) -> dict[str, Any]:
    """Fine-tune a model, unless the run has finished before.

    The directory of the run contains result.json; `adapter/` with LoRA; and `best/`, the model with
    the merged adapter and its tokenizer, if its weights are saved.

    Args:
        run: Run.
        model: Directory or Hub name of the model to start from, for example an MNLI checkpoint.
        splits: Rows from `load_task`.
        tokenizer: Tokenizer of the model.
        best_score: Highest selection score of the task's finished runs. Weights are saved if the
            run is better.
        baselines: Function that returns the baselines of the task.

    Returns:
        The content of result.json.

    Raises:
        Stopped: If SIGTERM was received. There is no result.json then.
    """
    checkpoints = run.folder / "checkpoints"

    def build() -> GlueTrainer:
        return build_trainer(run, model, splits, tokenizer, checkpoints)

    def save(trainer: GlueTrainer, folder: Path) -> dict[str, Any]:
        # All processes predict; only the main process fits the baselines and writes.
        result = summarize(trainer)
        if trainer.is_world_process_zero():
            result["baselines"] = [asdict(baseline) for baseline in baselines()]
            # Models are large: by default, only that of the best run of a task is kept.
            keeps_all = run.options.output.keep_models == "all"
            is_better = result["selected"]["score"] > best_score
            result |= save_model(
                trainer,
                tokenizer,
                model_folder=folder / "best" if keeps_all or is_better else None,
                adapter_folder=folder / "adapter" if run.options.lora.lora else None,
                auto_class=AutoModelForSequenceClassification,
                trust_remote_code=run.options.model.trust_remote_code,
            )
        return result

    output = Output(run.folder, "glue", run.settings)
    return run_once(output, build, save, checkpoint_folder=checkpoints)


def build_trainer(
    run: GlueRun,
    model_name: str,
    splits: GlueRows,
    tokenizer: PreTrainedTokenizerBase,
    checkpoints: Path,
) -> GlueTrainer:
    """Load the model, with an adapter for LoRA, tokenize the rows, and return the trainer.

    Args:
        run: Run.
        model_name: Directory or Hub name of the model to start from.
        splits: Rows from `load_task`.
        tokenizer: Tokenizer of the model.
        checkpoints: Directory of the checkpoints.
    """
    options = run.options
    # A new head is random, so the seed is set before the model is loaded.
    set_seed(run.seed)
    model, new_head = load_classifier(
        model_name,
        labels=run.task.labels,
        problem_type=run.task.problem_type,
        head_dropout=options.model.head_dropout,
        trust_remote_code=options.model.trust_remote_code,
        pooling=options.model.classifier_pooling,
    )
    check_vocabulary(tokenizer, model, model_name)

    # Texts cannot be longer than the positions of the model.
    limit = text_limit(model, tokenizer)
    max_length = min(options.data.max_length, limit or options.data.max_length)

    lora = options.lora.settings()
    if lora:
        model = add_adapters(model, lora, new_head, task_type="SEQ_CLS")

    train, evaluation, slices = prepare(run.task, splits, tokenizer, options.selection, max_length)
    # The schedule depends on the number of rows that remain for training.
    args, steps = trainer_arguments(run, checkpoints, len(train))

    def compute_metrics(output: EvalPrediction) -> dict[str, float]:
        return evaluation_metrics(
            run.task, output_logits(output), np.asarray(output.label_ids), slices
        )

    trainer = make_trainer(
        GlueTrainer,
        model=model,
        args=args,
        train_rows=train,
        evaluation_rows=evaluation,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
        patience=options.selection.patience,
        new_head=new_head,
    )
    trainer.job = GlueJob(
        run=run,
        train_rows=train,
        evaluation_rows=evaluation,
        slices=slices,
        planned_steps=steps,
    )
    return trainer


def summarize(trainer: GlueTrainer) -> dict[str, Any]:
    """Return the result of a trained run: scores, evaluations, sizes and memory.

    All processes must call this function, because they share the prediction of the dev rows.
    """
    job = trainer.job
    run = job.run
    task = run.task
    standard_error, classes = _dev_statistics(trainer)

    # Two scores per evaluation: `score` selects the checkpoint, `dev_score` is reported.
    history = trainer.evaluation_history()
    best = next(entry for entry in history if entry["step"] == trainer.state.best_global_step)

    # With LoRA, few of the parameters are trained.
    model: Any = trainer.model
    trained, total = trainable_parameters(model)
    rows = {name: part.stop - part.start for name, part in job.slices.items()}
    # MNLI has metrics of both dev splits besides their means.
    prefixes = ("dev_", *(f"{split}_" for split in task.validation))
    return {
        "kind": "glue run",
        "task": task.name,
        "name": run.options.name,
        "row": run.options.row,
        "model": run.options.model.model,
        "data": run.options.data.data,
        "starts_from": run.start or "the model",
        "new_head": trainer.new_head,
        "score": best["dev_score"],
        "standard_error": standard_error,
        "predicted_classes": classes,
        "metrics": {name: value for name, value in best.items() if name.startswith(prefixes)},
        "selected": {
            "by": "held-out training rows" if "heldout" in job.slices else "dev",
            "score": best["score"],
            "step": best["step"],
        },
        "last": {"step": history[-1]["step"], "score": history[-1]["dev_score"]},
        "best_of_all_evaluations": max(entry["dev_score"] for entry in history),
        "rows": {"train": len(job.train_rows), **rows},
        "evaluation_interval": trainer.args.eval_steps,
        "planned_steps": job.planned_steps,
        "stopped_early": trainer.state.global_step < job.planned_steps,
        "evaluations": history,
        "parameters": {"trained": trained, "all": total},
        **memory_result(trainer.memory),
    }


def _dev_statistics(trainer: GlueTrainer) -> tuple[float, int | None]:
    """Predict the dev splits with the selected weights.

    Returns:
        Standard error of the dev score, and the number of distinct classes among the predictions,
        None for regression.
    """
    task = trainer.job.run.task
    slices = trainer.job.slices
    logits, labels = trainer.predict_logits(trainer.job.evaluation_rows)
    predictions = predicted_labels(task, logits)

    # The evaluation rows also contain the held-out rows, which do not count here.
    dev_predictions = {split: predictions[slices[split]] for split in task.validation}
    dev_labels = {split: labels[slices[split]] for split in task.validation}
    _, error = score_and_error(task, dev_predictions, dev_labels)
    # A single predicted class means that nothing was learned.
    if task.regression:
        return error, None
    return error, len(np.unique(np.concatenate([*dev_predictions.values()])))
