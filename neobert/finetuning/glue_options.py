"""Options of `neobert glue` and the definition of one run. Imports neither torch nor transformers.

recipes/glue.yaml contains the protocol of the paper and is read before the user's recipes.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..common.constants import RECIPES, TRUST_REMOTE_CODE_HELP
from ..common.errors import UserError
from ..common.folders import check_row_name
from ..common.options import OptionGroup, OptionParser, identity, option
from ..training.lora import LoraOptions
from ..training.options import result_options
from .finetune_options import TRAINER_FIXED
from .glue_tasks import HUB_DATA, Task


RECIPE = RECIPES / "glue.yaml"
DEFAULT_PRESET = "neobert-4096"
# Hidden size of the models that the presets were tuned for.
PRESET_HIDDEN_SIZE = 768

# {preset: {task: {hyperparameter: value}}}, and {hyperparameter: values}.
Presets = dict[str, dict[str, dict[str, int | float]]]
GridValues = dict[str, list[int | float]]


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of a run that the paper's grid varies.

    Attributes:
        batch_size: Global batch size in sequences.
        learning_rate: Peak learning rate.
        weight_decay: Weight decay of matrices.
    """

    batch_size: int
    learning_rate: float
    weight_decay: float


def check_hyperparameters(option_name: str, values: Mapping[str, Any]) -> None:
    """Check the hyperparameters of a preset or of a grid.

    Args:
        option_name: Name of the option, for the messages.
        values: {hyperparameter: value or list of values}.

    Raises:
        UserError: If a hyperparameter does not exist, or has an empty list of values.
    """
    known = [field.name for field in fields(Hyperparameters)]
    for name, value in values.items():
        if name not in known:
            raise UserError(
                f"`{option_name}` has the unknown hyperparameter {name!r}. Use {', '.join(known)}."
            )
        if value == []:
            raise UserError(f"`{option_name}` must have at least one {name}, got an empty list.")


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Encoder and its classification head."""

    title = "Model"

    model: str = option(
        help="Encoder to fine-tune: a directory or a name on the Hub.",
        metavar="NAME",
        affects_results=False,
    )
    start: Literal["auto", "none"] = option(
        "auto",
        "Initial model of RTE, STS-B, MRPC and QNLI: auto for the best finished MNLI run under "
        "--output, none for --model.",
        affects_results=False,
    )
    classifier_pooling: Literal["cls", "mean"] | None = option(
        None,
        "Pooling of the classification head of NeoBERT. By default `classifier_pooling` in "
        "config.json.",
    )
    head_dropout: Annotated[float, Meta(ge=0, lt=1)] = option(
        0.1, "Dropout probability of the classification head."
    )
    trust_remote_code: bool = option(False, TRUST_REMOTE_CODE_HELP, affects_results=False)


@dataclass(frozen=True)
class DataOptions(OptionGroup):
    """Tasks and their rows."""

    title = "Data"

    task: str = option(
        help="Comma-separated tasks of mnli, qnli, qqp, rte, sst2, mrpc, cola and stsb, or all.",
        metavar="NAMES",
    )
    # A run is identified by the digest of its rows, so their path does not affect the results.
    data: str = option(
        HUB_DATA,
        "Name on the Hub, or a directory with <task>/<split>.jsonl, .csv, .tsv or .parquet.",
        metavar="PATH",
        affects_results=False,
    )
    max_length: Annotated[int, Meta(ge=8, le=2**31 - 1)] = option(
        512, "Maximum sequence length in tokens, including special tokens."
    )


@dataclass(frozen=True)
class OutputOptions(OptionGroup):
    """Runs, their weights and the table."""

    title = "Output"

    output: str = option(
        "runs/glue", "Directory of the runs and the table.", metavar="PATH", affects_results=False
    )
    name: str | None = option(
        None,
        "Name of the row in the table. By default the last part of --model.",
        metavar="NAME",
        affects_results=False,
    )
    keep_models: Literal["best", "all"] = option(
        "best",
        "Runs whose weights are saved: best for runs with a better score than the finished runs "
        "of the task, or all.",
        affects_results=False,
    )


@dataclass(frozen=True)
class SelectionOptions(OptionGroup):
    """Evaluation, early stopping and the choice of the checkpoint."""

    title = "Evaluation"

    selection: Literal["heldout", "dev"] = option(
        "heldout",
        "Rows for selecting the checkpoint and for early stopping: heldout for a part of the "
        "training rows, dev for the dev set, as in the paper.",
    )
    heldout_fraction: Annotated[float, Meta(gt=0, lt=1)] = option(
        0.1, "Fraction of the training rows that is held out."
    )
    heldout_rows: Annotated[int, Meta(ge=1)] = option(2000, "Maximum number of held-out rows.")
    patience: Annotated[int, Meta(ge=1)] = option(
        15, "Number of evaluations without improvement after which the run stops."
    )
    max_eval_interval: Annotated[int, Meta(ge=1)] = option(
        500, "Maximum number of steps between two evaluations."
    )
    evaluations_per_epoch: Annotated[int, Meta(ge=1)] = option(
        10, "Number of evaluations per epoch."
    )


@dataclass(frozen=True)
class OptimizationOptions(OptionGroup):
    """Seeds and hyperparameters."""

    title = "Optimization"

    seeds: list[Annotated[int, Meta(ge=0, lt=2**32)]] = option(
        default_factory=lambda: [1, 2, 3],
        help="Random seeds, one run per seed. The table shows mean and standard deviation.",
        affects_results=False,
    )
    preset: str | None = option(
        None,
        "Hyperparameters of the paper for each task: neobert-4096 or neobert-1024, or a key of "
        "--presets. (default: neobert-4096)",
        metavar="NAME",
        affects_results=False,
    )
    batch_size: Annotated[int, Meta(ge=1)] | None = option(
        None, "Global batch size in sequences. (default: from the preset)"
    )
    learning_rate: Annotated[float, Meta(gt=0)] | None = option(
        None,
        "Peak learning rate. By default --lora-learning-rate with --lora; the value of the preset "
        "if --preset or --grid is passed or the hidden size is at least 768; otherwise 2e-5 * (768 "
        "/ hidden size)^5, at most 1e-3.",
    )
    weight_decay: Annotated[float, Meta(ge=0)] | None = option(
        None, "Weight decay of matrices. (default: from the preset)"
    )
    warmup_ratio: Annotated[float, Meta(ge=0, lt=1)] = option(
        0.06, "Fraction of the steps with linear warmup, before linear decay to 0."
    )
    grid: bool = option(
        False,
        "Search --grid-values with the first seed, then run the best combination with all seeds.",
        affects_results=False,
    )
    presets: Presets = option(
        default_factory=dict,
        help="Hyperparameters of all presets, in a YAML recipe: {preset: {task: {hyperparameter: "
        "value}}}. By default those of recipes/glue.yaml.",
        affects_results=False,
    )
    grid_values: GridValues = option(
        default_factory=dict,
        help="Values for --grid, in a YAML recipe: {hyperparameter: values}. By default the grid "
        "of the paper.",
        affects_results=False,
    )

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in self.presets:
            raise UserError(
                f"`preset` must be one of {', '.join(self.presets)}, got {self.preset!r}."
            )
        for preset in self.presets.values():
            for values in preset.values():
                check_hyperparameters("presets", values)
        check_hyperparameters("grid_values", self.grid_values)


@dataclass(frozen=True)
class GlueLoraOptions(LoraOptions):
    """Low-rank adapters and their hyperparameters."""

    lora_learning_rate: Annotated[float, Meta(gt=0)] = option(
        3e-4, "Peak learning rate with --lora.", affects_results=False
    )
    lora_grid_values: GridValues = option(
        default_factory=dict,
        help="Values for --grid with --lora, in a YAML recipe: {hyperparameter: values}.",
        affects_results=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hyperparameters("lora_grid_values", self.lora_grid_values)


@dataclass(frozen=True)
class GlueOptions:
    """Options of `neobert glue`."""

    model: ModelOptions
    data: DataOptions
    output: OutputOptions = OutputOptions()
    selection: SelectionOptions = SelectionOptions()
    optimization: OptimizationOptions = OptimizationOptions()
    lora: GlueLoraOptions = GlueLoraOptions()
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The name is also that of a directory.
        check_row_name(self.name)

    @property
    def name(self) -> str:
        """Name of the model in the table."""
        # The absolute path of "." has a name.
        return self.output.name or Path(os.path.abspath(self.model.model)).name

    @property
    def row(self) -> str:
        """Row of the table: the name, and how its runs differ from others of this name."""
        notes = []
        if self.data.data != HUB_DATA:
            notes.append(f"data: {Path(self.data.data).name}")
        if self.lora.lora:
            notes.append(f"LoRA r={self.lora.lora_rank}")
        if self.selection.selection == "dev":
            notes.append("selected on dev")
        return self.name + (f" ({', '.join(notes)})" if notes else "")

    def uses_default_rate(self, hidden_size: int | None) -> bool:
        """Return whether the learning rate depends on the hidden size of the encoder.

        The presets were tuned for a hidden size of 768. Their learning rates are not used for a
        smaller encoder, unless a preset was chosen explicitly.
        """
        optimization = self.optimization
        is_small = hidden_size is not None and hidden_size < PRESET_HIDDEN_SIZE
        is_chosen = optimization.preset is not None or optimization.learning_rate is not None
        return is_small and not (is_chosen or self.lora.lora or optimization.grid)

    def combinations(self, task: Task, hidden_size: int | None = None) -> list[Hyperparameters]:
        """Return the hyperparameters of a task: one combination, or with --grid all of them.

        Values from the command line replace those of the preset and the grid.

        Args:
            task: GLUE task.
            hidden_size: Hidden size of the encoder, or None if unknown.

        Raises:
            UserError: If the preset lacks a hyperparameter of the task.
        """
        optimization = self.optimization
        preset = optimization.preset or DEFAULT_PRESET
        # Lowest priority first: preset, rate by hidden size, LoRA, grid. An explicit option wins
        # below.
        values: dict[str, Any] = dict(optimization.presets[preset].get(task.name, {}))
        if hidden_size is not None and self.uses_default_rate(hidden_size):
            from ..training.optimization import default_learning_rate

            values["learning_rate"] = default_learning_rate(hidden_size)
        if self.lora.lora:
            values["learning_rate"] = self.lora.lora_learning_rate
        if optimization.grid:
            values |= self.lora.lora_grid_values if self.lora.lora else optimization.grid_values

        # Each combination of the listed values is one run.
        axes = []
        # An explicit option, even 0, replaces the value of the preset and the values of the grid.
        for name in (f.name for f in fields(Hyperparameters)):
            value = getattr(optimization, name)
            if value is None:
                value = values.get(name)
            if value is None:
                raise UserError(
                    f"the preset {preset!r} has no {name} for {task.name}. Pass "
                    f"--{name.replace('_', '-')}."
                )
            axes.append(value if isinstance(value, list) else [value])
        return [Hyperparameters(*values) for values in itertools.product(*axes)]


@dataclass(frozen=True)
class GlueRun:
    """One fine-tuning run of a task.

    Attributes:
        options: Options of the command.
        task: Task of the run.
        hyperparameters: One of the combinations of the options.
        seed: Random seed.
        model_digest: Digest of the model's weights, configuration and tokenizer.
        rows: Digest of the task's rows.
        start: Name of the MNLI run that the run starts from, or None.
    """

    options: GlueOptions
    task: Task
    hyperparameters: Hyperparameters
    seed: int
    model_digest: str | None = None
    rows: str | None = None
    start: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the run's results depend on, except machine and library versions."""
        # LoRA is identified by its effective settings, so its options without --lora do not
        # matter.
        values = identity(self.options)
        for name in (f.name for f in fields(LoraOptions)):
            del values[name]
        return {
            **values,
            **asdict(self.hyperparameters),
            "task": self.task.name,
            "seed": self.seed,
            "lora": self.options.lora.settings(),
            "trainer": result_options(self.options.trainer),
            "revision": self.model_digest,
            "rows": self.rows,
            "start": self.start,
        }

    @property
    def folder(self) -> Path:
        """Directory of the run: OUTPUT/name/task/hyperparameters and a digest of the settings."""
        # The readable part of the name is not unique, but the digest of all settings is.
        settings: Mapping[str, Any] = self.settings
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        hyperparameters = self.hyperparameters
        parts = [
            f"bs{hyperparameters.batch_size}",
            f"lr{hyperparameters.learning_rate:g}",
            f"wd{hyperparameters.weight_decay:g}",
        ]
        if self.options.lora.lora:
            parts.append(f"lora{self.options.lora.lora_rank}")
        parts += [f"seed{self.seed}", digest]

        row = Path(self.options.output.output) / self.options.name
        return row / self.task.name / "_".join(parts)


GLUE_OPTIONS = OptionParser(
    "neobert glue",
    "Fine-tune an encoder on GLUE with the protocol of the paper, in full or with LoRA, with "
    "several seeds, and write a table of the scores.",
    GlueOptions,
    "neobert glue --task rte --model chandar-lab/NeoBERT",
    trainer_defaults={},
    default_recipes=(RECIPE,),
    # The defaults are those of the recipe.
    trainer_help={
        "num_train_epochs": "Number of training epochs. (default: 10)",
        "lr_scheduler_type": "Learning rate schedule, such as linear, cosine or constant. "
        "(default: linear)",
        "report_to": "Experiment tracker: none, tensorboard, wandb, ... (default: none)",
    },
    trainer_replaced={
        "per_device_train_batch_size": "--batch-size",
        "warmup_steps": "--warmup-ratio",
        "seed": "--seeds",
        **dict.fromkeys(("save_steps", "save_strategy", "eval_steps", "eval_strategy"), ""),
        **TRAINER_FIXED,
    },
)
