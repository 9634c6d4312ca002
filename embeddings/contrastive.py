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
from dataclasses import asdict, dataclass
from pathlib import Path

from ..common.errors import require


require("eval", "sentence_transformers>=6", "datasets", "accelerate")

import torch
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
from transformers import set_seed

from ..common import checkpoints
from ..common.arguments import Arguments, number_options, option, read_arguments, training_arguments
from ..common.cards import BASE_MODEL_HELP, LICENSE_HELP
from ..common.errors import UserError, listed, one_line
from ..common.files import redacted, write_json
from ..common.identity import files_digest, model_digest
from ..common.lora import lora_config, trainable_parameters
from ..common.outputs import check_apart, check_folder, check_replaceable, remove_set_aside, set_aside, write_manifest
from ..common.pooling import save_for_all_versions
from ..common.results import environment, shown
from .contrastive_card import write_card
from .contrastive_data import PairSource, SizeAlphaBatchSampler, TextsBatchSampler, inspected, load_source, probabilities, rows_per_batch
from .instructions import TEMPLATE, check_template, prompt, read_instructions
from .packed_encoder import POOLINGS, is_sentence_transformer, load_sentence_transformer
from .retrieval import described, measure, read_questions


MANIFEST = "contrastive.json"
# What a run writes before its manifest has the digests of the finished encoder.
WORKING_FILES = ("checkpoints/checkpoint-[0-9]*/**", "checkpoints/damaged-checkpoint-[0-9]*/**", ".saving-*/**", ".lock")
LENGTH = 1024  # tokens of a text, for a bare encoder: that of the authors' code
ADAPTER = ".saving-adapter"  # until it moves in with the encoder
# Trainer's options with other defaults than Trainer's: those of the authors' code. The warm-up is 5 % of the steps.
TRAINER = {
    "max_steps": 2000,
    "per_device_train_batch_size": 64,
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "logging_steps": 20,
    "save_steps": 500,
    "save_total_limit": 2,
    "report_to": "none",
    "logging_nan_inf_filter": False,
    "seed": 42,
}
# Trainer's options that a run could not be continued with, or that would be ignored.
FIXED = {
    "ignore_data_skip": False,
    "save_only_model": False,
    "auto_find_batch_size": False,
    "data_seed": None,
    "resume_from_checkpoint": None,
}
# Options of ours that a continued run may change.
_FREE = ("output", "overwrite", "heldout", "license", "base_model")


@dataclass
class ContrastiveArguments(Arguments):
    """What to train on what."""

    model: str = option(help="encoder to start from: a folder or a Hub name")
    output: str = option(help="folder of the sentence encoder")
    datasets: list[dict] = option(default_factory=list, help="data sets (see contrastive_data.PairSource); in a YAML recipe")
    pairs: list[str] = option(default_factory=list, help="files of rows with columns anchor, positive, negative, negative_1, ...")
    heldout: str | None = option(None, "file of pairs to measure retrieval on, before and after the training; never trained on")
    instruction: str = option("", "instruction before the anchors of --pairs")
    instructions: str | None = option(None, "YAML or JSON file {data set: instruction}, in place of those of the recipe")
    instruction_template: str = option(TEMPLATE, "how an instruction is put before a query")
    temperature: float = option(0.07, "the cosine similarity is divided by this", above=0)
    alpha: float = option(0.5, "a batch's data set is drawn with probability proportional to size^alpha", least=0, most=10)
    texts_per_batch: int | None = option(None, "texts in a batch over all columns, in place of the batch size", least=1)
    mini_batch_size: int | None = option(None, "gradient caching: texts at a time, for batches that do not fit", least=1)
    gather_negatives: bool = option(False, "the texts of all processes are negatives of each other")
    max_length: int | None = option(
        None, f"tokens per text; by default a sentence encoder's own limit, and {LENGTH:,} for a bare encoder", least=3, most=2**31 - 1
    )
    pooling: str = option("mean", "for a bare encoder", choices=POOLINGS)
    tokenizer: str | None = option(None, "tokenizer, where the model's folder has none")
    attn_implementation: str | None = option(None, "attention implementation of transformers")
    trust_remote_code: bool = option(False, "run the model repository's own code")
    lora: bool = option(False, "train low-rank adapters; the output has them merged, and alone in adapter/")
    lora_rank: int = option(16, least=1)
    lora_alpha: float = option(32.0, above=0)
    lora_dropout: float = option(0.0, least=0, below=1)
    lora_targets: str = option("auto", "auto, all-linear, or module names separated by commas")
    license: str | None = option(None, LICENSE_HELP)
    base_model: str | None = option(None, BASE_MODEL_HELP)
    overwrite: bool = option(False, "train anew where the output is an encoder of this command; any other file is left alone")

    def __post_init__(self):
        super().__post_init__()
        check_template(self.instruction_template)

    def sources(self):
        """The `PairSource`s, each with its instruction. Local files are read completely, and so checked."""
        sources = [PairSource.from_dict(entry) for entry in self.datasets]
        sources += [PairSource.from_file(path, self.instruction) for path in self.pairs]
        if not sources:
            raise UserError("no training data: give datasets in a recipe (neobert contrastive recipes/contrastive.yaml) or --pairs FILE")
        names = [source.name for source in sources]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two data sets are called {name!r}; names must differ")
        return [inspected(source) for source in self._instructed(sources, names)]

    def _instructed(self, sources, names):
        """`sources` with the instructions of the file."""
        if self.instructions is None:
            return sources
        texts = read_instructions(self.instructions, names)
        if lacking := [name for name in names if name not in texts]:
            raise UserError(f"{self.instructions} has no instruction for {listed(lacking)}; give every data set one, '' for none")
        return [source.replaced(instruction=texts[source.name]) for source in sources]

    def processes_together(self, training):
        """Number of processes whose batches share their negatives."""
        return training.world_size if self.gather_negatives else 1

    def loading(self):
        """The arguments of `load_sentence_transformer`."""
        names = ("pooling", "tokenizer", "attn_implementation", "trust_remote_code")
        length = self.max_length or (None if is_sentence_transformer(self.model) else LENGTH)
        return {"model": self.model, "max_length": length, **{name: getattr(self, name) for name in names}}


class ContrastiveTrainer(SentenceTransformerTrainer):
    """The library's trainer; it stops where the logged loss or, at the end, a weight is not a finite number."""

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            self.check_finite(torch.tensor(logs["loss"]))
        super().log(logs, *args, **kwargs)

    def check_finite(self, *tensors):
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise UserError(
                f"training diverged after step {self.state.global_step} with learning_rate {self.args.learning_rate:g}, and no encoder was "
                "saved; give a lower learning_rate, and --overwrite or another output"
            )


def check(arguments, training):
    """Everything that can be found wrong before work begins.

    Args:
        arguments: `ContrastiveArguments`.
        training: SentenceTransformerTrainingArguments.
    Returns:
        the `PairSource`s.
    """
    if training.eval_strategy != "no":
        raise UserError(f"eval_strategy is {training.eval_strategy.value!r}, but there are no rows to evaluate on; use neobert mteb")
    check_folder(arguments.output, "output")
    if training.per_device_train_batch_size < 2:
        given = training.per_device_train_batch_size
        raise UserError(f"per_device_train_batch_size must be at least 2 (the others of a batch are the negatives), but {given} was given")
    sources = arguments.sources()
    if arguments.heldout:
        inspected(PairSource.from_file(arguments.heldout))
    local = [arguments.model, arguments.heldout, *(source.path for source in sources if source.is_local)]
    check_apart(arguments.output, *(path for path in local if path and Path(path).exists()))
    return sources


def held_out(arguments, data):
    """What `measure` takes, of --heldout without the questions that are trained on; None without that option."""
    if arguments.heldout is None:
        return None
    relevant, texts = read_questions(arguments.heldout)
    trained = {text for part in data.values() for text in part["anchor"] if text in relevant}
    if trained:
        print(f"{arguments.heldout}: {len(trained):,} of {len(relevant):,} questions are trained on, and not measured", file=sys.stderr)
    relevant = {question: found for question, found in relevant.items() if question not in trained}
    if not relevant:
        raise UserError(f"all questions of {arguments.heldout} are in the training data; give rows that are held out")
    return relevant, texts


def build_datasets(arguments, training, sources):
    """DatasetDict name -> anchor, positive, negative_1, ..., and the trainer's prompts {name: {"anchor": prompt}}."""
    from datasets import DatasetDict

    data, prompts = DatasetDict(), {}
    for source in sources:
        data[source.name] = load_source(source, seed=training.seed)
        group = arguments.processes_together(training)
        least = max(2, group)
        if rows_per_batch(data[source.name], least, None) < least:
            raise UserError(
                f"{source.name} ({source.path}): in-batch negatives need at least {least} rows without a common text, but its "
                f"{len(data[source.name])} usable rows share theirs"
            )
        if text := prompt(arguments.instruction_template, source.instruction):
            prompts[source.name] = {"anchor": text}
    return data, prompts


def build_loss(model, arguments):
    """InfoNCE on cosine similarity / temperature; with gradient caching where `mini_batch_size` is given."""
    settings = {"scale": 1 / arguments.temperature, "gather_across_devices": arguments.gather_negatives}
    if arguments.mini_batch_size:
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=arguments.mini_batch_size, **settings)
    return MultipleNegativesRankingLoss(model, **settings)


def build_trainer(model, data, prompts, arguments, training):
    """The library's trainer with our samplers."""
    model.model_card_data.generate_widget_examples = False  # rows of the training data, for a card that is not written
    # A nested dictionary must not be empty, or the trainer would not know the data sets apart.
    training.prompts = prompts or None
    training.batch_sampler = functools.partial(
        TextsBatchSampler, texts_per_batch=arguments.texts_per_batch, group=arguments.processes_together(training)
    )
    training.multi_dataset_batch_sampler = functools.partial(
        SizeAlphaBatchSampler, alpha=arguments.alpha, group=training.world_size, names=list(data)
    )
    try:
        return ContrastiveTrainer(model=model, args=training, train_dataset=data, loss=build_loss(model, arguments))
    except ValueError as error:  # options that do not go together
        raise UserError(one_line(error)) from error


def model_prompts(prompts, arguments):
    """The prompts of the encoder: those of the data sets by their names, "query" and "document"."""
    named = {name: texts["anchor"] for name, texts in prompts.items()}
    different = list(dict.fromkeys(named.values()))
    usual = prompt(arguments.instruction_template, "Retrieve text that answers the query.") if named else ""
    return {"query": different[0] if len(different) == 1 else usual, "document": "", **named}


def save_encoder(model, folder, sources, arguments, extra):
    """Writes the SentenceTransformer folder beside what `folder` holds: first the manifest that owns the files, last modules.json.

    Args:
        sources: the `PairSource`s.
        extra: content of contrastive.json.
    """
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=".saving-"))
    try:
        save_for_all_versions(model, temporary)
        write_card(temporary, arguments, sources, model.max_seq_length, extra["training"])
        if (folder / ADAPTER).is_dir():
            os.replace(folder / ADAPTER, temporary / "adapter")
        write_manifest(temporary, "contrastive", extra)
        entries = sorted(temporary.iterdir(), key=lambda path: (path.name == "modules.json") - (path.name == MANIFEST))
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
    plain = load_sentence_transformer(**arguments.loading())
    adapted = PeftModel.from_pretrained(plain[0].auto_model, adapter_folder)
    merged = adapted.merge_and_unload()
    assert merged is plain[0].auto_model, "merging changed the model object"
    return plain


def _recipe(arguments, training, sources):
    """The settings that a run is known by, with digests of the model that it starts from and of its local files."""
    recipe = number_options(training.to_dict())
    recipe |= {name: value for name, value in asdict(arguments).items() if name not in _FREE}
    recipe |= {"processes": training.world_size, "model_digest": model_digest(arguments.model)}
    recipe["instructions"] = {source.name: source.instruction for source in sources}
    recipe["files"] = {source.name: files_digest([source.path]) for source in sources if source.is_local}
    return redacted(_without_folders(json.loads(json.dumps(recipe, default=str))))


def _without_folders(value):
    """`value` with every path in it as results show it: the file may be published."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return shown(value) if isinstance(value, str) else value


def _state(folder, recipe, overwrite):
    """What `folder` holds: "nothing", "begun" or "finished" by this very recipe, or "replaceable", with `overwrite`. Changes nothing.

    Raises:
        UserError: it holds something else.
    """
    if not folder.is_dir() or all(path.name == ".lock" for path in folder.iterdir()):
        return "nothing"
    try:
        old = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["recipe"]
        changed = [name for name in recipe if old.get(name) != recipe[name]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        changed = None
    finished = (folder / "modules.json").is_file()
    if overwrite and (finished or changed != []):
        check_replaceable(folder, "contrastive", WORKING_FILES)
        return "replaceable"
    if changed is None:
        raise UserError(f"{folder} holds other files; choose another output")
    if changed:
        raise UserError(
            f"{folder} holds a run with other settings ({', '.join(changed)} differ); choose another output, or give --overwrite"
        )
    return "finished" if finished else "begun"


def train(arguments, training):
    """Trains and writes the sentence encoder to `arguments.output`; a run that was interrupted goes on from its last complete checkpoint.

    Args:
        arguments: `ContrastiveArguments`.
        training: SentenceTransformerTrainingArguments whose output_dir is the folder of the checkpoints.
    Returns:
        dict: data set sizes and probabilities, losses of the log, steps, seconds. None if the folder was finished already.
    Raises:
        UserError: bad input, before any work. Stopped: SIGTERM came; the step is saved.
    """
    folder = Path(arguments.output)
    sources = check(arguments, training)
    recipe = _recipe(arguments, training, sources)
    state = _state(folder, recipe, arguments.overwrite)
    if state == "finished":
        checkpoints.remove(folder / "checkpoints")
        return None
    set_seed(training.seed)
    model = load_sentence_transformer(**arguments.loading())
    if arguments.lora:
        config = lora_config(model[0].auto_model, arguments.lora_rank, arguments.lora_alpha, arguments.lora_dropout, arguments.lora_targets)
        model.add_adapter(config)
    with training.main_process_first(desc="data sets"):
        data, prompts = build_datasets(arguments, training, sources)
        heldout = held_out(arguments, data)
        before = measure(model.to(training.device), *heldout) if heldout and training.process_index == 0 else None
    if state == "replaceable" and training.process_index == 0:
        set_aside(folder, "contrastive", WORKING_FILES)
    with checkpoints.lock_run(folder):
        if training.process_index == 0:
            for path in folder.glob(".saving-*"):  # of a killed run
                shutil.rmtree(path, ignore_errors=True)
            write_json(folder / MANIFEST, {"command": "contrastive", "recipe": recipe, "files": {}})
        trainer = build_trainer(model, data, prompts, arguments, training)
        summary = _train(trainer, data, arguments)
        if trainer.is_world_process_zero():
            trained = trainer.accelerator.unwrap_model(trainer.model)
            if arguments.lora:
                trained = merge_lora(trained, folder / ADAPTER, arguments)
            trained.prompts = model_prompts(prompts, arguments)
            if heldout:
                summary["heldout"] = {"questions": len(heldout[0]), "texts": len(heldout[1]), "before": before}
                summary["heldout"]["after"] = measure(trained.to(training.device), *heldout)
            dtype = "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32"
            extra = {"recipe": recipe, "training": summary, "environment": environment(dtype=dtype, processes=training.world_size)}
            save_encoder(trained, folder, sources, arguments, extra)
            checkpoints.remove(training.output_dir)
            remove_set_aside(folder, "contrastive", WORKING_FILES)
    return summary


def _train(trainer, data, arguments):
    """Runs the trainer; returns what is told about it."""
    sizes = {name: len(part) for name, part in data.items()}
    sizes_asked = (trainer.args.train_batch_size, arguments.texts_per_batch, arguments.processes_together(trainer.args))
    rows = {name: rows_per_batch(part, *sizes_asked) for name, part in data.items()}
    drawn = dict(zip(sizes, probabilities(sizes.values(), arguments.alpha)))
    if trainer.is_world_process_zero():
        for name, size in sizes.items():
            print(f"{name}: {size:,} rows, {rows[name]} a batch, drawn with probability {drawn[name]:.3f}")
    outcome = checkpoints.train(trainer)
    trainer.check_finite(*trainer.model.parameters())
    trainable, total = trainable_parameters(trainer.model)
    return {
        "rows": sizes,
        "rows_per_batch": rows,
        "probabilities": drawn,
        "steps": trainer.state.global_step,
        "seconds": outcome.metrics.get("train_runtime"),
        "trainable_parameters": trainable,
        "parameters": total,
        "losses": [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry],
    }


def parse(argv):
    """(ContrastiveArguments, SentenceTransformerTrainingArguments) of a command line."""
    arguments, given = read_arguments([ContrastiveArguments], argv, "neobert contrastive", __doc__, trainer=TRAINER)
    if "num_train_epochs" in given and given["max_steps"] > 0:
        raise UserError(f"max_steps {given['max_steps']} decides, so that num_train_epochs would be ignored; give --max-steps -1 with it")
    if given.get("bf16") and not torch.cuda.is_available() and not given.get("use_cpu"):
        given["bf16"] = False
        print("neobert contrastive: no GPU here, training in float32 instead of bfloat16", file=sys.stderr)
    base = SentenceTransformerTrainingArguments
    return arguments, training_arguments(Path(arguments.output) / "checkpoints", given, FIXED, base)


def main(argv=None):
    """`neobert contrastive [RECIPE.yaml] [--option value ...]`; returns the exit code."""
    arguments, training = parse(argv or [])
    summary = train(arguments, training)
    if training.process_index == 0:
        if summary is None:
            print(f"{arguments.output}: finished already with this recipe; --overwrite trains again")
        else:
            seconds = f" in {summary['seconds']:.0f} s" if summary["seconds"] else ""
            print(f"{arguments.output}: sentence encoder after {summary['steps']:,} steps{seconds}")
            if found := summary.get("heldout"):
                print(f"retrieval of {found['questions']:,} held-out questions among {found['texts']:,} texts")
                for when in ("before", "after"):
                    print(f"  {when:<6}  {described(found[when])}")
    return 0
