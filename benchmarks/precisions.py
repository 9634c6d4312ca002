"""Precisions and engines on the CPU: tokens per second, distance to float32, memory and size.

    python -m benchmarks.precisions --files runs/precisions --output results/precisions

FILES/model is a Hub folder of NeoBERT in float32. If it does not exist, a model with random weights
is created (published hidden size, 12 layers, weights of a standard deviation at which attention is
not uniform). FILES/onnx, FILES/openvino and FILES/*.gguf are exports of `neobert export`, and
FILES/node contains node-llama-cpp. An engine without its file or package has a row with the command
that provides it.

Every engine runs in a process of its own on the same token ids. Several batch sizes are tried with
the first of `--threads`, and the fastest is used. A float32 matrix product on one thread, before
and after every timed pass, measures the speed of the machine at that time. Speedups are ratios of
speeds that are divided by the speed of the machine.

If OUTPUT.json has results of another CPU, they are kept, and the tables have rows for each CPU.
"""

import functools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from msgspec import Meta
from tqdm import tqdm

from neobert.common.commands import guarded
from neobert.common.constants import TOKENIZER
from neobert.common.environment import environment_line, hardware
from neobert.common.errors import UserError, one_line
from neobert.common.identity import model_digest
from neobert.common.loading import load_tokenizer
from neobert.common.measures import PeakMemory
from neobert.common.options import OptionGroup, option
from neobert.common.results import earlier_result
from neobert.common.tables import markdown_table
from neobert.throughput.models import draw_lengths
from neobert.throughput.options import check_workload
from neobert.throughput.timing import MatrixProduct, between, quartiles, timed

from .engines import BATCH_SIZES, ENGINES, Files
from .measuring import benchmark, mib, run_in_process


PACKAGES = ("onnxruntime", "openvino", "torchao", "nncf")
# Number of texts per workload.
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
            check_workload(name)


# ------------------------------------------------------------------------------------------------
# measurement


def make_model(files: Files, layers: int, small: Mapping[str, Any] | None = None) -> None:
    """Create FILES/model with random weights if it does not exist.

    Args:
        files: Directory with the models.
        layers: Number of layers.
        small: Configuration fields to replace.
    """
    from neobert.configuration_neobert import NeoBERTConfig
    from neobert.modeling_neobert import NeoBERTModel

    if (files.model / "config.json").is_file():
        return

    torch.manual_seed(0)
    # A uniform distribution in +-0.05 has a standard deviation of 0.03, as in trained encoders. The
    # default of 0.012 would make attention nearly uniform.
    fields = {
        "embedding_init_range": 0.05,
        "decoder_init_range": 0.05,
        "num_hidden_layers": layers,
        **(small or {}),
    }
    NeoBERTModel(NeoBERTConfig(**fields)).save_pretrained(files.model)
    load_tokenizer(TOKENIZER).save_pretrained(files.model)


def make_texts(lengths: Sequence[int], tokenizer: Any) -> list[list[int]]:
    """Return the token ids of random texts of whole words.

    Args:
        lengths: Sequence lengths in tokens, special tokens included.
        tokenizer: Tokenizer of the model.
    """
    words = sorted(
        index
        for word, index in tokenizer.get_vocab().items()
        if word.isascii() and word.isalpha() and len(word) > 2
    )
    generator = torch.Generator().manual_seed(0)
    texts = []
    for length in lengths:
        sampled = torch.randint(len(words), (max(length - 2, 1),), generator=generator).tolist()
        ids = [words[index] for index in sampled]
        texts.append([tokenizer.cls_token_id, *ids, tokenizer.sep_token_id])
    return texts


def wall_seconds(session: Any, texts: list[list[int]]) -> float:
    """Return the time of one call."""
    seconds, _ = timed(lambda: session(texts))
    return seconds


def best_batch(
    session: Any,
    texts: list[list[int]],
    measure_seconds: Callable[[Any, list[list[int]]], float] = wall_seconds,
) -> int | None:
    """Return the batch size that is fastest in one pass, None for an engine without batches."""
    # The first call loads libraries and is not representative.
    session(texts[:1])
    if getattr(session, "batch", None) is None:
        return None
    seconds = {}
    for size in sorted({min(size, len(texts)) for size in BATCH_SIZES}):
        session.batch = size
        # The first pass with a shape may compile or allocate memory.
        session(texts)
        seconds[size] = measure_seconds(session, texts)
    return min(seconds, key=lambda size: seconds[size])


def measure(
    name: str,
    folder: str,
    texts: Mapping[str, list[list[int]]],
    threads: Sequence[int],
    repeats: int,
) -> dict[str, Any]:
    """Measure one engine in this process.

    Args:
        name: Key of `ENGINES`.
        folder: FILES.
        texts: Token ids, {workload: texts}.
        threads: Numbers of threads.
        repeats: Number of timed passes.

    Returns:
        "runs", a list of {"set", "threads", "batch", "seconds", "rates"}; "vectors", the embeddings
        {workload: array}; and the bytes in memory and on disk.
    """
    engine = ENGINES[name]
    files = Files(Path(folder))
    runs: list[dict[str, Any]] = []
    embeddings: dict[str, np.ndarray] = {}
    batch_sizes: dict[str, int | None] = {}
    # Threads of other engines are busy for a while after a pass, so the product uses one thread.
    product = MatrixProduct("cpu", torch.float32, threads=1)
    extra_bytes = 0

    with PeakMemory("cpu") as memory:
        for count in threads:
            torch.set_num_threads(count)
            session = engine.open(files, count)
            for workload, ids in texts.items():
                if workload not in batch_sizes:
                    batch_sizes[workload] = best_batch(session, ids)
                    embeddings[workload] = session(ids)
                session.batch = batch_sizes[workload]
                # The first pass also compiles for this number of threads.
                session(ids)

                run: dict[str, Any] = {
                    "set": workload,
                    "threads": count,
                    "batch": batch_sizes[workload],
                    "seconds": [],
                    "rates": [],
                }
                for _ in range(repeats):
                    seconds, rate = timed(functools.partial(session, ids), product)
                    run["seconds"].append(seconds)
                    run["rates"].append(rate)
                runs.append(run)

            # An engine in a process of its own reports the memory of this process.
            extra_bytes = max(extra_bytes, getattr(session, "extra_bytes", 0))
            if hasattr(session, "close"):
                session.close()
            del session
            # A model that is compiled again for other threads must not find the earlier code.
            torch._dynamo.reset()

    return {
        "runs": runs,
        "vectors": embeddings,
        "memory_bytes": memory.growth and memory.growth + extra_bytes,
        "disk_bytes": engine.size(files),
    }


def measure_all(
    options: PrecisionsOptions, texts: Mapping[str, list[list[int]]]
) -> dict[str, dict[str, Any]]:
    """Return the results of `measure` by engine, or {"error"} of an engine that failed."""
    results: dict[str, dict[str, Any]] = {}
    for name in tqdm(options.engines, desc="engines", disable=None):
        # An engine may be missing or fail with any exception; its row contains the message.
        try:
            results[name] = run_in_process(
                measure, name, options.files, texts, options.threads, options.repeats
            )
        except Exception as error:
            results[name] = {"error": one_line(error, 200)}
    return results


# ------------------------------------------------------------------------------------------------
# results


def worst_cosine(embeddings: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> float:
    """Return the lowest cosine similarity between the two embeddings of a text.

    Args:
        embeddings: Embeddings (N, D) by workload.
        exact: Embeddings in float32.
    """
    cosines = []
    for workload, vectors in embeddings.items():
        for a, b in zip(vectors, exact[workload]):
            cosines.append(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
    # Unlike Python's `min`, NumPy's returns NaN if a cosine is NaN.
    return float(np.min(cosines))


def summarize(
    results: Mapping[str, dict[str, Any]], texts: Mapping[str, list[list[int]]]
) -> list[dict[str, Any]]:
    """Return one row per engine.

    Args:
        results: Results of `measure` by engine.
        texts: Token ids, {workload: texts}.

    Returns:
        Rows with the speeds by workload and number of threads. "corrected" is the speed at the
        median speed of the machine.
    """
    runs = [run for result in results.values() for run in result.get("runs", ())]
    median_rate = statistics.median([rate for run in runs for rate in run["rates"]] or [1.0])
    exact = results.get("torch-fp32", {}).get("vectors")
    tokens = {workload: sum(map(len, ids)) for workload, ids in texts.items()}

    rows = []
    for name, result in results.items():
        engine = ENGINES[name]
        row: dict[str, Any] = {
            "engine": name,
            "name": engine.name,
            "precision": engine.precision,
            "how": engine.how,
        }
        rows.append(row)
        if "error" in result:
            row["error"] = result["error"]
            continue

        # Medians over the passes, by workload and number of threads.
        speeds = []
        for run in result["runs"]:
            measured = [tokens[run["set"]] / seconds for seconds in run["seconds"]]
            # The rate of the matrix product shows how fast the machine was during the pass.
            corrected = [speed * median_rate / rate for speed, rate in zip(measured, run["rates"])]
            speeds.append(
                {
                    "set": run["set"],
                    "threads": run["threads"],
                    "batch": run["batch"],
                    "tokens_per_second": statistics.median(measured),
                    "quartiles": quartiles(measured),
                    "corrected": statistics.median(corrected),
                }
            )
        row["cosine"] = worst_cosine(result["vectors"], exact) if exact else None
        row["memory_bytes"] = result["memory_bytes"]
        row["disk_bytes"] = result["disk_bytes"]
        row["speeds"] = speeds
    return rows


def results_of_other_cpus(
    output: str | Path, processor: str, options: PrecisionsOptions
) -> list[dict[str, Any]]:
    """Return the results in OUTPUT.json that were measured on other CPUs.

    Args:
        output: Result files, without the suffix.
        processor: `hardware()` of this machine.
        options: Options of this run.

    Returns:
        {"environment", "rows"} of each CPU.

    Raises:
        UserError: If they have other workloads or numbers of threads than this run.
    """
    earlier = earlier_result(f"{output}.json", "environment", "rows")
    if earlier is None:
        return []
    latest = {"environment": earlier["environment"], "rows": earlier["rows"]}
    others = [
        result
        for result in (latest, *earlier.get("other_cpus", ()))
        if result["environment"]["hardware"] != processor
    ]

    columns = {(workload, count) for workload in options.sets for count in options.threads}
    for result in others:
        measured = {
            (speed["set"], speed["threads"])
            for row in result["rows"]
            for speed in row.get("speeds", ())
        }
        if measured and measured != columns:
            raise UserError(
                f"{output}.json has results of another CPU with other workloads or numbers of "
                "threads, so they do not fit into one table. Choose another --output."
            )
    return others


def page(
    results: Mapping[str, Sequence[dict[str, Any]]],
    options: PrecisionsOptions,
    texts: Mapping[str, list[list[int]]],
) -> str:
    """Return the tables as markdown.

    Args:
        results: Rows of `summarize` by CPU, that of this run first.
        options: Options of this run.
        texts: Token ids, {workload: texts}.
    """
    columns = [
        f"{workload}, {count} thread{'s' if count > 1 else ''}"
        for count in options.threads
        for workload in options.sets
    ]
    tables: list[list[list[Any]]] = [[], [], []]
    failed = []
    for cpu, rows in results.items():
        for table, part in zip(tables, rows_of_cpu(rows)):
            # The CPU is only named in its first row.
            table += [[cpu if row is part[0] else "", *row] for row in part]
        failed += [
            f"- {row['name']} {row['precision']}, {cpu}: {row['error']}"
            for row in rows
            if "error" in row
        ]
    speeds, speedups, details = tables

    counts = [
        f"{workload}: {len(ids)} texts with {sum(map(len, ids)):,} tokens"
        for workload, ids in texts.items()
    ]
    names = ["CPU", "Engine", "Precision"]
    size_columns = ["Worst cosine", "Memory (MiB)", "Size on disk (MiB)"]
    quartile_columns = [f"{name}, quartiles" for name in columns]
    digest = model_digest(str(Files(Path(options.files)).model))
    parts = [
        f"Non-padding tokens per second, median over {options.repeats} passes. "
        f"{', '.join(counts)}. Model: {options.files}, encoder `{digest}`. Worst cosine: the "
        "lowest cosine similarity of a mean-pooled embedding to that of torch in float32. Memory: "
        "peak beyond the process without a model, including loading and the search for the batch "
        "size.",
        markdown_table([*names, *columns, *size_columns], speeds),
        "## Speedup over torch in float32",
        "Ratios of speeds that are divided by the speed of a float32 matrix product beside every "
        "pass.",
        markdown_table([*names, *columns], speedups),
        "## Quartiles and settings",
        markdown_table([*names, *quartile_columns, "Batch sizes", "Settings"], details),
    ]
    if failed:
        parts += ["## Not measured", "\n".join(failed)]
    return "\n\n".join(part.strip() for part in parts)


def rows_of_cpu(
    rows: Sequence[dict[str, Any]],
) -> tuple[list[list[Any]], list[list[Any]], list[list[Any]]]:
    """Return the rows of the tables of speeds, speedups and details for one CPU."""
    measured = [row for row in rows if "error" not in row]
    exact = next((row["speeds"] for row in measured if row["engine"] == "torch-fp32"), None)
    speeds = []
    speedups = []
    details = []
    for row in measured:
        name = [row["name"], row["precision"]]
        cosine = None if row["cosine"] is None else f"{row['cosine']:.6f}"
        tokens_per_second = [f"{speed['tokens_per_second']:,.0f}" for speed in row["speeds"]]
        sizes = [mib(row["memory_bytes"]), mib(row["disk_bytes"])]
        speeds.append([*name, *tokens_per_second, cosine, *sizes])

        if exact and row["speeds"] is not exact:
            ratios = [
                f"{speed['corrected'] / base['corrected']:.2f}"
                for speed, base in zip(row["speeds"], exact)
            ]
            speedups.append([*name, *ratios])

        batch_sizes = sorted({speed["batch"] for speed in row["speeds"] if speed["batch"]})
        ranges = [between(speed["quartiles"]) for speed in row["speeds"]]
        details.append([*name, *ranges, ", ".join(map(str, batch_sizes)), row["how"]])
    return speeds, speedups, details


@benchmark("Precisions and engines on the CPU", PrecisionsOptions)
def main(
    options: PrecisionsOptions, small: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Measure every engine.

    Args:
        options: Options of the script.
        small: Configuration fields to replace, for tests.

    Raises:
        UserError: If no engine can be measured.
    """
    files = Files(Path(options.files))
    make_model(files, options.layers, small)
    tokenizer = load_tokenizer(files.model)
    texts = {
        name: make_texts(draw_lengths(name, TEXTS.get(name, 8)), tokenizer) for name in options.sets
    }

    processor = hardware()
    others = results_of_other_cpus(options.output, processor, options)
    rows = summarize(measure_all(options, texts), texts)
    if all("error" in row for row in rows):
        raise UserError(f"no engine could be measured: {rows[0]['error']}.")

    results = {processor: rows}
    results |= {other["environment"]["hardware"]: other["rows"] for other in others}
    text = page(results, options, texts)
    if others:
        lines = [f"- {environment_line(other['environment'])}." for other in others]
        text += "\n\n## Measurements on the other CPUs\n\n" + "\n".join(lines)
    recorded = {
        "packages": PACKAGES,
        "capability": torch.backends.cpu.get_cpu_capability(),
        # The numbers of threads are in the columns.
        "threads": None,
    }
    return {"rows": rows, "other_cpus": others}, text, recorded


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.precisions", main))
