"""Contrastive training on WordNet pairs (definition -> word), before and after on held-out synsets and two tasks it was not trained for.

python benchmarks/contrastive_wordnet.py --model FOLDER --output results/contrastive --seeds 1 2 3
Training pairs: synsets that neither this run nor the pre-training of the bundled model saw as held out. Tasks: evaluation/local_tasks.py.
"""

import argparse
import json
import statistics
from pathlib import Path

from neobert.evaluation.local_tasks import LOCAL_TASKS, WordNetRetrieval, wordnet_pairs
from neobert.evaluation.mteb_evaluation import MtebArguments, evaluate
from neobert.evaluation.packed_encoder import PackedEncoder
from neobert.evaluation.results import environment, markdown_table, write_json, write_text
from neobert.training import contrastive


PROMPT = WordNetRetrieval.metadata.prompt["query"]


def scores_of(model, name, given):
    encoder = PackedEncoder(str(model), device=given.device, max_length=given.max_length)
    arguments = MtebArguments(model=str(model), output=f"{given.work}/mteb", tasks=["local"], name=name, stop_on_error=True)
    return evaluate(encoder, arguments, show_progress_bar=False)


def train_one(seed, pairs, given):
    """Trains with one seed; returns the folder and its contrastive.json."""
    folder = Path(given.work) / f"seed-{seed}-{given.steps}x{given.batch}"
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

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    names = list(result["before"])
    places = range(len(names))
    left.bar([i - 0.2 for i in places], [result["before"][n] for n in names], 0.38, label="before", color="#9aa5b1")
    means, sds = zip(*((result["after"][n]["mean"], result["after"][n]["sd"] or 0) for n in names))
    label = f"after (mean of {len(result['seeds'])} seeds, bars: sd)"
    left.bar([i + 0.2 for i in places], means, 0.38, yerr=sds, capsize=4, label=label, color="#2b6cb0")
    left.set_xticks(list(places), [f"{name}\n({result['metrics'][name]})" for name in names], fontsize=7)
    left.set_ylabel("score (%)")
    left.legend(fontsize=8)
    for seed, losses in zip(result["seeds"], result["losses"]):
        right.plot(*zip(*losses), label=f"seed {seed}")
    right.set_xlabel("step")
    right.set_ylabel("InfoNCE loss")
    right.legend(fontsize=8)
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
    given = parser.parse_args()
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
