"""README.md of an exported folder: what is in it, how near it is to torch, and the lines that load
it."""

import json

from ..common.errors import printable
from ..common.model_card import front_matter


def _usage(source, name, report):
    """(title, language, lines) of each way to load the folder."""
    quoted, pooling = json.dumps(printable(name), ensure_ascii=False), source.pooling
    if report["target"] == "onnx":
        options = ""
        if pooling is not None and pooling.mode in ("mean", "cls") and not pooling.dense:
            normalize = json.dumps(pooling.normalize)
            options = f', {{ pooling: "{pooling.mode}", normalize: {normalize} }}'
        precisions = [file["precision"] for file in report["files"].values()]
        names = {"fp32": "fp32", "int8": "q8", "fp16": "fp16", "q4": "q4"}
        dtype = next(names[precision] for precision in names if precision in precisions)
        lines = [
            'import { pipeline } from "@huggingface/transformers";',
            f'const run = await pipeline("{source.head.pipeline_tag}", {quoted}, '
            f'{{ dtype: "{dtype}" }});',
            f'const output = await run("A text."{options});',
        ]
        yield "transformers.js", "js", lines
    if pooling is not None:
        backend, options = report["target"], ""
        if backend == "openvino":
            path = json.dumps(f"{printable(name)}/openvino/ov_config.json", ensure_ascii=False)
            options = f', model_kwargs={{"ov_config": {path}}}'
        lines = [
            "from sentence_transformers import SentenceTransformer",
            f'model = SentenceTransformer({quoted}, backend="{backend}", '
            f"trust_remote_code=True{options})",
        ]
        yield f"sentence-transformers, {backend} backend", "python", lines


_CARD = """{metadata}
# {name}

A NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)), exported.
The worst cosines to torch in float32, over texts of 3 to {longest} tokens, alone and in padded \
batches:

| file | precision | worst token cosine | worst pooled cosine |
|---|---|---|---|
{files}
"""


def card(source, name, report):
    """The text of README.md.

    Args:
        source: Source.
        name: of the folder.
        report: {"target", "files": {name: {"precision", "token", "pooled"}}}, as export.json.
    """
    target, task = report["target"], source.head.pipeline_tag
    tags = ["neobert", "custom_code", target]
    if source.pooling is not None:
        task = "sentence-similarity"
        tags += ["sentence-transformers", "feature-extraction"]
    library, ending = ("transformers.js", "onnx") if target == "onnx" else ("openvino", "xml")
    rows = []
    for stem, file in report["files"].items():
        token = "" if file["token"] is None else f"{file['token']:.6f}"
        place = f"`{target}/{stem}.{ending}`"
        rows.append(f"| {place} | {file['precision']} | {token} | {file['pooled']:.6f} |")
    text = _CARD.format(
        metadata=front_matter(**source.known, library_name=library, pipeline_tag=task, tags=tags),
        name=printable(name),
        longest=min(512, source.max_length),
        files="\n".join(rows),
    )
    for title, language, code in _usage(source, name, report):
        text += "\n".join(["", f"{title}:", "", f"```{language}", *code, "```", ""])
    return text
