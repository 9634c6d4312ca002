"""Makes modular_neobert.py a part of the installed transformers, in this process only.

The library's own form: the module has a name inside of `transformers`, so that its relative imports
work and the library takes its classes for its own.
"""

import importlib.util
import sys
import types
from pathlib import Path

from conversion_neobert import NEOBERT_CONVERSION
from transformers import conversion_mapping
from transformers.models.auto import auto_factory, configuration_auto, modeling_auto


NAME = "transformers.models.neobert.modular_neobert"
HEADS = {
    "MODEL": "NeoBertModel",
    "MODEL_FOR_MASKED_LM": "NeoBertForMaskedLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": "NeoBertForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION": "NeoBertForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING": "NeoBertForQuestionAnswering",
    "MODEL_FOR_MULTIPLE_CHOICE": "NeoBertForMultipleChoice",
}


def load():
    """The module of the native classes, registered as the library registers its own."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    file = Path(__file__).with_name("modular_neobert.py")
    spec = importlib.util.spec_from_file_location(NAME, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    package = types.ModuleType(NAME.rpartition(".")[0])
    package.modular_neobert = module
    sys.modules[package.__name__] = package
    spec.loader.exec_module(module)
    conversion_mapping.register_checkpoint_conversion_mapping("neobert", NEOBERT_CONVERSION)
    # A mapping of the library, not a user's: it is not for other classes of this model_type.
    conversion_mapping.USER_REGISTERED_MAPPINGS.discard("neobert")
    configuration_auto.CONFIG_MAPPING.register("neobert", module.NeoBertConfig, exist_ok=True)
    for mapping, name in HEADS.items():
        getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")["neobert"] = name
        auto_map = getattr(modeling_auto, f"{mapping}_MAPPING")
        assert isinstance(auto_map, auto_factory._LazyAutoMapping)
        auto_map.register(module.NeoBertConfig, getattr(module, name))
    return module
