"""The model that a run trains: freshly initialised, or from the weights of another run."""

import json
from pathlib import Path

import torch
from transformers import set_seed
from transformers.utils import logging

from ..common.checkpoints import newest_complete
from ..common.errors import UserError, one_line
from ..configuration_neobert import NeoBERTConfig
from ..modeling_neobert import NeoBERTForMaskedLM


logger = logging.get_logger(__name__)

# Names that NeoBERTConfig also understands, and the fields that they set.
_ALIASES = {
    "dropout": ("attention_dropout", "hidden_dropout"),
    "dropout_prob": ("attention_dropout", "hidden_dropout"),
    "rope": ("position_embedding_type",),
    "rms_norm": ("norm_type",),
    "max_length": ("max_position_embeddings",),
}
# What weights are made for.
_SHAPE = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "hidden_act", "norm_type"),
    *("position_embedding_type", "tie_word_embeddings"),
)


def make_model(model_config, init_from, tokenizer, seed):
    """`NeoBERTForMaskedLM`, in float32.

    Args:
        model_config: {field of NeoBERTConfig: value}, or None.
        init_from: where its weights come from (see `weights_folder`), or None for a fresh initialisation.
        tokenizer: whose vocabulary it has.
        seed: of the initialisation.
    Raises:
        UserError: an unknown configuration field, a vocabulary that does not match the tokenizer's, weights of another architecture.
    """
    given = dict(model_config or {})
    known = set(NeoBERTConfig().to_dict()) | {"rope_theta", "rope_scaling", *_ALIASES}
    unknown = sorted(set(given) - known)
    if unknown:
        raise UserError(f"model_config has an unknown field {unknown[0]!r}; NeoBERTConfig lists the fields")
    # Logits of the masked tokens alone: the field's name is the configuration's matter.
    if "sparse_prediction" in known:
        given.setdefault("sparse_prediction", True)
    else:
        given.setdefault("masked_lm_logits", "masked")
    if init_from is not None:
        return _load(weights_folder(init_from), init_from, given, tokenizer)
    given.setdefault("vocab_size", len(tokenizer))
    given.setdefault("pad_token_id", tokenizer.pad_token_id)
    config = _checked_config(given)
    _check_vocabulary(config.vocab_size, tokenizer, "model_config")
    set_seed(seed)
    return NeoBERTForMaskedLM(config)


def _load(source, name, given, tokenizer):
    try:
        values = json.loads((Path(source) / "config.json").read_text()) if Path(source).is_dir() else None
        model_type = values["model_type"] if values else NeoBERTConfig.get_config_dict(source)[0].get("model_type")
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"init_from {name} holds no model (config.json with model_type): {one_line(error, 120)}") from error
    if model_type != "neobert":
        raise UserError(f"init_from {name} is a {model_type!r} model; a NeoBERT checkpoint is needed")
    config = NeoBERTConfig.from_pretrained(source)
    _override(config, given, name)
    _check_vocabulary(config.vocab_size, tokenizer, f"init_from {name}")
    try:
        model, info = NeoBERTForMaskedLM.from_pretrained(source, config=config, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # safetensors' own for a torn file, RuntimeError for other shapes, OSError for no file
        raise UserError(f"init_from {name}: its weights cannot be loaded ({one_line(error)})") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"init_from {name} has no weights for {', '.join(missing[:3])}; a masked-LM checkpoint is needed")
    return model


def _checked_config(values):
    try:
        return NeoBERTConfig(**values)
    except (ValueError, TypeError) as error:
        raise UserError(f"model_config: {error}") from error


def _override(config, given, source):
    """Sets the fields of `config` that `given` names, under whichever name; UserError for one that the weights of `source` fix."""
    named = {target for name in given for target in _ALIASES.get(name, (name,))}
    kept = {name: getattr(config, name) for name in (*_SHAPE, "max_position_embeddings") if name not in named}
    wanted = _checked_config({**kept, **given})
    # RoPE first: YaRN takes the length that the weights were trained at from the configuration as it is.
    for name in sorted(given, key=lambda name: not name.startswith("rope_")):
        for target in _ALIASES.get(name, (name,)):
            value = given[name] if target.startswith("rope_") else getattr(wanted, target, given[name])
            if target in _SHAPE and getattr(config, target) != value:
                raise UserError(f"init_from {source} has {target}={getattr(config, target)!r}, but model_config asks for {value!r}")
            setattr(config, target, value)


def _check_vocabulary(rows, tokenizer, where):
    """Some padding rows (to a multiple of 128, say) are fine; fewer rows than tokens, or far more, are another vocabulary."""
    if not len(tokenizer) <= rows < len(tokenizer) + 128:
        raise UserError(f"{where} has a vocabulary of {rows}, but the tokenizer has {len(tokenizer)} tokens; they must belong together")


def weights_folder(init_from):
    """Where the weights of `init_from` are: itself, or, of a run's output folder without a final model, its newest complete checkpoint."""
    folder = Path(init_from)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return init_from
    checkpoint = newest_complete(folder)
    if checkpoint is None:
        raw = "; convert it first with neobert convert" if (folder / "model_checkpoints").is_dir() else ""
        raise UserError(f"init_from {init_from} has neither a model (config.json) nor a complete checkpoint{raw}")
    logger.warning("init_from %s has not finished; its weights are those of %s", init_from, checkpoint.name)
    return str(checkpoint)
