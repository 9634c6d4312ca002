"""The masked language model that is measured, with YaRN where it is asked for."""

import math

import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from ..common.errors import UserError, one_line
from ..common.loading import choose_device


def load_config(given, factor):
    """The model's configuration, with YaRN of `factor` if it is not None. UserError: no model, or
    no rotary positions to extend."""
    try:
        config = AutoConfig.from_pretrained(given.model, trust_remote_code=given.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"the model {given.model!r} was not loaded: {one_line(error)}") from error
    if factor is None:
        return config
    parameters = getattr(config, "rope_parameters", None)
    nested = isinstance(parameters, dict) and any(
        isinstance(value, dict) for value in parameters.values()
    )
    if not is_rotary(config) or nested or hasattr(config, "global_rope_theta"):
        raise UserError(
            f"YaRN needs one set of rotary parameters, which {given.model} ({config.model_type}) "
            "does not have; use --yarn off"
        )
    original = given.yarn_from or config.max_position_embeddings
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if isinstance(parameters, dict):  # transformers 5
        config.rope_parameters = {"rope_theta": parameters.get("rope_theta", 10000.0), **scaling}
    else:
        config.rope_scaling = scaling
    config.max_position_embeddings = max(
        config.max_position_embeddings, math.ceil(original * factor)
    )
    return config


def is_rotary(config):
    """Whether positions are rotary, so that texts may be longer than in training."""
    if getattr(config, "position_embedding_type", "rope") not in ("rope", "rotary"):
        return False
    return any(
        getattr(config, name, None) is not None
        for name in ("rope_parameters", "rope_scaling", "rope_theta", "global_rope_theta")
    )


def load_model(given, factor):
    """The masked language model in evaluation mode. UserError: no model, or no masked-LM head in
    its checkpoint."""
    options = {
        "config": load_config(given, factor),
        "trust_remote_code": given.trust_remote_code,
        "dtype": getattr(torch, given.dtype),
    }
    if given.attn_implementation:
        options["attn_implementation"] = given.attn_implementation
    try:
        model, info = AutoModelForMaskedLM.from_pretrained(
            given.model, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(
            f"{given.model} is not a masked language model here: {one_line(error)}"
        ) from error
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(
            f"{given.model} has no trained masked-LM head: {missing} are not in its checkpoint, "
            "and would be random"
        )
    model.config.unpad_inputs = (
        False  # no batch here has padding, and the warning about our own hook would be false
    )
    return model.eval().to(choose_device(given.device))
