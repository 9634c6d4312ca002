"""NeoBERT encoder (arXiv 2502.19587).

Importing this package makes the Auto classes of transformers load NeoBERT without
`trust_remote_code`. torch and transformers are imported when a class is first used.
"""

import importlib
from typing import Any

from ._registration import register_with_transformers
from .common import __version__


register_with_transformers()

# Modules of the public names that are not defined in modeling_neobert.py.
_MODULES = {
    "NeoBERTConfig": "configuration_neobert",
    "PackedEncoder": "embeddings.packed_encoder",
    "convert_checkpoint": "conversion.command",
    "default_learning_rate": "training.optimization",
    "quantize_int8": "quantization.int8",
}


def __getattr__(name: str) -> Any:
    # Python calls this function for names that the module does not define yet.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_MODULES.get(name, 'modeling_neobert')}", __name__)
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "NeoBERT",
    "NeoBERTConfig",
    "NeoBERTForMaskedLM",
    "NeoBERTForMultipleChoice",
    "NeoBERTForQuestionAnswering",
    "NeoBERTForSequenceClassification",
    "NeoBERTForTokenClassification",
    "NeoBERTLMHead",
    "NeoBERTModel",
    "NeoBERTPreTrainedModel",
    "PackedEncoder",
    "__version__",
    "convert_checkpoint",
    "default_learning_rate",
    "quantize_int8",
]
