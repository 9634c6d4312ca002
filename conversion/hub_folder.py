"""What is written: weights, configuration, the model's code, and a model card that the Hub
understands."""

import json

import torch
from tqdm.auto import tqdm

from ..common.cards import front_matter
from ..common.errors import printable
from ..common.files import write_safetensors
from ..common.loading import SAFETENSORS_DTYPES, copy_code


def write_weights(folder, conversion, max_shard_size):
    """model.safetensors, or shards of at most `max_shard_size` bytes with their index; returns one
    row per file."""
    from huggingface_hub import split_state_dict_into_shards_factory

    shapes, dtype = conversion.shapes, conversion.dtype
    dtype_name = next(name for name, value in SAFETENSORS_DTYPES.items() if value == dtype)
    split = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: torch.Size(shape).numel() * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    with tqdm(total=len(shapes), desc="writing tensors", unit="tensor") as progress:

        def read(name):
            tensor = conversion.read(name).contiguous()
            progress.update()
            return [memoryview(tensor.flatten().view(torch.uint8).numpy())]

        rows = []
        for file, names in sorted(split.filename_to_tensors.items()):
            layout = {name: (dtype_name, shapes[name]) for name in names}
            rows.append(write_safetensors(folder / file, layout, read, {"format": "pt"}))
    if split.is_sharded:
        index = {
            "metadata": split.metadata,
            "weight_map": dict(sorted(split.tensor_to_filename.items())),
        }
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n"
        )
    return rows


def write_config(folder, conversion):
    """config.json with the complete auto_map, and the code files that it points at."""
    conversion.config.architectures = list(conversion.head.architectures)
    conversion.config.dtype = str(conversion.dtype).removeprefix("torch.")
    conversion.config.to_json_file(folder / "config.json")
    copy_code(folder)


def usage_lines(name, head, has_tokenizer, sentence_transformers):
    """Python that loads the folder or repository `name`."""
    name = json.dumps(printable(name), ensure_ascii=False)
    lines = [
        f"from transformers import {head.auto_class}" + (", AutoTokenizer" if has_tokenizer else "")
    ]
    lines.append(f"model = {head.auto_class}.from_pretrained({name}, trust_remote_code=True)")
    if has_tokenizer:
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({name}, trust_remote_code=True)")
    if sentence_transformers:
        lines.append("from sentence_transformers import SentenceTransformer")
        lines.append(f"sentences = SentenceTransformer({name}, trust_remote_code=True)")
    return lines


def write_model_card(folder, conversion, rows, name, has_tokenizer, sentence_transformers, known):
    """README.md with the metadata that the Hub reads; `known` is what it says of licence and base
    model."""
    config, task = conversion.config, conversion.head.pipeline_tag
    tags, library = ["neobert", "custom_code", "safetensors", task], "transformers"
    if sentence_transformers:
        tags += ["sentence-transformers", "feature-extraction"]
    # a masked LM with mean pooling is not trained for it
    if sentence_transformers and conversion.head.option == "base":
        task, library = "sentence-similarity", "sentence-transformers"
    metadata = front_matter(
        **known, library_name=library, pipeline_tag=task, tags=list(dict.fromkeys(tags))
    )
    facts = [
        ("parameters", f"{conversion.parameters:,}"),
        ("dtype", str(conversion.dtype).removeprefix("torch.")),
        (
            "layers x hidden size",
            f"{config.num_hidden_layers} x {config.hidden_size}, {config.num_attention_heads} "
            "heads",
        ),
        ("feed-forward", f"{config.hidden_act}, inner size {config.ffn_inner_size}"),
        ("norm, positions", f"{config.norm_type}, {config.position_embedding_type}"),
        ("vocabulary", f"{config.vocab_size:,} rows"),
        ("context", f"{config.context_length:,} tokens"),
        *((f"sha256 of {row['file']}", f"`{row['sha256']}`") for row in rows),
    ]
    lines = [metadata, f"# {printable(name).rpartition('/')[2]}", ""]
    lines += [
        "A NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)) converted from a "
        "training checkpoint.",
        "",
    ]
    lines += [
        "```python",
        *usage_lines(name, conversion.head, has_tokenizer, sentence_transformers),
        "```",
        "",
    ]
    lines += [
        "The model's code is in this repository and runs on your machine: read it, and pin what "
        "you read with `revision=`.",
        "",
    ]
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts), ""]
    # Names of a stranger's files and tensors stay text in a block, where they are neither links nor
    # HTML.
    lines += [
        "Conversion:",
        "",
        "```text",
        *(f"- {printable(note)}" for note in conversion.notes),
        "```",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
