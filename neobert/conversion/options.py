"""Options of `neobert convert`. Imports neither torch nor transformers."""

from dataclasses import dataclass

from ..common.arguments import Arguments, Options, option
from ..common.errors import UserError
from ..common.model_card import BASE_MODEL_HELP, LICENSE_HELP
from .heads import HEADS


@dataclass(kw_only=True)
class CheckpointOptions(Arguments):
    """What is read."""

    checkpoint: str = option(help="file, folder of a step, or folder of a run", positional=True)
    output: str = option(help="folder to write; it must not exist", positional=True)
    config: str | None = option(
        None,
        "JSON, YAML or Hydra file, or a part of one; by default the one beside the checkpoint, "
        "then the shapes",
    )
    step: int | None = option(None, "which step of a run; by default the latest", least=0)
    head: str | None = option(None, "by default what the checkpoint has", choices=tuple(HEADS))
    tokenizer: str | None = option(
        None,
        "folder, or none; by default the files beside the checkpoint, then the BERT uncased "
        "tokenizer",
    )


@dataclass(kw_only=True)
class FolderOptions(Arguments):
    """What is written."""

    dtype: str | None = option(
        None,
        "by default the checkpoint's own; float32 if it mixes several",
        choices=("float32", "bfloat16", "float16"),
    )
    sentence_transformers: bool = option(False, "also write modules.json with mean pooling")
    max_shard_size: str = option("5GB", "largest weight file, as 500MB")
    license: str | None = option(None, LICENSE_HELP)
    base_model: str | None = option(None, BASE_MODEL_HELP)


@dataclass(kw_only=True)
class ConvertArguments(FolderOptions, CheckpointOptions):
    """Options of `neobert convert`."""

    def __post_init__(self):
        super().__post_init__()
        if self.sentence_transformers and self.tokenizer == "none":
            raise UserError(
                "--sentence-transformers needs a tokenizer, but --tokenizer none was given."
            )


OPTIONS = {
    "convert": Options(
        "neobert convert",
        "A raw training checkpoint (DeepSpeed, FSDP, accelerate, Trainer, DDP, torch) to a folder "
        "for the Hugging Face Hub. Code in a\n"
        "checkpoint is never run. The output is complete or absent.",
        (ConvertArguments,),
        "neobert convert examples/checkpoint runs/converted --sentence-transformers",
    )
}
