"""Command `neobert contrastive`: fine-tune a model to a sentence encoder with pairs of texts.

The command follows section 4.3 of the paper with sentence-transformers: InfoNCE with in-batch and
hard negatives, batches from one dataset that is sampled by size^alpha, an instruction before the
query, mean pooling. The output directory loads with
`SentenceTransformer(folder, trust_remote_code=True)`.
"""

import functools
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from transformers import set_seed

from ..common.data import normalized_text
from ..common.errors import UserError, listed
from ..common.folders import check_disjoint
from ..common.identity import files_digest, model_fingerprint
from ..common.options import identity, log_options
from ..common.output import Output
from ..common.sentence_transformers_files import save_for_all_versions
from ..embeddings.instructions import format_instruction
from ..embeddings.packed_encoder import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    first_prompt_name,
    load_sentence_transformer,
)
from ..evaluation.retrieval import (
    Queries,
    describe_metrics,
    evaluate_retrieval,
    evaluate_tfidf,
    queries_from_rows,
    read_queries,
)
from ..training.checkpoints import RunTrainer, checkpoint_folder, is_main, training_time
from ..training.lora import check_adapter_support, lora_config, trainable_parameters
from ..training.optimization import default_learning_rate
from ..training.options import result_options, training_arguments
from ..training.run import run_once
from ..training.run_report import RunReport
from .data import (
    DistinctTextsBatchSampler,
    MixturePart,
    PairSource,
    SizeAlphaBatchSampler,
    build_parts,
    check_batch,
    choose_validation_queries,
    load_source,
    split_queries,
)
from .model_card import write_card
from .options import OPTIONS, ContrastiveOptions, LossOptions, read_sources


logger = logging.getLogger("neobert.contrastive")

# Learning rate of the authors' code.
PAPER_LEARNING_RATE = 1e-4

# Arguments of Trainer with which a run could not resume, or which would have no effect.
FIXED = {
    "eval_strategy": "no",
    "ignore_data_skip": False,
    "auto_find_batch_size": False,
    "data_seed": None,
    "resume_from_checkpoint": None,
}


class ContrastiveTrainer(RunTrainer, SentenceTransformerTrainer):
    """Trainer of sentence-transformers whose runs resume exactly after an interruption."""


@dataclass(frozen=True)
class Mixture:
    """Training data of a run.

    Attributes:
        parts: Datasets with their batch sizes and sampling probabilities, {name: part}.
        prompts: Instructions of the run as prompts, {name: {"anchor": prompt}}. Empty for a run
            without instructions, which uses the prompts of the initial model.
        validation: Queries for the evaluation of retrieval, or None.
    """

    parts: dict[str, MixturePart]
    prompts: dict[str, dict[str, str]]
    validation: Queries | None


# ------------------------------------------------------------------------------------------------
# command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert contrastive [RECIPE.yaml] [--option value ...]` and return the exit code."""
    options, training = parse(argv or [])
    log_options(options)
    result = train(options, training)["training"]
    # Only the main process prints the results.
    if training.process_index:
        return 0

    print(f"{options.model.output}: sentence encoder after {result['steps']:,} steps")
    validation = result.get("validation")
    if validation is None:
        logger.info(
            "Retrieval was not evaluated. Pass --validation-file to compare the encoder with the "
            "model that the training started from."
        )
        return 0

    print(
        f"retrieval of {validation['queries']:,} held-out queries among "
        f"{validation['texts']:,} texts"
    )
    for name in ("tf-idf", "before", "after"):
        print(f"  {name:<6}  {describe_metrics(validation[name])}")
    if result["warning"]:
        logger.warning("%s", result["warning"])
    return 0


def parse(
    argv: Sequence[str],
) -> tuple[ContrastiveOptions, SentenceTransformerTrainingArguments]:
    """Return the options of a command line and the arguments of the trainer."""
    options = OPTIONS["contrastive"].read(argv)
    settings = dict(options.trainer)
    # Trainer would ignore the number of epochs silently.
    if "num_train_epochs" in settings and settings.get("max_steps", -1) > 0:
        raise UserError(
            f"`max_steps` is {settings['max_steps']}, so `num_train_epochs` would be ignored. "
            "Pass --max-steps -1 to train by epochs."
        )
    settings.setdefault("num_train_epochs", 1)
    settings.setdefault("learning_rate", learning_rate_of(options.model.model))

    training = training_arguments(
        Path(options.model.output) / "checkpoints",
        settings,
        FIXED,
        base=SentenceTransformerTrainingArguments,
    )
    if training.per_device_train_batch_size < 2:
        raise UserError(
            "`per_device_train_batch_size` must be at least 2, got "
            f"{training.per_device_train_batch_size}. The other rows of a batch are the negatives."
        )
    return options, training


def learning_rate_of(model: str) -> float:
    """Return the default learning rate for a model.

    The default is the higher of the authors' rate, 1e-4, and half of the fine-tuning rate for a
    NeoBERT of this hidden size. Other models have the authors' rate.
    """
    # Smaller models need higher rates. A model on the Hub has no local configuration and is treated
    # like the published NeoBERT.
    path = Path(model) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if config.get("model_type") != "neobert" or "hidden_size" not in config:
        return PAPER_LEARNING_RATE
    return max(PAPER_LEARNING_RATE, default_learning_rate(config["hidden_size"]) / 2)


# ------------------------------------------------------------------------------------------------
# run


def train(
    options: ContrastiveOptions, training: SentenceTransformerTrainingArguments
) -> dict[str, Any]:
    """Train a sentence encoder and write its directory, unless the run has finished before.

    An interrupted run resumes from its last complete checkpoint.

    Args:
        options: Options of the command.
        training: Arguments of the trainer; `output_dir` is the directory of the checkpoints.

    Returns:
        The content of result.json.

    Raises:
        UserError: If the input is not valid.
        Stopped: If SIGTERM was received; a checkpoint has been written.
    """
    sources = read_sources(options.data, options.instructions)
    check_paths(options, sources)
    if options.lora.lora:
        check_adapter_support()
    output = Output(options.model.output, "contrastive", run_identity(options, training, sources))
    run = ContrastiveRun(options, training, sources)
    return run_once(output, run.build, run.save, checkpoint_folder=checkpoint_folder(training))


class ContrastiveRun:
    """Run of `neobert contrastive`: builds the trainer, and saves the encoder.

    Args:
        options: Options of the command.
        training: Arguments of the trainer.
        sources: Datasets of pairs.
    """

    mixture: Mixture

    def __init__(
        self,
        options: ContrastiveOptions,
        training: SentenceTransformerTrainingArguments,
        sources: Sequence[PairSource],
    ) -> None:
        self.options = options
        self.training = training
        self.sources = sources
        # Metrics of the initial model.
        self.before: dict[str, float] = {}

    def build(self) -> ContrastiveTrainer:
        """Load the datasets and the model, evaluate the model, and return the trainer."""
        options = self.options
        training = self.training
        # The other processes read the cache of the datasets that the main process has written.
        with training.main_process_first(local=False, desc="datasets"):
            self.mixture = build_mixture(options, training, self.sources)

        # The adapter is initialized randomly, and all processes must start from the same weights.
        set_seed(training.seed)
        model = load_model(options)
        if options.lora.lora:
            adapter = lora_config(model[0].auto_model, **(options.lora.settings() or {}))
            model.add_adapter(adapter)

        # A resumed run evaluates the initial model again, because a checkpoint contains no metrics.
        if is_main():
            log_mixture(self.mixture)
            if self.mixture.prompts:
                warn_about_replaced_prompts(model, self.new_prompts())
            if self.mixture.validation:
                model.to(training.device)
                self.before = evaluate_retrieval(model, self.mixture.validation)
        trainer = build_trainer(model, self.mixture, options.loss, training)
        trainer.add_callback(RunReport())
        return trainer

    def save(self, trainer: ContrastiveTrainer, folder: Path) -> dict[str, Any]:
        """Evaluate the encoder, write its directory, and return the result."""
        if not is_main():
            return {}
        options = self.options
        summary = summarize(trainer, self.mixture)
        model = trainer.accelerator.unwrap_model(trainer.model)
        if options.lora.lora:
            model = merge_lora(model, folder / "adapter", options)

        # The evaluation after the training uses the prompts, so they are set before it. Without
        # instructions, the encoder keeps the prompts of the initial model.
        if self.mixture.prompts:
            model.prompts = self.new_prompts()
            # sentence-transformers cannot load a model whose default prompt does not exist.
            if model.default_prompt_name not in model.prompts:
                model.default_prompt_name = None

        validation = self.mixture.validation
        if validation:
            summary["validation"] = {
                "queries": len(validation.relevant),
                "texts": len(validation.texts),
                "before": self.before,
                "after": evaluate_retrieval(model.to(self.training.device), validation),
                "tf-idf": evaluate_tfidf(validation),
            }
            summary["warning"] = comparison_warning(summary["validation"])

        save_for_all_versions(model, folder)
        write_card(folder, options, self.sources, model.max_seq_length, summary)
        return {"training": summary}

    def new_prompts(self) -> dict[str, str]:
        """Return the prompts of the encoder for a run with instructions."""
        template = self.options.instructions.instruction_template
        return model_prompts(self.mixture.prompts, template)


def check_paths(options: ContrastiveOptions, sources: Sequence[PairSource]) -> None:
    """Raise UserError if the output directory contains an input, or an input contains it."""
    # Names on the Hub do not exist as paths.
    local = [source.path for source in sources if source.is_local]
    inputs = [options.model.model, *local]
    if options.data.validation_file is not None:
        inputs.append(options.data.validation_file)
    existing = [path for path in inputs if Path(path).exists()]
    check_disjoint(options.model.output, *existing)


def run_identity(
    options: ContrastiveOptions,
    training: SentenceTransformerTrainingArguments,
    sources: Sequence[PairSource],
) -> dict[str, Any]:
    """Return the values that identify a run: options, datasets, digests of files and the model.

    A run resumes only if they are equal.
    """
    # A file may move. Its digest identifies it, and its path does not.
    local = [source for source in sources if source.is_local]
    datasets = []
    for source in sources:
        entry = asdict(source)
        if source.is_local:
            entry["path"] = None
        datasets.append(entry)

    validation_file = options.data.validation_file
    # Fields of TrainingArguments that are not set differ between versions of transformers.
    settings = result_options(options.trainer) | identity(options)
    return settings | {
        "learning_rate": training.learning_rate,
        "num_train_epochs": training.num_train_epochs,
        "datasets": datasets,
        "files": {source.name: files_digest([source.path]) for source in local},
        "model": model_fingerprint(options.model.model),
        "tokenizer": options.encoder.tokenizer and model_fingerprint(options.encoder.tokenizer),
        # The number of processes changes the batches, and so the weights.
        "processes": training.world_size,
        "validation_file": validation_file and files_digest([validation_file]),
        # Without a validation file, queries are held out from the training data.
        "holds_out": validation_file is None and options.data.validation_percent > 0,
    }


def load_model(options: ContrastiveOptions) -> SentenceTransformer:
    """Load the initial model."""
    name = options.model.model
    return load_sentence_transformer(name, **options.encoder.loading(name))


# ------------------------------------------------------------------------------------------------
# data


def build_mixture(
    options: ContrastiveOptions,
    training: SentenceTransformerTrainingArguments,
    sources: Sequence[PairSource],
) -> Mixture:
    """Load all datasets and hold out the validation queries.

    Raises:
        UserError: If a dataset cannot be read or has no batch of distinct texts.
    """
    from datasets import DatasetDict

    datasets = DatasetDict({source.name: load_source(source) for source in sources})
    validation: Queries | None
    if options.data.validation_file is not None:
        validation = read_validation_file(options.data.validation_file, datasets)
    else:
        datasets, validation = hold_out(datasets, options.data.validation_percent)

    # The sampling probabilities and batches are those of the data without the validation queries.
    loss = options.loss
    parts = build_parts(datasets, training.train_batch_size, loss.batch_texts, loss.alpha)
    prompts = {}
    for source in sources:
        part = parts[source.name]
        check_batch(source, part.data, part.batch_rows)
        text = format_instruction(options.instructions.instruction_template, source.instruction)
        if text:
            prompts[source.name] = {"anchor": text}
    return Mixture(parts, prompts, validation)


def read_validation_file(path: str, datasets: Mapping[str, Any]) -> Queries:
    """Read the queries of a validation file that are not trained on.

    A query is trained on if it is an anchor or a positive of the training data, up to capital
    letters and spaces. The second case includes the reverse of a validation pair, which trains the
    same similarity.

    Raises:
        UserError: If all queries are trained on.
    """
    queries = read_queries(path)
    relevant = queries.relevant
    training_texts: set[str] = set()
    for data in datasets.values():
        for column in ("anchor", "positive"):
            training_texts.update(map(normalized_text, data[column]))

    trained = {text for text in relevant if normalized_text(text) in training_texts}
    if trained:
        logger.warning(
            "%s: %s of %s queries also occur in the training data, as anchor or positive, and are "
            "excluded from the evaluation.",
            path,
            f"{len(trained):,}",
            f"{len(relevant):,}",
        )

    # The texts of these queries stay among the texts that are searched.
    relevant = {text: positives for text, positives in relevant.items() if text not in trained}
    if not relevant:
        raise UserError(
            f"all queries of {path} are in the training data. Pass a file of other queries."
        )
    return Queries(relevant, queries.texts)


def hold_out(datasets: Any, percent: float) -> tuple[Any, Queries | None]:
    """Hold out validation queries from the training data.

    Args:
        datasets: Datasets by name, a `DatasetDict`.
        percent: Percentage of the queries.

    Returns:
        The datasets without rows whose anchor or positive is a held-out query, and these queries or
        None.
    """
    from datasets import DatasetDict

    # A query may be in several datasets. It is held out from all of them.
    anchors = itertools.chain.from_iterable(data["anchor"] for data in datasets.values())
    validation_queries = choose_validation_queries(anchors, percent)
    if not validation_queries:
        return datasets, None

    remaining = DatasetDict()
    rows: list[dict[str, Any]] = []
    for name, data in datasets.items():
        remaining[name], held_out = split_queries(data, validation_queries)
        rows += held_out

        removed_count = len(data) - len(remaining[name]) - len(held_out)
        if removed_count:
            logger.info(
                "%s: %s rows whose positive is a validation query, or that contain a copy of one "
                "with other capital letters, are not trained on",
                name,
                f"{removed_count:,}",
            )
    return remaining, queries_from_rows(rows)


def log_mixture(mixture: Mixture) -> None:
    """Log the size, batch size and sampling probability of every dataset."""
    for name, part in mixture.parts.items():
        logger.info(
            "%s: %s rows, %d per batch, sampled with probability %.3f",
            name,
            f"{len(part.data):,}",
            part.batch_rows,
            part.probability,
        )
    if mixture.validation:
        logger.info(
            "validation: %s queries that are not trained on, neither as anchor nor as positive",
            f"{len(mixture.validation.relevant):,}",
        )


# ------------------------------------------------------------------------------------------------
# training


def build_loss(
    model: SentenceTransformer, loss: LossOptions
) -> MultipleNegativesRankingLoss | CachedMultipleNegativesRankingLoss:
    """Return InfoNCE on cosine similarity / temperature, with gradient caching if requested."""
    # The library multiplies similarities by a scale instead of dividing them by a temperature.
    scale = 1 / loss.temperature
    if loss.mini_batch_size:
        return CachedMultipleNegativesRankingLoss(
            model, scale=scale, mini_batch_size=loss.mini_batch_size
        )
    return MultipleNegativesRankingLoss(model, scale=scale)


def build_trainer(
    model: SentenceTransformer,
    mixture: Mixture,
    loss: LossOptions,
    training: SentenceTransformerTrainingArguments,
) -> ContrastiveTrainer:
    """Return the trainer of sentence-transformers with the samplers of this package."""
    from datasets import DatasetDict

    # The card of the library is not written, because it would contain rows of the training data.
    # Its widget examples would be collected at the start of the training nevertheless.
    model.model_card_data.generate_widget_examples = False
    # The library treats an empty dictionary as the prompts of a single dataset.
    training.prompts = mixture.prompts or initial_prompts(model, mixture.parts) or None

    # The library calls both with the data, the batch size and the seed.
    training.batch_sampler = functools.partial(
        DistinctTextsBatchSampler, batch_texts=loss.batch_texts
    )
    training.multi_dataset_batch_sampler = functools.partial(
        SizeAlphaBatchSampler, alpha=loss.alpha, num_processes=training.world_size
    )
    return ContrastiveTrainer(
        model=model,
        args=training,
        train_dataset=DatasetDict({name: part.data for name, part in mixture.parts.items()}),
        loss=build_loss(model, loss),
    )


def summarize(trainer: ContrastiveTrainer, mixture: Mixture) -> dict[str, Any]:
    """Return the statistics of a training run for result.json."""
    trainable, total = trainable_parameters(trainer.model)
    log = trainer.state.log_history
    return {
        "rows": {name: len(part.data) for name, part in mixture.parts.items()},
        "rows_per_batch": {name: part.batch_rows for name, part in mixture.parts.items()},
        "probabilities": {name: part.probability for name, part in mixture.parts.items()},
        "steps": trainer.state.global_step,
        "seconds": training_time(trainer)["seconds"],
        "trainable_parameters": trainable,
        "parameters": total,
        "losses": [[entry["step"], entry["loss"]] for entry in log if "loss" in entry],
    }


def comparison_warning(validation: Mapping[str, Any]) -> str | None:
    """Return a warning if the encoder is not better than the initial model or than TF-IDF."""
    after = validation["after"]["mrr@10"]
    for name, encoder in (("before", "it was before the training"), ("tf-idf", "TF-IDF")):
        score = validation[name]["mrr@10"]
        if after <= score:
            return (
                f"the encoder is not better than {encoder} (MRR@10 {after:.3f}, {score:.3f}). "
                "Train on more pairs or for more epochs, or change --learning-rate."
            )
    return None


def model_prompts(prompts: Mapping[str, Mapping[str, str]], template: str) -> dict[str, str]:
    """Return the prompts of the encoder: "query", "document", and those of the datasets by name.

    Args:
        prompts: Prompts of the datasets, {name: {"anchor": prompt}}.
        template: Format of an instruction before a query.
    """
    named = {name: texts["anchor"] for name, texts in prompts.items()}
    # No instruction of a dataset fits all queries if the datasets have different ones.
    query = next(iter(named.values()), "")
    if len(set(named.values())) > 1:
        query = format_instruction(template, "Retrieve text that answers the query.")
    # A dataset may have one of these names, which sentence-transformers gives a meaning.
    return {**named, "query": query, "document": ""}


def initial_prompts(
    model: SentenceTransformer, parts: Mapping[str, MixturePart]
) -> dict[str, dict[str, str]]:
    """Return the prompts of the initial model for training without instructions.

    Queries have the prompt of `model.encode_query`, and positives and negatives have the prompt of
    `model.encode_document`.

    Args:
        model: Initial model.
        parts: Datasets by name.

    Returns:
        Prompts of the columns of each dataset, {name: {column: prompt}}, or {} for a model without
        prompts.
    """
    query = text_of_prompt(model, QUERY_PROMPTS)
    document = text_of_prompt(model, DOCUMENT_PROMPTS)
    if not query and not document:
        return {}

    prompts = {}
    for name, part in parts.items():
        columns = dict.fromkeys(part.data.column_names, document)
        prompts[name] = columns | {"anchor": query}
    return prompts


def text_of_prompt(model: SentenceTransformer, names: Sequence[str]) -> str:
    """Return the text of the first prompt with one of these names, or of the default prompt.

    Returns:
        The text, or "" for a model without such a prompt.
    """
    name = first_prompt_name(model, names) or model.default_prompt_name
    return model.prompts.get(name or "") or ""


def warn_about_replaced_prompts(model: SentenceTransformer, prompts: Mapping[str, str]) -> None:
    """Log a warning if the initial model has prompts that a run with instructions replaces.

    Args:
        model: Initial model.
        prompts: Prompts of the encoder after the training.
    """
    replaced = [
        f"{name}: {text!r}"
        for name, text in model.prompts.items()
        if text and prompts.get(name) != text
    ]
    if replaced:
        logger.warning(
            "The instructions of this run replace the prompts of the initial model (%s). To train "
            "with the prompts of the initial model, pass no instructions.",
            listed(replaced, 5),
        )


def merge_lora(
    model: SentenceTransformer, adapter_folder: Path, options: ContrastiveOptions
) -> SentenceTransformer:
    """Save the adapter alone, and return the model with the adapter merged into its weights."""
    from peft import PeftModel

    # Merging leaves the layers of PEFT in the trained model. The weights are therefore merged into
    # a freshly loaded model, whose files are those of a model without an adapter.
    adapted: Any = model[0].auto_model
    adapted.save_pretrained(adapter_folder)
    merged = load_model(options)
    transformer: Any = merged[0].auto_model
    PeftModel.from_pretrained(transformer, adapter_folder).merge_and_unload()
    # The adapter belongs to the transformer. Later modules, such as Dense, were trained themselves.
    for trained, loaded in zip(list(model)[1:], list(merged)[1:], strict=True):
        loaded.load_state_dict(trained.state_dict())
    return merged
