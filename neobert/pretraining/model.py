"""The model that a run trains: freshly initialised, or from the weights of another run."""

import shutil
from pathlib import Path

import torch
from transformers import set_seed

from ..common.constants import TOKENIZER
from ..common.errors import UserError, one_line
from ..common.loading import ALIASES, check_model_fields, check_there, load_tokenizer
from ..configuration_neobert import NeoBERTConfig
from ..conversion.start import write_start
from ..modeling_neobert import NeoBERTForMaskedLM
from .prepared import tokenizer_fingerprint
from .vocabulary_transfer import replace_vocabulary


# The Hub folder of a raw checkpoint in the output of a run, until the run has finished.
START = ".start.tmp"

# What weights are made for.
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


def choose_tokenizer(given, start, init_embeddings=None):
    """The tokenizer of a run: that of the weights it starts from, whose embeddings belong to it,
    unless they are to be replaced; else the given or the bundled one.

    Args:
        given: folder or Hub name, or None.
        start: see `weights_folder`, or None.
        init_embeddings: how rows for the vocabulary of `given` are made, or None.
    Raises:
        UserError: `given` is not the tokenizer of `start`, and nothing says where its rows come
            from.
    """
    if start is None:
        return load_tokenizer(given or str(TOKENIZER))
    if init_embeddings is not None:
        return load_tokenizer(given)
    try:
        tokenizer = load_tokenizer(start)
    except UserError:
        if given is None:
            raise
        return load_tokenizer(given)  # weights alone
    if given is not None and tokenizer_fingerprint(load_tokenizer(given)) != tokenizer_fingerprint(
        tokenizer
    ):
        raise UserError(
            f"tokenizer {given} is another one than that of init_from {start}, which the weights "
            "belong to; leave it out, or give init_embeddings: transplant, which makes the rows of "
            "its vocabulary out of theirs"
        )
    return tokenizer


def make_model(model_config, init_from, tokenizer, seed, rows=None):
    """`NeoBERTForMaskedLM`, in float32.

    Args:
        model_config: {field of NeoBERTConfig: value}, or None.
        init_from: `weights_folder`, or None for a fresh initialisation.
        tokenizer: whose vocabulary it has.
        seed: of the initialisation.
        rows: `Rows` that replace the vocabulary of `init_from`, or None.
    Raises:
        UserError: an unknown configuration field, a vocabulary that does not match the tokenizer's,
            weights of another architecture.
    """
    given = dict(model_config or {})
    check_model_fields(given, "model_config")
    given.setdefault("sparse_prediction", True)
    if init_from is not None:
        return _load(init_from, given, tokenizer, rows)
    given.setdefault("vocab_size", len(tokenizer))
    given.setdefault("pad_token_id", tokenizer.pad_token_id)
    config = _checked_config(given)
    _check_vocabulary(config.vocab_size, tokenizer, "model_config")
    set_seed(seed)
    return NeoBERTForMaskedLM(config)


def read_config(model_config: dict | None, init_from: str | None) -> NeoBERTConfig:
    """Return the configuration that `make_model` starts from, without loading weights.

    Args:
        model_config: Fields of NeoBERTConfig; only `init_from`'s own count where it is given.
        init_from: Folder or Hub name as `weights_folder` returns it, or None.

    Raises:
        UserError: The configuration cannot be loaded.
    """
    if init_from is None:
        return _checked_config(model_config or {})
    try:
        return NeoBERTConfig.from_pretrained(init_from)
    except Exception as error:  # the library has no one kind for values that it cannot read
        raise UserError(
            f"init_from {init_from}: its config.json cannot be loaded ({one_line(error)})"
        ) from error


def _load(name, given, tokenizer, rows):
    config = read_config(None, name)
    if rows is None:
        _check_vocabulary(config.vocab_size, tokenizer, f"init_from {name}")
    else:
        count = given.pop("vocab_size", len(tokenizer))
        pad = given.pop("pad_token_id", tokenizer.pad_token_id)
        _check_vocabulary(count, tokenizer, "model_config")
    _override(config, given, name)
    try:
        model, info = NeoBERTForMaskedLM.from_pretrained(
            name, config=config, dtype=torch.float32, output_loading_info=True
        )
    # safetensors' own for a torn file, RuntimeError for other shapes, OSError for no file
    except Exception as error:
        raise UserError(
            f"init_from {name}: its weights cannot be loaded ({one_line(error)})"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"init_from {name} has no weights for {', '.join(missing[:3])}; a masked-LM checkpoint "
            "of NeoBERT is needed"
        )
    if rows is not None:
        replace_vocabulary(model, rows, count, pad)
    return model


def _checked_config(values):
    try:
        return NeoBERTConfig(**values)
    except (ValueError, TypeError) as error:
        raise UserError(f"model_config: {error}") from error


def _override(config, given, source):
    """Sets the fields of `config` that `given` names, under whichever name; UserError for one that
    the weights of `source` fix."""
    named = {target for name in given for target in ALIASES.get(name, (name,))}
    kept = {
        name: getattr(config, name)
        for name in (*_SHAPE, "max_position_embeddings")
        if name not in named
    }
    wanted = _checked_config({**kept, **given})
    for name in given:
        for target in ALIASES.get(name, (name,)):
            # YaRN takes the length that the weights were trained at from `config`.
            value = given[name] if target.startswith("rope_") else getattr(wanted, target)
            if target in _SHAPE and getattr(config, target) != value:
                raise UserError(
                    f"init_from {source} has {target}={getattr(config, target)!r}, but "
                    f"model_config asks for {value!r}"
                )
            setattr(config, target, value)


def _check_vocabulary(rows, tokenizer, where):
    """Some padding rows (to a multiple of 128, say) are fine; fewer rows than tokens, or far more,
    are another vocabulary."""
    if not len(tokenizer) <= rows < len(tokenizer) + 128:
        raise UserError(
            f"{where} has a vocabulary of {rows}, but the tokenizer has {len(tokenizer)} tokens; "
            "they must belong together"
        )


def weights_folder(init_from, output, is_first):
    """Where the weights of `init_from` are: itself, or of a raw checkpoint the Hub folder of it,
    `START` in `output`, which the run's first process makes."""
    check_there(init_from)
    if not Path(init_from).exists() or (Path(init_from) / "config.json").is_file():
        return init_from
    start = Path(output) / START
    if is_first:
        shutil.rmtree(start, ignore_errors=True)  # of a run that was interrupted
        write_start(init_from, start)
    return str(start)
