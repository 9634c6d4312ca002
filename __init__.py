"""NeoBERT (arXiv 2502.19587). Importing this package makes transformers' Auto classes know NeoBERT without `trust_remote_code`."""

from .common.commands import importing


with importing():
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForMaskedLM,
        AutoModelForMultipleChoice,
        AutoModelForQuestionAnswering,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
        BertTokenizerFast,
    )

    from .configuration_neobert import NeoBERTConfig
    from .modeling_neobert import (
        NeoBERT,
        NeoBERTForMaskedLM,
        NeoBERTForMultipleChoice,
        NeoBERTForQuestionAnswering,
        NeoBERTForSequenceClassification,
        NeoBERTForTokenClassification,
        NeoBERTLMHead,
        NeoBERTModel,
        NeoBERTPreTrainedModel,
    )


__version__ = "0.1.0"

AutoConfig.register("neobert", NeoBERTConfig, exist_ok=True)
AutoTokenizer.register(NeoBERTConfig, fast_tokenizer_class=BertTokenizerFast, exist_ok=True)
for _auto_class, _model_class in (
    (AutoModel, NeoBERTModel),
    (AutoModelForMaskedLM, NeoBERTForMaskedLM),
    (AutoModelForSequenceClassification, NeoBERTForSequenceClassification),
    (AutoModelForTokenClassification, NeoBERTForTokenClassification),
    (AutoModelForQuestionAnswering, NeoBERTForQuestionAnswering),
    (AutoModelForMultipleChoice, NeoBERTForMultipleChoice),
):
    _auto_class.register(NeoBERTConfig, _model_class, exist_ok=True)

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
]
