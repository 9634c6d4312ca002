"""A raw checkpoint as a Hub folder for a run that starts from it."""

from ..common.folders import new_folder
from .architecture import plan
from .config_files import find_config
from .hub_folder import write_config, write_weights
from .locate import open_checkpoint
from .tokenizer import find_tokenizer, write_tokenizer


def write_start(checkpoint, folder):
    """Writes the masked LM of a raw checkpoint in float32, its configuration and tokenizer: equal
    files for an equal checkpoint.

    Args:
        checkpoint: path of a file or folder that `neobert convert` reads.
        folder: new; complete or not there.
    Raises:
        UserError: as `neobert convert`.
    """
    source = open_checkpoint(checkpoint)
    _, values = find_config(source.folders)
    conversion = plan(source.tensors, values, "masked-lm", "float32")
    with new_folder(folder) as path:
        config = conversion.config
        tokenizer = find_tokenizer(None, source.folders)
        write_tokenizer(tokenizer, path, config.vocab_size, config.context_length)
        write_config(path, conversion)
        write_weights(path, conversion.written(), "5GB")
