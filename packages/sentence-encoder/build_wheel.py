"""Build the wheel of neobert-sentence-encoder: `make encoder-wheel`.

The weights are not stored in this directory. They are copied from examples/sentence-encoder, and
the int8 graph is exported from there.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper


HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENCODER = ROOT / "examples" / "sentence-encoder"
# Reports about the training are not part of the package.
EXCLUDED = ("result.json", "README.md", "__pycache__")
# Name of the token embeddings in the safetensors file.
TABLE = "encoder.weight"


def export_graph(folder: Path) -> onnx.ModelProto:
    """Return the int8 graph of the encoder, exported to a directory."""
    command = [sys.executable, "-m", "neobert", "export", "onnx", str(ENCODER), str(folder)]
    subprocess.run([*command, "--precisions", "int8"], cwd=ROOT, check=True)
    return onnx.load(folder / "onnx" / "model_quantized.onnx")


def share_token_embeddings(model: onnx.ModelProto, weights: Path) -> None:
    """Let the graph read its token embeddings from the safetensors file.

    They are two thirds of the parameters, and the wheel would contain them twice. The file stores
    them in float8 (e5m2), one byte per number, which ONNX Runtime cannot convert. The graph looks
    each byte up in a table of the 256 values.

    Args:
        model: Exported graph, which is changed. Its embeddings are int8 rows with one scale each.
        weights: File of the weights, which must be in the directory of the graph.
    """
    # A safetensors file starts with the size of its header in 8 bytes and the header in JSON.
    with open(weights, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(header_size))[TABLE]
    if entry["dtype"] != "F8_E5M2":
        raise ValueError(f"{TABLE} of {weights} must be float8 (e5m2), got {entry['dtype']}.")
    start, end = entry["data_offsets"]

    graph = model.graph
    (rows,) = [node for node in graph.node if node.output[0] == "node_embedding_row"]
    codes = onnx.TensorProto(
        name="token_embeddings",
        data_type=onnx.TensorProto.UINT8,
        dims=entry["shape"],
        data_location=onnx.TensorProto.EXTERNAL,
    )
    # The offsets in the header count from the end of the header.
    location = {"location": weights.name, "offset": 8 + header_size + start, "length": end - start}
    for key, value in location.items():
        codes.external_data.add(key=key, value=str(value))

    # float8 (e5m2) is the upper byte of a float16.
    values = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
    new_nodes = [
        helper.make_node("Gather", ["token_embeddings", rows.input[1]], ["token_bytes"]),
        helper.make_node("Cast", ["token_bytes"], ["token_codes"], to=onnx.TensorProto.INT32),
        helper.make_node("Gather", ["float8_values", "token_codes"], ["embedding"]),
    ]

    # These nodes converted the int8 rows to float32.
    replaced = ("node_embedding_row", "node_embedding_float", "node_embedding_scale", "embedding")
    nodes = [node for node in graph.node if node.output[0] not in replaced]
    # The nodes of a graph must be in the order of their dependencies.
    del graph.node[:]
    graph.node.extend([*new_nodes, *nodes])

    tensors = [tensor for tensor in graph.initializer if not tensor.name.startswith("node_embed")]
    del graph.initializer[:]
    graph.initializer.extend([*tensors, codes, numpy_helper.from_array(values, "float8_values")])


def main() -> None:
    """Build the wheel into a directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default=str(ROOT / "dist"), help="Directory of the wheel.")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        shutil.copytree(HERE, source, ignore=shutil.ignore_patterns("build_wheel.py", "build"))
        # The model code in the wheel is that of this repository, under its license.
        shutil.copy(ROOT / "LICENSE", source)
        model_folder = source / "neobert_sentence_encoder" / "model"
        shutil.copytree(ENCODER, model_folder, ignore=shutil.ignore_patterns(*EXCLUDED))

        graph = export_graph(Path(name) / "onnx")
        share_token_embeddings(graph, model_folder / "model.safetensors")
        (model_folder / "model_int8.onnx").write_bytes(graph.SerializeToString())

        # --no-deps: the dependencies are installed with the wheel and not built into it.
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        subprocess.run([*wheel, "--wheel-dir", options.output, str(source)], check=True)


if __name__ == "__main__":
    main()
