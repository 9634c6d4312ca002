"""Options of `neobert convert`. Imports neither torch nor transformers."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from ..common.errors import UserError
from ..common.model_card import BASE_MODEL_HELP, LICENSE_HELP
from ..common.options import OptionGroup, OptionParser, option
from .heads import HeadName


# Precisions of the weights.
WeightDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class CheckpointOptions(OptionGroup):
    """Checkpoint to read, and how to interpret it."""

    title = "Checkpoint"

    checkpoint: str = option(
        help="Checkpoint to convert: a file, the directory of a training step, or the directory of "
        "a run.",
        positional=True,
    )
    output: str = option(help="Output directory. It must not exist.", positional=True)
    config: str | None = option(
        None,
        "JSON, YAML or Hydra file with the configuration of the model. By default the file next to "
        "the checkpoint. Missing fields are inferred from the shapes of the weights.",
        metavar="PATH",
    )
    step: Annotated[int, Meta(ge=0)] | None = option(
        None, "Training step to convert, if CHECKPOINT is a run. By default the latest."
    )
    head: HeadName | None = option(
        None, "Type of the model's head. By default that of the checkpoint."
    )
    tokenizer: str | None = option(
        None,
        "Directory of the tokenizer, or none to omit it. By default the tokenizer next to the "
        "checkpoint, else the uncased tokenizer of BERT.",
        metavar="PATH",
    )


@dataclass(frozen=True)
class FolderOptions(OptionGroup):
    """Content of the Hub folder."""

    title = "Output"

    dtype: WeightDtype | None = option(
        None,
        "Precision of the weights. By default that of the checkpoint, or float32 if the "
        "checkpoint mixes several.",
    )
    sentence_transformers: bool = option(
        False, "Add the modules of a sentence-transformers model with mean pooling."
    )
    max_shard_size: str = option(
        "5GB", "Maximum size of a weight file, such as 500MB.", metavar="SIZE"
    )
    license: str | None = option(None, LICENSE_HELP, metavar="NAME")
    base_model: str | None = option(None, BASE_MODEL_HELP, metavar="NAME")

    def __post_init__(self) -> None:
        if not re.fullmatch("[1-9][0-9]*(KB|MB|GB|TB)", self.max_shard_size):
            raise UserError(
                "`max_shard_size` must be a number with KB, MB, GB or TB, such as 500MB, got "
                f"{self.max_shard_size!r}."
            )


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `neobert convert`."""

    source: CheckpointOptions
    folder: FolderOptions = FolderOptions()

    def __post_init__(self) -> None:
        """Check options that depend on each other."""
        if self.folder.sentence_transformers and self.source.tokenizer == "none":
            raise UserError(
                "`--sentence-transformers` needs a tokenizer, got --tokenizer none. Omit one of "
                "the two options."
            )


OPTIONS = {
    "convert": OptionParser(
        "neobert convert",
        "Convert a raw training checkpoint (DeepSpeed, FSDP, accelerate, Trainer, DDP, torch) to "
        "a folder for the Hugging Face Hub. Code in a checkpoint is never executed.",
        ConvertOptions,
        "neobert convert examples/checkpoint runs/converted --sentence-transformers",
    )
}
