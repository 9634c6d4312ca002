"""`make gpu`: all that is to be measured on a GPU, step by step, in under 9 minutes on an H100. See
benchmarks/gpu.sh for how to call it.

Each step runs in a process of its own with a time limit, so that neither a failure nor a broken
CUDA context ends the rest. What a step has measured is written at once to gpu.json and gpu.md in
the output folder. Called again, finished steps are left out, and the others go on.
"""

import json
import multiprocessing
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.arguments import Arguments, Options, option
from ..common.commands import guarded
from ..common.errors import UserError, one_line
from ..common.outputs import check_folder
from ..common.results import environment, markdown_table, write_result
from .gpu_steps import STEPS, targets


LEAST_SECONDS = 20  # a step is not begun with less time than this


@dataclass
class GpuArguments(Arguments):
    """Options of `python -m neobert.benchmarks.gpu`."""

    output: str = option("results/gpu", "folder for gpu.json, gpu.md and the tests' log")
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


class Record:
    """gpu.json and gpu.md: what each step has found. Only one process writes at a time.

    Attributes:
        steps: {name: {"state": "done", "failed" or "partial", "seconds", "error", "found"}}.
    """

    def __init__(self, folder, rehearsal):
        self.path, self.rehearsal = Path(folder) / "gpu", rehearsal
        self.environment, self.steps = None, {}
        file = self.path.with_name("gpu.json")
        if file.is_file():
            try:
                data = json.loads(file.read_text(encoding="utf-8"))
                self.steps = data["steps"]
                before = data["rehearsal"]
                self.environment = data["environment"]
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{file} is not a result of this command; give another --output"
                ) from None
            if before != rehearsal:
                was = "a rehearsal" if before else "measured on a GPU"
                raise UserError(f"{file} is {was}; give another --output, or remove it")

    def found(self, name):
        """What an earlier call of a step has measured, or None."""
        return self.steps.get(name, {}).get("found")

    def update(self, name, **changes):
        """Changes a step's entry and writes both files."""
        self.steps[name] = {"state": "partial", **self.steps.get(name, {}), **changes}
        title = "GPU: a rehearsal on the CPU, not a measurement" if self.rehearsal else "GPU"
        data = {"rehearsal": self.rehearsal, "steps": self.steps}
        write_result(self.path, title, self.environment or environment(), data, self.page())

    def page(self):
        """The tables of all steps, the targets first."""
        states = [
            [
                name,
                self.steps[name]["state"],
                f"{self.steps[name].get('seconds', 0):.0f}",
                self.steps[name].get("error", ""),
            ]
            for name in STEPS
            if name in self.steps
        ]
        nothing = "The figures of a rehearsal mean nothing.\n\n" if self.rehearsal else ""
        parts = [
            "## Targets",
            nothing + targets(self.steps),
            "## Steps",
            markdown_table(["step", "state", "seconds", "error"], states),
        ]
        for name, step in STEPS.items():
            if self.found(name):
                parts += [f"## {step.title}", step.page(self.found(name))]
        return "\n\n".join(part.strip() for part in parts)


def run_step(name, folder, rehearse):
    """A step, in its own process: what it finds goes to the record on its way."""
    from .gpu_rehearsal import pretended_gpu

    record = Record(folder, rehearse)
    with pretended_gpu() if rehearse else nullcontext():
        record.environment = environment(cuda=torch.version.cuda, dtype="bfloat16", device="cuda")
        try:
            STEPS[name].run(
                record.found(name),
                lambda found: record.update(name, found=found),
                Path(folder),
                rehearse,
            )
        except Exception as error:
            where = traceback.format_exc()[-4000:]
            record.update(
                name,
                state="failed",
                error=f"{type(error).__name__}: {one_line(error, 300)}",
                traceback=where,
            )
            sys.exit(1)
        record.update(name, state="done", error="", traceback="")


def run_guarded(name, folder, rehearse, limit):
    """Runs a step in a process of its own, for at most `limit` seconds.

    Returns:
        whether it is done.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=run_step, args=(name, str(folder), rehearse)
    )
    start = time.perf_counter()
    process.start()
    try:
        process.join(limit)
        late = process.is_alive()
    finally:
        if process.is_alive():
            process.terminate()
            process.join(10)
            process.kill()
            process.join()
    record = Record(folder, rehearse)
    entry = record.steps.get(name, {})
    ended = {"state": entry.get("state", "failed"), "error": entry.get("error", "")}
    if late:
        ended = {"state": "partial", "error": f"stopped after {limit:.0f} s"}
    elif process.exitcode and ended["state"] != "failed":
        ended = {"state": "failed", "error": f"the process ended with exit code {process.exitcode}"}
    record.update(name, seconds=entry.get("seconds", 0) + time.perf_counter() - start, **ended)
    return ended["state"] == "done"


def main(argv=None):
    """Runs the steps that are not done; returns 0 when all of them are, else 1."""
    start = time.perf_counter()
    argv = sys.argv[1:] if argv is None else argv
    (given,) = Options("python -m neobert.benchmarks.gpu", __doc__, (GpuArguments,)).read(argv)
    if not given.rehearse and not torch.cuda.is_available():
        raise UserError(
            "torch sees no GPU here; --rehearse runs the same on the CPU, with stand-ins"
        )
    check_folder(given.output, "output")
    Path(given.output).mkdir(parents=True, exist_ok=True)
    done = {
        name
        for name, step in Record(given.output, given.rehearse).steps.items()
        if step["state"] == "done"
    }
    for name in given.steps:
        left = (given.seconds or (3600 if given.rehearse else 520)) - (time.perf_counter() - start)
        if name in done:
            print(f"{name}: done before", flush=True)
        elif left < LEAST_SECONDS:
            print(f"{name}: left for the next call, {left:.0f} s remain", flush=True)
        else:
            print(f"{name}: {STEPS[name].title}", flush=True)
            # A rehearsal may run on a small, busy machine.
            finished = run_guarded(
                name,
                given.output,
                given.rehearse,
                left if given.rehearse else min(STEPS[name].limit, left),
            )
            done |= {name} if finished else set()
            entry = Record(given.output, given.rehearse).steps[name]
            print(
                f"{name}: {entry['state']} after {entry.get('seconds', 0):.0f} s "
                f"{entry.get('error', '')}".rstrip(),
                flush=True,
            )
    record = Record(given.output, given.rehearse)
    print(f"\n{targets(record.steps)}\n{Path(given.output) / 'gpu.md'}")
    return 0 if done >= set(given.steps) else 1


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.gpu", main))
