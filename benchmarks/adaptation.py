"""What a domain wins and what the old text loses: the bundled masked LM goes on with manual pages.

    python -m neobert.benchmarks.adaptation --output results/adaptation_domain

Four ways, each with several seeds: no training, manual pages alone, with 10 % of the dictionary
text that the model knows (replay), and a new model on the manual pages with equal steps. Values are
those of recipes/adapt_domain.yaml but for the sizes in `SMALL`. Measured on manual pages of other
programs and on dictionary entries that no model was trained on. Finished runs in --work are not
run again.

Text: NAME and DESCRIPTION of the installed manual pages (each under the licence of its Debian
package, /usr/share/doc/PACKAGE/copyright) and WordNet 3.0 (wordnet-base, WordNet's licence).
"""

import hashlib
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..common import figures, local_text
from ..common.arguments import Arguments, Options, option
from ..common.commands import guarded
from ..common.constants import ROOT
from ..common.errors import UserError
from ..common.files import read_json, write_text
from ..common.results import environment, markdown_table, mean_and_deviation, write_result
from ..common.yaml_files import read_yaml
from .open_text import manuals


RECIPE = ROOT / "recipes" / "adapt_domain.yaml"
SETS = ("manuals", "dictionary")
WAYS = {
    "none": "no adaptation",
    "alone": "manual pages alone",
    "replay": "manual pages and 10 % replay",
    "anew": "a new model, equal steps",
}
# What differs from the recipe at the size of the bundled model, whose peak was 2e-3: half of it, as
# in the recipe; a new model gets all of it.
SMALL = {"max_length": 128, "tokens_per_step": 2048, "tokens_per_batch": 2048}
PEAK = 2.0e-3
MOST_HELD_OUT = {"manuals": 60, "dictionary": 600}
CHARACTERS = 2000  # of a held-out manual page


@dataclass
class AdaptationArguments(Arguments):
    """Options of `python -m neobert.benchmarks.adaptation`."""

    output: str = option("results/adaptation_domain", "path of the result without its ending")
    work: str = option("runs/adaptation_domain", "texts and models")
    steps: int = option(100, "optimizer steps of a run", least=20)
    seeds: int = option(3, "runs of each way", least=1)


def write_texts(folder):
    """TEXT.jsonl and TEXT-heldout.jsonl of both kinds of text; returns {set: [rows, held-out
    rows]}."""
    pages = {(row.package, f"{row.short}. {row.long}") for row in manuals() if len(row.long) > 200}
    # Programs are held out, not pages: those of one program are alike.
    rows = {
        "manuals": sorted((f"{package}", text) for package, text in pages),
        "dictionary": [(row["id"], row["text"]) for row in local_text.wordnet_entries()],
    }
    if not rows["manuals"]:
        raise UserError("there are no manual pages in /usr/share/man; install some packages")
    counts = {}
    for name, pairs in rows.items():
        # The dictionary's split is that which the bundled model was trained with.
        percent = 10 if name == "manuals" else local_text.HELD_OUT_PERCENT
        sides = [[], []]
        for key, text in sorted(
            pairs, key=lambda pair: hashlib.sha1("".join(pair).encode()).digest()
        ):
            sides[local_text.is_held_out(key, percent)].append(text)
        sides[1] = [text[:CHARACTERS] for text in sides[1][: MOST_HELD_OUT[name]]]
        for texts, ending in zip(sides, ("", "-heldout")):
            lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
            write_text(folder / f"{name}{ending}.jsonl", "\n".join(lines) + "\n")
        counts[name] = [len(texts) for texts in sides]
    return counts


def recipe_of(way, seed, given, start):
    """The recipe of a run, as `pretrain.run_of` takes it."""
    work, recipe = Path(given.work), {**read_yaml(RECIPE), **SMALL}
    text = {name: str(work / f"{name}.jsonl") for name in SETS}
    replay = [{"name": text["manuals"], "weight": 0.9}, {"name": text["dictionary"], "weight": 0.1}]
    recipe["dataset"] = replay if way == "replay" else text["manuals"]
    recipe["heldout"] = {name: str(work / f"{name}-heldout.jsonl") for name in SETS}
    recipe |= {"output": str(work / f"{way}-{seed}"), "prepared": str(work / f"prepared-{way}")}
    if way == "anew":
        config = read_json(start / "config.json")
        fields = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        recipe["model_config"] = {name: config[name] for name in fields}
        recipe["model_config"] |= {"max_position_embeddings": 512, "tie_word_embeddings": True}
        del recipe["init_from"]
    else:
        recipe["init_from"] = str(start)
    recipe["trainer"] |= {
        "max_steps": given.steps,
        "learning_rate": PEAK if way == "anew" else PEAK / 2,
        "save_steps": max(1, given.steps // 10),
        "eval_strategy": "no",
        "logging_steps": max(1, given.steps // 5),
        "seed": seed,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return recipe


def measure(given):
    """A row for each run, and of no adaptation for each seed."""
    from ..pretraining import pretrain

    work, rows = Path(given.work), []
    start = work / "start"
    if not start.is_dir():
        command = [sys.executable, str(ROOT / "convert_checkpoint.py")]
        command += [str(ROOT / "examples" / "checkpoint"), str(start), "--dtype", "float32"]
        subprocess.run(command, check=True)
    for seed in range(given.seeds):
        for way in [way for way in WAYS if way != "none"]:
            run = pretrain.run_of(recipe_of(way, seed, given, start))
            metrics = pretrain.execute(run)
            result = read_json(run.output / "result.json")
            costs = {
                name: result[name]
                for name in ("tokens_seen", "cpu_seconds", "average_last", "commit")
            }
            rows.append({"way": way, "seed": seed, **costs, **metrics})
            if way == "alone":
                sets = read_json(run.output / "adaptation.json")["sets"]
                before = {
                    f"eval_{name}_{metric}": values["before"]
                    for name, found in sets.items()
                    for metric, values in found.items()
                }
                rows.append({"way": "none", "seed": seed, "tokens_seen": 0, **before})
    return rows


def table(rows):
    """The ways, mean ± standard deviation over the seeds."""
    lines = []
    for way, title in WAYS.items():
        own = [row for row in rows if row["way"] == way]
        cells = [title]
        for name in SETS:
            accuracy = [100 * row[f"eval_{name}_masked_accuracy"] for row in own]
            bits = [row[f"eval_{name}_bits_per_character"] for row in own]
            cells += [mean_and_deviation(accuracy, ".1f"), mean_and_deviation(bits, ".3f")]
        seconds = [row["cpu_seconds"] for row in own if "cpu_seconds" in row]
        cells += [
            f"{statistics.mean(row['tokens_seen'] for row in own):,.0f}",
            f"{statistics.mean(seconds):,.0f}" if seconds else "0",
        ]
        lines.append(cells)
    header = ["way"]
    for name in SETS:
        header += [f"{name}: masked accuracy, %", f"{name}: bits a character"]
    return markdown_table([*header, "tokens", "CPU seconds"], lines)


def differences(rows):
    """What replay changes, seed by seed: the masks of the held-out text are those of the seed."""
    lines = []
    for name in SETS:
        bits = {(row["way"], row["seed"]): row[f"eval_{name}_bits_per_character"] for row in rows}
        seeds = sorted({row["seed"] for row in rows})
        for way in ("alone", "replay"):
            against = [bits[way, seed] - bits["none", seed] for seed in seeds]
            lines.append(
                f"- {name}, {WAYS[way]}: {mean_and_deviation(against, '+.3f')} bits a character "
                "against no adaptation"
            )
    return "\n".join(lines)


def means_of_checkpoints(rows):
    """How often the mean of the last three checkpoints was the better one."""
    found = [row["average_last"] for row in rows if row.get("average_last")]
    changes = [
        row["bits_per_character"]["mean"] - row["bits_per_character"]["last"] for row in found
    ]
    kept = sum(row["kept"] == "mean" for row in found)
    return (
        f"`average_last: 3` kept the mean of the last three checkpoints in {kept} of {len(found)} "
        f"runs. Against the last weights it has {mean_and_deviation(changes, '+.4f')} bits a "
        "character, the mean of both held-out sets."
    )


def draw(rows, path, made):
    """Bits a character of every way on both held-out sets."""
    title = "Bits a character on held-out text (fewer is better)"
    figure, panels = figures.subplots(title, columns=2, size=(10, 3.6))
    for panel, name in zip(panels, SETS):
        values = [
            [row[f"eval_{name}_bits_per_character"] for row in rows if row["way"] == way]
            for way in WAYS
        ]
        spreads = [statistics.stdev(each) if len(each) > 1 else 0 for each in values]
        colours = [figures.GREY, figures.OWN, figures.OWN, figures.PALE]
        labels = ["none", "manuals\nalone", "with\nreplay", "anew"]
        figures.bars(panel, labels, list(map(statistics.mean, values)), spreads, 2, colours)
        panel.set_title(f"{name}, held out")
    figures.save(figure, path, made)


def page(found, given):
    """The page below its heading."""
    counts = found["texts"]
    rows = found["runs"]
    commits = ", ".join(sorted({str(row["commit"]) for row in rows if "commit" in row}))
    return f"""
The bundled masked LM (7.6M parameters, trained on WordNet's entries alone) goes on with manual pages for {given.steps} steps of 2,048 tokens. Values of
`recipes/adapt_domain.yaml`, at that size with a peak of {PEAK / 2:g} (half of its own), a new model with {PEAK:g}. Mean ± standard deviation over {given.seeds} seeds of order,
masks and new weights. The runs are of commit {commits}.

{table(rows)}

{differences(rows)}

{means_of_checkpoints(rows)}

Bits a character: masked-LM loss in bits, summed over the masked tokens, by the characters of their text. Held out: {counts["manuals"][1]} pages of programs of
which no page is trained on, {counts["dictionary"][1]} entries of WordNet that no model was trained on. Trained on: {counts["manuals"][0]:,} manual pages (NAME and DESCRIPTION) of the
installed Debian packages, each under its package's licence; replay: {counts["dictionary"][0]:,} entries of WordNet 3.0. Small: it says how these
ways compare at this size, not what the published model would reach.

![Bits a character](adaptation_domain.png)
"""  # noqa: E501


def main(argv=None):
    """Entry point; returns the exit code."""
    options = Options(
        "python -m neobert.benchmarks.adaptation", __doc__.splitlines()[0], (AdaptationArguments,)
    )
    (given,) = options.read(sys.argv[1:] if argv is None else argv)
    found = {"texts": write_texts(Path(given.work)), "steps": given.steps}
    found["runs"] = measure(given)
    made, output = environment(dtype="float32"), Path(given.output)
    title = "Adaptation to a domain: manual pages"
    print(write_result(output, title, made, {"kind": "adaptation", **found}, page(found, given)))
    draw(found["runs"], output.with_name(f"{output.name}.png"), made)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.adaptation", main))
