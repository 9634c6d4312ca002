"""Speed of NeoBERT and of other engines on one CPU thread: one text, and many texts.

    python -m benchmarks.peers --files runs/peers --output results/peers

Two models are measured: the bundled encoder, and 6 blocks of 768 with random weights. All engines
but CTranslate2 run the same weights on the same token ids. CTranslate2 has no NeoBERT and runs a
BERT with random weights, of the same hidden size and number of blocks, whose feed-forward has as
many products per token. The exports are written to FILES and used again by later runs.

The engines of a workload take turns in random order. Every figure is processor time, which other
processes on the machine hardly change. The batch size of an engine that pads is the fastest of one
pass with each size. An engine without its package or files has a row with the reason; `make peers`
installs the environments of CTranslate2 and llama.cpp.
"""

import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta

from neobert import NeoBERTConfig, PackedEncoder
from neobert.cli import main as neobert_main
from neobert.common.commands import guarded
from neobert.common.constants import TOKENIZER
from neobert.common.errors import UserError, one_line
from neobert.common.identity import model_digest
from neobert.common.loading import load_tokenizer
from neobert.common.options import OptionGroup, option
from neobert.common.tables import markdown_table
from neobert.throughput.timing import between, quartiles

from .engines import ENGINES, Files, LineProcess, Llama, Padded, PaddedBatch, Texts, sorted_batches
from .latency import BUNDLED, build_wide
from .measuring import benchmark
from .precisions import best_batch, make_texts, worst_cosine


# Sequence lengths of every workload. The 24 short texts are those of search: queries and titles.
SHORT = (
    *(8, 10, 11, 13, 15, 17, 18, 20, 22, 24, 25, 27),
    *(29, 31, 32, 34, 36, 38, 39, 41, 43, 45, 46, 50),
)
WORKLOADS: dict[str, Sequence[int]] = {
    "8": [8],
    "20": [20],
    "60": [60],
    "200": [200],
    "24 short": SHORT,
    "8 x 128": [128] * 8,
    "4 x 512": [512] * 4,
}
# Recommendations that follow from the results on one CPU, which the text names.
RECOMMENDATIONS = """Measured on an AMD EPYC with AVX-512, VNNI and AVX512-BF16. For one text of up to 60 tokens with the bundled encoder, choose ONNX Runtime in int8 with the graph of `neobert export onnx`. With 6 blocks of 768, the engines differ little at 60 tokens, and OpenVINO is fastest at 8 tokens. For longer texts and for many texts, choose `PackedEncoder` in int8, which is the fastest engine with these weights. Without int8, choose `PackedEncoder` in bfloat16 for many texts on a CPU with AVX512-BF16; OpenVINO is faster for the longest texts. CTranslate2 in int8 is faster than all others for most workloads, but it has no NeoBERT. In int8, CTranslate2 quantizes, normalizes and activates in fused kernels of its own, and torch has an operator for each step. For 8 x 128 tokens with 6 blocks of 768, matrix products take 68 % of the time of `PackedEncoder`, attention 13 %, and these steps 19 % (profile with `torch.profiler`); for the shortest texts see [latency](latency.md#rejected-alternatives)."""  # noqa: E501
REFERENCE = ("sentence-transformers", "float32")
MODELS = {"bundled": "Bundled encoder, 4 blocks of 384", "768x6": "6 blocks of 768"}
# Formats of `neobert export` and the path of an export relative to the directory of a model.
EXPORTS = {
    "onnx": ["onnx", "--precisions", "fp32", "int8"],
    "openvino": ["openvino", "--precisions", "fp32", "int8"],
    "gguf": ["model.q8_0.gguf", "--dtype", "q8_0"],
}


@dataclass(frozen=True)
class PeersOptions(OptionGroup):
    """Options of `python -m benchmarks.peers`."""

    title = "Options"

    output: str = option("results/peers", "Result files, PATH.json and PATH.md.", metavar="PATH")
    files: str = option("runs/peers", "Directory of the models and exports.", metavar="PATH")
    engines: str = option(
        ".cache/engines", "Directory of the environments `ctranslate2` and `node`.", metavar="PATH"
    )
    models: list[str] = option(help="Models to measure.", default_factory=lambda: list(MODELS))
    turns: Annotated[int, Meta(ge=1)] = option(5, "Number of turns of each engine.")
    calls: Annotated[int, Meta(ge=1)] = option(5, "Number of calls per turn with one text.")
    threads: Annotated[int, Meta(ge=1, le=1)] = option(1, "Number of CPU threads.")


@dataclass(frozen=True)
class Peer:
    """Engine with one precision, a row of the tables.

    Attributes:
        name: Name of the engine.
        precision: Name of the precision.
        open: Function of `files` and the directory of `--engines` that opens the model, and returns
            a session as in `engines.Engine`. Only engines with an environment of their own need the
            directory.
        same_weights: Whether the engine runs the weights of the model.
    """

    name: str
    precision: str
    open: Callable[[Files, Path], Any]
    same_weights: bool = True


# ------------------------------------------------------------------------------------------------
# engines


def neobert_peer(dtype: str) -> Peer:
    """Return the peer of `PackedEncoder`."""

    def open_session(files: Files, engines: Path) -> Callable[[Texts], np.ndarray]:
        encoder = PackedEncoder(str(files.model), dtype=dtype, device="cpu")
        return lambda texts: encoder.embed([np.asarray(ids, np.int32) for ids in texts])

    return Peer("neobert", dtype, open_session)


def torch_peer() -> Peer:
    """Return the peer of sentence-transformers. It pads batches, and NeoBERT packs them again."""

    def open_session(files: Files, engines: Path) -> Padded:
        from neobert.embeddings.packed_encoder import load_sentence_transformer

        encoder: Any = load_sentence_transformer(str(files.model))

        @torch.inference_mode()
        def forward(batches: list[PaddedBatch]) -> list[np.ndarray]:
            outputs = []
            for ids, mask in batches:
                features = {
                    "input_ids": torch.from_numpy(ids),
                    "attention_mask": torch.from_numpy(mask),
                }
                outputs.append(encoder(features)["token_embeddings"].numpy())
            return outputs

        return Padded(forward)

    return Peer(*REFERENCE, open_session)


def exported_peer(key: str, precision: str) -> Peer:
    """Return the peer of an engine of `benchmarks.engines` that runs an export."""
    engine = ENGINES[key]
    return Peer(engine.name, precision, lambda files, engines: engine.open(files, 1))


def llama_peer() -> Peer:
    """Return the peer of llama.cpp."""

    def open_session(files: Files, engines: Path) -> Llama:
        modules = engines / "node" / "node_modules"
        if not modules.exists():
            raise UserError("node-llama-cpp is not installed. Run `make peers`.")
        return Llama(modules, files.folder / "model.q8_0.gguf", 1)

    return Peer("llama.cpp", "q8_0", open_session)


class CTranslate2(LineProcess):
    """Session of CTranslate2 in a process of its own environment.

    Args:
        python: Interpreter of the environment.
        model: Directory of the converted BERT.
        compute_type: Precision.

    Attributes:
        batch: Batch size.
    """

    batch = 8

    def __init__(self, python: Path, model: Path, compute_type: str) -> None:
        script = Path(__file__).with_name("ctranslate2_session.py")
        super().__init__([str(python), str(script), str(model), compute_type, "1"])

    def __call__(self, texts: Texts) -> np.ndarray:
        """Return the embeddings (N, D) of N lists of token ids."""
        chunks = sorted_batches(texts, self.batch)
        answer = self.ask([[list(texts[index]) for index in chunk] for chunk in chunks])
        embeddings = np.array(answer["vectors"], np.float32)
        # Undo the sorting by length.
        order = [index for chunk in chunks for index in chunk]
        return embeddings[np.argsort(order)]


def ctranslate2_peer(compute_type: str) -> Peer:
    """Return the peer of CTranslate2."""

    def open_session(files: Files, engines: Path) -> CTranslate2:
        python = engines / "ctranslate2" / "bin" / "python"
        if not python.exists():
            raise UserError("CTranslate2 is not installed. Run `make peers`.")
        return CTranslate2(python, convert_bert(files, python), compute_type)

    return Peer("CTranslate2 (BERT)", compute_type, open_session, same_weights=False)


def bert_config(config: NeoBERTConfig) -> dict[str, Any]:
    """Return the fields of a `BertConfig` with as many products per token as a NeoBERT.

    SwiGLU has three matrices, and the feed-forward of BERT has two.
    """
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_inner_size * 3 // 2,
        "vocab_size": config.vocab_size,
        "initializer_range": 0.04,
    }


def convert_bert(files: Files, python: Path) -> Path:
    """Create FILES/bert with random weights, convert it and return the converted directory."""
    from transformers import BertConfig, BertModel

    converted = files.folder / "ctranslate2"
    if converted.exists():
        return converted

    # The converter reads a directory with a model and a tokenizer.
    torch.manual_seed(0)
    source = files.folder / "bert"
    config = NeoBERTConfig.from_pretrained(files.model)
    BertModel(BertConfig(**bert_config(config))).save_pretrained(source)
    load_tokenizer(TOKENIZER).save_pretrained(source)
    converter = python.with_name("ct2-transformers-converter")
    subprocess.run(
        [str(converter), "--model", str(source), "--output_dir", str(converted)], check=True
    )
    return converted


@torch.inference_mode()
def bert_embeddings(files: Files, texts: Texts) -> np.ndarray:
    """Return the mean-pooled embeddings of FILES/bert in torch, the reference of CTranslate2."""
    from transformers import BertModel

    model = BertModel.from_pretrained(files.folder / "bert").eval()
    return np.stack([model(torch.tensor([ids]))[0][0].mean(0).numpy() for ids in texts])


PEERS = [
    neobert_peer("float32"),
    neobert_peer("bfloat16"),
    neobert_peer("int8"),
    torch_peer(),
    exported_peer("onnx-fp32", "float32"),
    exported_peer("onnx-int8", "int8"),
    exported_peer("openvino-fp32", "float32"),
    exported_peer("openvino-bf16", "bfloat16"),
    exported_peer("openvino-int8", "int8"),
    llama_peer(),
    ctranslate2_peer("float32"),
    ctranslate2_peer("bfloat16"),
    ctranslate2_peer("int8"),
]


# ------------------------------------------------------------------------------------------------
# measurement


def prepare(files: Files, name: str) -> None:
    """Write the model and its exports to FILES, unless they exist for the same weights."""
    if not files.model.exists():
        if name == "bundled":
            # A link, so the exports are next to the model as in other directories.
            files.folder.mkdir(parents=True, exist_ok=True)
            files.model.symlink_to(BUNDLED)
        else:
            build_wide(files.model)

    digest = model_digest(str(files.model))
    record = files.folder / "digest.txt"
    is_current = record.is_file() and record.read_text() == digest
    for export, (path, *more) in EXPORTS.items():
        output = files.folder / path
        if not is_current and output.is_dir():
            shutil.rmtree(output)
        elif not is_current:
            output.unlink(missing_ok=True)
        if not output.exists():
            neobert_main(["export", export, str(files.model), str(output), *more])
    record.write_text(digest)


def processor_seconds(session: Any, texts: Texts) -> float:
    """Return the processor time of one call, also of a session in another process."""
    start = time.process_time()
    session(texts)
    seconds = time.process_time() - start
    # The clock of this process does not include the time of another process.
    return session.seconds if isinstance(session, LineProcess) else seconds


def take_turns(
    sessions: Mapping[str, Callable[[], float]], turns: int, calls: int
) -> dict[str, list[float]]:
    """Return the median seconds of the calls of every turn, for each session.

    Args:
        sessions: Functions that run once and return seconds.
        turns: Number of turns. The order of the sessions in a turn is random.
        calls: Number of calls per turn. With several calls, one more loads the weights into the
            caches first.
    """
    # With a fixed order, an engine would always run after the same one, whose caches it inherits.
    generator = random.Random(0)
    order = list(sessions)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(turns):
        generator.shuffle(order)
        for name in order:
            if calls > 1:
                sessions[name]()
            seconds[name].append(statistics.median(sessions[name]() for _ in range(calls)))
    return seconds


def open_sessions(files: Files, engines: Path) -> tuple[dict[Peer, Any], dict[str, str]]:
    """Return the sessions of all peers, and {name and precision: reason} of those that failed."""
    sessions = {}
    errors = {}
    for peer in PEERS:
        # An engine may be missing or fail with any exception; the page contains the message.
        try:
            sessions[peer] = peer.open(files, engines)
        except Exception as error:
            errors[f"{peer.name} {peer.precision}"] = one_line(error, 200)
    return sessions, errors


def measure_model(options: PeersOptions, name: str) -> dict[str, Any]:
    """Return {"rows", "errors"} of one model: one row per engine and precision."""
    files = Files(Path(options.files, name))
    prepare(files, name)
    tokenizer = load_tokenizer(files.model)
    texts = {key: make_texts(lengths, tokenizer) for key, lengths in WORKLOADS.items()}
    sessions, errors = open_sessions(files, Path(options.engines).absolute())

    rows: dict[Peer, dict[str, Any]] = {}
    embeddings: dict[Peer, dict[str, np.ndarray]] = {peer: {} for peer in sessions}
    for peer in sessions:
        rows[peer] = {"name": peer.name, "precision": peer.precision, "workloads": {}}

    for workload, ids in texts.items():
        # The search for the batch size also warms the engines up.
        calls = {}
        batch_sizes = {}
        for peer, session in sessions.items():
            key = f"{peer.name} {peer.precision}"
            batch_sizes[key] = best_batch(session, ids, processor_seconds)
            if batch_sizes[key] is not None:
                session.batch = batch_sizes[key]
            embeddings[peer][workload] = session(ids)
            calls[key] = lambda session=session, ids=ids: processor_seconds(session, ids)

        # Calls with many texts are long enough to be measured once per turn.
        seconds = take_turns(calls, options.turns, options.calls if len(ids) == 1 else 1)
        for peer, row in rows.items():
            key = f"{peer.name} {peer.precision}"
            row["workloads"][workload] = {"seconds": seconds[key], "batch": batch_sizes[key]}

    # The reference of CTranslate2 is the BERT that it runs.
    exact = next(embeddings[peer] for peer in sessions if (peer.name, peer.precision) == REFERENCE)
    bert = {}
    if any(not peer.same_weights for peer in sessions):
        bert = {workload: bert_embeddings(files, ids) for workload, ids in texts.items()}
    for peer, row in rows.items():
        reference = exact if peer.same_weights else bert
        row["cosine"] = worst_cosine(embeddings[peer], reference)

        if hasattr(sessions[peer], "close"):
            sessions[peer].close()
    return {"rows": list(rows.values()), "errors": errors}


# ------------------------------------------------------------------------------------------------
# results


def values_per_turn(row: Mapping[str, Any], workload: str) -> list[float]:
    """Return the milliseconds of one text, or the tokens per second of several, of every turn."""
    lengths = WORKLOADS[workload]
    seconds = row["workloads"][workload]["seconds"]
    if len(lengths) == 1:
        return [1000 * value for value in seconds]
    return [sum(lengths) / value for value in seconds]


def speed_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tables of one text and of many texts, and that of the quartiles."""
    tables = []
    single = [name for name, lengths in WORKLOADS.items() if len(lengths) == 1]
    bulk = [name for name in WORKLOADS if name not in single]
    columns = {
        f"{name} tokens (ms)" if name in single else f"{name} (tokens/s)": name
        for name in [*single, *bulk]
    }
    for workloads, form in ((single, ".2f"), (bulk, ",.0f")):
        header = [column for column, name in columns.items() if name in workloads]
        lines = []
        for row in rows:
            medians = [statistics.median(values_per_turn(row, name)) for name in workloads]
            cells = [f"{value:{form}}" for value in medians]
            lines.append([row["name"], row["precision"], *cells, f"{row['cosine']:.6f}"])
        tables.append(markdown_table(["Engine", "Precision", *header, "Worst cosine"], lines))

    lines = []
    for row in rows:
        ranges = []
        for name in columns.values():
            form = ".2f" if name in single else ",.0f"
            ranges.append(between(quartiles(values_per_turn(row, name)), form))
        lines.append([row["name"], row["precision"], *ranges])
    tables.append(markdown_table(["Engine", "Precision", *columns], lines))
    return tables


def fastest_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the fastest engine of every workload and precision, and the time of neobert over it.

    llama.cpp's q8_0 counts as int8.
    """
    lines = []
    for workload, lengths in WORKLOADS.items():
        for precisions in (("float32",), ("bfloat16",), ("int8", "q8_0")):
            seconds = {
                row["name"]: statistics.median(row["workloads"][workload]["seconds"])
                for row in rows
                if row["precision"] in precisions
            }
            fastest = min(seconds, key=lambda name: seconds[name])
            ratio = seconds["neobert"] / seconds[fastest]
            title = f"{workload} tokens" if len(lengths) == 1 else workload
            lines.append([title, precisions[0], fastest, f"{ratio:.2f}"])
    return markdown_table(["Workload", "Precision", "Fastest", "neobert / fastest"], lines)


def speedup_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the speedup of every engine over `PackedEncoder` in float32, for many texts."""
    bulk = [name for name, lengths in WORKLOADS.items() if len(lengths) > 1]
    medians = {
        (row["name"], row["precision"]): [
            statistics.median(values_per_turn(row, name)) for name in bulk
        ]
        for row in rows
    }
    lines = []
    for (engine, precision), speeds in medians.items():
        ratios = [speed / base for speed, base in zip(speeds, medians["neobert", "float32"])]
        lines.append([engine, precision, *(f"{ratio:.2f}" for ratio in ratios)])
    return markdown_table(["Engine", "Precision", *bulk], lines)


def page(models: Mapping[str, Mapping[str, Any]], turns: int) -> str:
    """Return the text of the page as markdown."""
    parts = [
        f"Encoder `{model_digest(str(BUNDLED))}`.",
        f"Processor time with one thread, medians of {turns} turns: milliseconds of one text, and "
        "non-padding tokens per second of several texts. 24 short: "
        f"{sum(SHORT)} tokens in texts of {min(SHORT)} to {max(SHORT)} tokens. Worst cosine: the "
        "lowest cosine similarity of a mean-pooled embedding to that of torch in float32. "
        "CTranslate2 runs a BERT with as many products per token and random weights, and its "
        "cosine is that to this BERT in torch.",
    ]
    parts += ["## Which engine to choose", RECOMMENDATIONS]
    parts.append(
        "The last column is the time of `PackedEncoder` over that of the fastest engine of the "
        "same precision, 1.00 where it is the fastest."
    )
    for name, model in models.items():
        parts += [f"{MODELS[name]}:", fastest_table(model["rows"])]

    for name, model in models.items():
        single, bulk, spread = speed_tables(model["rows"])
        parts += [f"## {MODELS[name]}", "### One text", single, "### Many texts", bulk]
        parts += ["### Speedup over PackedEncoder in float32", speedup_table(model["rows"])]
        parts += ["### Quartiles", spread]
        if model["errors"]:
            errors = [f"- {engine}: {reason}" for engine, reason in model["errors"].items()]
            parts += ["### Not measured", "\n".join(errors)]

    return "\n\n".join(parts)


@benchmark("NeoBERT and other engines on the CPU", PeersOptions)
def main(options: PeersOptions) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Measure all engines on all models."""
    models = {name: measure_model(options, name) for name in options.models}
    version = {"packages": ["onnxruntime", "openvino"], "dtype": "float32, bfloat16, int8"}
    return {"models": models}, page(models, options.turns), version


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.peers", main))
