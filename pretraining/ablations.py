"""`neobert ablations --scale small`: the paper's ladder M0 to M9 (Table 2) at a size for one CPU,
each rung measured the same way.

Every rung is its recipe `recipes/ablations/*.yaml`, made small by one rule (`shrink`), trained by
`neobert pretrain`'s code with several seeds, and measured by (1) a linear probe: logistic
regression on mean-pooled features, sentence sentiment, in place of GLUE, and (2) masked-LM loss and
accuracy on held-out text. A finished run is not run again, and the table has all that --work holds.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from ..common.errors import UserError, listed
from ..common.files import read_json, write_json
from ..common.loading import load_tokenizer
from ..common.outputs import check_result_files, earlier_result
from ..common.results import environment
from ..common.rows import read_rows
from ..modeling_neobert import NeoBERTForMaskedLM
from . import pretrain
from .ablation_data import COLUMNS, make_data, some
from .ablation_measures import majority, measure
from .ablation_recipes import RUNGS, rung_values
from .ablation_report import write_report
from .options import OPTIONS


def run_rung(name, seed, scale, paths, out, heldout, probe):
    """Trains one rung, or continues it, and measures it."""
    values = rung_values(name, scale, paths, out, seed)
    pretrain.execute(pretrain.run_of(values))
    model = NeoBERTForMaskedLM.from_pretrained(out, dtype=torch.float32)
    trained = read_json(out / "result.json")
    row = {
        "rung": name,
        "seed": seed,
        **{key: trained[key] for key in ("steps", "parameters", "tokens_seen", "cpu_seconds")},
    }
    return {
        **row,
        **measure(model, load_tokenizer(values["tokenizer"]), heldout, probe, scale.length),
    }


def finished_runs(folder):
    """What was measured in a --work, seed by seed in the ladder's order."""
    rows = [read_json(path) for path in Path(folder).glob("m?*_seed*/measured.json")]
    return sorted(
        (row for row in rows if row["rung"] in RUNGS),
        key=lambda row: (row["seed"], RUNGS.index(row["rung"])),
    )


def check_ladder(arguments, todo):
    """One --work and one report hold one ladder: a scale and the texts. A report loses no run.
    Returns {"scale", "texts"}.

    Raises:
        UserError: --work or --output holds another ladder, or files of others.
    """
    work, report = Path(arguments.work), arguments.report.with_name(f"{arguments.report.name}.json")
    texts = {name: getattr(arguments, name) for name in COLUMNS}
    texts = {
        name: [Path(value).name, Path(value).stat().st_size] if value else None
        for name, value in texts.items()
    }
    now = {"scale": dataclasses.asdict(arguments.sizes), "texts": texts}
    flat = {**now["scale"], **texts}
    for path, option, pages in (
        (work / "ladder.json", "--work", ()),
        (report, "--output", (f"{report.stem}.md", f"{report.stem}.png")),
    ):
        before = earlier_result(path, "scale") or {}
        check_result_files(path.parent, "ablations", before, path.name, *pages)
        held = {**before.get("scale", {}), **before.get("texts", {})}
        if changed := [
            f"{name} {held[name]}, now {flat.get(name)}"
            for name in held
            if held[name] != flat.get(name)
        ]:
            raise UserError(
                f"{path.parent} holds a ladder with {listed(changed)}; give the same, or another "
                f"{option}"
            )
    kept = {*todo, *((row["rung"], row["seed"]) for row in finished_runs(work))}
    lost = [
        f"{row['rung']} seed {row['seed']}"
        for row in before.get("runs", [])
        if (row["rung"], row["seed"]) not in kept
    ]
    if lost:
        raise UserError(
            f"{report} holds {lost[0]}, which {work} does not; give its --work, or another --output"
        )
    return now


def main(argv=None):
    """Entry point of `neobert ablations`; returns the exit code."""
    (arguments,) = OPTIONS["ablations"].read(sys.argv[1:] if argv is None else argv)
    scale, work = arguments.sizes, Path(arguments.work)
    todo = [(name, seed) for seed in range(arguments.seeds) for name in arguments.rung_names]
    ladder = check_ladder(arguments, todo)
    write_json(work / "ladder.json", ladder)
    paths = make_data({name: getattr(arguments, name) for name in COLUMNS}, scale, work / "data")
    heldout = [row["text"] for _, row in read_rows(paths["heldout"], COLUMNS["heldout"])]
    probe = some([row for _, row in read_rows(paths["probe"], COLUMNS["probe"])], scale.probe_texts)
    for name, seed in tqdm(todo, desc="ladder", unit="run"):
        out = work / f"{name}_seed{seed}"
        if not (out / "measured.json").is_file():
            write_json(
                out / "measured.json", run_rung(name, seed, scale, paths, out, heldout, probe)
            )
    labels = [row["label"] for row in probe]
    ladder |= {
        "probe_majority": majority(labels),
        "probe_test_texts": len(labels) - len(labels) * 3 // 4,
    }
    print(write_report(arguments.report, finished_runs(work), ladder, environment(dtype="float32")))
    return 0
