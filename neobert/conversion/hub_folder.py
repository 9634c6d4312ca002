"""Files of a Hub folder: weights, configuration, the model's code, and the model card."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from ..common.errors import printable
from ..common.identity import sha256
from ..common.loading import copy_code, dtype_name
from ..common.model_card import front_matter
from .architecture import Conversion
from .heads import Head
from .tokenizer import write_tokenizer


@dataclass(frozen=True)
class WeightFile:
    """Weight file of a folder.

    Attributes:
        name: Name of the file.
        size: Size in bytes.
        sha256: Digest of the content, hexadecimal.
    """

    name: str
    size: int
    sha256: str


def write_folder(
    folder: Path, conversion: Conversion, tokenizer: Path | None, max_shard_size: str = "5GB"
) -> list[WeightFile]:
    """Write tokenizer, configuration, code and weights of a converted checkpoint.

    Args:
        folder: Existing directory.
        conversion: Model to write.
        tokenizer: Result of `tokenizer.find_tokenizer`, or None for a folder without a tokenizer.
        max_shard_size: Maximum size of a weight file.

    Returns:
        The weight files.
    """
    # The tokenizer is first, because its check may fail, and the weights take the most time.
    config = conversion.config
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder, config.vocab_size, config.context_length)
    write_config(folder, conversion)
    return write_weights(folder, conversion.output_tensors(), max_shard_size)


def write_weights(
    folder: Path, state: Mapping[str, torch.Tensor], max_shard_size: str
) -> list[WeightFile]:
    """Write model.safetensors, or shards and their index.

    Args:
        folder: Existing directory.
        state: Tensors by name.
        max_shard_size: Maximum size of a file, such as "5GB".

    Returns:
        The weight files, sorted by name.
    """
    # Above `max_shard_size` this writes model-00001-of-0000N.safetensors and an index.
    save_torch_state_dict(dict(state), folder, max_shard_size=max_shard_size)
    return [
        WeightFile(name=path.name, size=path.stat().st_size, sha256=sha256(path))
        for path in sorted(folder.glob("*.safetensors"))
    ]


def write_config(folder: Path, conversion: Conversion) -> None:
    """Write config.json with the complete auto_map, and the code files that it refers to."""
    # The configuration adds auto_map itself, so that the Hub loads the code in the folder.
    conversion.config.architectures = list(conversion.head.architectures)
    conversion.config.dtype = dtype_name(conversion.dtype)
    conversion.config.to_json_file(folder / "config.json")
    copy_code(folder)


def usage_lines(
    name: str, head: Head, has_tokenizer: bool, sentence_transformers: bool
) -> list[str]:
    """Return lines of Python that load a model.

    Args:
        name: Directory, or repository on the Hub.
        head: Head of the model.
        has_tokenizer: Whether to load a tokenizer too.
        sentence_transformers: Whether to load the model with sentence-transformers too.
    """
    # JSON quotes and escapes the name so that it is a literal of Python, too.
    name = json.dumps(printable(name), ensure_ascii=False)
    classes = f"{head.auto_class}, AutoTokenizer" if has_tokenizer else head.auto_class
    lines = [
        f"from transformers import {classes}",
        f"model = {head.auto_class}.from_pretrained({name}, trust_remote_code=True)",
    ]
    if has_tokenizer:
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({name}, trust_remote_code=True)")
    if sentence_transformers:
        lines.append("from sentence_transformers import SentenceTransformer")
        lines.append(f"sentences = SentenceTransformer({name}, trust_remote_code=True)")
    return lines


_CARD = """{metadata}
# {name}

A NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)) converted from a training \
checkpoint.

```python
{usage}
```

The model's code is in this repository and runs on your machine: read it, and pin what you read \
with `revision=`.

| | |
|---|---|
{facts}

Conversion:

```text
{notes}
```
"""


def write_model_card(
    folder: Path,
    conversion: Conversion,
    files: Sequence[WeightFile],
    name: str,
    has_tokenizer: bool,
    sentence_transformers: bool,
    metadata: Mapping[str, str],
) -> None:
    """Write README.md with the metadata that the Hub reads.

    Args:
        folder: Existing directory.
        conversion: Model that was written.
        files: Weight files, as `write_weights` returns them.
        name: Name of the model.
        has_tokenizer: Whether the folder contains a tokenizer.
        sentence_transformers: Whether the folder contains modules.json.
        metadata: License and base model.
    """
    config = conversion.config
    task = conversion.head.pipeline_tag
    library = "transformers"
    tags = ["neobert", "custom_code", "safetensors", task]
    if sentence_transformers:
        tags += ["sentence-transformers", "feature-extraction"]
    # A masked language model with mean pooling was not trained for sentence similarity.
    if sentence_transformers and conversion.head.option == "base":
        task = "sentence-similarity"
        library = "sentence-transformers"
    # The task of a base model is the tag feature-extraction already.
    tags = list(dict.fromkeys(tags))

    layers = f"{config.num_hidden_layers} x {config.hidden_size}"
    facts = {
        "parameters": f"{conversion.parameters:,}",
        "dtype": dtype_name(conversion.dtype),
        "layers x hidden size": f"{layers}, {config.num_attention_heads} heads",
        "feed-forward": f"{config.hidden_act}, inner size {config.ffn_inner_size}",
        "norm, positions": f"{config.norm_type}, {config.position_embedding_type}",
        "vocabulary": f"{config.vocab_size:,} rows",
        "context": f"{config.context_length:,} tokens",
    }
    facts |= {f"sha256 of {file.name}": f"`{file.sha256}`" for file in files}
    usage = usage_lines(name, conversion.head, has_tokenizer, sentence_transformers)
    text = _CARD.format(
        metadata=front_matter(**metadata, library_name=library, pipeline_tag=task, tags=tags),
        name=printable(name).rpartition("/")[2],
        usage="\n".join(usage),
        facts="\n".join(f"| {key} | {value} |" for key, value in facts.items()),
        # In a code block, names of untrusted files and tensors are neither links nor HTML.
        notes="\n".join(f"- {printable(note)}" for note in conversion.notes),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
