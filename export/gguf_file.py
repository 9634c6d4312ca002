"""A GGUF file for llama.cpp: the layout that its architecture "neo-bert" reads, by PyPI `gguf`.

llama.cpp takes queries, keys and values as three blocks of D rows, where NeoBERT's rows are
interleaved per head: (H, 3, K) -> (3, H, K). Rows in NeoBERT's order load there without complaint
and give vectors that have nothing to do with the model's.
"""

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from tqdm.auto import tqdm

from ..common.errors import UserError
from ..common.loading import check_vocabulary
from ..modeling_neobert import NeoBERTForSequenceClassification, NeoBERTModel, rotary_embeddings


ARCHITECTURE = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.NEO_BERT]
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
DTYPES = tuple(_FILE_TYPES)
POOLING = {
    "mean": gguf.PoolingType.MEAN,
    "cls": gguf.PoolingType.CLS,
    "lasttoken": gguf.PoolingType.LAST,
}
_BLOCK = 32  # numbers that share one scale in q8_0
_LARGEST_F16 = 65504.0
# What the engine takes for granted in YaRN: for this architecture it reads the factors and the
# trained length only.
_YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
_ELSEWHERE = "neobert export onnx and openvino carry it"


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the file.

    Attributes:
        name: as llama.cpp reads it.
        shape: rows, columns; or one number.
        read: returns it, float32, on the CPU.
    """

    name: str
    shape: tuple
    read: Callable[[], torch.Tensor]

    def type_in(self, dtype):
        """How its numbers are stored in a file of `dtype`: vectors stay float32, and rows that q8_0
        cannot cut into blocks float16."""
        if dtype == "f32" or len(self.shape) == 1:
            return gguf.GGMLQuantizationType.F32
        if dtype == "q8_0" and self.shape[-1] % _BLOCK == 0:
            return gguf.GGMLQuantizationType.Q8_0
        return gguf.GGMLQuantizationType.F16


# ------------------------------------------------------------------------------------------------
# what cannot be carried


def check_model(model, pooling):
    """Raises UserError for what llama.cpp's neo-bert has no form for.

    Args:
        model: of any class of ours.
        pooling: mode of sentence-transformers that a backbone's vectors are pooled by.
    """
    config = model.config
    rope = config.rope_parameters
    for name, value, only in (
        ("position_embedding_type", config.position_embedding_type, "rope"),
        ("norm_type", config.norm_type, "rms"),
        ("hidden_act", config.hidden_act, "swiglu"),
    ):
        if value != only:
            raise UserError(
                f"llama.cpp runs NeoBERT with {name} {only!r} only, and this model has {value!r}; "
                f"{_ELSEWHERE}"
            )
    lost = [
        f"{name}={rope[name]}"
        for name, only in _YARN.items()
        if rope["rope_type"] == "yarn" and rope.get(name) not in (None, only)
    ]
    if rope["rope_type"] == "dynamic" or lost:
        kind = f"YaRN with {', '.join(lost)}" if lost else "rope_type 'dynamic'"
        raise UserError(f"llama.cpp has no form for {kind}; {_ELSEWHERE}")
    if _has_classifier(model) and config.classifier_pooling != "cls":
        raise UserError(
            "llama.cpp classifies by the first token, and this model by the "
            f"{config.classifier_pooling} of all; {_ELSEWHERE}"
        )
    if not _has_classifier(model) and not isinstance(model, NeoBERTModel):
        raise UserError(
            f"llama.cpp has no form for {type(model).__name__}; --head base exports its backbone, "
            f"and {_ELSEWHERE}"
        )
    if not _has_classifier(model) and pooling not in POOLING:
        raise UserError(
            f"llama.cpp pools by {', '.join(POOLING)}, and this folder by {pooling}; {_ELSEWHERE}"
        )


def _has_classifier(model):
    return isinstance(model, NeoBERTForSequenceClassification)


# ------------------------------------------------------------------------------------------------
# tensors


def tensors_of(model):
    """Every `Tensor` of the file. What llama.cpp has no use for, the masked-LM decoder, is left
    out."""
    config, backbone = model.config, model.base_model
    width, head_dim = config.hidden_size, config.head_dim
    kinds = gguf.MODEL_TENSOR

    def tensor(kind, parameter, block=None, suffix="weight", change=None):
        name = f"{gguf.TENSOR_NAMES[kind].format(bid=block)}.{suffix}"
        return Tensor(
            name,
            tuple(parameter.shape),
            lambda: _numbers(parameter if change is None else change(parameter)),
        )

    def three_blocks(weight):  # (H, 3, K, D) -> (3, H, K, D)
        return weight.reshape(-1, 3, head_dim, width).transpose(0, 1).reshape(3 * width, width)

    yield tensor(kinds.TOKEN_EMBD, backbone.encoder.weight)
    yield tensor(kinds.ENC_OUTPUT_NORM, backbone.layer_norm.weight)
    for i, block in enumerate(backbone.transformer_encoder):
        yield tensor(kinds.ATTN_NORM, block.attention_norm.weight, i)
        yield tensor(kinds.ATTN_QKV, block.qkv.weight, i, change=three_blocks)
        yield tensor(kinds.ATTN_OUT, block.wo.weight, i)
        yield tensor(kinds.FFN_NORM, block.ffn_norm.weight, i)
        yield tensor(kinds.FFN_UP, block.ffn.w12.weight, i)
        yield tensor(kinds.FFN_DOWN, block.ffn.w3.weight, i)
    if _has_classifier(model):
        for kind, layer in ((kinds.CLS, model.dense), (kinds.CLS_OUT, model.classifier)):
            yield tensor(kind, layer.weight)
            yield tensor(kind, layer.bias, suffix="bias")


def _numbers(parameter):
    return parameter.detach().to("cpu", torch.float32)


def _encoded(tensor, kind):
    """The stored form of a tensor.

    Raises:
        UserError: numbers that are not finite, or too large for float16.
    """
    numbers = tensor.read().numpy()
    largest = float(np.abs(numbers).max())
    if not np.isfinite(largest):
        raise UserError(
            f"{tensor.name} holds numbers that are not finite; is the checkpoint damaged?"
        )
    if kind == gguf.GGMLQuantizationType.F16 and largest > _LARGEST_F16:
        raise UserError(
            f"{tensor.name} holds {largest:.3g}, which float16 does not reach; give --dtype f32"
        )
    return gguf.quantize(numbers, kind)


# ------------------------------------------------------------------------------------------------
# keys


def describe_model(writer, model, pooling, dtype):
    """The keys of the architecture, its rotary positions, its pooling and its labels.

    Args:
        writer: `gguf.GGUFWriter`.
        model, pooling, dtype: as of `write`.
    """
    config, blocks = model.config, model.base_model.transformer_encoder
    rope = config.rope_parameters
    scaled = rope["rope_type"] != "default"
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(_FILE_TYPES[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(model.get_input_embeddings().weight.shape[0])
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(blocks))
    writer.add_feed_forward_length(blocks[0].ffn.w3.in_features)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_causal_attention(False)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"] if scaled else "none"))
    if scaled:
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(
            rope.get("original_max_position_embeddings") or config.max_position_embeddings
        )
    if rope["rope_type"] == "yarn":
        # At position 0 the cosine is the attention factor; the engine multiplies 1 + ln(factor) /
        # 10 in by itself.
        factor = (
            rotary_embeddings(config, torch.zeros(1, 1, dtype=torch.int64), 1)[0]
            .real.flatten()[0]
            .item()
        )
        writer.add_rope_scaling_attn_factors(factor / (1.0 + 0.1 * np.log(rope["factor"])))
    if _has_classifier(model):
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(
            [str(config.id2label[i]) for i in range(config.num_labels)]
        )
    else:
        writer.add_pooling_type(POOLING[pooling])


def describe_tokenizer(writer, tokenizer, rows):
    """The keys of llama.cpp's WordPiece tokenizer, "bert": words begin with U+2581 there, and their
    continuations have no mark.

    Args:
        writer: `gguf.GGUFWriter`.
        tokenizer: a fast tokenizer of transformers.
        rows: of the embedding; those beyond the vocabulary are named [PAD<id>] and marked as
            unused.
    Raises:
        UserError: another kind of tokenizer.
    """
    lowercase, strip_accents = _bert_normalizer(tokenizer)
    special, added = set(tokenizer.all_special_ids), tokenizer.get_added_vocab().values()
    words, kinds = [f"[PAD{i}]" for i in range(rows)], [gguf.TokenType.UNUSED] * rows
    for word, i in tokenizer.get_vocab().items():
        words[i], kinds[i] = _marked(word), gguf.TokenType.NORMAL
        if i in special or i in added:
            words[i] = word
            kinds[i] = gguf.TokenType.CONTROL if i in special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_type_count(1)
    for add, i in (
        (writer.add_bos_token_id, tokenizer.cls_token_id),
        (writer.add_eos_token_id, tokenizer.sep_token_id),
        (writer.add_sep_token_id, tokenizer.sep_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_mask_token_id, tokenizer.mask_token_id),
    ):
        if i is not None:
            add(i)
    writer.add_uint32("tokenizer.ggml.cls_token_id", tokenizer.cls_token_id)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    # of pairs: [CLS] query [SEP] document [SEP], with one [SEP] between
    writer.add_add_sep_token(False)
    writer.add_bool("tokenizer.ggml.normalizer.lowercase", lowercase)
    writer.add_bool("tokenizer.ggml.normalizer.strip_accents", strip_accents)


def _marked(word):
    if word.startswith("##") and len(word) > 2:
        return word[2:]
    return (
        word if word.startswith("[") and word.endswith("]") and len(word) > 2 else f"\u2581{word}"
    )


def _bert_normalizer(tokenizer):
    """(lowercase, strip_accents) of a tokenizer that works as BERT's; UserError for all others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = {} if backend is None else json.loads(backend.to_str())
    kinds = {
        part: (content.get(part) or {}).get("type")
        for part in ("model", "normalizer", "pre_tokenizer")
    }
    normalizer, model = content.get("normalizer") or {}, content.get("model") or {}
    if (
        kinds
        != {
            "model": "WordPiece",
            "normalizer": "BertNormalizer",
            "pre_tokenizer": "BertPreTokenizer",
        }
        or model["continuing_subword_prefix"] != "##"
        or not (normalizer["clean_text"] and normalizer["handle_chinese_chars"])
        or None in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id)
    ):
        found = (
            ", ".join(f"{part} {kind}" for part, kind in kinds.items())
            if content
            else type(tokenizer).__name__
        )
        raise UserError(
            "GGUF is written with BERT's WordPiece tokenizer only, and this folder has another "
            f"one ({found})"
        )
    lowercase = normalizer["lowercase"]
    return lowercase, lowercase if normalizer["strip_accents"] is None else normalizer[
        "strip_accents"
    ]


# ------------------------------------------------------------------------------------------------
# file


def write(path, model, tokenizer, pooling, dtype, name, mark):
    """Writes one GGUF file.

    Args:
        path: the file.
        model: `NeoBERTModel` or `NeoBERTForSequenceClassification`.
        tokenizer: its fast tokenizer.
        pooling: a key of `POOLING`, for a backbone.
        dtype: of its matrices, one of `DTYPES`.
        name: general.name of the file.
        mark: {key: text} to keep beside it.
    Raises:
        UserError: what GGUF cannot carry, in one sentence.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    check_vocabulary(tokenizer, model, name)
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    writer.add_name(name)
    for key, text in mark.items():
        writer.add_string(key, text)
    writer.add_base_model_count(sum(key.endswith(".repo_url") for key in mark))
    describe_model(writer, model, pooling, dtype)
    describe_tokenizer(writer, tokenizer, rows)
    tensors = list(tensors_of(model))
    for tensor in tensors:
        kind = tensor.type_in(dtype)
        shape = tensor.shape
        number = np.dtype(np.float16 if kind == gguf.GGMLQuantizationType.F16 else np.float32)
        if kind == gguf.GGMLQuantizationType.Q8_0:
            shape, number = gguf.quant_shape_to_byte_shape(shape, kind), np.dtype(np.uint8)
        writer.add_tensor_info(tensor.name, shape, number, math.prod(shape) * number.itemsize, kind)
    with contextlib.closing(writer):
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tqdm(tensors, desc="writing", unit="tensor", leave=False, disable=None):
            writer.write_tensor_data(_encoded(tensor, tensor.type_in(dtype)))
