"""Tokenizer of the converted folder.

The tokenizer is loaded without executing code, and written from the parsed content instead of being
copied. The written tokenizer is loaded again and compared with the source.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import (  # type: ignore[attr-defined]
    AutoTokenizer,
    BertTokenizerFast,
    PreTrainedTokenizerFast,
)

from ..common.constants import TOKENIZER
from ..common.errors import UserError, listed, one_line
from ..common.files import read_json
from ..common.loading import embedding_sizes, prefix_space


# Files that identify the directory of a tokenizer.
_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
)
# Settings of tokenizer_config.json that are kept beside the class and the special tokens. None of
# them refers to code or to a file.
_SETTINGS = """
    add_prefix_space clean_up_tokenization_spaces do_lower_case model_input_names padding_side
    strip_accents tokenize_chinese_chars truncation_side
""".split()
# Texts by which the written tokenizer is compared with its source.
_TEXTS = ["The owl's nest, 42 metres up: caf\u00e9!", "[MASK] unaffable \u4f60\u597d", ""]


def find_tokenizer(option: str | Path | None, folders: Iterable[Path]) -> Path | None:
    """Return the directory of the tokenizer.

    Args:
        option: Value of `--tokenizer`: a directory, "none", or None for the tokenizer beside the
            checkpoint, else the bundled one.
        folders: Directories to search.

    Returns:
        Path of the directory, or None for "none".

    Raises:
        UserError: If `option` is a directory without a tokenizer.
    """
    if option == "none":
        return None
    if option is None:
        for folder in folders:
            if (folder / "tokenizer.json").is_file() or (folder / "vocab.txt").is_file():
                return folder
        return TOKENIZER

    if not any((Path(option) / name).is_file() for name in _FILES):
        raise UserError(
            f"`--tokenizer` must be a directory with {' or '.join(_FILES[:2])}, or none, got "
            f"{option}."
        )
    return Path(option)


def check_rows(size: int, rows: int, folder: str | Path) -> None:
    """Check that a tokenizer fits an embedding.

    The number of rows must be among `embedding_sizes`.

    Args:
        size: Number of tokens.
        rows: Number of rows of the embedding.
        folder: Directory of the tokenizer, for the message.

    Raises:
        UserError: If the tokenizer does not fit.
    """
    allowed = embedding_sizes(size)
    if rows not in allowed:
        raise UserError(
            f"the checkpoint has {rows} vocabulary rows, but the tokenizer in {folder} has {size} "
            f"tokens (which allows {listed(allowed)} rows). Pass the right one with `--tokenizer "
            "DIR`, or `--tokenizer none`."
        )


def write_tokenizer(source: Path, target: Path, rows: int, max_length: int) -> None:
    """Write the tokenizer of one directory to another, and compare both on a few texts.

    Args:
        source: Directory of the tokenizer.
        target: Existing directory to write to.
        rows: Number of rows of the model's embedding.
        max_length: Maximum sequence length of the model in tokens.

    Raises:
        UserError: If the tokenizer cannot be loaded, has no fast form (tokenizer.json), or does not
            fit the model.
    """
    try:
        tokenizer = _load(source)
        # Ids may have gaps, so the largest id decides and not the number of tokens.
        size = max(tokenizer.get_vocab().values()) + 1
        check_rows(size, rows, source)
        _write(tokenizer, target, max_length)
        is_equal = _load(target)(_TEXTS)["input_ids"] == tokenizer(_TEXTS)["input_ids"]
    except UserError:
        raise
    except Exception as error:  # Untrusted files can raise any exception.
        raise UserError(
            f"the tokenizer in {source} cannot be loaded: {one_line(error, 400)}."
        ) from error

    if not is_equal:
        raise UserError(
            "the tokenizer of the converted folder splits text differently than its source. The "
            "folder was discarded."
        )


def _load(folder: Path) -> Any:
    """Load a tokenizer; tokenizer_config.json may be missing, or not name the class."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    if isinstance(settings, dict) and isinstance(settings.get("tokenizer_class"), str):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    # The published tokenizer is BERT's, which needs its vocabulary only.
    if (folder / "vocab.txt").exists():
        return BertTokenizerFast.from_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _write(tokenizer: Any, target: Path, max_length: int) -> None:
    """Write a loaded fast tokenizer, which truncates at `max_length` tokens or earlier."""
    # tokenizer.json can store the truncation and padding of the training data: every user would get
    # texts of this length.
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    (target / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")

    # In vocab.txt the id of a token is the number of its line.
    vocabulary = backend.get_vocab(with_added_tokens=False)
    words = sorted(vocabulary, key=lambda word: (vocabulary[word], word))
    is_bert = (
        isinstance(tokenizer, BertTokenizerFast)
        and type(backend.pre_tokenizer).__name__ == "BertPreTokenizer"
        and [vocabulary[word] for word in words] == list(range(len(words)))
    )
    if is_bert:
        lines = "".join(f"{word}\n" for word in words)
        (target / "vocab.txt").write_text(lines, encoding="utf-8")

    special_tokens = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, (str, AddedToken))
    }
    # A tokenizer without a limit has the limit 10^30, sometimes as a float.
    source_length = tokenizer.model_max_length
    if type(source_length) is int and source_length > 0:
        max_length = min(source_length, max_length)
    settings = {
        name: tokenizer.init_kwargs[name] for name in _SETTINGS if name in tokenizer.init_kwargs
    }
    settings |= prefix_space(backend.to_str())
    settings |= special_tokens
    settings["tokenizer_class"] = "BertTokenizer" if is_bert else "PreTrainedTokenizerFast"
    settings["model_max_length"] = max_length
    _write_sorted(target / "tokenizer_config.json", settings)
    _write_sorted(target / "special_tokens_map.json", special_tokens)


def _write_sorted(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with sorted keys, as transformers does."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
