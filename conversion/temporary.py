"""A raw checkpoint as a Hub folder for as long as this process runs: what starts from weights reads
them in one form."""

import functools
import tempfile
from pathlib import Path

from .architecture import plan
from .config_files import find_config
from .hub_folder import write_config, write_weights
from .locate import open_checkpoint
from .tokenizer import find_tokenizer, write_tokenizer


@functools.cache
def hub_folder_of(checkpoint):
    """A folder with the masked LM of a raw checkpoint in float32, its configuration and tokenizer:
    equal files for an equal checkpoint. It goes when this process ends.

    Args:
        checkpoint: path of a file or folder that `neobert convert` reads.
    Returns:
        tempfile.TemporaryDirectory
    Raises:
        UserError: as `neobert convert`.
    """
    source = open_checkpoint(checkpoint)
    _, given = find_config(source.folders)
    conversion = plan(source.tensors, given, "masked-lm", "float32")
    folder = tempfile.TemporaryDirectory(prefix=f"neobert-{Path(checkpoint).name}-")
    config, path = conversion.config, Path(folder.name)
    tokenizer = find_tokenizer(None, source.folders)
    write_tokenizer(tokenizer, path, config.vocab_size, config.context_length)
    write_config(path, conversion)
    write_weights(path, conversion.written(), "5GB")
    return folder
