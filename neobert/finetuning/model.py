"""The encoder with a classification head that a run of GLUE starts from."""

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSequenceClassification

from ..common.errors import UserError, one_line


# What encoders call the dropout before the classifier.
_DROPOUTS = ("classifier_dropout", "cls_dropout", "seq_classif_dropout")


def encoder_hidden_size(name: str, trust_remote_code: bool = False) -> int | None:
    """Return the hidden size in a model's configuration, None if there is none.

    Raises:
        UserError: If the configuration cannot be loaded.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_loadable(name, error) from error
    return getattr(config.get_text_config(), "hidden_size", None)


def _not_loadable(name: str, error: Exception) -> UserError:
    return UserError(f"{name} cannot be loaded as a sequence classifier: {one_line(error)}.")


def load_classifier(name, task, head_dropout=0.1, trust_remote_code=False, pooling=None):
    """A sequence classifier for `task`, in float32.

    Args:
        pooling: "cls" or "mean" for NeoBERT and ModernBERT; None for what the configuration says.

    Returns:
        model, names of the head's parameters that the checkpoint did not have (random), as a sorted
        list.
    Raises:
        UserError: there is no such model; it lacks weights of the encoder, brings code that was not
            trusted, or is not an encoder that can classify.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        config.num_labels = max(len(task.labels), 1)
        config.problem_type = "regression" if task.regression else "single_label_classification"
        if not task.regression:
            config.id2label = dict(enumerate(task.labels))
            config.label2id = {label: i for i, label in enumerate(task.labels)}
        for field in _DROPOUTS:
            if hasattr(config, field):
                setattr(config, field, head_dropout)
        if pooling is not None:
            config.classifier_pooling = pooling
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _not_loadable(name, error) from error
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
