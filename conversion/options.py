"""Options of `neobert convert`. Imports neither torch nor transformers."""

import re
from dataclasses import dataclass

from ..common.arguments import Arguments, Options, option
from ..common.cards import BASE_MODEL_HELP, LICENSE_HELP
from ..common.errors import UserError
from .heads import HEADS


_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def size_in_bytes(text):
    """Bytes of a size as "5GB", "500 MB" or "2GiB"; UserError for anything else."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([KMGT]?i?B)", text, re.IGNORECASE)
    size = int(float(match.group(1)) * _UNITS.get(match.group(2).upper(), 0)) if match else 0
    if size < 1:
        raise UserError(f"--max-shard-size takes a size as 5GB or 500MB, but {text!r} was given.")
    return size


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
    step: str | None = option(
        None, "which step of a run, a number or latest; by default the latest"
    )
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
    max_shard_size: str = option("5GB", "largest weight file")
    license: str | None = option(None, LICENSE_HELP)
    base_model: str | None = option(None, BASE_MODEL_HELP)
    force: bool = option(False, "replace a folder that this command wrote")


@dataclass(kw_only=True)
class HubOptions(Arguments):
    """The upload."""

    push_to_hub: str | None = option(None, "upload to USER/NAME afterwards")
    private: bool = option(False, "create that repository private")
    revision: str | None = option(None, "branch to upload to")


@dataclass(kw_only=True)
class ConvertArguments(HubOptions, FolderOptions, CheckpointOptions):
    """Options of `neobert convert`."""

    def __post_init__(self):
        super().__post_init__()
        self.shard_bytes = size_in_bytes(self.max_shard_size)
        if self.step not in (None, "latest") and not (
            self.step.isascii() and self.step.isdigit() and len(self.step) < 19
        ):
            raise UserError(f"--step takes a number or latest, but {self.step!r} was given.")
        if not self.push_to_hub and (self.private or self.revision):
            raise UserError("--private and --revision go with --push-to-hub REPO.")
        if self.sentence_transformers and self.tokenizer == "none":
            raise UserError(
                "--sentence-transformers needs a tokenizer, but --tokenizer none was given."
            )
        if self.sentence_transformers and self.head not in (None, "base", "masked-lm"):
            raise UserError("--sentence-transformers goes with --head masked-lm or base.")


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
