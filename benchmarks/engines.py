"""The engines that `precisions` compares: each opens a model in one precision and gives mean-pooled
vectors of tokenised texts.

Every engine runs at the best setting that its documentation names for throughput; `Engine.how` says
which. Nothing here is imported by an engine that does not need it.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from neobert.attention_neobert import Packing
from neobert.common.errors import UserError, require
from neobert.common.packing import compile_blocks, pack


BATCH_SIZES = (1, 4, 8, 32)
HIDDEN_STATES = ("last_hidden_state", "token_embeddings")  # names in graphs
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Files:
    """Where the models are: a folder with `model/` (a Hub folder of NeoBERT in float32), the peers,
    and what was exported from `model/`."""

    folder: Path

    def find(self, name, made_by):
        """The file `name`.

        Raises:
            UserError: it is not there; the sentence says which command makes it.
        """
        if not (self.folder / name).exists():
            raise UserError(f"there is no {name}; {made_by}")
        return self.folder / name

    @property
    def model(self):
        return self.folder / "model"


@dataclass(frozen=True)
class Engine:
    """One row of the table.

    Attributes:
        name, precision: of the row.
        how: the setting, in words.
        open: function of (files, threads) -> session: a function of a list of lists of token ids,
            special tokens included, that returns float vectors (texts, D). A session with an
            attribute `batch` takes that many texts at once; its best value is found by trying.
            Torch's own threads are set by the caller.
        size: function of files -> bytes of the model on disk.
    """

    name: str
    precision: str
    how: str
    open: Callable
    size: Callable


# ------------------------------------------------------------------------------------------------
# torch


def torch_engine(name, precision, how, load, size, compiled):
    """NeoBERT that `load(files)` returns, all texts packed into one row."""

    def open_session(files, threads):
        model = compile_blocks(load(files)) if compiled else load(files)

        @torch.inference_mode()
        def session(texts):
            packed = pack(texts)
            means = Packing(packed["cu_seq_lens_q"], None).means
            return means(model(**packed)[0].float()).numpy()

        return session

    name, blocks = (f"{name}, compiled", ", blocks compiled") if compiled else (name, "")
    return Engine(name, precision, f"{how}, texts packed{blocks}", open_session, size)


def torch_float_engine(precision, compiled=False):
    dtype = DTYPES[precision]

    def size(files):
        weights = sum(path.stat().st_size for path in files.model.glob("*.safetensors"))
        return weights * dtype.itemsize // 4

    how = f"`from_pretrained(..., dtype={dtype})`"
    return torch_engine(
        "torch", precision, how, lambda files: _neobert(files, dtype), size, compiled
    )


def torch_int8_engine(name, how, quantize, compiled=False):
    """Its linear layers are quantized by `quantize(model)`, which returns the model."""

    def size(files):
        # One byte a weight of a linear layer, four of everything else; scales are a thousandth of
        # that.
        model = _neobert(files, torch.float32)
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
        return 4 * sum(p.numel() for p in model.parameters()) - 3 * linear

    return torch_engine(
        name, "int8", how, lambda files: quantize(_neobert(files, torch.float32)), size, compiled
    )


def _neobert(files, dtype):
    from neobert.modeling_neobert import NeoBERTModel

    model = NeoBERTModel.from_pretrained(
        files.model, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    model.config.return_dict = False
    return model


def _ours(model):
    from neobert.quantization.int8 import quantize_int8

    return quantize_int8(model, even_if_slow=True)


def _torchao(model):
    """With what its fused path wants of a compiler: constant weights, and without AMX an import
    that registers its patterns."""
    require("int8", "torchao")
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    torch._inductor.config.freezing = True
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def _size(path):
    """Bytes of a file and of those beside it that hold its weights: NAME.bin, NAME.onnx_data."""
    return sum(other.stat().st_size for other in path.parent.glob(f"{path.stem}.*"))


# ------------------------------------------------------------------------------------------------
# padded engines


class Padded:
    """Texts sorted by length in padded batches of `batch`.

    Args:
        forward: function of a list of (ids, mask) batches, int64 (B, L), that returns their last
            hidden states, (B, L, D) each.
    """

    batch = 8

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, texts):
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        chunks = [order[i : i + self.batch] for i in range(0, len(order), self.batch)]
        batches = []
        for chunk in chunks:
            ids = np.zeros((len(chunk), max(len(texts[i]) for i in chunk)), np.int64)
            for place, i in enumerate(chunk):
                ids[place, : len(texts[i])] = texts[i]
            lengths = np.array([len(texts[i]) for i in chunk])
            batches.append((ids, (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)))
        vectors = [None] * len(texts)
        for chunk, (_, mask), hidden in zip(chunks, batches, self.forward(batches)):
            means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            for place, i in enumerate(chunk):
                vectors[i] = means[place]
        return np.stack(vectors).astype(np.float32)


def onnx_engine(precision, file):
    made_by = "make it by: neobert export onnx FILES/model FILES/onnx --precisions fp32 int8"

    def open_session(files, threads):
        require("onnx", "onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        session = onnxruntime.InferenceSession(
            str(files.find(file, made_by)), options, providers=["CPUExecutionProvider"]
        )
        names_of_outputs = [output.name for output in session.get_outputs()]
        known = [name for name in names_of_outputs if name in HIDDEN_STATES]
        output = (known or names_of_outputs)[0]

        def forward(batches):
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
        lambda files: _size(files.find(file, made_by)),
    )


def openvino_engine(precision, hint, file):
    made_by = (
        "make it by: neobert export openvino FILES/model FILES/openvino --precisions fp32 int8"
    )

    def open_session(files, threads):
        require("openvino", "openvino")
        import openvino

        core = openvino.Core()
        properties = {
            "PERFORMANCE_HINT": "THROUGHPUT",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": hint,
        }
        model = core.compile_model(
            core.read_model(str(files.find(file, made_by))), "CPU", properties
        )

        requests = [
            model.create_infer_request()
            for _ in range(model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        ]

        def forward(batches):
            hidden = []
            for start in range(0, len(batches), len(requests)):
                running = list(zip(requests, batches[start : start + len(requests)]))
                for request, (ids, mask) in running:
                    request.start_async({"input_ids": ids, "attention_mask": mask})
                for request, _ in running:
                    request.wait()
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
        lambda files: _size(files.find(file, made_by)),
    )


# ------------------------------------------------------------------------------------------------
# llama.cpp


class Llama:
    """llama.cpp in a process of node: one line of JSON in, one out.

    Args:
        modules: folder node_modules with node-llama-cpp.
        model: GGUF file.
        threads: that compute.
        pooling: number of a GGUF pooling type in place of the file's own.

    Attributes:
        extra_bytes: peak memory of that process beyond what it held before the model was loaded.
        seconds: CPU seconds of the last call.
    """

    def __init__(self, modules, model, threads, pooling=None):
        script = Path(__file__).with_name("llama.mjs")
        more = [] if pooling is None else [str(int(pooling))]
        self.process = subprocess.Popen(
            ["node", str(script), str(modules), str(model), str(threads), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def _read(self):
        # What the engine itself prints is not ours.
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise UserError(f"node ended with exit code {self.process.wait()}, see above")

    def __call__(self, texts):
        self.process.stdin.write(json.dumps(texts) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        self.extra_bytes, self.seconds = answer["bytes"], answer["seconds"]
        return np.array(answer["vectors"], np.float32)

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


def llama_engine(precision, file):
    made_by = f"make it by: neobert export gguf FILES/model FILES/{file} --dtype {precision}"

    def open_session(files, threads):
        if shutil.which("node") is None:
            raise UserError("node is not installed; llama.cpp runs in it")
        modules = files.find(
            "node/node_modules",
            "in FILES/node: npm i --ignore-scripts node-llama-cpp @node-llama-cpp/linux-x64",
        )
        return Llama(modules, files.find(file, made_by), threads)

    how = "node-llama-cpp, prebuilt for this CPU; its embedding context takes one text at a time"
    return Engine(
        "llama.cpp",
        precision,
        how,
        open_session,
        lambda files: files.find(file, made_by).stat().st_size,
    )


ENGINES = {
    "torch-fp32": torch_float_engine("fp32"),
    "torch-bf16": torch_float_engine("bf16"),
    "torch-fp16": torch_float_engine("fp16"),
    "torch-bf16-compiled": torch_float_engine("bf16", compiled=True),
    "torch-fp16-compiled": torch_float_engine("fp16", compiled=True),
    "torch-int8": torch_int8_engine("torch", "`neobert.quantize_int8`", _ours),
    "torch-int8-compiled": torch_int8_engine(
        "torch", "`neobert.quantize_int8`", _ours, compiled=True
    ),
    "torchao-int8": torch_int8_engine(
        "torchao", "`Int8DynamicActivationInt8WeightConfig`", _torchao
    ),
    "torchao-int8-compiled": torch_int8_engine(
        "torchao",
        "`Int8DynamicActivationInt8WeightConfig`, `torch._inductor.config.freezing`",
        _torchao,
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
