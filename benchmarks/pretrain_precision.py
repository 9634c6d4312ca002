"""What `neobert pretrain` gains on the CPU by bfloat16 and compiled blocks, and whether it learns as well.

    python -m neobert.benchmarks.pretrain_precision --recipe recipes/example_small.yaml

Every run is the command's own, in a process of its own, with the recipe's text, model and optimizer, cut to --steps. The settings take turns,
seed by seed, and a seed gives all of them the same weights, texts and masks. What is finished is not run again.
"""

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..common.arguments import Arguments, option, read_arguments
from ..common.commands import guarded
from ..common.errors import UserError
from ..common.files import read_json
from ..common.results import environment, markdown_table, mean_and_deviation, write_result
from ..pretraining import pretrain
from .measuring import in_a_process, quartiles, ratio


SETTINGS = {
    "float32": {},
    "float32, compiled blocks": {"compile": "true"},
    "bfloat16": {"bf16": "true"},
    "bfloat16, compiled blocks": {"bf16": "true", "compile": "true"},
}
LOGGED = 10  # steps between two logged rates


@dataclass
class PretrainPrecisionArguments(Arguments):
    """Options of `python -m neobert.benchmarks.pretrain_precision`."""

    recipe: str = option(help="recipe of neobert pretrain, with held-out text")
    output: str = option("results/pretrain_precision", "path of the result without its ending")
    work: str = option("runs/pretrain_precision", "folder of the runs")
    settings: list[str] = option(help="what is compared", default_factory=lambda: list(SETTINGS), choices=tuple(SETTINGS))
    seeds: list[int] = option(default_factory=lambda: [1, 2, 3], least=0)
    steps: int = option(200, "of a run", least=3 * LOGGED)
    threads: int = option(default_factory=torch.get_num_threads, least=1)


def options_of(setting, seed, given):
    """The command line of one run."""
    folder = Path(given.work) / f"{setting.replace(',', '').replace(' ', '_')}-{seed}"
    values = {
        **SETTINGS[setting], "output": folder, "prepared": Path(given.work) / "prepared", "seed": seed, "use_cpu": "true", "eval_strategy": "no",
        "max_steps": given.steps, "warmup_steps": given.steps // 10, "logging_steps": LOGGED, "save_steps": given.steps, "keep_every": 0,
        "disable_tqdm": "true", "report_to": "none",
    }  # fmt: skip
    return [given.recipe, *(piece for name, value in values.items() for piece in (f"--{name.replace('_', '-')}", str(value)))]


def train(options, threads):
    """One run.

    Returns:
        dict: rates (real tokens a second, of LOGGED steps each, without the first, which compile), loss (mean of the last fifth of the steps)
        and heldout_loss.
    Raises:
        UserError: the recipe has no held-out text.
    """
    torch.set_num_threads(threads)
    run = pretrain.read_run(options)
    if run.data.heldout is None:
        raise UserError("the recipe has no held-out text: give heldout")
    pretrain.execute(run)
    records = [json.loads(line) for line in (run.output / "log.jsonl").read_text().splitlines()]
    records = [record for record in records if "loss" in record]
    return {
        "rates": [record["tokens_per_second"] for record in records[1:]],
        "loss": statistics.mean(record["loss"] for record in records[-max(1, len(records) // 5) :]),
        "heldout_loss": read_json(run.output / "result.json")["eval_loss"],
    }


def page(found):
    """Markdown: a line for each setting, over its seeds."""
    rows, first = [], next(iter(found.values()))
    for setting, runs in found.items():
        rates = [rate for run in runs.values() for rate in run["rates"]]
        # The same steps of the same seed: neighbours in time, on the same texts.
        faster = ratio([1 / rate for seed in runs for rate in first[seed]["rates"]], [1 / rate for rate in rates])
        cells = [f"{statistics.median(rates):,.0f}", "{:,.0f} to {:,.0f}".format(*quartiles(rates)), f"{faster['ratio']:.2f}"]
        losses = (mean_and_deviation([run[name] for run in runs.values()], ".3f") for name in ("loss", "heldout_loss"))
        rows.append([setting, *cells, *losses])
    return markdown_table(["setting", "real tokens/s", "quartiles", "times as fast", "training loss", "held-out loss"], rows)


def main(argv=None):
    """Trains what is not there yet, writes OUTPUT.json and .md; returns the exit code."""
    program = "python -m neobert.benchmarks.pretrain_precision"
    (given,) = read_arguments([PretrainPrecisionArguments], sys.argv[1:] if argv is None else argv, program, __doc__)
    found = {setting: {} for setting in given.settings}
    for seed in given.seeds:
        for setting in given.settings:
            found[setting][seed] = in_a_process(train, options_of(setting, seed, given), given.threads)
            print(f"{setting}, seed {seed}: {found[setting][seed]}", file=sys.stderr, flush=True)
    text = (
        f"`neobert pretrain {given.recipe}`, cut to {given.steps} steps. Times as fast: as {given.settings[0]}, by the same steps of the same "
        f"seed. Losses: mean ± standard deviation over {len(given.seeds)} seeds, in training over the last fifth of the steps.\n\n"
        + page(found)
    )
    env = {**environment(dtype=given.settings), "threads": given.threads}
    data = {"kind": "pretrain-precision", "options": asdict(given), "runs": found}
    print(write_result(given.output, "Pre-training in bfloat16 on the CPU", env, data, text))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.pretrain_precision", main))
