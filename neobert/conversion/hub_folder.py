"""What is written: weights, configuration, the model's code, and a model card that the Hub
understands."""

import json

from huggingface_hub import save_torch_state_dict

from ..common.errors import printable
from ..common.identity import sha256
from ..common.loading import copy_code
from ..common.model_card import front_matter


def write_weights(folder, state, max_shard_size):
    """model.safetensors, or shards of at most `max_shard_size` ("5GB") with their index; returns
    one row per file."""
    save_torch_state_dict(state, folder, max_shard_size=max_shard_size)
    return [
        {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.glob("*.safetensors"))
    ]


def write_config(folder, conversion):
    """config.json with the complete auto_map, and the code files that it points at."""
    conversion.config.architectures = list(conversion.head.architectures)
    conversion.config.dtype = str(conversion.dtype).removeprefix("torch.")
    conversion.config.to_json_file(folder / "config.json")
    copy_code(folder)


def usage_lines(name, head, has_tokenizer, sentence_transformers):
    """Python that loads the folder or repository `name`."""
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
    tags = list(dict.fromkeys(tags))
    layers = f"{config.num_hidden_layers} x {config.hidden_size}"
    facts = {
        "parameters": f"{conversion.parameters:,}",
        "dtype": str(conversion.dtype).removeprefix("torch."),
        "layers x hidden size": f"{layers}, {config.num_attention_heads} heads",
        "feed-forward": f"{config.hidden_act}, inner size {config.ffn_inner_size}",
        "norm, positions": f"{config.norm_type}, {config.position_embedding_type}",
        "vocabulary": f"{config.vocab_size:,} rows",
        "context": f"{config.context_length:,} tokens",
    }
    facts |= {f"sha256 of {row['file']}": f"`{row['sha256']}`" for row in rows}
    usage = usage_lines(name, conversion.head, has_tokenizer, sentence_transformers)
    text = _CARD.format(
        metadata=front_matter(**known, library_name=library, pipeline_tag=task, tags=tags),
        name=printable(name).rpartition("/")[2],
        usage="\n".join(usage),
        facts="\n".join(f"| {key} | {value} |" for key, value in facts.items()),
        # Names of a stranger's files and tensors stay text in a block, where they are neither links
        # nor HTML.
        notes="\n".join(f"- {printable(note)}" for note in conversion.notes),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
