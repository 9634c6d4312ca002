"""Writing of the raw checkpoint layout of the paper's authors, which the conversion reads."""

import os
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from neobert.common.files import write_text
from neobert.configuration_neobert import NeoBERTConfig


# Fields of the configuration that config.yaml contains.
_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "hidden_act",
    "norm_type",
    "norm_eps",
    "position_embedding_type",
    "pad_token_id",
    "tie_word_embeddings",
    "classifier_pooling",
)


def write_raw_checkpoint(state_dict, config, folder, step, dtype=torch.float16):
    """Write a checkpoint in the authors' layout and return the path of its state_dict.pt.

    The files are `config.yaml`, `model_checkpoints/<step>/state_dict.pt` and
    `model_checkpoints/latest`. Tensor names have the prefix `module.` of DistributedDataParallel,
    and tied weights share their storage.

    Args:
        state_dict: Tensors of the model.
        config: NeoBERTConfig of the model.
        folder: Directory for the checkpoint.
        step: Name of the checkpoint.
        dtype: Dtype of the tensors in the file.
    """
    state = {}
    # Tied weights have the same data pointer and are converted once.
    converted = {}
    for name, tensor in state_dict.items():
        pointer = tensor.data_ptr()
        if pointer not in converted:
            converted[pointer] = tensor.detach().to("cpu", dtype, copy=True)
        state[f"module.{name}"] = converted[pointer]

    path = Path(folder) / "model_checkpoints" / str(step) / "state_dict.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)

    write_text(path.parent.parent / "latest", f"{step}\n")

    fields = {name: getattr(config, name) for name in _FIELDS}
    fields["rope_parameters"] = dict(config.rope_parameters)
    write_text(Path(folder) / "config.yaml", yaml.safe_dump(fields, sort_keys=False))
    return path


def raw_from_model(model_folder, folder, step, dtype):
    """Write a saved model in the authors' layout and return the path of its state_dict.pt."""
    config = NeoBERTConfig.from_pretrained(model_folder)
    state = {}
    for file in sorted(Path(model_folder).glob("*.safetensors")):
        state |= load_file(file)
    if config.tie_word_embeddings:
        state["decoder.weight"] = state["model.encoder.weight"]
    return write_raw_checkpoint(state, config, folder, step, dtype)
