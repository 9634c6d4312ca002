"""Devices, dtypes, models and tokenizers: choice, loading and checks that commands share."""

import functools
import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from ..configuration_neobert import ALIASES, NeoBERTConfig
from .constants import DEFAULT_CPU_BATCH_TOKENS, DEFAULT_CUDA_BATCH_TOKENS, PACKAGE
from .errors import UserError, listed, one_line
from .files import json_text, read_json, write_text
from .measures import best_times, one_thread
from .options import suggestion


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger("neobert.loading")

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
CODE_FILES = ("configuration_neobert.py", "attention_neobert.py", "modeling_neobert.py")

# Dtypes of weights in a file, by the names of options.
WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# `block_type` of NeoBERT. The ablations of the paper have other blocks.
STANDARD_BLOCK = ("rms", "swiglu", "rope")


def copy_code(folder: str | Path) -> None:
    """Copy the code files of the model to a Hub folder."""
    for name in CODE_FILES:
        shutil.copyfile(PACKAGE / name, Path(folder) / name)


# ------------------------------------------------------------------------------------------------
# devices and dtypes


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """Return a device, by default the first GPU, or the CPU if there is none.

    Raises:
        UserError: If this machine has no such device.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # torch raises several types of errors for an unknown or missing device.
    try:
        result = torch.device(chosen)
        torch.empty(0, device=result)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"`device` must be a device of this machine, got {chosen} ({one_line(error)})."
        ) from None
    return result


def default_batch_tokens(device: torch.device) -> int:
    """Return the default number of tokens per batch of an encoder on a device."""
    return DEFAULT_CUDA_BATCH_TOKENS if device.type == "cuda" else DEFAULT_CPU_BATCH_TOKENS


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: "float32"."""
    return str(dtype).removeprefix("torch.")


def choose_dtype(dtype: str, device: str | torch.device) -> torch.dtype:
    """Return the dtype with a name.

    Args:
        dtype: Name of a dtype, or "auto": float16 on CUDA as in the paper, the fastest
            floating-point type on the CPU by a short measurement, float32 on other devices.
        device: Device of the model.
    """
    if dtype == "auto":
        device_type = torch.device(device).type
        if device_type == "cuda":
            dtype = "float16"
        elif device_type == "cpu":
            dtype = _fastest_on_cpu()
        else:
            dtype = "float32"
    return getattr(torch, dtype)


def check_regression_dtype(dtype: str) -> None:
    """Check that a precision is sufficient for the values of a regression.

    Raises:
        UserError: If the precision has 16 bits.
    """
    # The mean of the labels is the bias of the last layer. In bfloat16, values near 2,000 have
    # steps of 8.
    if dtype in ("bfloat16", "float16"):
        raise UserError(
            f"`dtype` must be float32 or int8 for a regression, got {dtype}, which would round the "
            "values to 2 or 3 digits."
        )


@functools.cache
def _fastest_on_cpu() -> str:
    """Return the name of the dtype to use on this CPU.

    A 16-bit type must be at least twice as fast as float32: without instructions for it, a CPU is
    up to 400 times slower. float16, which is more precise than bfloat16, is preferred if it is
    about as fast.
    """
    rates = matrix_rates()
    fast = [name for name in ("float16", "bfloat16") if rates[name] >= 2 * rates["float32"]]
    dtype = "bfloat16" if "bfloat16" in fast else "float32"
    if "float16" in fast and rates["float16"] >= 0.8 * rates["bfloat16"]:
        dtype = "float16"

    figures = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in rates.items())
    logger.info(
        "dtype %s, from matrix products on this CPU in GFLOP/s per core: %s", dtype, figures
    )
    return dtype


def matrix_rates(size: int = 768, rows: int = 128, repeats: int = 5) -> dict[str, float]:
    """Return the speed of linear layers on one core by dtype, in floating-point operations/s.

    The dtypes take turns, and the best of the repeats counts. The measurement takes a few
    hundredths of a second: a dtype that takes more than twice the time of float32 for 16 rows is
    not measured with more rows, which could take seconds.

    Args:
        size: Input and output dimension of the layer.
        rows: Number of rows of the input.
        repeats: Number of repeats.
    """
    names = ("float32", "float16", "bfloat16")
    # Uninitialized memory may contain denormal numbers, which some processors multiply slowly.
    inputs = {name: torch.ones(rows, size, dtype=getattr(torch, name)) for name in names}
    weights = {name: torch.ones(size, size, dtype=x.dtype) for name, x in inputs.items()}

    def seconds(names: Sequence[str], rows: int, repeats: int) -> dict[str, float]:
        calls = {
            name: functools.partial(torch.nn.functional.linear, inputs[name][:rows], weights[name])
            for name in names
        }
        return best_times(calls, repeats)

    # The ratios on one core are those on all cores, and are less affected by other load.
    with one_thread(), torch.inference_mode():
        few_rows = seconds(names, 16, 3)
        fast = [name for name in names if few_rows[name] <= 2 * few_rows["float32"]]
        all_rows = seconds(fast, rows, repeats)

    # Each weight takes one multiplication and one addition per row.
    operations_per_row = 2 * size * size
    rates = {}
    for name in names:
        if name in all_rows:
            rates[name] = operations_per_row * (rows / all_rows[name])
        else:
            rates[name] = operations_per_row * (16 / few_rows[name])
    return rates


# ------------------------------------------------------------------------------------------------
# models


def check_exists(name: str | Path) -> None:
    """Check that a name is an existing path, or may be a name on the Hub.

    The network is not used.

    Raises:
        UserError: If there is no such path, and the name is not of the form ORGANIZATION/MODEL.
    """
    path = Path(name)
    name = str(name)
    # Path("") is the current directory, which exists.
    if name and path.exists():
        return
    # If its first part is a directory, the name is a path with an error in its last part.
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not path.parent.is_dir()
    if not is_hub_name:
        raise UserError(
            f"there is no {name or repr(name)}. Pass a directory, or a name on the Hub such as "
            "ORGANIZATION/MODEL."
        )


def check_model(name: str | Path) -> None:
    """Check that a name is a directory with the configuration of a model, or a name on the Hub.

    Raises:
        UserError: If the directory contains no model, or as in `check_exists`.
    """
    check_exists(name)
    path = Path(name)
    if not path.exists():
        return
    if not any((path / file).is_file() for file in ("config.json", "modules.json")):
        raise UserError(
            f"there is no model in {name}: it must contain a config.json or modules.json. Convert "
            "a raw checkpoint with `neobert convert` first."
        )


def model_file(model: str | Path, name: str) -> Path | None:
    """Return the path of a file of a model, or None if the model does not have the file.

    Files of a Hub model are downloaded to the local cache. Offline, only the cache is searched.

    Args:
        model: Directory of a model, or its name on the Hub.
        name: Name of the file.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None

    # The import takes seconds, and a directory does not need it.
    from transformers.utils import cached_file

    # If the Hub or the repository cannot be accessed, loading the model reports the reason.
    try:
        path = cached_file(
            model,
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:
        return None
    return Path(path) if path else None


def tensor_names(model: str | Path) -> list[str] | None:
    """Return the names of the tensors of a model, or None if it has no safetensors files.

    Args:
        model: Directory of a model, or its name on the Hub.
    """
    if index := model_file(model, WEIGHTS_INDEX):
        return list(read_json(index)["weight_map"])
    path = model_file(model, WEIGHTS)
    if path is None:
        return None
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def check_all_weights_stored(name: str | Path, model: "PreTrainedModel") -> None:
    """Check that the files of a NeoBERT contain all of its weights.

    transformers initializes missing weights randomly, so every process would have another model.

    Args:
        name: Directory of the model, or its name on the Hub.
        model: Model that was loaded from there.

    Raises:
        UserError: If weights are missing.
    """
    # An adapter has its own files, and adds parameters to the model.
    stored = None if model_file(name, "adapter_config.json") else tensor_names(name)
    if model.config.model_type != "neobert" or stored is None:
        return
    # The names of the backbone have this prefix in a model with a head, but not in a backbone.
    prefix = f"{model.base_model_prefix}."
    stored_names = {name.removeprefix(prefix) for name in stored}
    missing = [name for name in model.state_dict() if name.removeprefix(prefix) not in stored_names]
    if missing:
        raise UserError(
            f"the weights of {name} lack {listed(missing, 3)}. Save the model again after training "
            "it, or download it again."
        )


def check_trained_head(
    loading_info: Mapping[str, Any], model: str | Path, head: str, remedy: str
) -> None:
    """Check that a checkpoint contains all weights of the model that was loaded from it.

    transformers initializes missing weights randomly, and only warns about them. The head is
    missing in the checkpoint of an encoder.

    Args:
        loading_info: Second result of `from_pretrained(..., output_loading_info=True)`.
        model: Name of the model in the message.
        head: Name of the head in the message.
        remedy: Last sentence of the message.

    Raises:
        UserError: If weights are missing.
    """
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise UserError(
            f"{model} must have a trained {head}, got a checkpoint without {listed(missing, 3)}. "
            f"{remedy}"
        )


def check_model_fields(fields: Mapping[str, Any], where: str) -> None:
    """Check that NeoBERTConfig has all fields of a configuration.

    Args:
        fields: Fields of a configuration, {field: value}.
        where: Option that contains the fields.

    Raises:
        UserError: If there is an unknown field.
    """
    # NeoBERTConfig also accepts the older names of `rope_parameters`.
    known = [*NeoBERTConfig().to_dict(), "rope_theta", "rope_scaling", *ALIASES]
    for name in fields:
        if name not in known:
            hint = suggestion(name, known, fallback="NeoBERTConfig lists the fields.")
            raise UserError(f"`{where}` has the unknown field {name!r}.{hint}")


def block_type(config: Any) -> tuple[str, str, str]:
    """Return the norm, activation and position embeddings of the blocks of a NeoBERT.

    Code that computes the blocks itself supports `STANDARD_BLOCK` only.

    Args:
        config: `NeoBERTConfig`.
    """
    return config.norm_type, config.hidden_act, config.position_embedding_type


def position_limit(model: Any) -> int | None:
    """Return the maximum sequence length that a model has positions for.

    Args:
        model: Encoder of transformers.

    Returns:
        Number of tokens, None for models without such a limit (T5).
    """
    # The context of a NeoBERT may be extended by RoPE scaling.
    positions = getattr(model.config, "context_length", None)
    positions = positions or getattr(model.config, "max_position_embeddings", None)
    if not positions:
        return None
    # RoBERTa and similar models count positions from the index of the padding token + 1.
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return positions - (0 if padding is None else padding + 1)


def text_limit(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the maximum sequence length of a model and its tokenizer.

    Returns:
        Number of tokens, None if there is no limit.
    """
    limits = [position_limit(model.base_model), tokenizer.model_max_length]
    # A tokenizer without a limit has the limit 10^30.
    finite = [limit for limit in limits if limit and 0 < limit < 1_000_000]
    return min(finite) if finite else None


def load_config(name: str | Path, trust_remote_code: bool = False) -> "PreTrainedConfig":
    """Return the configuration of a directory or a Hub repository.

    Raises:
        UserError: If it cannot be loaded.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} cannot be loaded: {one_line(error)}.") from error


# ------------------------------------------------------------------------------------------------
# tokenizers


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a directory or a Hub repository.

    Raises:
        UserError: If there is no tokenizer.
    """
    # A misspelled path is reported before the import, which takes seconds, and before transformers
    # looks for a Hub repository of that name.
    check_exists(name)
    from transformers import AutoTokenizer

    # A missing file is an OSError, ValueError, KeyError or AttributeError, depending on the version
    # of transformers.
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(
            f"no tokenizer was found in {name} ({one_line(error)}). A tokenizer.json is required."
        ) from error
    # transformers 5 returns an empty tokenizer if there are no files.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"no tokenizer was found in {name}. A tokenizer.json is required.")
    return tokenizer


def vocabulary_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the number of rows that a table over the ids of a tokenizer needs.

    The ids may have gaps, for example if vocab.txt contains a line twice, so the number of tokens
    may be lower.
    """
    return max(tokenizer.get_vocab().values()) + 1


def embedding_sizes(size: int) -> list[int]:
    """Return the numbers of rows that the embedding of a vocabulary may have, ascending.

    These are the size of the vocabulary, and this size rounded up to a multiple of 8, 16, ..., 512,
    which is efficient on GPUs. With another number of rows, a tokenizer probably belongs to another
    model.

    Args:
        size: Result of `vocabulary_size`.
    """
    multiples = (8, 16, 32, 64, 128, 256, 512)
    return sorted({size, *(-(-size // multiple) * multiple for multiple in multiples)})


def check_vocabulary(
    tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel", name: str | Path
) -> None:
    """Check that the embedding of a model has a row for every token of the tokenizer.

    Args:
        tokenizer: Tokenizer of the texts.
        model: Model with an input embedding.
        name: Name of the model in the message.

    Raises:
        UserError: If the tokenizer has more tokens.
    """
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    if vocabulary_size(tokenizer) > rows:
        raise UserError(
            f"the tokenizer must have at most {rows} tokens, the rows of the embedding of {name}, "
            f"got {vocabulary_size(tokenizer)}. Use the tokenizer of this model."
        )


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: str | Path) -> None:
    """Save a tokenizer so that transformers 4 loads it, too."""
    tokenizer.save_pretrained(folder)
    name_tokenizer_class(folder)


def name_tokenizer_class(folder: str | Path) -> None:
    """Rename the class and the settings of a tokenizer to the names of transformers 4.

    transformers 4 cannot load the names of version 5, and both versions load the older names
    identically.
    """
    path = Path(folder) / "tokenizer_config.json"
    if not path.is_file():
        return
    saved = read_json(path)
    settings = dict(saved)
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    # TokenizersBackend is the class of transformers 5 for any tokenizer.json.
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings.update(prefix_space((path.parent / "tokenizer.json").read_text(encoding="utf-8")))
    # A file that is right already keeps its exact bytes, and the model its digest.
    if settings != saved:
        write_text(path, json_text(settings))


def prefix_space(text: str) -> dict[str, bool]:
    """Return the setting `add_prefix_space` of a tokenizer.json, {} if there is none.

    transformers 4 reads the setting from tokenizer_config.json. If it is missing there, version 4
    overrides that of tokenizer.json.

    Args:
        text: Content of tokenizer.json.
    """
    pre_tokenizer = json.loads(text)["pre_tokenizer"] or {}
    if "add_prefix_space" not in pre_tokenizer:
        return {}
    return {"add_prefix_space": pre_tokenizer["add_prefix_space"]}
