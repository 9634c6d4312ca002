"""Engines that `benchmarks.precisions` compares.

An engine opens a model in one precision and computes mean-pooled embeddings of tokenized texts. It
uses the setting that its documentation recommends for throughput, which `Engine.how` describes. The
package of an engine is imported when the engine is opened.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neobert.attention_neobert import Packing
from neobert.common.errors import UserError, require
from neobert.common.packing import compile_blocks, pack


BATCH_SIZES = (1, 4, 8, 32)
# Names of the hidden states in exported graphs.
HIDDEN_STATES = ("last_hidden_state", "token_embeddings")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Texts = Sequence[Sequence[int]]
Session = Callable[[Texts], np.ndarray]
# Token ids and mask of a padded batch, int64 (B, L).
PaddedBatch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Files:
    """Directory with `model/`, a Hub folder of NeoBERT in float32, and exports of this model."""

    folder: Path

    def find(self, name: str, instruction: str) -> Path:
        """Return the path of a file.

        Args:
            name: Path relative to the directory.
            instruction: Sentence that says how to create the file.

        Raises:
            UserError: If the file does not exist. The message contains the instruction.
        """
        if not (self.folder / name).exists():
            raise UserError(f"there is no {name}. {instruction}")
        return self.folder / name

    @property
    def model(self) -> Path:
        """Directory of the model in float32."""
        return self.folder / "model"


@dataclass(frozen=True)
class Engine:
    """Engine with one precision, a row of the table.

    Attributes:
        name: Name of the engine.
        precision: Name of the precision.
        how: Description of the settings.
        open: Function that opens the model for a number of threads and returns a session: a
            function that returns the embeddings (N, D) of N lists of token ids, special tokens
            included. If the session has an attribute `batch`, the caller searches for the fastest
            batch size. The caller sets the number of torch's threads, so engines of torch ignore
            the argument.
        size: Function that returns the size of the model on disk in bytes.
    """

    name: str
    precision: str
    how: str
    open: Callable[[Files, int], Any]
    size: Callable[[Files], int]


# ------------------------------------------------------------------------------------------------
# torch


def torch_engine(
    name: str,
    precision: str,
    how: str,
    load: Callable[[Files], Any],
    size: Callable[[Files], int],
    compiled: bool,
) -> Engine:
    """Return an engine that runs NeoBERT on one packed batch.

    Args:
        name: Name of the engine.
        precision: Name of the precision.
        how: Description of the settings.
        load: Function that returns the model.
        size: Function that returns the size of the model.
        compiled: Whether every block is compiled.
    """

    def open_session(files: Files, threads: int) -> Session:
        model = compile_blocks(load(files)) if compiled else load(files)

        @torch.inference_mode()
        def session(texts: Texts) -> np.ndarray:
            packed = pack(texts)
            means = Packing(packed["cu_seq_lens_q"], None).mean_per_sequence
            return means(model(**packed)[0].float()).numpy()

        return session

    how = f"{how}, texts packed"
    if compiled:
        name = f"{name}, compiled"
        how = f"{how}, blocks compiled"
    return Engine(name, precision, how, open_session, size)


def torch_float_engine(precision: str, compiled: bool = False) -> Engine:
    """Return the engine of torch with a floating-point type."""
    dtype = DTYPES[precision]

    def size(files: Files) -> int:
        # The files may store fewer bits, such as the float8 embeddings of the bundled encoder.
        model = _neobert(files, dtype)
        return dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())

    how = f"`from_pretrained(..., dtype={dtype})`"
    return torch_engine(
        "torch", precision, how, lambda files: _neobert(files, dtype), size, compiled
    )


def torch_int8_engine(
    name: str, how: str, quantize: Callable[[Any], Any], compiled: bool = False
) -> Engine:
    """Return an engine with int8 linear layers.

    Args:
        name: Name of the engine.
        how: Description of the settings.
        quantize: Function that quantizes a model and returns it.
        compiled: Whether every block is compiled.
    """

    def size(files: Files) -> int:
        # One byte per weight of a linear layer, and four per other parameter. The scales take a
        # thousandth of that.
        model = _neobert(files, torch.float32)
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
        return 4 * sum(p.numel() for p in model.parameters()) - 3 * linear

    return torch_engine(
        name, "int8", how, lambda files: quantize(_neobert(files, torch.float32)), size, compiled
    )


def _neobert(files: Files, dtype: torch.dtype) -> Any:
    from neobert.modeling_neobert import NeoBERTModel

    model = NeoBERTModel.from_pretrained(
        files.model, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    model.config.return_dict = False
    return model


def _quantize_neobert(model: Any) -> Any:
    from neobert.quantization.int8 import quantize_int8

    return quantize_int8(model, even_if_slow=True)


def _quantize_torchao(model: Any) -> Any:
    """Quantize a model with torchao.

    The fused kernels need constant weights in the compiler, and on CPUs without AMX an import that
    registers their patterns.
    """
    require("int8", "torchao")
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    torch._inductor.config.freezing = True
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def _size(path: Path) -> int:
    """Return the size of a file and of the files with its weights: NAME.bin, NAME.onnx_data."""
    return sum(other.stat().st_size for other in path.parent.glob(f"{path.stem}.*"))


# ------------------------------------------------------------------------------------------------
# padded engines


def sorted_batches(texts: Texts, size: int) -> list[list[int]]:
    """Return the indices of the texts in batches of at most `size` texts of similar length."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    return [order[i : i + size] for i in range(0, len(order), size)]


class Padded:
    """Session that sorts texts by length and pads them to batches.

    Args:
        forward: Function that returns the last hidden states (B, L, D) of every batch.

    Attributes:
        batch: Batch size.
    """

    batch = 8

    def __init__(self, forward: Callable[[list[PaddedBatch]], Iterable[np.ndarray]]) -> None:
        self.forward = forward

    def __call__(self, texts: Texts) -> np.ndarray:
        """Return the embeddings (N, D) of N lists of token ids."""
        chunks = sorted_batches(texts, self.batch)
        batches = []
        for chunk in chunks:
            lengths = np.array([len(texts[i]) for i in chunk])
            ids = np.zeros((len(chunk), lengths.max()), np.int64)
            for row, i in enumerate(chunk):
                ids[row, : len(texts[i])] = texts[i]
            mask = np.arange(ids.shape[1]) < lengths[:, None]
            batches.append((ids, mask.astype(np.int64)))

        # Padding does not count in the means, and the rows return to the order of the texts.
        embeddings: list[Any] = [None] * len(texts)
        for chunk, (_, mask), hidden in zip(chunks, batches, self.forward(batches)):
            means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            for row, i in enumerate(chunk):
                embeddings[i] = means[row]
        return np.stack(embeddings).astype(np.float32)


def onnx_engine(precision: str, file: str) -> Engine:
    """Return the engine of ONNX Runtime for an exported graph."""
    instruction = "Run `neobert export onnx FILES/model FILES/onnx --precisions fp32 int8`."

    def open_session(files: Files, threads: int) -> Padded:
        require("onnx", "onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        session = onnxruntime.InferenceSession(
            str(files.find(file, instruction)), options, providers=["CPUExecutionProvider"]
        )
        output_names = [output.name for output in session.get_outputs()]
        hidden_states = [name for name in output_names if name in HIDDEN_STATES]
        output = (hidden_states or output_names)[0]

        def forward(batches: list[PaddedBatch]) -> list[np.ndarray]:
            return [
                session.run([output], {"input_ids": ids, "attention_mask": mask})[0]
                for ids, mask in batches
            ]

        return Padded(forward)

    how = "all graph optimizations, intra_op_num_threads, sorted batches of the best size"
    return Engine(
        "ONNX Runtime",
        precision,
        how,
        open_session,
        lambda files: _size(files.find(file, instruction)),
    )


def openvino_engine(precision: str, hint: str, file: str) -> Engine:
    """Return the engine of OpenVINO for an exported graph.

    Args:
        precision: Name of the precision.
        hint: Inference precision hint, "f32", "bf16" or "f16".
        file: Path of the graph in FILES.
    """
    instruction = "Run `neobert export openvino FILES/model FILES/openvino --precisions fp32 int8`."

    def open_session(files: Files, threads: int) -> Padded:
        require("openvino", "openvino")
        import openvino

        core = openvino.Core()
        properties = {
            "PERFORMANCE_HINT": "THROUGHPUT",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": hint,
        }
        model = core.compile_model(
            core.read_model(str(files.find(file, instruction))), "CPU", properties
        )

        # The throughput hint determines how many requests run at the same time.
        requests = [
            model.create_infer_request()
            for _ in range(model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        ]

        def forward(batches: list[PaddedBatch]) -> list[np.ndarray]:
            hidden = []
            for start in range(0, len(batches), len(requests)):
                running = list(zip(requests, batches[start : start + len(requests)]))
                for request, (ids, mask) in running:
                    request.start_async({"input_ids": ids, "attention_mask": mask})
                for request, _ in running:
                    request.wait()
                    # The next inference overwrites the tensor of the request, so it is copied.
                    hidden.append(np.array(request.get_output_tensor(0).data))
            return hidden

        return Padded(forward)

    how = (
        f"throughput hint, {hint} inference precision, asynchronous requests, sorted batches "
        "of the best size"
    )
    return Engine(
        "OpenVINO",
        precision,
        how,
        open_session,
        lambda files: _size(files.find(file, instruction)),
    )


# ------------------------------------------------------------------------------------------------
# llama.cpp


class LineProcess:
    """Process that reads and writes lines of JSON.

    Args:
        command: Program and arguments. The process writes a first line when it is ready.

    Attributes:
        seconds: CPU seconds of the last call.
    """

    seconds = 0.0

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.program = Path(command[0]).name
        # The process writes a first line when it is ready, or the reason why it cannot start.
        self._read()

    def ask(self, message: object) -> dict[str, Any]:
        """Send a message and return the answer."""
        process_input: Any = self.process.stdin
        process_input.write(json.dumps(message) + "\n")
        process_input.flush()
        answer = self._read()
        self.seconds = answer["seconds"]
        return answer

    def close(self) -> None:
        """End the process."""
        process_input: Any = self.process.stdin
        process_input.close()
        self.process.wait(30)

    def _read(self) -> dict[str, Any]:
        """Return the next answer. Other lines are messages of the engine."""
        output: Any = self.process.stdout
        for line in output:
            if line.startswith("{"):
                answer = json.loads(line)
                if "error" in answer:
                    raise UserError(answer["error"])
                return answer
        raise UserError(f"{self.program} ended with exit code {self.process.wait()}, see above.")


class Llama(LineProcess):
    """Session of llama.cpp in a process of node.

    Args:
        modules: Directory node_modules with node-llama-cpp.
        model: GGUF file.
        threads: Number of threads.
        pooling: Number of a GGUF pooling type, by default that of the file.

    Attributes:
        extra_bytes: Peak memory of the process beyond the memory before the model was loaded.
    """

    extra_bytes = 0

    def __init__(
        self, modules: str | Path, model: str | Path, threads: int, pooling: int | None = None
    ) -> None:
        script = Path(__file__).with_name("llama.mjs")
        command = ["node", str(script), str(modules), str(model), str(threads)]
        if pooling is not None:
            command.append(str(int(pooling)))
        super().__init__(command)

    def __call__(self, texts: Texts) -> np.ndarray:
        """Return the embeddings (N, D) of N lists of token ids."""
        answer = self.ask(texts)
        self.extra_bytes = answer["bytes"]
        return np.array(answer["vectors"], np.float32)


def llama_engine(precision: str, file: str) -> Engine:
    """Return the engine of llama.cpp for an exported GGUF file."""
    instruction = f"Run `neobert export gguf FILES/model FILES/{file} --dtype {precision}`."

    def open_session(files: Files, threads: int) -> Llama:
        if shutil.which("node") is None:
            raise UserError("node is not installed. llama.cpp runs in node.")
        modules = files.find(
            "node/node_modules",
            "Run `npm i --ignore-scripts node-llama-cpp @node-llama-cpp/linux-x64` in FILES/node.",
        )
        return Llama(modules, files.find(file, instruction), threads)

    how = "node-llama-cpp, prebuilt for this CPU; its embedding context takes one text at a time"
    return Engine(
        "llama.cpp",
        precision,
        how,
        open_session,
        lambda files: files.find(file, instruction).stat().st_size,
    )


ENGINES = {
    "torch-fp32": torch_float_engine("fp32"),
    "torch-bf16": torch_float_engine("bf16"),
    "torch-fp16": torch_float_engine("fp16"),
    "torch-bf16-compiled": torch_float_engine("bf16", compiled=True),
    "torch-fp16-compiled": torch_float_engine("fp16", compiled=True),
    "torch-int8": torch_int8_engine("torch", "`neobert.quantize_int8`", _quantize_neobert),
    "torch-int8-compiled": torch_int8_engine(
        "torch", "`neobert.quantize_int8`", _quantize_neobert, compiled=True
    ),
    "torchao-int8": torch_int8_engine(
        "torchao", "`Int8DynamicActivationInt8WeightConfig`", _quantize_torchao
    ),
    "torchao-int8-compiled": torch_int8_engine(
        "torchao",
        "`Int8DynamicActivationInt8WeightConfig`, `torch._inductor.config.freezing`",
        _quantize_torchao,
        compiled=True,
    ),
    "onnx-fp32": onnx_engine("fp32", "onnx/onnx/model.onnx"),
    "onnx-int8": onnx_engine("int8", "onnx/onnx/model_quantized.onnx"),
    "openvino-fp32": openvino_engine("fp32", "f32", "openvino/openvino/openvino_model.xml"),
    "openvino-bf16": openvino_engine("bf16", "bf16", "openvino/openvino/openvino_model.xml"),
    "openvino-fp16": openvino_engine("fp16", "f16", "openvino/openvino/openvino_model.xml"),
    "openvino-int8": openvino_engine(
        "int8", "f32", "openvino/openvino/openvino_model_qint8_quantized.xml"
    ),
    "llama-f16": llama_engine("f16", "model.f16.gguf"),
    "llama-q8_0": llama_engine("q8_0", "model.q8_0.gguf"),
}
