"""The files beside a transformer that make a folder of sentence-transformers, in a form that old and new readers agree on.

Versions before 6 read `pooling_mode_mean_tokens` and its kin, newer ones `pooling_mode`; who finds only the other form takes the first
token's vector without a word. So both forms are always written.
"""

from pathlib import Path

from .errors import UserError
from .files import write_json


# Name of `pooling_mode`: key of the older form.
_MODES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def pooling_config(width, mode="mean", include_prompt=True):
    """Content of `1_Pooling/config.json`.

    Args:
        width: numbers D of a vector.
        mode: "cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean" or "lasttoken".
        include_prompt: whether tokens of a prompt count.
    Raises:
        UserError: another mode.
    """
    if mode not in _MODES:
        raise UserError(f"the pooling mode must be one of {', '.join(_MODES)}, but {mode!r} was given")
    flags = {key: name == mode for name, key in _MODES.items()}
    return {"word_embedding_dimension": width, **flags, "include_prompt": include_prompt, "pooling_mode": mode}


def write_pooling(folder, width, mode="mean", include_prompt=True):
    """Writes `1_Pooling/config.json` of a folder, arguments as of `pooling_config`; over the one that a library wrote, if there is one."""
    write_json(Path(folder) / "1_Pooling" / "config.json", pooling_config(width, mode, include_prompt))


def write_sentence_transformers(folder, width, max_length, mode="mean"):
    """Writes modules.json, sentence_bert_config.json and 1_Pooling/config.json beside a transformer in the top folder.

    Args:
        folder: that of the model.
        width, mode: as of `pooling_config`.
        max_length: tokens of a text that are read.
    """
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    write_json(Path(folder) / "modules.json", modules)
    write_json(Path(folder) / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    write_pooling(folder, width, mode)
