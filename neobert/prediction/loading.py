"""Loading of classifiers for `neobert predict` and `neobert serve`. Does not import pyarrow."""

from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from ..common.errors import UserError, one_line
from ..common.loading import check_regression_dtype, check_trained_head, text_limit
from ..common.task_file import TOKENS
from ..quantization.int8 import quantize_int8


if TYPE_CHECKING:
    # transformers 4 spells it `PretrainedConfig`.
    from transformers import PreTrainedConfig

Activation = Literal["none", "sigmoid", "softmax"]


def load_classifier(
    name: str, task: str | None, dtype: str, device: torch.device, trust_remote_code: bool
) -> Any:
    """Load a classifier with its trained head on a device.

    Args:
        name: Directory or Hub name of the model.
        task: Name of the task, see `TaskContent`; None for a sequence classifier.
        dtype: Name of the precision; int8 weights are quantized from those in float32.
        device: Device of the model.
        trust_remote_code: Whether to run the code in the repository of the model.

    Raises:
        UserError: If the model cannot be loaded, has no trained head, or is a regression in 16
            bits.
    """
    auto_class: Any = AutoModelForSequenceClassification
    if task == TOKENS:
        auto_class = AutoModelForTokenClassification
    try:
        model, info = auto_class.from_pretrained(
            name,
            dtype=torch.float32 if dtype == "int8" else getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{name} cannot be loaded as a classifier: {one_line(error)}.") from error

    # The single output of a reranker is a score without a unit, and may be rounded.
    if model.config.problem_type == "regression":
        check_regression_dtype(dtype)
    check_trained_head(info, name, "classification head", "Train it with neobert finetune.")

    model = model.to(device).eval()
    return quantize_int8(model) if dtype == "int8" else model


def default_length(model: Any, tokenizer: Any, training_length: int | None) -> int | None:
    """Return the default maximum sequence length of a classifier in tokens.

    Args:
        model: Classifier.
        tokenizer: Tokenizer of the classifier.
        training_length: Maximum length during training, if task.json contains it.

    Returns:
        The smallest limit of the training, the model and its tokenizer; None if there is none.
    """
    limits = (training_length, text_limit(model, tokenizer))
    return min((limit for limit in limits if limit), default=None)


def default_activation(config: "PreTrainedConfig") -> Activation:
    """Return the function that maps the logits of a sequence classifier to its values.

    It is that of the text-classification pipeline of transformers. A single output without a
    problem type is the score of a reranker.
    """
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"
