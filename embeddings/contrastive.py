"""`neobert contrastive`: contrastive fine-tuning of an encoder to a sentence encoder (paper, section 4.3) with sentence-transformers.

InfoNCE on cosine similarity / 0.07 with in-batch and hard negatives; every batch from one data set, drawn by size^alpha; an instruction
before the query; mean pooling. The output folder loads with `SentenceTransformer(folder, trust_remote_code=True)`.
"""

# ruff: noqa: E402  (a missing extra is named before the imports that need it)

import functools
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..common.errors import require


require("eval", "sentence_transformers", "datasets", "accelerate")

import torch
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
from transformers import set_seed

from ..common.checkpoints import last_whole_checkpoint
from ..common.errors import UserError
from ..common.files import check_apart, check_folder, check_replaceable, remove_set_aside, set_aside, write_json, write_manifest
from ..common.identity import files_digest, weights_digest
from ..common.lora import lora_config, trainable_parameters
from ..common.recipe import read_recipe, refuse_options
from ..common.results import environment
from ..common.trackers import check_trackers
from .contrastive_data import (
    FORMATS,
    DataSource,
    SizeAlphaBatchSampler,
    TextsBatchSampler,
    check_source,
    load_source,
    probabilities,
    rows_per_batch,
)
from .packed_encoder import load_sentence_transformer


INSTRUCTION_TEMPLATE = "Instruction: {instruction} Query: "
RECIPE_FILE = "contrastive.json"
# What a run writes before its manifest has the digests of the finished encoder.
WORKING_FILES = ("checkpoints/**", ".saving-*/**", "adapter/**")
# Arguments of the library's trainer that this command decides otherwise: setting one would change nothing, or break continuing.
_NOT_OURS = {
    "num_train_epochs": "give max_steps, or --max_steps -1 with it",
    "warmup_ratio": "give warmup_steps, below 1 a share of all steps",
    "data_seed": "give seed",
    "batch_sampler": "no text occurs twice in a batch",
    "multi_dataset_batch_sampler": "give alpha",
    "train_sampling_strategy": "give alpha",
    "group_by_length": "give alpha",
    "prompts": "give instruction",
    "router_mapping": "the encoder has one way for all texts",
    "label_smoothing_factor": "the loss is InfoNCE; give temperature",
    "auto_find_batch_size": "give mini_batch_size, for batches that do not fit",
    "save_only_model": "a checkpoint must hold all that continuing needs",
    "resume_from_checkpoint": "the same command continues by itself",
    "ignore_data_skip": "a continued run goes on where its data stood",
    **dict.fromkeys(
        ("do_eval", "eval_strategy", "eval_steps", "eval_on_start", "per_device_eval_batch_size", "load_best_model_at_end"),
        "evaluate the finished folder with neobert mteb",
    ),
}
# What arguments may start with that a continued run may change: they touch neither the numbers nor the order of the data.
_FREE = (
    "output_dir", "overwrite", "logging_", "log_", "include_", "save_", "enable_jit_checkpoint", "disable_tqdm", "report_to", "run_name",
    "project", "trackio_", "push_to_hub", "hub_", "dataloader_", "ddp_", "local_rank", "use_cpu", "no_cuda", "gradient_checkpointing",
    "activation_checkpointing", "torch_empty_cache", "skip_memory_metrics", "do_",
)  # fmt: skip


@dataclass
class ContrastiveArguments:
    """What to train on what."""

    model: str = field(metadata={"help": "encoder to start from: a folder or a Hub name"})
    datasets: list[dict] = field(default_factory=list, metadata={"help": "data sets (see contrastive_data.DataSource); in a YAML recipe"})
    pairs: list[str] = field(default_factory=list, metadata={"help": ".jsonl or .parquet files with columns anchor, positive, negative..."})
    instruction: str = field(default="", metadata={"help": "instruction before the anchors of --pairs"})
    instruction_template: str = field(default=INSTRUCTION_TEMPLATE, metadata={"help": "how an instruction is put before a query"})
    temperature: float = field(default=0.07, metadata={"help": "the cosine similarity is divided by this"})
    alpha: float = field(default=0.5, metadata={"help": "a batch's data set is drawn with probability proportional to size^alpha"})
    texts_per_batch: int | None = field(default=None, metadata={"help": "texts in a batch over all columns, in place of the batch size"})
    mini_batch_size: int | None = field(default=None, metadata={"help": "gradient caching: texts at a time, for batches that do not fit"})
    gather_negatives: bool = field(default=False, metadata={"help": "the texts of all processes are negatives of each other"})
    max_length: int = field(default=1024, metadata={"help": "tokens per text"})
    pooling: str = field(default="mean", metadata={"help": "mean or cls, for a bare encoder"})
    tokenizer: str | None = field(default=None, metadata={"help": "tokenizer, where the model's folder has none"})
    attn_implementation: str | None = field(default=None, metadata={"help": "attention implementation of transformers"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run the model repository's own code"})
    lora: bool = field(default=False, metadata={"help": "train low-rank adapters; the output has them merged, and alone in adapter/"})
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_targets: str = field(default="auto", metadata={"help": "auto, all-linear, or module names separated by commas"})
    overwrite: bool = field(
        default=False, metadata={"help": "train anew where output_dir holds an encoder of this command; any other file is left alone"}
    )

    def __post_init__(self):
        if not self.datasets and not self.pairs:
            raise UserError("no training data: give datasets in a recipe (neobert contrastive recipes/contrastive.yaml) or --pairs FILE")
        if not self.temperature > 0:
            raise UserError(f"temperature must be above 0, but {self.temperature} was given")
        if not 0 <= self.alpha:
            raise UserError(f"alpha must be at least 0, but {self.alpha} was given")
        if "{instruction}" not in self.instruction_template:
            raise UserError(f"instruction_template must contain {{instruction}}, but {self.instruction_template!r} was given")
        for name in ("texts_per_batch", "mini_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, but {value} was given")

    def sources(self):
        """The `DataSource`s; names are unique."""
        sources = [DataSource.from_dict(entry) for entry in self.datasets]
        for path in self.pairs:
            if Path(path).suffix not in FORMATS:
                raise UserError(f"pairs must be files that end in {' or '.join(FORMATS)}, but {path} was given")
            sources.append(DataSource.from_file(path, self.instruction))
        names = [source.name for source in sources]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two data sets are called {name!r}; names must differ")
        return sources

    def prompt(self, instruction):
        """The text before a query, "" without an instruction."""
        return self.instruction_template.format(instruction=instruction.strip()) if instruction.strip() else ""


@dataclass
class ContrastiveTrainingArguments(SentenceTransformerTrainingArguments):
    """Trainer arguments with the values of the authors' code as defaults; the warm-up is 5 % of the steps."""

    output_dir: str = field(default=None, metadata={"help": "folder of the sentence encoder"})
    max_steps: int = 2000
    per_device_train_batch_size: int = 64
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.05
    logging_steps: float = 20
    save_steps: float = 500
    save_total_limit: int | None = 2
    report_to: str = "none"
    logging_nan_inf_filter: bool = False

    def __post_init__(self):
        refuse_options(self, {name: reason for name, reason in _NOT_OURS.items() if name != "num_train_epochs" or self.max_steps >= 0})
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be between 0 and {2**32 - 1}, but {self.seed} was given")
        super().__post_init__()


class ContrastiveTrainer(SentenceTransformerTrainer):
    """The library's trainer; it stops where the logged loss or, at the end, a weight is no finite number."""

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            self.check_finite(torch.tensor(logs["loss"]))
        super().log(logs, *args, **kwargs)

    def check_finite(self, *tensors):
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise UserError(
                f"training diverged after step {self.state.global_step} with learning_rate {self.args.learning_rate:g}, and no encoder was "
                "saved; give a lower learning_rate, and --overwrite or another output_dir"
            )


def check(arguments, training):
    """Everything that can be found wrong before work begins.

    Returns:
        the `DataSource`s.
    """
    if not training.output_dir:
        raise UserError("give --output_dir, the folder for the sentence encoder")
    if training.max_steps == 0 or (training.max_steps < 0 and training.num_train_epochs <= 0):
        raise UserError(f"max_steps must be at least 1, but {training.max_steps} was given")
    if training.fp16 and training.device.type == "cpu":
        raise UserError("fp16 needs a GPU; leave it out, or give bf16")
    check_folder(training.output_dir, "output_dir")
    if training.per_device_train_batch_size < 2:
        given = training.per_device_train_batch_size
        raise UserError(f"per_device_train_batch_size must be at least 2 (the others of a batch are the negatives), but {given} was given")
    check_trackers(training.report_to)
    sources = arguments.sources()
    local = [arguments.model, *(source.path for source in sources if source.is_local)]
    check_apart(training.output_dir, *(path for path in local if Path(path).exists()))
    for source in sources:
        check_source(source)
    return sources


def build_datasets(arguments, training, sources):
    """DatasetDict name -> anchor, positive, negative_1, ..., and the trainer's prompts {name: {"anchor": prompt}}."""
    from datasets import DatasetDict

    data, prompts = DatasetDict(), {}
    for source in sources:
        data[source.name] = load_source(source, seed=training.seed)
        if rows_per_batch(data[source.name], 2, None) < 2:
            raise UserError(
                f"{source.name} ({source.path}): in-batch negatives need at least 2 rows without a common text, but its "
                f"{len(data[source.name])} usable rows share theirs"
            )
        if prompt := arguments.prompt(source.instruction):
            prompts[source.name] = {"anchor": prompt}
    return data, prompts


def build_loss(model, arguments):
    """InfoNCE on cosine similarity / temperature; with gradient caching where `mini_batch_size` is given."""
    settings = {"scale": 1 / arguments.temperature, "gather_across_devices": arguments.gather_negatives}
    if arguments.mini_batch_size:
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=arguments.mini_batch_size, **settings)
    return MultipleNegativesRankingLoss(model, **settings)


def build_trainer(model, data, prompts, arguments, training):
    """The library's trainer with our samplers."""
    # A nested dictionary must not be empty, or the trainer would not know the data sets apart.
    training.prompts = prompts or None
    training.batch_sampler = functools.partial(TextsBatchSampler, texts_per_batch=arguments.texts_per_batch)
    training.multi_dataset_batch_sampler = functools.partial(
        SizeAlphaBatchSampler, alpha=arguments.alpha, group=training.world_size, names=list(data)
    )
    return ContrastiveTrainer(model=model, args=training, train_dataset=data, loss=build_loss(model, arguments))


def save_encoder(model, folder, prompts, arguments, extra):
    """Writes the SentenceTransformer folder beside what `folder` holds: first the manifest that owns the files, last modules.json.

    Args:
        prompts: {data set: prompt}; with "query" and "document" they become the model's prompts.
        extra: content of contrastive.json.
    """
    named = {name: prompt["anchor"] for name, prompt in prompts.items()}
    instructions = list(dict.fromkeys(named.values()))
    query = instructions[0] if len(instructions) == 1 else arguments.prompt("Retrieve text that answers the query.") if named else ""
    model.prompts = {"query": query, "document": "", **named}
    folder = Path(folder)
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=".saving-"))
    try:
        model.save_pretrained(str(temporary))
        write_manifest(temporary, "contrastive", extra)
        entries = sorted(temporary.iterdir(), key=lambda path: (path.name == "modules.json") - (path.name == RECIPE_FILE))
        for path in entries:
            target = folder / path.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def merge_lora(model, adapter_folder, arguments):
    """Saves the adapter alone and returns the model with it merged into plain weights."""
    from peft import PeftModel

    model[0].auto_model.save_pretrained(adapter_folder)
    plain = load_sentence_transformer(arguments.model, **_loading(arguments))
    adapted = PeftModel.from_pretrained(plain[0].auto_model, adapter_folder)
    merged = adapted.merge_and_unload()
    assert merged is plain[0].auto_model, "merging changed the model object"
    return plain


def _loading(arguments):
    names = ("max_length", "pooling", "tokenizer", "attn_implementation", "trust_remote_code")
    return {name: getattr(arguments, name) for name in names}


def _recipe(arguments, training):
    """The settings that a run is known by, with digests of the weights that it starts from and of its local files."""
    given = {**training.to_dict(), **asdict(arguments)}
    recipe = {name: value for name, value in given.items() if not name.startswith(_FREE)}
    recipe["processes"] = training.world_size
    recipe["weights"] = weights_digest(arguments.model)
    files = [source.path for source in arguments.sources() if source.is_local and Path(source.path).is_file()]
    recipe["files"] = {path: files_digest([path]) for path in files}
    return json.loads(json.dumps(recipe, default=str))


def _is_finished(folder, recipe, overwrite):
    """True if the folder holds the finished result of this very recipe; UserError if it holds another. Left-overs of a killed run go."""
    if overwrite:
        if folder.is_dir() and any(folder.iterdir()):
            check_replaceable(folder, "contrastive", WORKING_FILES)
        return False
    for path in folder.glob(".saving-*"):
        shutil.rmtree(path, ignore_errors=True)
    path = folder / RECIPE_FILE
    if path.is_file():
        old = json.loads(path.read_text())["recipe"]
        changed = [name for name in recipe if name in old and old[name] != recipe[name]]
        if changed:
            raise UserError(
                f"{folder} holds a run with other settings ({', '.join(changed)} differ); choose another output_dir, or give --overwrite"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} holds other files; choose another output_dir")
    finished = (folder / "modules.json").is_file()
    if finished:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return finished


def train(arguments, training):
    """Trains and writes the sentence encoder to `training.output_dir`; a run that was interrupted continues at its last checkpoint.

    Returns:
        dict: data set sizes and probabilities, losses of the log, steps, seconds. None if the folder was finished already.
    Raises:
        UserError: bad input, before any work.
    """
    folder = Path(training.output_dir)
    sources = check(arguments, training)
    recipe = _recipe(arguments, training)
    if _is_finished(folder, recipe, arguments.overwrite):
        return None
    set_seed(training.seed)
    model = load_sentence_transformer(arguments.model, **_loading(arguments))
    if arguments.lora:
        config = lora_config(model[0].auto_model, arguments.lora_rank, arguments.lora_alpha, arguments.lora_dropout, arguments.lora_targets)
        model.add_adapter(config)
    with training.main_process_first(desc="data sets"):
        data, prompts = build_datasets(arguments, training, sources)
    if training.process_index == 0:
        if arguments.overwrite and folder.is_dir() and any(folder.iterdir()):
            set_aside(folder, "contrastive", WORKING_FILES)
        write_json(folder / RECIPE_FILE, {"command": "contrastive", "recipe": recipe})
    training.output_dir = str(folder / "checkpoints")
    trainer = build_trainer(model, data, prompts, arguments, training)
    sizes = {name: len(part) for name, part in data.items()}
    rows = {name: rows_per_batch(part, training.train_batch_size, arguments.texts_per_batch) for name, part in data.items()}
    drawn = dict(zip(sizes, probabilities(sizes.values(), arguments.alpha)))
    if trainer.is_world_process_zero():
        for name, size in sizes.items():
            print(f"{name}: {size:,} rows, {rows[name]} a batch, drawn with probability {drawn[name]:.3f}")
    checkpoint = last_whole_checkpoint(training.output_dir)
    outcome = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    trainer.check_finite(*trainer.model.parameters())
    trainable, total = trainable_parameters(trainer.model)
    summary = {
        "rows": sizes,
        "rows_per_batch": rows,
        "probabilities": drawn,
        "steps": trainer.state.global_step,
        "seconds": outcome.metrics.get("train_runtime"),
        "trainable_parameters": trainable,
        "parameters": total,
        "losses": [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry],
    }
    if trainer.is_world_process_zero():
        trained = trainer.accelerator.unwrap_model(trainer.model)
        if arguments.lora:
            trained = merge_lora(trained, folder / "adapter", arguments)
        dtype = "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32"
        extra = {"recipe": recipe, "training": summary, "environment": environment(dtype=dtype, processes=training.world_size)}
        save_encoder(trained, folder, prompts, arguments, extra)
        shutil.rmtree(folder / "checkpoints")
        remove_set_aside(folder, "contrastive", WORKING_FILES)
    return summary


def main(argv=None):
    """`neobert contrastive [RECIPE.yaml] [--key value ...]`; returns the exit code."""
    arguments, training = read_recipe((ContrastiveArguments, ContrastiveTrainingArguments), argv or [], prog="neobert contrastive")
    if training.bf16 and not torch.cuda.is_available() and not training.use_cpu:
        training.bf16 = False
        print("neobert contrastive: no GPU here, training in float32 instead of bfloat16", file=sys.stderr)
    folder = training.output_dir
    summary = train(arguments, training)
    if training.process_index == 0:
        if summary is None:
            print(f"{folder}: finished already with this recipe; --overwrite trains again")
        else:
            print(f"{folder}: sentence encoder after {summary['steps']:,} steps in {summary['seconds']:.0f} s")
    return 0
