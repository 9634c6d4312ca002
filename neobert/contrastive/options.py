"""Options of `neobert contrastive`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from ..common.errors import UserError, listed
from ..common.model_card import BASE_MODEL_HELP, LICENSE_HELP
from ..common.options import OptionGroup, OptionParser, option
from ..embeddings.instructions import TEMPLATE, check_template, read_instructions
from ..embeddings.options import EncoderOptions
from ..training.lora import LoraOptions


if TYPE_CHECKING:
    from .data import PairSource


# Maximum sequence length of an encoder without a pooling module, from the authors' code.
DEFAULT_MAX_LENGTH = 1024


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Initial model, and output directory."""

    title = "Model"

    model: str = option(
        help="Model to start from: a directory or a name on the Hub.", metavar="NAME"
    )
    output: str = option(
        help="Output directory of the sentence encoder.", metavar="PATH", affects_results=False
    )


@dataclass(frozen=True)
class DataOptions(OptionGroup):
    """Training and validation data."""

    title = "Data"

    # A run is identified by the content of its files, so their paths do not affect results.
    pairs: list[str] = option(
        default_factory=list,
        help="Files of rows with the columns anchor, positive and, optionally, negative or "
        "negative_1, negative_2, ...",
        metavar="PATH",
        affects_results=False,
    )
    datasets: list[dict[str, Any]] = option(
        default_factory=list,
        help="Data sets with columns and instructions, in a YAML recipe. recipes/contrastive.yaml "
        "is an example.",
        affects_results=False,
    )
    validation_file: str | None = option(
        None,
        "File of pairs for evaluating retrieval before and after training. Queries that are an "
        "anchor or a positive of the training data are not evaluated.",
        metavar="PATH",
        affects_results=False,
    )
    validation_percent: Annotated[float, Meta(ge=0, le=50)] = option(
        5.0,
        "Percentage of the queries held out for evaluation without --validation-file: 20 to 500 "
        "queries, selected by hash. Rows in which a held-out query is the anchor or the positive "
        "are not trained on. Data with fewer than 200 queries is not split, and 0 disables the "
        "evaluation.",
    )


@dataclass(frozen=True)
class InstructionOptions(OptionGroup):
    """Instructions before the queries."""

    title = "Instructions"

    instruction: str = option("", "Instruction before the anchors of --pairs.", may_be_empty=True)
    instructions: str | None = option(
        None,
        "YAML or JSON file {dataset: instruction}, which replaces the instructions of the recipe.",
        metavar="PATH",
        affects_results=False,
    )
    instruction_template: str = option(TEMPLATE, "Format of an instruction before a query.")

    def __post_init__(self) -> None:
        check_template(self.instruction_template)


@dataclass(frozen=True)
class LossOptions(OptionGroup):
    """Loss and batches."""

    title = "Loss and batches"

    temperature: Annotated[float, Meta(gt=0)] = option(
        0.07, "Temperature by which cosine similarities are divided."
    )
    alpha: Annotated[float, Meta(ge=0, le=10)] = option(
        0.5, "Exponent of the dataset size in the sampling probability of a dataset."
    )
    batch_texts: Annotated[int, Meta(ge=1)] | None = option(
        None,
        "Number of texts per batch on each device, over all columns. Replaces "
        "--per-device-train-batch-size.",
    )
    mini_batch_size: Annotated[int, Meta(ge=1)] | None = option(
        None,
        "Number of texts per forward pass with gradient caching, for large batches. By default "
        "gradients are not cached.",
    )


@dataclass(frozen=True)
class ContrastiveEncoderOptions(EncoderOptions):
    """Loading of the initial model."""

    max_length: Annotated[int, Meta(ge=3, le=2**31 - 1)] | None = option(
        None,
        "Maximum sequence length in tokens. By default the limit of the sentence encoder, or "
        f"{DEFAULT_MAX_LENGTH:,} for an encoder without a pooling module.",
    )

    def loading(self, model: str) -> dict[str, Any]:
        """Return the keyword arguments with which `load_sentence_transformer` loads `model`."""
        from sentence_transformers.util import is_sentence_transformer_model

        # A sentence encoder keeps the limit that its configuration contains.
        settings = self.settings()
        if self.max_length is None and not is_sentence_transformer_model(model):
            settings["max_length"] = DEFAULT_MAX_LENGTH
        return settings


@dataclass(frozen=True)
class CardOptions(OptionGroup):
    """Metadata of the model card."""

    title = "Model card"

    license: str | None = option(None, LICENSE_HELP, metavar="NAME", affects_results=False)
    base_model: str | None = option(None, BASE_MODEL_HELP, metavar="NAME", affects_results=False)


@dataclass(frozen=True)
class ContrastiveOptions:
    """Options of `neobert contrastive`."""

    model: ModelOptions
    data: DataOptions = DataOptions()
    instructions: InstructionOptions = InstructionOptions()
    loss: LossOptions = LossOptions()
    encoder: ContrastiveEncoderOptions = ContrastiveEncoderOptions()
    lora: LoraOptions = LoraOptions()
    card: CardOptions = CardOptions()
    trainer: dict[str, Any] = field(default_factory=dict)


def read_sources(data: DataOptions, instructions: InstructionOptions) -> "list[PairSource]":
    """Return the datasets of the recipe and of `--pairs` with their instructions and negatives.

    Raises:
        UserError: If there is no dataset, two datasets have the same name, an entry is not valid,
            or the file of instructions lacks a dataset.
    """
    # This module is imported for `--help`, and the data module imports torch.
    from ..common.data import FORMATS
    from .data import PairSource, with_negatives

    if instructions.instruction and not data.pairs:
        raise UserError(
            "`instruction` applies to `pairs`, got none. Set `instruction` in the entries of "
            "`datasets`, or pass --instructions."
        )
    sources = [PairSource.from_entry(entry) for entry in data.datasets]
    for path in data.pairs:
        if not Path(path).is_file():
            raise UserError(
                f"`pairs` must be files, got {path}. List datasets of the Hub under `datasets` in "
                "a recipe."
            )
        # "pairs.jsonl.gz" has the name "pairs".
        name = Path(path).name.split(".")[0]
        source = PairSource(name=name, path=path, instruction=instructions.instruction)
        # The name of a dataset on the Hub has no such suffix either.
        if not source.is_local:
            raise UserError(
                f"the names of `pairs` must end in one of {', '.join(FORMATS)}, got {path}. Rename "
                "the file."
            )
        sources.append(source)

    # The names identify the datasets in prompts, results and the model card.
    names = [source.name for source in sources]
    if not sources:
        raise UserError(
            "at least one dataset is required. Pass --pairs FILE, or a recipe such as "
            "recipes/contrastive.yaml."
        )
    if len(set(names)) < len(names):
        raise UserError(f"datasets must have different names, got {listed(names)}. Rename a file.")

    if instructions.instructions is not None:
        # A dataset that is missing in the file would be trained without an instruction.
        texts = read_instructions(instructions.instructions, names)
        missing = [name for name in names if name not in texts]
        if missing:
            raise UserError(
                f"{instructions.instructions} has no instruction for {listed(missing)}. Add one "
                "for every dataset, '' for none."
            )
        sources = [replace(source, instruction=texts[source.name]) for source in sources]
    return [with_negatives(source) for source in sources]


# Arguments of Trainer with other defaults, which are those of the authors' code. `command.parse`
# adds one epoch and the learning rate for the model.
TRAINER_DEFAULTS = {
    "per_device_train_batch_size": 64,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "cosine",
    # Values below 1 are a fraction of the training steps.
    "warmup_steps": 0.05,
    "logging_steps": 20,
    "save_steps": 500,
    "save_total_limit": 2,
    "report_to": "none",
    # A loss that is not finite must be visible in the log.
    "logging_nan_inf_filter": False,
    "seed": 42,
}


OPTIONS = {
    "contrastive": OptionParser(
        "neobert contrastive",
        "Fine-tune a model into a sentence encoder with a contrastive loss (paper, section 4.3): "
        "InfoNCE with in-batch and hard negatives.",
        ContrastiveOptions,
        "neobert contrastive --model chandar-lab/NeoBERT --pairs train.jsonl --validation-file "
        "test.jsonl --output runs/encoder",
        TRAINER_DEFAULTS,
        trainer_help={
            "num_train_epochs": "Number of training epochs. (default: 1)",
            "per_device_train_batch_size": "Batch size per device, in training rows. (default: 64)",
            "learning_rate": "Peak learning rate. By default 1e-4. For a local NeoBERT with a "
            "hidden size below 485, half of `neobert.default_learning_rate`, at most 5e-4.",
        },
        trainer_replaced={
            **dict.fromkeys(
                ("eval_strategy", "ignore_data_skip", "auto_find_batch_size", "data_seed"), ""
            ),
            # The validation queries are searched before and after the training only.
            **dict.fromkeys(
                (
                    *("eval_steps", "eval_delay", "eval_on_start", "load_best_model_at_end"),
                    *("metric_for_best_model", "greater_is_better", "eval_accumulation_steps"),
                    "per_device_eval_batch_size",
                ),
                "--validation-file, which is evaluated before and after the training",
            ),
        },
    ),
}
