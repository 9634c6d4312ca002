"""`neobert contrastive`: contrastive fine-tuning of an encoder to a sentence encoder (paper,
section 4.3) with sentence-transformers.

InfoNCE on cosine similarity / 0.07 with in-batch and hard negatives; every batch from one data set,
drawn by size^alpha; an instruction before the query; mean pooling. The output folder loads with
`SentenceTransformer(folder, trust_remote_code=True)`.
"""

import functools
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from transformers import set_seed

from ..common.errors import UserError
from ..common.folders import apart
from ..common.identity import files_digest, known_by
from ..common.output import Output, run_settings
from ..common.pooling import save_for_all_versions
from ..common.results import environment
from ..embeddings.instructions import prompt
from ..embeddings.packed_encoder import load_sentence_transformer
from ..evaluation.retrieval import described, measure, measure_tfidf, read_questions
from ..training import checkpoints
from ..training.checkpoints import RunTrainer
from ..training.lora import lora_config, trainable_parameters
from ..training.optimization import default_learning_rate
from ..training.options import number_options, training_arguments
from ..training.run_report import RunReport
from .data import (
    SizeAlphaBatchSampler,
    TextsBatchSampler,
    check_batch,
    load_source,
    probabilities,
    rows_per_batch,
)
from .model_card import write_card
from .options import OPTIONS


logger = logging.getLogger("neobert")

PAPER_LEARNING_RATE = 1e-4

# Trainer's options that a run could not be continued with, or that would be ignored; there are no
# rows to evaluate on.
FIXED = {
    "eval_strategy": "no",
    "ignore_data_skip": False,
    "save_only_model": False,
    "auto_find_batch_size": False,
    "data_seed": None,
    "resume_from_checkpoint": None,
}


class ContrastiveTrainer(RunTrainer, SentenceTransformerTrainer):
    """The library's trainer, whose runs go on after an interruption."""


def check(arguments, training):
    """Everything that can be found wrong before work begins.

    Args:
        arguments: `ContrastiveArguments`.
        training: SentenceTransformerTrainingArguments.
    Returns:
        the `PairSource`s.
    """
    if training.per_device_train_batch_size < 2:
        raise UserError(
            "per_device_train_batch_size must be at least 2: the others of a batch are the "
            "negatives"
        )
    sources = arguments.sources()
    local = [source.path for source in sources if source.is_local]
    given = filter(None, [arguments.model, arguments.heldout, *local])
    apart(arguments.output, *(path for path in given if Path(path).exists()))
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
    relevant = {text: found for text, found in relevant.items() if text not in trained}
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
        part = data[source.name] = load_source(source)
        rows = rows_per_batch(part, training.train_batch_size, arguments.texts_per_batch)
        check_batch(source, part, rows)
        if text := prompt(arguments.instruction_template, source.instruction):
            prompts[source.name] = {"anchor": text}
    return data, prompts


def build_loss(model, arguments):
    """InfoNCE on cosine similarity / temperature; with gradient caching where `mini_batch_size` is
    given."""
    scale, size = 1 / arguments.temperature, arguments.mini_batch_size
    if size:
        return CachedMultipleNegativesRankingLoss(model, scale=scale, mini_batch_size=size)
    return MultipleNegativesRankingLoss(model, scale=scale)


def build_trainer(model, data, prompts, arguments, training):
    """The library's trainer with our samplers."""
    model.model_card_data.generate_widget_examples = (
        False  # rows of the training data, for a card that is not written
    )
    # A nested dictionary must not be empty, or the trainer would not know the data sets apart.
    training.prompts = prompts or None
    training.batch_sampler = functools.partial(
        TextsBatchSampler, texts_per_batch=arguments.texts_per_batch
    )
    training.multi_dataset_batch_sampler = functools.partial(
        SizeAlphaBatchSampler, alpha=arguments.alpha, group=training.world_size
    )
    loss = build_loss(model, arguments)
    return ContrastiveTrainer(model=model, args=training, train_dataset=data, loss=loss)


def model_prompts(prompts, arguments):
    """The prompts of the encoder: those of the data sets by their names, "query" and "document"."""
    named = {name: texts["anchor"] for name, texts in prompts.items()}
    query = next(iter(named.values()), "")
    if len(set(named.values())) > 1:
        query = prompt(arguments.instruction_template, "Retrieve text that answers the query.")
    return {"query": query, "document": "", **named}


def merge_lora(model, adapter_folder, arguments):
    """Saves the adapter alone and returns the model with it merged into plain weights."""
    from peft import PeftModel

    model[0].auto_model.save_pretrained(adapter_folder)
    plain = load_sentence_transformer(arguments.model, **arguments.loading())
    PeftModel.from_pretrained(plain[0].auto_model, adapter_folder).merge_and_unload()
    return plain


def _settings(arguments, training, sources):
    """What a run is known by."""
    settings = number_options(training.to_dict()) | run_settings(arguments)
    for name in ("pairs", "instructions"):
        del settings[name]  # they are in the data sets
    local = [source for source in sources if source.is_local]
    return settings | {
        "datasets": [asdict(s) | ({"path": None} if s.is_local else {}) for s in sources],
        "files": {source.name: files_digest([source.path]) for source in local},
        "model": known_by(arguments.model),
        "tokenizer": arguments.tokenizer and known_by(arguments.tokenizer),
        "processes": training.world_size,
    }


def train(arguments, training):
    """Trains and writes the sentence encoder to `arguments.output`; a run that was interrupted goes
    on from its last complete checkpoint.

    Args:
        arguments: `ContrastiveArguments`.
        training: SentenceTransformerTrainingArguments whose output_dir is the folder of the
            checkpoints.
    Returns:
        dict: data set sizes and probabilities, losses of the log, steps, seconds; None if the
        folder was finished already.
    Raises:
        UserError: bad input, before any work. Stopped: SIGTERM came; the step is saved.
    """
    sources = check(arguments, training)
    output = Output(arguments.output, "contrastive", _settings(arguments, training, sources))
    if output.state() == "finished":
        checkpoints.remove_checkpoints(training.output_dir)
        return None
    with training.main_process_first(desc="data sets"):
        data, prompts = build_datasets(arguments, training, sources)
        heldout = held_out(arguments, data)
    # Before the model is loaded, so that a second process is refused immediately.
    with checkpoints.claim(output):
        set_seed(training.seed)
        model = load_sentence_transformer(arguments.model, **arguments.loading())
        if arguments.lora:
            model.add_adapter(lora_config(model[0].auto_model, **arguments.lora_settings()))
        before = None
        if heldout and training.process_index == 0:
            before = measure(model.to(training.device), *heldout)
        trainer = build_trainer(model, data, prompts, arguments, training)
        summary = _train(trainer, data, arguments)
        if trainer.is_world_process_zero():
            trained = trainer.accelerator.unwrap_model(trainer.model)
            with output.final_files() as folder:
                if arguments.lora:
                    trained = merge_lora(trained, folder / "adapter", arguments)
                trained.prompts = model_prompts(prompts, arguments)
                if heldout:
                    summary["heldout"] = {
                        "questions": len(heldout[0]),
                        "texts": len(heldout[1]),
                        "before": before,
                        "after": measure(trained.to(training.device), *heldout),
                        "tf-idf": measure_tfidf(*heldout),
                    }
                    summary["warning"] = comparison_warning(summary["heldout"])
                save_for_all_versions(trained, folder)
                write_card(folder, arguments, sources, trained.max_seq_length, summary)
            dtype = "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32"
            output.finish(
                training=summary,
                environment=environment(dtype=dtype, processes=training.world_size),
            )
            checkpoints.remove_checkpoints(training.output_dir)
    return summary


def _train(trainer, data, arguments):
    """Runs the trainer; returns what is told about it."""
    sizes = {name: len(part) for name, part in data.items()}
    batch = trainer.args.train_batch_size, arguments.texts_per_batch
    rows = {name: rows_per_batch(part, *batch) for name, part in data.items()}
    drawn = dict(zip(sizes, probabilities(sizes.values(), arguments.alpha)))
    if trainer.is_world_process_zero():
        for name in data:
            share = f"drawn with probability {drawn[name]:.3f}"
            print(f"{name}: {sizes[name]:,} rows, {rows[name]} a batch, {share}")
    trainer.add_callback(RunReport())
    checkpoints.train(trainer)
    trainable, total = trainable_parameters(trainer.model)
    log = trainer.state.log_history
    return {
        "rows": sizes,
        "rows_per_batch": rows,
        "probabilities": drawn,
        "steps": trainer.state.global_step,
        "seconds": checkpoints.spent(trainer)["seconds"],
        "trainable_parameters": trainable,
        "parameters": total,
        "losses": [[entry["step"], entry["loss"]] for entry in log if "loss" in entry],
    }


def learning_rate_of(model: str) -> float:
    """Return the default learning rate for a model: 1e-4, that of the authors' code, and half of
    the fine-tuning rate for a NeoBERT for which this is higher."""
    path = Path(model) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if config.get("model_type") != "neobert" or "hidden_size" not in config:
        return PAPER_LEARNING_RATE
    return max(PAPER_LEARNING_RATE, default_learning_rate(config["hidden_size"]) / 2)


def comparison_warning(heldout: dict) -> str | None:
    """Return a warning if the encoder is not better than its start or than TF-IDF."""
    after = heldout["after"]["mrr@10"]
    for name, encoder in (("before", "it was before the training"), ("tf-idf", "TF-IDF")):
        if after <= heldout[name]["mrr@10"]:
            return (
                f"the encoder is not better than {encoder} (MRR@10 {after:.3f}, "
                f"{heldout[name]['mrr@10']:.3f}). Train on more pairs or for more epochs, or "
                "change --learning-rate."
            )
    return None


def parse(argv):
    """(ContrastiveArguments, SentenceTransformerTrainingArguments) of a command line."""
    arguments, given = OPTIONS["contrastive"].read(argv)
    if "num_train_epochs" in given and given.get("max_steps", -1) > 0:
        raise UserError(
            f"`max_steps` is {given['max_steps']}, so that `num_train_epochs` would be ignored. "
            "Pass --max-steps -1 to train by epochs."
        )
    given.setdefault("num_train_epochs", 1)
    given.setdefault("learning_rate", learning_rate_of(arguments.model))
    base = SentenceTransformerTrainingArguments
    return arguments, training_arguments(Path(arguments.output) / "checkpoints", given, FIXED, base)


def main(argv=None):
    """`neobert contrastive [RECIPE.yaml] [--option value ...]`; returns the exit code."""
    arguments, training = parse(argv or [])
    summary = train(arguments, training)
    if training.process_index:
        return 0
    if summary is None:
        print(f"{arguments.output}: finished already with this recipe")
        return 0
    print(f"{arguments.output}: sentence encoder after {summary['steps']:,} steps")
    if found := summary.get("heldout"):
        print(
            f"retrieval of {found['questions']:,} held-out questions among {found['texts']:,} texts"
        )
        for when in ("tf-idf", "before", "after"):
            print(f"  {when:<6}  {described(found[when])}")
        if summary["warning"]:
            logger.warning("%s", summary["warning"])
    else:
        print("Nothing was measured. Pass --heldout FILE to compare the encoder with its start.")
    return 0
