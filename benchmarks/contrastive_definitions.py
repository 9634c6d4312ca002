"""Measure what contrastive training with the default options adds to the bundled encoder.

Trains on 6,000 definitions of WordNet and their words (`examples/make_pairs.py`), once per seed,
and evaluates the retrieval of 500 held-out definitions.

    python -m benchmarks.contrastive_definitions --output results/contrastive/wordnet
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

from neobert.common.environment import environment
from neobert.common.files import read_json
from neobert.common.identity import model_digest
from neobert.common.results import write_result
from neobert.common.scripts import run_script
from neobert.common.tables import markdown_table
from neobert.contrastive import command


# The plot is written to a file, also on machines without a display.
matplotlib.use("Agg")

METRICS = ("recall@1", "recall@10", "mrr@10")
# Titles of the rows by key of the training record.
SYSTEMS = {"tf-idf": "TF-IDF", "before": "before training", "after": "after training"}


def main(argv: list[str] | None = None) -> None:
    """Train once per seed, and write the scores and a plot of the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="examples/sentence-encoder", help="Directory of the encoder to train."
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="Random seeds, one run each."
    )
    parser.add_argument("--output", required=True, help="Path of the result without a suffix.")
    args = parser.parse_args(argv)

    # The trained encoders are not kept; the result contains their training records.
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder) / "pairs"
        script = Path(__file__).parent.parent / "examples" / "make_pairs.py"
        subprocess.run([sys.executable, script, "--output", pairs], check=True)
        runs = [train(args.model, pairs, seed, Path(folder)) for seed in args.seeds]

    scores = {system: summarize(runs, system) for system in SYSTEMS}
    data = {"model": args.model, "seeds": args.seeds, "scores": scores, "runs": runs}
    write_result(
        args.output,
        "Contrastive training: find a word by its definition",
        environment(dtype="float32", device="cpu"),
        data,
        page(args.model, runs, scores, Path(args.output).name),
    )
    plot(runs, f"{args.output}.png")


def train(model: str, pairs: Path, seed: int, folder: Path) -> dict[str, Any]:
    """Train one encoder with the default options and return its training record."""
    output = folder / f"seed{seed}"

    # The other options keep their defaults, because the benchmark is about these.
    code = command.main(
        [
            f"--model={model}",
            f"--pairs={pairs / 'train.jsonl'}",
            f"--validation-file={pairs / 'test.jsonl'}",
            f"--seed={seed}",
            f"--output={output}",
        ]
    )
    assert not code, f"training with seed {seed} failed"
    return read_json(output / "result.json")["training"]


def summarize(runs: list[dict[str, Any]], system: str) -> dict[str, dict[str, float]]:
    """Return mean and standard deviation over the seeds, and the standard error over queries."""
    summary = {}
    for metric in METRICS:
        # Seeds vary the training, and queries the evaluation, so their errors are separate.
        values = [run["validation"][system][metric] for run in runs]
        summary[metric] = {
            "mean": statistics.mean(values),
            "sd_over_seeds": statistics.stdev(values) if len(values) > 1 else 0.0,
            "se_over_queries": runs[0]["validation"][system][f"{metric}_se"],
        }
    return summary


def page(model: str, runs: list[dict[str, Any]], scores: dict[str, Any], name: str) -> str:
    """Return the result page in markdown."""
    rows = []
    for system, label in SYSTEMS.items():
        cells = [
            f"{score['mean']:.3f} ± {score['sd_over_seeds']:.3f}"
            for score in scores[system].values()
        ]
        rows.append([label, *cells, f"{scores[system]['mrr@10']['se_over_queries']:.3f}"])

    header = ["encoder", *METRICS, "standard error of mrr@10 over queries"]
    validation = runs[0]["validation"]
    seconds = statistics.median(run["seconds"] for run in runs)
    return (
        f"Start: `{model}` (encoder `{model_digest(model)}`). {runs[0]['steps']} steps of 64 pairs "
        f"of {runs[0]['rows']['train']:,} (definition, word), default options, {len(runs)} seeds; "
        f"mean ± standard deviation over the seeds. {validation['queries']} held-out definitions "
        f"are searched among {validation['texts']} words. Training takes {seconds:.0f} s on a "
        f"machine that is shared with other work.\n\n"
        f"{markdown_table(header, rows)}\n"
        f"![Training loss of each seed]({name}.png)"
    )


def plot(runs: list[dict[str, Any]], path: str) -> None:
    """Plot the training loss of each run against the step."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    for number, run in enumerate(runs):
        steps, losses = zip(*run["losses"])
        axes.plot(steps, losses, marker="o", label=f"run {number + 1}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("contrastive loss")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run_script(main)
