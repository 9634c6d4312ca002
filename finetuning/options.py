"""Options of `neobert glue`, the protocol that recipes/glue.yaml holds, and what identifies one
run. Imports neither torch nor transformers."""

import itertools
import os
from dataclasses import dataclass, fields
from pathlib import Path

from ..common.arguments import Arguments, Options, check_values, option, typed
from ..common.constants import RECIPES
from ..common.errors import UserError
from ..common.output import run_settings
from ..training.lora import LoraOptions
from ..training.options import number_options
from .glue_tasks import HUB_DATA, METRICS


RECIPE = RECIPES / "glue.yaml"
HYPER_PARAMETERS = {"batch_size": int, "learning_rate": float, "weight_decay": float}


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
    tokenizer: str | None = option(
        None,
        "folder or Hub name; default: the model's",
        free=True,  # known by its digest
    )
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
        "RTE, STS-B, MRPC, QNLI start from: auto (best MNLI run if there is one), mnli "
        "(required), none",
        choices=("auto", "mnli", "none"),
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
    metric: str = option(
        "mean",
        "what stops and selects: mean of the task's metrics, as in the paper, or one of them",
        choices=("mean", *METRICS),
    )
    patience: int = option(15, "evaluations without progress until a run ends", above=0)
    max_eval_interval: int = option(500, "most steps between evaluations", above=0)
    evaluations_per_epoch: int = option(10, above=0)
    keep_models: str = option(
        "best",
        "of each task; MNLI's best is always kept",
        choices=("best", "all", "none"),
        free=True,
    )


@dataclass(kw_only=True)
class GlueHyperParameters(Arguments):
    """Hyper-parameters; the defaults are those of a preset."""

    preset: str = option("neobert-4096", "one of presets", free=True)
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
    presets: dict[str, dict[str, dict]] | None = option(
        None, "{preset: {task: hyper-parameters}}", free=True
    )
    grid_values: dict[str, list] | None = option(None, "{hyper-parameter: values}", free=True)


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

    def combinations(self, task):
        """Hyper-parameters of `task`: one dictionary, or with --grid all of them. What was given by
        hand counts everywhere."""
        values = dict(self.presets[self.preset].get(task.name) or {})
        if self.lora:
            values["learning_rate"] = self.lora_learning_rate
        axes = {key: [value] for key, value in values.items()}
        if self.grid:
            axes |= (self.lora_grid_values if self.lora else self.grid_values) or {}
        hints = {key: list[kind] for key, kind in HYPER_PARAMETERS.items()}
        where = f"of {task.name} in presets or grid_values"
        axes = typed(axes, hints, where, f"allowed are {', '.join(hints)}")
        check_values(axes, {f.name: f.metadata["bounds"] for f in fields(self)}, f" {where}")
        for key in HYPER_PARAMETERS:
            if getattr(self, key) is not None:
                axes[key] = [getattr(self, key)]
            if not axes.get(key):
                raise UserError(
                    f"preset {self.preset!r} has no {key} for {task.name}; give "
                    f"--{key.replace('_', '-')}"
                )
        return [
            dict(zip(HYPER_PARAMETERS, values))
            for values in itertools.product(*(axes[key] for key in HYPER_PARAMETERS))
        ]

    def settings(self, trainer, task, hyper, seed, **more):
        """Everything that the numbers of one run depend on, machine and library versions apart.

        Args:
            trainer: options of transformers' Trainer.
            hyper: one of `combinations`.
            more: revision (of the weights), tokenizer and rows, digests; start, the name of the
                MNLI run that it starts from, or None.
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
