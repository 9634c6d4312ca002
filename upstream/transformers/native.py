"""Registration of modular_neobert.py in the installed transformers, for this process only.

The module is imported under a name inside `transformers`, so that its relative imports work, and
transformers treats its classes as native ones.
"""

import importlib
import sys
import types
from pathlib import Path

from transformers import conversion_mapping
from transformers.models.auto import configuration_auto, modeling_auto

from conversion_neobert import MAPPINGS


PACKAGE = "transformers.models.neobert"
# Native classes by the name of their mapping in transformers' auto classes.
HEADS = {
    "MODEL": "NeoBertModel",
    "MODEL_FOR_MASKED_LM": "NeoBertForMaskedLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": "NeoBertForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION": "NeoBertForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING": "NeoBertForQuestionAnswering",
    "MODEL_FOR_MULTIPLE_CHOICE": "NeoBertForMultipleChoice",
}


def load() -> types.ModuleType:
    """Import the module of the native classes, and register them as transformers does."""
    name = f"{PACKAGE}.modular_neobert"
    if name in sys.modules:
        return sys.modules[name]

    # A package whose modules are searched for in this directory.
    package = types.ModuleType(PACKAGE)
    sys.modules[PACKAGE] = package
    package.__path__ = [str(Path(__file__).parent)]
    module = importlib.import_module(name)

    for key, mapping in MAPPINGS.items():
        conversion_mapping.register_checkpoint_conversion_mapping(key, mapping)
        # A mapping of a user would also apply to other classes with this model_type.
        conversion_mapping.USER_REGISTERED_MAPPINGS.discard(key)

    # `from transformers import NeoBertModel` works as with a native model.
    for public in module.__all__:
        setattr(sys.modules["transformers"], public, getattr(module, public))

    configuration_auto.CONFIG_MAPPING.register("neobert", module.NeoBertConfig, exist_ok=True)
    for mapping, head in HEADS.items():
        # The names are used by pipelines and tests, and the mappings by the auto classes.
        getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")["neobert"] = head
        auto_map = getattr(modeling_auto, f"{mapping}_MAPPING")
        auto_map.register(module.NeoBertConfig, getattr(module, head), exist_ok=True)
    return module
