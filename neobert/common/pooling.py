"""The files beside a transformer that make a folder of sentence-transformers, in a form that old
and new readers agree on.

Versions before 6 read `pooling_mode_mean_tokens` and its kin, newer ones `pooling_mode`. A reader
that finds only the other form silently uses CLS pooling. So both forms are always written.
"""

from pathlib import Path

from .errors import UserError
from .files import read_json, write_json
from .loading import name_tokenizer_class


# Name of `pooling_mode`: key of the older form.
_MODES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


# What the model's code needs; setup.cfg has the same. Where older versions are installed,
# sentence-transformers says so in a sentence.
REQUIREMENTS = {"torch": ">=2.6", "transformers": ">=4.56"}


def write_pooling(folder, width, mode="mean", include_prompt=True):
    """Writes `1_Pooling/config.json` of a folder, over the one that a library wrote.

    Args:
        width: numbers D of a vector.
        mode: "cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean" or "lasttoken".
        include_prompt: whether tokens of a prompt count.
    """
    flags = {key: name == mode for name, key in _MODES.items()}
    config = {
        "word_embedding_dimension": width,
        **flags,
        "include_prompt": include_prompt,
        "pooling_mode": mode,
    }
    write_json(Path(folder) / "1_Pooling" / "config.json", config)


def pooling_mode(config):
    """The mode in the content of `1_Pooling/config.json`, in either form.

    Raises:
        UserError: none, several at once, or one that is not known.
    """
    modes = config.get("pooling_mode") or [n for n, key in _MODES.items() if config.get(key)]
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UserError(
            f"the pooling mode must be one of {', '.join(_MODES)}, but "
            f"{', '.join(map(str, modes)) or 'none'} was given"
        )
    return modes[0]


def write_sentence_transformers(folder, width, max_length, mode="mean"):
    """Writes modules.json, sentence_bert_config.json, config_sentence_transformers.json and
    1_Pooling/config.json beside a transformer in the top folder.

    Args:
        folder: that of the model.
        width, mode: as of `write_pooling`.
        max_length: tokens of a text that are read.
    """
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
    ]
    write_json(Path(folder) / "modules.json", modules)
    write_json(
        Path(folder) / "sentence_bert_config.json",
        {"max_seq_length": max_length, "do_lower_case": False},
    )
    write_pooling(folder, width, mode)
    write_json(Path(folder) / "config_sentence_transformers.json", {"requirements": REQUIREMENTS})


def save_for_all_versions(model, folder):
    """`SentenceTransformer.save_pretrained` in a form that versions 5.1 and 6.2 read alike: classic
    names of the modules, and their older keys.

    Args:
        model: a SentenceTransformer for text, with a pooling after its transformer.
        folder: an existing folder.
    """
    folder = Path(folder)
    # it would hold rows of the training data
    model.save_pretrained(str(folder), create_model_card=False)
    name_tokenizer_class(folder)
    modules = read_json(folder / "modules.json")
    for module in modules:
        package, _, kind = module["type"].rpartition(".")
        path = folder / module["path"] / "config.json"
        if package.split(".")[0] == "sentence_transformers":
            module["type"] = f"sentence_transformers.models.{kind}"
        if kind == "Pooling":
            config = read_json(path)
            width = config.get("word_embedding_dimension") or config["embedding_dimension"]
            write_pooling(folder, width, config["pooling_mode"], config.get("include_prompt", True))
        elif kind == "Dense":
            config = read_json(path)
            write_json(
                path,
                {
                    key: config[key]
                    for key in ("in_features", "out_features", "bias", "activation_function")
                },
            )
    write_json(folder / "modules.json", modules)
    write_json(
        folder / "sentence_bert_config.json",
        {"max_seq_length": model.max_seq_length, "do_lower_case": False},
    )
    further = folder / "config_sentence_transformers.json"
    write_json(further, {**read_json(further), "requirements": REQUIREMENTS})
