"""Conversion of a raw checkpoint that a training run is initialized from."""

from pathlib import Path

from ..common.folders import new_folder
from .architecture import plan
from .config_files import find_config
from .hub_folder import HubFolder
from .locate import open_checkpoint
from .tokenizer import find_tokenizer


def write_initial_model(checkpoint: str | Path, folder: str | Path) -> None:
    """Write the masked language model of a raw checkpoint in float32, with its tokenizer.

    Equal checkpoints result in equal files.

    Args:
        checkpoint: File or directory that `neobert convert` reads.
        folder: New directory; it appears complete or not at all.

    Raises:
        UserError: If the checkpoint cannot be converted.
    """
    # Training continues from the most precise weights, with the masked language model's decoder.
    source = open_checkpoint(checkpoint)
    _, fields = find_config(source.folders)
    conversion = plan(source.tensors, fields, "masked-lm", "float32")
    tokenizer = find_tokenizer(None, source.folders)
    with new_folder(folder) as path:
        HubFolder(conversion, tokenizer).write_model(path)
