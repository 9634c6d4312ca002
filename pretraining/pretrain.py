"""`neobert pretrain RECIPE.yaml [--key value ...]`: masked-LM pre-training as in the paper (sections 3 and 4).

`--prepare true` only tokenises the data. The same command again continues from the last whole checkpoint.
"""

import dataclasses
import json
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..common.errors import require


require("train", "accelerate", "datasets")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import TrainingArguments, set_seed  # noqa: E402
from transformers.utils import logging  # noqa: E402

from ..common import optimisation  # noqa: E402
from ..common.errors import UserError, one_line  # noqa: E402
from ..common.files import write_json  # noqa: E402
from ..common.loading import TOKENIZER, load_tokenizer  # noqa: E402
from ..common.recipe import read_recipe, refuse_options  # noqa: E402
from ..common.results import environment  # noqa: E402
from ..common.trackers import check_trackers  # noqa: E402
from ..configuration_neobert import NeoBERTConfig  # noqa: E402
from ..modeling_neobert import NeoBERTForMaskedLM  # noqa: E402
from . import pretrain_trainer  # noqa: E402
from .batching import MicroBatches, Windows, check_batch  # noqa: E402
from .masking import TokenMasking  # noqa: E402
from .pretraining_data import describe, is_local, load_prepared, load_rows, local_files, prepare, source_digest  # noqa: E402
from .streaming import StreamedBatches  # noqa: E402


logger = logging.get_logger(__name__)

# Keys that a continued run may change: they touch neither the numbers nor the order of the data.
_FREE_KEYS = {
    "output_dir", "prepare", "prepared_dir", "workers", "logging_steps", "save_steps", "eval_steps", "eval_strategy", "keep_last",
    "keep_every", "report_to", "run_name", "disable_tqdm", "peak_tflops", "dataloader_num_workers", "raw_checkpoint", "gradient_checkpointing",
    "tokenizer", "dataset", "heldout", "init_from",
}  # fmt: skip


# Arguments of TrainingArguments that this trainer decides otherwise: setting one would change nothing, or break continuing.
_NOT_OURS = {
    "num_train_epochs": "give max_steps",
    "logging_strategy": "give logging_steps",
    "lr_scheduler_type": "give schedule",
    "lr_scheduler_kwargs": "give decay_share and lr_floor",
    "warmup_ratio": "give warmup_steps",
    "optim": "give optimizer",
    "optim_args": "give adam_beta1, adam_beta2 and adam_epsilon",
    "per_device_eval_batch_size": "held-out text is batched like the training text",
    "auto_find_batch_size": "give tokens_per_batch or texts_per_batch",
    "save_total_limit": "give keep_last and keep_every",
    "save_only_model": "a checkpoint must hold all that continuing needs",
    "load_best_model_at_end": "the final weights are kept",
    "resume_from_checkpoint": "the same command continues by itself",
    "ignore_data_skip": "a continued run goes on where its data stood",
    "group_by_length": "packed batches waste nothing on short texts",
    "train_sampling_strategy": "the order of the texts follows from seed",
    "label_smoothing_factor": "the loss is the cross-entropy of the masked tokens",
}
# Names that NeoBERTConfig also understands, and the fields that they set.
_ALIASES = {
    "dropout": ("attention_dropout", "hidden_dropout"),
    "dropout_prob": ("attention_dropout", "hidden_dropout"),
    "rope": ("position_embedding_type",),
    "rms_norm": ("norm_type",),
    "max_length": ("max_position_embeddings",),
}


@dataclass
class ModelArguments:
    """What is trained."""

    model_config: dict | str | None = field(
        default=None,
        metadata={"help": "fields of NeoBERTConfig that differ from the published model, as a mapping (JSON on the command line)"},
    )
    tokenizer: str = field(default=str(TOKENIZER), metadata={"help": "folder or Hub name"})
    init_from: str | None = field(
        default=None, metadata={"help": "start from these weights (stage 2): a run's output folder, a checkpoint, a Hub name"}
    )

    def __post_init__(self):
        if isinstance(self.model_config, str):
            try:
                self.model_config = json.loads(self.model_config)
            except ValueError as error:
                raise UserError(f"model_config is not valid JSON: {error}") from error
        if self.model_config is not None and not isinstance(self.model_config, dict):
            raise UserError(f"model_config must be a mapping of NeoBERTConfig fields, but {self.model_config!r} was given")
        _check_single_values(self, "model_config")
        # YAML reads 1e-5 (no dot) as text.
        self.model_config = self.model_config and {name: _number(value) for name, value in self.model_config.items()}


def _check_single_values(arguments, *mappings):
    """Of the keys of a recipe only `mappings` take more than one value."""
    for name, value in vars(arguments).items():
        if name not in mappings and isinstance(value, (list, dict)):
            raise UserError(f"{name} takes one value, but {value!r} was given")
    _check_finite(arguments)


def _check_finite(arguments):
    for name, value in vars(arguments).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} must be a finite number, but {value} was given")


def _check_numbers(training):
    """Numbers that torch or NumPy would refuse once the work has begun."""
    _check_finite(training)
    for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm"):
        if getattr(training, name) < 0:
            raise UserError(f"{name} must be at least 0, but {getattr(training, name)} was given")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(training, name) < 1:
            raise UserError(f"{name} must be at least 0 and below 1, but {getattr(training, name)} was given")
    for name in ("seed", "data_seed"):
        if not 0 <= (getattr(training, name) or 0) < 2**32:
            raise UserError(f"{name} must be at least 0 and below 2^32, but {getattr(training, name)} was given")


def _number(value):
    try:
        return float(value) if isinstance(value, str) and value[:1].isdigit() else value
    except ValueError:
        return value


@dataclass
class DataArguments:
    """What it is trained on, in which batches."""

    dataset: str = field(
        default="tiiuae/falcon-refinedweb",
        metadata={
            "help": "Hub name (name:subset@revision); or files, a folder or a pattern: txt, jsonl, parquet, a saved set; several with commas"
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "subset of a Hub data set"})
    split: str = field(default="train", metadata={"help": "split of a Hub or saved data set"})
    text_column: str = field(default="content", metadata={"help": "column with the text"})
    streaming: bool | None = field(
        default=None,
        metadata={"help": "read and tokenise while training, prepared set or not; default: yes for one Hub name without a prepared set"},
    )
    prepared_dir: str | None = field(default=None, metadata={"help": "where the tokenised set is kept; default OUTPUT_DIR/prepared"})
    prepare: bool = field(default=False, metadata={"help": "tokenise the data and stop"})
    workers: int = field(default=1, metadata={"help": "processes that tokenise"})
    heldout: str | None = field(default=None, metadata={"help": "held-out text, as dataset; evaluated every eval_steps and at the end"})
    max_length: int = field(default=1024, metadata={"help": "tokens of a text with [CLS] and [SEP]"})
    long_texts: str = field(default="truncate", metadata={"help": "truncate, or split into windows of max_length"})
    layout: str = field(default="packed", metadata={"help": "packed, padded, or packed_without_boundaries (ablation M6)"})
    tokens_per_batch: int = field(default=32768, metadata={"help": "tokens of a packed micro-batch, at most, on each device"})
    texts_per_batch: int = field(default=32, metadata={"help": "texts of a padded micro-batch on each device"})
    mixture: dict | str | None = field(
        default=None, metadata={"help": "{least tokens of a text: probability} that a batch is drawn from such texts (stage 2)"}
    )
    mask_probability: float = field(default=0.2, metadata={"help": "share of the real tokens that are predicted"})
    mask_share: float = field(default=1.0, metadata={"help": "share of the predicted tokens that [MASK] replaces"})
    random_share: float = field(default=0.0, metadata={"help": "share of the predicted tokens that a random token replaces"})

    def __post_init__(self):
        for name in ("dataset", "heldout"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, ", ".join(map(str, getattr(self, name))))
        _check_single_values(self, "mixture")
        if isinstance(self.mixture, str):
            try:
                self.mixture = json.loads(self.mixture)
            except ValueError as error:
                raise UserError(f"mixture is not valid JSON: {error}") from error
        check_batch(self.layout, self.tokens_per_batch, self.texts_per_batch, self.max_length, self.mixture, self.long_texts)
        if self.prepare and self.streaming:
            raise UserError("a run with streaming true would not read what prepare makes; leave streaming out")
        if self.workers < 1:
            raise UserError(f"workers must be at least 1, but {self.workers} was given")


@dataclass
class PretrainingArguments(TrainingArguments):
    """transformers' TrainingArguments with the paper's values, and what the recipe adds."""

    output_dir: str = field(default="runs/pretrain", metadata={"help": "checkpoints, logs and the final model"})
    max_steps: int = field(default=1_000_000, metadata={"help": "optimizer steps"})
    learning_rate: float = field(default=6e-4, metadata={"help": "peak learning rate"})
    weight_decay: float = field(default=0.1, metadata={"help": "of matrices; norms and biases do not decay"})
    adam_beta1: float = field(default=0.9)
    adam_beta2: float = field(default=0.95)
    adam_epsilon: float = field(default=1e-8)
    max_grad_norm: float = field(default=1.0)
    warmup_steps: float = field(default=2000, metadata={"help": "steps of linear warm-up"})
    optimizer: str = field(default="adamw", metadata={"help": "adamw or adam"})
    schedule: str = field(default="cosine", metadata={"help": "cosine, linear or constant"})
    decay_share: float = field(default=0.9, metadata={"help": "share of the steps over which the cosine falls"})
    lr_floor: float = field(default=0.1, metadata={"help": "what the cosine falls to, as a share of the peak"})
    keep_last: int = field(default=2, metadata={"help": "newest checkpoints to keep"})
    keep_every: int = field(default=0, metadata={"help": "also keep every n-th step's checkpoint; 0: none"})
    logging_steps: float = field(default=100)
    save_steps: float = field(default=2000)
    report_to: str | None = field(default="tensorboard", metadata={"help": "tensorboard, wandb, trackio, none"})
    peak_tflops: float | None = field(
        default=None, metadata={"help": "the device's peak for share_of_peak; default: a measured matrix product"}
    )
    raw_checkpoint: str | None = field(
        default=None,
        metadata={"help": "also write the final weights to OUTPUT_DIR/raw in the authors' raw layout: float32, bfloat16 or float16"},
    )
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "no filter: a loss that is not finite ends the run"})
    remove_unused_columns: bool = field(default=False)
    per_device_train_batch_size: int = field(default=1, metadata={"help": "always 1: an item of the data is a whole micro-batch"})

    def __post_init__(self):
        if self.per_device_train_batch_size != 1:
            raise UserError("per_device_train_batch_size does not apply: give tokens_per_batch (packed) or texts_per_batch (padded)")
        if self.keep_last < 1 or self.keep_every < 0:
            raise UserError(
                f"keep_last must be at least 1 and keep_every at least 0, but {self.keep_last} and {self.keep_every} were given"
            )
        if self.raw_checkpoint not in (None, "float32", "bfloat16", "float16"):
            raise UserError(f"raw_checkpoint must be float32, bfloat16 or float16, but {self.raw_checkpoint!r} was given")
        _check_numbers(self)
        if self.save_strategy not in ("steps", "no"):
            raise UserError(f"save_strategy must be steps or 'no' (in a recipe with its quotes), but {self.save_strategy} was given")
        if self.fp16 and (self.use_cpu or not torch.accelerator.is_available()):
            raise UserError("fp16 needs a GPU or another accelerator, and there is none in use; leave it out, or give bf16")
        refuse_options(self, _NOT_OURS, TrainingArguments)
        for name in ("logging_steps", "save_steps"):
            value = getattr(self, name)
            if value < 1 or value != int(value):
                raise UserError(f"{name} must be a whole number of steps, but {value:g} was given")
        if self.keep_every % self.save_steps:
            raise UserError(
                f"keep_every {self.keep_every} must be a multiple of save_steps {self.save_steps:g}; no checkpoint would be kept"
            )
        if self.gradient_accumulation_steps < 1:
            raise UserError(f"gradient_accumulation_steps must be at least 1, but {self.gradient_accumulation_steps} was given")
        if self.save_steps % self.logging_steps:
            raise UserError(
                f"save_steps {self.save_steps:g} must be a multiple of logging_steps {self.logging_steps:g}, so that logs continue whole"
            )
        if self.optimizer not in optimisation.OPTIMIZERS:
            raise UserError(f"optimizer must be one of {', '.join(optimisation.OPTIMIZERS)}, but {self.optimizer!r} was given")
        if self.warmup_steps != int(self.warmup_steps):
            raise UserError(f"warmup_steps must be a whole number of steps, but {self.warmup_steps} was given")
        self.warmup_steps = int(self.warmup_steps)
        check_trackers(self.report_to)
        optimisation.check_schedule(self.schedule, self.warmup_steps, self.max_steps, self.decay_share, self.lr_floor)
        super().__post_init__()


def make_model(arguments, tokenizer, seed):
    """`NeoBERTForMaskedLM`: freshly initialised, or from `init_from`.

    Raises:
        UserError: an unknown configuration field, a vocabulary that does not match the tokenizer's, weights of another architecture.
    """
    given = dict(arguments.model_config or {})
    known = set(NeoBERTConfig().to_dict()) | {"rope_theta", "rope_scaling", "rope", "rms_norm", "dropout", "dropout_prob", "max_length"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise UserError(f"model_config has an unknown field {unknown[0]!r}; NeoBERTConfig lists the fields")
    given.setdefault("masked_lm_logits", "masked")
    if arguments.init_from is None:
        given.setdefault("vocab_size", len(tokenizer))
        given.setdefault("pad_token_id", tokenizer.pad_token_id)
        config = _checked_config(given)
        _check_vocabulary(config.vocab_size, tokenizer, "model_config")
        set_seed(seed)
        return NeoBERTForMaskedLM(config)
    source = _weights_source(arguments.init_from)
    try:
        values = json.loads((Path(source) / "config.json").read_text()) if Path(source).is_dir() else None
        model_type = values["model_type"] if values else NeoBERTConfig.get_config_dict(source)[0].get("model_type")
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"init_from {arguments.init_from} holds no model (config.json with model_type): {one_line(error, 120)}") from error
    if model_type != "neobert":
        raise UserError(f"init_from {arguments.init_from} is a {model_type!r} model; a NeoBERT checkpoint is needed")
    config = NeoBERTConfig.from_pretrained(source)
    _override(config, given, arguments.init_from)
    _check_vocabulary(config.vocab_size, tokenizer, f"init_from {arguments.init_from}")
    try:
        model, info = NeoBERTForMaskedLM.from_pretrained(source, config=config, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # safetensors' own for a torn file, RuntimeError for other shapes, OSError for no file
        raise UserError(f"init_from {arguments.init_from}: its weights cannot be loaded ({one_line(error)})") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"init_from {arguments.init_from} has no weights for {', '.join(missing[:3])}; a masked-LM checkpoint is needed")
    return model


def _checked_config(values):
    try:
        return NeoBERTConfig(**values)
    except (ValueError, TypeError) as error:
        raise UserError(f"model_config: {error}") from error


def _override(config, given, source):
    """Sets the fields of `config` that `given` names, under whichever name; UserError for one that the weights of `source` fix."""
    shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "hidden_act", "norm_type",
             "position_embedding_type", "tie_word_embeddings")  # fmt: skip
    named = {target for name in given for target in _ALIASES.get(name, (name,))}
    kept = {name: getattr(config, name) for name in (*shape, "max_position_embeddings") if name not in named}
    wanted = _checked_config({**kept, **given})
    # RoPE first: YaRN takes the length that the weights were trained at from the configuration as it is.
    for name in sorted(given, key=lambda name: not name.startswith("rope_")):
        for target in _ALIASES.get(name, (name,)):
            value = given[name] if target.startswith("rope_") else getattr(wanted, target, given[name])
            if target in shape and getattr(config, target) != value:
                raise UserError(f"init_from {source} has {target}={getattr(config, target)!r}, but model_config asks for {value!r}")
            setattr(config, target, value)


def _check_vocabulary(rows, tokenizer, where):
    """Some padding rows (to a multiple of 128, say) are fine; fewer rows than tokens, or far more, are another vocabulary."""
    if not len(tokenizer) <= rows < len(tokenizer) + 128:
        raise UserError(f"{where} has a vocabulary of {rows}, but the tokenizer has {len(tokenizer)} tokens; they must belong together")


def _weights_source(init_from):
    """A run's output folder stands for its final model, or its last whole checkpoint before that."""
    folder = Path(init_from)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return init_from
    checkpoint = pretrain_trainer.last_whole_checkpoint(folder)
    if checkpoint is None:
        raw = "; convert it first with neobert convert" if (folder / "model_checkpoints").is_dir() else ""
        raise UserError(f"init_from {init_from} has neither a model (config.json) nor a whole checkpoint{raw}")
    logger.warning("init_from %s has not finished; its weights are those of %s", init_from, checkpoint.name)
    return str(checkpoint)


def unigram(tokens, tokenizer, sample=2_000_000):
    """The most frequent ordinary token of a tokenised set, from its first rows: what a model without context would always say."""
    counts, seen = np.zeros(len(tokenizer), dtype=np.int64), 0
    for rows in tokens.with_format("numpy").select_columns(["input_ids"]).iter(1000):
        ids = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows["input_ids"]])
        counts += np.bincount(ids, minlength=len(counts))
        seen += len(ids)
        if seen > sample:
            break
    counts[tokenizer.all_special_ids] = 0
    return int(counts.argmax())


def unigram_accuracy(batches, token):
    """Accuracy of always answering `token`, on the very positions that `batches` mask."""
    labels = [batches[i]["labels"] for i in range(len(batches))]
    labels = torch.cat([values[values != -100] for values in labels])
    return float((labels == token).float().mean())


def prepared_tokens(data, dataset, folder, tokenizer, training):
    """The tokenised form of `dataset`, made at `folder` first when it is not there."""
    local = local_files(dataset)
    if local is not None and local[0] == "prepared":
        folder = local[1][0]
    else:
        with training.main_process_first(desc="tokenising"):
            prepare(dataset, folder, tokenizer, data.dataset_config, data.split, data.text_column, data.workers)
    tokens, summary = load_prepared(folder, tokenizer)
    if training.process_index == 0:
        print(f"{dataset}: {describe(summary)}", file=sys.stderr, flush=True)
    return tokens


def _ends(tokenizer):
    """Ids of the tokens before and after every text."""
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    first = tokenizer.bos_token_id if first is None else first
    last = tokenizer.eos_token_id if last is None else last
    if first is None or last is None:
        raise UserError(f"the tokenizer {tokenizer.name_or_path} has no tokens for the start and end of a text ([CLS], [SEP])")
    return first, last


def _streams(data, prepared):
    """Whether the training data is read while training. Several sources are prepared, so that their texts are shuffled together."""
    if data.streaming is not None:
        return data.streaming
    return not is_local(data.dataset) and "," not in data.dataset and not (prepared / "prepared.json").is_file()


def make_stream(data, tokenizer, masking, seed, training):
    """`StreamedBatches` of this process."""
    rows, kind = load_rows(data.dataset, data.dataset_config, data.split, data.text_column, streaming=True)
    return StreamedBatches(
        rows, kind, data.text_column, tokenizer, *_ends(tokenizer), masking, data.layout, data.tokens_per_batch, data.texts_per_batch,
        data.max_length, data.long_texts, data.mixture, seed, training.process_index, training.world_size,
    )  # fmt: skip


def make_batches(data, tokens, tokenizer, masking, count, seed):
    """`MicroBatches` of a run from its tokenised set; `count=None`: one pass."""
    first, last = _ends(tokenizer)
    windows = Windows(tokens, first, last, data.max_length, data.long_texts)
    settings = {
        "layout": data.layout,
        "tokens_per_batch": data.tokens_per_batch,
        "texts_per_batch": data.texts_per_batch,
        "max_length": data.max_length,
        "pad_token_id": tokenizer.pad_token_id,
        "seed": seed,
    }
    mixture, name = (None, data.heldout) if count is None else (data.mixture, data.dataset)
    batches = MicroBatches(windows, masking, count=count, mixture=mixture, **settings)
    looked = len(batches) if count is None else min(count, 100)
    if not any((batches[i]["labels"] != -100).any() for i in range(looked)):
        raise UserError(f"the text of {name} has no token to mask, only special ones such as [UNK]; is the tokenizer made for it?")
    return batches


def _recipe_values(*parts):
    """The numbers of a run as they were given, for the check of a continued run."""
    defaults = {f.name for f in dataclasses.fields(TrainingArguments)} - {
        "max_steps", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "warmup_steps",
        "gradient_accumulation_steps", "seed", "data_seed", "bf16", "fp16",
    }  # fmt: skip
    values = {}
    for part in parts:
        values.update({f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.name not in defaults | _FREE_KEYS})
    return json.loads(json.dumps(values))


def _check_own(output_dir):
    """Models and checkpoints in `output_dir` must be this program's: they are written over, half-written checkpoints deleted."""
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"output_dir {output_dir} is a file; give a folder")
    others = sorted(path.name for name in ("checkpoint-*", "config.json", "*.safetensors", "*.bin") for path in output_dir.glob(name))
    if others and not (output_dir / "recipe.json").is_file():
        raise UserError(
            f"output_dir {output_dir} holds {others[0]}, but no run of neobert pretrain (recipe.json); choose another output_dir"
        )


def _check_continues(output_dir, values, world_size):
    """The run in `output_dir` must have been started with the same numbers."""
    path = Path(output_dir) / "recipe.json"
    if not path.is_file():
        return
    before = json.loads(path.read_text())
    for name, value in {**values, "world_size": world_size}.items():
        if name in before and before[name] != value:
            raise UserError(f"{output_dir} was started with {name}={before[name]!r}, now {value!r}; give the same, or another output_dir")


def run(model_arguments, data, training):
    """Trains, or continues; returns the metrics of the final evaluation (an empty dict without held-out text)."""
    check_batch(data.layout, data.tokens_per_batch, data.texts_per_batch, data.max_length, data.mixture, data.long_texts)
    tokenizer = load_tokenizer(model_arguments.tokenizer, padding=False)
    masking = TokenMasking(tokenizer, data.mask_probability, data.mask_share, data.random_share)
    if data.layout == "padded" and tokenizer.pad_token_id is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no padding token, which layout padded needs; add [PAD], or give layout: packed"
        )
    output_dir = Path(training.output_dir)
    prepared_dir = Path(data.prepared_dir) if data.prepared_dir else output_dir / "prepared"
    if data.prepare:
        for name, dataset in (("train", data.dataset), ("heldout", data.heldout)):
            if dataset is not None:
                prepared_tokens(data, dataset, prepared_dir / name, tokenizer, training)
        return {}
    if data.heldout is None and str(getattr(training.eval_strategy, "value", training.eval_strategy)) != "no":
        raise UserError(
            f"eval_strategy {getattr(training.eval_strategy, 'value', training.eval_strategy)} needs held-out text: give heldout"
        )
    _check_own(output_dir)
    model = make_model(model_arguments, tokenizer, training.seed)
    limit = model.config.max_position_embeddings
    if data.max_length > limit:
        raise UserError(f"max_length {data.max_length} is more than the model's max_position_embeddings {limit}")
    values = _recipe_values(model_arguments, data, training)
    values["streaming"] = _streams(data, prepared_dir / "train")
    values["data"] = source_digest(data.dataset, data.dataset_config, data.split, data.text_column, tokenizer)
    checkpoint = pretrain_trainer.last_whole_checkpoint(output_dir)
    if checkpoint is not None:
        _check_continues(output_dir, values, training.world_size)

    seed = training.data_seed if training.data_seed is not None else training.seed
    tokens = heldout = None
    if values["streaming"]:
        batches = make_stream(data, tokenizer, masking, seed, training)
        if checkpoint is not None:
            saved = json.loads(pretrain_trainer.stream_file(checkpoint, training.process_index).read_text())
            batches.load_state(saved["state"], saved["consumed"])
        training.ignore_data_skip = True
    else:
        tokens = prepared_tokens(data, data.dataset, prepared_dir / "train", tokenizer, training)
        count = training.max_steps * training.gradient_accumulation_steps * training.world_size
        batches = make_batches(data, tokens, tokenizer, masking, count, seed)
    if data.heldout is not None:
        heldout_tokens = prepared_tokens(data, data.heldout, prepared_dir / "heldout", tokenizer, training)
        heldout = make_batches(data, heldout_tokens, tokenizer, masking, None, seed + 1)
    if training.process_index == 0:
        output_dir.mkdir(parents=True, exist_ok=True)
        pretrain_trainer.remove_broken_checkpoints(output_dir)
        write_json(output_dir / "recipe.json", {**values, "world_size": training.world_size})
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # TF32
    trainer = pretrain_trainer.PretrainingTrainer(
        model=model, args=training, train_dataset=batches, eval_dataset=heldout, processing_class=tokenizer, data_collator=_only_item
    )
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    return _finish(trainer, tokens, tokenizer)


def _only_item(items):
    """An item is a whole micro-batch already."""
    return items[0]


def _finish(trainer, tokens, tokenizer):
    """Saves the final model and what it reached."""
    training = trainer.args
    metrics, heldout = {}, trainer.eval_dataset
    if heldout is not None:
        metrics = trainer.evaluate()
        # A streamed run has no training tokens at hand to count: the held-out ones give the baseline its best case.
        frequent = unigram(heldout.windows.tokens if tokens is None else tokens, tokenizer)
        metrics["eval_unigram_accuracy"] = unigram_accuracy(heldout, frequent)
    trainer.save_model(training.output_dir)
    if trainer.is_world_process_zero():
        trainer.write_log()
        model = trainer.accelerator.unwrap_model(trainer.model)
        if training.raw_checkpoint and not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            dtype = getattr(torch, training.raw_checkpoint)
            pretrain_trainer.save_raw_checkpoint(model, Path(training.output_dir) / "raw", trainer.state.global_step, dtype)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        result = environment(
            processes=training.world_size,
            distributed=trainer.accelerator.distributed_type.value,
            steps=trainer.state.global_step,
            tokens_seen=trainer.state.num_input_tokens_seen,
            parameters=parameters,
            dtype=_dtype(training),
        )
        write_json(Path(training.output_dir) / "result.json", {**result, **metrics})
    return metrics


def _dtype(training):
    return "bfloat16 autocast" if training.bf16 else "float16 autocast" if training.fp16 else "float32"


def main(argv=None):
    """Entry point of `neobert pretrain`; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--prepare" in argv and (argv.index("--prepare") + 1 == len(argv) or argv[argv.index("--prepare") + 1].startswith("--")):
        argv.insert(argv.index("--prepare") + 1, "true")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parts = read_recipe((ModelArguments, DataArguments, PretrainingArguments), argv, prog="neobert pretrain")
    metrics = run(*parts)
    if metrics and parts[2].process_index == 0:
        print(json.dumps(metrics))
    return 0
