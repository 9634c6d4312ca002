"""Options of `neobert pretrain`, with the values of the paper as defaults.

The table of options also contains `neobert tokenizer` and `neobert pseudo-perplexity`. The module
imports neither torch nor transformers.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..common.errors import UserError
from ..common.options import OptionGroup, OptionParser, option
from .pseudo_perplexity_options import PARSER as PSEUDO_PERPLEXITY_PARSER
from .tokenizer_options import PARSER as TOKENIZER_PARSER


# Number of sequences of a micro-batch if neither its sequences nor its tokens are set.
DEFAULT_MICRO_BATCH_SIZE = 32


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Model to train."""

    title = "Model"

    model_config: dict[str, Any] = option(
        default_factory=dict,
        help="Fields of NeoBERTConfig that replace those of the published model, or of "
        "--init-from.",
    )
    # The weights and the tokenizer are identified by their content.
    init_from: str | None = option(
        None,
        "Model to start from instead of random weights: the output directory of a run, one of its "
        "checkpoints, a raw checkpoint that `neobert convert` reads, or a name on the Hub.",
        metavar="NAME",
        affects_results=False,
    )
    tokenizer: str | None = option(
        None,
        "Tokenizer: a directory or a name on the Hub. By default that of --init-from, or the "
        "bundled one.",
        metavar="NAME",
        affects_results=False,
    )
    init_embeddings: Literal["transfer"] | None = option(
        None,
        "Initialization of the token embeddings if --tokenizer differs from the tokenizer of "
        "--init-from. transfer: use the embeddings of the old tokens (vocabulary transfer). "
        "By default another tokenizer is an error.",
    )

    def __post_init__(self) -> None:
        if self.init_embeddings and (self.init_from is None or self.tokenizer is None):
            raise UserError(
                "`init_embeddings` needs `init_from`, the model with the old embeddings, and "
                "`tokenizer`, the new tokenizer."
            )


@dataclass(frozen=True)
class DataOptions(OptionGroup):
    """Training texts."""

    title = "Data"

    # Datasets are identified by their content.
    dataset: str | list[str | dict[str, Any]] | None = option(
        None,
        "Training texts (required, except with --evaluate-only): a file, a directory or a glob "
        "(txt, jsonl, csv, tsv, parquet), a saved dataset, or a dataset on the Hub "
        "(name:subset@revision). For several sources, pass a list, optionally with sampling "
        "weights: [{name: mine.jsonl, weight: 0.9}, {name: general.jsonl, weight: 0.1}].",
        metavar="NAME",
        affects_results=False,
    )
    split: str = option("train", "Split of a Hub dataset or a saved dataset.", metavar="NAME")
    column: str = option("text", "Column that contains the texts.", metavar="NAME")
    streaming: bool | None = option(
        None,
        "Tokenize the texts during training instead of preparing them first. By default true for "
        "a single Hub dataset that has not been prepared.",
    )
    prepared: str | None = option(
        None,
        "Directory of the tokenized texts, which several runs may share. By default "
        "OUTPUT/prepared.",
        metavar="PATH",
        affects_results=False,
    )
    prepare: bool = option(False, "Tokenize the texts and exit.", affects_results=False)


@dataclass(frozen=True)
class ValidationOptions(OptionGroup):
    """Validation texts."""

    title = "Validation"

    validation: str | list[str | dict[str, Any]] | dict[str, Any] | None = option(
        None,
        "Validation texts in the form of --dataset, or several named sets: {domain: a.jsonl, "
        "general: b.jsonl}. Evaluated before the first step, every --eval-steps steps if "
        "--eval-strategy is steps, and at the end.",
        metavar="NAME",
        affects_results=False,
    )
    evaluate_only: bool = option(
        False,
        "Evaluate the model of --init-from on the validation texts and exit. The training texts "
        "are not read.",
        affects_results=False,
    )

    def __post_init__(self) -> None:
        if self.evaluate_only and self.validation is None:
            raise UserError("`evaluate_only` needs validation texts. Pass --validation.")


@dataclass(frozen=True)
class BatchOptions(OptionGroup):
    """Length, layout and size of batches."""

    title = "Batching"

    max_length: Annotated[int, Meta(ge=3)] | Literal["auto"] = option(
        1024,
        "Maximum sequence length in tokens, including [CLS] and [SEP]. auto: context length of "
        "the model, at most 1024.",
        metavar="{INT,auto}",
    )
    long_texts: Literal["truncate", "split"] = option(
        "truncate",
        "Treatment of texts longer than --max-length. split: use consecutive windows of "
        "--max-length tokens.",
    )
    layout: Literal["packed", "packed_without_boundaries"] = option(
        "packed",
        "Layout of a batch. packed: sequences are concatenated without padding, and attention "
        "stays within a sequence. packed_without_boundaries: attention crosses the boundaries "
        "(ablation M6).",
    )
    micro_batch_size: Annotated[int, Meta(ge=1)] | None = option(
        None,
        "Number of sequences per micro-batch on each device. By default "
        f"{DEFAULT_MICRO_BATCH_SIZE}, unless --micro-batch-tokens is set.",
    )
    micro_batch_tokens: Annotated[int, Meta(ge=3)] | None = option(
        None, "Maximum number of tokens per micro-batch on each device."
    )
    global_batch_size: Annotated[int, Meta(ge=1)] | None = option(
        None,
        "Number of sequences per optimizer step over all devices, which determines "
        "--gradient-accumulation-steps.",
    )
    global_batch_tokens: Annotated[int, Meta(ge=3)] | None = option(
        None,
        "Maximum number of tokens per optimizer step over all devices, which determines "
        "--gradient-accumulation-steps.",
    )
    mixture: dict[int, float] | None = option(
        None,
        "Sampling probabilities of micro-batches by the minimum number of tokens of their texts, "
        "such as {0: 0.2, 1024: 0.4, 2048: 0.4} in stage 2 of the paper.",
    )

    def __post_init__(self) -> None:
        if self.micro_batch_tokens is not None and self.micro_batch_size is not None:
            raise UserError(
                "`micro_batch_size` and `micro_batch_tokens` cannot be combined. Remove one of "
                "them."
            )
        if self.micro_batch_tokens is None and self.micro_batch_size is None:
            # The dataclass is frozen, so an assignment would fail.
            object.__setattr__(self, "micro_batch_size", DEFAULT_MICRO_BATCH_SIZE)
        self._check_mixture()
        self._check_micro_batch_tokens()

    def _check_mixture(self) -> None:
        probabilities = [probability for _, probability in self.parts]
        # The comparison is negated to reject NaN as well.
        if min(probabilities) <= 0 or not abs(sum(probabilities) - 1) <= 1e-6:
            raise UserError(
                "the probabilities of `mixture` must be greater than 0 and sum to 1, got "
                f"{self.mixture}."
            )

    def _check_micro_batch_tokens(self) -> None:
        # The length that `auto` selects is checked when the model is known.
        max_length = 3 if self.max_length == "auto" else self.max_length
        tokens = self.micro_batch_tokens
        if tokens is not None and tokens < max_length:
            raise UserError(
                f"`micro_batch_tokens` must be at least `max_length`, {max_length}, got {tokens}. "
                "Increase it, or lower --max-length."
            )

        # Without boundaries, the tokens of a micro-batch are divided into rows of the maximum
        # length.
        has_full_rows = tokens is not None and tokens % max_length == 0
        if self.layout == "packed_without_boundaries" and not has_full_rows:
            raise UserError(
                "`micro_batch_tokens` must be a multiple of `max_length`, "
                f"{max_length}, with `layout` {self.layout}, got {tokens}."
            )

    @property
    def sequence_length(self) -> int:
        """Maximum sequence length in tokens, after `auto` has been replaced.

        Raises:
            ValueError: If `max_length` is still `auto`.
        """
        if self.max_length == "auto":
            raise ValueError("`max_length` is auto until the model is known.")
        return self.max_length

    @property
    def parts(self) -> tuple[tuple[int, float], ...]:
        """Parts of the mixture, ((minimum number of tokens of a text, probability), ...)."""
        return tuple((self.mixture or {0: 1.0}).items())

    def gradient_accumulation_steps(self, processes: int) -> int | None:
        """Return the number of micro-batches per optimizer step on each device.

        Args:
            processes: Number of processes, one per device.

        Returns:
            None if no global batch size is set.

        Raises:
            UserError: If the global batch is not a multiple of the micro-batches of all processes,
                or is in another unit.
        """
        # Both batch sizes must be in one unit, sequences or tokens.
        if self.micro_batch_tokens is not None:
            names = ("micro_batch_tokens", "global_batch_tokens", "global_batch_size")
            micro_batch = self.micro_batch_tokens
            global_batch = self.global_batch_tokens
            other_unit = self.global_batch_size
        else:
            names = ("micro_batch_size", "global_batch_size", "global_batch_tokens")
            micro_batch = self.micro_batch_size or DEFAULT_MICRO_BATCH_SIZE
            global_batch = self.global_batch_size
            other_unit = self.global_batch_tokens

        micro_name, global_name, other_name = names
        if other_unit is not None:
            raise UserError(
                f"`{other_name}` cannot be combined with `{micro_name}`. Use `{global_name}`, "
                "which is in the same unit."
            )
        if global_batch is None:
            return None
        if global_batch % (micro_batch * processes):
            raise UserError(
                f"`{global_name}` must be a multiple of `{micro_name}` times the number of "
                f"processes, {micro_batch:,} x {processes}, got {global_batch:,}. Change "
                f"`{micro_name}` or the number of processes."
            )
        return global_batch // (micro_batch * processes)


@dataclass(frozen=True)
class MaskingOptions(OptionGroup):
    """Masking of the tokens."""

    title = "Masking"

    mlm_probability: Annotated[float, Meta(gt=0, lt=1)] = option(
        0.2, "Fraction of the tokens to predict. Special tokens are never selected."
    )
    mask_replace_prob: Annotated[float, Meta(ge=0, le=1)] = option(
        1.0, "Fraction of the predicted tokens that are replaced with [MASK]."
    )
    random_replace_prob: Annotated[float, Meta(ge=0, le=1)] = option(
        0.0,
        "Fraction of the predicted tokens that are replaced with random tokens. The remaining "
        "predicted tokens are not replaced.",
    )
    mask_schedule: list[Annotated[float, Meta(gt=0, lt=1)]] | None = option(
        None,
        "Values of --mlm-probability at the start and at the end of the run, with linear "
        "interpolation.",
    )


@dataclass(frozen=True)
class OptimizationOptions(OptionGroup):
    """Length of the run, learning rate and precision."""

    title = "Optimization"

    max_steps: Annotated[int, Meta(ge=1)] = option(
        1_000_000, "Maximum number of optimizer steps.", metavar="INT"
    )
    num_train_epochs: Annotated[float, Meta(gt=0)] | None = option(
        None,
        "Maximum number of epochs over prepared texts. The run ends at --max-steps or after "
        "--num-train-epochs, whichever comes first.",
    )
    # The values that `auto` selects are part of the identity of a run.
    learning_rate: Annotated[float, Meta(ge=0)] | Literal["auto"] = option(
        6e-4,
        "Peak learning rate. auto: for continued pre-training, 3e-4 for a hidden size of 768 or "
        "more, and inversely proportional to the hidden size below.",
        metavar="{FLOAT,auto}",
        affects_results=False,
    )
    bf16: bool | Literal["auto"] = option(
        False,
        "Train in bfloat16 mixed precision. auto: only on accelerators that support bfloat16.",
        metavar="{true,false,auto}",
        affects_results=False,
    )
    compile: bool = option(
        False, "Compile the blocks with torch.compile for training.", affects_results=False
    )


@dataclass(frozen=True)
class OutputOptions(OptionGroup):
    """Output directory, checkpoints and logs."""

    title = "Output"

    output: str = option(
        "runs/pretrain",
        "Output directory for checkpoints, logs and the final model.",
        metavar="PATH",
        affects_results=False,
    )
    keep_every: Annotated[int, Meta(ge=0)] = option(
        0,
        "Interval in steps between checkpoints that are kept permanently, in addition to the "
        "newest --save-total-limit checkpoints. 0 keeps none.",
        affects_results=False,
    )
    peak_tflops: Annotated[float, Meta(gt=0)] | None = option(
        None,
        "Peak throughput of a device in TFLOP/s. If set, the log contains the model FLOPs "
        "utilization (mfu).",
        affects_results=False,
    )


@dataclass(frozen=True)
class PretrainOptions:
    """Options of `neobert pretrain`."""

    model: ModelOptions
    data: DataOptions
    validation: ValidationOptions = ValidationOptions()
    batch: BatchOptions = BatchOptions()
    masking: MaskingOptions = MaskingOptions()
    optimization: OptimizationOptions = OptimizationOptions()
    output: OutputOptions = OutputOptions()
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.data.dataset is None and not self.validation.evaluate_only:
            raise UserError(
                "missing required options: --dataset. `neobert pretrain --help` lists all options."
            )
        if self.data.prepare and self.validation.evaluate_only:
            raise UserError(
                "`prepare` and `evaluate_only` cannot be combined. Run the command once with each."
            )
        if self.validation.evaluate_only and self.model.init_from is None:
            raise UserError(
                "`evaluate_only` needs a model to evaluate. Pass --init-from, for example the "
                "output directory of a run."
            )
        self._check_keep_every()

    def _check_keep_every(self) -> None:
        """Check that the checkpoints that `keep_every` keeps are saved.

        Raises:
            UserError: If they are not, because `keep_every` is no multiple of `save_steps`.
        """
        keep_every = self.output.keep_every
        save_steps = self.trainer.get("save_steps", 0)
        # `save_steps` below 1 is a fraction of the steps. A run that is shorter than `keep_every`,
        # such as a trial run of a recipe, keeps nothing.
        if self.trainer.get("save_strategy", "steps") != "steps" or save_steps < 1:
            return
        if keep_every % save_steps and keep_every <= self.optimization.max_steps:
            raise UserError(
                f"`keep_every` must be a multiple of `save_steps` ({save_steps:g}), because other "
                f"steps have no checkpoint, got {keep_every}."
            )

    @property
    def output_folder(self) -> Path:
        """Output directory."""
        return Path(self.output.output)

    @property
    def prepared_folder(self) -> Path:
        """Directory of the tokenized texts."""
        return Path(self.data.prepared or self.output_folder / "prepared")


# Options of Trainer whose defaults differ, from section 4 of the paper. The warmup of 2,000 steps
# is 5 % of the steps in runs of fewer than 40,000 steps.
TRAINER_DEFAULTS = {
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


OPTIONS: dict[str, OptionParser[Any]] = {
    "tokenizer": TOKENIZER_PARSER,
    "pretrain": OptionParser(
        "neobert pretrain",
        "Pre-train a masked language model as in the paper (sections 3 and 4), or continue the "
        "pre-training of a model. Running the same command again resumes an interrupted run.",
        PretrainOptions,
        "neobert pretrain recipes/example_small.yaml --dataset texts.txt "
        "--validation validation.txt",
        TRAINER_DEFAULTS,
        trainer_help={
            "warmup_steps": "Warmup steps; a value below 1 is a fraction of all steps. By default "
            "2,000, or 5 % of the steps if that is less.",
            "lr_scheduler_type": "Learning rate schedule, such as linear, cosine or constant. By "
            "default a cosine to 10 % of the peak at 90 % of the steps, then constant.",
        },
        trainer_replaced={
            "per_device_train_batch_size": "--micro-batch-size",
            "per_device_eval_batch_size": "--micro-batch-size",
            "eval_on_start": "--validation, which is evaluated before the first step",
            **dict.fromkeys(
                (
                    "label_names",
                    "remove_unused_columns",
                    "include_num_input_tokens_seen",
                    "label_smoothing_factor",
                    "auto_find_batch_size",
                ),
                "",
            ),
        },
    ),
    "pseudo-perplexity": PSEUDO_PERPLEXITY_PARSER,
}
