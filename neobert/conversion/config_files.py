"""The configuration beside a checkpoint: config.json of a Hub folder, a YAML file, or the authors'
Hydra configuration."""

import inspect
from pathlib import Path

from ..common.errors import UserError
from ..common.files import read_json, read_yaml
from ..configuration_neobert import ALIASES, NeoBERTConfig


# What is taken from a file: the arguments of NeoBERTConfig, names of the authors' training code,
# labels, and the class of the head.
FIELDS = (set(inspect.signature(NeoBERTConfig.__init__).parameters) - {"self", "kwargs"}) | {
    *ALIASES,
    *("ngpt", "num_labels", "id2label", "label2id", "problem_type", "architectures"),
}
_FILES = ("config.json", "config.yaml", "config.yml", ".hydra/config.yaml")


def find_config(folders):
    """The innermost configuration file with any of FIELDS: (path, fields), or (None, {})."""
    for path in (folder / name for folder in folders for name in _FILES):
        if path.is_file() and (fields := read_config(path, strict=False)):
            return path, fields
    return None, {}


def read_config(path, strict=True):
    """The model's fields in a JSON or YAML file: at its top, or in the `model` and `tokenizer`
    sections of a Hydra configuration.

    Args:
        path: the file.
        strict: refuse a file that has none of FIELDS.
    Raises:
        UserError: not readable, not a mapping, or the configuration of another model.
    """
    path = Path(path)
    data = read_json(path) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(data, dict):
        raise UserError(f"the configuration {path} should be a mapping of names to values.")
    kind = data.get("model_type", "neobert")
    if kind != "neobert":
        raise UserError(f"{path} is the configuration of another model, {kind!r:.80}.")
    fields = {}
    for section, names in (
        (data.get("tokenizer"), {"max_length", "vocab_size"}),
        (data, FIELDS),
        (data.get("model"), FIELDS),
    ):
        if isinstance(section, dict):
            values = {name: section[name] for name in names & section.keys()}
            fields |= {name: value for name, value in values.items() if value is not None}
    # YAML's aliases may hold each other: what is nested is endless when it is written out.
    for name, value in fields.items():
        parts = value.values() if isinstance(value, dict) else value
        is_nested = isinstance(value, (dict, list)) and any(
            isinstance(part, (dict, list)) for part in parts
        )
        if is_nested:
            raise UserError(f"{path}: {name} should be a value, or a list or mapping of values.")
    if strict and not fields:
        raise UserError(
            f"{path} has no field of a NeoBERT configuration (hidden_size, num_attention_heads, "
            "...)."
        )
    return fields
