"""NeoBERT (arXiv 2502.19587). With this package imported, transformers' Auto classes know NeoBERT
without `trust_remote_code`.

The import itself takes no time: torch and transformers are imported when a class of this package is
first used, and the Auto classes are told as soon as transformers is imported.
"""

import importlib
import sys
from importlib.machinery import PathFinder

from .common import __version__


class _Registration:
    """An import hook that runs neobert/_registration.py after transformers is imported.

    A module that is half imported has no classes to register yet. So the registration waits until
    none of `WATCHED` is being imported.
    """

    WATCHED = (
        "transformers",
        *(f"{__name__}.{part}_neobert" for part in ("configuration", "attention", "modeling")),
    )
    under_way = 0

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name in cls.WATCHED else None
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module):
            cls.under_way += 1
            try:
                execute(module)
            finally:
                cls.under_way -= 1
            cls.register()

        spec.loader.exec_module = execute_and_register
        return spec

    @classmethod
    def register(cls):
        if cls.under_way == 0 and "transformers" in sys.modules:
            sys.meta_path.remove(cls)
            importlib.import_module(".common.registration", __name__)


sys.meta_path.insert(0, _Registration)
_Registration.register()


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    files = {
        "NeoBERTConfig": "configuration_neobert",
        "default_learning_rate": "training.optimisation",
        "quantize_int8": "common.int8",
    }
    file = files.get(name, "modeling_neobert")
    return getattr(importlib.import_module(f".{file}", __name__), name)


def __dir__():
    return list(__all__)


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
    "__version__",
    "default_learning_rate",
    "quantize_int8",
]
