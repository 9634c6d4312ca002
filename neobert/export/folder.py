"""Export folders.

A folder contains graphs, and the files that transformers.js, Text Embeddings Inference, fastembed
and sentence-transformers read beside them.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save

from ..common.files import read_json, write_json, write_record, write_text
from ..common.folders import check_disjoint, check_new, new_folder
from ..common.identity import model_digest
from ..common.loading import copy_code
from ..common.sentence_transformers_files import (
    REQUIREMENTS,
    write_pooling,
    write_sentence_transformers,
)
from .check import GraphFile
from .model_card import build_card
from .options import OnnxOptions, OpenvinoOptions
from .source import SourceModel


@dataclass
class NewExport:
    """Export folder that is being written.

    Attributes:
        folder: Directory of the graphs.
        files: Exported graphs by the name of the file without its suffix. The caller adds them.
        settings: Further fields of export.json.
    """

    folder: Path
    files: dict[str, GraphFile] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def check_output(options: OnnxOptions | OpenvinoOptions) -> None:
    """Check that the output does not exist and is not inside an input.

    Raises:
        UserError: If the output exists, or is inside an input.
    """
    model = options.model
    check_new(model.output, "OUTPUT")
    check_disjoint(model.output, *(path for path in (model.folder, model.tokenizer) if path))


@contextlib.contextmanager
def new_export(source: SourceModel, output: str, target: str) -> Iterator[NewExport]:
    """Write an export folder, which appears at `output` when it is complete.

    Args:
        source: Model to export.
        output: Directory to write.
        target: Subdirectory of the graphs, "onnx" or "openvino".

    Yields:
        The folder, to which the caller adds the graphs.
    """
    # The digest is computed first, because the weights may be replaced during the export.
    digest = model_digest(source.folder)
    with new_folder(output) as folder:
        export = NewExport(folder / target)
        export.folder.mkdir()
        _write_common(folder, source)
        yield export

        # The configuration and the card depend on the graphs, which the caller has written by
        # now.
        write_json(folder / "config.json", _config(source, export.files))
        card = build_card(source, Path(output).name, target, export.files)
        write_text(folder / "README.md", card)
        report = {
            "target": target,
            "model_digest": digest,
            "head": source.head.option,
            "files": {name: file.to_json() for name, file in export.files.items()},
            **export.settings,
        }
        write_record(folder / "export.json", report)


def _config(source: SourceModel, files: Mapping[str, GraphFile]) -> dict[str, Any]:
    """Return the content of config.json.

    It consists of the fields of the model, the exported class and the settings of transformers.js.
    """
    config = source.config.to_dict()
    config["architectures"] = list(source.head.architectures)
    # The source model does not unpad, because graphs are traced with padding. Users of the code in
    # this folder should have the default.
    config["unpad_inputs"] = True
    # The path from which the model was loaded is local.
    config.pop("_name_or_path", None)
    # transformers.js only downloads the external weights of the graphs that are listed here.
    external = {f"{name}.onnx": 1 for name, file in files.items() if file.external_data}
    if external:
        config["transformers.js_config"] = {"use_external_data_format": external}
    return config


def _write_common(folder: Path, source: SourceModel) -> None:
    """Write the code of the model, the tokenizer, and the files of sentence-transformers."""
    copy_code(folder)
    # shutil.copytree also copies permissions, which some file systems refuse.
    for path in Path(source.tokenizer_folder).iterdir():
        shutil.copyfile(path, folder / path.name)

    pooling = source.pooling
    if pooling is None:
        return

    # A sentence encoder also has the files of sentence-transformers.
    hidden_size = source.config.hidden_size
    write_sentence_transformers(folder, hidden_size, source.max_length, pooling.mode)
    write_pooling(folder, hidden_size, pooling.mode, pooling.include_prompt)

    # Modules 0 and 1 are the transformer and its pooling. The others are Dense and Normalize.
    modules = read_json(folder / "modules.json")
    for index, module in enumerate(pooling.modules[1:], 2):
        class_name = type(module).__name__
        module_folder = folder / f"{index}_{class_name}"
        module_folder.mkdir()
        modules.append(
            {
                "idx": index,
                "name": str(index),
                "path": module_folder.name,
                "type": f"sentence_transformers.models.{class_name}",
            }
        )
        if module in pooling.dense:
            _write_dense(module_folder, module)
        else:
            write_json(module_folder / "config.json", {})
    write_json(folder / "modules.json", modules)

    # The file is only written if a setting differs from its default.
    settings: dict[str, Any] = {
        "prompts": source.prompts,
        "default_prompt_name": source.default_prompt_name,
        "similarity_fn_name": source.similarity_fn_name,
    }
    if pooling.truncate_dim is not None:
        settings["truncate_dim"] = pooling.truncate_dim
    if any(settings.values()):
        settings["requirements"] = REQUIREMENTS
        write_json(folder / "config_sentence_transformers.json", settings)


def _write_dense(folder: Path, module: Any) -> None:
    """Write a Dense module of sentence-transformers."""
    # sentence-transformers imports the activation by its complete name.
    activation = type(module.activation_function)
    config = {
        "in_features": module.in_features,
        "out_features": module.out_features,
        "bias": module.linear.bias is not None,
        "activation_function": f"{activation.__module__}.{activation.__name__}",
    }
    write_json(folder / "config.json", config)
    # The tensors have the names of the module: linear.weight and linear.bias.
    layer = {f"linear.{name}": value for name, value in module.linear.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(layer))
