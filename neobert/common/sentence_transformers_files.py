"""Files that make the directory of a transformer a sentence-transformers model.

sentence-transformers reads `pooling_mode_mean_tokens` and similar keys before version 6, and
`pooling_mode` since. A version that finds only the keys of the other form silently uses CLS
pooling. Both forms are therefore written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .files import read_json, write_json
from .loading import name_tokenizer_class


if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


# Names of pooling modes, and their keys in the older form.
_MODES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


# Requirements of the model's code, the same as in setup.cfg. sentence-transformers reports older
# versions with a clear error.
REQUIREMENTS = {"torch": ">=2.6", "transformers": ">=4.56"}


def write_pooling(
    folder: str | Path, dimension: int, mode: str = "mean", include_prompt: bool = True
) -> None:
    """Write `1_Pooling/config.json` in both forms, and replace the file of a library.

    Args:
        folder: Directory of the sentence encoder.
        dimension: Embedding dimension D.
        mode: "cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean" or "lasttoken".
        include_prompt: Whether the tokens of a prompt are pooled.
    """
    flags = {key: name == mode for name, key in _MODES.items()}
    config = {
        "word_embedding_dimension": dimension,
        **flags,
        "include_prompt": include_prompt,
        "pooling_mode": mode,
    }
    write_json(Path(folder) / "1_Pooling" / "config.json", config)


def pooling_mode(config: Mapping[str, Any]) -> str:
    """Return the pooling mode of a `1_Pooling/config.json` in either form.

    Args:
        config: Content of the file.

    Raises:
        UserError: If there is no mode, an unknown mode, or more than one.
    """
    modes = config.get("pooling_mode")
    # The older form has one flag per mode.
    if not modes:
        modes = [name for name, key in _MODES.items() if config.get(key)]
    # The newer form has one name, or a list of modes whose results are concatenated.
    if isinstance(modes, str):
        modes = [modes]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UserError(
            f"the pooling mode must be one of {', '.join(_MODES)}, got "
            f"{', '.join(map(str, modes)) or 'none'}."
        )
    return modes[0]


def write_sentence_transformers(
    folder: str | Path, dimension: int, max_length: int, mode: str = "mean"
) -> None:
    """Write the files of sentence-transformers next to a transformer.

    The files are modules.json, sentence_bert_config.json, config_sentence_transformers.json and
    1_Pooling/config.json.

    Args:
        folder: Directory of the transformer.
        dimension: Embedding dimension D.
        max_length: Maximum sequence length in tokens.
        mode: Pooling mode, see `write_pooling`.
    """
    # Every version of sentence-transformers reads these names; newer ones also have others.
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
    write_pooling(folder, dimension, mode)
    write_json(Path(folder) / "config_sentence_transformers.json", {"requirements": REQUIREMENTS})


def save_for_all_versions(model: "SentenceTransformer", folder: str | Path) -> None:
    """Save a SentenceTransformer so that versions 5.1 to 6.2 read it identically.

    The modules get the names of version 5, and their configurations the keys of both versions.

    Args:
        model: Sentence encoder with a pooling module after its transformer.
        folder: Existing directory.
    """
    folder = Path(folder)
    # The model card of sentence-transformers would contain rows of the training data.
    model.save_pretrained(str(folder), create_model_card=False)
    name_tokenizer_class(folder)

    # Version 6 moved the classes to other modules. It still reads the paths of version 5, which
    # cannot read the new ones.
    modules = read_json(folder / "modules.json")
    for module in modules:
        package, _, class_name = module["type"].rpartition(".")
        if package.split(".")[0] == "sentence_transformers":
            module["type"] = f"sentence_transformers.models.{class_name}"
        _write_older_keys(folder, module["path"], class_name)
    write_json(folder / "modules.json", modules)

    # Version 6 takes the sequence length from the tokenizer and writes other keys to this file.
    write_json(
        folder / "sentence_bert_config.json",
        {"max_seq_length": model.max_seq_length, "do_lower_case": False},
    )
    library_path = folder / "config_sentence_transformers.json"
    write_json(library_path, {**read_json(library_path), "requirements": REQUIREMENTS})


def _write_older_keys(folder: Path, module: str, class_name: str) -> None:
    """Write the configuration of a module with the keys that version 5 reads.

    Args:
        folder: Directory of the sentence encoder.
        module: Directory of the module in `folder`.
        class_name: Class of the module.
    """
    if class_name not in ("Pooling", "Dense"):
        return
    path = folder / module / "config.json"
    config = read_json(path)
    if class_name == "Pooling":
        dimension = config.get("word_embedding_dimension") or config["embedding_dimension"]
        mode = config["pooling_mode"]
        write_pooling(folder, dimension, mode, config.get("include_prompt", True))
    else:
        # Version 5 passes unknown keys to the class, which refuses them.
        keys = ("in_features", "out_features", "bias", "activation_function")
        write_json(path, {key: config[key] for key in keys})
