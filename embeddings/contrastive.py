"""`neobert contrastive`: contrastive fine-tuning of an encoder to a sentence encoder (paper,
section 4.3) with sentence-transformers.

InfoNCE on cosine similarity / 0.07 with in-batch and hard negatives; every batch from one data set,
drawn by size^alpha; an instruction before the query; mean pooling. The output folder loads with
`SentenceTransformer(folder, trust_remote_code=True)`.
"""

import functools
import json
import sys
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from transformers import set_seed

from ..common import checkpoints
from ..common.checkpoint_files import remove_checkpoints
from ..common.errors import UserError, one_line
from ..common.identity import files_digest, model_digest
from ..common.lora import lora_config, trainable_parameters
from ..common.outputs import check_apart, check_folder
from ..common.pooling import save_for_all_versions
from ..common.results import environment, shown
from ..common.runs import Run, run_settings
from ..common.trainer_options import number_options, training_arguments
from .contrastive_card import write_card
from .contrastive_data import (
    PairSource,
    SizeAlphaBatchSampler,
    TextsBatchSampler,
    inspected,
    load_source,
    probabilities,
    rows_per_batch,
)
from .instructions import prompt
from .options import OPTIONS
from .packed_encoder import load_sentence_transformer
from .retrieval import described, measure, read_questions


# Trainer's options that a run could not be continued with, or that would be ignored.
FIXED = {
    "ignore_data_skip": False,
    "save_only_model": False,
    "auto_find_batch_size": False,
    "data_seed": None,
    "resume_from_checkpoint": None,
}


class ContrastiveTrainer(SentenceTransformerTrainer):
    """The library's trainer; it stops where the logged loss or, at the end, a weight is not a
    finite number."""

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            self.check_finite(torch.tensor(logs["loss"]))
        super().log(logs, *args, **kwargs)

    def check_finite(self, *tensors):
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise UserError(
                f"training diverged after step {self.state.global_step} with learning_rate "
                f"{self.args.learning_rate:g}, and no encoder was "
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
        raise UserError(
            f"eval_strategy is {training.eval_strategy.value!r}, but there are no rows to evaluate "
            "on; use neobert mteb"
        )
    check_folder(arguments.output, "output")
    if training.per_device_train_batch_size < 2:
        given = training.per_device_train_batch_size
        raise UserError(
            "per_device_train_batch_size must be at least 2 (the others of a batch are the "
            f"negatives), but {given} was given"
        )
    sources = arguments.sources()
    if arguments.heldout:
        inspected(PairSource.from_file(arguments.heldout))
    local = [
        arguments.model,
        arguments.heldout,
        *(source.path for source in sources if source.is_local),
    ]
    check_apart(arguments.output, *(path for path in local if path and Path(path).exists()))
    return sources


def held_out(arguments, data):
    """What `measure` takes, of --heldout without the questions that are trained on; None without
    that option."""
    if arguments.heldout is None:
        return None
    relevant, texts = read_questions(arguments.heldout)
    trained = {text for part in data.values() for text in part["anchor"] if text in relevant}
    if trained:
        print(
            f"{arguments.heldout}: {len(trained):,} of {len(relevant):,} questions are trained "
            "on, and not measured",
            file=sys.stderr,
        )
    relevant = {question: found for question, found in relevant.items() if question not in trained}
    if not relevant:
        raise UserError(
            f"all questions of {arguments.heldout} are in the training data; give rows that are "
            "held out"
        )
    return relevant, texts


def build_datasets(arguments, training, sources):
    """DatasetDict name -> anchor, positive, negative_1, ..., and the trainer's prompts {name:
    {"anchor": prompt}}."""
    from datasets import DatasetDict

    data, prompts = DatasetDict(), {}
    for source in sources:
        data[source.name] = load_source(source, seed=training.seed)
        group = arguments.processes_together(training)
        least = max(2, group)
        if rows_per_batch(data[source.name], least, None) < least:
            raise UserError(
                f"{source.name} ({source.path}): in-batch negatives need at least {least} rows "
                "without a common text, but its "
                f"{len(data[source.name])} usable rows share theirs"
            )
        if text := prompt(arguments.instruction_template, source.instruction):
            prompts[source.name] = {"anchor": text}
    return data, prompts


def build_loss(model, arguments):
    """InfoNCE on cosine similarity / temperature; with gradient caching where `mini_batch_size` is
    given."""
    settings = {
        "scale": 1 / arguments.temperature,
        "gather_across_devices": arguments.gather_negatives,
    }
    if arguments.mini_batch_size:
        return CachedMultipleNegativesRankingLoss(
            model, mini_batch_size=arguments.mini_batch_size, **settings
        )
    return MultipleNegativesRankingLoss(model, **settings)


def build_trainer(model, data, prompts, arguments, training):
    """The library's trainer with our samplers."""
    model.model_card_data.generate_widget_examples = (
        False  # rows of the training data, for a card that is not written
    )
    # A nested dictionary must not be empty, or the trainer would not know the data sets apart.
    training.prompts = prompts or None
    training.batch_sampler = functools.partial(
        TextsBatchSampler,
        texts_per_batch=arguments.texts_per_batch,
        group=arguments.processes_together(training),
    )
    training.multi_dataset_batch_sampler = functools.partial(
        SizeAlphaBatchSampler, alpha=arguments.alpha, group=training.world_size, names=list(data)
    )
    try:
        return ContrastiveTrainer(
            model=model, args=training, train_dataset=data, loss=build_loss(model, arguments)
        )
    except ValueError as error:  # options that do not go together
        raise UserError(one_line(error)) from error


def model_prompts(prompts, arguments):
    """The prompts of the encoder: those of the data sets by their names, "query" and "document"."""
    named = {name: texts["anchor"] for name, texts in prompts.items()}
    different = list(dict.fromkeys(named.values()))
    usual = (
        prompt(arguments.instruction_template, "Retrieve text that answers the query.")
        if named
        else ""
    )
    return {"query": different[0] if len(different) == 1 else usual, "document": "", **named}


def save_encoder(model, run, scratch, sources, arguments, extra):
    """Writes the SentenceTransformer folder beside what the output holds; last modules.json, and
    the marker.

    Args:
        run: the `Run`.
        scratch: its scratch folder, which may hold an adapter.
        sources: the `PairSource`s.
        extra: more for contrastive.json.
    """
    save_for_all_versions(model, scratch)
    write_card(scratch, arguments, sources, model.max_seq_length, extra["training"])
    run.finish(run.move_in(scratch, "modules.json"), **extra)


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
    """The settings that a run is known by, with digests of the model that it starts from and of its
    local files."""
    recipe = number_options(training.to_dict()) | run_settings(arguments)
    recipe |= {"processes": training.world_size, "model_digest": model_digest(arguments.model)}
    recipe["instructions"] = {source.name: source.instruction for source in sources}
    recipe["files"] = {
        source.name: files_digest([source.path]) for source in sources if source.is_local
    }
    return _without_folders(json.loads(json.dumps(recipe, default=str)))


def _without_folders(value):
    """`value` with every path in it as results show it: the file may be published."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return shown(value) if isinstance(value, str) else value


def train(arguments, training):
    """Trains and writes the sentence encoder to `arguments.output`; a run that was interrupted goes
    on from its last complete checkpoint.

    Args:
        arguments: `ContrastiveArguments`.
        training: SentenceTransformerTrainingArguments whose output_dir is the folder of the
            checkpoints.
    Returns:
        dict: data set sizes and probabilities, losses of the log, steps, seconds. None if the
        folder was finished already.
    Raises:
        UserError: bad input, before any work. Stopped: SIGTERM came; the step is saved.
    """
    sources = check(arguments, training)
    run = Run(arguments.output, "contrastive", _recipe(arguments, training, sources), key="recipe")
    if run.inspect(arguments.overwrite) == "finished":
        remove_checkpoints(training.output_dir)
        return None
    set_seed(training.seed)
    model = load_sentence_transformer(**arguments.loading())
    if arguments.lora:
        model.add_adapter(lora_config(model[0].auto_model, **arguments.lora_settings()))
    with training.main_process_first(desc="data sets"):
        data, prompts = build_datasets(arguments, training, sources)
        heldout = held_out(arguments, data)
        before = (
            measure(model.to(training.device), *heldout)
            if heldout and training.process_index == 0
            else None
        )
    with checkpoints.claim(run, arguments.overwrite, training.output_dir):
        if run.state == "finished":
            return None
        trainer = build_trainer(model, data, prompts, arguments, training)
        summary = _train(trainer, data, arguments)
        if trainer.is_world_process_zero():
            trained, scratch = trainer.accelerator.unwrap_model(trainer.model), run.scratch()
            if arguments.lora:
                trained = merge_lora(trained, scratch / "adapter", arguments)
            trained.prompts = model_prompts(prompts, arguments)
            if heldout:
                summary["heldout"] = {
                    "questions": len(heldout[0]),
                    "texts": len(heldout[1]),
                    "before": before,
                }
                summary["heldout"]["after"] = measure(trained.to(training.device), *heldout)
            dtype = "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32"
            extra = {
                "training": summary,
                "environment": environment(dtype=dtype, processes=training.world_size),
            }
            save_encoder(trained, run, scratch, sources, arguments, extra)
            remove_checkpoints(training.output_dir)
    return summary


def _train(trainer, data, arguments):
    """Runs the trainer; returns what is told about it."""
    sizes = {name: len(part) for name, part in data.items()}
    sizes_asked = (
        trainer.args.train_batch_size,
        arguments.texts_per_batch,
        arguments.processes_together(trainer.args),
    )
    rows = {name: rows_per_batch(part, *sizes_asked) for name, part in data.items()}
    drawn = dict(zip(sizes, probabilities(sizes.values(), arguments.alpha)))
    if trainer.is_world_process_zero():
        for name, size in sizes.items():
            print(
                f"{name}: {size:,} rows, {rows[name]} a batch, drawn with probability "
                f"{drawn[name]:.3f}"
            )
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
        "losses": [
            [entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry
        ],
    }


def parse(argv):
    """(ContrastiveArguments, SentenceTransformerTrainingArguments) of a command line."""
    arguments, given = OPTIONS["contrastive"].read(argv)
    if "num_train_epochs" in given and given["max_steps"] > 0:
        raise UserError(
            f"max_steps {given['max_steps']} decides, so that num_train_epochs would be ignored; "
            "give --max-steps -1 with it"
        )
    if given.get("bf16") and not torch.cuda.is_available() and not given.get("use_cpu"):
        given["bf16"] = False
        print(
            "neobert contrastive: no GPU here, training in float32 instead of bfloat16",
            file=sys.stderr,
        )
    base = SentenceTransformerTrainingArguments
    return arguments, training_arguments(Path(arguments.output) / "checkpoints", given, FIXED, base)


def main(argv=None):
    """`neobert contrastive [RECIPE.yaml] [--option value ...]`; returns the exit code."""
    arguments, training = parse(argv or [])
    summary = train(arguments, training)
    if training.process_index == 0:
        if summary is None:
            print(
                f"{arguments.output}: finished already with this recipe; --overwrite trains again"
            )
        else:
            seconds = f" in {summary['seconds']:.0f} s" if summary["seconds"] else ""
            print(f"{arguments.output}: sentence encoder after {summary['steps']:,} steps{seconds}")
            if found := summary.get("heldout"):
                print(
                    f"retrieval of {found['questions']:,} held-out questions among "
                    f"{found['texts']:,} texts"
                )
                for when in ("before", "after"):
                    print(f"  {when:<6}  {described(found[when])}")
    return 0
