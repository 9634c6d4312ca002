"""Configuration of a checkpoint: config.json, a YAML file, or a Hydra configuration."""

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..common.files import read_json, read_yaml
from ..configuration_neobert import ALIASES, NeoBERTConfig


# Fields that are read from a file: the arguments of NeoBERTConfig, their names in BERT and in the
# training code of the authors, the labels, and the class of the head.
FIELDS = (set(inspect.signature(NeoBERTConfig.__init__).parameters) - {"self", "kwargs"}) | {
    *ALIASES,
    *NeoBERTConfig.attribute_map,
    *(
        "masked_lm_logits",
        "ngpt",
        "num_labels",
        "id2label",
        "label2id",
        "problem_type",
        "architectures",
    ),
}
_FILES = ("config.json", "config.yaml", "config.yml", ".hydra/config.yaml")


def find_config(folders: Iterable[Path]) -> tuple[Path | None, dict[str, Any]]:
    """Return the path and the fields of the first configuration file that has any of `FIELDS`.

    Args:
        folders: Directories to search, in this order.

    Returns:
        Path and fields, or `(None, {})` if there is no such file.
    """
    for folder in folders:
        for name in _FILES:
            path = folder / name
            # A run may have other files of this name, such as the configuration of its optimizer.
            fields = read_config(path, strict=False) if path.is_file() else {}
            if fields:
                return path, fields
    return None, {}


def read_config(path: str | Path, strict: bool = True) -> dict[str, Any]:
    """Read the fields of the model from a JSON or YAML file.

    The fields are at the top of the file, or in the sections `model` and `tokenizer` of a Hydra
    configuration.

    Args:
        path: File to read.
        strict: Whether to refuse a file that has none of `FIELDS`.

    Raises:
        UserError: If the file cannot be read, does not contain a mapping, or is the configuration
            of another model.
    """
    path = Path(path)
    data = read_json(path) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(data, dict):
        raise UserError(f"{path} must be a mapping of names to values, got {type(data).__name__}.")
    # Recipes of training code have no model_type, but files of transformers always have one.
    model_type = data.get("model_type", "neobert")
    if model_type != "neobert":
        raise UserError(f"{path} must have the model_type neobert, got {model_type!r:.80}.")

    # Later sections take precedence. The section of the tokenizer contains the maximum length that
    # the model was trained with.
    fields: dict[str, Any] = {}
    sections = (
        (data.get("tokenizer"), {"max_length", "vocab_size"}),
        (data, FIELDS),
        (data.get("model"), FIELDS),
    )
    for section, names in sections:
        if isinstance(section, dict):
            values = {name: section[name] for name in names & section.keys()}
            fields |= {name: value for name, value in values.items() if value is not None}

    # The aliases of YAML can be recursive: writing out such a nested value would never end.
    for name, value in fields.items():
        if _is_nested(value):
            raise UserError(
                f"{name} in {path} must be a value, or a list or mapping of values, got a nested "
                "one."
            )
    if strict and not fields:
        raise UserError(
            f"{path} must have a field of a NeoBERT configuration (hidden_size, "
            "num_attention_heads, ...), got none."
        )
    return fields


def _is_nested(value: object) -> bool:
    """Return whether a list or mapping contains lists or mappings."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)
