"""One model in every precision and engine: real tokens a second, distance to float32, memory and
size, on short, mixed and longer texts.

    python -m benchmarks.precisions --files runs/precisions --output results/precisions

FILES/model is a Hub folder of NeoBERT in float32: yours, or one with random weights that is made if
there is none (published width, 12 layers, weights drawn wide enough that attention is not flat).
FILES/onnx, FILES/openvino and FILES/*.gguf are what `neobert export` makes of it, FILES/node has
node-llama-cpp; an engine whose file or package is missing has a row that says how to get it.

Every engine is a process of its own and gets the same token ids. It is tried with several batch
sizes on the first of --threads, and the best counts. A float32 matrix product of one thread beside
every timed pass tells how fast the machine was then: the ratios between engines are of speeds
divided by that pace.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from msgspec import Meta
from tqdm import tqdm

from neobert.common.commands import guarded
from neobert.common.constants import TOKENIZER
from neobert.common.errors import UserError, one_line
from neobert.common.loading import load_tokenizer
from neobert.common.measures import PeakMemory
from neobert.common.options import OptionGroup, option
from neobert.common.tables import markdown_table
from neobert.throughput.models import draw_lengths
from neobert.throughput.options import check_set
from neobert.throughput.timing import MatrixProduct, between, quartiles, timed

from .engines import BATCH_SIZES, ENGINES, Files
from .measuring import benchmark, in_a_process, mib


PACKAGES = ("onnxruntime", "openvino", "torchao", "nncf")
# Texts of each set.
TEXTS = {"short": 16, "128": 8, "512": 4}


@dataclass(frozen=True)
class PrecisionsOptions(OptionGroup):
    """Options of `python -m benchmarks.precisions`."""

    title = "Options"

    files: str = option("runs/precisions", "Directory with the models, see above.", metavar="PATH")
    output: str = option(
        "results/precisions", "Result files, PATH.json and PATH.md.", metavar="PATH"
    )
    engines: list[Literal[tuple(ENGINES)]] = option(  # type: ignore[valid-type]
        help="Engines to measure, one row each.", default_factory=lambda: list(ENGINES)
    )
    sets: list[str] = option(
        help="Workloads, as in `neobert throughput`.", default_factory=lambda: list(TEXTS)
    )
    threads: list[Annotated[int, Meta(ge=1)]] = option(
        help="Numbers of CPU threads, one column each.", default_factory=lambda: [1, 2]
    )
    layers: Annotated[int, Meta(ge=1)] = option(12, "Number of layers of the random model.")
    repeats: Annotated[int, Meta(ge=1)] = option(3, "Number of timed repeats per engine.")

    def __post_init__(self) -> None:
        for name in self.sets:
            check_set(name)


# ------------------------------------------------------------------------------------------------
# measurement


def make_model(files, layers, small=None):
    """Makes FILES/model where it is missing, with random weights; `small` replaces configuration
    fields."""
    from neobert.configuration_neobert import NeoBERTConfig
    from neobert.modeling_neobert import NeoBERTModel

    if (files.model / "config.json").is_file():
        return
    torch.manual_seed(0)
    # Uniform in +-0.05: a standard deviation of 0.03, as trained encoders have it, in place of
    # 0.012.
    shape = {"embedding_init_range": 0.05, "decoder_init_range": 0.05, "num_hidden_layers": layers}
    NeoBERTModel(NeoBERTConfig(**{**shape, **(small or {})})).save_pretrained(files.model)
    load_tokenizer(TOKENIZER).save_pretrained(files.model)


def make_texts(name, tokenizer, count):
    """Token ids of `count` texts of whole words."""
    words = sorted(
        i
        for word, i in tokenizer.get_vocab().items()
        if word.isascii() and word.isalpha() and len(word) > 2
    )
    generator = torch.Generator().manual_seed(0)
    texts = []
    for length in draw_lengths(name, count):
        drawn = torch.randint(len(words), (max(length - 2, 1),), generator=generator).tolist()
        ids = [words[i] for i in drawn]
        texts.append([tokenizer.cls_token_id, *ids, tokenizer.sep_token_id])
    return texts


def best_batch(session, texts):
    """The size that was fastest in one pass each, or None where an engine has no batches."""
    session(texts[:1])
    if getattr(session, "batch", None) is None:
        return None
    seconds = {}
    for size in sorted({min(size, len(texts)) for size in BATCH_SIZES}):
        session.batch = size
        seconds[size], _ = timed(lambda: session(texts))
    return min(seconds, key=seconds.get)


def measure(name, folder, texts, threads, repeats):
    """One engine, in this process.

    Args:
        name: key of `ENGINES`.
        folder: FILES.
        texts: {set: lists of token ids}.
        threads: numbers of threads.
    Returns:
        dict: "runs" [{"set", "threads", "seconds", "rates", "batch"}], "vectors" {set: array},
        bytes in memory and on disk.
    """
    engine, files, runs, vectors, sizes = ENGINES[name], Files(Path(folder)), [], {}, {}
    # Of one thread: threads of other engines wait busily for a while after a pass.
    product = MatrixProduct("cpu", torch.float32, threads=1)
    extra = 0
    with PeakMemory("cpu") as memory:
        for count in threads:
            torch.set_num_threads(count)
            session = engine.open(files, count)
            for set_name, ids in texts.items():
                if set_name not in sizes:
                    sizes[set_name], vectors[set_name] = best_batch(session, ids), session(ids)
                session.batch = sizes[set_name]
                session(ids)  # also compiles for this number of threads
                passes = [
                    timed(lambda session=session, ids=ids: session(ids), product)
                    for _ in range(repeats)
                ]
                run = {"set": set_name, "threads": count, "batch": sizes[set_name]}
                run["seconds"], run["rates"] = map(list, zip(*passes))
                runs.append(run)
            extra = max(extra, getattr(session, "extra_bytes", 0))
            if hasattr(session, "close"):
                session.close()
            del session
            torch._dynamo.reset()
    return {
        "runs": runs,
        "vectors": vectors,
        "memory_bytes": memory.growth and memory.growth + extra,
        "disk_bytes": engine.size(files),
    }


def measure_all(options, texts):
    """{engine: what `measure` returned, or {"error"}}."""
    found = {}
    for name in tqdm(options.engines, desc="engines", disable=None):
        try:
            found[name] = in_a_process(
                measure, name, options.files, texts, options.threads, options.repeats
            )
        # an engine that is not here, or fails, has a row that says so
        except Exception as error:
            found[name] = {"error": one_line(error, 200)}
    return found


# ------------------------------------------------------------------------------------------------
# results


def worst_cosine(ours, exact):
    """The smallest cosine between the vectors of a text, over {set: (texts, D)}."""
    pairs = [(a, b) for name in ours for a, b in zip(ours[name], exact[name])]
    return min(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs)


def summarize(found, texts):
    """One row an engine: speeds by set and threads, with quartiles, and the pace-corrected ones
    that ratios are made of."""
    runs = [run for measured in found.values() for run in measured.get("runs", ())]
    usual = statistics.median([rate for run in runs for rate in run["rates"]] or [1.0])
    exact = found.get("torch-fp32", {}).get("vectors")
    tokens = {name: sum(map(len, ids)) for name, ids in texts.items()}
    rows = []
    for name, measured in found.items():
        engine = ENGINES[name]
        row = {"engine": name, "name": engine.name, "precision": engine.precision}
        rows.append(row | {"how": engine.how})
        if "error" in measured:
            rows[-1]["error"] = measured["error"]
            continue
        speeds = []
        for run in measured["runs"]:
            each = [tokens[run["set"]] / second for second in run["seconds"]]
            corrected = [speed * usual / rate for speed, rate in zip(each, run["rates"])]
            speed = {"tokens_per_second": statistics.median(each), "quartiles": quartiles(each)}
            speed["corrected"] = statistics.median(corrected)
            speeds.append({key: run[key] for key in ("set", "threads", "batch")} | speed)
        cosine = worst_cosine(measured["vectors"], exact) if exact else None
        sizes = {key: measured[key] for key in ("memory_bytes", "disk_bytes")}
        rows[-1] |= {"cosine": cosine, **sizes, "speeds": speeds}
    return rows


def page(rows, options, texts):
    """The tables as markdown."""
    measured = [row for row in rows if "error" not in row]
    columns = [
        f"{speed['set']}, {speed['threads']} thread{'s' if speed['threads'] > 1 else ''}"
        for speed in measured[0]["speeds"]
    ]
    exact = next((row["speeds"] for row in measured if row["engine"] == "torch-fp32"), None)
    speeds, faster, spread = [], [], []
    for row in measured:
        name = [row["name"], row["precision"]]
        cosine = None if row["cosine"] is None else f"{row['cosine']:.6f}"
        speeds.append(
            [*name, *(f"{speed['tokens_per_second']:,.0f}" for speed in row["speeds"])]
            + [cosine, mib(row["memory_bytes"]), mib(row["disk_bytes"])]
        )
        if exact and row["speeds"] is not exact:
            pairs = zip(row["speeds"], exact)
            times = [f"{speed['corrected'] / base['corrected']:.2f}" for speed, base in pairs]
            faster.append([*name, *times])
        batches = sorted({speed["batch"] for speed in row["speeds"] if speed["batch"]})
        ranges = [between(speed["quartiles"]) for speed in row["speeds"]]
        spread.append([*name, *ranges, ", ".join(map(str, batches)), row["how"]])
    counts = [f"{name}: {len(ids)} texts, {sum(map(len, ids)):,}" for name, ids in texts.items()]
    parts = [
        f"Real tokens a second, median over {options.repeats} passes. {' tokens, '.join(counts)} "
        f"tokens. Model: {options.files}. Cosine: the worst of a mean-pooled text to torch in "
        "float32. Memory: peak beyond the process without a model, loading and trying batch sizes "
        "included.",
        markdown_table(
            ["engine", "precision", *columns, "worst cosine", "memory MiB", "disk MiB"], speeds
        ),
        "## Times as fast as torch in float32",
        "Of speeds divided by the machine's pace, a float32 matrix product beside every pass.",
        markdown_table(["engine", "precision", *columns], faster),
        "## Spread and settings",
        markdown_table(
            ["engine", "precision", *(f"{name}, quartiles" for name in columns)]
            + ["batch sizes chosen", "how"],
            spread,
        ),
    ]
    failed = [f"- {r['name']} {r['precision']}: {r['error']}" for r in rows if "error" in r]
    if failed:
        parts += ["## Not measured", "\n".join(failed)]
    return "\n\n".join(part.strip() for part in parts)


@benchmark("Precisions and engines on the CPU", PrecisionsOptions)
def main(options, small=None):
    """Every engine; `small` replaces configuration fields (tests)."""
    files = Files(Path(options.files))
    make_model(files, options.layers, small)
    tokenizer = load_tokenizer(files.model)
    texts = {name: make_texts(name, tokenizer, TEXTS.get(name, 8)) for name in options.sets}
    rows = summarize(measure_all(options, texts), texts)
    if all("error" in row for row in rows):
        raise UserError(f"no engine could be measured: {rows[0]['error']}")
    made = {"packages": PACKAGES, "capability": torch.backends.cpu.get_cpu_capability()}
    # threads: those of each column
    return {"rows": rows}, page(rows, options, texts), {**made, "threads": None}


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.precisions", main))
