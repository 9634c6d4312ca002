"""Fingerprints of models and tokenizers.

A resumed evaluation never mixes two models of one name.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .loading import check_model


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Files that determine the outputs of a model: weights, configuration and tokenizer. The modules of
# a sentence encoder after its transformer have theirs in subdirectories, such as 2_Dense.
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


def model_digest(model: str | Path) -> str:
    """Return twelve hex digits that identify the weights, the configuration and the tokenizer.

    Args:
        model: Directory of a model, or its name on the Hub.

    Returns:
        SHA-256 over the files of a directory, or the commit of a Hub model in the local cache, or
        "unknown" if the cache does not contain it.

    Raises:
        UserError: If the directory contains no model.
    """
    check_model(model)
    folder = Path(model)
    if not folder.is_dir():
        # The import takes seconds, and a directory does not need it.
        from transformers.utils import cached_file

        path = cached_file(model, "config.json", _raise_exceptions_for_missing_entries=False)
        parts = Path(path).parts if path else ()
        if "snapshots" not in parts:
            return "unknown"
        # The cache of the Hub: models--USER--NAME/snapshots/COMMIT/config.json
        return parts[parts.index("snapshots") + 1][:12]
    return files_digest({path for pattern in _FILES for path in folder.glob(pattern)})


def model_fingerprint(model: str | Path) -> str:
    """Return the fingerprint of a model: the digest of a folder, or Hub name and commit."""
    digest = model_digest(model)
    return digest if Path(model).is_dir() else f"{model}@{digest}"


def files_digest(paths: Iterable[str | Path]) -> str:
    """Return twelve hex digits of the SHA-256 over files, in the order of their names."""
    return sha256(*sorted(map(Path, paths)))[:12]


def sha256(*paths: str | Path) -> str:
    """Return the SHA-256 over the content of files, 64 hex digits."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            # Weights may be larger than the memory.
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return 16 hex digits that identify a tokenizer.

    They are a digest of the vocabulary and of the tokens of a probe sentence, which depend on the
    normalization.
    """
    # The probe has accents, capital letters and digits, which normalizers treat differently.
    probe = tokenizer("Ünïcode, CamelCase and 3.14 numbers!", add_special_tokens=True)["input_ids"]
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha1(json.dumps([vocabulary, probe]).encode()).hexdigest()[:16]
