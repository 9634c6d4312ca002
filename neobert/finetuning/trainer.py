"""One fine-tuning run of the GLUE protocol (paper, section 4.2): training, best weights, result."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import EvalPrediction

from ..common.errors import UserError
from ..common.loading import check_vocabulary, save_tokenizer, text_limit
from ..common.measures import PeakMemory
from ..common.output import Output
from ..training.checkpoints import RunTrainer, checkpoint_folder
from ..training.lora import head_modules, lora_config, save_adapter_and_merge, trainable_parameters
from ..training.optimization import decay_parameter_names
from ..training.options import check_trainer_options, training_arguments
from ..training.run import run_once
from ..training.run_report import RunReport
from .baselines import BaselineResult
from .data import evaluation_metrics, prepare, score_and_error
from .model import load_classifier
from .options import GlueRun, Hyperparameters
from .tasks import Splits, Task, predicted_labels


# Values of an evaluation that the result leaves out.
_TIMES = ("runtime", "samples_per_second", "steps_per_second", "loss")


def process_state() -> PartialState:
    """Return the processes of the run as accelerate sees them.

    Without an accelerator, accelerate must be told to use the CPU; otherwise the processes of
    torchrun would not find each other.
    """
    return PartialState(cpu=not torch.accelerator.is_available())


def check_sizes(task: Task, combinations: list[Hyperparameters], trainer: dict[str, Any]) -> None:
    """Check that the processes can share a batch of every combination of hyperparameters.

    Args:
        trainer: Options of Trainer.

    Raises:
        UserError: If a batch size is not divisible, or an option of Trainer is out of range.
    """
    check_trainer_options(trainer)
    parts = process_state().num_processes * trainer.get("gradient_accumulation_steps", 1)
    for hyperparameters in combinations:
        if hyperparameters.batch_size % parts:
            raise UserError(
                f"`batch_size` of {task.name} must be a multiple of processes x "
                f"gradient_accumulation_steps = {parts}, got {hyperparameters.batch_size}."
            )


class GlueTrainer(RunTrainer, Trainer):
    """Trainer of a GLUE run. Weight decay applies to matrices only.

    Attributes:
        run: Definition of the run.
        slices: Slice of every part of the evaluation rows.
        train_rows: Training rows.
        evaluation_rows: Held-out rows and dev splits.
        new_head: Names of the head's parameters that the checkpoint lacks.
        planned_steps: Number of steps without early stopping.
        memory: Memory during training.
    """

    run: GlueRun
    slices: dict[str, slice]
    train_rows: Dataset
    evaluation_rows: Dataset
    new_head: list[str]
    planned_steps: int
    memory: PeakMemory

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train`, and measure the memory."""
        with PeakMemory() as self.memory:
            return super().train(*args, **kwargs)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Return the matrices; norms and biases are vectors in every encoder."""
        return decay_parameter_names(model)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Record the best step.

        transformers 4 and 5.0 record the step for the strategies "steps" and "epoch" only.
        """
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best:
            self.state.best_global_step = self.state.global_step
            self.state.best_model_checkpoint = str(
                checkpoint_folder(self.args) / f"checkpoint-{self.state.global_step}"
            )
        return is_best


class _EvaluateAtTheEnd(TrainerCallback):
    """Callback that evaluates the final weights, whatever the interval."""

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = True


def trainer_arguments(run: GlueRun, folder: Path, rows: int) -> tuple[TrainingArguments, int]:
    """Return the TrainingArguments of a run, and its number of steps.

    Args:
        folder: Directory of the checkpoints.
        rows: Number of training rows.
    """
    chosen = run.hyperparameters
    trainer = run.options.trainer
    selection = run.options.selection
    batches = math.ceil(rows / chosen.batch_size)
    steps = math.ceil(batches * trainer["num_train_epochs"])
    # The appendix of the paper evaluates every min(500, batches // 10) steps.
    part_of_epoch = batches // selection.evaluations_per_epoch
    interval = max(1, min(selection.max_eval_interval, part_of_epoch))
    parts = process_state().num_processes * trainer.get("gradient_accumulation_steps", 1)

    fixed = {
        "per_device_train_batch_size": chosen.batch_size // parts,
        "learning_rate": chosen.learning_rate,
        "weight_decay": chosen.weight_decay,
        "warmup_steps": math.ceil(run.options.optimization.warmup_ratio * steps),
        "seed": run.seed,
        "eval_strategy": "steps",
        "eval_steps": interval,
        "save_strategy": "best",
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": True,
        "label_names": ["labels"],
        "remove_unused_columns": False,
        "save_only_model": False,
        "ignore_data_skip": False,
        # The state of the early stopping is how many evaluations were without progress.
        "restore_callback_states_from_checkpoint": True,
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
    splits: Splits,
    tokenizer: PreTrainedTokenizerBase,
    best_score: float,
    baselines: Callable[[], list[BaselineResult]],
) -> dict[str, Any]:
    """Fine-tune a model, unless the run has finished before.

    The run's directory gets result.json, with LoRA adapter/, and best/ if its weights are saved:
    model and tokenizer, with the adapter merged.

    Args:
        model: Directory or Hub name of the model to start from, for example an MNLI checkpoint.
        splits: Rows from `load_task`.
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
        result = summarize(trainer)
        if trainer.is_world_process_zero():
            result["baselines"] = [asdict(baseline) for baseline in baselines()]
            keeps_all = run.options.output.keep_models == "all"
            is_better = result["selected"]["score"] > best_score
            result |= save_model(trainer, tokenizer, folder, keep=keeps_all or is_better)
        return result

    output = Output(run.folder, "glue", run.settings)
    return run_once(output, build, save, checkpoint_folder=checkpoints)


def build_trainer(
    run: GlueRun,
    model_name: str,
    splits: Splits,
    tokenizer: PreTrainedTokenizerBase,
    checkpoints: Path,
) -> GlueTrainer:
    """Load the model, with an adapter for LoRA, tokenize the rows, and return the trainer.

    Args:
        model_name: Directory or Hub name of the model to start from.
        splits: Rows from `load_task`.
        checkpoints: Directory of the checkpoints.
    """
    options = run.options
    set_seed(run.seed)
    model, new_head = load_classifier(
        model_name,
        run.task,
        head_dropout=options.model.head_dropout,
        trust_remote_code=options.model.trust_remote_code,
        pooling=options.model.classifier_pooling,
    )
    check_vocabulary(tokenizer, model, model_name)
    limit = text_limit(model, tokenizer)

    lora = options.lora.settings()
    if lora:
        from peft import get_peft_model

        heads = head_modules(model, new_head)
        config = lora_config(model, **lora, task_type="SEQ_CLS", modules_to_save=heads)
        model = get_peft_model(model, config)

    max_length = min(options.data.max_length, limit or options.data.max_length)
    train, evaluation, slices = prepare(run.task, splits, tokenizer, options.selection, max_length)
    args, steps = trainer_arguments(run, checkpoints, len(train))

    def compute_metrics(output: EvalPrediction) -> dict[str, float]:
        return evaluation_metrics(run.task, _logits(output), np.asarray(output.label_ids), slices)

    trainer = GlueTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
        callbacks=[
            EarlyStoppingCallback(options.selection.patience),
            _EvaluateAtTheEnd(),
            RunReport(),
        ],
    )
    trainer.run = run
    trainer.slices = slices
    trainer.train_rows = train
    trainer.evaluation_rows = evaluation
    trainer.new_head = new_head
    trainer.planned_steps = steps
    return trainer


def summarize(trainer: GlueTrainer) -> dict[str, Any]:
    """Return the result of a trained run: scores, evaluations, sizes and memory.

    All processes must call this function, because they share the prediction of the dev rows.
    """
    run = trainer.run
    task = run.task
    standard_error, classes = _dev_statistics(trainer)

    removed = {f"eval_{name}" for name in _TIMES}
    history = []
    for record in trainer.state.log_history:
        if "eval_score" in record:
            names = [name for name in record if name not in removed]
            history.append({name.removeprefix("eval_"): record[name] for name in names})
    best = next(entry for entry in history if entry["step"] == trainer.state.best_global_step)

    trained, total = trainable_parameters(trainer.model)
    rows = {name: part.stop - part.start for name, part in trainer.slices.items()}
    prefixes = ("dev_", *(f"{split}_" for split in task.validation))
    memory = trainer.memory
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
            "by": "held-out training rows" if "heldout" in trainer.slices else "dev",
            "score": best["score"],
            "step": best["step"],
        },
        "last": {"step": history[-1]["step"], "score": history[-1]["dev_score"]},
        "best_of_all_evaluations": max(entry["dev_score"] for entry in history),
        "rows": {"train": len(trainer.train_rows), **rows},
        "evaluation_interval": trainer.args.eval_steps,
        "planned_steps": trainer.planned_steps,
        "stopped_early": trainer.state.global_step < trainer.planned_steps,
        "evaluations": history,
        "parameters": {"trained": trained, "all": total},
        "peak_memory_mib": memory.peak and round(memory.peak / 2**20),
        "memory_before_mib": memory.before and round(memory.before / 2**20),
    }


def _logits(output: Any) -> np.ndarray:
    """Return the logits of a prediction; some models return other outputs beside them."""
    predictions = output.predictions
    return predictions[0] if isinstance(predictions, tuple) else predictions


def _dev_statistics(trainer: GlueTrainer) -> tuple[float, int | None]:
    """Predict the dev splits with the selected weights.

    Returns:
        Standard error of the dev score, and the number of distinct classes among the predictions,
        None for regression.
    """
    task = trainer.run.task
    slices = trainer.slices
    trainer.compute_metrics = None
    output = trainer.predict(trainer.evaluation_rows)
    predictions = predicted_labels(task, _logits(output))
    labels = np.asarray(output.label_ids)

    dev_predictions = {split: predictions[slices[split]] for split in task.validation}
    dev_labels = {split: labels[slices[split]] for split in task.validation}
    _, error = score_and_error(task, dev_predictions, dev_labels)
    if task.regression:
        return error, None
    return error, len(np.unique(np.concatenate([*dev_predictions.values()])))


def save_model(
    trainer: GlueTrainer, tokenizer: PreTrainedTokenizerBase, folder: Path, keep: bool
) -> dict[str, float]:
    """Save the adapter of LoRA and, with `keep`, the selected weights with the adapter merged.

    Returns:
        With `keep`, "reload_difference": the largest difference of a logit after the saved model
        has been loaded again.
    """
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    rows = trainer.evaluation_rows
    first_rows = rows.select(range(min(8, len(rows))))
    batch: Any = DataCollatorWithPadding(tokenizer)([*first_rows])
    batch.pop("labels")
    with torch.no_grad():
        before = model(**batch.to(model.device)).logits.float().cpu()

    if trainer.run.options.lora.lora:
        model = save_adapter_and_merge(model, folder / "adapter")
    if not keep:
        return {}

    model.save_pretrained(folder / "best")
    save_tokenizer(tokenizer, folder / "best")
    saved = AutoModelForSequenceClassification.from_pretrained(
        folder / "best",
        dtype=torch.float32,
        trust_remote_code=trainer.run.options.model.trust_remote_code,
    )
    with torch.no_grad():
        after = saved.eval()(**batch.to(saved.device)).logits.float().cpu()
    return {"reload_difference": (after - before).abs().max().item()}
