"""Options of `neobert pretrain`, with the paper's values as defaults; Trainer's own are in `TRAINER`."""

import math
import os
from dataclasses import dataclass

import torch

from ..common.arguments import BLOCKS_ONLY, Arguments, check_trainer_options, option, training_arguments
from ..common.errors import UserError
from ..common.optimisation import OPTIMIZERS
from .batches import LAYOUTS, LONG_TEXTS, BatchSpec
from .sources import parse_sources


@dataclass
class ModelArguments(Arguments):
    """What is trained."""

    model_config: dict | None = option(None, "fields of NeoBERTConfig that differ from the published model, as a mapping")
    tokenizer: str | None = option(None, "folder or Hub name; default: that of init_from, or the bundled one")
    init_from: str | None = option(None, "start from these weights (stage 2): a run's output folder, one of its checkpoints, a Hub name")
    init_optimizer: bool = option(False, "with a checkpoint as init_from: its optimizer's moments too (a branch off a stable phase)")

    def __post_init__(self):
        super().__post_init__()
        if self.init_optimizer and self.init_from is None:
            raise UserError("init_optimizer needs init_from: a checkpoint, whose optimizer is continued with")


@dataclass
class DataArguments(Arguments):
    """What it is trained on."""

    dataset: str | list = option(
        help="Hub name (name:subset@revision), or files, a folder or a pattern: txt, jsonl, parquet, a saved set; several as a list"
    )
    subset: str | None = option(None, "subset of a Hub data set")
    split: str = option("train", "split of a Hub or saved data set")
    column: str = option("text", "column with the text")
    heldout: str | list | None = option(None, "held-out text, as dataset; evaluated every eval_steps and at the end")
    streaming: bool | None = option(
        None, "read and tokenise while training, prepared set or not; default: yes for one Hub name without a prepared set"
    )
    prepared: str | None = option(None, "where the tokenised set is kept; default OUTPUT/prepared")
    prepare: bool = option(False, "tokenise the data and stop")
    num_proc: int = option(1, "processes that tokenise a set which is prepared", least=1)

    def __post_init__(self):
        super().__post_init__()
        if self.prepare and self.streaming:
            raise UserError("a run with streaming true would not read what prepare makes; leave streaming out")
        self.sources = parse_sources(self.dataset, self.subset, self.split, self.column)
        self.heldout_sources = parse_sources(self.heldout, self.subset, self.split, self.column) if self.heldout is not None else None


@dataclass
class BatchArguments(Arguments):
    """In which batches, with which masks."""

    max_length: int = option(1024, "tokens of a text with [CLS] and [SEP]", least=3)
    long_texts: str = option("truncate", "what happens to longer ones: truncate, or split into windows of max_length", choices=LONG_TEXTS)
    layout: str = option("packed", "packed: nothing padded; packed_without_boundaries is ablation M6", choices=LAYOUTS)
    texts_per_batch: int | None = option(None, "texts of a micro-batch on each device, packed or padded", least=1)
    tokens_per_batch: int | None = option(None, "or its tokens, at most, without padding", least=3)
    texts_per_step: int | None = option(
        None, "texts of an optimizer step over all devices; gradient_accumulation_steps then follows from the number of processes", least=1
    )
    tokens_per_step: int | None = option(None, "or its tokens, at most", least=3)
    mixture: dict | None = option(None, "{least tokens of a text: probability} that a batch is drawn from such texts (stage 2)")
    mlm_probability: float = option(0.2, "share of the real tokens that are predicted", above=0, below=1)
    mask_replace_prob: float = option(1.0, "share of the predicted tokens that [MASK] replaces", least=0, most=1)
    random_replace_prob: float = option(0.0, "share of the predicted tokens that a random token replaces", least=0, most=1)
    mask_schedule: list[float] | None = option(
        None, "mlm_probability at the beginning and at the end, on a straight line between them", above=0, below=1
    )

    def __post_init__(self):
        super().__post_init__()
        if self.tokens_per_batch is None and self.texts_per_batch is None:
            self.texts_per_batch = 32
        self.spec(0)

    def spec(self, seed):
        """The `BatchSpec` of a run with this seed."""
        return BatchSpec(
            self.layout, self.tokens_per_batch, self.texts_per_batch, self.max_length, self.mixture, self.long_texts, seed
        )  # fmt: skip

    def accumulation(self, processes):
        """Micro-batches of an optimizer step on each device, or None where the recipe states no size of a step.

        Raises:
            UserError: the step is not a multiple of what `processes` devices take at once, or has another unit than the micro-batch.
        """
        unit, size = self.spec(0).size
        step, other = (self.texts_per_step, self.tokens_per_step) if unit == "texts" else (self.tokens_per_step, self.texts_per_step)
        if other is not None:
            raise UserError(f"a step and a micro-batch have one unit: with {unit}_per_batch give {unit}_per_step")
        if step is None:
            return None
        if step % (size * processes):
            raise UserError(
                f"{unit}_per_step {step:,} is not a multiple of {size:,} {unit} x {processes} processes; give another {unit}_per_batch, "
                "or another number of processes"
            )
        return step // (size * processes)


@dataclass
class RunArguments(Arguments):
    """What else a run does."""

    output: str = option("runs/pretrain", "checkpoints, logs and the final model")
    optimizer: str | None = option(None, "muon in place of Trainer's optim", choices=OPTIMIZERS)
    keep_every: int = option(0, "beside the newest save_total_limit checkpoints keep every n-th step's; 0: none", least=0)
    peak_tflops: float | None = option(None, "the device's peak, for mfu; default: a measured matrix product", above=0)
    attn_implementation: str | None = option(None, "attention implementation while training")
    compile: bool = option(False, "torch.compile the blocks while training")
    raw_checkpoint: str | None = option(
        None, "also write the final weights to OUTPUT/raw in the authors' layout, in this dtype", choices=("float32", "bfloat16", "float16")
    )


GROUPS = (ModelArguments, DataArguments, BatchArguments, RunArguments)

# Options of transformers' Trainer with the paper's values (section 4). Its warm-up of 2,000 steps is 5 % of the steps in a run of fewer than 40,000.
TRAINER = {
    "max_steps": 1_000_000,
    "learning_rate": 6e-4,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
    "logging_steps": 100,
    "save_steps": 2000,
    "save_total_limit": 2,
    "report_to": "tensorboard",
}
# An item of the data is a complete micro-batch, and a loss that is not finite must be seen.
_FIXED = {
    "per_device_train_batch_size": 1,
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,
    "label_smoothing_factor": 0.0,
    "auto_find_batch_size": False,
    **BLOCKS_ONLY,
}


def paper_schedule(max_steps, warmup_steps):
    """Trainer's options for the paper's schedule: after the warm-up a cosine to 10 % of the peak at 90 % of the steps, then constant."""
    decay = max(1, round(0.9 * max_steps) - int(warmup_steps))
    kwargs = {"num_stable_steps": 0, "num_decay_steps": decay, "decay_type": "cosine", "min_lr_ratio": 0.1}
    return {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs}


def make_training_arguments(run, batch, given):
    """transformers' TrainingArguments of a run.

    Args:
        run: RunArguments. batch: BatchArguments.
        given: Trainer's options as `read_arguments` returns them.
    Raises:
        UserError: as of `training_arguments`; values that do not go together.
    """
    given = dict(given)
    check_trainer_options(given)
    if given["max_steps"] < 1:
        raise UserError(f"max_steps must be at least 1, but {given['max_steps']} was given")
    warmup, steps = given.get("warmup_steps", min(2000, given["max_steps"] // 20)), given["max_steps"]
    given["warmup_steps"] = min(math.ceil(warmup * steps), steps - 1) if 0 < warmup < 1 else warmup  # below 1 a share of the steps
    if not {"lr_scheduler_type", "lr_scheduler_kwargs"} & given.keys():
        given |= paper_schedule(given["max_steps"], given["warmup_steps"])
    accumulation = batch.accumulation(int(os.environ.get("WORLD_SIZE", 1)))
    if accumulation is not None:
        if given.get("gradient_accumulation_steps", accumulation) != accumulation:
            raise UserError(
                f"gradient_accumulation_steps {given['gradient_accumulation_steps']} was given, but the size of a step asks for {accumulation}; "
                "leave it out"
            )
        given["gradient_accumulation_steps"] = accumulation
    accelerated = torch.accelerator.is_available()
    if given.get("bf16") and not (given.get("use_cpu") or accelerated):
        raise UserError(
            "bf16 was given, but there is no GPU or other accelerator, and most CPUs are slow in it; leave it out, or give use_cpu"
        )
    given.setdefault("dataloader_pin_memory", accelerated)
    training = training_arguments(run.output, given, _FIXED)
    if training.n_gpu > 1:
        raise UserError(f"there are {training.n_gpu} GPUs: start one process for each, with accelerate launch or torchrun")
    warmup = training.get_warmup_steps(training.max_steps)
    if not 0 <= warmup < training.max_steps:
        raise UserError(f"warmup_steps {warmup} must be at least 0 and below max_steps {training.max_steps}")
    return training
