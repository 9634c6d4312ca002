"""Fixtures of the tests of export/: tiny models in Hub folders."""

import string

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.common.pooling import save_for_all_versions


SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
LETTERS = string.ascii_lowercase
WORDS = [*SPECIAL.values(), "rain", "the", "a", "server", *LETTERS, *(f"##{c}" for c in LETTERS)]
WORDS += [*string.digits, *string.punctuation]


def write_tokenizer(folder):
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    options = {"model_max_length": 300, **SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(folder)


def build(model_class=NeoBERTModel, **changes):
    """A tiny model whose attention is far from uniform, with no bias or norm that does nothing."""
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


@pytest.fixture(scope="session")
def padded_batch():
    """Function of texts' lengths that returns (input_ids, attention_mask), padded on the right."""

    def make(*lengths):
        torch.manual_seed(3)
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        return torch.randint(5, 60, mask.shape) * mask, mask

    return make


@pytest.fixture(scope="session")
def hub_folder(tmp_path_factory):
    """Function of a model class and fields of its configuration that returns a Hub folder."""

    def make(model_class=NeoBERTModel, **changes):
        folder = tmp_path_factory.mktemp("model") / "model"
        build(model_class, **changes).save_pretrained(folder)
        write_tokenizer(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def sentence_folder(tmp_path_factory, hub_folder):
    """A folder of sentence-transformers with mean pooling, a Dense module, vectors of length 1, and
    texts of up to 120 tokens."""
    sentence_transformers = pytest.importorskip(
        "sentence_transformers", reason="needs sentence-transformers"
    )
    from sentence_transformers import models as modules

    torch.manual_seed(1)
    transformer = modules.Transformer(str(hub_folder()))
    parts = [
        transformer,
        modules.Pooling(64, "mean"),
        modules.Dense(64, 48, activation_function=torch.nn.Tanh()),
        modules.Normalize(),
    ]
    model = sentence_transformers.SentenceTransformer(
        modules=parts, device="cpu", prompts={"query": "a "}
    )
    model.max_seq_length = 120
    folder = tmp_path_factory.mktemp("sentences") / "model"
    folder.mkdir()
    save_for_all_versions(model, folder)
    return folder
