"""README.md of an exported folder: what is in it, how near it is to torch, and the lines that load
it."""

import json

from ..common.cards import front_matter
from ..common.errors import printable


def _usage(source, name, targets):
    """(title, language, lines) of each way to load the folder."""
    quoted = json.dumps(printable(name), ensure_ascii=False)
    if "onnx" in targets:
        pooled = (
            source.pooling is not None
            and source.pooling.mode in ("mean", "cls")
            and not len(source.pooling.dense)
        )
        options = (
            f', {{ pooling: "{source.pooling.mode}", normalize: '
            f"{str(source.pooling.normalize).lower()} }}"
            if pooled
            else ""
        )
        lines = [
            'import { pipeline } from "@huggingface/transformers";',
            f'const run = await pipeline("{source.head.pipeline_tag}", {quoted}, {{ dtype: '
            f'"{_js_dtype(targets)}" }});',
            f'const output = await run("A text."{options});',
        ]
        yield "transformers.js", "js", lines
    if source.pooling is not None:
        for backend in targets:
            path = json.dumps(f"{printable(name)}/openvino/ov_config.json", ensure_ascii=False)
            options = f', model_kwargs={{"ov_config": {path}}}' if backend == "openvino" else ""
            lines = [
                "from sentence_transformers import SentenceTransformer",
                f'model = SentenceTransformer({quoted}, backend="{backend}", '
                f"trust_remote_code=True{options})",
            ]
            yield f"sentence-transformers, {backend} backend", "python", lines


def _js_dtype(targets):
    precisions = [file["precision"] for file in targets["onnx"]["files"].values()]
    return next(
        js
        for ours, js in (("fp32", "fp32"), ("int8", "q8"), ("fp16", "fp16"), ("q4", "q4"))
        if ours in precisions
    )


def card(source, name, targets):
    """The text of README.md.

    Args:
        source: Source.
        name: of the folder.
        targets: {target: {"files": {name: {"precision", "token", "pooled"}}}} as the manifest says
            it.
    """
    sentence = source.pooling is not None
    library = "transformers.js" if "onnx" in targets else "openvino"
    tags = [
        "neobert",
        "custom_code",
        *targets,
        *(["sentence-transformers", "feature-extraction"] if sentence else []),
    ]
    task = "sentence-similarity" if sentence else source.head.pipeline_tag
    lines = [front_matter(**source.known, library_name=library, pipeline_tag=task, tags=tags)]
    lines += [
        f"# {printable(name)}",
        "",
        "A NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)), exported.",
    ]
    longest = min(512, source.max_length)
    lines += [
        f"The worst cosines to torch in float32, over texts of 3 to {longest} tokens, alone and "
        "in padded batches:",
        "",
    ]
    lines += [
        "| file | precision | worst token cosine | worst pooled cosine |",
        "|---|---|---|---|",
    ]
    for target, said in targets.items():
        ending = "onnx" if target == "onnx" else "xml"
        for stem, file in said["files"].items():
            token = "" if file["token"] is None else f"{file['token']:.6f}"
            lines.append(
                f"| `{target}/{stem}.{ending}` | {file['precision']} | {token} | "
                f"{file['pooled']:.6f} |"
            )
    for title, language, code in _usage(source, name, targets):
        lines += ["", f"{title}:", "", f"```{language}", *code, "```"]
    return "\n".join(lines) + "\n"
