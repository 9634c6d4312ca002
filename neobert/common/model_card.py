"""The metadata of model cards, which the Hub reads: licence and base model are stated where they
are known, and left out elsewhere."""

import re
from pathlib import Path

from .files import parse_yaml, read_text


LICENSE_HELP = (
    "licence of the weights, for the card; by default what the card of a local source says"
)
BASE_MODEL_HELP = "for the card: the model on the Hub that this one was made from, USER/NAME"
_FRONT_MATTER = re.compile(r"\s*---\r?\n(.*?)\r?\n---\s*$", re.DOTALL | re.MULTILINE)
_KEYS = ("license", "license_name", "license_link", "base_model", "base_model_relation")


def read_card(folder):
    """Return the license and base model that the model card of a folder states, {key: text}; {}
    without a card, or if the card cannot be read."""
    try:
        text = read_text(Path(folder) / "README.md")
        block = _FRONT_MATTER.match(text)
        card = (parse_yaml(block[1]) if block else None) or {}
    except Exception:  # of the file, of YAML
        card = {}
    if not isinstance(card, dict):
        card = {}
    return {key: card[key] for key in _KEYS if isinstance(card.get(key), str)}


def licence(name, card):
    """The keys that state the licence: `name`, else those of `card`, as `read_card` has them."""
    stated = {key: card[key] for key in card if key.startswith("license")}
    return {"license": name} if name else stated


def base_model(name, model=None, relation="finetune"):
    """The keys that name the model that this one was made from; {} where its name on the Hub is not
    known.

    Args:
        name: USER/NAME, or None.
        model: a folder or a Hub name, which counts where `name` is None.
        relation: as the Hub has it: "finetune", "quantized", ...
    """
    of_hub = model and model.count("/") == 1 and not Path(model).exists()
    name = name or (model if of_hub else None)
    return {"base_model": name, "base_model_relation": relation} if name else {}


def front_matter(**fields):
    """The metadata at the top of README.md, with the lines around it; each field a text or a list
    of texts."""
    from huggingface_hub import ModelCardData

    return f"---\n{ModelCardData(**fields).to_yaml()}\n---\n"
