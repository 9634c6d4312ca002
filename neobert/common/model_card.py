"""Metadata of model cards: license and base model, which are omitted if they are not known."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import parse_yaml, read_text


LICENSE_HELP = (
    "License of the weights for the model card. By default the license in the model card of the "
    "input model, if it is a local directory."
)
BASE_MODEL_HELP = "Base model for the model card, USER/NAME on the Hub."
# YAML between two lines of three dashes at the top of README.md.
_FRONT_MATTER = re.compile(r"\s*---\r?\n(.*?)\r?\n---\s*$", re.DOTALL | re.MULTILINE)
_KEYS = ("license", "license_name", "license_link", "base_model", "base_model_relation")


def read_card(folder: str | Path) -> dict[str, str]:
    """Return the license and the base model in the model card of a directory.

    Returns:
        The fields of the card's metadata, {} if there is no card or the card cannot be read.
    """
    # An untrusted card may contain anything: invalid UTF-8, invalid YAML, a date like 2001-99-99.
    try:
        text = read_text(Path(folder) / "README.md")
        block = _FRONT_MATTER.match(text)
        card = parse_yaml(block[1]) if block else {}
    except Exception:
        return {}
    if not isinstance(card, dict):
        return {}
    return {key: card[key] for key in _KEYS if isinstance(card.get(key), str)}


def license_metadata(name: str | None, card: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of the license: `name`, or else the license in another card.

    Args:
        name: License, or None.
        card: Result of `read_card`.
    """
    if name:
        return {"license": name}
    return {key: value for key, value in card.items() if key.startswith("license")}


def base_model_metadata(
    name: str | None, model: str | Path | None = None, relation: str = "finetune"
) -> dict[str, str]:
    """Return the metadata of the base model, {} if its name on the Hub is not known.

    Args:
        name: Name on the Hub, or None.
        model: Directory or name on the Hub, which is used if `name` is None.
        relation: Relation to the base model in the terms of the Hub: "finetune", "quantized", ...
    """
    if not name and model is not None:
        # The name of a local directory would be a broken link on the Hub.
        is_hub_name = str(model).count("/") == 1 and not Path(model).exists()
        name = str(model) if is_hub_name else None
    return {"base_model": name, "base_model_relation": relation} if name else {}


def front_matter(**fields: Any) -> str:
    """Return the metadata block at the top of README.md. The fields are texts or lists of texts."""
    # `--help` imports this module for LICENSE_HELP, and must stay fast.
    from huggingface_hub import ModelCardData

    return f"---\n{ModelCardData(**fields).to_yaml()}\n---\n"
