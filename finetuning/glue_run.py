"""One fine-tuning run of the GLUE protocol (paper, section 4.2): model, rows, Trainer, best
weights, result."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    set_seed,
)

from ..common import checkpoints
from ..common.checkpoint_files import checkpoints as saved_checkpoints
from ..common.checkpoint_files import remove_checkpoints
from ..common.errors import UserError, one_line
from ..common.files import write_json
from ..common.loading import check_model, check_vocabulary, save_tokenizer, text_limit
from ..common.lora import head_modules, lora_config, save_adapter_and_merge, trainable_parameters
from ..common.memory import PeakMemory, mebibytes
from ..common.optimisation import decay_parameter_names
from ..common.results import environment
from ..common.runs import Run
from ..common.trainer_options import check_trainer_options, training_arguments
from .glue_tasks import TASKS, scores


def process_state():
    """accelerate's view of the processes. Without an accelerator it must be told so: torchrun's
    processes would not find each other."""
    return PartialState(cpu=not torch.accelerator.is_available())


def evaluation_interval(batches_per_epoch, at_most=500, per_epoch=10):
    """Steps between evaluations: min(500, batches_per_epoch // 10), at least 1 (the paper's
    appendix on GLUE)."""
    return max(1, min(at_most, batches_per_epoch // per_epoch))


def split_heldout(rows, fraction, at_most):
    """Indices (kept, held out) of `rows` training rows; the same for every seed, so that seeds
    differ in training alone."""
    count = min(at_most, int(rows * fraction))
    order = np.random.default_rng(0).permutation(rows)
    return np.sort(order[count:]).tolist(), np.sort(order[:count]).tolist()


# ------------------------------------------------------------------------------------------------
# model


def load_config(name, trust_remote_code=False):
    """Raises UserError when there is no model, or it brings its own code that was not trusted."""
    path = Path(name)
    if (path / "modules.json").is_file() and not (path / "config.json").is_file():
        inner = [
            entry["path"]
            for entry in json.loads((path / "modules.json").read_text())
            if (path / entry["path"] / "config.json").is_file()
        ]
        raise UserError(
            f"{name} is a sentence encoder whose model is in a folder of its own; give "
            f"{path / (inner or ['?'])[0]}"
        )
    check_model(name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{name} brings its own Python code; add --trust-remote-code if you trust it"
            ) from error
        raise UserError(f"the model {name} was not loaded: {one_line(error)}") from error
    except OSError as error:
        raise UserError(
            f"{name!r} is neither a model folder nor a model that can be reached on the Hub: "
            f"{one_line(error)}"
        ) from error


def load_classifier(name, task, head_dropout=0.1, trust_remote_code=False, pooling=None):
    """A sequence classifier for `task`, in float32.

    Args:
        pooling: "cls" or "mean" for models that can choose; None for what the configuration says.

    Returns:
        model, names of the head's parameters that the checkpoint did not have (random), as a sorted
        list.
    Raises:
        UserError: the checkpoint lacks backbone weights, or is not an encoder that can classify.
    """
    config = load_config(name, trust_remote_code)
    config.num_labels = task.num_labels
    config.problem_type = "regression" if task.regression else "single_label_classification"
    if not task.regression:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {label: i for i, label in enumerate(task.labels)}
    for field in ("classifier_dropout", "cls_dropout", "seq_classif_dropout"):
        if hasattr(config, field):
            setattr(config, field, head_dropout)
    if pooling is not None:
        if not hasattr(config, "classifier_pooling") or pooling not in ("cls", "mean"):
            raise UserError(
                "classifier_pooling must be cls or mean, for a model that can choose, but "
                f"{pooling!r} was given for {name}"
            )
        config.classifier_pooling = pooling
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{name} cannot be loaded as a sequence classifier: {one_line(error)}"
        ) from error
    new = set(info["missing_keys"]) | {entry[0] for entry in info["mismatched_keys"]}
    backbone = [
        key
        for key in new
        if key.startswith(f"{model.base_model_prefix}.") and ".pooler." not in f".{key}"
    ]
    if backbone:
        raise UserError(
            f"{name} lacks {len(backbone)} weights of the encoder, {sorted(backbone)[0]} for "
            "example; is it this architecture?"
        )
    return model, sorted(new)


# ------------------------------------------------------------------------------------------------
# data


class Rows(torch.utils.data.Dataset):
    """Tokenised rows of one task: {"input_ids", ..., "labels"} without padding."""

    def __init__(self, tokenizer, task, columns, max_length):
        texts = [columns[name] for name in task.texts]
        self.labels = columns["label"]
        self.encoded = (
            tokenizer(*texts, truncation=True, max_length=max_length) if self.labels else {}
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {
            **{name: values[i] for name, values in self.encoded.items()},
            "labels": self.labels[i],
        }


def check_sizes(task, rows, batch_sizes, arguments):
    """Raises UserError when the processes cannot share a batch of one of `batch_sizes`, or too few
    of `rows` training rows are there."""
    processes = process_state().num_processes
    for batch_size in batch_sizes:
        if batch_size % processes:
            raise UserError(
                f"the batch size of {task.name}, {batch_size}, cannot be shared by {processes} "
                "processes"
            )
    rows = min(rows, arguments.max_train_samples or rows)
    if arguments.selection == "heldout" and not all(
        split_heldout(rows, arguments.heldout_fraction, arguments.heldout_rows)
    ):
        fraction = f"{arguments.heldout_fraction:g}"
        raise UserError(
            f"{task.name} has {rows} training rows, too few to hold {fraction} of them out; use "
            "--selection dev"
        )


def _take(columns, indices):
    return {name: [values[i] for i in indices] for name, values in columns.items()}


def prepare(task, splits, tokenizer, settings, model_limit):
    """Training rows and one evaluation set, with the slice of every part of it.

    Args:
        splits: from `glue_tasks.load_task`.
        model_limit: longest text in tokens that the model takes, or None.
    Returns:
        train Rows, evaluation Rows, {part: slice}; the parts are "heldout" (unless selection is
        "dev") and the dev splits.
    """
    max_length = min(settings.max_length, model_limit or settings.max_length)
    train = splits["train"]
    if settings.max_train_samples:
        order = np.random.default_rng(0).permutation(len(train["label"]))
        train = _take(train, order[: settings.max_train_samples].tolist())
    parts = {}
    if settings.selection == "heldout":
        kept, held_out = split_heldout(
            len(train["label"]), settings.heldout_fraction, settings.heldout_rows
        )
        parts["heldout"] = _take(train, held_out)
        train = _take(train, kept)
    for split in task.validation:
        parts[split] = _take(
            splits[split], range(len(splits[split]["label"]))[: settings.max_eval_samples]
        )
    joined = {name: [x for part in parts.values() for x in part[name]] for name in train}
    slices, start = {}, 0
    for name, part in parts.items():
        slices[name] = slice(start, start + len(part["label"]))
        start += len(part["label"])
    return (
        Rows(tokenizer, task, train, max_length),
        Rows(tokenizer, task, joined, max_length),
        slices,
    )


def evaluation_metrics(task, logits, labels, slices, metric="mean"):
    """Metrics of every part.

    Args:
        metric: what stops and selects, "mean" of the task's metrics or one of them.
    Returns:
        "dev_<metric>" and "dev_score" (means over the dev splits), "<split>_<metric>" where there
        are several dev splits, and "score":
        what stops and selects, of the held-out rows if there are some, else of dev.
    """
    dev = {
        split: scores(task, logits[slices[split]], labels[slices[split]])
        for split in task.validation
    }
    metrics = {
        f"dev_{name}": float(np.mean([part[name] for part in dev.values()]))
        for name in (*task.metrics, "score")
    }
    if len(dev) > 1:
        metrics |= {
            f"{split}_{name}": part[name] for split, part in dev.items() for name in task.metrics
        }
    part = slices.get("heldout")
    key = "score" if metric == "mean" else metric
    metrics["score"] = (
        metrics[f"dev_{key}"] if part is None else scores(task, logits[part], labels[part])[key]
    )
    return metrics


# ------------------------------------------------------------------------------------------------
# trainer


class GlueTrainer(Trainer):
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
        settings: RunSettings.
        given: {option of Trainer: value} of the user.
        folder: of the checkpoints.
        rows: of the training set.
    """
    check_trainer_options(given)
    batches = math.ceil(rows / settings.batch_size)
    steps = math.ceil(batches * given["num_train_epochs"])
    interval = evaluation_interval(
        batches, settings.max_eval_interval, settings.evaluations_per_epoch
    )
    processes = process_state().num_processes * given.get("gradient_accumulation_steps", 1)
    if settings.batch_size % processes:
        raise UserError(
            f"the batch size {settings.batch_size} cannot be shared by processes x "
            f"gradient_accumulation_steps = {processes}"
        )
    fixed = {
        "per_device_train_batch_size": settings.batch_size // processes,
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "warmup_steps": math.ceil(settings.warmup_ratio * steps),
        "seed": settings.seed,
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
    usual = {
        "save_total_limit": 1,
        "logging_steps": interval,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    return training_arguments(folder, usual | given, fixed), steps


def fine_tune(settings, splits, model_name, tokenizer, folder, options, given):
    """Runs one fine-tuning, or continues it, and writes `folder`/result.json last.

    Args:
        settings: RunSettings.
        splits: from `glue_tasks.load_task`.
        model_name: folder or Hub name that the run starts from (the MNLI checkpoint, where one is
        used).
        tokenizer: the model's.
        folder: gets result.json, best/ (model and tokenizer, merged if LoRA) and, with LoRA,
        adapter/; glue.json names the files.
        options: GlueArguments, for what does not change the numbers (name, trust).
        given: {option of Trainer: value}.
    Returns:
        the result as written.
    Raises:
        Stopped: SIGTERM came; the step is saved, and there is no result.json.
    """
    task = TASKS[settings.task]
    folder = Path(folder)
    set_seed(settings.seed)
    model, new_head = load_classifier(
        model_name,
        task,
        settings.head_dropout,
        options.trust_remote_code,
        settings.classifier_pooling,
    )
    check_vocabulary(tokenizer, model, model_name)
    limit = text_limit(model, tokenizer)
    if settings.lora:
        model = _with_lora(model, settings.lora, head_modules(model, new_head))
    parameters = dict(zip(("trained", "all"), trainable_parameters(model)))
    train, evaluation, slices = prepare(task, splits, tokenizer, settings, limit)
    arguments, steps = trainer_arguments(settings, given, folder / "checkpoints", len(train))

    def compute_metrics(output):
        logits = (
            output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
        )
        return evaluation_metrics(task, logits, output.label_ids, slices, settings.metric)

    run = Run(folder, "glue", asdict(settings))
    with checkpoints.claim(run, None, folder / "checkpoints"):
        trainer = GlueTrainer(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=compute_metrics,
            callbacks=[EarlyStoppingCallback(settings.patience), _EvaluateAtTheEnd()],
        )
        resumed = bool(saved_checkpoints(folder / "checkpoints"))
        memory = PeakMemory()
        spent = checkpoints.train(trainer).metrics
        peak = mebibytes(memory.peak)
        result = {
            **_identity(settings, options, task, new_head),
            **_outcome(trainer, task, slices, steps),
            "parameters": parameters,
            "seconds": spent["train_runtime"],
            "seconds_per_step": round(
                spent["train_runtime"] / max(1, trainer.state.global_step), 4
            ),
            "cpu_seconds": spent["cpu_seconds"],
            "resumed": resumed,
            "peak_memory_mib": peak,
            "memory_before_mib": mebibytes(memory.before),
        }
        if trainer.is_world_process_zero():
            scratch = run.scratch()
            result["reload_difference"] = _save(
                trainer, tokenizer, evaluation, scratch, settings, options
            )
            dtype = (
                "bfloat16 autocast"
                if arguments.bf16
                else "float16 autocast"
                if arguments.fp16
                else "float32"
            )
            result["environment"] = environment(
                dtype=dtype, processes=process_state().num_processes
            )
            write_json(scratch / "result.json", result)
            run.finish(run.move_in(scratch, "result.json"))
            remove_checkpoints(folder / "checkpoints")
        trainer.accelerator.wait_for_everyone()
    return result


def _with_lora(model, lora, heads):
    from peft import get_peft_model

    config = lora_config(model, **lora, task_type="SEQ_CLS", modules_to_save=heads)
    return get_peft_model(model, config)


def _identity(settings, options, task, new_head):
    """What a result says of the run before it began."""
    return {
        "kind": "glue run",
        "task": task.name,
        "name": options.name,
        "model": str(options.model),
        "starts_from": settings.start or "the model",
        "settings": asdict(settings),
        "new_head": new_head,
    }


def _outcome(trainer, task, slices, steps):
    """What a result says of a finished run: scores of the weights that were chosen, and how they
    came about."""
    history = _history(trainer.state.log_history)
    best = next(entry for entry in history if entry["step"] == trainer.state.best_global_step)
    return {
        "score": best["dev_score"],
        "metrics": _only_dev(task, best),
        "selected": {
            "by": "held-out training rows" if "heldout" in slices else "dev",
            "score": best["score"],
            "step": best["step"],
        },
        "last": {"step": history[-1]["step"], "score": history[-1]["dev_score"]},
        "best_of_all_evaluations": max(entry["dev_score"] for entry in history),
        "rows": {
            "train": len(trainer.train_dataset),
            **{name: part.stop - part.start for name, part in slices.items()},
        },
        "evaluation_interval": trainer.args.eval_steps,
        "planned_steps": steps,
        "stopped_early": trainer.state.global_step < steps,
        "evaluations": history,
    }


def _history(log):
    """[{"step", "epoch", metrics without "eval_"}] of every evaluation, in order, each step
    once."""
    entries = {}
    for entry in log:
        if "eval_score" in entry:
            values = {name.removeprefix("eval_"): value for name, value in entry.items()}
            dropped = ("runtime", "samples_per_second", "steps_per_second", "loss")
            entries[entry["step"]] = {
                name: value for name, value in values.items() if name not in dropped
            }
    return [entries[step] for step in sorted(entries)]


def _only_dev(task, entry):
    prefixes = ("dev_", *(f"{split}_" for split in task.validation))
    return {name: value for name, value in entry.items() if name.startswith(prefixes)}


def _save(trainer, tokenizer, evaluation, folder, settings, options):
    """Writes the chosen weights, merged if LoRA, loads them again and returns the largest
    difference of the logits."""
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    rows = [evaluation[i] for i in range(min(8, len(evaluation)))]
    batch = DataCollatorWithPadding(tokenizer)(rows)
    labels = batch.pop("labels")
    del labels
    with torch.no_grad():
        before = model(**batch.to(model.device)).logits.float().cpu()
    if settings.lora:
        model = save_adapter_and_merge(model, folder / "adapter")
    model.save_pretrained(folder / "best")
    save_tokenizer(tokenizer, folder / "best")
    again = AutoModelForSequenceClassification.from_pretrained(
        folder / "best", dtype=torch.float32, trust_remote_code=options.trust_remote_code
    )
    with torch.no_grad():
        after = again.eval()(**batch.to(again.device)).logits.float().cpu()
    return (after - before).abs().max().item()
