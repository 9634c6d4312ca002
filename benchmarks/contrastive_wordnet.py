"""Contrastive training on WordNet pairs (definition -> word), before and after on held-out synsets and two tasks it was not trained for.

python benchmarks/contrastive_wordnet.py --model FOLDER --output results/contrastive --seeds 1 2 3
Training pairs: synsets that neither this run nor the pre-training of the bundled model saw as held out. Tasks: evaluation/local_tasks.py.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

from neobert.common.files import write_json, write_text
from neobert.common.identity import weights_digest
from neobert.common.results import environment, markdown_table
from neobert.embeddings import contrastive
from neobert.embeddings.local_tasks import LOCAL_TASKS, WordNetRetrieval, wordnet_pairs
from neobert.embeddings.mteb_evaluation import MtebArguments, evaluate
from neobert.embeddings.packed_encoder import PackedEncoder


PROMPT = WordNetRetrieval.metadata.prompt["query"]


def scores_of(model, name, given):
    encoder = PackedEncoder(str(model), device=given.device, max_length=given.max_length)
    arguments = MtebArguments(
        model=str(model), output=f"{given.work}/mteb-{weights_digest(given.model)}", tasks=["local"], name=name, stop_on_error=True
    )
    return evaluate(encoder, arguments, show_progress_bar=False)


def train_one(seed, pairs, given):
    """Trains with one seed; returns the folder and its contrastive.json."""
    folder = Path(given.work) / f"{weights_digest(given.model)}-seed-{seed}-{given.steps}x{given.batch}-{given.learning_rate:g}"
    argv = ["--model", given.model, "--output_dir", str(folder), "--pairs", str(pairs), "--instruction", PROMPT, "--seed", str(seed)]
    argv += [
        "--max_steps",
        str(given.steps),
        "--per_device_train_batch_size",
        str(given.batch),
        "--learning_rate",
        str(given.learning_rate),
    ]
    argv += ["--max_length", str(given.max_length), "--logging_steps", "5", "--save_steps", "1000", "--warmup_steps", "0.1"]
    argv += ["--dataloader_pin_memory", "false", *(["--use_cpu", "true"] if given.device == "cpu" else [])]
    contrastive.main(argv)
    return folder, json.loads((folder / "contrastive.json").read_text())


def spread(values):
    return {"mean": statistics.mean(values), "sd": statistics.stdev(values) if len(values) > 1 else None, "runs": values}


def plot(result, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(result["before"])
    figure, axes = pyplot.subplots(1, len(names) + 1, figsize=(12, 3.6), width_ratios=[1] * len(names) + [1.8])
    for axis, name in zip(axes, names):
        after = result["after"][name]
        axis.bar(["before", "after"], [result["before"][name], after["mean"]], 0.6, color=["#9aa5b1", "#2b6cb0"])
        axis.plot(["after"] * len(after["runs"]), after["runs"], "o", color="#1f2933", markersize=4)
        axis.set_title(f"{name}\n{result['metrics'][name]}, %", fontsize=8)
        axis.margins(y=0.15)
    losses = axes[-1]
    for seed, points in zip(result["seeds"], result["losses"]):
        losses.plot(*zip(*points), label=f"seed {seed}")
    losses.axhline(math.log(result["batch"]), color="grey", linestyle="--", linewidth=0.8, label="chance")
    losses.set_xlabel("step")
    losses.set_title("InfoNCE loss; dots on the left: seeds", fontsize=8)
    losses.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="pre-trained encoder: a Hub folder")
    parser.add_argument("--description", help="what this model is, for the table; its folder's name by default")
    parser.add_argument("--output", default="results/contrastive")
    parser.add_argument("--work", default="runs/contrastive_wordnet", help="folder for models and MTEB's cache")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_length", type=int, default=48)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plot_only", action="store_true", help="draw the plot of --output again")
    given = parser.parse_args()
    if given.plot_only:
        result = json.loads((Path(given.output) / "wordnet.json").read_text())
        return plot(result, Path(given.output) / "wordnet.png")
    pairs = Path(given.work) / "wordnet.jsonl"
    rows = list(wordnet_pairs())
    write_text(pairs, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    before = scores_of(given.model, "before", given)
    runs, losses, seconds = {}, [], []
    for seed in given.seeds:
        folder, trained = train_one(seed, pairs, given)
        runs[seed] = scores_of(folder, f"after-seed-{seed}", given)["scores"]
        losses.append(trained["training"]["losses"])
        seconds.append(trained["training"]["seconds"])
    env = environment(dtype="float32", device=given.device)
    result = {
        "title": "WordNet definition to word",
        "model": given.description or Path(given.model).name,
        "pairs": len(rows),
        "steps": given.steps,
        "batch": given.batch,
        "learning_rate": given.learning_rate,
        "seeds": given.seeds,
        "metrics": before["metrics"],
        "before": before["scores"],
        "after": {name: spread([runs[seed][name] for seed in given.seeds]) for name in LOCAL_TASKS},
        "losses": losses,
        "training_seconds": seconds,
        "environment": env,
    }
    output = Path(given.output)
    write_json(output / "wordnet.json", result)
    cells = []
    for name, after in result["after"].items():
        sd = "" if after["sd"] is None else f" ± {after['sd']:.2f}"
        gain = after["mean"] - result["before"][name]
        cells.append([name, result["metrics"][name], f"{result['before'][name]:.2f}", f"{after['mean']:.2f}{sd}", f"{gain:+.2f}"])
    text = (
        f"Model: {result['model']}. {given.steps} steps of {given.batch} pairs of {len(rows):,} (definition, word), learning rate "
        f"{given.learning_rate}; {len(given.seeds)} seeds, mean ± standard deviation; scores in percent. The queries of WordNetRetrieval come "
        "from held-out synsets; the other two tasks were not trained for.\n\n"
        + markdown_table(["task", "metric", "before", "after", "change"], cells)
        + f"\n`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, {env['threads']} threads, float32.\n"
    )
    write_text(output / "wordnet.md", text)
    plot(result, output / "wordnet.png")
    print(text)


if __name__ == "__main__":
    main()
