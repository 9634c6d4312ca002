"""What several commands load alike: the bundled folders, devices, dtypes, tokenizers, and how long
a text a model takes."""

import functools
import json
import re
import shutil
import sys
from pathlib import Path

import torch

from ..configuration_neobert import ALIASES, NeoBERTConfig
from .constants import PACKAGE
from .errors import UserError, one_line
from .files import json_text, read_json, write_text
from .measures import best_times, one_thread
from .options import suggestion


CODE_FILES = ("configuration_neobert.py", "attention_neobert.py", "modeling_neobert.py")
# Of weights in a file, by the names of options.
WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def copy_code(folder):
    """Puts the model's code files into a folder for the Hub."""
    for name in CODE_FILES:
        shutil.copyfile(PACKAGE / name, Path(folder) / name)


def choose_device(device=None):
    """The torch.device of a name, or the first CUDA device, or the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: "float32"."""
    return str(dtype).removeprefix("torch.")


def choose_dtype(dtype, device):
    """torch dtype by name; "auto": float16 on CUDA, as in the paper; on the CPU the fastest of
    floating point by a short measurement, printed with its reason."""
    if dtype == "auto":
        kind = torch.device(device).type
        dtype = "float16" if kind == "cuda" else _fastest_on_cpu() if kind == "cpu" else "float32"
    return getattr(torch, dtype)


@functools.cache
def _fastest_on_cpu():
    """float16, which is nearer to float32 than bfloat16, where it is about as fast; 16 bits only
    where they pay: CPUs without units for them are up to 400 times slower."""
    rates = matrix_rates()
    fast = [name for name in ("float16", "bfloat16") if rates[name] >= 2 * rates["float32"]]
    dtype = "bfloat16" if "bfloat16" in fast else "float32"
    if "float16" in fast and rates["float16"] >= 0.8 * rates["bfloat16"]:
        dtype = "float16"
    told = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in rates.items())
    print(
        f"dtype {dtype}, by the matrix products of this CPU, GFLOP/s a core: {told}",
        file=sys.stderr,
    )
    return dtype


def matrix_rates(width=768, rows=128, repeats=5):
    """{dtype: floating-point operations a second} of linear layers on one core, the best of some
    runs in turns.

    Takes a few hundredths of a second. A dtype that takes more than twice as long as float32 on 16
    rows is not tried on more, which could take seconds.
    """
    names = ("float32", "float16", "bfloat16")
    inputs = {name: torch.ones(rows, width, dtype=getattr(torch, name)) for name in names}

    def seconds(names, rows, repeats):
        calls = {
            name: functools.partial(torch.nn.functional.linear, inputs[name][:rows], weights[name])
            for name in names
        }
        return best_times(calls, repeats)

    weights = {name: torch.ones(width, width, dtype=x.dtype) for name, x in inputs.items()}
    # The ratios are those of all cores, and other work on them disturbs less.
    with one_thread(), torch.inference_mode():
        small = seconds(names, 16, 3)
        large = seconds(
            [name for name in names if small[name] <= 2 * small["float32"]], rows, repeats
        )
    return {
        name: 2 * width * width * (rows / large[name] if name in large else 16 / small[name])
        for name in names
    }


def check_there(name):
    """Raises UserError for a name that is neither a file or folder, nor may be one on the Hub,
    ORGANISATION/MODEL. No network is asked."""
    path, name = Path(name), str(name)
    on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not path.parent.is_dir()
    if not (name and path.exists()) and not on_hub:
        raise UserError(
            f"there is no {name or repr(name)}; give a folder, or a name on the Hub as "
            "ORGANISATION/MODEL"
        )


def check_model(name):
    """Raises UserError unless `name` is a folder with a model's configuration, or may be a name on
    the Hub; see `check_there`."""
    check_there(name)
    path = Path(name)
    if path.exists() and not any(
        (path / file).is_file() for file in ("config.json", "modules.json")
    ):
        raise UserError(
            f"there is no model in {name}: it needs a config.json or modules.json (a raw "
            "checkpoint goes through neobert convert)"
        )


def load_tokenizer(name, trust_remote_code=False):
    """The tokenizer of a folder or Hub repository; UserError where there is none."""
    check_there(name)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    # a missing file is OSError, ValueError, KeyError or AttributeError, depending on the version
    except Exception as error:
        raise UserError(
            f"no tokenizer was found in {name}; it needs a tokenizer.json ({one_line(error)})"
        ) from error
    # transformers 5 makes an empty one where there are no files
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"no tokenizer was found in {name}; it needs a tokenizer.json")
    return tokenizer


def save_tokenizer(tokenizer, folder):
    """`tokenizer.save_pretrained`, so that transformers 4 loads it too."""
    tokenizer.save_pretrained(folder)
    name_tokenizer_class(folder)


def name_tokenizer_class(folder):
    """Gives a tokenizer that transformers 5 saved a form that transformers 4 loads alike: the older
    names of its class and settings."""
    path = Path(folder) / "tokenizer_config.json"
    if not path.is_file():
        return
    old = read_json(path)
    settings = dict(old)
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings |= prefix_space((path.parent / "tokenizer.json").read_text(encoding="utf-8"))
    if settings != old:
        write_text(path, json_text(settings))


def prefix_space(text):
    """{"add_prefix_space": ...} as the text of a tokenizer.json has it, {} where it says nothing.

    Version 4 takes the space before a text from tokenizer_config.json, and where nothing is said
    there changes tokenizer.json's.
    """
    words = json.loads(text)["pre_tokenizer"] or {}
    return {name: words[name] for name in ("add_prefix_space",) if name in words}


def check_vocabulary(tokenizer, model, name):
    """Raises UserError when the tokenizer has more tokens than the model has rows."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, but the embedding of {name} has {rows} "
            "rows; is it this model's?"
        )


def position_limit(model):
    """Longest text in tokens that the model has positions for, None if it has no such limit (T5).

    RoBERTa and its kin count from the padding's index + 1.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    if not positions:
        return None
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return positions - (0 if padding is None else padding + 1)


def text_limit(model, tokenizer):
    """Longest text in tokens that the model takes: of its positions and of its tokenizer, whichever
    is smaller; None if unbounded."""
    limits = [position_limit(model.base_model), tokenizer.model_max_length]
    limits = [limit for limit in limits if limit and 0 < limit < 1_000_000]
    return min(limits) if limits else None


def check_model_fields(fields, where):
    """Raises UserError for a name that NeoBERTConfig does not know.

    Args:
        fields: {field: value} of a model's configuration, as a recipe gives them.
        where: the option that holds them, for the message.
    """
    known = [*NeoBERTConfig().to_dict(), "rope_theta", "rope_scaling", *ALIASES]
    for name in fields:
        if name not in known:
            hint = suggestion(name, known, known="NeoBERTConfig lists the fields.")
            raise UserError(f"`{where}` has the unknown field {name!r}.{hint}")
