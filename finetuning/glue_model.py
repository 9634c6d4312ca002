"""The encoder with a classification head that a run of GLUE starts from."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSequenceClassification

from ..common.errors import UserError, one_line
from ..common.loading import check_model


def load_config(name, trust_remote_code=False):
    """Raises UserError when there is no model, or it brings its own code that was not trusted."""
    path = Path(name)
    if (path / "modules.json").is_file() and not (path / "config.json").is_file():
        inner = [
            entry["path"]
            for entry in json.loads((path / "modules.json").read_text())
            if (path / entry["path"] / "config.json").is_file()
        ]
        raise UserError(
            f"{name} is a sentence encoder whose model is in a folder of its own; give "
            f"{path / (inner or ['?'])[0]}"
        )
    check_model(name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{name} brings its own Python code; add --trust-remote-code if you trust it"
            ) from error
        raise UserError(f"the model {name} was not loaded: {one_line(error)}") from error
    except OSError as error:
        raise UserError(
            f"{name!r} is neither a model folder nor a model that can be reached on the Hub: "
            f"{one_line(error)}"
        ) from error


def load_classifier(name, task, head_dropout=0.1, trust_remote_code=False, pooling=None):
    """A sequence classifier for `task`, in float32.

    Args:
        pooling: "cls" or "mean" for models that can choose; None for what the configuration says.

    Returns:
        model, names of the head's parameters that the checkpoint did not have (random), as a sorted
        list.
    Raises:
        UserError: the checkpoint lacks backbone weights, or is not an encoder that can classify.
    """
    config = load_config(name, trust_remote_code)
    config.num_labels = task.num_labels
    config.problem_type = "regression" if task.regression else "single_label_classification"
    if not task.regression:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {label: i for i, label in enumerate(task.labels)}
    for field in ("classifier_dropout", "cls_dropout", "seq_classif_dropout"):
        if hasattr(config, field):
            setattr(config, field, head_dropout)
    if pooling is not None:
        if not hasattr(config, "classifier_pooling") or pooling not in ("cls", "mean"):
            raise UserError(
                "classifier_pooling must be cls or mean, for a model that can choose, but "
                f"{pooling!r} was given for {name}"
            )
        config.classifier_pooling = pooling
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{name} cannot be loaded as a sequence classifier: {one_line(error)}"
        ) from error
    new = set(info["missing_keys"]) | {entry[0] for entry in info["mismatched_keys"]}
    backbone = [
        key
        for key in new
        if key.startswith(f"{model.base_model_prefix}.") and ".pooler." not in f".{key}"
    ]
    if backbone:
        raise UserError(
            f"{name} lacks {len(backbone)} weights of the encoder, {sorted(backbone)[0]} for "
            "example; is it this architecture?"
        )
    return model, sorted(new)
