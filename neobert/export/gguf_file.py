"""A GGUF file for llama.cpp: the layout that its architecture "neo-bert" reads, by PyPI `gguf`.

llama.cpp takes queries, keys and values as three blocks of D rows, where NeoBERT's rows are
interleaved per head: (H, 3, K) -> (3, H, K). Rows in NeoBERT's order load there without complaint
and give vectors that have nothing to do with the model's.
"""

import contextlib
import json

import gguf
import numpy as np
import torch

from ..common.errors import UserError, one_line
from ..common.loading import check_vocabulary
from ..modeling_neobert import NeoBERTForSequenceClassification, NeoBERTModel, rotary_embeddings


ARCHITECTURE = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.NEO_BERT]
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
}
DTYPES = tuple(_FILE_TYPES)
POOLING = {
    "mean": gguf.PoolingType.MEAN,
    "cls": gguf.PoolingType.CLS,
    "lasttoken": gguf.PoolingType.LAST,
}
_BLOCK = 32  # numbers that share one scale in q8_0, q5_0 and q4_0
_LARGEST_F16 = 65504.0
# What the engine takes for granted in YaRN: for this architecture it reads the factors and the
# trained length only.
_YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
_ELSEWHERE = "neobert export onnx and openvino carry it"


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
    """{name: float32 array} of the file. What llama.cpp has no use for, the masked-LM decoder, is
    left out."""
    config, backbone = model.config, model.base_model
    width, head_dim = config.hidden_size, config.head_dim
    kinds, tensors = gguf.MODEL_TENSOR, {}

    def put(kind, parameter, block=None, suffix="weight"):
        name = f"{gguf.TENSOR_NAMES[kind].format(bid=block)}.{suffix}"
        tensors[name] = parameter.detach().to("cpu", torch.float32).numpy()

    put(kinds.TOKEN_EMBD, backbone.encoder.weight)
    put(kinds.ENC_OUTPUT_NORM, backbone.layer_norm.weight)
    for i, block in enumerate(backbone.transformer_encoder):
        # (H, 3, K, D) -> (3, H, K, D)
        per_head = block.qkv.weight.reshape(-1, 3, head_dim, width)
        put(kinds.ATTN_NORM, block.attention_norm.weight, i)
        put(kinds.ATTN_QKV, per_head.transpose(0, 1).reshape(3 * width, width), i)
        put(kinds.ATTN_OUT, block.wo.weight, i)
        put(kinds.FFN_NORM, block.ffn_norm.weight, i)
        put(kinds.FFN_UP, block.ffn.w12.weight, i)
        put(kinds.FFN_DOWN, block.ffn.w3.weight, i)
    if _has_classifier(model):
        for kind, layer in ((kinds.CLS, model.dense), (kinds.CLS_OUT, model.classifier)):
            put(kind, layer.weight)
            put(kind, layer.bias, suffix="bias")
    return tensors


def _type_in(dtype, name, array):
    """How an array is stored in a file of `dtype`: vectors stay float32, and rows that cannot be
    cut into blocks float16. Token embeddings of q5_0 are q4_0: they bear it, and are the larger
    part of a small encoder."""
    if dtype == "f32" or array.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    if dtype == "f16" or array.shape[-1] % _BLOCK:
        return gguf.GGMLQuantizationType.F16
    if dtype == "q5_0" and name == "token_embd.weight":
        return gguf.GGMLQuantizationType.Q4_0
    return gguf.GGMLQuantizationType[dtype.upper()]


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
    model, normalizer = content.get("model") or {}, content.get("normalizer") or {}
    kinds = {
        "model": model.get("type"),
        "normalizer": normalizer.get("type"),
        "pre_tokenizer": (content.get("pre_tokenizer") or {}).get("type"),
    }
    is_bert = list(kinds.values()) == ["WordPiece", "BertNormalizer", "BertPreTokenizer"] and (
        model["continuing_subword_prefix"] == "##"
        and normalizer["clean_text"]
        and normalizer["handle_chinese_chars"]
        and None not in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id)
    )
    if not is_bert:
        parts = ", ".join(f"{part} {kind}" for part, kind in kinds.items())
        raise UserError(
            "GGUF is written with BERT's WordPiece tokenizer only, and this folder has another "
            f"one ({parts})"
        )
    lowercase, strip = normalizer["lowercase"], normalizer["strip_accents"]
    return lowercase, lowercase if strip is None else strip


# ------------------------------------------------------------------------------------------------
# file


def new_writer(model, tokenizer, pooling, dtype, name, known):
    """`gguf.GGUFWriter` with all keys of a file.

    Args:
        model: `NeoBERTModel` or `NeoBERTForSequenceClassification`.
        tokenizer: its fast tokenizer.
        pooling: a key of `POOLING`, for a backbone.
        dtype: of its matrices, one of `DTYPES`.
        name: general.name of the file.
        known: {key: text} of license and base model.
    Raises:
        UserError: what GGUF cannot carry, in one sentence.
    """
    check_vocabulary(tokenizer, model, name)
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    writer.add_name(name)
    writer.add_string("neobert.command", "export gguf")
    for key, text in known.items():
        writer.add_string(key, text)
    writer.add_base_model_count(sum(key.endswith(".repo_url") for key in known))
    describe_model(writer, model, pooling, dtype)
    describe_tokenizer(writer, tokenizer, model.get_input_embeddings().weight.shape[0])
    return writer


def write_tensors(writer, path, model, dtype):
    """Writes the keys of `writer` and the tensors of `model` to the file `path`.

    Raises:
        UserError: numbers that are not finite, or too large for float16.
    """
    for name, array in tensors_of(model).items():
        kind, largest = _type_in(dtype, name, array), float(np.abs(array).max())
        if not np.isfinite(largest):
            raise UserError(f"{name} holds numbers that are not finite; is the checkpoint damaged?")
        if kind == gguf.GGMLQuantizationType.F16 and largest > _LARGEST_F16:
            raise UserError(
                f"{name} holds {largest:.3g}, which float16 does not reach; give --dtype f32"
            )
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    with contextlib.closing(writer):
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def largest_error(path, model, writer):
    """How far the numbers of a file are from the model's: the largest difference, as a part of the
    largest number of its tensor.

    Args:
        path: a GGUF file, whoever made it.
        model: the model.
        writer: with the keys that the file should have.
    Raises:
        UserError: not a GGUF file, or a key or tensor of it is not the model's.
    """
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # numpy's, and what it finds in arbitrary bytes
        raise UserError(
            f"{path} is not a GGUF file that can be read ({one_line(error)})"
        ) from error
    # Others have some keys of their own, and leave some to defaults.
    for key, expected in writer.kv_data[0].items():
        field = reader.get_field(key)
        is_about = key.startswith(("general.", "neobert.")) and key != "general.architecture"
        if field is None or is_about:
            continue
        value, written = expected.value, field.contents()
        if isinstance(value, float):
            value, written = np.float32(value), np.float32(written)
        if value != written:
            raise UserError(f"{path} does not hold this model: {key} is another one")
    tensors, worst = {tensor.name: tensor for tensor in reader.tensors}, 0.0
    for name, exact in tensors_of(model).items():
        stored = tensors.get(name)
        if stored is None or tuple(reversed(stored.shape.tolist())) != exact.shape:
            raise UserError(f"{path} has no {name} of the shape {exact.shape}")
        numbers = gguf.dequantize(stored.data, stored.tensor_type).reshape(exact.shape)
        largest = max(float(np.abs(exact).max()), np.finfo(np.float32).tiny)
        worst = max(worst, float(np.abs(numbers - exact).max()) / largest)
    return worst
