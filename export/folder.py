"""The folder around graphs: what transformers.js, text-embeddings-inference, fastembed and
sentence-transformers read beside them."""

import contextlib
import json
import os
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from ..common.errors import UserError
from ..common.files import read_json, write_json, write_text
from ..common.identity import model_digest
from ..common.loading import copy_code
from ..common.outputs import (
    check_apart,
    check_folder,
    check_replaceable,
    new_folder,
    read_manifest,
    recover,
)
from ..common.pooling import write_pooling, write_sentence_transformers
from .card import card


COMMAND = "export"
TARGETS = ("onnx", "openvino")  # those that write such a folder


def check_output(arguments):
    """Raises UserError for an output folder that may not be written: another program's, the input,
    or one that is there, without --force.

    A folder that this command made for another target is there to be added to; `new_export` looks
    whether it holds the same model.
    """
    output = Path(os.path.abspath(arguments.output))
    recover(output, COMMAND)
    check_apart(output, arguments.folder, *([arguments.tokenizer] if arguments.tokenizer else []))
    check_folder(output, "OUTPUT")
    if output.exists() and any(output.iterdir()):
        check_replaceable(output, COMMAND)


@contextlib.contextmanager
def new_export(source, arguments, target):
    """A new folder that takes the place of `arguments.output` when it is complete.

    Files of another target for the same weights stay in it: `export onnx` and `export openvino` can
    share a folder.

    Args:
        source: Source.
        arguments: ExportArguments.
        target: "onnx" or "openvino": the folder of its graphs, and its key in the manifest.
    Yields:
        (path of the folder of the graphs, dict for what the manifest says of them).
    """
    output, said = Path(os.path.abspath(arguments.output)), {}
    identity = {"model_digest": model_digest(source.folder), "head": source.head.option}
    old = read_manifest(output, COMMAND) if output.is_dir() and any(output.iterdir()) else None
    kept = {}
    if old is not None:
        same = all(old.get(key) == value for key, value in identity.items())
        targets = old["targets"] if isinstance(old.get("targets"), dict) else {}
        if not arguments.force and (target in targets or not same):
            held = target if same else "another model"
            raise UserError(
                f"{output} holds {held} already; choose another folder, or replace it with --force"
            )
        kept = {
            name: targets[name] for name in TARGETS if name in targets and name != target and same
        }
    content = {**identity, "targets": {**kept, target: said}}
    with new_folder(output, COMMAND, replace=old is not None, content=content) as folder:
        for name in kept:
            shutil.copytree(output / name, folder / name)
        (folder / target).mkdir()
        _write_common(folder, source)
        yield folder / target, said
        _write_plain(folder / "config.json", _config(source, _js_settings(content["targets"])))
        write_text(folder / "README.md", card(source, output.name, content["targets"]))


def _write_plain(path, data):
    """JSON as it is: `write_json` takes `AutoModelForTokenClassification` for the name of a
    secret."""
    write_text(path, json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _config(source, js_settings):
    """config.json: that of the model, with the class that is exported, and what transformers.js has
    to know."""
    config = {
        **source.config.to_dict(),
        "architectures": list(source.head.architectures),
        "unpad_inputs": True,
    }
    config.pop("_name_or_path", None)  # where it was read
    return {**config, **({"transformers.js_config": js_settings} if js_settings else {})}


def _js_settings(targets):
    """Which graphs have their weights in a file of their own; transformers.js does not look for it
    otherwise."""
    files = targets.get("onnx", {}).get("files", {})
    external = {f"{name}.onnx": 1 for name, file in files.items() if file.get("external_data")}
    return {"use_external_data_format": external} if external else None


def _write_common(folder, source):
    """Code of the model, tokenizer, and the files of sentence-transformers."""
    copy_code(folder)
    shutil.copytree(source.tokenizer_folder, folder, dirs_exist_ok=True)
    pooling = source.pooling
    if pooling is None:
        return
    width = source.config.hidden_size
    write_sentence_transformers(folder, width, source.max_length, pooling.mode)
    write_pooling(folder, width, pooling.mode, pooling.include_prompt)
    modules = read_json(folder / "modules.json")

    def add(kind):
        path = f"{len(modules)}_{kind}"
        modules.append(
            {
                "idx": len(modules),
                "name": str(len(modules)),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
        )
        (folder / path).mkdir()
        return folder / path

    layers = list(pooling.dense)
    for layer, activation in zip(layers[::2], layers[1::2]):
        _write_dense(add("Dense"), layer, activation)
    if pooling.normalize:
        write_json(add("Normalize") / "config.json", {})
    write_json(folder / "modules.json", modules)
    if source.prompts:
        _write_plain(
            folder / "config_sentence_transformers.json",
            {"prompts": source.prompts, "default_prompt_name": None},
        )


def _write_dense(folder, layer: nn.Linear, activation):
    kind = type(activation)
    write_json(
        folder / "config.json",
        {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": layer.bias is not None,
            "activation_function": f"{kind.__module__}.{kind.__name__}",
        },
    )
    save_file(
        {f"linear.{name}": value.contiguous() for name, value in layer.state_dict().items()},
        folder / "model.safetensors",
    )
