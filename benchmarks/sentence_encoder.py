"""The bundled sentence encoder beside its teacher: three local tasks, agreement over training,
sentences per second.

    python -m neobert.benchmarks.sentence_encoder --output results/distill

Both run in sentence-transformers' `encode`, in turns within one run. The tasks are those of
embeddings/local_tasks.py, without instructions.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common import figures
from ..common.arguments import Options, option
from ..common.commands import guarded
from ..common.errors import require
from ..common.files import read_json
from ..common.local_text import sentiment_sentences
from ..common.results import environment, markdown_table, write_result
from ..embeddings.local_tasks import LOCAL_TASKS, wordnet_definitions
from .measuring import between, weight_megabytes
from .open_text import PairArguments, find_teacher


LEAST_SHARE = 0.9


@dataclass
class SentenceEncoderArguments(PairArguments):
    """Options of `python -m neobert.benchmarks.sentence_encoder`."""

    output: str = option("results/distill", "folder of the result")
    rounds: int = option(5, "each model takes its turn in every one", least=1)
    sentences: int = option(1000, "of each kind of text", least=1)
    dtypes: list[str] = option(
        default_factory=lambda: ["float32", "bfloat16"], choices=("float32", "float16", "bfloat16")
    )


def task_scores(model):
    """{task: score in percent}."""
    import mteb

    results = mteb.evaluate(
        model, [task() for task in LOCAL_TASKS.values()], cache=None, show_progress_bar=False
    )
    return {result.task_name: 100 * result.get_score() for result in results.task_results}


def timed_texts(count):
    """Short texts of two kinds: definitions and tweets, in a fixed order."""
    definitions = [definition for _, _, definition in wordnet_definitions()]
    tweets = [row["text"] for row in sentiment_sentences("tweets")]
    return {
        "definitions": definitions[:: len(definitions) // count][:count],
        "tweets": tweets[:: max(1, len(tweets) // count)][:count],
    }


def speeds(models, dtypes, rounds, count):
    """Sentences per second of each model, by wall clock and by CPU time, in turns: rows of kind,
    dtype, model, runs."""
    rows = []
    for dtype in dtypes:
        for model in models.values():
            model.to(getattr(torch, dtype))
        for kind, texts in timed_texts(count).items():
            runs = {name: [] for name in models}
            for _ in range(rounds + 1):
                for name, model in models.items():
                    wall, cpu = time.perf_counter(), time.process_time()
                    model.encode(texts, batch_size=64, show_progress_bar=False)
                    runs[name].append(
                        (
                            len(texts) / (time.perf_counter() - wall),
                            len(texts) / (time.process_time() - cpu),
                        )
                    )
            for name, found in runs.items():
                wall, cpu = zip(*found[1:])  # the first round warms up
                rows.append(
                    {
                        "texts": kind,
                        "dtype": dtype,
                        "model": name,
                        "per_second": wall,
                        "per_cpu_second": cpu,
                    }
                )
    for model in models.values():
        model.to(torch.float32)
    return rows


def speed_table(rows):
    cells = []
    for row in rows:
        other = next(
            r
            for r in rows
            if r["model"] == "teacher" and (r["texts"], r["dtype"]) == (row["texts"], row["dtype"])
        )
        ratios = [a / b for a, b in zip(row["per_cpu_second"], other["per_cpu_second"])]
        spread = between((min(ratios), max(ratios)), ".2f")
        medians = [
            f"{statistics.median(row[key]):,.0f}" for key in ("per_second", "per_cpu_second")
        ]
        cells.append(
            [
                row["texts"],
                row["dtype"],
                row["model"],
                *medians,
                f"{statistics.median(ratios):.2f}",
                spread,
            ]
        )
    return markdown_table(
        [
            "texts",
            "dtype",
            "model",
            "sentences/s",
            "sentences/CPU-s",
            "times the teacher",
            "over the rounds",
        ],
        cells,
    )


def curve(training):
    """Agreement over the steps of a run and of those before it."""
    points, before = [], 0
    for run in [*training.get("earlier", ()), training]:
        points += [{**entry, "step": before + entry["step"]} for entry in run["agreement"]]
        before += run["steps"]
    return points


def plot(training, path, env):
    """Agreement with the teacher over the steps, a line a kind of text."""
    figure, axes = figures.subplots(xlabel="step", columns=2, size=(10, 3.8))
    for panel, key, title in zip(
        axes,
        ("spearman", "cosine"),
        ("Spearman of pair similarities", "mean cosine to the teacher's vector"),
    ):
        names = [
            name.removesuffix(f"_{key}")
            for name in training["agreement"][-1]
            if name.endswith(f"_{key}")
        ]
        for number, name in enumerate(names):
            key_of = f"{name}_{key}"
            # Not every run was measured on all kinds.
            points = [
                (entry["step"], entry[key_of]) for entry in curve(training) if key_of in entry
            ]
            figures.line(panel, *zip(*points), name.replace("_", " "), number, marker="")
        panel.set_title(title)
    axes[0].legend()
    return figures.save(figure, path, env)


def page(given, data):
    """The result in markdown."""
    scores = data["scores"]
    millions = {name: count / 1e6 for name, count in data["parameters"].items()}
    megabytes = data["megabytes"]
    cells = []
    for task in LOCAL_TASKS:
        share = scores["student"][task] / scores["teacher"][task]
        both = [f"{scores[name][task]:.1f}" for name in ("teacher", "student")]
        cells.append([task, *both, f"{share:.3f}", "yes" if share >= LEAST_SHARE else "no"])
    last = data["training"]["agreement"][-1]
    names = [name.removesuffix("_spearman") for name in last if name.endswith("_spearman")]
    agreed = [
        [name.replace("_", " "), f"{last[f'{name}_cosine']:.3f}", f"{last[f'{name}_spearman']:.3f}"]
        for name in names
    ]
    return f"""{millions["student"]:.1f}M parameters in {megabytes["student"]:.1f} MB; the teacher has {millions["teacher"]:.1f}M in {megabytes["teacher"]:.1f} MB. Scores in percent, without instructions.

{markdown_table(["task", "teacher", "student", "share", f"at least {LEAST_SHARE}"], cells)}
Agreement with the teacher at the end of training, on texts that were not trained on (`held out`: the same sources; the others: kinds of text
that are not in the training texts):

{markdown_table(["texts", "mean cosine", "Spearman of pair similarities"], agreed)}
![agreement over training](distill.png)

Sentences per second in `SentenceTransformer.encode`, batches of 64, {given.rounds} rounds in turns, medians:

{speed_table(data["speed"])}"""  # noqa: E501


def main(argv=None):
    """Measures, writes distill.json, .md and .png; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    (given,) = Options(
        "python -m neobert.benchmarks.sentence_encoder", __doc__, (SentenceEncoderArguments,)
    ).read(argv)
    require("eval", "sentence_transformers", "mteb")
    from sentence_transformers import SentenceTransformer

    folders = {"teacher": find_teacher(given.teacher), "student": given.model}
    models = {
        name: SentenceTransformer(folder, device="cpu", trust_remote_code=name == "student")
        for name, folder in folders.items()
    }
    output, env = Path(given.output), environment(dtype=", ".join(given.dtypes))
    data = {
        "kind": "distill",
        "scores": {name: task_scores(model) for name, model in models.items()},
        "speed": speeds(models, given.dtypes, given.rounds, given.sentences),
        "parameters": {
            name: sum(p.numel() for p in model.parameters()) for name, model in models.items()
        },
        "megabytes": {name: weight_megabytes(folder) for name, folder in folders.items()},
        "training": read_json(Path(given.model) / "figures.json"),
    }
    print(
        write_result(
            output / "distill",
            "The bundled sentence encoder beside its teacher",
            env,
            data,
            page(given, data),
        )
    )
    plot(data["training"], output / "distill.png", env)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.sentence_encoder", main))
