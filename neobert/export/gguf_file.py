"""GGUF files for llama.cpp, in the layout of its architecture "neo-bert", written with PyPI `gguf`.

llama.cpp reads queries, keys and values as three blocks of D rows, whereas the rows of NeoBERT are
interleaved per head: (H, 3, K) -> (3, H, K). llama.cpp loads rows in the order of NeoBERT without
an error, and computes wrong embeddings.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn

from ..common.errors import UserError, one_line
from ..common.loading import check_vocabulary
from ..modeling_neobert import NeoBERTForSequenceClassification, NeoBERTModel, rotary_embeddings


ARCHITECTURE = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.NEO_BERT]
POOLING = {
    "mean": gguf.PoolingType.MEAN,
    "cls": gguf.PoolingType.CLS,
    "lasttoken": gguf.PoolingType.LAST,
}
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
}
# Maximum error of a value by the type of its tensor, relative to the largest value of the tensor.
# float16 has 11 significant bits, and rounds by at most half a step. q8_0 has 127 steps, and stores
# their size in float16. q5_0 and q4_0 have one step more below zero than above, so a large value
# may be clipped by a whole step. Other types have 4 bits or less.
_MAX_ERRORS = {
    gguf.GGMLQuantizationType.F32: 0.0,
    gguf.GGMLQuantizationType.F16: 2.0**-11,
    gguf.GGMLQuantizationType.BF16: 2.0**-8,
    gguf.GGMLQuantizationType.Q8_0: 0.5 / 127 + 2.0**-11,
    gguf.GGMLQuantizationType.Q5_0: 1 / 16 + 2.0**-11,
}
_MAX_OTHER_ERROR = 1 / 8 + 2.0**-11
# Maximum root mean square of the errors, relative to that of the values: the error of q4_0 in
# blocks that contain a single value other than 0. Weights of another training run differ more.
_MAX_RELATIVE_ERROR = 0.25
# Number of values that share one scale in q8_0, q5_0 and q4_0.
_BLOCK = 32
_MAX_F16 = 65504.0
# llama.cpp assumes these values of YaRN: for this architecture it only reads the factors and the
# original length.
_YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
_REMEDY = "Use `neobert export onnx` or `neobert export openvino`."


# ------------------------------------------------------------------------------------------------
# Supported models


def check_model(model: nn.Module, pooling: str) -> None:
    """Check that llama.cpp supports a model.

    Args:
        model: NeoBERT model of any class.
        pooling: Pooling mode of sentence-transformers, for a model without a head.

    Raises:
        UserError: If llama.cpp does not support the model.
    """
    config: Any = model.config
    # llama.cpp only implements the published architecture. It would load other models without an
    # error and compute wrong outputs.
    for name, supported in (
        ("position_embedding_type", "rope"),
        ("norm_type", "rms"),
        ("hidden_act", "swiglu"),
    ):
        value = getattr(config, name)
        if value != supported:
            raise UserError(
                f"`{name}` must be {supported!r} for llama.cpp, got {value!r}. {_REMEDY}"
            )

    rope = config.rope_parameters
    if rope["rope_type"] == "dynamic":
        raise UserError(f"llama.cpp does not support the rope_type 'dynamic'. {_REMEDY}")
    if rope["rope_type"] == "yarn":
        for name, supported_value in _YARN.items():
            if rope.get(name) not in (None, supported_value):
                raise UserError(
                    f"`{name}` of YaRN must be {supported_value} for llama.cpp, got {rope[name]}. "
                    f"{_REMEDY}"
                )

    # The graph of llama.cpp computes dense, tanh and classifier on the first token.
    if _has_classifier(model):
        if config.classifier_pooling != "cls":
            raise UserError(
                "`classifier_pooling` must be 'cls' for llama.cpp, got "
                f"{config.classifier_pooling!r}. {_REMEDY}"
            )
    elif not isinstance(model, NeoBERTModel):
        raise UserError(
            f"llama.cpp does not support {type(model).__name__}. Use --head base to export its "
            "backbone, or `neobert export onnx` or `neobert export openvino`."
        )
    elif pooling not in POOLING:
        raise UserError(
            f"the pooling must be {', '.join(POOLING)} for llama.cpp, got {pooling}. {_REMEDY}"
        )


def _has_classifier(model: nn.Module) -> bool:
    """Return whether llama.cpp computes the head of a model."""
    return isinstance(model, NeoBERTForSequenceClassification)


# ------------------------------------------------------------------------------------------------
# Tensors


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """Return the tensors of the file by name, in float32.

    The masked-LM decoder is left out, because llama.cpp does not use it.
    """
    config = model.config
    backbone = model.base_model
    hidden_size = config.hidden_size
    names = gguf.MODEL_TENSOR
    tensors: dict[str, np.ndarray] = {}

    # The package contains the names of the architecture, such as blk.0.attn_norm for layer 0.
    def put(
        tensor: gguf.MODEL_TENSOR,
        parameter: torch.Tensor,
        layer: int | None = None,
        suffix: str = "weight",
    ) -> None:
        name = f"{gguf.TENSOR_NAMES[tensor].format(bid=layer)}.{suffix}"
        tensors[name] = parameter.detach().to("cpu", torch.float32).numpy()

    put(names.TOKEN_EMBD, backbone.encoder.weight)
    put(names.ENC_OUTPUT_NORM, backbone.layer_norm.weight)
    for i, block in enumerate(backbone.transformer_encoder):
        # (H, 3, K, D) -> (3, H, K, D)
        per_head = block.qkv.weight.reshape(-1, 3, config.head_dim, hidden_size)
        qkv = per_head.transpose(0, 1).reshape(3 * hidden_size, hidden_size)
        put(names.ATTN_NORM, block.attention_norm.weight, i)
        put(names.ATTN_QKV, qkv, i)
        put(names.ATTN_OUT, block.wo.weight, i)
        put(names.FFN_NORM, block.ffn_norm.weight, i)
        put(names.FFN_UP, block.ffn.w12.weight, i)
        put(names.FFN_DOWN, block.ffn.w3.weight, i)

    if _has_classifier(model):
        put(names.CLS, model.dense.weight)
        put(names.CLS, model.dense.bias, suffix="bias")
        put(names.CLS_OUT, model.classifier.weight)
        put(names.CLS_OUT, model.classifier.bias, suffix="bias")
    return tensors


def _storage_type(dtype: str, name: str, array: np.ndarray) -> gguf.GGMLQuantizationType:
    """Return the type in which a tensor is stored.

    Vectors are float32. Matrices whose rows cannot be divided into blocks are float16. With q5_0
    the token embeddings are q4_0: they tolerate it, and they are most of a small encoder.
    """
    if dtype == "f32" or array.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    if dtype == "f16" or array.shape[-1] % _BLOCK:
        return gguf.GGMLQuantizationType.F16
    if dtype == "q5_0" and name == "token_embd.weight":
        return gguf.GGMLQuantizationType.Q4_0
    return gguf.GGMLQuantizationType[dtype.upper()]


# ------------------------------------------------------------------------------------------------
# Keys


def add_model_keys(writer: gguf.GGUFWriter, model: Any, pooling: str, dtype: str) -> None:
    """Add the keys of the architecture, the rotary positions, the pooling and the labels.

    Args:
        writer: Writer to add the keys to.
        model: As in `new_writer`.
        pooling: As in `new_writer`.
        dtype: As in `new_writer`.
    """
    config = model.config
    blocks = model.base_model.transformer_encoder
    # The sizes of the model, under keys such as neo-bert.context_length.
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
    _add_rope_keys(writer, config)

    if _has_classifier(model):
        # With this type, llama.cpp computes the classifier, for rerankers and other heads.
        writer.add_pooling_type(gguf.PoolingType.RANK)
        labels = [str(config.id2label[i]) for i in range(config.num_labels)]
        writer.add_classifier_output_labels(labels)
    else:
        writer.add_pooling_type(POOLING[pooling])


def _add_rope_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the keys of the rotary positions."""
    rope = config.rope_parameters
    is_scaled = rope["rope_type"] != "default"
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"] if is_scaled else "none"))
    if is_scaled:
        original_length = rope.get("original_max_position_embeddings")
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(original_length or config.max_position_embeddings)

    if rope["rope_type"] == "yarn":
        # The cosine at position 0 is the attention factor. llama.cpp multiplies the key by 1 +
        # ln(factor) / 10 itself.
        position = torch.zeros(1, 1, dtype=torch.int64)
        embeddings = rotary_embeddings(config, position, 1)
        assert embeddings is not None
        attention_factor = embeddings[0].real.flatten()[0].item()
        writer.add_rope_scaling_attn_factors(
            attention_factor / (1.0 + 0.1 * np.log(rope["factor"]))
        )


def add_tokenizer_keys(writer: gguf.GGUFWriter, tokenizer: Any, num_embeddings: int) -> None:
    """Add the keys of llama.cpp's WordPiece tokenizer, "bert".

    The words of this tokenizer begin with U+2581, and their continuations have no prefix.

    Args:
        writer: Writer to add the keys to.
        tokenizer: Fast tokenizer of transformers.
        num_embeddings: Number of token embeddings. Those beyond the vocabulary are named [PAD<id>]
            and marked as unused.

    Raises:
        UserError: If the tokenizer is not that of BERT.
    """
    # llama.cpp treats the types differently: control tokens are added around a text, user-defined
    # tokens are matched before the text is split into words, and normal ones are parts of words.
    lowercase, strip_accents = _bert_normalizer(tokenizer)
    special_ids = set(tokenizer.all_special_ids)
    added_ids = tokenizer.get_added_vocab().values()
    tokens = [f"[PAD{i}]" for i in range(num_embeddings)]
    types = [gguf.TokenType.UNUSED] * num_embeddings
    for token, i in tokenizer.get_vocab().items():
        if i in special_ids:
            tokens[i] = token
            types[i] = gguf.TokenType.CONTROL
        elif i in added_ids:
            tokens[i] = token
            types[i] = gguf.TokenType.USER_DEFINED
        else:
            tokens[i] = _to_sentencepiece(token)
            types[i] = gguf.TokenType.NORMAL

    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_type_count(1)
    for add_id, token_id in (
        (writer.add_bos_token_id, tokenizer.cls_token_id),
        (writer.add_eos_token_id, tokenizer.sep_token_id),
        (writer.add_sep_token_id, tokenizer.sep_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_mask_token_id, tokenizer.mask_token_id),
    ):
        if token_id is not None:
            add_id(token_id)
    # The writer has no method for this key.
    writer.add_uint32("tokenizer.ggml.cls_token_id", tokenizer.cls_token_id)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    # A pair is [CLS] query [SEP] document [SEP], with a single [SEP] between.
    writer.add_add_sep_token(False)
    writer.add_bool("tokenizer.ggml.normalizer.lowercase", lowercase)
    writer.add_bool("tokenizer.ggml.normalizer.strip_accents", strip_accents)


def _to_sentencepiece(token: str) -> str:
    """Return a WordPiece token in the notation of llama.cpp."""
    if token.startswith("##") and len(token) > 2:
        return token[2:]
    # Tokens in brackets, such as [PAD] and [unused0], are not words.
    if token.startswith("[") and token.endswith("]") and len(token) > 2:
        return token
    return f"\u2581{token}"


def _bert_normalizer(tokenizer: Any) -> tuple[bool, bool]:
    """Return `lowercase` and `strip_accents` of a tokenizer with the components of BERT's.

    Raises:
        UserError: If the tokenizer has other components.
    """
    # The settings are in tokenizer.json; the attributes of the tokenizer may differ from them.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = {} if backend is None else json.loads(backend.to_str())
    model = content.get("model") or {}
    normalizer = content.get("normalizer") or {}
    types = {
        "model": model.get("type"),
        "normalizer": normalizer.get("type"),
        "pre_tokenizer": (content.get("pre_tokenizer") or {}).get("type"),
    }
    is_bert = list(types.values()) == ["WordPiece", "BertNormalizer", "BertPreTokenizer"] and (
        model["continuing_subword_prefix"] == "##"
        and normalizer["clean_text"]
        and normalizer["handle_chinese_chars"]
        and None not in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id)
    )
    if not is_bert:
        parts = ", ".join(f"{part} {name}" for part, name in types.items())
        raise UserError(
            f"the tokenizer must be BERT's WordPiece tokenizer for GGUF, got {parts}. {_REMEDY}"
        )

    # As in tokenizers: without the setting, a tokenizer that lowercases also strips accents.
    lowercase = normalizer["lowercase"]
    strip_accents = normalizer["strip_accents"]
    return lowercase, lowercase if strip_accents is None else strip_accents


# ------------------------------------------------------------------------------------------------
# Files


def new_writer(
    model: Any, tokenizer: Any, pooling: str, dtype: str, name: str, metadata: Mapping[str, str]
) -> gguf.GGUFWriter:
    """Return a writer with all keys of a file.

    Args:
        model: `NeoBERTModel` or `NeoBERTForSequenceClassification`.
        tokenizer: Fast tokenizer of transformers.
        pooling: Key of `POOLING`, for a model without a head.
        dtype: Type of the matrices: "f32", "f16", "q8_0" or "q5_0".
        name: Name of the model, `general.name`.
        metadata: Keys of license and base model.

    Raises:
        UserError: If GGUF does not support the tokenizer.
    """
    # The path is None because `write_tensors` passes it.
    check_vocabulary(tokenizer, model, name)
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    writer.add_name(name)
    writer.add_string("neobert.command", "export gguf")
    for key, text in metadata.items():
        writer.add_string(key, text)
    writer.add_base_model_count(sum(key.endswith(".repo_url") for key in metadata))
    add_model_keys(writer, model, pooling, dtype)
    add_tokenizer_keys(writer, tokenizer, model.get_input_embeddings().weight.shape[0])
    return writer


def write_tensors(writer: gguf.GGUFWriter, path: str | Path, model: Any, dtype: str) -> None:
    """Write a file with the keys of the writer and the tensors of a model.

    Args:
        writer: Result of `new_writer`.
        path: File to write.
        model: As in `new_writer`.
        dtype: As in `new_writer`.

    Raises:
        UserError: If a value is not finite, or too large for float16.
    """
    for name, array in tensors_of(model).items():
        storage_type = _storage_type(dtype, name, array)
        # A conversion to float16 would silently turn large values into infinity.
        largest = float(np.abs(array).max())
        if not np.isfinite(largest):
            raise UserError(f"{name} contains values that are NaN or infinite.")
        if storage_type == gguf.GGMLQuantizationType.F16 and largest > _MAX_F16:
            raise UserError(
                f"the values of {name} must be at most {_MAX_F16:.0f} in float16, got "
                f"{largest:.3g}. Use --dtype f32."
            )
        writer.add_tensor(name, gguf.quantize(array, storage_type), raw_dtype=storage_type)

    # The sections of the file must be written in this order.
    with contextlib.closing(writer):
        writer.write_header_to_file(Path(path))
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def compare_tensors(path: str | Path, model: Any, writer: gguf.GGUFWriter) -> tuple[float, bool]:
    """Compare the values of a file with those of a model.

    Args:
        path: GGUF file, which may be written by other software.
        model: As in `new_writer`.
        writer: Result of `new_writer`, with the keys that the file must have.

    Returns:
        The largest difference, relative to the largest value of its tensor; and whether all
        differences are rounding errors of the types in the file.

    Raises:
        UserError: If the file is not a GGUF file, or a key or a tensor is not that of the model.
    """
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # Arbitrary bytes can raise any exception.
        raise UserError(f"{path} must be a GGUF file: {one_line(error)}.") from error
    _check_keys(path, reader, writer)

    # Every tensor of the model must be in the file. Others, such as a decoder, have no effect.
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    worst = 0.0
    is_rounding = True
    for name, exact in tensors_of(model).items():
        stored = tensors.get(name)
        # GGUF lists the dimensions in reverse order.
        if stored is None or tuple(reversed(stored.shape.tolist())) != exact.shape:
            raise UserError(f"{path} must contain {name} with the shape {exact.shape}.")
        values = gguf.dequantize(stored.data, stored.tensor_type).reshape(exact.shape)
        # The bound avoids a division by zero.
        largest = max(float(np.abs(exact).max()), float(np.finfo(np.float32).tiny))
        errors = values - exact
        max_error = float(np.abs(errors).max()) / largest
        worst = max(worst, max_error)
        is_rounding &= max_error <= _MAX_ERRORS.get(stored.tensor_type, _MAX_OTHER_ERROR)
        is_rounding &= bool(np.linalg.norm(errors) <= _MAX_RELATIVE_ERROR * np.linalg.norm(exact))
    return worst, is_rounding


def _check_keys(path: str | Path, reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """Compare the keys of a file with those of the writer.

    Other software adds keys, and omits those that have their default. Keys about the file and not
    about the model are ignored.

    Raises:
        UserError: If a key differs.
    """
    # The writer holds one dictionary of keys per file of a split model.
    for key, expected in writer.kv_data[0].items():
        field = reader.get_field(key)
        is_about_file = key.startswith(("general.", "neobert.")) and key != "general.architecture"
        if field is None or is_about_file:
            continue
        value = expected.value
        actual = field.contents()
        if isinstance(value, float):
            # The file stores float32.
            value = np.float32(value)
            actual = np.float32(actual)
        if value != actual:
            raise UserError(f"{path} does not contain this model: {key} differs.")
