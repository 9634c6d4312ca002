"""Files of a Hub folder: weights, configuration, the model's code, and the model card."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from ..common.errors import printable
from ..common.identity import sha256
from ..common.loading import copy_code, dtype_name
from ..common.model_card import front_matter
from ..common.sentence_transformers_files import write_sentence_transformers
from .architecture import Conversion
from .heads import Head
from .tokenizer import write_tokenizer


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


@dataclass(frozen=True)
class HubFolder:
    """Content of the Hub folder of a converted checkpoint.

    Attributes:
        conversion: Model.
        tokenizer: Result of `tokenizer.find_tokenizer`, or None for a folder without a tokenizer.
        max_shard_size: Maximum size of a weight file.
        sentence_transformers: Whether the folder contains modules.json with mean pooling.
        metadata: License and base model, for the model card.
    """

    conversion: Conversion
    tokenizer: Path | None = None
    max_shard_size: str = "5GB"
    sentence_transformers: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path, name: str) -> list[WeightFile]:
        """Write the folder with its model card.

        Args:
            folder: Existing directory.
            name: Name of the model.

        Returns:
            The weight files.
        """
        files = self.write_model(folder)
        if self.sentence_transformers:
            config = self.conversion.config
            write_sentence_transformers(folder, config.hidden_size, config.context_length)
        card = self.model_card(name, files)
        (folder / "README.md").write_text(card, encoding="utf-8")
        return files

    def write_model(self, folder: Path) -> list[WeightFile]:
        """Write tokenizer, configuration, code and weights, and return the weight files."""
        # The tokenizer is first, because its check may fail, and the weights take the most time.
        config = self.conversion.config
        if self.tokenizer is not None:
            write_tokenizer(self.tokenizer, folder, config.vocab_size, config.context_length)
        write_config(folder, self.conversion)
        return write_weights(folder, self.conversion.output_tensors(), self.max_shard_size)

    def usage_lines(self, name: str) -> list[str]:
        """Return lines of Python that load the folder, or the repository on the Hub."""
        has_tokenizer = self.tokenizer is not None
        return usage_lines(name, self.conversion.head, has_tokenizer, self.sentence_transformers)

    def model_card(self, name: str, files: Sequence[WeightFile]) -> str:
        """Return the model card with the metadata that the Hub reads.

        Args:
            name: Name of the model.
            files: Weight files, as `write_weights` returns them.
        """
        conversion = self.conversion
        config = conversion.config

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

        return _CARD.format(
            metadata=front_matter(**self.metadata, **self._library()),
            name=printable(name).rpartition("/")[2],
            usage="\n".join(self.usage_lines(name)),
            facts="\n".join(f"| {key} | {value} |" for key, value in facts.items()),
            # In a code block, names of untrusted files and tensors are neither links nor HTML.
            notes="\n".join(f"- {printable(note)}" for note in conversion.notes),
        )

    def _library(self) -> dict[str, Any]:
        """Return library, task and tags for the metadata of the card."""
        task = self.conversion.head.pipeline_tag
        library = "transformers"
        tags = ["neobert", "custom_code", "safetensors", task]
        if self.sentence_transformers:
            tags += ["sentence-transformers", "feature-extraction"]
        # A masked language model with mean pooling was not trained for sentence similarity.
        if self.sentence_transformers and self.conversion.head.option == "base":
            task = "sentence-similarity"
            library = "sentence-transformers"
        # The task of a base model is the tag feature-extraction already.
        tags = list(dict.fromkeys(tags))
        return {"library_name": library, "pipeline_tag": task, "tags": tags}


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
    # The configuration adds auto_map itself, so the Hub loads the code in the folder.
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
