"""Trainer of `neobert finetune` and `neobert glue`: training, selected weights, adapters, files."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import EvalPrediction

from ..common.constants import WAIT_SECONDS
from ..common.loading import save_tokenizer
from ..common.measures import PeakMemory
from ..training.checkpoints import RunTrainer, checkpoint_folder
from ..training.lora import head_modules, lora_config, save_adapter_and_merge
from ..training.optimization import decay_parameter_names
from ..training.run_report import RunReport


# Values of an evaluation that the history does not contain.
_TIMES = ("runtime", "samples_per_second", "steps_per_second", "loss")

# Options of Trainer that every run needs: the weights of the best evaluation are selected, and a
# resumed run repeats what an uninterrupted one would have done.
FIXED = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "score",
    "greater_is_better": True,
    "label_names": ["labels"],
    "remove_unused_columns": False,
    "save_only_model": False,
    "ignore_data_skip": False,
    # Without any evaluation, there would be no best checkpoint.
    "eval_delay": 0,
    # Early stopping counts the evaluations without progress, and a resumed run continues the count.
    "restore_callback_states_from_checkpoint": True,
}


def process_state() -> PartialState:
    """Return the processes of the run as accelerate sees them.

    Without an accelerator, accelerate must be set to the CPU; otherwise the processes of
    torchrun would not find each other.
    """
    return PartialState(
        cpu=not torch.accelerator.is_available(), timeout=timedelta(seconds=WAIT_SECONDS)
    )


class FinetuneTrainer(RunTrainer, Trainer):
    """Trainer of a classifier. Weight decay applies to matrices only.

    Attributes:
        new_head: Names of the head's parameters that the checkpoint lacks.
        memory: Memory during training.
    """

    new_head: list[str]
    memory: PeakMemory

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train`, and measure the memory."""
        with PeakMemory() as self.memory:
            return super().train(*args, **kwargs)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Return the matrices; norms and biases are vectors in every encoder."""
        return decay_parameter_names(model)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Record and save the best step.

        transformers 4 and 5.0 record the step for the strategies "steps" and "epoch" only.
        """
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best:
            # `save_steps` may be a multiple of `eval_steps`. The weights of the best step must be
            # saved nevertheless, because they are loaded at the end.
            self.control.should_save = True
            self.state.best_global_step = self.state.global_step
            self.state.best_model_checkpoint = str(
                checkpoint_folder(self.args) / f"checkpoint-{self.state.global_step}"
            )
        return is_best

    def predict_logits(self, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits and the labels of rows. All processes must call this method.

        Returns:
            Logits of shape (N, C) or (N, L, C), and labels of shape (N,), (N, C) or (N, L).
        """
        # The metrics are those of the validation rows, and would fail for other rows.
        compute_metrics = self.compute_metrics
        self.compute_metrics = None
        output = self.predict(dataset)
        self.compute_metrics = compute_metrics
        return output_logits(output), np.asarray(output.label_ids)

    def evaluation_history(self) -> list[dict[str, float]]:
        """Return the metrics and the step of every evaluation, without times and losses."""
        # The log also contains training losses and a summary of the run.
        removed = {f"eval_{name}" for name in _TIMES}
        history = []
        for record in self.state.log_history:
            if "eval_score" in record:
                names = [name for name in record if name not in removed]
                history.append({name.removeprefix("eval_"): record[name] for name in names})
        return history


TrainerT = TypeVar("TrainerT", bound=FinetuneTrainer)


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


def make_trainer(
    trainer_class: type[TrainerT],
    model: PreTrainedModel,
    args: TrainingArguments,
    train_rows: Dataset,
    evaluation_rows: Dataset,
    data_collator: Callable[[list[Any]], dict[str, Any]],
    compute_metrics: Callable[[EvalPrediction], dict[str, float]],
    patience: int | None,
    new_head: list[str],
) -> TrainerT:
    """Return the trainer of a run.

    Args:
        trainer_class: `FinetuneTrainer` or a subclass.
        model: Model to train.
        args: Arguments of the trainer.
        train_rows: Tokenized training rows.
        evaluation_rows: Tokenized rows that select the weights.
        data_collator: Function that makes a batch of rows.
        compute_metrics: Function of an evaluation that returns its metrics and "score", which
            selects the weights.
        patience: Number of evaluations without progress after which the run stops, or None.
        new_head: Names of the head's parameters that the checkpoint lacks.
    """
    # Trainer evaluates at multiples of `eval_steps`; the last step may not be one.
    callbacks: list[TrainerCallback] = []
    if patience is not None:
        callbacks.append(EarlyStoppingCallback(patience))
    if args.eval_strategy == "steps":
        callbacks.append(_EvaluateAtTheEnd())
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=evaluation_rows,
        data_collator=data_collator,
        compute_metrics=compute_metrics,
        callbacks=[*callbacks, RunReport()],
    )
    trainer.new_head = new_head
    return trainer


def add_adapters(
    model: PreTrainedModel, lora: dict[str, Any], new_head: Sequence[str], task_type: str
) -> Any:
    """Return a model with low-rank adapters, whose head is trained in full.

    Args:
        model: Model, which is changed.
        lora: Keyword arguments of `lora_config`.
        new_head: Names of the head's parameters that the checkpoint lacks.
        task_type: Task type of PEFT.
    """
    from peft import get_peft_model

    # PEFT freezes all other modules. A head with random weights must be trained in full.
    heads = head_modules(model, new_head)
    config = lora_config(model, **lora, task_type=task_type, modules_to_save=heads)
    return get_peft_model(model, config)


def save_model(
    trainer: FinetuneTrainer,
    tokenizer: PreTrainedTokenizerBase,
    model_folder: Path | None,
    adapter_folder: Path | None,
    auto_class: Any,
    trust_remote_code: bool = False,
    scaling: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Save the selected weights, with the adapter of LoRA merged, and the tokenizer.

    Args:
        trainer: Trainer whose model has the selected weights.
        tokenizer: Tokenizer of the model.
        model_folder: Directory of the model, or None to save no model.
        adapter_folder: Directory of the adapter, or None without LoRA.
        auto_class: Auto class of transformers that loads the model.
        trust_remote_code: Whether to run the Python code in the repository of the model.
        scaling: Factor and offset of the saved model's output, see `scale_output`.

    Returns:
        With `model_folder`, "reload_difference": the largest difference of a logit after the saved
        model has been loaded again.
    """
    # The saved model is loaded again, and must give the same logits on a few rows.
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    rows: Any = trainer.eval_dataset
    first_rows = rows.select(range(min(8, len(rows))))
    input_names = [name for name in first_rows.column_names if name != "labels"]
    batch: Any = DataCollatorWithPadding(tokenizer)([*first_rows.select_columns(input_names)])
    with torch.no_grad():
        before = model(**batch.to(model.device)).logits.float().cpu()

    if scaling is not None:
        # The output layer takes over the unit of the labels. The adapter contains the head, so the
        # layer is scaled before the adapter is saved.
        factor, offset = scaling
        scale_output(model, factor, offset)
        before = before * factor + offset
    if adapter_folder is not None:
        model = save_adapter_and_merge(model, adapter_folder)
    if model_folder is None:
        return {}

    model.save_pretrained(model_folder)
    save_tokenizer(tokenizer, model_folder)

    saved = auto_class.from_pretrained(
        model_folder, dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    with torch.no_grad():
        after = saved.eval()(**batch.to(saved.device)).logits.float().cpu()
    return {"reload_difference": (after - before).abs().max().item()}


def output_layer(model: torch.nn.Module) -> torch.nn.Linear | None:
    """Return the last linear layer of a head, or None if it has none of the common names.

    For a model with an adapter, return the copy of the layer that is trained.
    """
    # RoBERTa and ELECTRA have an `out_proj`, NeoBERT and BERT a `classifier`, and decoders a
    # `score`.
    for name in ("classifier.out_proj", "classifier", "score"):
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            continue
        # PEFT wraps a module that is trained in full, and trains a copy of the module.
        copies = getattr(layer, "modules_to_save", None)
        if copies is not None:
            layer = copies["default"]
        if isinstance(layer, torch.nn.Linear) and layer.bias is not None:
            return layer
    return None


@torch.no_grad()
def scale_output(model: torch.nn.Module, factor: float, offset: float) -> None:
    """Change the last layer of a model so that its output y becomes `factor * y + offset`.

    Args:
        model: Model with an `output_layer`, which is changed in place.
        factor: Factor of the output.
        offset: Value that is added to the scaled output.
    """
    # Labels are standardized only for models with such a layer.
    layer = output_layer(model)
    assert layer is not None
    layer.weight.mul_(factor)
    layer.bias.mul_(factor).add_(offset)


def memory_result(memory: PeakMemory) -> dict[str, int | None]:
    """Return the memory of a training run in MiB, for its result."""
    return {
        "peak_memory_mib": memory.peak and round(memory.peak / 2**20),
        "memory_before_mib": memory.before and round(memory.before / 2**20),
    }


def output_logits(output: Any) -> np.ndarray:
    """Return the logits of a prediction; some models return other outputs beside them."""
    predictions = output.predictions
    return predictions[0] if isinstance(predictions, tuple) else predictions
