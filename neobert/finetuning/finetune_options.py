"""Options of `neobert finetune`. Imports neither torch nor transformers."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..common.constants import TRUST_REMOTE_CODE_HELP
from ..common.errors import UserError
from ..common.model_card import BASE_MODEL_HELP, LICENSE_HELP
from ..common.options import OptionGroup, OptionParser, option
from ..training.lora import LoraOptions


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Encoder and its head."""

    title = "Model"

    model: str = option(
        help="Encoder or classifier to start from: a directory or a name on the Hub.",
        metavar="NAME",
        affects_results=False,
    )
    output: str = option(
        help="Output directory of the classifier.", metavar="PATH", affects_results=False
    )
    classifier_pooling: Literal["cls", "mean"] | None = option(
        None,
        "Pooling of the classification head of NeoBERT. By default the pooling of `--model` if it "
        "is a sentence encoder, otherwise `classifier_pooling` in its config.json.",
    )
    head_dropout: Annotated[float, Meta(ge=0, lt=1)] = option(
        0.1, "Dropout probability of the head."
    )
    trust_remote_code: bool = option(False, TRUST_REMOTE_CODE_HELP, affects_results=False)


@dataclass(frozen=True)
class DataOptions(OptionGroup):
    """Training, validation and test rows."""

    title = "Data"

    # A run is identified by the content of its rows, so their paths do not affect the results.
    train: str = option(
        help="Labeled rows (.csv, .tsv, .jsonl, .parquet): a file, a directory, a glob or a URL.",
        positional=True,
        affects_results=False,
    )
    task: Literal["auto", "classification", "multi-label", "regression", "tokens"] = option(
        "auto", "Task; auto infers the task from the labels."
    )
    text_column: list[str] | None = option(
        None,
        "Column that contains the text, or the two columns of a pair. By default the first of "
        "text, sentence and tokens in the input; tokens if the labels are tags of its words.",
        metavar="NAME",
    )
    label_column: list[str] | None = option(
        None,
        "Column that contains the label, or several columns of 0 and 1 for multi-label "
        "classification. By default the first of label, labels, tags, ner_tags, entities, spans "
        "and score in the input.",
        metavar="NAME",
    )
    validation_file: str | None = option(
        None,
        "File of rows for selecting the checkpoint. By default a part of the training rows.",
        metavar="PATH",
        affects_results=False,
    )
    test_file: str | None = option(
        None,
        "File of rows for the final evaluation. By default a part of the training rows.",
        metavar="PATH",
        affects_results=False,
    )
    validation_percent: Annotated[float, Meta(gt=0, le=50)] = option(
        10.0, "Percentage of the training rows for validation if there is no --validation-file."
    )
    test_percent: Annotated[float, Meta(gt=0, le=50)] = option(
        10.0, "Percentage of the training rows for the test if there is no --test-file."
    )
    split_seed: Annotated[int, Meta(ge=0, lt=2**32)] = option(
        0, "Random seed of the split, which is stratified by label."
    )
    max_length: Annotated[int, Meta(ge=8, le=2**31 - 1)] = option(
        512,
        "Maximum sequence length in tokens; longer texts are truncated in training and evaluation. "
        "It is also the default length of neobert predict.",
    )

    def __post_init__(self) -> None:
        if self.text_column is not None and len(self.text_column) > 2:
            raise UserError(
                f"`text_column` must name one or two columns, got {len(self.text_column)}."
            )


@dataclass(frozen=True)
class EvaluationOptions(OptionGroup):
    """Selection of the checkpoint, early stopping and baselines."""

    title = "Evaluation"

    metric: (
        Literal["accuracy", "macro_f1", "matthews", "micro_f1", "pearson", "spearman"] | None
    ) = option(
        None,
        "Metric that selects the checkpoint. By default accuracy for classification, micro_f1 for "
        "multi-label classification and spearman for regression; token classification always uses "
        "the F1 of entities, or the accuracy of words if the tags are not BIO tags.",
    )
    patience: Annotated[int, Meta(ge=1)] | None = option(
        None,
        "Number of evaluations without improvement after which training stops. By default training "
        "does not stop early.",
    )
    baselines: bool = option(
        True, "Measure simple baselines on the same rows.", affects_results=False
    )


@dataclass(frozen=True)
class CardOptions(OptionGroup):
    """Metadata of the model card."""

    title = "Model card"

    license: str | None = option(None, LICENSE_HELP, metavar="NAME", affects_results=False)
    base_model: str | None = option(None, BASE_MODEL_HELP, metavar="NAME", affects_results=False)


@dataclass(frozen=True)
class FinetuneOptions:
    """Options of `neobert finetune`."""

    data: DataOptions
    model: ModelOptions
    evaluation: EvaluationOptions = EvaluationOptions()
    lora: LoraOptions = LoraOptions()
    card: CardOptions = CardOptions()
    trainer: dict[str, Any] = field(default_factory=dict)


# Options of Trainer whose defaults differ. The default learning rate depends on the hidden size.
TRAINER_DEFAULTS = {
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "warmup_steps": 0.1,
    "weight_decay": 0.01,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "logging_steps": 10,
    "report_to": "none",
    "seed": 42,
}

# Options of Trainer that `neobert finetune` and `neobert glue` set, see `trainer.FIXED`.
TRAINER_FIXED = dict.fromkeys(
    (
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "label_names",
        "remove_unused_columns",
        "ignore_data_skip",
        "eval_delay",
        "restore_callback_states_from_checkpoint",
    ),
    "",
)

FINETUNE = OptionParser(
    "neobert finetune",
    "Fine-tune an encoder as a classifier, a regression model or a token classifier on your own "
    "rows, and compare the result with simple baselines.",
    FinetuneOptions,
    "neobert finetune reviews.csv --text-column review --label-column stars --model "
    "examples/sentence-encoder --output runs/reviews",
    trainer_defaults=TRAINER_DEFAULTS,
    trainer_help={
        "learning_rate": "Peak learning rate. By default 2e-5 * (768 / hidden size)^5, from 2e-5 "
        "to 1e-3; at least 3e-4 with --lora.",
    },
    trainer_replaced=TRAINER_FIXED,
)
