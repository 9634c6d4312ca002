"""Makes transformers' Auto classes know NeoBERT, when this module is imported."""

import importlib

import transformers

from .configuration_neobert import AUTO_MAP, NeoBERTConfig


transformers.AutoConfig.register("neobert", NeoBERTConfig, exist_ok=True)
transformers.AutoTokenizer.register(
    NeoBERTConfig, fast_tokenizer_class=transformers.BertTokenizerFast, exist_ok=True
)
for _auto_class, _place in AUTO_MAP.items():
    _file, _name = _place.split(".")
    if _auto_class != "AutoConfig":
        _model_class = getattr(importlib.import_module(f"...{_file}", __name__), _name)
        getattr(transformers, _auto_class).register(NeoBERTConfig, _model_class, exist_ok=True)
