"""transformers' Trainer with what the paper's recipe adds: its schedule, its metrics, checkpoints that a kill cannot break."""

import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import torch
import yaml
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers import Trainer, TrainerCallback

from ..common import optimisation
from ..common.errors import UserError
from ..common.files import write_json, write_text
from .batching import real_tokens, squared_lengths
from .streaming import COUNTS, STATE


WHOLE = "whole.json"  # written into a checkpoint after everything else
_RAW_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings"),
    *("hidden_act", "norm_type", "norm_eps", "position_embedding_type", "pad_token_id", "tie_word_embeddings"),
)
_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")


def whole_checkpoints(output_dir):
    """{step: folder} of the checkpoints that were written to their end, in order."""
    found = {}
    for folder in Path(output_dir).glob("checkpoint-*"):
        match = _CHECKPOINT.search(folder.name)
        if match and (folder / WHOLE).is_file():
            found[int(match.group(1))] = folder
    return dict(sorted(found.items()))


def last_whole_checkpoint(output_dir):
    """Folder of the newest whole checkpoint, or None."""
    return next(reversed(whole_checkpoints(output_dir).values()), None)


def remove_broken_checkpoints(output_dir):
    """Deletes what a killed run left half-written; returns the folders' names."""
    whole = set(whole_checkpoints(output_dir).values())
    broken = [folder for folder in Path(output_dir).glob("checkpoint-*") if _CHECKPOINT.search(folder.name) and folder not in whole]
    for folder in broken:
        shutil.rmtree(folder, ignore_errors=True)
    return sorted(folder.name for folder in broken)


def stream_file(checkpoint, rank):
    """Where a checkpoint keeps how far process `rank` has read a streamed data set."""
    return Path(checkpoint) / f"stream_{rank}.json"


def save_raw_checkpoint(model, folder, step, dtype=torch.float16):
    """Writes the authors' raw layout: `config.yaml` and `model_checkpoints/<step>/state_dict.pt`, with DistributedDataParallel's `module.`.

    Tied weights share their storage in the file.

    Returns:
        path of the file.
    """
    state, converted = {}, {}
    for name, tensor in model.state_dict().items():
        pointer = tensor.data_ptr()
        if pointer not in converted:
            converted[pointer] = tensor.detach().to("cpu", dtype, copy=True)
        state[f"module.{name}"] = converted[pointer]
    path = Path(folder) / "model_checkpoints" / str(step) / "state_dict.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)
    write_text(path.parent.parent / "latest", f"{step}\n")
    fields = {name: getattr(model.config, name) for name in _RAW_FIELDS}
    write_text(Path(folder) / "config.yaml", yaml.safe_dump(fields, sort_keys=False))
    return path


def flops_per_batch(config, tokens, squares, predicted):
    """Floating-point operations of forward and backward over a batch: 6 a weight and token, 12 D a layer and pair of tokens.

    Args:
        tokens: real tokens; squares: sum of squared text lengths; predicted: rows that the decoder computes.
    """
    hidden, inner = config.hidden_size, config.ffn_inner_size
    per_layer = 4 * hidden * hidden + (3 if config.hidden_act == "swiglu" else 2) * hidden * inner
    blocks = config.num_hidden_layers * (6 * per_layer * tokens + 12 * hidden * squares)
    return blocks + 6 * hidden * config.vocab_size * predicted


def matrix_product_rate(device, dtype, seconds=0.3):
    """Floating-point operations a second of a large square matrix product: what the share of peak is measured against."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    a @ b
    best, stop = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < stop:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


class _LastRecord(TrainerCallback):
    """The last step is logged whatever its number, so that the log and tokens_seen cover every step."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= state.global_step >= state.max_steps


class PretrainingTrainer(Trainer):
    """Trainer over `MicroBatches`, one item of which is a whole micro-batch.

    Logged every `logging_steps` and at the end, over all processes: loss (mean over masked tokens), masked_accuracy, learning_rate, grad_norm,
    tokens_per_second, share_of_peak, tokens_seen.
    UserError for a loss, or weights to be saved, that are not finite.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_callback(_LastRecord())
        self._counts = {"correct": 0, "masked": 0, "tokens": 0, "flops": 0.0}
        self._window_start = None
        self._peak = None
        self._stream_state = None
        self.skipped = {}

    def get_train_dataloader(self):
        if not isinstance(self.train_dataset, IterableDataset):
            return super().get_train_dataloader()
        # Each process streams its own share, so accelerate must not share it out again.
        return DataLoader(self.train_dataset, batch_size=None, num_workers=self.args.dataloader_num_workers)

    def get_batch_samples(self, *args, **kwargs):
        samples, count = super().get_batch_samples(*args, **kwargs)
        for batch in samples:
            self.skipped = batch.pop(COUNTS, self.skipped)
            state = batch.pop(STATE, None)
            self._stream_state = json.loads(state) if state else self._stream_state
        return samples, count

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def get_decay_parameter_names(self, model):
        return optimisation.decay_parameter_names(model)

    def create_optimizer(self, model=None):
        args = self.args
        if self.optimizer is None:
            self.optimizer = optimisation.make_optimizer(
                self.model if model is None else model,
                args.optimizer,
                args.learning_rate,
                (args.adam_beta1, args.adam_beta2),
                args.adam_epsilon,
                args.weight_decay,
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        args = self.args
        if self.lr_scheduler is None:
            self.lr_scheduler = optimisation.make_schedule(
                self.optimizer if optimizer is None else optimizer,
                int(args.warmup_steps),
                num_training_steps,
                args.schedule,
                args.decay_share,
                args.lr_floor,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, model, inputs, *args, **kwargs):
        if self._window_start is None:
            self._window_start = time.perf_counter()
        predicted = int((inputs["labels"] != -100).sum())
        tokens = real_tokens(inputs)
        config = self.model.config
        rows = predicted if config.masked_lm_logits == "masked" else tokens
        self._counts["tokens"] += tokens
        self._counts["flops"] += flops_per_batch(config, tokens, squared_lengths(inputs), rows)
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        correct, masked = masked_correct(outputs.logits, labels)
        self._counts["correct"] += correct
        self._counts["masked"] += masked
        return (loss, outputs) if return_outputs else loss

    def _diverged(self, what):
        checkpoint = last_whole_checkpoint(self.args.output_dir)
        start = f"init_from {checkpoint} (the last checkpoint)" if checkpoint is not None else "from the beginning (there is no checkpoint)"
        return UserError(f"the run has diverged: {what}; start again {start} with a lower learning_rate and another output_dir")

    def save_model(self, *args, **kwargs):
        # A process of FSDP or ZeRO-3 looks at its own part of the weights.
        weights = (getattr(parameter, "to_local", parameter.detach)() for parameter in self.model.parameters())
        if not all(torch.isfinite(weight).all() for weight in weights):
            raise self._diverged(f"the weights after step {self.state.global_step} are not finite")
        super().save_model(*args, **kwargs)

    def _reduced_counts(self):
        """The counts since the last call, summed over processes."""
        values = torch.tensor([float(self._counts[name]) for name in sorted(self._counts)], dtype=torch.float64, device=self.args.device)
        if self.args.world_size > 1:
            values = self.accelerator.reduce(values, reduction="sum")
        result = dict(zip(sorted(self._counts), values.tolist()))
        self._counts = {name: 0 for name in self._counts}
        return result

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            # Here all processes have the same number, and no step waits for the device.
            if not math.isfinite(logs["loss"]):
                raise self._diverged(f"the loss at step {self.state.global_step} is not finite")
            counts = self._reduced_counts()
            now = time.perf_counter()
            seconds = now - (self._window_start or now)
            self._window_start = now
            self.state.num_input_tokens_seen += int(counts["tokens"])
            logs["masked_accuracy"] = counts["correct"] / max(1.0, counts["masked"])
            logs["tokens_seen"] = self.state.num_input_tokens_seen
            logs.update({f"rows_skipped_{name}": number for name, number in self.skipped.items()})
            if seconds > 0:
                logs["tokens_per_second"] = counts["tokens"] / seconds
                logs["share_of_peak"] = counts["flops"] / seconds / (self._peak_rate() * self.args.world_size)
        super().log(logs, *args, **kwargs)

    def _peak_rate(self):
        if self._peak is None:
            low = self.args.bf16 or self.args.fp16
            dtype = (torch.bfloat16 if self.args.bf16 else torch.float16) if low else torch.float32
            given = self.args.peak_tflops
            self._peak = given * 1e12 if given else matrix_product_rate(self.args.device, dtype)
        return self._peak

    def _save_checkpoint(self, *args, **kwargs):
        super()._save_checkpoint(*args, **kwargs)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self._stream_state is not None:
            consumed = self.state.global_step * self.args.gradient_accumulation_steps
            write_json(stream_file(folder, self.args.process_index), {"consumed": consumed, "state": self._stream_state})
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_json(folder / WHOLE, {"step": self.state.global_step, "tokens_seen": self.state.num_input_tokens_seen})
            self._forget_old_checkpoints()
            self.write_log()
        self.accelerator.wait_for_everyone()

    def _forget_old_checkpoints(self):
        """Keeps the newest `keep_last` and every `keep_every`-th step's."""
        whole = whole_checkpoints(self.args.output_dir)
        for step, folder in list(whole.items())[: -self.args.keep_last]:
            if not self.args.keep_every or step % self.args.keep_every:
                (folder / WHOLE).unlink()
                shutil.rmtree(folder, ignore_errors=True)

    def write_log(self):
        """`log.jsonl` in the output folder: every logged record of the run, resumed parts included."""
        lines = [json.dumps(record) for record in self.state.log_history]
        write_text(Path(self.args.output_dir) / "log.jsonl", "\n".join(lines) + "\n")

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Masked loss and accuracy over every batch of `eval_dataset`, shared between the processes."""
        batches = self.eval_dataset if eval_dataset is None else eval_dataset
        metrics = evaluate_batches(self.model_wrapped if self.is_fsdp_enabled else self.model, batches, self.args.device, self.accelerator)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._window_start = time.perf_counter()
        return metrics


def masked_correct(logits, labels):
    """How many labelled tokens have the highest logit, and how many there are; logits (B, L, V) or (labelled, V)."""
    chosen = labels != -100
    with torch.no_grad():
        best = logits.argmax(dim=-1)
        best = best if best.dim() == 1 else best[chosen]
        return int((best == labels[chosen]).sum()), int(chosen.sum())


@torch.no_grad()
def evaluate_batches(model, batches, device=None, accelerator=None):
    """Masked-LM quality over all of `batches` (`MicroBatches`).

    Returns:
        dict: loss (mean cross-entropy over masked tokens), masked_accuracy, masked_tokens.
    """
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    device = device if device is not None else next(model.parameters()).device
    total, correct, masked = 0.0, 0, 0
    training = model.training
    model.eval()
    # Every process computes the same number of batches, as sharded models need; repeated ones do not count.
    for i in range(rank, math.ceil(len(batches) / world) * world, world):
        batch = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batches[min(i, len(batches) - 1)].items()}
        context = accelerator.autocast() if accelerator is not None else torch.no_grad()
        with context:
            outputs = model(**batch)
        if i < len(batches):
            right, count = masked_correct(outputs.logits, batch["labels"])
            total, correct, masked = total + float(outputs.loss) * count, correct + right, masked + count
    model.train(training)
    sums = torch.tensor([total, correct, masked], dtype=torch.float64, device=device)
    if world > 1:
        sums = accelerator.reduce(sums, reduction="sum")
    total, correct, masked = sums.tolist()
    return {"loss": total / masked, "masked_accuracy": correct / masked, "masked_tokens": int(masked)}
