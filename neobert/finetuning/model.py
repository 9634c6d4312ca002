"""Encoder with a classification head."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from ..common.errors import UserError, one_line
from ..common.loading import load_config


# Names of the dropout before the classifier in the configurations of encoders.
_DROPOUTS = ("classifier_dropout", "cls_dropout", "seq_classif_dropout")


def encoder_hidden_size(name: str, trust_remote_code: bool = False) -> int | None:
    """Return the hidden size in a model's configuration, None if there is none.

    Args:
        name: Directory or Hub name of the model.
        trust_remote_code: Whether to run the Python code in the repository of the model.

    Raises:
        UserError: If the configuration cannot be loaded.
    """
    config = load_config(name, trust_remote_code)
    return getattr(config.get_text_config(), "hidden_size", None)


def _not_loadable(name: str, error: Exception) -> UserError:
    return UserError(f"{name} cannot be loaded as a classifier: {one_line(error)}.")


def load_classifier(
    name: str,
    labels: Sequence[str],
    problem_type: str | None,
    head_dropout: float = 0.1,
    trust_remote_code: bool = False,
    pooling: str | None = None,
    auto_class: Any = AutoModelForSequenceClassification,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a classifier in float32.

    Args:
        name: Directory or Hub name of the model to start from.
        labels: Label names in the order of their numbers; empty for regression.
        problem_type: `problem_type` of the configuration; None for token classification.
        head_dropout: Dropout probability in the head.
        trust_remote_code: Whether to run the Python code in the repository of the model.
        pooling: "cls" or "mean" for NeoBERT and ModernBERT; None for that of the configuration.
        auto_class: Auto class of transformers that loads the model.

    Returns:
        The model, and the sorted names of the head's parameters that the checkpoint lacks. These
        are random.

    Raises:
        UserError: If the model does not exist, lacks weights of the encoder, needs code that was
            not trusted, or cannot classify.
    """
    # transformers raises one of several errors for a damaged or missing file, and for untrusted
    # code.
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        _configure_head(config, labels, problem_type, head_dropout)
        # Other encoders ignore the field.
        if pooling is not None:
            config.classifier_pooling = pooling

        model, info = auto_class.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _not_loadable(name, error) from error

    # A new head may be missing or of another size.
    missing = set(info["missing_keys"]) | {entry[0] for entry in info["mismatched_keys"]}
    _check_encoder_weights(name, missing, prefix=f"{model.base_model_prefix}.")
    return model, sorted(missing)


def _configure_head(
    config: Any, labels: Sequence[str], problem_type: str | None, head_dropout: float
) -> None:
    """Set the outputs and the dropout of the head in a configuration; see `load_classifier`."""
    # A regression has one output and no label names.
    config.num_labels = max(len(labels), 1)
    config.problem_type = problem_type
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
    for field in _DROPOUTS:
        if hasattr(config, field):
            setattr(config, field, head_dropout)


def _check_encoder_weights(name: str, missing: Collection[str], prefix: str) -> None:
    """Check that a checkpoint has the weights of its encoder.

    Otherwise another architecture was loaded, which would train from random weights.

    Args:
        name: Directory or Hub name of the model.
        missing: Names of the parameters that the checkpoint lacks.
        prefix: Prefix of the names of the encoder's parameters.

    Raises:
        UserError: If weights of the encoder are missing.
    """
    # The pooler of a BERT is part of the encoder, but pre-trained checkpoints may lack it.
    encoder_keys = sorted(
        key for key in missing if key.startswith(prefix) and ".pooler." not in f".{key}"
    )
    if encoder_keys:
        raise UserError(
            f"{name} lacks {len(encoder_keys)} weights of the encoder, for example "
            f"{encoder_keys[0]}. Its config.json may be that of another architecture."
        )
