"""Result files: every figure is written by a script, together with the environment it was measured in."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from .files import redacted_arguments


_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "sentence-transformers", "mteb", "flash-attn", "numpy")


def environment(**more):
    """What a reader needs to repeat a measurement: command, commit, date, hardware, threads, versions; `more` is added as given."""
    return {
        "command": _command(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        **more,
    }


def hardware():
    """One line: processor with its cores, and the GPUs."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    parts = [f"{name}, {os.cpu_count()} cores"]
    parts += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return "; ".join(parts)


def _command():
    program = Path(sys.argv[0]).name
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in (None, "__main__"):
        program = f"python -m {spec.name.removesuffix('.__main__')}"
    elif program.endswith(".py"):
        folder = Path(sys.argv[0]).resolve().parent.name
        program = f"python {folder}/{program}" if folder in ("benchmarks", "scripts", "examples") else f"python {program}"
    return " ".join([program, *map(shlex.quote, redacted_arguments(sys.argv[1:]))])


def _commit():
    def git(*arguments):
        run = subprocess.run(["git", *arguments], cwd=Path(__file__).resolve().parent.parent, capture_output=True, text=True, timeout=10)
        return run.stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/*.py")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit + ("-dirty" if changed else "") or None


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def markdown_table(header, rows):
    """A markdown table; cells are written with str(), None as an empty cell."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines) + "\n"
