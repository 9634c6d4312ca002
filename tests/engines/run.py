"""`make test-engines`: exports two models and a classifier, runs them in the real engines on the
CPU, and compares every vector with torch in float32.

python tests/engines/run.py --work FOLDER [--engines llama.cpp ...] [--output results/engines]

The models: the bundled sentence encoder, and one with wide random weights, on which mistakes and
low precision show most. FOLDER keeps what is
installed: node/ (npm packages) and st/ (the environment of sentence-transformers' ONNX backend). An
engine that cannot be had is skipped, and the last lines say why.
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
from neobert.common.loading import load_tokenizer
from neobert.common.pooling import write_sentence_transformers
from neobert.common.results import write_result
from neobert.common.tables import markdown_table
from neobert.export import command as export_command
from neobert.export import onnx, openvino
from neobert.export.check import SENTENCES


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# {precision: file} of what is exported and run.
ONNX = {name: onnx.PRECISIONS[name].file for name in ("fp32", "fp16", "int8")}
OPENVINO = {name: precision.file for name, precision in openvino.PRECISIONS.items()}
BUNDLED = ROOT / "examples" / "sentence-encoder"
# Least cosines to torch in float32, (token, pooled), by precision.
BOUNDS = {"fp32": (0.9999, 0.9999), "fp16": (0.995, 0.999), "q8_0": (0.97, 0.99)}
BOUNDS["q5_0"] = (0.6, 0.85)  # on random weights, which bear few bits badly
BOUNDS["int8"] = (0.9, 0.99)
NO_NODE = "node is not installed: apt-get install nodejs npm, or nodejs.org (version 20 or newer)"


class Skipped(Exception):
    """An engine that is not to be had here: one sentence."""


# ------------------------------------------------------------------------------------------------
# models


def make_texts():
    """Texts of 1 to about 150 words, among them accents, digits, code and marks."""
    texts = list(SENTENCES)
    return texts + [" ".join(texts[i : i + n]) for i, n in ((0, 3), (3, 5), (6, 9), (1, 13))]


@dataclass
class Model:
    """A model to run, with what torch answers.

    Attributes:
        name: of the row.
        folder: Hub folder of a sentence encoder.
        work: where its exports go.
        texts: those that the model reads completely.
        tokens: (L, D) float32 of each text.
        pooled: (texts, D), as the folder pools.
    """

    name: str
    folder: Path
    work: Path
    texts: list = field(default_factory=make_texts)

    def __post_init__(self):
        self.tokenizer = load_tokenizer(self.folder)
        longest = read_json(self.folder / "sentence_bert_config.json")["max_seq_length"]
        lengths = [len(self.tokenizer(text)["input_ids"]) for text in self.texts]
        self.texts = [text for text, length in zip(self.texts, lengths) if length <= longest]
        options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        model = NeoBERTModel.from_pretrained(self.folder, **options).eval()
        ids = [torch.tensor([self.tokenizer(text)["input_ids"]]) for text in self.texts]
        with torch.inference_mode():
            self.tokens = [model(row).last_hidden_state[0].numpy() for row in ids]

        self._torch, self._ids = model, ids
        self.pooled = np.stack([states.mean(0) for states in self.tokens])

    @torch.inference_mode()
    def seconds(self):
        """CPU seconds that torch takes for all texts, one after another, on one thread."""
        return timed(lambda row: self._torch(row).last_hidden_state.mean(1), self._ids)

    def export(self, target, output, *options):
        """`neobert export`, once; returns the path of what it wrote."""
        path = self.work / output
        if path.exists():
            return path
        export_command.main([target, str(self.folder), str(path), *options])
        return path


def timed(function, items, repeats=3):
    """Median CPU seconds that a function takes for all items, one after another; the first of the
    passes is not counted.

    CPU seconds on one thread: other work on the machine disturbs them least.
    """
    times = []
    for _ in range(1 + repeats):
        start = time.process_time()
        for item in items:
            function(item)
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def random_model(model_class, folder, pooling=None, **changes):
    """A Hub folder with wide random weights: outputs of attention and feed-forward as large as what
    they are added to."""
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
# engines


@dataclass(frozen=True)
class Answer:
    """What an engine made of the texts of a model.

    Attributes:
        engine, version, precision: of the row.
        tokens: (L, D) of each text, or {place: (texts, D)} where the engine gives the vectors at
            one place (0 or -1) only.
        pooled: (texts, D).
        seconds: CPU seconds for all texts, one after another, on one thread.
        size: bytes of the model.
    """

    engine: str
    version: str
    precision: str
    tokens: object
    pooled: np.ndarray
    seconds: float
    size: int


def onnx_runtime(model, work):
    """ONNX Runtime in Python, in one right-padded batch, with its own pooled output where there is
    one."""
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
        tokens = real_tokens(values["last_hidden_state"], inputs["attention_mask"])
        pooled = values.get("sentence_embedding", means(tokens))
        size, version = size_of(folder / "onnx", name), onnxruntime.__version__
        yield Answer("ONNX Runtime", version, precision, tokens, pooled, seconds, size)


def openvino_runtime(model, work):
    """OpenVINO, with the options beside its models, in one right-padded batch."""
    import openvino as runtime

    core, inputs = runtime.Core(), padded_rows(model)
    folder = model.export("openvino", "openvino", "--precisions", *OPENVINO) / "openvino"
    settings = {**read_json(folder / openvino.OPTIONS_FILE), "INFERENCE_NUM_THREADS": 1}
    for precision, name in OPENVINO.items():
        compiled = core.compile_model(core.read_model(str(folder / name)), "CPU", settings)
        names = [output.get_any_name() for output in compiled.outputs]
        values = dict(zip(names, (np.array(value) for value in compiled(inputs).values())))
        seconds = timed(compiled, single_rows(model))
        tokens = real_tokens(values["last_hidden_state"], inputs["attention_mask"])
        pooled = values.get("sentence_embedding", means(tokens))
        size, version = size_of(folder, name), runtime.__version__.split("-")[0]
        yield Answer("OpenVINO", version, precision, tokens, pooled, seconds, size)


def transformers_js(model, work):
    """transformers.js in node: its tokenizer, its reading of the folder, its mean pooling."""
    modules = node_modules(work)
    folder = onnx_folder(model)
    version = package_version(modules, "@huggingface/transformers")
    for precision, name in ONNX.items():
        dtype = {"int8": "q8"}.get(precision, precision)
        reply = in_node("transformers.mjs", modules, folder, dtype, texts=model.texts)
        tokens = [np.array(vectors, np.float32) for vectors in reply["tokens"]]
        pooled, seconds = np.array(reply["pooled"]), reply["seconds"]
        size = size_of(folder / "onnx", name)
        yield Answer("transformers.js", version, precision, tokens, pooled, seconds, size)


def llama_cpp(model, work):
    """llama.cpp, prebuilt for node: its tokenizer, its pooling; token vectors are those of the
    first and the last token."""
    modules = node_modules(work)
    for dtype in ("f32", "f16", "q8_0", "q5_0"):
        path = model.export("gguf", f"model.{dtype}.gguf", "--dtype", dtype)
        vectors = {}
        for pooling in (2, 3, None):  # the first token's, the last one's, and what the file says
            engine = Llama(modules, path, 1, pooling)
            vectors[pooling] = engine(model.texts)
            if pooling is None:
                seconds = statistics.median(seconds_of(engine, model.texts) for _ in range(3))
            engine.close()
        precision = {"f32": "fp32", "f16": "fp16"}.get(dtype, dtype)
        version = f"{package_version(modules, 'node-llama-cpp')} (node-llama-cpp)"
        tokens, size = {0: vectors[2], -1: vectors[3]}, path.stat().st_size
        yield Answer("llama.cpp", version, precision, tokens, vectors[None], seconds, size)


def sentence_transformers_onnx(model, work):
    """sentence-transformers 5.1 with backend="onnx", on transformers 4.57."""
    if not (work / "st" / ".ready").exists():
        raise Skipped(f"{work / 'st'} is not installed: make {work / 'st' / '.ready'}")
    folder, script = onnx_folder(model), HERE / "sentence_transformers_onnx.py"
    reply = in_process([work / "st" / "bin" / "python", script, folder], model.texts)
    tokens = [np.array(vectors, np.float32) for vectors in reply["tokens"]]
    pooled, seconds = np.array(reply["pooled"]), reply["seconds"]
    size, name = size_of(folder / "onnx", ONNX["fp32"]), "sentence-transformers, ONNX"
    yield Answer(name, reply["version"], "fp32", tokens, pooled, seconds, size)


ENGINES = {
    "onnxruntime": onnx_runtime,
    "openvino": openvino_runtime,
    "transformers.js": transformers_js,
    "llama.cpp": llama_cpp,
    "sentence-transformers": sentence_transformers_onnx,
}


def seconds_of(engine, texts):
    engine(texts)
    return engine.seconds


def onnx_folder(model):
    return model.export("onnx", "onnx", "--precisions", *ONNX)


def single_rows(model):
    """The inputs of each text alone."""
    rows = [np.array([model.tokenizer(text)["input_ids"]], np.int64) for text in model.texts]
    return [{"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in rows]


def padded_rows(model):
    """The inputs of all texts in one right-padded batch."""
    batch = model.tokenizer(model.texts, padding=True, return_tensors="np")
    return {name: batch[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


def real_tokens(hidden, mask):
    return [states[row.astype(bool)] for states, row in zip(hidden, mask)]


def means(tokens):
    return np.stack([states.mean(0) for states in tokens])


def size_of(folder, name):
    """Bytes of a model file and of the weights beside it."""
    names = (name, f"{name}_data", f"{name}.data", f"{Path(name).stem}.bin")
    return sum(path.stat().st_size for path in folder.iterdir() if path.name in names)


def node_modules(work):
    if shutil.which("node") is None:
        raise Skipped(NO_NODE)
    modules = work / "node" / "node_modules"
    if not modules.is_dir():
        raise Skipped(f"{modules} is not installed: make {work / 'node' / '.ready'}")
    return modules


def package_version(modules, name):
    return read_json(modules / name / "package.json")["version"]


def in_node(script, *arguments, texts):
    return in_process(["node", HERE / script, *arguments], texts)


def in_process(command, texts):
    """The last line of a program's output, JSON; its input is a list of texts."""
    run = subprocess.run(
        [*map(str, command)], input=json.dumps(texts), capture_output=True, text=True, timeout=600
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not lines:
        raise UserError(
            f"{Path(str(command[1])).name} ended with exit code {run.returncode}: "
            f"{one_line(run.stderr[-1500:], 1500)}"
        )
    return json.loads(lines[-1])


# ------------------------------------------------------------------------------------------------
# comparison


def worst_cosine(actual, expected):
    """The smallest cosine between rows of two arrays; -1 where a number is not finite or the shapes
    differ."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return -1.0
    lengths = np.linalg.norm(actual, axis=-1) * np.linalg.norm(expected, axis=-1)
    return float(((actual * expected).sum(-1) / np.maximum(lengths, 1e-30)).min())


def compared(answer, model):
    """A row: the worst cosines of an Answer."""
    if isinstance(answer.tokens, dict):
        pairs = [
            (actual, np.stack([states[place] for states in model.tokens]))
            for place, actual in answer.tokens.items()
        ]
    else:
        pairs = zip(answer.tokens, model.tokens, strict=True)
    token = min(worst_cosine(actual, expected) for actual, expected in pairs)
    return {
        "model": model.name,
        "engine": answer.engine,
        "version": answer.version,
        "precision": answer.precision,
        "token": token,
        "pooled": worst_cosine(answer.pooled, model.pooled),
        "bytes": answer.size,
        "speed": model.seconds() / answer.seconds,
        "places": "first and last" if isinstance(answer.tokens, dict) else "all",
    }


def check_classifier(modules, work):
    """llama.cpp's logits of a sequence classifier with two labels against torch's: the worst
    difference by the largest logit."""
    folder, path = work / "classifier", work / "classifier.gguf"
    random_model(NeoBERTForSequenceClassification, folder, num_labels=2)
    if not path.exists():
        export_command.main(["gguf", str(folder), str(path), "--dtype", "f32"])
    model = NeoBERTForSequenceClassification.from_pretrained(folder).eval()
    tokenizer, texts = load_tokenizer(folder), make_texts()
    with torch.inference_mode():
        batches = [tokenizer(text, return_tensors="pt") for text in texts]
        expected = np.stack([model(**batch).logits[0].numpy() for batch in batches])
    logits = np.array(in_node("classifier.mjs", modules, path, "2", texts=texts)["logits"])
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def page(rows, classifier, skipped):
    """Markdown of the results."""
    parts = [
        "Vectors of the same texts (1 to about 150 words) against torch in float32. Token: the "
        "worst cosine between the vectors of one token; llama.cpp gives "
        "the first and the last token's alone. Pooled: the worst cosine between the vectors of one "
        "text. Speed: CPU time of the texts one after "
        "another on one thread, relative to torch in float32 measured beside it (above 1 is "
        "faster); docs/performance.md has speeds in batches.",
    ]
    header = ["engine", "version", "precision", "worst token cosine", "worst pooled cosine"]
    for name in dict.fromkeys(row["model"] for row in rows):
        parts.append(f"## {name[0].upper()}{name[1:]}")
        lines = []
        for row in rows:
            if row["model"] == name:
                cosines = [f"{row['token']:.6f}", f"{row['pooled']:.6f}"]
                sizes = [f"{row['bytes'] / 1e6:.1f}", f"{row['speed']:.2f}"]
                lines.append([row["engine"], row["version"], row["precision"], *cosines, *sizes])
        parts.append(markdown_table([*header, "MB", "speed"], lines))
    if classifier is not None:
        parts.append(
            "A sequence classifier with two labels in llama.cpp (f32): logits within "
            f"{classifier:.1e} of the largest one."
        )
    parts += [f"Skipped: {name}: {reason}." for name, reason in skipped.items()]
    return "\n\n".join(parts)


def main():
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
    rows, skipped, failed, classifier = [], {}, [], None
    for name in args.engines:
        for model in models:
            try:
                for answer in ENGINES[name](model, args.work.resolve()):
                    rows.append(row := compared(answer, model))
                    bounds = BOUNDS[row["precision"]]
                    good = row["token"] >= bounds[0] and row["pooled"] >= bounds[1]
                    summary = (
                        f"{row['engine']} {row['precision']}, {model.name}: token "
                        f"{row['token']:.6f}, pooled {row['pooled']:.6f}"
                    )
                    print(f"{'ok  ' if good else 'FAIL'} {summary}", flush=True)
                    if not good:
                        failed.append(
                            f"{summary}; at least {bounds[0]} and {bounds[1]} are required"
                        )
            except (Skipped, ImportError) as reason:
                skipped[name] = one_line(reason)
            except Exception as error:  # of any engine; the others still run
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
        text, figures = page(rows, classifier, skipped), {"rows": rows, "classifier": classifier}
        write_result(args.output, "NeoBERT in other engines", env, figures, text)
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    for line in failed:
        print(f"failed {line}")
    print(
        f"{len(rows) - len(failed) if rows else 0} passed, {len(failed)} failed, {len(skipped)} "
        "skipped"
    )
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
