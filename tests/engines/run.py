"""Compare exported models in other engines with torch in float32 (`make test-engines`).

    python tests/engines/run.py --work FOLDER [--engines llama.cpp ...] [--output results/engines]

Two encoders and a classifier are exported and run on the CPU. The encoders are the bundled sentence
encoder, and one with wide random weights, on which errors and low precision have the largest
effect. Hidden states, embeddings and logits are compared.

FOLDER contains the installed engines: node/ (npm packages) and st/ (the environment of the ONNX
backend of sentence-transformers). An engine that is not installed is skipped, and the last lines
give the reason.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.engines import Llama
from neobert import NeoBERTConfig, NeoBERTForSequenceClassification, NeoBERTModel
from neobert.common.constants import TOKENIZER
from neobert.common.environment import environment
from neobert.common.errors import UserError, one_line
from neobert.common.files import read_json
from neobert.common.identity import model_digest
from neobert.common.loading import load_tokenizer
from neobert.common.results import write_result
from neobert.common.sentence_transformers_files import write_sentence_transformers
from neobert.common.tables import markdown_table
from neobert.export import command as export_command
from neobert.export import onnx, openvino
from neobert.export.check import SENTENCES


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# File names of the exports that are run, by precision.
ONNX = {name: onnx.PRECISIONS[name].file for name in ("fp32", "fp16", "int8")}
OPENVINO = {name: precision.file for name, precision in openvino.PRECISIONS.items()}
BUNDLED = ROOT / "examples" / "sentence-encoder"
# Minimum cosines to torch in float32, (token, pooled), by precision.
BOUNDS = {"fp32": (0.9999, 0.9999), "fp16": (0.995, 0.999), "q8_0": (0.97, 0.99)}
# Random weights lose more than trained ones at low precision.
BOUNDS["q5_0"] = (0.6, 0.85)
BOUNDS["int8"] = (0.9, 0.99)
NO_NODE = "node is not installed: apt-get install nodejs npm, or nodejs.org (version 20 or newer)"


class Skipped(Exception):
    """Raised if an engine is not installed. The message states what is missing."""


# ------------------------------------------------------------------------------------------------
# Models


def make_texts():
    """Return texts of 1 to about 150 words, with accents, digits, code and punctuation."""
    texts = list(SENTENCES)
    return texts + [" ".join(texts[i : i + n]) for i, n in ((0, 3), (3, 5), (6, 9), (1, 13))]


@dataclass
class Model:
    """Model to export, and its outputs in torch.

    Attributes:
        name: Name in the results.
        folder: Hub folder of a sentence encoder.
        work: Directory of its exports.
        texts: Texts that the model does not truncate.
        tokens: Hidden states of each text, (L, D) float32.
        pooled: Mean-pooled embeddings, (texts, D).
    """

    name: str
    folder: Path
    work: Path
    texts: list = field(default_factory=make_texts)

    def __post_init__(self):
        self.tokenizer = load_tokenizer(self.folder)
        max_length = read_json(self.folder / "sentence_bert_config.json")["max_seq_length"]
        lengths = [len(self.tokenizer(text)["input_ids"]) for text in self.texts]
        self.texts = [text for text, length in zip(self.texts, lengths) if length <= max_length]

        options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        model = NeoBERTModel.from_pretrained(self.folder, **options).eval()
        ids = [torch.tensor([self.tokenizer(text)["input_ids"]]) for text in self.texts]
        with torch.inference_mode():
            self.tokens = [model(row).last_hidden_state[0].numpy() for row in ids]

        self._torch = model
        self._ids = ids
        self.pooled = np.stack([states.mean(0) for states in self.tokens])

    @torch.inference_mode()
    def seconds(self):
        """Return the CPU seconds of torch for all texts, one after another, on one thread."""
        return timed(lambda row: self._torch(row).last_hidden_state.mean(1), self._ids)

    def export(self, target, output, *options):
        """Run `neobert export` unless the output exists, and return the path of the output."""
        path = self.work / output
        if path.exists():
            return path
        export_command.main([target, str(self.folder), str(path), *options])
        return path


def timed(function, items, repeats=3):
    """Return the median CPU seconds of a function for all items, one after another.

    A first run over all items is not counted. Other processes on the machine affect the CPU time of
    one thread less than the elapsed time.
    """
    times = []
    for _ in range(1 + repeats):
        start = time.process_time()
        for item in items:
            function(item)
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def random_model(model_class, folder, pooling=None, **changes):
    """Save a model with wide random weights as a Hub folder, and return the folder.

    The weights are so large that the outputs of attention and feed-forward are as large as the
    residual stream.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 512, "max_position_embeddings": 1024}
    model = model_class(NeoBERTConfig(**sizes, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 1.0 if name.endswith("encoder.weight") else 0.12)

    model.save_pretrained(folder)
    load_tokenizer(TOKENIZER).save_pretrained(folder)
    if pooling:
        write_sentence_transformers(folder, model.config.hidden_size, 512, pooling)
    return folder


# ------------------------------------------------------------------------------------------------
# Engines


@dataclass(frozen=True)
class EngineOutput:
    """Outputs of an engine for the texts of a model.

    Attributes:
        engine: Name of the engine.
        version: Version of the engine.
        precision: Name of the precision.
        tokens: Hidden states of each text, (L, D). For an engine that returns a single position
            only, {position: (texts, D)} with the positions 0 and -1.
        pooled: Embeddings, (texts, D).
        seconds: CPU seconds for all texts, one after another, on one thread.
        size: Size of the model in bytes.
    """

    engine: str
    version: str
    precision: str
    tokens: object
    pooled: np.ndarray
    seconds: float
    size: int


def onnx_runtime(model, work):
    """Run ONNX Runtime in Python on one right-padded batch.

    The embeddings are the pooled output of the graph, or else means of its hidden states.
    """
    import onnxruntime

    folder = onnx_folder(model)
    inputs = padded_rows(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for precision, name in ONNX.items():
        path = str(folder / "onnx" / name)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        outputs = [output.name for output in session.get_outputs()]
        values = dict(zip(outputs, session.run(None, inputs)))
        seconds = timed(partial(session.run, outputs[:1]), single_rows(model))
        tokens = non_padding_states(values["last_hidden_state"], inputs["attention_mask"])
        pooled = values.get("sentence_embedding", means(tokens))
        size = size_of(folder / "onnx", name)
        version = onnxruntime.__version__
        yield EngineOutput("ONNX Runtime", version, precision, tokens, pooled, seconds, size)


def openvino_runtime(model, work):
    """Run OpenVINO on one right-padded batch, with the options that the export contains."""
    import openvino as runtime

    core = runtime.Core()
    inputs = padded_rows(model)
    folder = model.export("openvino", "openvino", "--precisions", *OPENVINO) / "openvino"
    settings = {**read_json(folder / openvino.OPTIONS_FILE), "INFERENCE_NUM_THREADS": 1}
    for precision, name in OPENVINO.items():
        compiled = core.compile_model(core.read_model(str(folder / name)), "CPU", settings)
        names = [output.get_any_name() for output in compiled.outputs]
        values = dict(zip(names, (np.array(value) for value in compiled(inputs).values())))
        seconds = timed(compiled, single_rows(model))
        tokens = non_padding_states(values["last_hidden_state"], inputs["attention_mask"])
        pooled = values.get("sentence_embedding", means(tokens))
        size = size_of(folder, name)
        version = runtime.__version__.split("-")[0]
        yield EngineOutput("OpenVINO", version, precision, tokens, pooled, seconds, size)


def transformers_js(model, work):
    """Run transformers.js in node, with its own tokenizer and mean pooling."""
    modules = node_modules(work)
    folder = onnx_folder(model)
    version = package_version(modules, "@huggingface/transformers")
    for precision, name in ONNX.items():
        dtype = {"int8": "q8"}.get(precision, precision)
        response = in_node("transformers.mjs", modules, folder, dtype, texts=model.texts)
        tokens = [np.array(states, np.float32) for states in response["tokens"]]
        pooled = np.array(response["pooled"])
        seconds = response["seconds"]
        size = size_of(folder / "onnx", name)
        yield EngineOutput("transformers.js", version, precision, tokens, pooled, seconds, size)


def llama_cpp(model, work):
    """Run llama.cpp, prebuilt for node, with its own tokenizer and pooling.

    Its hidden states are compared for the first and the last token, which two of its pooling types
    return.
    """
    modules = node_modules(work)
    for dtype in ("f32", "f16", "q8_0", "q5_0"):
        path = model.export("gguf", f"model.{dtype}.gguf", "--dtype", dtype)
        embeddings = {}
        # The pooling types of the first and the last token, and the one that the file sets.
        for pooling in (2, 3, None):
            engine = Llama(modules, path, 1, pooling)
            embeddings[pooling] = engine(model.texts)
            if pooling is None:
                seconds = statistics.median(seconds_of(engine, model.texts) for _ in range(3))
            engine.close()

        precision = {"f32": "fp32", "f16": "fp16"}.get(dtype, dtype)
        version = f"{package_version(modules, 'node-llama-cpp')} (node-llama-cpp)"
        tokens = {0: embeddings[2], -1: embeddings[3]}
        size = path.stat().st_size
        yield EngineOutput("llama.cpp", version, precision, tokens, embeddings[None], seconds, size)


def sentence_transformers_onnx(model, work):
    """Run the ONNX backend of sentence-transformers 5.1 with transformers 4.57."""
    if not (work / "st" / ".ready").exists():
        raise Skipped(f"{work / 'st'} is not installed: make {work / 'st' / '.ready'}")
    folder = onnx_folder(model)
    script = HERE / "sentence_transformers_onnx.py"
    response = in_process([work / "st" / "bin" / "python", script, folder], model.texts)
    tokens = [np.array(states, np.float32) for states in response["tokens"]]
    pooled = np.array(response["pooled"])
    seconds = response["seconds"]
    size = size_of(folder / "onnx", ONNX["fp32"])
    name = "sentence-transformers, ONNX"
    yield EngineOutput(name, response["version"], "fp32", tokens, pooled, seconds, size)


ENGINES = {
    "onnxruntime": onnx_runtime,
    "openvino": openvino_runtime,
    "transformers.js": transformers_js,
    "llama.cpp": llama_cpp,
    "sentence-transformers": sentence_transformers_onnx,
}


def seconds_of(engine, texts):
    """Return the CPU seconds of llama.cpp for all texts."""
    engine(texts)
    return engine.seconds


def onnx_folder(model):
    """Return the directory of the ONNX export of a model."""
    return model.export("onnx", "onnx", "--precisions", *ONNX)


def single_rows(model):
    """Return the inputs of each text, as batches of one."""
    rows = [np.array([model.tokenizer(text)["input_ids"]], np.int64) for text in model.texts]
    return [{"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in rows]


def padded_rows(model):
    """Return the inputs of all texts as one right-padded batch."""
    batch = model.tokenizer(model.texts, padding=True, return_tensors="np")
    return {name: batch[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


def non_padding_states(hidden, mask):
    """Return the hidden states of each text in a padded batch, without padding."""
    return [states[row.astype(bool)] for states, row in zip(hidden, mask)]


def means(tokens):
    """Return the mean hidden states of each text, (texts, D)."""
    return np.stack([states.mean(0) for states in tokens])


def size_of(folder, name):
    """Return the bytes of a model file and of a separate file of its weights."""
    names = (name, f"{name}_data", f"{name}.data", f"{Path(name).stem}.bin")
    return sum(path.stat().st_size for path in folder.iterdir() if path.name in names)


def node_modules(work):
    """Return the directory of the npm packages.

    Raises:
        Skipped: If node or the packages are not installed.
    """
    if shutil.which("node") is None:
        raise Skipped(NO_NODE)
    modules = work / "node" / "node_modules"
    if not modules.is_dir():
        raise Skipped(f"{modules} is not installed: make {work / 'node' / '.ready'}")
    return modules


def package_version(modules, name):
    """Return the version of an installed npm package."""
    return read_json(modules / name / "package.json")["version"]


def in_node(script, *arguments, texts):
    """Run a JavaScript module of this directory, as `in_process`."""
    return in_process(["node", HERE / script, *arguments], texts)


def in_process(command, texts):
    """Run a program with a JSON list of texts on stdin, and return the JSON in its last line.

    Raises:
        UserError: If the program fails.
    """
    process = subprocess.run(
        [*map(str, command)], input=json.dumps(texts), capture_output=True, text=True, timeout=600
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise UserError(
            f"{Path(str(command[1])).name} ended with exit code {process.returncode}: "
            f"{one_line(process.stderr[-1500:], 1500)}"
        )
    return json.loads(lines[-1])


# ------------------------------------------------------------------------------------------------
# Comparison


def worst_cosine(actual, expected):
    """Return the smallest cosine between rows of two arrays.

    The result is -1 if the shapes differ or an actual value is not finite.
    """
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return -1.0
    lengths = np.linalg.norm(actual, axis=-1) * np.linalg.norm(expected, axis=-1)
    return float(((actual * expected).sum(-1) / np.maximum(lengths, 1e-30)).min())


def compare(output, model):
    """Compare the outputs of an engine with those of torch, and return a row of the results."""
    if isinstance(output.tokens, dict):
        pairs = [
            (actual, np.stack([states[position] for states in model.tokens]))
            for position, actual in output.tokens.items()
        ]
    else:
        pairs = zip(output.tokens, model.tokens, strict=True)
    token = min(worst_cosine(actual, expected) for actual, expected in pairs)

    return {
        "model": model.name,
        "engine": output.engine,
        "version": output.version,
        "precision": output.precision,
        "token": token,
        "pooled": worst_cosine(output.pooled, model.pooled),
        "bytes": output.size,
        "speed": model.seconds() / output.seconds,
        "places": "first and last" if isinstance(output.tokens, dict) else "all",
    }


def check_classifier(modules, work):
    """Compare the logits of a sequence classifier with two labels in llama.cpp with those of torch.

    Returns:
        The largest difference, relative to the largest logit.
    """
    folder = work / "classifier"
    path = work / "classifier.gguf"
    random_model(NeoBERTForSequenceClassification, folder, num_labels=2)
    if not path.exists():
        export_command.main(["gguf", str(folder), str(path), "--dtype", "f32"])

    model = NeoBERTForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder)
    texts = make_texts()
    with torch.inference_mode():
        batches = [tokenizer(text, return_tensors="pt") for text in texts]
        expected = np.stack([model(**batch).logits[0].numpy() for batch in batches])
    logits = np.array(in_node("classifier.mjs", modules, path, "2", texts=texts)["logits"])
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def page(rows, classifier, skipped):
    """Return the results as Markdown."""
    paragraphs = [
        f"Encoder `{model_digest(str(BUNDLED))}`.",
        "Vectors of the same texts (1 to about 150 words) against torch in float32. Token: the "
        "worst cosine between the vectors of one token; llama.cpp gives "
        "the first and the last token's alone. Pooled: the worst cosine between the vectors of one "
        "text. Speed: CPU time of the texts one after "
        "another on one thread, relative to torch in float32 measured beside it (above 1 is "
        "faster); docs/performance.md has speeds in batches.",
    ]

    header = ["engine", "version", "precision", "worst token cosine", "worst pooled cosine"]
    for name in dict.fromkeys(row["model"] for row in rows):
        paragraphs.append(f"## {name[0].upper()}{name[1:]}")
        lines = []
        for row in rows:
            if row["model"] == name:
                cosines = [f"{row['token']:.6f}", f"{row['pooled']:.6f}"]
                sizes = [f"{row['bytes'] / 1e6:.1f}", f"{row['speed']:.2f}"]
                lines.append([row["engine"], row["version"], row["precision"], *cosines, *sizes])
        paragraphs.append(markdown_table([*header, "MB", "speed"], lines))

    if classifier is not None:
        paragraphs.append(
            "A sequence classifier with two labels in llama.cpp (f32): logits within "
            f"{classifier:.1e} of the largest one."
        )
    paragraphs += [f"Skipped: {name}: {reason}." for name, reason in skipped.items()]
    return "\n\n".join(paragraphs)


def main():
    """Run the engines, print and write the results, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--output", type=Path, help="also write OUTPUT.md and OUTPUT.json")
    parser.add_argument("--reuse", action="store_true", help="run what the last call exported")
    args = parser.parse_args()
    torch.set_num_threads(1)

    folder = args.work.resolve() / "models"
    if not args.reuse:
        shutil.rmtree(folder, ignore_errors=True)
    sources = {"wide random weights": random_model(NeoBERTModel, folder / "wide" / "model", "mean")}
    if (BUNDLED / "config.json").exists():
        sources = {"the bundled sentence encoder": BUNDLED, **sources}
    models = []
    for i, (name, source) in enumerate(sources.items()):
        (folder / str(i)).mkdir(exist_ok=True)
        models.append(Model(name, source, folder / str(i)))

    rows = []
    passed_count = 0
    skipped = {}
    failed = []
    classifier = None
    for name in args.engines:
        for model in models:
            try:
                for output in ENGINES[name](model, args.work.resolve()):
                    rows.append(row := compare(output, model))
                    bounds = BOUNDS[row["precision"]]
                    passed = row["token"] >= bounds[0] and row["pooled"] >= bounds[1]
                    summary = (
                        f"{row['engine']} {row['precision']}, {model.name}: token "
                        f"{row['token']:.6f}, pooled {row['pooled']:.6f}"
                    )
                    print(f"{'ok  ' if passed else 'FAIL'} {summary}", flush=True)
                    passed_count += passed
                    if not passed:
                        failed.append(
                            f"{summary}; at least {bounds[0]} and {bounds[1]} are required"
                        )
            except (Skipped, ImportError) as reason:
                skipped[name] = one_line(reason)
            except Exception as error:
                # The other engines still run.
                failed.append(
                    f"{name}, {model.name}: {type(error).__name__}: {one_line(error, 1500)}"
                )

    if "llama.cpp" in args.engines and "llama.cpp" not in skipped:
        classifier = check_classifier(node_modules(args.work.resolve()), folder)
        summary = f"llama.cpp, a classifier: logits differ by {classifier:.1e} of the largest one"
        print(f"{'ok  ' if classifier <= 5e-3 else 'FAIL'} {summary}")
        if classifier > 5e-3:
            failed.append(summary)

    if args.output:
        env = environment(("onnxruntime", "openvino", "gguf"))
        text = page(rows, classifier, skipped)
        figures = {"rows": rows, "classifier": classifier}
        write_result(args.output, "NeoBERT in other engines", env, figures, text)

    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    for line in failed:
        print(f"failed {line}")
    print(f"{passed_count} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
