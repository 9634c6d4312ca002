"""Options of `neobert glue`, the protocol that recipes/glue.yaml holds, and what identifies one
run. Imports neither torch nor transformers."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from ..common.arguments import Arguments, Options, option
from ..common.constants import RECIPES
from ..common.errors import UserError
from ..common.output import run_settings
from ..training.lora import LoraOptions
from ..training.options import number_options
from .tasks import HUB_DATA


RECIPE = RECIPES / "glue.yaml"
DEFAULT_PRESET = "neobert-4096"
PRESET_HIDDEN_SIZE = 768  # of the models that the presets were tuned for
HYPER_PARAMETERS = ("batch_size", "learning_rate", "weight_decay")


@dataclass(kw_only=True)
class GlueData(Arguments):
    """What is fine-tuned on what."""

    task: str = option(
        help="all, or a comma-separated list of mnli, qnli, qqp, rte, sst2, mrpc, cola, stsb"
    )
    model: str = option(help="model folder, or name on the Hub; any encoder", free=True)
    data: str = option(
        HUB_DATA,
        "name on the Hub, or a folder with <task>/<split>.jsonl|csv|tsv|parquet",
        free=True,  # known by its rows
    )
    output: str = option("runs/glue", "folder of the runs and the table", free=True)
    name: str | None = option(None, "row of the table; default: last part of --model", free=True)
    trust_remote_code: bool = option(
        False, "run Python code that the model brings (NeoBERT itself needs none)", free=True
    )
    seeds: list[int] = option(
        default_factory=lambda: [1, 2, 3],
        help="the table gives mean and standard deviation",
        least=0,
        below=2**32,
        free=True,
    )
    grid: bool = option(
        False,
        "search grid_values with the first seed, then run the best with all seeds",
        free=True,
    )
    start: str = option(
        "auto",
        "RTE, STS-B, MRPC, QNLI start from: auto (best MNLI run if there is one), none",
        choices=("auto", "none"),
        free=True,
    )
    max_length: int = option(512, "tokens; a pair has 3 special ones", least=8, most=2**31 - 1)


@dataclass(kw_only=True)
class GlueSelection(Arguments):
    """What stops and selects a run."""

    selection: str = option(
        "heldout",
        "what stops and selects: training rows, or dev as published",
        choices=("heldout", "dev"),
    )
    heldout_fraction: float = option(0.1, "share of the training rows", least=0, below=1)
    heldout_rows: int = option(2000, "at most so many of them", above=0)
    patience: int = option(15, "evaluations without progress until a run ends", above=0)
    max_eval_interval: int = option(500, "most steps between evaluations", above=0)
    evaluations_per_epoch: int = option(10, above=0)
    keep_models: str = option(
        "best",
        "best: those of a run that is better than the runs of its task before it; or all",
        choices=("best", "all"),
        free=True,
    )


@dataclass(kw_only=True)
class GlueHyperParameters(Arguments):
    """Hyper-parameters; the defaults are those of a preset."""

    preset: str | None = option(
        None,
        "Hyperparameters of the paper for each task: neobert-4096 or neobert-1024, or a key of "
        "--presets. (default: neobert-4096)",
        free=True,
    )
    batch_size: int | None = option(
        None, "Global batch size in sequences. (default: from the preset)", above=0
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate. (default: from the preset; without --preset, 2e-5 * (768 / "
        "hidden size)^5, at most 1e-3, for encoders with a hidden size below 768; with --lora, "
        "--lora-learning-rate)",
        above=0,
    )
    weight_decay: float | None = option(
        None, "Weight decay of matrices. (default: from the preset)", least=0
    )
    warmup_ratio: float = option(
        0.06, "share of the steps, then linear decay to 0", least=0, below=1
    )
    classifier_pooling: str | None = option(
        None, "for NeoBERT; default: what its config.json says", choices=("cls", "mean")
    )
    head_dropout: float = option(0.1, least=0, below=1)
    presets: dict[str, dict[str, dict[str, int | float]]] = option(
        default_factory=dict, help="{preset: {task: hyper-parameters}}", free=True
    )
    grid_values: dict[str, list[int | float]] = option(
        default_factory=dict, help="{hyper-parameter: values}", free=True
    )


@dataclass(kw_only=True)
class GlueLora(LoraOptions):
    """Low-rank adapters in GLUE."""

    lora_learning_rate: float = option(3e-4, above=0)
    lora_grid_values: dict[str, list[int | float]] = option(
        default_factory=dict, help="{hyper-parameter: values} for --grid with --lora"
    )


@dataclass(kw_only=True)
class GlueArguments(GlueLora, GlueHyperParameters, GlueSelection, GlueData):
    """Options of `neobert glue`; recipes/glue.yaml holds the paper's values."""

    def __post_init__(self):
        super().__post_init__()
        self.name = self.name or Path(os.path.abspath(self.model)).name
        if self.preset is not None and self.preset not in self.presets:
            raise UserError(
                f"`preset` must be one of {', '.join(self.presets)}, got {self.preset!r}."
            )

    @property
    def row(self):
        """The row of the table: the name, and what sets its runs apart from others of this name."""
        notes = []
        if self.data != HUB_DATA:
            notes.append(f"data: {Path(self.data).name}")
        if self.lora:
            notes.append(f"LoRA r={self.lora_rank}")
        if self.selection == "dev":
            notes.append("selected on dev")
        return self.name + (f" ({', '.join(notes)})" if notes else "")

    @property
    def preset_name(self) -> str:
        """The chosen preset, or the default one."""
        return self.preset or DEFAULT_PRESET

    def uses_default_rate(self, hidden_size: int | None) -> bool:
        """Return whether the learning rate depends on the hidden size of the encoder.

        The presets were tuned for a hidden size of 768. Their learning rates are not used for a
        smaller encoder, unless a preset was chosen explicitly.
        """
        is_small = hidden_size is not None and hidden_size < PRESET_HIDDEN_SIZE
        is_chosen = self.preset is not None or self.learning_rate is not None
        return is_small and not (is_chosen or self.lora or self.grid)

    def combinations(self, task, hidden_size: int | None = None):
        """Return the hyperparameters of `task`: one dictionary, or with --grid all combinations.

        Values from the command line replace those of the preset and the grid.

        Args:
            hidden_size: Hidden size of the encoder, or None if unknown.
        """
        values = dict(self.presets[self.preset_name].get(task.name, {}))
        if self.uses_default_rate(hidden_size):
            from ..training.optimization import default_learning_rate

            values["learning_rate"] = default_learning_rate(hidden_size)
        if self.lora:
            values["learning_rate"] = self.lora_learning_rate
        if self.grid:
            values |= self.lora_grid_values if self.lora else self.grid_values
        axes = []
        for key in HYPER_PARAMETERS:
            value = values.get(key) if getattr(self, key) is None else getattr(self, key)
            if value is None:
                raise UserError(
                    f"the preset {self.preset_name!r} has no {key} for {task.name}. Pass "
                    f"--{key.replace('_', '-')}."
                )
            axes.append(value if isinstance(value, list) else [value])
        return [dict(zip(HYPER_PARAMETERS, values)) for values in itertools.product(*axes)]

    def settings(self, trainer, task, hyper, seed, **more):
        """Everything that the numbers of one run depend on, machine and library versions apart.

        Args:
            trainer: options of transformers' Trainer.
            hyper: one of `combinations`.
            more: revision (of the weights) and rows, digests; start, the name of the MNLI run that
                it starts from, or None.
        """
        own = {name: v for name, v in run_settings(self).items() if not name.startswith("lora")}
        return {
            **own,
            **hyper,
            "task": task.name,
            "seed": seed,
            "lora": self.lora_settings(),
            "trainer": number_options(trainer),
            **more,
        }


class GlueOptions(Options):
    """Reads the protocol of recipes/glue.yaml before what is given."""

    def read(self, argv):
        return super().read([str(RECIPE), *argv])


OPTIONS = {
    "glue": GlueOptions(
        "neobert glue",
        "The paper's GLUE protocol for any encoder, full or LoRA, with several seeds, and its "
        "table.",
        (GlueArguments,),
        "neobert glue --task rte --model chandar-lab/NeoBERT",
        {},
    )
}
