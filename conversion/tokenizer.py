"""The tokenizer of the result. A stranger's is parsed in a process of its own, from the plain files that a tokenizer consists of: no key of
theirs leads to code or to another file, nothing is copied, and what was written is loaded and compared.
"""

import json
import os
import shutil
from pathlib import Path

from ..common.constants import TOKENIZER
from ..common.errors import UserError, listed
from ..common.files import check_file, read_json
from .fresh import run_fresh
from .fresh_tokenizer import SETTINGS


# Where transformers looks for a tokenizer: vocabularies and rules, and settings.
_PLAIN_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json")
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Bytes of one file; the largest vocabularies in use have some 35 MB.
_LARGEST = 128_000_000
_SECONDS = 300
# An embedding may have the tokenizer's size rounded up to a multiple of one of these (padded for GPU efficiency).
_MULTIPLES = (8, 16, 32, 64, 128, 256, 512)
_TEXTS = ["The owl's nest, 42 metres up: caf\u00e9!", "[MASK] unaffable \u4f60\u597d", ""]


def find_tokenizer(argument, folders):
    """The folder of the tokenizer.

    Args:
        argument: value of --tokenizer: a folder, "none", or None for what is beside the checkpoint, then the bundled one.
        folders: where to look.
    Returns:
        Path, or None for "none".
    Raises:
        UserError: there is no tokenizer in the folder that was given.
    """
    if argument == "none":
        return None
    if argument is None:
        return next((f for f in folders if any((f / name).is_file() for name in ("tokenizer.json", "vocab.txt"))), TOKENIZER)
    if not any((Path(argument) / name).is_file() for name in _PLAIN_FILES):
        raise UserError(f"--tokenizer takes a folder with {listed(_PLAIN_FILES[:2])} ..., or none, but {argument} was given.")
    return Path(argument)


def check_rows(size, rows, folder):
    """Raises UserError unless a tokenizer of `size` tokens goes with `rows` of embedding: as many, or rounded up to a multiple of 8 ... 512."""
    allowed = sorted({size, *(-(-size // multiple) * multiple for multiple in _MULTIPLES)})
    if rows not in allowed:
        raise UserError(
            f"the checkpoint has {rows} vocabulary rows, but the tokenizer in {folder} has {size} tokens (which allows {listed(allowed)} "
            "rows): give the right one with --tokenizer DIR, or --tokenizer none."
        )


def _check_link(path):
    """Refuses a link, which could lead anywhere; those of the Hub's cache lead to its `blobs`."""
    target, blobs = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent)).parent.parent / "blobs"
    if path.is_symlink() and target.parent != blobs:
        raise UserError(f"{path} is a link to {target}, and links are not followed into what may be published; put the file there.")
    check_file(path)
    if path.stat().st_size > _LARGEST:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes, which is too many for a tokenizer.")


def _is_token(value):
    """Whether a setting is a token: text, or a mapping with its text and switches."""
    if isinstance(value, dict):
        return isinstance(value.get("content"), str) and all(
            isinstance(v, bool) for k, v in value.items() if k not in ("content", "__type")
        )
    return isinstance(value, str)


def _plain_settings(given):
    """The settings that say how text is split, and nothing that names a file, a class elsewhere, or code."""
    sides = {name: given[name] for name in SETTINGS if name.endswith("_side") and given.get(name) in ("left", "right")}
    settings = sides | {name: given[name] for name in SETTINGS if isinstance(given.get(name), bool)}
    names = given.get("model_input_names")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        settings["model_input_names"] = names
    settings |= {name: given[name] for name in _SPECIAL_TOKENS if _is_token(given.get(name))}
    longest, kind, added = (given.get(name) for name in ("model_max_length", "tokenizer_class", "added_tokens_decoder"))
    if type(longest) is int and longest > 0:
        settings["model_max_length"] = longest
    if isinstance(kind, str) and kind.isidentifier():
        settings["tokenizer_class"] = kind
    if isinstance(added, dict) and all(number.isdecimal() and _is_token(token) for number, token in added.items()):
        settings["added_tokens_decoder"] = added
    return settings


def _copy_plain_files(source, target):
    """Puts what a tokenizer consists of into the folder `target`, without any other key or file."""
    target.mkdir()
    for name in (*_PLAIN_FILES, *_SETTINGS_FILES):
        path = source / name
        if not path.exists() and not path.is_symlink():
            continue
        _check_link(path)
        if name in _SETTINGS_FILES:
            content = read_json(path)
            settings = _plain_settings(content) if isinstance(content, dict) else {}
            (target / name).write_text(json.dumps(settings), encoding="utf-8")
        else:
            shutil.copyfile(path, target / name)
    config = target / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    # NeoBERT's own is BERT's, which needs no more than its vocabulary.
    settings.setdefault("tokenizer_class", "BertTokenizer" if (target / "vocab.txt").exists() else "PreTrainedTokenizerFast")
    config.write_text(json.dumps(settings), encoding="utf-8")


def write_tokenizer(source, target, config, scratch):
    """Writes the tokenizer of the folder `source` to the folder `target` and compares what both make of some texts.

    Args:
        source, target: folders.
        config: of the model: how many rows its embedding has, and how long its texts are.
        scratch: folder for what is needed on the way.
    Raises:
        UserError: links among its files; not loadable; without a fast form; not of this model.
    """
    plain, answer = scratch / "tokenizer", scratch / "tokenizer.json"
    _copy_plain_files(source, plain)
    run_fresh(
        *("fresh_tokenizer.py", plain, target, config.max_position_embeddings, json.dumps(_TEXTS), answer),
        scratch=scratch,
        what=f"the tokenizer in {source} cannot be loaded",
        seconds=_SECONDS,
    )
    said = read_json(answer)
    check_rows(said["size"], config.vocab_size, source)
    if not said["fast"]:
        raise UserError(
            f"the tokenizer in {source} has no fast form (tokenizer.json), which the Hub folder needs; give another with --tokenizer DIR."
        )
    if said["ids"] != said["written_ids"]:
        raise UserError("the converted folder's tokenizer splits text otherwise than its source, so it was not kept.")
