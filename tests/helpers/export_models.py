"""Tiny models and tokenizers for the tests of exports."""

import string

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from neobert import NeoBERTConfig, NeoBERTModel


SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
LETTERS = string.ascii_lowercase
WORDS = [*SPECIAL.values(), "rain", "the", "a", "server", *LETTERS, *(f"##{c}" for c in LETTERS)]
WORDS += [*string.digits, *string.punctuation]


def write_tokenizer(folder):
    """Write a WordPiece tokenizer with a vocabulary of a few words and all letters."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    options = {"model_max_length": 300, **SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(folder)


def build(model_class=NeoBERTModel, **changes):
    """Return a tiny model with random weights.

    Attention is far from uniform, and every bias and norm changes the outputs, so that an export
    that omits one of them is detected.
    """
    torch.manual_seed(0)

    fields = {"vocab_size": len(WORDS), "hidden_size": 64, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 300}

    model = model_class(NeoBERTConfig(**{**fields, **changes})).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if parameter.dim() == 1:
            noise = 1 + 0.3 * noise if name.endswith("weight") else 0.3 * noise
        elif "encoder.weight" not in name and "positional" not in name:
            noise = noise * 1.2 / parameter.shape[1] ** 0.5
        parameter.data.copy_(noise)

    return model
