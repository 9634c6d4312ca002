"""`make gpu`: all that is to be measured on a GPU, step by step, in under 9 minutes on an H100. See
benchmarks/gpu.sh for how to call it.

Each step runs in a process of its own with a time limit, so that neither a failure nor a broken
CUDA context ends the rest. What a step has measured is written at once to STEP.json in the output
folder, and gpu.md has the tables of all. Called again, finished steps are left out.
"""

import json
import multiprocessing
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..common.arguments import Arguments, Options, option
from ..common.commands import guarded
from ..common.constants import ROOT
from ..common.errors import UserError, one_line
from ..common.folders import new_file
from ..common.results import environment, environment_line, markdown_table
from ..throughput import command as throughput
from ..throughput.options import ThroughputArguments
from . import memory, profile_forward, training
from .measuring import mib


LEAST_SECONDS = 20  # a step is not begun with less time than this
# Files with tests marked `gpu`, one by one: collecting the others fails where datasets is not
# installed.
GPU_TESTS = ("tests/test_attention.py", "tests/test_packing.py")
# Padded tokens of a batch, and what a rehearsal on the CPU is cut to.
TOKENS, TINY_TOKENS = 131_072, 256
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "intermediate_size": 96,
}


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        title: heading of its part of the page.
        limit: seconds after which it is stopped; what it found by then is kept.
        run: function of (save(found), output folder, whether it is a rehearsal).
        page: function of what was found; markdown.
    """

    title: str
    limit: float
    run: Callable
    page: Callable


# ------------------------------------------------------------------------------------------------
# steps


def run_tests(save, folder, rehearse):
    """`pytest -m gpu`, a process for each file, so that a broken CUDA context ends one file alone;
    the log is in gpu_tests.log."""
    found = {}
    with open(folder / "gpu_tests.log", "a", encoding="utf-8") as log:
        for name in GPU_TESTS:
            options = "-m pytest -q -m gpu -p no:cacheprovider --tb=short".split()
            run = subprocess.run(
                [sys.executable, *options, name], cwd=ROOT, capture_output=True, text=True
            )
            log.write(f"$ {name}\n{run.stdout}{run.stderr}\n")
            found[name] = {
                "code": run.returncode,
                "summary": (run.stdout.strip().splitlines() or [""])[-1],
                "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, flags=re.M),
            }
            save(found)
    # 5: all are skipped without a GPU
    passed = (0, 5) if rehearse else (0,)
    if broken := [name for name in GPU_TESTS if found[name]["code"] not in passed]:
        raise RuntimeError(f"tests failed in {', '.join(broken)}, see gpu_tests.log")


def page_of_tests(found):
    lines = [[name, tests["summary"], ", ".join(tests["failed"])] for name, tests in found.items()]
    return markdown_table(["file", "summary", "failed"], lines)


def throughput_step(sets, implementations):
    """`run` of a step that measures throughput; what it finds are rows of throughput.json."""

    def run(save, folder, rehearse):
        arguments = ThroughputArguments(
            output=str(folder),
            preset="gpu",
            device="cuda",
            models=["neobert", "modernbert-base"],
            implementations=list(implementations),
            sets=list(sets),
            max_batch=8 if rehearse else None,
            max_tokens=TINY_TOKENS if rehearse else TOKENS,
            repeats=2 if rehearse else 7,
            warmup=2,
        )
        rows = throughput.measure(arguments, TINY if rehearse else None, lambda rows: save(rows))
        for row in rows:
            if row.get("error"):
                raise RuntimeError(
                    f"{row['model']}/{row['implementation']} at {row['set']}: {row['error']}"
                )

    return run


def page_of_throughput(rows):
    implementation = "sdpa" if any(row["implementation"] == "sdpa" for row in rows) else "compiled"
    return (
        f"{throughput.row_table(rows)}\nNeoBERT ({implementation}) over:\n\n"
        f"{throughput.ratio_table(rows, implementation)}\n{throughput.NOTE}"
    )


def run_memory(save, folder, rehearse):
    """Peak reserved memory of one forward beyond the weights, at the same batch."""
    rows = []
    for model in ("neobert", "modernbert-base"):
        for length in (4096, 8192):
            tokens, texts = (length // 32, 1) if rehearse else (length, 8)
            case = memory.Case(model, "sdpa", tokens, texts, 0, "cuda", torch.get_num_threads())
            size = case.measure(TINY if rehearse else None)
            rows.append({"model": model, "length": length, "texts": texts, "bytes": size})
            save(rows)


def page_of_memory(rows):
    lines = [[row["model"], f"{row['length']:,}", row["texts"], mib(row["bytes"])] for row in rows]
    return markdown_table(["model", "length", "texts", "MiB above the weights (reserved)"], lines)


def run_profile(save, folder, rehearse):
    """Where one packed forward spends its time: 16 x 2,048 tokens, and 64 short texts, which are
    bound by the host."""
    found = {}
    for name, texts in (("2048", 16), ("short", 64)):
        layers, texts = (TINY["num_hidden_layers"], 2) if rehearse else (28, texts)
        options = profile_forward.ProfileArguments(
            set=name, texts=texts, layers=layers, device="cuda", dtype="bfloat16", repeats=5
        )
        result = profile_forward.profile_forward(options, TINY if rehearse else None)
        found[name] = {**result, "options": asdict(options)}
        save(found)


def page_of_profile(found):
    pages = [
        profile_forward.page(result, profile_forward.ProfileArguments(**result["options"]))
        for result in found.values()
    ]
    return "\n\n".join(pages)


def run_training(save, folder, rehearse):
    """Masked-LM steps in bf16 autocast: short texts packed against padded, then packed at 1,024 and
    4,096 tokens."""
    rows = []
    shape = {"hidden": 768, "layers": 28, "tokens": 16_384, "steps": 5}
    if rehearse:
        shape = {"hidden": 64, "layers": 1, "tokens": 32, "steps": 1}
    for name in ("short", "1024", "4096"):
        for way in ("packed", "padded") if name == "short" else ("packed",):
            case = training.Steps(way, name, "bfloat16", "cuda", torch.get_num_threads(), **shape)
            rows.append(training.summary(case, [case.measure()]))
            save(rows)


STEPS = {
    "tests": Step("Tests marked gpu", 170, run_tests, page_of_tests),
    "long": Step(
        "4,096 and 8,192 tokens, no padding",
        100,
        throughput_step(("4096", "8192"), ("sdpa",)),
        page_of_throughput,
    ),
    "variable": Step(
        "Variable lengths, packed against padded",
        110,
        throughput_step(("normal-256", "normal-4096", "short"), ("sdpa", "padded")),
        page_of_throughput,
    ),
    "lengths": Step(
        "512 to 2,048 tokens, no padding",
        90,
        throughput_step(("512", "1024", "2048"), ("sdpa",)),
        page_of_throughput,
    ),
    "compiled": Step(
        "Compiled blocks",
        150,
        throughput_step(("2048", "4096", "8192"), ("compiled",)),
        page_of_throughput,
    ),
    "memory": Step("Memory", 60, run_memory, page_of_memory),
    "profile": Step("Profile of one packed forward", 80, run_profile, page_of_profile),
    "training": Step("Training steps", 100, run_training, training.table),
}


# ------------------------------------------------------------------------------------------------
# targets and the page


def targets(found):
    """Markdown table of the targets with what was measured, empty where nothing was.

    Args:
        found: {step: what it found}.
    """
    rows = [
        row
        for name in ("long", "variable", "lengths", "compiled")
        for row in found.get(name) or ()
        if not row.get("error")
    ]

    def best(name, model, figure):
        """The highest figure of a model on a set, or None."""
        every = [row[figure] for row in rows if (row["set"], row["model"]) == (name, model)]
        return max(every, default=None)

    def over(ours, theirs):
        return None if ours is None or theirs is None else ours / theirs

    lines = []
    for name, least in (("4096", 1.47), ("8192", 1.91)):
        speeds = [
            best(name, model, "tokens_per_second") for model in ("neobert", "modernbert-base")
        ]
        what = f"fixed {int(name):,} over ModernBERT base, both at their best"
        lines.append((what, least, over(*speeds)))
    for name in ("2048", "4096"):
        what = f"share of the bf16 matrix-product rate at {int(name):,}"
        lines.append((what, 0.5, best(name, "neobert", "share_of_gemm")))
    faster = throughput.ratios(rows)
    for name in ("normal-256", "normal-4096", "short"):
        value = faster.get(name, {}).get("neobert/padded", {}).get("ratio")
        lines.append((f"{name}: packed over padded", 1.4, value))
    table = []
    for what, least, value in lines:
        reached = None if value is None else "yes" if value >= least else "no"
        table.append([what, least, None if value is None else f"{value:.2f}", reached])
    peaks = {(row["model"], row["length"]): row["bytes"] for row in found.get("memory") or ()}
    for length in (4096, 8192):
        value = over(peaks.get(("neobert", length)), peaks.get(("modernbert-base", length)))
        reached = None if value is None else "yes" if value <= 1.8 else "no"
        what = f"peak memory above the weights over ModernBERT base, {length:,}"
        table.append([what, "at most 1.8", None if value is None else f"{value:.2f}", reached])
    return markdown_table(["bf16", "target", "measured", "reached"], table)


def read_steps(folder):
    """{step: what `run_step` has written of it}."""
    files = {name: folder / f"{name}.json" for name in STEPS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def write_page(folder, rehearsal):
    """Writes gpu.md from what the steps have left; returns the table of targets."""
    steps = read_steps(folder)
    title = "GPU: a rehearsal on the CPU, not a measurement" if rehearsal else "GPU"
    reached = targets({name: step["found"] for name, step in steps.items()})
    lines = [
        [name, step["state"], f"{step.get('seconds', 0):.0f}", step.get("error")]
        for name, step in steps.items()
    ]
    parts = [f"# {title}", *(environment_line(s["environment"]) for s in list(steps.values())[:1])]
    parts += ["## Targets", reached, "## Steps"]
    parts.append(markdown_table(["step", "state", "seconds", "error"], lines))
    for name, step in steps.items():
        if step["found"]:
            parts += [f"## {STEPS[name].title}", STEPS[name].page(step["found"])]
    with new_file(folder / "gpu.md") as file:
        file.write(("\n\n".join(part.strip() for part in parts) + "\n").encode())
    return reached


# ------------------------------------------------------------------------------------------------
# the command


def run_step(name, folder, rehearse):
    """A step, in its own process: what it finds goes to STEP.json on its way."""
    from .gpu_rehearsal import pretended_gpu

    start, record = time.perf_counter(), {"state": "partial", "rehearsal": rehearse, "found": None}

    def write(**changes):
        record.update(changes, seconds=time.perf_counter() - start)
        with new_file(folder / f"{name}.json") as file:
            file.write(json.dumps(record, indent=1).encode())

    with pretended_gpu() if rehearse else nullcontext():
        made = environment(cuda=torch.version.cuda, dtype="bfloat16", device="cuda")
        write(environment=made, error="stopped before its end")
        try:
            STEPS[name].run(lambda found: write(found=found), folder, rehearse)
        except Exception as error:
            write(state="failed", error=f"{type(error).__name__}: {one_line(error, 300)}")
            traceback.print_exc()
            return
    write(state="done", error=None)


@dataclass
class GpuArguments(Arguments):
    """Options of `python -m neobert.benchmarks.gpu`."""

    output: str = option("results/gpu", "folder for gpu.md, a JSON file a step, the tests' log")
    steps: list[str] = option(
        help="in this order", default_factory=lambda: list(STEPS), choices=tuple(STEPS)
    )
    seconds: float | None = option(
        None,
        "for all steps together, by default 520, in a rehearsal 3,600; the next call does what is "
        "left",
        above=0,
    )
    rehearse: bool = option(
        False, "on the CPU, with a tiny configuration and stand-ins for what only CUDA has"
    )


def main(argv=None):
    """Runs the steps that are not done; returns 0 when all of them are, else 1."""
    (options,) = Options("python -m neobert.benchmarks.gpu", __doc__, (GpuArguments,)).read(
        sys.argv[1:] if argv is None else argv
    )
    if not options.rehearse and not torch.cuda.is_available():
        raise UserError(
            "torch sees no GPU here; --rehearse runs the same on the CPU, with stand-ins"
        )
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    for name, step in read_steps(folder).items():
        if step["rehearsal"] != options.rehearse:
            was = "a rehearsal" if step["rehearsal"] else "measured on a GPU"
            raise UserError(f"{folder / name}.json is {was}; give another --output, or remove it")
    end = time.perf_counter() + (options.seconds or (3600 if options.rehearse else 520))
    for name in options.steps:
        left = end - time.perf_counter()
        if read_steps(folder).get(name, {}).get("state") == "done":
            print(f"{name}: done before", flush=True)
            continue
        if left < LEAST_SECONDS:
            print(f"{name}: left for the next call, {left:.0f} s remain", flush=True)
            continue
        print(f"{name}: {STEPS[name].title}", flush=True)
        process = multiprocessing.get_context("spawn").Process(
            target=run_step, args=(name, folder, options.rehearse)
        )
        process.start()
        # A rehearsal may run on a small, busy machine.
        process.join(left if options.rehearse else min(STEPS[name].limit, left))
        process.kill()
        process.join()
        step = read_steps(folder).get(name, {"state": "failed", "error": "it wrote nothing"})
        error = step.get("error") or ""
        print(f"{name}: {step['state']} after {step.get('seconds', 0):.0f} s {error}", flush=True)
        write_page(folder, options.rehearse)
    steps = read_steps(folder)
    print(f"\n{write_page(folder, options.rehearse)}\n{folder / 'gpu.md'}")
    done = all(steps.get(name, {}).get("state") == "done" for name in options.steps)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.gpu", main))
