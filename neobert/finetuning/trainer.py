"""One fine-tuning run of the GLUE protocol (paper, section 4.2): Trainer, best weights, result."""

import math
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    set_seed,
)

from ..common.errors import UserError
from ..common.loading import check_vocabulary, save_tokenizer, text_limit
from ..common.measures import PeakMemory
from ..common.results import environment
from ..training import checkpoints
from ..training.lora import head_modules, lora_config, save_adapter_and_merge, trainable_parameters
from ..training.optimization import decay_parameter_names
from ..training.options import check_trainer_options, training_arguments
from ..training.run_report import RunReport
from .data import evaluation_metrics, prepare, score_and_error
from .model import load_classifier
from .tasks import TASKS, Task, predicted_labels


def process_state():
    """accelerate's view of the processes. Without an accelerator it must be told so: torchrun's
    processes would not find each other."""
    return PartialState(cpu=not torch.accelerator.is_available())


def check_sizes(task, combinations, trainer):
    """Raises UserError when the processes cannot share a batch of one of the combinations of
    hyper-parameters."""
    check_trainer_options(trainer)
    parts = process_state().num_processes * trainer.get("gradient_accumulation_steps", 1)
    for hyper in combinations:
        if hyper["batch_size"] % parts:
            raise UserError(
                f"the batch size of {task.name}, {hyper['batch_size']}, cannot be shared by "
                f"processes x gradient_accumulation_steps = {parts}"
            )


class GlueTrainer(checkpoints.RunTrainer, Trainer):
    """Weight decay on matrices alone: norms and biases, which are vectors in every encoder, have
    none."""

    def get_decay_parameter_names(self, model):
        return decay_parameter_names(model)

    def _determine_best_metric(self, metrics, trial):
        """transformers 4 and 5.0 note the best step for the strategies "steps" and "epoch"
        alone."""
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best:
            self.state.best_global_step = self.state.global_step
            self.state.best_model_checkpoint = str(
                Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            )
        return is_best


class _EvaluateAtTheEnd(TrainerCallback):
    """So that the final weights are measured, whatever the interval."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:
            control.should_evaluate = True


def trainer_arguments(settings, given, folder, rows):
    """TrainingArguments of one run, and its steps.

    Args:
        settings: from `GlueArguments.settings`.
        given: {option of Trainer: value} of the user.
        folder: of the checkpoints.
        rows: of the training set.
    """
    batches = math.ceil(rows / settings["batch_size"])
    steps = math.ceil(batches * given["num_train_epochs"])
    # min(500, batches // 10) in the paper's appendix on GLUE
    part_of_epoch = batches // settings["evaluations_per_epoch"]
    interval = max(1, min(settings["max_eval_interval"], part_of_epoch))
    parts = process_state().num_processes * given.get("gradient_accumulation_steps", 1)
    fixed = {
        "per_device_train_batch_size": settings["batch_size"] // parts,
        "learning_rate": settings["learning_rate"],
        "weight_decay": settings["weight_decay"],
        "warmup_steps": math.ceil(settings["warmup_ratio"] * steps),
        "seed": settings["seed"],
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
        "restore_callback_states_from_checkpoint": True,  # how long the early stopping has waited
    }
    given = {
        "save_total_limit": 1,
        "logging_steps": interval,
        "dataloader_pin_memory": torch.cuda.is_available(),
        **given,
    }
    return training_arguments(folder, given, fixed), steps


def fine_tune(
    output, settings, splits, model_name, tokenizer, options, given, best_score, baselines
):
    """Runs one fine-tuning, or continues it, and writes result.json last.

    Args:
        output: `Output` of the run; gets result.json, with LoRA adapter/, and, if its weights are
            kept, best/ (model and tokenizer, merged if LoRA).
        settings: from `GlueArguments.settings`.
        splits: from `glue_tasks.load_task`.
        model_name: folder or Hub name that the run starts from (the MNLI checkpoint, where one is
            used).
        tokenizer: the model's.
        options: GlueArguments, for what does not change the numbers (name, trust).
        given: {option of Trainer: value}.
        best_score: the weights are kept if what selects them scores above this.
        baselines: Function that returns the `BaselineResult`s of the task.
    Returns:
        the result as written.
    Raises:
        Stopped: SIGTERM came; there is no result.json.
    """
    task = TASKS[settings["task"]]
    set_seed(settings["seed"])
    model, new_head = load_classifier(
        model_name,
        task,
        settings["head_dropout"],
        options.trust_remote_code,
        settings["classifier_pooling"],
    )
    check_vocabulary(tokenizer, model, model_name)
    limit = text_limit(model, tokenizer)
    if settings["lora"]:
        from peft import get_peft_model

        heads = head_modules(model, new_head)
        config = lora_config(model, **settings["lora"], task_type="SEQ_CLS", modules_to_save=heads)
        model = get_peft_model(model, config)
    trained, total = trainable_parameters(model)
    train, evaluation, slices = prepare(task, splits, tokenizer, settings, limit)
    folder = output.folder / "checkpoints"
    arguments, steps = trainer_arguments(settings, given, folder, len(train))

    def compute_metrics(output):
        logits = output.predictions
        logits = logits[0] if isinstance(logits, tuple) else logits
        return evaluation_metrics(task, logits, output.label_ids, slices)

    with checkpoints.claim(output):
        trainer = GlueTrainer(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=compute_metrics,
            callbacks=[
                EarlyStoppingCallback(settings["patience"]),
                _EvaluateAtTheEnd(),
                RunReport(),
            ],
        )
        with PeakMemory() as memory:
            checkpoints.train(trainer)
        error, classes = _dev_statistics(trainer, task, evaluation, slices)
        others = ("runtime", "samples_per_second", "steps_per_second", "loss")
        left_out = {f"eval_{name}" for name in others}
        history = [
            {k.removeprefix("eval_"): v for k, v in record.items() if k not in left_out}
            for record in trainer.state.log_history
            if "eval_score" in record
        ]
        best = next(entry for entry in history if entry["step"] == trainer.state.best_global_step)
        prefixes = ("dev_", *(f"{split}_" for split in task.validation))
        rows = {name: part.stop - part.start for name, part in slices.items()}
        dtype = "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else "float32"
        result = {
            "kind": "glue run",
            "task": task.name,
            "name": options.name,
            "row": options.row,
            "model": str(options.model),
            "data": str(options.data),
            "starts_from": settings["start"] or "the model",
            "new_head": new_head,
            "score": best["dev_score"],
            "standard_error": error,
            "predicted_classes": classes,
            "metrics": {name: v for name, v in best.items() if name.startswith(prefixes)},
            "selected": {
                "by": "held-out training rows" if "heldout" in slices else "dev",
                "score": best["score"],
                "step": best["step"],
            },
            "last": {"step": history[-1]["step"], "score": history[-1]["dev_score"]},
            "best_of_all_evaluations": max(entry["dev_score"] for entry in history),
            "rows": {"train": len(train), **rows},
            "evaluation_interval": arguments.eval_steps,
            "planned_steps": steps,
            "stopped_early": trainer.state.global_step < steps,
            "evaluations": history,
            "parameters": {"trained": trained, "all": total},
            **checkpoints.spent(trainer),
            "peak_memory_mib": memory.peak and round(memory.peak / 2**20),
            "memory_before_mib": memory.before and round(memory.before / 2**20),
            "environment": environment(
                dtype=dtype if dtype == "float32" else f"{dtype} autocast",
                processes=process_state().num_processes,
            ),
        }
        if trainer.is_world_process_zero():
            result["baselines"] = [asdict(baseline) for baseline in baselines()]
            with output.final_files() as final:
                keep = options.keep_models == "all" or best["score"] > best_score
                result |= _save(trainer, tokenizer, evaluation, final, settings, options, keep)
            output.finish(**result)
            shutil.rmtree(folder, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
    return result


def _dev_statistics(
    trainer: Trainer, task: Task, evaluation: Dataset, slices: dict[str, slice]
) -> tuple[float, int | None]:
    """Predict the dev splits with the selected weights.

    Returns:
        Standard error of the dev score, and the number of distinct classes among the predictions,
        None for regression.
    """
    trainer.compute_metrics = None
    output = trainer.predict(evaluation)
    logits = output.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    predictions = predicted_labels(task, logits)

    dev_predictions = {split: predictions[slices[split]] for split in task.validation}
    dev_labels = {split: output.label_ids[slices[split]] for split in task.validation}
    _, error = score_and_error(task, dev_predictions, dev_labels)
    if task.regression:
        return error, None
    return error, len(np.unique(np.concatenate([*dev_predictions.values()])))


def _save(trainer, tokenizer, evaluation, folder, settings, options, keep):
    """Writes the adapter and, with `keep`, the chosen weights, merged if LoRA; loads these again
    and returns the largest difference of a logit as "reload_difference"."""
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    batch = DataCollatorWithPadding(tokenizer)([*evaluation.select(range(min(8, len(evaluation))))])
    batch.pop("labels")
    with torch.no_grad():
        before = model(**batch.to(model.device)).logits.float().cpu()
    if settings["lora"]:
        model = save_adapter_and_merge(model, folder / "adapter")
    if not keep:
        return {}
    model.save_pretrained(folder / "best")
    save_tokenizer(tokenizer, folder / "best")
    again = AutoModelForSequenceClassification.from_pretrained(
        folder / "best", dtype=torch.float32, trust_remote_code=options.trust_remote_code
    )
    with torch.no_grad():
        after = again.eval()(**batch.to(again.device)).logits.float().cpu()
    return {"reload_difference": (after - before).abs().max().item()}
