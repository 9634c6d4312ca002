"""The tokenizer of the result: loaded without code, written anew from what was parsed and not by
copying, loaded again and compared."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

from ..common.constants import TOKENIZER
from ..common.errors import UserError, listed, one_line
from ..common.files import read_json
from ..common.loading import prefix_space


# What a tokenizer may be made of.
_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
)
# What its tokenizer_config.json says beside its class and special tokens. No code, and no file.
_SETTINGS = """
    add_prefix_space clean_up_tokenization_spaces do_lower_case model_input_names padding_side
    strip_accents tokenize_chinese_chars truncation_side
""".split()
# An embedding may have the tokenizer's size rounded up to a multiple of one of these (padded for
# GPU efficiency).
_MULTIPLES = (8, 16, 32, 64, 128, 256, 512)
_TEXTS = ["The owl's nest, 42 metres up: caf\u00e9!", "[MASK] unaffable \u4f60\u597d", ""]


def find_tokenizer(argument, folders):
    """The folder of the tokenizer.

    Args:
        argument: value of --tokenizer: a folder, "none", or None for what is beside the checkpoint,
            then the bundled one.
        folders: where to look.
    Returns:
        Path, or None for "none".
    Raises:
        UserError: there is no tokenizer in the folder that was given.
    """
    if argument == "none":
        return None
    if argument is None:
        return next(
            (
                f
                for f in folders
                if any((f / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
            ),
            TOKENIZER,
        )
    if not any((Path(argument) / name).is_file() for name in _FILES):
        raise UserError(
            f"--tokenizer takes a folder with {listed(_FILES[:2])} ..., or none, but {argument} "
            "was given."
        )
    return Path(argument)


def check_rows(size, rows, folder):
    """Raises UserError unless a tokenizer of `size` tokens goes with `rows` of embedding: as many,
    or rounded up to a multiple of 8 ... 512."""
    allowed = sorted({size, *(-(-size // multiple) * multiple for multiple in _MULTIPLES)})
    if rows not in allowed:
        raise UserError(
            f"the checkpoint has {rows} vocabulary rows, but the tokenizer in {folder} has {size} "
            f"tokens (which allows {listed(allowed)} "
            "rows): give the right one with --tokenizer DIR, or --tokenizer none."
        )


def _load(folder):
    """The tokenizer of a folder, whose tokenizer_config.json may lack its class or be absent."""
    settings = folder / "tokenizer_config.json"
    settings = read_json(settings) if settings.exists() else {}
    named = isinstance(settings, dict) and isinstance(settings.get("tokenizer_class"), str)
    # NeoBERT's own is BERT's, which needs no more than its vocabulary.
    own = BertTokenizerFast if (folder / "vocab.txt").exists() else PreTrainedTokenizerFast
    return (
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if named
        else own.from_pretrained(folder)
    )


def _write(tokenizer, target, max_length):
    """Writes a loaded fast tokenizer to the folder `target`; it truncates at `max_length` tokens at
    the latest."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    (target / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    words = sorted(
        (number, word) for word, number in backend.get_vocab(with_added_tokens=False).items()
    )
    # vocab.txt has a token's id as the number of its line
    in_lines = [number for number, _ in words] == list(range(len(words)))
    is_bert = (
        isinstance(tokenizer, BertTokenizerFast)
        and type(backend.pre_tokenizer).__name__ == "BertPreTokenizer"
        and in_lines
    )
    if is_bert:
        (target / "vocab.txt").write_text(
            "".join(f"{word}\n" for _, word in words), encoding="utf-8"
        )
    special = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, (str, AddedToken))
    }
    own = tokenizer.model_max_length
    settings = {
        name: tokenizer.init_kwargs[name] for name in _SETTINGS if name in tokenizer.init_kwargs
    }
    settings |= prefix_space(backend.to_str())
    settings |= special | {
        "tokenizer_class": "BertTokenizer" if is_bert else "PreTrainedTokenizerFast",
        "model_max_length": min(own, max_length) if type(own) is int and own > 0 else max_length,
    }
    for name, content in (
        ("tokenizer_config.json", settings),
        ("special_tokens_map.json", special),
    ):
        (target / name).write_text(
            json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n",
            encoding="utf-8",
        )


def write_tokenizer(source, target, rows, max_length):
    """Writes the tokenizer of the folder `source` to the folder `target` and compares what both
    make of some texts.

    Args:
        source, target: folders.
        rows: of the model's embedding.
        max_length: tokens of its longest text.
    Raises:
        UserError: not loadable; without a fast form (tokenizer.json); not of this model.
    """
    try:
        tokenizer = _load(source)
        size = max(tokenizer.get_vocab().values()) + 1
        check_rows(size, rows, source)
        _write(tokenizer, target, max_length)
        same = _load(target)(_TEXTS)["input_ids"] == tokenizer(_TEXTS)["input_ids"]
    except UserError:
        raise
    except Exception as error:  # files of any content
        raise UserError(
            f"the tokenizer in {source} cannot be loaded: {one_line(error, 400)}"
        ) from error
    if not same:
        raise UserError(
            "the converted folder's tokenizer splits text otherwise than its source, so it was not "
            "kept."
        )
