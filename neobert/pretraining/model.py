"""Model and tokenizer of a run, with random weights or with the weights of another model."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase, set_seed

from ..common.constants import TOKENIZER
from ..common.errors import UserError, listed, one_line
from ..common.identity import model_fingerprint, tokenizer_fingerprint
from ..common.loading import (
    check_exists,
    check_model_fields,
    check_trained_head,
    embedding_sizes,
    load_tokenizer,
    vocabulary_size,
)
from ..configuration_neobert import ALIASES, NeoBERTConfig
from ..conversion.initial_model import write_initial_model
from ..modeling_neobert import NeoBERTForMaskedLM
from .sources import content_hash
from .vocabulary_transfer import RowSources, replace_vocabulary


# Directory in the output of a run with the Hub format of a raw checkpoint. It is removed when the
# run has finished.
START = ".start.tmp"

# Fields of the configuration that weights determine.
_SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "hidden_act",
    "norm_type",
    "position_embedding_type",
    "tie_word_embeddings",
)


# ------------------------------------------------------------------------------------------------
# start of a run


def is_raw_checkpoint(init_from: str) -> bool:
    """Return whether `init_from` is a local checkpoint that must be converted to the Hub format."""
    path = Path(init_from)
    # A directory with config.json has the Hub format, and a name without a local path is on the
    # Hub.
    return path.exists() and not (path / "config.json").is_file()


def init_fingerprint(init_from: str) -> str:
    """Return a string that identifies the weights that a run starts from.

    Raises:
        UserError: If there is no such model.
    """
    check_exists(init_from)
    if not is_raw_checkpoint(init_from):
        return model_fingerprint(init_from)

    # A raw checkpoint is a file or a directory of shards, and all of its files identify it.
    path = Path(init_from)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return content_hash(sorted(files))


def weights_folder(init_from: str, output: str | Path, is_first: bool) -> str:
    """Return the directory or Hub name of the weights that a run starts from.

    Args:
        init_from: Value of `init_from`.
        output: Output directory of the run, in which a raw checkpoint is converted.
        is_first: Whether this process converts the checkpoint. It must be the first one to call
            this function.

    Raises:
        UserError: If there is no such model, or the checkpoint cannot be converted.
    """
    check_exists(init_from)
    if not is_raw_checkpoint(init_from):
        return init_from

    # All processes load the copy that the first process converts.
    start = Path(output) / START
    if is_first:
        # An interrupted run leaves the directory behind.
        shutil.rmtree(start, ignore_errors=True)
        write_initial_model(init_from, start)
    return str(start)


# ------------------------------------------------------------------------------------------------
# tokenizer


def choose_tokenizer(
    name: str | None,
    start: str | None,
    init_embeddings: Literal["transfer"] | None = None,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a run.

    A run from random weights uses the named tokenizer, by default the bundled one. A run from other
    weights uses their tokenizer, unless `init_embeddings` is set.

    Args:
        name: Directory or Hub name of a tokenizer, or None.
        start: Result of `weights_folder`, or None.
        init_embeddings: Initialization of the embeddings of another tokenizer.

    Raises:
        UserError: If the named tokenizer differs from that of the weights, and `init_embeddings`
            is not set.
    """
    if start is None:
        return load_tokenizer(name or str(TOKENIZER))
    if name is None:
        return load_tokenizer(start)
    if init_embeddings is not None:
        return load_tokenizer(name)

    try:
        tokenizer = load_tokenizer(start)
    except UserError:
        # The directory contains weights alone.
        return load_tokenizer(name)
    if tokenizer_fingerprint(load_tokenizer(name)) != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"`tokenizer` {name} differs from the tokenizer of `init_from` {start}, to which the "
            "weights belong. Omit the option, or pass --init-embeddings transfer to initialize "
            "embeddings for its vocabulary."
        )
    return tokenizer


# ------------------------------------------------------------------------------------------------
# model


def make_model(
    model_config: Mapping[str, Any],
    start: str | None,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    rows: RowSources | None = None,
) -> NeoBERTForMaskedLM:
    """Return the model that a run trains, in float32.

    Args:
        model_config: Fields of NeoBERTConfig.
        start: Result of `weights_folder`, or None for random weights.
        tokenizer: Tokenizer of the model.
        seed: Random seed of the initialization.
        rows: Sources of the rows that replace the vocabulary of `start`, or None.

    Raises:
        UserError: If a field is unknown, the vocabularies of model and tokenizer do not match, or
            the weights are those of another architecture.
    """
    fields = dict(model_config)
    check_model_fields(fields, "model_config")

    # In training, the decoder then computes the logits of masked tokens alone, which saves most of
    # its memory and time.
    fields.setdefault("sparse_prediction", True)
    if start is not None:
        return _load_model(start, fields, tokenizer, rows)

    # A new model has one row per token, unless `model_config` adds padding rows.
    fields.setdefault("vocab_size", vocabulary_size(tokenizer))
    fields.setdefault("pad_token_id", tokenizer.pad_token_id)
    config = _make_config(fields)
    _check_vocabulary(config.vocab_size, tokenizer)

    # The weights are a function of the seed, whatever random numbers were used before.
    set_seed(seed)
    return NeoBERTForMaskedLM(config)


def without_vocabulary(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of NeoBERTConfig without those that describe the vocabulary.

    In a run that replaces the vocabulary of its initial model, they describe the new one.
    """
    names = ("vocab_size", "pad_token_id")
    return {name: value for name, value in model_config.items() if name not in names}


def read_config(model_config: Mapping[str, Any], start: str | None) -> NeoBERTConfig:
    """Return the configuration of the model that `make_model` returns, without loading weights.

    Args:
        model_config: Fields of NeoBERTConfig. With a start, they replace those of its config.json.
        start: Result of `weights_folder`, or None.

    Raises:
        UserError: If the configuration cannot be loaded, or a field is invalid.
    """
    if start is None:
        return _make_config(model_config)
    # transformers raises several types of errors for values that it does not accept.
    try:
        config = NeoBERTConfig.from_pretrained(start)
    except Exception as error:
        raise UserError(
            f"the config.json of `init_from` {start} cannot be loaded: {one_line(error)}."
        ) from error
    _override(config, model_config, start)
    return config


def _load_model(
    start: str,
    fields: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    rows: RowSources | None,
) -> NeoBERTForMaskedLM:
    """Load the weights of another model, and replace its vocabulary if `rows` is not None."""
    config = read_config({}, start)
    vocab_size = config.vocab_size
    pad_token_id = config.pad_token_id

    # Without new rows, the tokenizer must match the embeddings. With new rows, these fields
    # describe the new vocabulary and must not change the shape in which the old weights are loaded.
    if rows is None:
        _check_vocabulary(vocab_size, tokenizer, start)
    else:
        vocab_size = fields.pop("vocab_size", vocabulary_size(tokenizer))
        pad_token_id = fields.pop("pad_token_id", tokenizer.pad_token_id)
        _check_vocabulary(vocab_size, tokenizer)
    _override(config, fields, start)

    # A damaged file is an error of safetensors, another shape a RuntimeError, no file an OSError.
    try:
        loaded: Any = NeoBERTForMaskedLM.from_pretrained(
            start, config=config, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:
        raise UserError(
            f"the weights of `init_from` {start} cannot be loaded: {one_line(error)}."
        ) from error
    model, info = loaded

    check_trained_head(
        info, f"`init_from` {start}", "masked-LM head", "Use a masked language model of NeoBERT."
    )

    if rows is not None:
        replace_vocabulary(model, rows, vocab_size, pad_token_id)
    return model


def _make_config(fields: Mapping[str, Any]) -> NeoBERTConfig:
    try:
        return NeoBERTConfig(**fields)
    except (ValueError, TypeError) as error:
        raise UserError(f"`model_config`: {one_line(error)}.") from error


def _override(config: NeoBERTConfig, fields: Mapping[str, Any], start: str) -> None:
    """Set fields of a configuration, under any of their names.

    Raises:
        UserError: If a value is invalid, or the weights of `start` determine the field.
    """
    # A new configuration validates the values and normalizes them, such as the value False of
    # `rope`. Fields that are not set keep the shape of the weights, as the validation compares
    # several fields.
    named = {target for name in fields for target in ALIASES.get(name, (name,))}
    values = {
        name: getattr(config, name)
        for name in (*_SHAPE, "max_position_embeddings")
        if name not in named
    }
    new_config = _make_config({**values, **fields})

    for name, value in fields.items():
        for target in ALIASES.get(name, (name,)):
            # YaRN takes the length that the weights were trained with from `config`.
            new_value = value if target.startswith("rope_") else getattr(new_config, target)
            if target in _SHAPE and getattr(config, target) != new_value:
                raise UserError(
                    f"`{target}` of `init_from` {start} is {getattr(config, target)!r}, but "
                    f"`model_config` sets {new_value!r}."
                )
            setattr(config, target, new_value)


def _check_vocabulary(
    vocab_size: int, tokenizer: PreTrainedTokenizerBase, start: str | None = None
) -> None:
    """Check that a model and a tokenizer have the same vocabulary, except for padding rows.

    Args:
        vocab_size: Number of rows of the embedding.
        tokenizer: Tokenizer of the model.
        start: Directory of the weights if they determine `vocab_size`, None if `model_config` does.

    Raises:
        UserError: If the number of rows is not among `embedding_sizes`.
    """
    size = vocabulary_size(tokenizer)
    allowed = embedding_sizes(size)
    if vocab_size in allowed:
        return
    if start is None:
        raise UserError(
            f"`model_config.vocab_size` must be one of {listed(allowed)} for a tokenizer of {size} "
            f"tokens, got {vocab_size}."
        )
    raise UserError(
        f"`init_from` {start} has a vocabulary of {vocab_size:,} tokens, but the tokenizer has "
        f"{size:,} tokens. Use the tokenizer of the model."
    )
