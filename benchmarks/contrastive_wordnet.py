"""Contrastive training on WordNet pairs (definition -> word), before and after, on held-out synsets and two tasks it was not trained for.

    python -m neobert.benchmarks.contrastive_wordnet --model FOLDER --others MiniLM-L6=FOLDER

Every model is measured twice: with each task's instruction before its queries, as the training has it, and without. Its row is the better of
the two by the mean of the tasks, so that a model that never saw an instruction is not measured with one.
"""

import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from ..common import figures
from ..common.arguments import Arguments, option, read_arguments
from ..common.commands import guarded
from ..common.files import write_text
from ..common.identity import model_digest
from ..common.results import environment, markdown_table, write_result
from ..embeddings import contrastive
from ..embeddings.local_tasks import LOCAL_TASKS, WordNetRetrieval, wordnet_pairs
from ..embeddings.mteb_evaluation import MtebArguments, evaluate
from ..embeddings.packed_encoder import PackedEncoder


PROMPT = WordNetRetrieval.metadata.prompt["query"]
# How a model is asked: value of --instructions of neobert mteb, and what it is called here.
WAYS = {"mteb": "with instructions", "none": "without"}


@dataclass
class WordNetBenchmark(Arguments):
    """Options of `python -m neobert.benchmarks.contrastive_wordnet`."""

    model: str = option(help="pre-trained encoder: a Hub folder")
    description: str | None = option(None, "what this model is, for the table; its folder's name by default")
    others: list[str] = option(default_factory=list, help="sentence encoders to measure beside it, as yardsticks: NAME=FOLDER")
    output: str = option("results/contrastive/wordnet", "path of the result without its ending")
    work: str = option("runs/contrastive_wordnet", "folder for models and MTEB's cache")
    seeds: list[int] = option(default_factory=lambda: [1, 2, 3], least=0)
    steps: int = option(250, least=1)
    batch: int = option(64, "pairs", least=2)
    learning_rate: float = option(1.5e-3, above=0)
    max_length: int = option(40, "tokens", least=3)
    device: str = option("cpu")


def scores_of(model, name, given):
    """{way: {task: score}} of one model, in float32."""
    encoder = PackedEncoder(str(model), dtype="float32", device=given.device, max_length=given.max_length)
    output = f"{given.work}/mteb-{model_digest(given.model)}"
    found = {}
    for way in WAYS:
        arguments = MtebArguments(
            str(model), output, ["local"], name=f"{name}-{way}", instructions=way, stop_on_error=True, dtype="float32"
        )
        found[way] = evaluate(encoder, arguments, show_progress_bar=False)["scores"]
    return found


def best_way(scores):
    """The way in which a model, or several of one kind, does best on the mean of the tasks."""
    return max(WAYS, key=lambda way: statistics.mean(statistics.mean(run[way].values()) for run in scores))


def train_one(seed, pairs, given):
    """Trains with one seed; returns the folder and its contrastive.json."""
    folder = Path(given.work) / f"{model_digest(given.model)}-seed-{seed}-{given.steps}x{given.batch}-{given.learning_rate:g}"
    argv = ["--model", given.model, "--output", str(folder), "--pairs", str(pairs), "--instruction", PROMPT, "--seed", str(seed)]
    argv += [
        "--max-steps",
        str(given.steps),
        "--per-device-train-batch-size",
        str(given.batch),
        "--learning-rate",
        str(given.learning_rate),
    ]
    argv += ["--max-length", str(given.max_length), "--logging-steps", "5", "--save-steps", "1000", "--warmup-steps", "0.1"]
    argv += ["--dataloader-pin-memory", "false", *(["--use-cpu"] if given.device == "cpu" else [])]
    contrastive.main(argv)
    return folder, json.loads((folder / contrastive.MANIFEST).read_text())


def spread(values):
    return {"mean": statistics.mean(values), "sd": statistics.stdev(values) if len(values) > 1 else None, "runs": values}


def rows_of(models):
    """{row: {"way", "scores": {task: spread}, "other_way": {task: spread}}} of {row: [{way: {task: score}} of each seed]}."""
    rows = {}
    for name, runs in models.items():
        way = best_way(runs)
        (other,) = WAYS.keys() - {way}
        scores = {each: {task: spread([run[each][task] for run in runs]) for task in LOCAL_TASKS} for each in WAYS}
        rows[name] = {"way": way, "scores": scores[way], "other_way": scores[other]}
    return rows


def page(given, rows, pairs, metrics):
    """The result in markdown."""

    def cell(found):
        return f"{found['mean']:.2f}" + ("" if found["sd"] is None else f" ± {found['sd']:.2f}")

    header = ["model", "asked", *(f"{task}, {metrics[task]}" for task in LOCAL_TASKS)]
    table = [[name, WAYS[row["way"]], *(cell(row["scores"][task]) for task in LOCAL_TASKS)] for name, row in rows.items()]
    before, after = (rows[name]["scores"] for name in ("before", "after"))
    table.insert(2, ["change", "", *(f"{after[task]['mean'] - before[task]['mean']:+.2f}" for task in LOCAL_TASKS)])
    others = [
        [name, *(w for way, w in WAYS.items() if way != row["way"]), *(cell(row["other_way"][task]) for task in LOCAL_TASKS)]
        for name, row in rows.items()
    ]
    return (
        f"Model: {given.description or Path(given.model).name}. {given.steps} steps of {given.batch} pairs of {pairs:,} (definition, word), "
        f"learning rate {given.learning_rate:g}; {len(given.seeds)} seeds, mean ± standard deviation; scores in percent. The queries of "
        "WordNetRetrieval come from held-out synsets; the other two tasks were not trained for. Each model is asked in the way in which it does "
        "best on the mean of the three tasks.\n\n"
        + markdown_table(header, table)
        + "\nThe same models asked in the other way:\n\n"
        + markdown_table(header, others)
    )


def plot(result, path):
    """Bars of every task, before and after, each in the best way; and the losses of training."""
    rows = result["rows"]
    figure, axes = figures.subplots(columns=len(LOCAL_TASKS) + 1, size=(13, 3.8), width_ratios=[1] * len(LOCAL_TASKS) + [1.6])
    colours = [figures.OWN if name == "after" else figures.PALE if name == "before" else figures.GREY for name in rows]
    for panel, task in zip(axes, LOCAL_TASKS):
        scores = [row["scores"][task] for row in rows.values()]
        figures.bars(panel, list(rows), [score["mean"] for score in scores], [score["sd"] for score in scores], colours=colours)
        panel.set_title(f"{task}\n{result['metrics'][task]}, %", fontsize=8)
        panel.tick_params(axis="x", labelsize=7)
    for number, (seed, points) in enumerate(zip(result["seeds"], result["losses"])):
        figures.line(axes[-1], *zip(*points), label=f"seed {seed}", series=number, marker="")
    axes[-1].axhline(math.log(result["batch"]), color=figures.GREY, linestyle="--", linewidth=0.8, label="chance")
    axes[-1].set(xlabel="step", title="InfoNCE loss")
    axes[-1].legend()
    return figures.save(figure, path, result["environment"])


def main(argv=None):
    """Trains and measures, writes OUTPUT.json, .md and .png; returns the exit code."""
    program = "python -m neobert.benchmarks.contrastive_wordnet"
    (given,) = read_arguments([WordNetBenchmark], sys.argv[1:] if argv is None else argv, program, __doc__)
    pairs = Path(given.work) / "wordnet.jsonl"
    rows = list(wordnet_pairs())
    write_text(pairs, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    models = {"before": [scores_of(given.model, "before", given)], "after": []}
    losses, seconds = [], []
    for seed in given.seeds:
        folder, trained = train_one(seed, pairs, given)
        models["after"].append(scores_of(folder, f"after-seed-{seed}", given))
        losses.append(trained["training"]["losses"])
        seconds.append(trained["training"]["seconds"])
    for other in given.others:
        name, _, folder = other.partition("=")
        models[name] = [scores_of(folder, f"other-{model_digest(folder)}", given)]
    found = rows_of(models)
    metrics = {name: task.metadata.main_score for name, task in LOCAL_TASKS.items()}
    made = environment(dtype="float32", device=given.device)
    data = {
        "model": given.description or Path(given.model).name,
        "pairs": len(rows),
        "metrics": metrics,
        "rows": found,
        "losses": losses,
        "training_seconds": seconds,
        **{name: getattr(given, name) for name in ("steps", "batch", "learning_rate", "max_length", "seeds")},
    }
    print(
        write_result(given.output, "Contrastive training: a definition finds its word", made, data, page(given, found, len(rows), metrics))
    )
    plot({"environment": made, **data}, f"{given.output}.png")
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.contrastive_wordnet", main))
