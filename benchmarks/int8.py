"""int8 weights on the CPU: speed and embedding cosine of the published architecture against fp32, one row a method.

    python benchmarks/int8.py --output results/int8_cpu

Methods: torch's dynamic quantisation (`torch.ao.quantization.quantize_dynamic`), torchao (int8 weights; int8 weights and dynamic
activations), ONNX Runtime's dynamic quantisation (per channel, with and without reduced range), and what `neobert export onnx` writes (a scale
for each token). Each that is not installed says so. Weights are random unless --model names a trained checkpoint; mean-pooled embeddings are
compared text by text.
"""

import argparse
import copy
import statistics
import tempfile
import time
import warnings

import torch

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.benchmarks.throughput_sets import draw_lengths, make_batch
from neobert.common.errors import one_line
from neobert.common.results import environment, markdown_table, write_result


def torch_dynamic(model, batch):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def torchao_weights(model, batch):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = copy.deepcopy(model)
    quantize_(model, Int8WeightOnlyConfig())
    return model


def torchao_dynamic(model, batch):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = copy.deepcopy(model)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def onnx_runtime(quantise=None):
    """A method that runs in ONNX Runtime; `quantise` is a function of the paths of the float32 graph and of the one to write."""

    def convert(model, batch):
        import onnxruntime

        folder = tempfile.mkdtemp()
        plain, small = f"{folder}/model.onnx", f"{folder}/int8.onnx"
        dims = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=2)}
        torch.onnx.export(
            model, (), plain, kwargs=dict(zip(("input_ids", "attention_mask"), batch)), dynamo=True, verbose=False,
            dynamic_shapes={"input_ids": dims, "attention_mask": dims},
        )  # fmt: skip
        if quantise is not None:
            quantise(plain, small)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(plain if quantise is None else small, options, providers=["CPUExecutionProvider"])

        def run(input_ids, attention_mask):
            (output,) = session.run(None, {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()})[:1]
            return (torch.from_numpy(output),)

        return run

    return convert


def one_scale_a_batch(reduce_range):
    def quantise(plain, small):
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(plain, small, per_channel=True, reduce_range=reduce_range, weight_type=QuantType.QInt8)

    return quantise


def one_scale_a_token(plain, small):
    import onnx

    from neobert.export.onnx_quantise import int8

    onnx.save(int8(onnx.load(plain)), small)


METHODS = {
    "fp32": lambda model, batch: model,
    "torch.ao quantize_dynamic": torch_dynamic,
    "torchao Int8WeightOnly": torchao_weights,
    "torchao Int8DynamicActivationInt8Weight": torchao_dynamic,
    "ONNX Runtime fp32": onnx_runtime(),
    "ONNX Runtime dynamic, per channel": onnx_runtime(one_scale_a_batch(False)),
    "ONNX Runtime dynamic, per channel, reduced range": onnx_runtime(one_scale_a_batch(True)),
    "ONNX Runtime, neobert export onnx --precisions int8": onnx_runtime(one_scale_a_token),
}


def embed(run, batch):
    """(B, D) means over the real tokens."""
    mask = batch[1][..., None]
    return (run(*batch)[0] * mask).sum(1) / mask.sum(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="results/int8_cpu")
    parser.add_argument("--model", help="folder of a trained checkpoint; by default random weights of the published architecture")
    parser.add_argument("--set", default="short", help="lengths, as in neobert throughput")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help="processor: CPU seconds, with --threads 1")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.clock == "processor" and arguments.threads != 1:
        parser.error("--clock processor needs --threads 1")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.model:
        model = NeoBERTModel.from_pretrained(arguments.model, dtype=torch.float32)
    else:
        model = NeoBERTModel(NeoBERTConfig(num_hidden_layers=arguments.layers))
    model.config._attn_implementation, model.config.return_dict = "sdpa", False
    model.eval()
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    texts = make_batch(draw_lengths(arguments.set, arguments.batch), "cpu")
    batch = (texts.input_ids, texts.attention_mask)
    runs, failed, embeddings, seconds = {}, {}, {}, {}
    with torch.no_grad():
        for name in ["fp32", *(n for n in arguments.methods if n != "fp32")]:
            try:
                run = METHODS[name](model, batch)
                embeddings[name] = embed(run, batch)
                runs[name] = run
            except Exception as error:  # one method's failure is a row of the table
                failed[name] = f"{type(error).__name__}: {one_line(error, 120)}"
            print(name, failed.get(name, "ready"), flush=True)
        for _ in range(arguments.repeats):
            for name, run in runs.items():
                start = clock()
                run(*batch)
                seconds.setdefault(name, []).append(clock() - start)
    rows, table = [], []
    for name in METHODS:
        if name in failed:
            rows.append({"method": name, "error": failed[name]})
            table.append([name, "", "", "", failed[name]])
        elif name in runs:
            ratios = [plain / s for plain, s in zip(seconds["fp32"], seconds[name])]
            cosine = torch.cosine_similarity(embeddings["fp32"], embeddings[name], dim=-1).min().item()
            row = {"method": name, "speed_up": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
            rows.append({**row, "cosine": cosine, "seconds": seconds[name]})
            table.append([name, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", f"{cosine:.4f}", ""])
    env = environment(clock=arguments.clock, capability=torch.backends.cpu.get_cpu_capability(), model=arguments.model or "random weights")
    text = markdown_table(["method", "times as fast as fp32", "range over repeats", "lowest cosine", "error"], table)
    print(write_result(arguments.output, "int8 on the CPU", env, {"rows": rows}, text))


if __name__ == "__main__":
    main()
