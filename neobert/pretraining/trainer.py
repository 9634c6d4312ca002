"""transformers' Trainer with what the paper's recipe adds: its warm-up, its metrics, data that are
complete micro-batches."""

import json
import operator
import time
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers import Trainer, TrainerCallback

from ..common.files import write_json, write_text
from ..common.loading import name_tokenizer_class
from ..training import optimization
from ..training.checkpoints import RunTrainer
from .batches import batch_counts
from .streaming import STATE
from .validation import evaluate_batches, masked_correct, metric_name, piece_characters


def stream_file(checkpoint, rank):
    """Where a checkpoint keeps how far process `rank` has read a streamed data set."""
    return Path(checkpoint) / f"stream_{rank}.json"


def flops_per_batch(config, tokens, squares, predicted):
    """Floating-point operations of forward and backward over a batch: 6 a weight and token, 12 D a
    layer and pair of tokens.

    Args:
        tokens: real tokens; squares: sum of squared text lengths; predicted: rows that the decoder
            computes.
    """
    hidden, inner = config.hidden_size, config.ffn_inner_size
    per_layer = 4 * hidden * hidden + (3 if config.hidden_act == "swiglu" else 2) * hidden * inner
    blocks = config.num_hidden_layers * (6 * per_layer * tokens + 12 * hidden * squares)
    return blocks + 6 * hidden * config.vocab_size * predicted


class _Records(TrainerCallback):
    """The last step and every step that is saved are logged, so that the log and tokens_seen of a
    continued run miss nothing; and what the held-out text says before the first step.

    Args:
        trainer: `PretrainingTrainer`.
    """

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            if start := self.trainer.measure_start():
                self.trainer.log(start)
            self.trainer.evaluate()
        self.trainer.last_time = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= control.should_save or state.global_step >= state.max_steps


class PretrainingTrainer(RunTrainer, Trainer):
    """Trainer over `MicroBatches` or `StreamedBatches`, one item of which is a complete
    micro-batch.

    Logged every `logging_steps`, at every checkpoint and at the end, over all processes: loss (mean
    over masked tokens), masked_accuracy, learning_rate, grad_norm, tokens_per_second, tokens_seen,
    as epoch the passes over the data, and mfu where `peak_tflops` is given.

    Args:
        peak_tflops: of the device.
        others: as of Trainer.
    """

    def __init__(self, *others, peak_tflops=None, **more):
        # An item is a complete micro-batch already.
        super().__init__(*others, data_collator=operator.itemgetter(0), **more)
        self.add_callback(_Records(self))
        self.peak_tflops = peak_tflops
        self.measure_start = dict  # returns metrics that are logged before the first step
        self._counts = Counter()  # of the batches since the last record
        self._stream = {}  # by loader worker: where it was after its last batch

    # ------------------------------------------------------------------------------------------
    # data

    def get_train_dataloader(self):
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

    def get_batch_samples(self, *args, **kwargs):
        samples, count = super().get_batch_samples(*args, **kwargs)
        for batch in samples:
            if STATE in batch:
                state = json.loads(batch.pop(STATE))
                self._stream[state["worker"]] = state
        return samples, count

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    # ------------------------------------------------------------------------------------------
    # optimization

    def get_decay_parameter_names(self, model):
        return optimization.decay_parameter_names(model)

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.lr_scheduler is None:
            self.lr_scheduler = optimization.make_schedule(
                self.args.lr_scheduler_type,
                optimizer or self.optimizer,
                self.args.get_warmup_steps(num_training_steps),
                num_training_steps,
                self.args.lr_scheduler_kwargs,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # ------------------------------------------------------------------------------------------
    # metrics

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        self._counts.update(batch_counts(inputs))
        self._counts.update(correct=masked_correct(outputs.logits, labels)[0])
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            counts = {name: float(value) for name, value in self._counts.items()}
            self._counts.clear()
            is_stream = isinstance(self.train_dataset, IterableDataset)
            if is_stream:
                passes = self.train_dataset.epochs(self._stream.values())
                counts["passes"] = passes / self.args.world_size
            if self.args.world_size > 1:
                values = torch.tensor([*counts.values()], dtype=torch.float64)
                values = self.accelerator.reduce(values.to(self.args.device), reduction="sum")
                counts = dict(zip(counts, values.tolist()))
            seconds = time.perf_counter() - self.last_time
            self.last_time += seconds
            self.state.num_input_tokens_seen += int(counts["tokens"])
            logs["masked_accuracy"] = counts["correct"] / max(1.0, counts["masked"])
            logs["tokens_seen"] = self.state.num_input_tokens_seen
            logs["tokens_per_second"] = counts["tokens"] / max(seconds, 1e-9)
            if self.peak_tflops:
                config = self.model.config
                predicted = counts["masked" if config.sparse_prediction else "tokens"]
                flops = flops_per_batch(config, counts["tokens"], counts["squares"], predicted)
                peak = self.peak_tflops * 1e12 * self.args.world_size
                logs["mfu"] = flops / max(seconds, 1e-9) / peak
            read = self.state.num_input_tokens_seen
            self.state.epoch = counts["passes"] if is_stream else read / self.train_dataset.tokens
        super().log(logs, *args, **kwargs)

    def write_log(self):
        """`log.jsonl` in the output folder: every logged record of the run, resumed parts
        included."""
        lines = [json.dumps(record) for record in self.state.log_history]
        write_text(Path(self.args.output_dir) / "log.jsonl", "\n".join(lines) + "\n")

    # ------------------------------------------------------------------------------------------
    # saving

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            name_tokenizer_class(output_dir or self.args.output_dir)

    def _save_checkpoint(self, *args, **kwargs):
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if isinstance(self.train_dataset, IterableDataset):
            consumed = self.state.global_step * self.args.gradient_accumulation_steps
            write_json(
                stream_file(folder, self.args.process_index),
                {"consumed": consumed, "states": self._stream},
            )
        if self.args.should_save:
            self.write_log()
        super()._save_checkpoint(*args, **kwargs)

    def load_stream(self, checkpoint):
        """Lets the stream go on from a checkpoint."""
        saved = json.loads(stream_file(checkpoint, self.args.process_index).read_text())
        self._stream = {int(worker): state for worker, state in saved["states"].items()}
        self.train_dataset.load_state(self._stream, saved["consumed"])

    # ------------------------------------------------------------------------------------------
    # evaluation

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """`measure`, logged as one record."""
        metrics = self.measure()
        if metrics:
            self.log(dict(metrics))
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, metrics
            )
        self.last_time = time.perf_counter()
        return metrics

    def measure(self):
        """{`metric_name`: value} of `evaluate_batches` of every held-out set."""
        model = self.model_wrapped if self.is_fsdp_enabled else self.model
        characters, metrics = piece_characters(self.processing_class), {}
        for name, batches in (self.eval_dataset or {}).items():
            measured = evaluate_batches(model, batches, characters, self.accelerator)
            metrics |= {metric_name(name, metric): value for metric, value in measured.items()}
        return metrics
