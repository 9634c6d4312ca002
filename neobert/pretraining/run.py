"""Run of `neobert pretrain`: options, checks, identity and batches."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase, TrainingArguments

from ..common.constants import TOKENIZER
from ..common.data import check_not_matched
from ..common.errors import UserError, listed
from ..common.folders import check_disjoint
from ..common.identity import tokenizer_fingerprint
from ..common.loading import load_tokenizer
from ..common.options import identity
from ..common.output import Output
from ..training.options import result_options
from .batches import MicroBatches, TokenWindows, boundary_tokens
from .masking import TokenMasking
from .model import init_fingerprint, read_config, weights_folder, without_vocabulary
from .options import OPTIONS, BatchOptions, MaskingOptions, PretrainOptions
from .plans import Plan
from .prepared import TokenizedTexts, load_prepared, prepare_dataset
from .schedule import (
    adaptation_learning_rate,
    make_training_arguments,
    steps_of_epochs,
    token_fractions,
)
from .sources import Source, load_rows, normalized_weights, parse_sources, source_digest
from .streaming import StreamedBatches
from .validation import METRICS, check_validation_sets, metric_name, parse_validation


logger = logging.getLogger("neobert.pretraining")

# Maximum length that `max_length: auto` selects.
MAX_AUTO_LENGTH = 1024

# Number of training batches that are searched for a token to mask.
CHECKED_BATCHES = 100


class NothingToMask(UserError):
    """Error of texts in which all tokens are special tokens."""


@dataclass(frozen=True)
class PretrainingRun:
    """A run of the command.

    Attributes:
        options: Options of the command.
        training: Arguments of the trainer.
        sources: Sources of the training texts; empty for an evaluation.
        validation: Sources of the validation sets, {name: sources}.
    """

    options: PretrainOptions
    training: TrainingArguments
    sources: tuple[Source, ...]
    validation: dict[str, tuple[Source, ...]]

    @property
    def datasets(self) -> dict[str, tuple[Source, ...]]:
        """Sources of each prepared dataset, {directory name: sources}.

        The names are "train", or "train-1", "train-2", ... for weighted sources, and "validation",
        or "validation-NAME".
        """
        datasets = {"train": self.sources} if self.sources else {}
        # Sampling weights may change without tokenizing the texts again, as each source has a
        # dataset.
        if normalized_weights(self.sources):
            datasets = {f"train-{i}": (source,) for i, source in enumerate(self.sources, 1)}
        for name, sources in self.validation.items():
            datasets[validation_folder(name)] = sources
        return datasets

    @property
    def train_datasets(self) -> list[str]:
        """Names of the prepared datasets of the training texts."""
        return [name for name in self.datasets if name.startswith("train")]

    @property
    def data_seed(self) -> int:
        """Random seed of the order of the texts, the mixture and the masks."""
        data_seed = self.training.data_seed
        return self.training.seed if data_seed is None else data_seed

    @property
    def streams(self) -> bool:
        """Whether the training texts are tokenized during training.

        By default several sources are prepared, so their texts are shuffled together.
        """
        if self.options.data.streaming is not None:
            return self.options.data.streaming
        is_prepared = (self.options.prepared_folder / "train" / "prepared.json").is_file()
        return len(self.sources) == 1 and self.sources[0].source_type == "hub" and not is_prepared


def validation_folder(name: str) -> str:
    """Return the directory name of a prepared validation set, whose name may be ""."""
    return f"validation-{name}" if name else "validation"


def read_run(argv: Sequence[str]) -> PretrainingRun:
    """Return the run of a command line.

    Raises:
        UserError: If an option is invalid.
    """
    options: PretrainOptions = OPTIONS["pretrain"].read(argv)
    data = options.data
    validation = options.validation
    sources: tuple[Source, ...] = ()
    if not validation.evaluate_only:
        sources = parse_sources(data.dataset, data.split, data.column)
    return PretrainingRun(
        options=options,
        training=make_training_arguments(options),
        sources=sources,
        validation=parse_validation(validation.validation, data.split, data.column),
    )


# ------------------------------------------------------------------------------------------------
# checks and identity


def check_run(run: PretrainingRun) -> None:
    """Check that the options of a run can be combined.

    Raises:
        UserError: If options cannot be combined, or if a path contains another one.
    """
    plugin = run.training.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        gathered = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        # Each process has only a part of the weights, so the final files would be incomplete.
        if not plugin.hf_ds_config.get_value(gathered):
            raise UserError(
                "ZeRO-3 must gather the weights of the final model. Set zero3_save_16bit_model: "
                "true under deepspeed_config, as in recipes/accelerate/zero3.yaml."
            )

    # Otherwise a later run would read other files in a directory of texts.
    inputs = [source.name for sources in run.datasets.values() for source in sources]
    starts = [run.options.model.init_from] if run.options.model.init_from else []
    check_disjoint(run.options.output_folder, *inputs, *starts)
    for name in run.datasets:
        check_disjoint(run.options.prepared_folder / name, *inputs)

    # A glob of texts must not match files of the output either.
    outputs = [
        str(run.options.output_folder / folder / name)
        for folder in ("", "checkpoint-1")
        for name in ("log.jsonl", "config.json", "vocab.txt")
    ]
    for sources in run.datasets.values():
        for source in sources:
            if source.source_type == "files":
                check_not_matched(source.name, *outputs)
    check_validation_sets(run.validation, run.sources)
    _check_best_metric(run)


def _check_best_metric(run: PretrainingRun) -> None:
    """Check that the evaluation computes the metric that selects the best checkpoint.

    Raises:
        UserError: If it does not. Trainer would fail at the first evaluation.
    """
    metric = run.training.metric_for_best_model
    if metric is None or run.training.eval_strategy == "no":
        return
    known = [metric_name(name, metric) for name in run.validation for metric in METRICS]
    if f"eval_{metric.removeprefix('eval_')}" not in known:
        raise UserError(
            f"`metric_for_best_model` must be one of {listed(known)}, got {metric}. Set one of "
            "these metrics."
        )


def check_texts(run: PretrainingRun) -> None:
    """Check that texts which are not prepared can be read, before a model is loaded.

    Raises:
        UserError: If a source, its column or its rows are missing.
    """
    for name, sources in run.datasets.items():
        is_prepared = (run.options.prepared_folder / name / "prepared.json").is_file()
        if not is_prepared and next(iter(load_rows(sources)), None) is None:
            raise UserError(f"the dataset {sources[0].name} has no rows.")


def run_output(run: PretrainingRun) -> Output:
    """Return the output of a run with the settings that identify the run.

    Texts and weights are identified by their content, and neither is loaded.
    """
    options = run.options
    settings = identity(options)
    for name, value in result_options(options.trainer).items():
        # The evaluation does not change the weights.
        if not name.startswith("eval_"):
            settings[name] = value
    if run.streams:
        # Each worker reads a part of the texts.
        settings["dataloader_num_workers"] = run.training.dataloader_num_workers

    init_from = options.model.init_from
    settings |= {
        "learning_rate": options.optimization.learning_rate,
        "bf16": run.training.bf16,
        "seed": run.training.seed,
        "data_seed": run.data_seed,
        "world_size": run.training.world_size,
        "streaming": run.streams,
        "data": source_digest(run.sources),
        "validation": {name: source_digest(parts) for name, parts in run.validation.items()},
        "tokenizer": _tokenizer_identity(options),
        "init_from": None if init_from is None else init_fingerprint(init_from),
    }

    # The texts may have been prepared in the output directory before the run.
    preexisting: Sequence[str] = ()
    folder = options.output_folder.resolve()
    prepared = options.prepared_folder.resolve()
    if prepared.is_relative_to(folder):
        preexisting = prepared.relative_to(folder).parts[:1]
    return Output(options.output_folder, "pretrain", settings, preexisting=preexisting)


def _tokenizer_identity(options: PretrainOptions) -> str | None:
    """Return the fingerprint of the tokenizer of a run; None for the tokenizer of `init_from`."""
    model = options.model
    if model.init_from is not None and model.init_embeddings is None:
        # `choose_tokenizer` rejects another tokenizer.
        return None
    return tokenizer_fingerprint(load_tokenizer(model.tokenizer or str(TOKENIZER)))


# ------------------------------------------------------------------------------------------------
# values that depend on the model and the texts


def locate_start(run: PretrainingRun) -> str | None:
    """Return the directory or Hub name of the weights to start from, None for random weights.

    A raw checkpoint is converted in the output directory.
    """
    init_from = run.options.model.init_from
    if init_from is None:
        return None
    with run.training.main_process_first(local=False, desc="init_from"):
        is_first = run.training.process_index == 0
        return weights_folder(init_from, run.options.output_folder, is_first)


def resolve_options(
    run: PretrainingRun, start: str | None, tokenizer: PreTrainedTokenizerBase
) -> PretrainingRun:
    """Return the run with the values that depend on the model and on the amount of text.

    `auto` becomes the learning rate and maximum length for the model, and `num_train_epochs` limits
    the number of steps.

    Args:
        run: Run with the options of the user.
        start: Result of `locate_start`.
        tokenizer: Tokenizer of the run.

    Raises:
        UserError: If the configuration of the model cannot be loaded, or streamed texts are limited
            to a number of epochs.
    """
    options = run.options
    batch = options.batch
    optimization = options.optimization
    if "auto" in (batch.max_length, optimization.learning_rate):
        config = read_config(without_vocabulary(options.model.model_config), start)
        if batch.max_length == "auto":
            batch = replace(batch, max_length=min(MAX_AUTO_LENGTH, config.context_length))
        if optimization.learning_rate == "auto":
            rate = adaptation_learning_rate(config.hidden_size)
            optimization = replace(optimization, learning_rate=rate)

    # The run ends at the lower one of the two limits.
    epochs = optimization.num_train_epochs
    if epochs is not None and not options.validation.evaluate_only:
        max_steps = _steps_of_epochs(run, batch, epochs, tokenizer)
        if max_steps < optimization.max_steps:
            optimization = replace(optimization, max_steps=max_steps)

    # Arguments of Trainer, such as the warmup, depend on the number of steps and the learning rate.
    resolved = replace(options, batch=batch, optimization=optimization)
    if resolved == options:
        return run
    return replace(run, options=resolved, training=make_training_arguments(resolved))


def _steps_of_epochs(
    run: PretrainingRun, batch: BatchOptions, epochs: float, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return the number of optimizer steps of a number of epochs over the prepared texts."""
    if run.streams:
        raise UserError(
            "`num_train_epochs` needs prepared texts, but the texts are streamed. Set "
            "`max_steps`, or prepare the texts with --prepare."
        )

    texts = [tokenized_texts(run, name, tokenizer) for name in run.train_datasets]
    boundaries = boundary_tokens(tokenizer)
    windows = [TokenWindows(part, boundaries, batch) for part in texts]
    window_counts = [len(part) for part in windows]
    # Fraction of each source in the windows of the run; empty without weights.
    fractions = normalized_weights(run.sources)

    # The sizes of the sources and of a micro-batch are in micro-batches, in sequences or in tokens.
    # Micro-batches have fewer tokens than `micro_batch_tokens`, and the last one of an epoch is
    # smaller, so they are counted where an epoch has a fixed order.
    if not fractions and not batch.mixture:
        sizes = [Plan(windows[0], batch, run.data_seed, 0).num_batches(0)]
        micro_batch_size = 1
    elif batch.micro_batch_tokens is None:
        sizes = window_counts
        micro_batch_size = batch.micro_batch_size or 1
    else:
        sizes = [int(part.lengths(np.arange(len(part))).sum()) for part in windows]
        micro_batch_size = batch.micro_batch_tokens
        if fractions:
            fractions = token_fractions(fractions, sizes, window_counts)

    micro_batches_per_step = run.training.world_size * run.training.gradient_accumulation_steps
    return steps_of_epochs(epochs, sizes, fractions, micro_batch_size * micro_batches_per_step)


# ------------------------------------------------------------------------------------------------
# batches


def tokenized_texts(
    run: PretrainingRun, name: str, tokenizer: PreTrainedTokenizerBase, prefix: str = ""
) -> TokenizedTexts:
    """Return the texts of a prepared dataset, which is written if it does not exist.

    Args:
        run: The run.
        name: Key of `run.datasets`.
        tokenizer: Tokenizer of the texts.
        prefix: Prefix of the directory, for another tokenizer than that of the run.
    """
    path = run.options.prepared_folder / f"{prefix}{name}"
    # The main process prepares the texts. The others, also those on other machines, wait and find
    # the dataset complete.
    with run.training.main_process_first(local=False, desc="tokenization"):
        summary = prepare_dataset(run.datasets[name], path, tokenizer)
    if run.training.process_index == 0:
        logger.info(
            "%s: %s of %s rows have text, %s tokens",
            summary["dataset"],
            f"{summary['kept']:,}",
            f"{summary['rows']:,}",
            f"{summary['tokens']:,}",
        )
    return load_prepared(path)


def validation_batches(
    run: PretrainingRun,
    tokenizer: PreTrainedTokenizerBase,
    prefix: str = "",
    names: Iterable[str] | None = None,
) -> dict[str, MicroBatches]:
    """Return the micro-batches of each validation set, {name: batches}.

    The masks are identical in all evaluations of a run.

    Args:
        run: The run.
        tokenizer: Tokenizer of the model.
        prefix: Prefix of the prepared datasets, as in `tokenized_texts`.
        names: Names of validation sets, by default all.

    Raises:
        NothingToMask: If a set contains no token that can be masked.
    """
    # Evaluations are comparable only if they predict the same tokens, whatever the schedule of the
    # masking and the mixture of the training batches. The other seed separates the masks from those
    # of training.
    masking = make_masking(run.options.masking, tokenizer, use_schedule=False)
    batch_options = replace(run.options.batch, mixture=None)
    batches = {}
    for name in run.validation if names is None else names:
        texts = tokenized_texts(run, validation_folder(name), tokenizer, prefix)
        windows = TokenWindows(texts, boundary_tokens(tokenizer), batch_options)
        batches[name] = MicroBatches(windows, masking, batch_options, seed=run.data_seed + 1)
        label = name or str(run.options.validation.validation)
        _check_maskable(batches[name], len(batches[name]), label)
    return batches


def training_batches(
    run: PretrainingRun, tokenizer: PreTrainedTokenizerBase
) -> MicroBatches | StreamedBatches:
    """Return the micro-batches of all processes, or those of this process if texts are streamed.

    Args:
        run: The run, with a resolved number of steps.
        tokenizer: Tokenizer of the model.

    Raises:
        NothingToMask: If no token of the first prepared batches can be masked.
    """
    training = run.training
    # Number of micro-batches of the whole run in all processes.
    count = training.max_steps * training.gradient_accumulation_steps * training.world_size
    if run.streams:
        return _streamed_batches(run, tokenizer, count)
    return _prepared_batches(run, tokenizer, count)


def _streamed_batches(
    run: PretrainingRun, tokenizer: PreTrainedTokenizerBase, count: int
) -> StreamedBatches:
    """Return the micro-batches of this process, whose texts are tokenized during training."""
    masking = make_masking(run.options.masking, tokenizer)
    # Sources with weights are sampled, and each of them needs a stream. Sources without weights
    # are read one after another.
    sampling_weights = normalized_weights(run.sources)
    parts = [(source,) for source in run.sources] if sampling_weights else [run.sources]
    return StreamedBatches(
        rows=[load_rows(part) for part in parts],
        sampling_weights=sampling_weights,
        tokenizer=tokenizer,
        masking=masking,
        batch_options=run.options.batch,
        seed=run.data_seed,
        count=count,
        rank=run.training.process_index,
        world_size=run.training.world_size,
        workers=run.training.dataloader_num_workers,
    )


def _prepared_batches(
    run: PretrainingRun, tokenizer: PreTrainedTokenizerBase, count: int
) -> MicroBatches:
    """Return the micro-batches of all processes from prepared texts."""
    masking = make_masking(run.options.masking, tokenizer)
    sampling_weights = normalized_weights(run.sources)
    texts = [tokenized_texts(run, name, tokenizer) for name in run.train_datasets]
    all_texts = texts[0]
    if sampling_weights:
        all_texts = TokenizedTexts.concatenate(texts, sampling_weights)

    windows = TokenWindows(all_texts, boundary_tokens(tokenizer), run.options.batch)
    batches = MicroBatches(windows, masking, run.options.batch, run.data_seed, count)
    _check_maskable(batches, min(count, CHECKED_BATCHES), str(run.options.data.dataset))
    return batches


def make_masking(
    options: MaskingOptions, tokenizer: PreTrainedTokenizerBase, use_schedule: bool = True
) -> TokenMasking:
    """Return the masking of the options, with or without their schedule.

    Args:
        options: Probabilities of the masking, and their schedule.
        tokenizer: Tokenizer of the model.
        use_schedule: Whether the probability of masking follows the schedule.
    """
    return TokenMasking(
        tokenizer,
        mlm_probability=options.mlm_probability,
        mask_replace_prob=options.mask_replace_prob,
        random_replace_prob=options.random_replace_prob,
        schedule=options.mask_schedule if use_schedule else None,
    )


def _check_maskable(batches: MicroBatches, count: int, name: str) -> None:
    """Check that the first `count` batches contain a token that can be masked.

    Raises:
        NothingToMask: If they do not.
    """
    if not any((batches[i]["labels"] != -100).any() for i in range(count)):
        raise NothingToMask(
            f"the texts of {name} must contain a token that can be masked, but all tokens are "
            "special tokens such as [UNK]. Use a tokenizer whose vocabulary covers the texts."
        )
