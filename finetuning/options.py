"""Options of `neobert glue`, the protocol that recipes/glue.yaml holds, and what identifies one
run. Imports neither torch nor transformers."""

import itertools
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..common.arguments import Arguments, Options, check_values, option, typed
from ..common.constants import RECIPES
from ..common.errors import UserError
from ..training.lora import LoraOptions
from ..training.options import number_options
from .glue_tasks import HUB_DATA, metric_function


RECIPE = RECIPES / "glue.yaml"
HYPER_PARAMETERS = {"batch_size": int, "learning_rate": float, "weight_decay": float}


@dataclass(kw_only=True)
class GlueData(Arguments):
    """What is fine-tuned on what."""

    task: str = option(
        help="all, or a comma-separated list of mnli, qnli, qqp, rte, sst2, mrpc, cola, stsb"
    )
    model: str = option(help="model folder, or name on the Hub; any encoder")
    data: str = option(
        HUB_DATA, "name on the Hub, or a folder with <task>/<split>.jsonl|csv|tsv|parquet"
    )
    output: str = option("runs/glue", "folder of the runs and the table")
    name: str | None = option(None, "row of the table; default: last part of --model")
    tokenizer: str | None = option(None, "folder or Hub name; default: the model's")
    trust_remote_code: bool = option(
        False, "run Python code that the model brings (NeoBERT itself needs none)"
    )
    seeds: list[int] = option(
        default_factory=lambda: [1, 2, 3],
        help="the table gives mean and standard deviation",
        least=0,
        below=2**32,
    )
    grid: bool = option(
        False, "search grid_values with the first seed, then run the best with all seeds"
    )
    start: str = option(
        "auto",
        "RTE, STS-B, MRPC, QNLI start from: auto (best MNLI run if there is one), mnli "
        "(required), none",
        choices=("auto", "mnli", "none"),
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
    metric: str = option(
        "mean",
        "what stops and selects: mean of the task's metrics (as in the paper), or the name of one "
        "of them",
    )
    patience: int = option(15, "evaluations without progress until a run ends", above=0)
    max_eval_interval: int = option(500, "most steps between evaluations", above=0)
    evaluations_per_epoch: int = option(10, above=0)
    max_train_samples: int | None = option(None, "a random subset, for a quick look", above=0)
    max_eval_samples: int | None = option(None, "the first rows, for a quick look", above=0)
    keep_models: str = option(
        "best", "of each task; MNLI's best is always kept", choices=("best", "all", "none")
    )


@dataclass(kw_only=True)
class GlueHyperParameters(Arguments):
    """Hyper-parameters; the defaults are those of a preset."""

    preset: str = option("neobert-4096", "one of presets")
    batch_size: int | None = option(
        None, "of all processes together; default: the preset's", above=0
    )
    learning_rate: float | None = option(
        None, "default: the preset's, or lora_learning_rate", above=0
    )
    weight_decay: float | None = option(None, "default: the preset's", least=0)
    warmup_ratio: float = option(
        0.06, "share of the steps, then linear decay to 0", least=0, below=1
    )
    classifier_pooling: str | None = option(
        None, "for NeoBERT; default: what its config.json says", choices=("cls", "mean")
    )
    head_dropout: float = option(0.1, least=0, below=1)
    presets: dict[str, dict[str, dict]] | None = option(None, "{preset: {task: hyper-parameters}}")
    grid_values: dict[str, list] | None = option(None, "{hyper-parameter: values}")


@dataclass(kw_only=True)
class GlueLora(LoraOptions):
    """Low-rank adapters in GLUE."""

    lora_learning_rate: float = option(3e-4, above=0)
    lora_grid_values: dict[str, list] | None = option(
        None, "{hyper-parameter: values} for --grid with --lora"
    )


@dataclass(kw_only=True)
class GlueArguments(GlueLora, GlueHyperParameters, GlueSelection, GlueData):
    """Options of `neobert glue`; recipes/glue.yaml holds the paper's values."""

    def __post_init__(self):
        super().__post_init__()
        self.name = self.name or Path(os.path.abspath(self.model)).name or "model"
        if not self.name.strip("."):
            raise UserError(
                f"name must be that of a folder below the output, but {self.name!r} was given"
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(
                f"seeds must be different whole numbers, such as 1 2 3, but {self.seeds} was given"
            )
        if self.preset not in (self.presets or {}):
            raise UserError(
                f"there is no preset {self.preset!r}; choose from "
                f"{', '.join(self.presets or {}) or 'none'}"
            )

    def check_metric(self, task):
        """Raises UserError when `metric` is not one of `task`."""
        if self.metric != "mean" and self.metric not in task.metrics:
            metric_function(self.metric)  # names those that exist
            raise UserError(
                f"{task.name} has no metric {self.metric!r}; choose mean, or from "
                f"{', '.join(task.metrics)}"
            )

    def combinations(self, task):
        """Hyper-parameters of `task`: one dictionary, or with --grid all of them. What was given by
        hand counts everywhere."""
        values = dict(self.presets[self.preset].get(task.name) or {})
        if self.lora:
            values["learning_rate"] = self.lora_learning_rate
        axes = {
            **dict.fromkeys(HYPER_PARAMETERS, []),
            **{key: [value] for key, value in values.items()},
        }
        if self.grid:
            axes |= (self.lora_grid_values if self.lora else self.grid_values) or {}
        hints = {key: list[kind] for key, kind in HYPER_PARAMETERS.items()}
        where = f"of {task.name} in presets or grid_values"
        axes = typed(axes, hints, where, f"allowed are {', '.join(hints)}")
        bounds = {f.name: f.metadata["bounds"] for f in fields(self) if f.name in axes}
        check_values(axes, bounds, f" {where}")
        for key in HYPER_PARAMETERS:
            given = getattr(self, key)
            if given is not None:
                axes[key] = [given]
            if not axes[key]:
                raise UserError(
                    f"preset {self.preset!r} has no {key} for {task.name}; give "
                    f"--{key.replace('_', '-')}"
                )
        return [
            dict(zip(HYPER_PARAMETERS, found))
            for found in itertools.product(*(axes[key] for key in HYPER_PARAMETERS))
        ]


@dataclass(frozen=True)
class RunSettings:
    """Everything that a run's numbers depend on, machine and library versions apart.

    Attributes:
        revision: of the weights. rows: digest of the data's rows. start: name of the MNLI run that
            it starts from, or None.
        trainer: options of transformers' Trainer.
    """

    task: str
    revision: str
    data: str
    seed: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    warmup_ratio: float
    patience: int
    max_eval_interval: int
    evaluations_per_epoch: int
    max_length: int
    head_dropout: float
    selection: str
    heldout_fraction: float
    heldout_rows: int
    max_train_samples: int | None
    max_eval_samples: int | None
    metric: str
    tokenizer: str | None
    classifier_pooling: str | None
    lora: dict | None
    trainer: dict
    rows: str = ""
    start: str | None = None

    @classmethod
    def of(cls, arguments, trainer, task, hyper, seed, **more):
        """One run of `task` with the hyper-parameters `hyper`; `more`: revision, rows, start."""
        names = cls.__dataclass_fields__.keys() & vars(arguments).keys() - {
            "lora",
            "task",
            "start",
            *HYPER_PARAMETERS,
        }
        shared = {name: getattr(arguments, name) for name in names}
        return cls(
            task=task.name,
            seed=seed,
            lora=arguments.lora_settings(),
            trainer=number_options(trainer),
            **hyper,
            **shared,
            **more,
        )

    def key(self):
        """The settings without the seed: runs that are repetitions of each other share it."""
        return json.dumps(
            {name: value for name, value in asdict(self).items() if name != "seed"}, sort_keys=True
        )


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
