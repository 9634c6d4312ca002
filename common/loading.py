"""What several commands load alike: the bundled folders, devices, dtypes, tokenizers, and how long a text a model takes."""

from pathlib import Path

import torch

from .errors import UserError, one_line


ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "tokenizer"
RECIPES = ROOT / "recipes"
DTYPES = ("auto", "float32", "float16", "bfloat16")


def choose_device(device=None):
    """`device`, or the first CUDA device, or the CPU.

    Raises:
        UserError: there is no such device on this machine.
    """
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"the device {str(device)!r} cannot be used here ({one_line(error)}); give cpu, cuda or cuda:<number>") from None
    return device


def choose_dtype(dtype, device):
    """torch dtype by name; "auto" is float16 on CUDA (as the paper evaluates) and float32 elsewhere."""
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, but {dtype!r} was given")
    if dtype == "auto":
        dtype = "float16" if torch.device(device).type == "cuda" else "float32"
    return getattr(torch, dtype)


def load_tokenizer(name, padding=True, trust_remote_code=False):
    """The tokenizer of a folder or Hub repository.

    Raises:
        UserError: there is none, or, with `padding`, it has no padding token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # a missing file is OSError, ValueError, KeyError or AttributeError, depending on the version
        raise UserError(f"no tokenizer was found in {name}: give its folder with --tokenizer ({one_line(error)})") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers 5 makes an empty one where there are no files
        raise UserError(f"no tokenizer was found in {name}: give its folder with --tokenizer")
    if padding and tokenizer.pad_token_id is None:
        raise UserError(f"the tokenizer of {name} has no padding token, so its texts cannot share a batch; is this an encoder?")
    return tokenizer


def check_vocabulary(tokenizer, model, name):
    """Raises UserError when the tokenizer has more tokens than the model has rows."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(f"the tokenizer has {len(tokenizer)} tokens, but the embedding of {name} has {rows} rows; is it this model's?")


def position_limit(model):
    """Longest text in tokens that the model has positions for; RoBERTa and its kin count from the padding's index + 1."""
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return model.config.max_position_embeddings - (0 if padding is None else padding + 1)


def text_limit(model, tokenizer):
    """Longest text in tokens that the model takes: of its positions and of its tokenizer, whichever is smaller; None if unbounded."""
    positions = getattr(model.config, "max_position_embeddings", None) and position_limit(model.base_model)
    limits = [positions, tokenizer.model_max_length]
    limits = [limit for limit in limits if limit and 0 < limit < 1_000_000]
    return min(limits) if limits else None
