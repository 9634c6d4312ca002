"""`neobert export onnx --for PLACE`: the few files that a search engine or a server asks for beside
the graph, as its documentation and its code have them.

Each function gets the folder of the export, complete but for its card, and adds files to it.
"""

import json
import zipfile
from collections.abc import Callable
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from ..common.errors import UserError
from ..common.files import link_or_copy, sha256, write_text


# OpenSearch's names of what pools as the folder says.
_OPENSEARCH_POOLING = {
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "max": "max",
    "weightedmean": "weightedmean",
    "cls": "cls",
}


def check(source, place):
    """Raises UserError for a model that a place, a name of `PLACES`, cannot pool as its folder
    says."""
    pools, pooling = PLACES[place].pools, source.pooling
    if pools is None:
        return
    if pooling is None:
        raise UserError(
            f"--for {place} makes vectors of texts: it needs a folder of sentence-transformers "
            f"(modules.json), and {source.name} is not one"
        )
    if pooling.mode not in pools:
        raise UserError(
            f"--for {place} pools by one of {', '.join(pools)}, but {source.name} by {pooling.mode}"
        )
    if len(pooling.dense):
        raise UserError(
            f"--for {place} has no Dense layer after the pooling, and {source.name} has one"
        )
    if not pooling.include_prompt and any(source.prompts.values()):
        raise UserError(
            f"--for {place} counts the tokens of a prompt, and {source.name} leaves them out "
            "(include_prompt is false)"
        )
    if place == "weaviate" and not pooling.normalize:
        raise UserError(
            f"--for weaviate: its container gives vectors of length 1, and {source.name} does not"
        )


def vespa(folder, source, options):
    """vespa/component.xml: the embedder of services.xml."""
    types = "" if options.token_type_ids else "  <transformer-token-type-ids/>\n"
    prompts = source.prompts
    prefixes = {
        "query": prompts.get("query"),
        "document": prompts.get("document") or prompts.get("passage"),
    }
    prepend = "".join(
        f"    <{name}>{escape(text)}</{name}>\n" for name, text in prefixes.items() if text
    )
    prepend = f"  <prepend>\n{prepend}  </prepend>\n" if prepend else ""
    write_text(
        _made(folder, "vespa") / "component.xml",
        "<!-- Inside <container> of services.xml. The application package has these two files:\n"
        "     models/model.onnx is onnx/model.onnx, models/tokenizer.json is tokenizer.json. -->\n"
        f'<component id={quoteattr(source.name)} type="hugging-face-embedder">\n'
        '  <transformer-model path="models/model.onnx"/>\n'
        '  <tokenizer-model path="models/tokenizer.json"/>\n'
        f"  <max-tokens>{source.max_length}</max-tokens>\n"
        f"{types}"
        "  <transformer-output>last_hidden_state</transformer-output>\n"
        f"  <pooling-strategy>{source.pooling.mode}</pooling-strategy>\n"
        f"  <normalize>{str(source.pooling.normalize).lower()}</normalize>\n"
        f"{prepend}"
        "</component>\n",
    )


def opensearch(folder, source, options):
    """opensearch/model.zip, the graph and the tokenizer, and opensearch/register.json, the request
    that registers it."""
    place = _made(folder, "opensearch")
    archive = place / "model.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in (*sorted((folder / "onnx").glob("model.onnx*")), folder / "tokenizer.json"):
            packed.write(path, path.name)
    config = {
        key: value
        for key, value in source.config.to_dict().items()
        if _plain(value) and key != "_name_or_path"
    }
    request = {
        "name": source.name,
        "version": "1.0.0",
        "description": "NeoBERT sentence encoder",
        "model_format": "ONNX",
        "function_name": "TEXT_EMBEDDING",
        "model_content_size_in_bytes": archive.stat().st_size,
        "model_content_hash_value": sha256(archive),
        "model_config": {
            # "bert" makes it feed three inputs, any other word two.
            "model_type": "bert" if options.token_type_ids else "neobert",
            "embedding_dimension": source.config.hidden_size,
            "framework_type": "sentence_transformers",
            "pooling_mode": _OPENSEARCH_POOLING[source.pooling.mode],
            "normalize_result": source.pooling.normalize,
            "all_config": json.dumps(config, sort_keys=True),
        },
        "url": "ADDRESS OF model.zip",
    }
    write_text(place / "register.json", json.dumps(request, indent=2) + "\n")


def triton(folder, source, options):
    """triton/NAME: a model repository with one model, its graph linked or copied."""
    name = _word(source.name)
    version = _made(folder, "triton", name, "1")
    for path in (folder / "onnx").glob("model.onnx*"):
        link_or_copy(path, version / path.name)
    inputs = ["input_ids", "attention_mask"] + ["token_type_ids"] * options.token_type_ids
    written = [f'name: "{name}"', 'backend: "onnxruntime"', "max_batch_size: 32"]
    for tensor in inputs:
        written.append(f'input {{ name: "{tensor}" data_type: TYPE_INT64 dims: [ -1 ] }}')
    for tensor, dims in _outputs(folder / "onnx" / "model.onnx"):
        shape = ", ".join(map(str, dims))
        written.append(f'output {{ name: "{tensor}" data_type: TYPE_FP32 dims: [ {shape} ] }}')
    # Requests of one length are put into one batch; the client pads to that length.
    written.append("dynamic_batching { }")
    write_text(version.parent / "config.pbtxt", "\n".join(written) + "\n")


def weaviate(folder, source, options):
    """model_quantized.onnx in the root, and the two switches that the container reads."""
    for path in (folder / "onnx").glob("model_quantized.onnx*"):
        link_or_copy(path, folder / path.name)
    for switch in ("onnx_runtime", "trust_remote_code"):
        write_text(folder / switch, "true")  # compared as it is: no end of line
    write_text(
        folder / "Dockerfile",
        "FROM semitechnologies/transformers-inference:custom\nCOPY . /app/models/model\n",
    )


class Place(NamedTuple):
    """A place.

    Attributes:
        write: function of (folder, source, options).
        reads: precision of the graph that it reads.
        pools: modes of pooling that it knows; None where it gives the outputs as they are.
    """

    write: Callable
    reads: str
    pools: tuple | None


PLACES = {
    "vespa": Place(vespa, "fp32", ("mean", "cls")),
    "opensearch": Place(opensearch, "fp32", tuple(_OPENSEARCH_POOLING)),
    "triton": Place(triton, "fp32", None),
    "weaviate": Place(weaviate, "int8", ("mean",)),
}


def _made(folder, *names):
    place = folder.joinpath(*names)
    place.mkdir(parents=True)
    return place


def _word(name):
    """A name of letters, digits, `-` and `_`."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in name)


def _plain(value):
    return value is None or isinstance(value, (str, int, float, bool))


def _outputs(path):
    """(name, dimensions after the batch, -1 for any) of a graph's outputs."""
    import onnx

    for output in onnx.load(path, load_external_data=False).graph.output:
        axes = output.type.tensor_type.shape.dim[1:]
        yield output.name, [axis.dim_value if axis.HasField("dim_value") else -1 for axis in axes]
