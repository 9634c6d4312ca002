"""README.md of an export folder: its files, their agreement with torch, and code to load them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..common.errors import printable
from ..common.model_card import front_matter
from .check import GraphFile
from .source import SourceModel


_CARD = """{metadata}
# {name}

A NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)), exported.
The worst cosines to torch in float32, over texts of 3 to {longest} tokens, alone and in padded \
batches:

| file | precision | worst token cosine | worst pooled cosine |
|---|---|---|---|
{files}
{settings}"""


@dataclass(frozen=True)
class _Snippet:
    """Code that loads the folder: its title, its language and its lines."""

    title: str
    language: str
    lines: list[str]


def build_card(source: SourceModel, name: str, target: str, files: Mapping[str, GraphFile]) -> str:
    """Return the text of README.md.

    Args:
        source: Exported model.
        name: Name of the folder.
        target: "onnx" or "openvino".
        files: Exported graphs by the name of the file without its suffix.
    """
    # The Hub files a model under its task and library, and finds it by its tags.
    task = source.head.pipeline_tag
    tags = ["neobert", "custom_code", target]
    if source.pooling is not None:
        task = "sentence-similarity"
        tags += ["sentence-transformers", "feature-extraction"]
    library = "transformers.js" if target == "onnx" else "openvino"
    suffix = "onnx" if target == "onnx" else "xml"

    # Heads with a few labels have no vector per token to compare, so the cell is empty.
    rows = []
    for stem, file in files.items():
        token = "" if file.token_cosine is None else f"{file.token_cosine:.6f}"
        path = f"`{target}/{stem}.{suffix}`"
        rows.append(f"| {path} | {file.precision} | {token} | {file.pooled_cosine:.6f} |")
    text = _CARD.format(
        metadata=front_matter(
            **source.metadata, library_name=library, pipeline_tag=task, tags=tags
        ),
        name=printable(name),
        longest=min(512, source.max_length),
        files="\n".join(rows),
        settings=_settings(source),
    )
    for snippet in _snippets(source, name, target, files):
        fence = f"```{snippet.language}"
        text += "\n".join(["", f"{snippet.title}:", "", fence, *snippet.lines, "```", ""])
    return text


def _settings(source: SourceModel) -> str:
    """Return the settings that users of other libraries must apply, as a Markdown list, or ""."""
    settings = source.client_settings()
    if not settings:
        return ""
    title = (
        "sentence-transformers applies the following settings. In other libraries, apply them "
        "yourself; the output `sentence_embedding` is already truncated:"
    )
    return "\n".join(["", title, "", *(f"- {printable(setting)}" for setting in settings), ""])


def _snippets(
    source: SourceModel, name: str, target: str, files: Mapping[str, GraphFile]
) -> Iterator[_Snippet]:
    """Yield the snippets of the libraries that load the folder."""
    # A literal of JSON is also one of JavaScript and Python.
    quoted_name = json.dumps(printable(name), ensure_ascii=False)
    pooling = source.pooling

    if target == "onnx":
        # The pipeline of transformers.js has no Dense layers and only these modes of pooling.
        options = ""
        if pooling is not None and pooling.mode in ("mean", "cls") and not pooling.dense:
            normalize = json.dumps(pooling.normalize)
            options = f', {{ pooling: "{pooling.mode}", normalize: {normalize} }}'
        # Names of the precisions in transformers.js, the preferred ones first.
        dtypes = {"fp32": "fp32", "int8": "q8", "fp16": "fp16", "q4": "q4"}
        precisions = [file.precision for file in files.values()]
        dtype = next(dtypes[precision] for precision in dtypes if precision in precisions)
        lines = [
            'import { pipeline } from "@huggingface/transformers";',
            f'const run = await pipeline("{source.head.pipeline_tag}", {quoted_name}, '
            f'{{ dtype: "{dtype}" }});',
            f'const output = await run("A text."{options});',
        ]
        yield _Snippet("transformers.js", "js", lines)

    if pooling is not None:
        # Without this file, OpenVINO may compute in bfloat16.
        options = ""
        if target == "openvino":
            path = json.dumps(f"{printable(name)}/openvino/ov_config.json", ensure_ascii=False)
            options = f', model_kwargs={{"ov_config": {path}}}'
        lines = [
            "from sentence_transformers import SentenceTransformer",
            f'model = SentenceTransformer({quoted_name}, backend="{target}", '
            f"trust_remote_code=True{options})",
        ]
        yield _Snippet(f"sentence-transformers, {target} backend", "python", lines)
