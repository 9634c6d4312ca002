"""Trainer of masked language models, with the warmup and the metrics of the paper."""

import json
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers import (
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import SchedulerType

from ..common.errors import UserError, one_line
from ..common.files import write_json, write_text
from ..common.loading import name_tokenizer_class
from ..configuration_neobert import NeoBERTConfig
from ..modeling_neobert import NeoBERTForMaskedLM
from ..training import optimization
from ..training.checkpoints import RunTrainer, checkpoint_folder
from .batches import MicroBatches, batch_counts
from .streaming import STATE, StreamedBatches, WorkerState
from .validation import evaluate_batches, masked_correct, metric_name, token_characters


def stream_file(checkpoint: str | Path, rank: int) -> Path:
    """Return the file of a checkpoint with the read position of process `rank` in a stream."""
    return Path(checkpoint) / f"stream_{rank}.json"


def flops_per_batch(
    config: NeoBERTConfig, tokens: float, squares: float, predicted: float
) -> float:
    """Return the number of floating-point operations of the forward and backward pass of a batch.

    The passes need 6 operations per weight and token, and 12 * hidden_size operations per layer and
    pair of tokens.

    Args:
        config: Configuration of the model.
        tokens: Number of non-padding tokens.
        squares: Sum of the squared sequence lengths.
        predicted: Number of tokens for which the decoder computes logits.
    """
    # A multiplication with a weight takes 2 operations in the forward pass and 4 in the backward
    # pass. Attention has four matrices, and SwiGLU has one more matrix than GELU.
    hidden_size = config.hidden_size
    ffn_matrices = 3 if config.hidden_act == "swiglu" else 2
    layer_weights = hidden_size * (4 * hidden_size + ffn_matrices * config.ffn_inner_size)
    layer_flops = 6 * layer_weights * tokens + 12 * hidden_size * squares
    decoder_flops = 6 * hidden_size * config.vocab_size * predicted
    return config.num_hidden_layers * layer_flops + decoder_flops


class _LogAndEvaluate(TrainerCallback):
    """Callback that evaluates before the first step, and logs every step that ends an interval.

    These are the last step, and the steps that are evaluated or saved. The log and `tokens_seen` of
    a resumed run are then complete.
    """

    def __init__(self, trainer: "PretrainingTrainer") -> None:
        self.trainer = trainer

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Evaluate and log the model before the first step."""
        # A resumed run has evaluated the initial model before.
        if state.global_step == 0:
            if start_metrics := self.trainer.evaluate_start():
                self.trainer.log(start_metrics)
            self.trainer.evaluate()
        # The time of the evaluation is not part of the training speed.
        self.trainer.last_time = time.perf_counter()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Log the step if it is the last one, or will be evaluated or saved."""
        # With save_strategy "best", the evaluation of this step decides whether it is saved.
        is_last = state.global_step >= state.max_steps
        control.should_log |= control.should_save or control.should_evaluate or is_last


class PretrainingTrainer(RunTrainer, Trainer):
    """Trainer over `MicroBatches` or `StreamedBatches`, whose items are complete micro-batches.

    Every `logging_steps` steps, at every evaluation and checkpoint, and at the end, it logs over
    all processes: loss (mean over the masked tokens), masked_accuracy, learning_rate, grad_norm,
    tokens_per_second, tokens_seen, epoch (number of epochs over the texts), and mfu if
    `peak_tflops` is set.

    Args:
        peak_tflops: Peak throughput of a device in TFLOP/s, for mfu.
        kwargs: Other arguments of Trainer.

    Attributes:
        evaluate_start: Function that returns metrics to log before the first step.
        last_time: Start of the interval that the next log record measures, from
            `time.perf_counter`. Evaluations move it forward by their duration.
    """

    saves_sharded_weights = True
    # Narrower types than those of Trainer.
    model: NeoBERTForMaskedLM
    processing_class: PreTrainedTokenizerBase
    train_dataset: MicroBatches | StreamedBatches | None
    eval_dataset: dict[str, MicroBatches] | None

    def __init__(self, peak_tflops: float | None = None, **kwargs: Any) -> None:
        # The DataLoader returns lists of one item.
        super().__init__(data_collator=operator.itemgetter(0), **kwargs)
        self.add_callback(_LogAndEvaluate(self))
        self.peak_tflops = peak_tflops
        self.evaluate_start: Callable[[], dict[str, float]] = dict
        self.last_time = time.perf_counter()
        # Counts of all batches since the last log record.
        self._counts: Counter[str] = Counter()
        # State of each loader worker after its last batch.
        self._stream: dict[int, WorkerState] = {}

    # ------------------------------------------------------------------------------------------
    # data

    def get_train_dataloader(self) -> DataLoader:
        """Return the DataLoader of the training data."""
        if not isinstance(self.train_dataset, IterableDataset):
            return super().get_train_dataloader()
        # Each process reads its own part of the stream, so accelerate must not divide it again. An
        # iterator draws a seed for its workers. Drawn from the default generator, that seed would
        # shift all dropout masks of a resumed run, as Trainer restores the random state before it
        # creates the iterator.
        return DataLoader(
            self.train_dataset,
            batch_size=None,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            generator=torch.Generator(),
        )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step, and remember the stream's position after them."""
        # Trainer collects the micro-batches of a step right before it uses them. Batches that
        # loader workers have prefetched are not part of them, so a resumed run will read them
        # again.
        samples, count = super().get_batch_samples(*args, **kwargs)
        for batch in samples:
            if STATE in batch:
                state = json.loads(batch.pop(STATE))
                self._stream[state["worker"]] = state
        return samples, count

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        # The datasets are shuffled already: item i is micro-batch i of the run.
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset)

    # ------------------------------------------------------------------------------------------
    # optimization

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay."""
        return optimization.decay_parameter_names(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """Create the learning rate schedule with the paper's warmup.

        Args:
            num_training_steps: Number of optimizer steps of the run.
            optimizer: Optimizer, by default that of the trainer.

        Raises:
            UserError: If the schedule does not accept `lr_scheduler_kwargs`.
        """
        scheduler: Any = self.lr_scheduler
        if scheduler is not None:
            return scheduler

        used_optimizer: Any = optimizer or self.optimizer
        kwargs: Any = self.args.lr_scheduler_kwargs
        try:
            scheduler = optimization.make_schedule(
                self.args.lr_scheduler_type,
                used_optimizer,
                self.args.get_warmup_steps(num_training_steps),
                num_training_steps,
                kwargs,
            )
        except (TypeError, ValueError) as error:
            schedule = SchedulerType(self.args.lr_scheduler_type).value
            raise UserError(
                f"`lr_scheduler_type` {schedule} does not accept "
                f"`lr_scheduler_kwargs` {kwargs} ({one_line(error)})."
            ) from error

        self.lr_scheduler = scheduler
        # Trainer replaces a scheduler with this flag when `train` is called again.
        self._created_lr_scheduler = True
        return scheduler

    # ------------------------------------------------------------------------------------------
    # metrics

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Compute the loss of a micro-batch, and count its tokens and correct predictions."""
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        # `Counter.update` adds. Tensors stay on the device until the next log record, so no
        # step waits for them.
        counts: dict[str, Any] = {**batch_counts(inputs)}
        counts["correct"] = masked_correct(outputs.logits, labels)[0]
        self._counts.update(counts)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log a record; a record with a loss gets the other metrics of its steps."""
        if "loss" in logs:
            logs.update(self._step_metrics())
        super().log(logs, *args, **kwargs)

    def _step_metrics(self) -> dict[str, float]:
        """Return the metrics since the last record, and start counting again.

        The numbers of tokens and epochs in the state of the run are updated.
        """
        counts = self._sum_counts()
        seconds = time.perf_counter() - self.last_time
        self.last_time += seconds

        tokens_seen = self.state.num_input_tokens_seen + int(counts["tokens"])
        self.state.num_input_tokens_seen = tokens_seen
        if isinstance(self.train_dataset, StreamedBatches):
            self.state.epoch = counts["epochs"]
        elif self.train_dataset is not None:
            self.state.epoch = tokens_seen / self.train_dataset.epoch_tokens

        metrics = {
            "masked_accuracy": counts["correct"] / max(1.0, counts["masked"]),
            "tokens_seen": tokens_seen,
            "tokens_per_second": counts["tokens"] / max(seconds, 1e-9),
        }
        if self.peak_tflops:
            metrics["mfu"] = self._flops(counts) / max(seconds, 1e-9) / self._peak_flops()
        return metrics

    def _sum_counts(self) -> dict[str, float]:
        """Return the counts since the last record, summed over all processes."""
        counts = {name: float(value) for name, value in self._counts.items()}
        self._counts.clear()

        if isinstance(self.train_dataset, StreamedBatches):
            # The sum over the processes is then the mean number of epochs.
            epochs = self.train_dataset.epochs(self._stream.values())
            counts["epochs"] = epochs / self.args.world_size

        if self.args.world_size > 1:
            values = torch.tensor([*counts.values()], dtype=torch.float64)
            values = self.accelerator.reduce(values.to(self.args.device), reduction="sum")
            counts = dict(zip(counts, values.tolist(), strict=True))
        return counts

    def _flops(self, counts: Mapping[str, float]) -> float:
        """Return the floating-point operations of the counted batches."""
        config = self.model.config
        # Without sparse prediction, the decoder computes the logits of all tokens.
        predicted = counts["masked" if config.sparse_prediction else "tokens"]
        return flops_per_batch(config, counts["tokens"], counts["squares"], predicted)

    def _peak_flops(self) -> float:
        """Return the peak throughput of all devices in FLOP/s."""
        return (self.peak_tflops or 0.0) * 1e12 * self.args.world_size

    def write_log(self) -> None:
        """Write `log.jsonl`: all log records of the run, also those before it was resumed."""
        lines = [json.dumps(record) for record in self.state.log_history]
        write_text(checkpoint_folder(self.args) / "log.jsonl", "\n".join(lines) + "\n")

    # ------------------------------------------------------------------------------------------
    # checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and name its tokenizer class so that transformers 4 can load it."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            name_tokenizer_class(output_dir or checkpoint_folder(self.args))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        checkpoint = checkpoint_folder(self.args) / f"checkpoint-{self.state.global_step}"
        if isinstance(self.train_dataset, StreamedBatches):
            # Each process reads other rows and saves its position.
            consumed = self.state.global_step * self.args.gradient_accumulation_steps
            write_json(
                stream_file(checkpoint, self.args.process_index),
                {"consumed": consumed, "states": self._stream},
            )
        # A killed run leaves a log that ends at its last checkpoint.
        if self.args.should_save:
            self.write_log()
        super()._save_checkpoint(*args, **kwargs)

    def on_resume(self, checkpoint: Path) -> None:
        """Continue a stream at the position of a checkpoint."""
        if not isinstance(self.train_dataset, StreamedBatches):
            return

        # JSON converts the numbers of the workers to strings.
        saved = json.loads(stream_file(checkpoint, self.args.process_index).read_text())
        self._stream = {int(worker): state for worker, state in saved["states"].items()}
        self.train_dataset.load_state(self._stream, saved["consumed"])

    # ------------------------------------------------------------------------------------------
    # evaluation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate all validation sets, and log the metrics as one record."""
        start = time.perf_counter()
        metrics = self.validation_metrics()
        if metrics:
            self.log(dict(metrics))
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, metrics
            )
        # The time of an evaluation is not part of the training speed.
        self.last_time += time.perf_counter() - start
        return metrics

    def validation_metrics(self) -> dict[str, float]:
        """Return the metrics of all validation sets, {`metric_name`: value}."""
        # FSDP gathers its sharded weights in the forward pass of the wrapper.
        model: Any = self.model_wrapped if self.is_fsdp_enabled else self.model
        characters = token_characters(self.processing_class)
        metrics: dict[str, float] = {}
        for name, batches in (self.eval_dataset or {}).items():
            values = evaluate_batches(model, batches, characters, self.accelerator)
            for metric, value in values.items():
                metrics[metric_name(name, metric)] = value
        return metrics
