"""One model in every precision and engine: real tokens a second, distance to float32, memory and
size, on short, mixed and longer texts.

    python -m neobert.benchmarks.precisions --files runs/precisions --output results/precisions

FILES/model is a Hub folder of NeoBERT in float32: yours, or one with random weights that is made if
there is none (published width, 12 layers, weights drawn wide enough that attention is not flat).
FILES/export and FILES/*.gguf are what `neobert export` makes of it, and FILES/node holds
node-llama-cpp; an engine whose file or package is missing has a row that says how to get it. BERT
base and ModernBERT base have random weights and as many layers.

Every engine is a process of its own and gets the same token ids. It is tried with several batch
sizes on the first of --threads, and the best counts. A float32 matrix product of one thread beside
every timed pass tells how fast the machine was then: the ratios between engines are of speeds
divided by that pace.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from ..common.arguments import Arguments, Options, option
from ..common.commands import guarded
from ..common.constants import TOKENIZER
from ..common.errors import UserError, one_line
from ..common.loading import load_tokenizer
from ..common.memory import PeakMemory
from ..common.results import environment, markdown_table, write_result
from ..common.timing import one_thread
from .engines import BATCH_SIZES, ENGINES, Files
from .measuring import MatrixProduct, between, in_a_process, mib, quartiles, timed
from .options import check_set
from .throughput_sets import draw_lengths


PACKAGES = ("onnxruntime", "openvino", "torchao", "nncf")
# Texts of each set.
TEXTS = {"short": 16, "128": 8, "512": 4}


@dataclass
class PrecisionsArguments(Arguments):
    """Options of `python -m neobert.benchmarks.precisions`."""

    files: str = option("runs/precisions", "folder with the models, see above")
    output: str = option("results/precisions", "path of the result without its ending")
    engines: list[str] = option(
        help="rows", default_factory=lambda: list(ENGINES), choices=tuple(ENGINES)
    )
    sets: list[str] = option(
        help="text lengths, as in neobert throughput", default_factory=lambda: list(TEXTS)
    )
    threads: list[int] = option(help="one column each", default_factory=lambda: [1, 2], least=1)
    layers: int = option(12, "of the models that are made", least=1)
    repeats: int = option(3, "timed passes of an engine in a round", least=1)
    rounds: int = option(
        1, "how often all engines are visited, each time in a new process", least=1
    )

    def __post_init__(self):
        super().__post_init__()
        for name in self.sets:
            check_set(name)


# ------------------------------------------------------------------------------------------------
# models


def make_models(files, layers, small=None):
    """Makes what is missing of FILES/model, FILES/bert and FILES/modernbert, with random weights;
    `small` replaces configuration fields."""
    from ..configuration_neobert import NeoBERTConfig
    from ..modeling_neobert import NeoBERTModel
    from .throughput_models import MODELS

    torch.manual_seed(0)
    if not (files.model / "config.json").is_file():
        # Uniform in +-0.05: a standard deviation of 0.03, as trained encoders have it, in place of
        # 0.012.
        config = NeoBERTConfig(
            **{
                "num_hidden_layers": layers,
                "embedding_init_range": 0.05,
                "decoder_init_range": 0.05,
                **(small or {}),
            }
        )
        _save(NeoBERTModel(config), files.model)
    depth = json.loads((files.model / "config.json").read_text(encoding="utf-8"))[
        "num_hidden_layers"
    ]
    for name, key in (("bert", "bert-base"), ("modernbert", "modernbert-base")):
        if not (files.folder / name / "config.json").is_file():
            model_class, make_config, _ = MODELS[key]
            special = {
                "pad_token_id": 0,
                "cls_token_id": 101,
                "sep_token_id": 102,
                "bos_token_id": 101,
                "eos_token_id": 102,
            }
            config = make_config(
                **{"num_hidden_layers": depth, "vocab_size": 30522, **special, **(small or {})}
            )
            _save(model_class(config), files.folder / name)


def _save(model, folder):
    model.save_pretrained(folder)
    load_tokenizer(TOKENIZER).save_pretrained(folder)


def make_texts(name, tokenizer, count):
    """Token ids of `count` texts of whole words, so that they stay the same when an engine
    tokenises them itself."""
    words = [
        i
        for word, i in tokenizer.get_vocab().items()
        if word.isascii() and word.isalpha() and len(word) > 2
    ]
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randint(len(words), (max(length - 2, 1),), generator=generator).tolist()
        for length in draw_lengths(name, count)
    ]
    words.sort()
    return [
        [tokenizer.cls_token_id, *(words[i] for i in ids), tokenizer.sep_token_id] for ids in drawn
    ]


# ------------------------------------------------------------------------------------------------
# measurement


def best_batch(session, texts):
    """The size that was fastest in one pass each, or None where an engine has no batches."""
    session(texts[:1])
    if not hasattr(session, "batch"):
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
    product = MatrixProduct("cpu", torch.float32)

    def pace(seconds):
        """Of one thread: threads of other engines wait busily for a while after a pass."""
        with one_thread():
            return product(seconds)

    with PeakMemory("cpu") as memory:
        extra = 0
        for count in threads:
            torch.set_num_threads(count)
            session = engine.open(files, count)
            for set_name, given in texts.items():
                if set_name not in sizes:
                    sizes[set_name], vectors[set_name] = best_batch(session, given), session(given)
                if sizes[set_name] is not None:
                    session.batch = sizes[set_name]
                session(given)  # also compiles for this number of threads
                passes = [
                    timed(lambda session=session, given=given: session(given), product=pace)
                    for _ in range(repeats)
                ]
                seconds, rates = map(list, zip(*passes))
                runs.append(
                    {
                        "set": set_name,
                        "threads": count,
                        "seconds": seconds,
                        "rates": rates,
                        "batch": sizes[set_name],
                    }
                )
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


def measure_all(given, texts):
    """{engine: list of what `measure` returned in each round, or one {"error"}}."""
    found = {name: [] for name in given.engines}
    with tqdm(total=given.rounds * len(found), desc="engines", disable=None) as progress:
        for _ in range(given.rounds):
            for name, rounds in found.items():
                progress.set_postfix_str(name)
                if not (rounds and "error" in rounds[0]):
                    try:
                        rounds.append(
                            in_a_process(
                                measure, name, given.files, texts, given.threads, given.repeats
                            )
                        )
                    except (
                        Exception
                    ) as error:  # an engine that is not here, or fails, has a row that says so
                        rounds[:] = [{"error": one_line(error, 200)}]
                progress.update()
    return found


# ------------------------------------------------------------------------------------------------
# results


def worst_cosine(ours, exact):
    """The smallest cosine between the vectors of a text, over {set: (texts, D)}."""
    pairs = [(a, b) for name in ours for a, b in zip(ours[name], exact[name])]
    return min(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs)


def summarise(found, texts):
    """One row an engine: speeds by set and threads, with quartiles, and the pace-corrected ones
    that ratios are made of."""
    rates = [
        rate
        for rounds in found.values()
        for one in rounds
        for run in one.get("runs", ())
        for rate in run["rates"]
    ]
    usual = statistics.median(rates) if rates else 1.0
    exact = next((one["vectors"] for one in found.get("torch-fp32", ()) if "vectors" in one), None)
    tokens = {name: sum(map(len, ids)) for name, ids in texts.items()}
    rows = []
    for name, rounds in found.items():
        engine = ENGINES[name]
        group = (
            "ours" if name.startswith("torch-") else "engine" if engine.same_weights else "model"
        )
        row = {
            "engine": name,
            "name": engine.name,
            "precision": engine.precision,
            "kind": engine.kind,
            "group": group,
            "how": engine.how,
        }
        if "error" in rounds[0]:
            rows.append({**row, "error": rounds[0]["error"]})
            continue
        speeds = []
        for first in rounds[0]["runs"]:
            where = (first["set"], first["threads"])
            runs = [
                run
                for one in rounds
                for run in one["runs"]
                if (run["set"], run["threads"]) == where
            ]
            seconds = [s for run in runs for s in run["seconds"]]
            paces = [rate / usual for run in runs for rate in run["rates"]]
            each = [tokens[where[0]] / second for second in seconds]
            corrected = statistics.median(speed / pace for speed, pace in zip(each, paces))
            speeds.append(
                {
                    "set": where[0],
                    "threads": where[1],
                    "tokens_per_second": statistics.median(each),
                    "quartiles": quartiles(each),
                    "corrected": corrected,
                    "seconds": seconds,
                    "pace": statistics.median(paces),
                    "batches": [run["batch"] for run in runs],
                }
            )
        cosine = (
            worst_cosine(rounds[0]["vectors"], exact) if exact and engine.same_weights else None
        )
        sizes = {
            "memory_bytes": max((one["memory_bytes"] or 0) for one in rounds) or None,
            "disk_bytes": rounds[0]["disk_bytes"],
        }
        rows.append({**row, "cosine": cosine, **sizes, "speeds": speeds})
    return rows


def best(rows, kind, group, set_name, threads):
    """(name, corrected tokens a second) of the fastest row of a kind among "ours", every other
    "engine" or "model"; or None."""
    found = [
        (row["name"] + " " + row["precision"], speed["corrected"])
        for row in rows
        if (row["kind"], row["group"]) == (kind, group)
        for speed in row.get("speeds", ())
        if (speed["set"], speed["threads"]) == (set_name, threads)
    ]
    return max(found, key=lambda pair: pair[1], default=None)


def over_float32(rows, columns, header):
    """Table of how many times as fast as torch in float32 each row is, at one pace of the machine;
    "" without that row.

    Args:
        columns: (set, threads) of each column.
        header: their names.
    """
    speeds = {
        row["engine"]: {(one["set"], one["threads"]): one["corrected"] for one in row["speeds"]}
        for row in rows
        if "error" not in row
    }
    if "torch-fp32" not in speeds:
        return ""
    base = speeds.pop("torch-fp32")
    lines = [
        [row["name"], row["precision"]]
        + [f"{speeds[row['engine']][column] / base[column]:.2f}" for column in columns]
        for row in rows
        if row["engine"] in speeds
    ]
    return "## Times as fast as torch in float32\n\n" + markdown_table(
        ["engine", "precision", *header], lines
    )


def page(rows, given, texts):
    """The tables as markdown."""
    columns = [(name, threads) for name in given.sets for threads in given.threads]
    header = [f"{name}, {threads} thread{'s' if threads > 1 else ''}" for name, threads in columns]
    lines, spread, failed = [], [], []
    for row in rows:
        if "error" in row:
            failed.append(f"- {row['name']} {row['precision']}: {row['error']}")
            continue
        speeds = {(speed["set"], speed["threads"]): speed for speed in row["speeds"]}
        cells = [f"{speeds[column]['tokens_per_second']:,.0f}" for column in columns]
        cosine = "" if row["cosine"] is None else f"{row['cosine']:.6f}"
        lines.append(
            [
                row["name"],
                row["precision"],
                *cells,
                cosine,
                mib(row["memory_bytes"]),
                mib(row["disk_bytes"]),
            ]
        )
        ranges = [between(speeds[column]["quartiles"]) for column in columns]
        batches = sorted({batch for speed in row["speeds"] for batch in speed["batches"] if batch})
        spread.append(
            [row["name"], row["precision"], *ranges, ", ".join(map(str, batches)), row["how"]]
        )
    ratios = []
    for kind in ("fp32", "16 bit", "int8"):
        for name, threads in columns:
            ours, *others = (
                best(rows, kind, group, name, threads) for group in ("ours", "engine", "model")
            )
            if ours and any(others):
                cells = [
                    [other[0], f"{ours[1] / other[1]:.2f}"] if other else ["", ""]
                    for other in others
                ]
                ratios.append([kind, name, threads, ours[0], *cells[0], *cells[1]])
    counts = ", ".join(
        f"{name}: {len(ids)} texts, {sum(map(len, ids)):,} tokens" for name, ids in texts.items()
    )
    parts = [
        f"Real tokens a second, median over {given.repeats} passes in each of {given.rounds} "
        f"process{'es' if given.rounds > 1 else ''}. {counts}. "
        f"Model: {given.files}. Cosine: the worst of a mean-pooled text to torch in float32. "
        "Memory: peak beyond the process without a model, "
        "loading and trying batch sizes included.",
        markdown_table(
            ["engine", "precision", *header, "worst cosine", "memory MiB", "disk MiB"], lines
        ),
        over_float32(rows, columns, header),
        "## Ours over the fastest other engine and the fastest other model, in the same class of "
        "precision",
        "Of speeds divided by the machine's pace, a float32 matrix product beside every pass. An "
        "engine runs the same weights; a model has as "
        "many layers, of fewer operations in ModernBERT (5.0 million weights a layer; NeoBERT and "
        "BERT 7.1).",
        markdown_table(
            [
                "class",
                "set",
                "threads",
                "ours",
                "engine",
                "times as fast",
                "model",
                "times as fast",
            ],
            ratios,
        ),
        "## Spread and settings",
        markdown_table(
            [
                "engine",
                "precision",
                *(f"{name}, quartiles" for name in header),
                "batch sizes chosen",
                "how",
            ],
            spread,
        ),
    ]
    if failed:
        parts += ["## Not measured", "\n".join(failed)]
    return "\n\n".join(part.strip() for part in parts if part)


def main(argv=None, small=None):
    """Measures, writes and prints the tables; `small` replaces configuration fields (tests).
    Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    (given,) = Options(
        "python -m neobert.benchmarks.precisions", __doc__, (PrecisionsArguments,)
    ).read(argv)
    files = Files(Path(given.files))
    make_models(files, given.layers, small)
    tokenizer = load_tokenizer(files.model)
    texts = {name: make_texts(name, tokenizer, TEXTS.get(name, 8)) for name in given.sets}
    found = measure_all(given, texts)
    rows = summarise(found, texts)
    if all("error" in row for row in rows):
        raise UserError(f"no engine could be measured: {rows[0]['error']}")
    env = environment(PACKAGES, capability=torch.backends.cpu.get_cpu_capability())
    env["threads"] = None  # those of each column
    print(
        write_result(
            given.output,
            "Precisions and engines on the CPU",
            env,
            {"rows": rows},
            page(rows, given, texts),
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.precisions", main))
