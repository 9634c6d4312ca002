"""Which model a result belongs to, so that a resumed evaluation never mixes two models of one
name."""

import hashlib
from pathlib import Path

from .loading import check_model


# What makes the numbers of a model: weights, configuration, tokenizer. A sentence encoder keeps
# those of its other modules one folder down.
_FILES = (
    "*.safetensors",
    "pytorch_model*.bin",
    "*/model.safetensors",
    "*/pytorch_model.bin",
    "config.json",
    "*/config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "*.model",
)


def model_digest(model):
    """Twelve hex digits that change when the weights, the configuration or the tokenizer do.

    Args:
        model: folder with a model, or its name on the Hub.
    Returns:
        of a folder: SHA-256 over these files; of a Hub name: the commit in the local cache;
        "unknown" if neither is there.
    Raises:
        UserError: there is no model in the folder.
    """
    check_model(model)
    folder = Path(model)
    if not folder.is_dir():
        from transformers.utils import cached_file

        found = cached_file(model, "config.json", _raise_exceptions_for_missing_entries=False)
        parts = Path(found).parts if found else ()
        return parts[parts.index("snapshots") + 1][:12] if "snapshots" in parts else "unknown"
    return files_digest({path for pattern in _FILES for path in folder.glob(pattern)})


def known_by(model):
    """What a run knows a model by: a folder by its digest, wherever it lies; a model of the Hub by
    its name and commit."""
    digest = model_digest(model)
    return digest if Path(model).is_dir() else f"{model}@{digest}"


def files_digest(paths):
    """Twelve hex digits of the SHA-256 over the content of files, in the order of their names."""
    return sha256(*sorted(paths))[:12]


def sha256(*paths):
    """SHA-256 over the content of files, 64 hex digits."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
