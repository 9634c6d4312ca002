"""`neobert ablations --scale small`: the paper's ladder M0 to M9 (Table 2) at a size for one CPU, each rung measured the same way.

Every rung is its recipe `recipes/ablations/*.yaml`, made small by one rule (`shrink`), trained by `neobert pretrain`'s code with several seeds, and
measured by (1) a linear probe: logistic regression on mean-pooled features, sentence sentiment, in place of GLUE, and (2) masked-LM loss and
accuracy on held-out text. A finished run is not run again, and the table has all that --work holds.
"""

import dataclasses
import statistics
import sys
from pathlib import Path

from ..common.errors import require


require("train", "accelerate", "datasets")

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from ..common.errors import UserError  # noqa: E402
from ..common.files import read_json, write_json  # noqa: E402
from ..common.loading import load_tokenizer  # noqa: E402
from ..common.outputs import check_result_files, earlier_result  # noqa: E402
from ..common.results import environment  # noqa: E402
from ..common.rows import read_rows  # noqa: E402
from ..modeling_neobert import NeoBERTForMaskedLM  # noqa: E402
from . import pretrain  # noqa: E402
from .ablation_data import COLUMNS, make_data, some  # noqa: E402
from .ablation_measures import majority, measure  # noqa: E402
from .ablation_recipes import EQUAL_SECONDS, RUNGS, rung_values  # noqa: E402
from .ablation_report import write_report  # noqa: E402
from .options import OPTIONS  # noqa: E402


def run_ladder(arguments):
    """Trains and measures every rung and seed.

    Returns:
        list of dicts (rung, seed, steps, tokens_seen, cpu_seconds, parameters and the measurements) of all finished runs in --work, the majority
        class's accuracy, test sentences of the probe.
    """
    scale, folder = arguments.sizes, Path(arguments.work)
    todo = [(name, seed) for seed in range(arguments.seeds) for name in arguments.rung_names]
    # What takes as long as M9 can only be known when M9 and the same method at M9's tokens are done.
    todo.sort(key=lambda run: run[0].endswith(EQUAL_SECONDS))
    _check_same_ladder(arguments, todo)
    paths = make_data({name: getattr(arguments, name) for name in COLUMNS}, scale, folder / "data")
    heldout = [row["text"] for _, row in read_rows(paths["heldout"], COLUMNS["heldout"])]
    probe = some([row for _, row in read_rows(paths["probe"], COLUMNS["probe"])], scale.probe_texts)
    for name, seed in tqdm(todo, desc="ladder", unit="run"):
        out = folder / f"{name}_seed{seed}"
        if not (out / "measured.json").is_file():
            steps = equal_steps(name, scale, finished_runs(folder))
            row = run_rung(name, seed, dataclasses.replace(scale, steps=steps), paths, out, heldout, probe)
            write_json(out / "measured.json", row)
    return finished_runs(folder), majority([row["label"] for row in probe]), len(probe) - len(probe) * 3 // 4


def run_rung(name, seed, scale, paths, out, heldout, probe):
    """Trains one rung, or continues it, and measures it."""
    values = rung_values(name, scale, paths, out, seed)
    pretrain.execute(pretrain.run_of(values))
    model = NeoBERTForMaskedLM.from_pretrained(out, dtype=torch.float32)
    trained = read_json(out / "result.json")
    row = {"rung": name, "seed": seed, **{key: trained[key] for key in ("steps", "parameters", "tokens_seen", "cpu_seconds")}}
    return {**row, **measure(model, load_tokenizer(values["tokenizer"]), heldout, probe, scale.length)}


def equal_steps(name, scale, runs):
    """Steps of a run: the scale's, or for a rung at equal CPU seconds as many as take those of M9."""
    if not name.endswith(EQUAL_SECONDS):
        return scale.steps
    seconds = {rung: [run["cpu_seconds"] for run in runs if run["rung"] == rung] for rung in ("m9", name.removesuffix(EQUAL_SECONDS))}
    for rung, found in seconds.items():
        if not found:
            raise UserError(f"{name} needs finished runs of {rung}, whose CPU seconds it is compared with; add it to --rungs")
    m9, method = map(statistics.mean, seconds.values())
    return max(2, round(scale.steps * m9 / method))


def finished_runs(folder):
    """What was measured in a --work, seed by seed in the ladder's order."""
    rows = [read_json(path) for path in Path(folder).glob("m?*_seed*/measured.json")]
    return sorted(rows, key=lambda row: (row["seed"], RUNGS.index(row["rung"])))


def _check_same_ladder(arguments, todo):
    """Finished runs are not run again, so --work belongs to one scale and one set of texts; so does the report, which must lose no run."""
    folder, report = Path(arguments.work), arguments.report.with_name(f"{arguments.report.name}.json")
    texts = {name: getattr(arguments, name) for name in COLUMNS}
    texts = {name: [Path(value).name, Path(value).stat().st_size] if value else None for name, value in texts.items()}
    now = {"scale": dataclasses.asdict(arguments.sizes), "texts": texts}
    for path, given, pages in ((folder / "ladder.json", "--work", ()), (report, "--output", (f"{report.stem}.md", f"{report.stem}.png"))):
        before = earlier_result(path, "scale") or {}
        check_result_files(path.parent, "ablations", before, path.name, *pages)
        for group, values in now.items():
            for name, value in values.items():
                if before.get(group, values).get(name) != value:
                    raise UserError(
                        f"{path.parent} holds a ladder with {name} {before[group].get(name)}, now {value}; give the same, or another {given}"
                    )
    kept = {*todo, *((row["rung"], row["seed"]) for row in finished_runs(folder))}
    lost = [f"{row['rung']} seed {row['seed']}" for row in before.get("runs", []) if (row["rung"], row["seed"]) not in kept]
    if lost:
        raise UserError(f"{report} holds {lost[0]}, which {folder} does not; give its --work, or another --output")
    write_json(folder / "ladder.json", now)


def main(argv=None):
    """Entry point of `neobert ablations`; returns the exit code."""
    require("eval", "sklearn", "matplotlib")
    argv = sys.argv[1:] if argv is None else argv
    (arguments,) = OPTIONS["ablations"].read(argv)
    rows, baseline, probe_tests = run_ladder(arguments)
    ladder = read_json(Path(arguments.work) / "ladder.json")
    env = environment(dtype="float32")
    print(write_report(arguments.report, rows, {**ladder, "probe_majority": baseline, "probe_test_texts": probe_tests}, env))
    return 0
