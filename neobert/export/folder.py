"""The folder around graphs: what transformers.js, text-embeddings-inference, fastembed and
sentence-transformers read beside them."""

import contextlib
import json
import shutil
from pathlib import Path

from safetensors.torch import save

from ..common.files import read_json, write_json, write_text
from ..common.folders import apart, check_new, new_folder
from ..common.identity import model_digest
from ..common.loading import copy_code
from ..common.pooling import REQUIREMENTS, write_pooling, write_sentence_transformers
from .model_card import card


def check_output(arguments):
    """Raises UserError for an output that is there already, or is inside of an input."""
    check_new(arguments.output, "OUTPUT")
    apart(arguments.output, *(path for path in (arguments.folder, arguments.tokenizer) if path))


@contextlib.contextmanager
def new_export(source, arguments, target):
    """A new folder that takes the place of `arguments.output` when it is complete.

    Args:
        source: Source.
        arguments: ExportArguments.
        target: "onnx" or "openvino", the folder of its graphs.
    Yields:
        (path of the folder of the graphs, dict for what export.json says).
    """
    report = {
        "target": target,
        "model_digest": model_digest(source.folder),
        "head": source.head.option,
        "files": {},
    }
    with new_folder(arguments.output) as folder:
        (folder / target).mkdir()
        _write_common(folder, source)
        yield folder / target, report
        _write_plain(folder / "config.json", _config(source, report["files"]))
        write_text(folder / "README.md", card(source, Path(arguments.output).name, report))
        _write_plain(folder / "export.json", report)


def _write_plain(path, data):
    """JSON as it is: `write_json` takes `AutoModelForTokenClassification` for the name of a
    secret."""
    write_text(path, json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _config(source, files):
    """config.json: that of the model, with the class that is exported, and what transformers.js has
    to know."""
    config = source.config.to_dict()
    config |= {"architectures": list(source.head.architectures), "unpad_inputs": True}
    config.pop("_name_or_path", None)  # where it was read
    # Which graphs have their weights in a file of their own: it is not looked for otherwise.
    external = {f"{name}.onnx": 1 for name, file in files.items() if file.get("external_data")}
    if external:
        config["transformers.js_config"] = {"use_external_data_format": external}
    return config


def _write_common(folder, source):
    """Code of the model, tokenizer, and the files of sentence-transformers."""
    copy_code(folder)
    for path in Path(source.tokenizer_folder).iterdir():  # copytree sets rights, which may fail
        shutil.copyfile(path, folder / path.name)
    pooling, width = source.pooling, source.config.hidden_size
    if pooling is None:
        return
    write_sentence_transformers(folder, width, source.max_length, pooling.mode)
    write_pooling(folder, width, pooling.mode, pooling.include_prompt)
    modules = read_json(folder / "modules.json")
    for number, module in enumerate(pooling.modules[1:], 2):
        kind = type(module).__name__
        place = folder / f"{number}_{kind}"
        place.mkdir()
        kind = f"sentence_transformers.models.{kind}"
        modules.append({"idx": number, "name": str(number), "path": place.name, "type": kind})
        if module in pooling.dense:
            _write_dense(place, module)
        else:
            write_json(place / "config.json", {})
    write_json(folder / "modules.json", modules)
    if source.prompts:
        further = {
            "prompts": source.prompts,
            "default_prompt_name": None,
            "requirements": REQUIREMENTS,
        }
        _write_plain(folder / "config_sentence_transformers.json", further)


def _write_dense(folder, module):
    kind = type(module.activation_function)
    config = {
        "in_features": module.in_features,
        "out_features": module.out_features,
        "bias": module.linear.bias is not None,
        "activation_function": f"{kind.__module__}.{kind.__name__}",
    }
    write_json(folder / "config.json", config)
    layer = {f"linear.{name}": value for name, value in module.linear.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(layer))
