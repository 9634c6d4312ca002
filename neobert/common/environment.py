"""Environment of a measurement: command, commit, hardware and versions, stored with every result.

record = environment(dtype="float32")
environment_line(record)        # "`neobert glue ...`, commit 0a1b2c3, 2026-01-31 12:00 UTC, ..."
"""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .constants import PACKAGE
from .files import redacted_arguments


_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "sentence-transformers",
    "mteb",
    "flash-attn",
    "triton",
    "numpy",
)

# Vector and matrix units that results depend on: {name in a result: flags of /proc/cpuinfo, any of
# which stands for the unit}.
_UNITS = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "AVX512-BF16": ("avx512_bf16",),
    "AVX512-FP16": ("avx512_fp16",),
    "AMX-BF16": ("amx_bf16",),
    "AMX-INT8": ("amx_int8",),
    "AMX-FP16": ("amx_fp16",),
    "SVE": ("sve",),
    "dot product": ("asimddp",),
    "i8mm": ("i8mm",),
    "bf16": ("bf16",),
}


def environment(packages: Iterable[str] = (), **more: Any) -> dict[str, Any]:
    """Return what a reader needs to repeat a measurement, as JSON values.

    Args:
        packages: Additional packages whose versions are recorded.
        more: Additional fields, such as the dtype or the attention implementation.
    """
    # The import takes seconds, and code that only reads results does not need torch.
    import torch

    versions = {name: _version(name) for name in (*_PACKAGES, *packages)}
    return {
        "command": _command(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
        **more,
    }


def environment_line(environment: Mapping[str, Any]) -> str:
    """Return an environment as one line of markdown. Fields that are missing are omitted."""
    fields = dict(environment)
    command = fields.pop("command", None)
    commit = fields.pop("commit", None)
    date = fields.pop("date", None)
    machine = fields.pop("hardware", None)
    threads = fields.pop("threads", None)
    versions = fields.pop("versions", {})
    fields.pop("python", None)

    # An installed package has no commit, and older results lack some of the fields.
    parts = [command and f"`{command}`", commit and f"commit {commit}", date, machine]
    if threads:
        parts.append(f"{threads} thread{'s' if threads != 1 else ''}")

    for name, value in fields.items():
        if isinstance(value, dict):
            value = [f"{key} {item}" for key, item in value.items()]
        if isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        if value not in (None, ""):
            parts.append(f"{name.replace('_', ' ')} {value}")

    parts += [f"{name} {version}" for name, version in versions.items()]
    return ", ".join(part for part in parts if part)


def hardware() -> str:
    """Return one line with the processor's model, cores, vector and matrix units, and the GPUs."""
    import torch

    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    family = _cpuinfo("cpu family")
    model = _cpuinfo("model")
    if family and model:
        # The names of rented machines are often unspecific: "Intel Xeon Processor".
        name = f"{name} (family {family}, model {model})"

    processor = ", ".join([name, f"{os.cpu_count()} cores", *processor_units()])
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return "; ".join([processor, *gpus])


def processor_units() -> list[str]:
    """Return the vector and matrix units of the processor, such as AVX-512, VNNI or AMX-BF16.

    The list is empty on systems without /proc/cpuinfo. A unit may exist that is not in the list:
    many kernels do not report AMX-FP16.
    """
    flags = {*_cpuinfo("flags").split(), *_cpuinfo("Features").split()}
    return [name for name, any_of in _UNITS.items() if flags & set(any_of)]


def shorten_path(argument: str) -> str:
    """Return an argument of the command line with an absolute path cut to its last two components.

    Results contain no local paths then. `--model=/home/somebody/models/encoder` becomes
    `--model=models/encoder`.
    """
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute() or len(path.parts) <= 2:
        return argument
    return f"{option}{equals}{Path(*path.parts[-2:])}"


def _cpuinfo(field: str) -> str:
    """Return the first value of a field of /proc/cpuinfo, or ""."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _command() -> str:
    """Return the command line of this process, without secrets and local paths."""
    program = Path(sys.argv[0]).name
    # `python -m package.module` replaces sys.argv[0] by the path of a file.
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name not in (None, "__main__"):
        program = f"python -m {spec.name.removesuffix('.__main__')}"
    elif program.endswith(".py"):
        path = Path(sys.argv[0]).resolve()
        if path.is_relative_to(PACKAGE.parent):
            program = str(path.relative_to(PACKAGE.parent))
        program = f"python {program}"

    # Results are published: they must not contain tokens or home directories.
    arguments = [shorten_path(argument) for argument in redacted_arguments(sys.argv[1:])]
    return " ".join([program, *map(shlex.quote, arguments)])


def _commit() -> str | None:
    """Return the commit of the sources, with "-dirty" if Python files differ from the commit.

    The variable NEOBERT_COMMIT contains the commit of a copy without git.
    """
    try:
        # An installed package may be in an environment inside of another repository.
        is_tracked = bool(_git("ls-files", "__init__.py"))
        commit = _git("rev-parse", "--short", "HEAD") if is_tracked else ""
        # A changed page or recipe does not change the code that was measured.
        status = ("status", "--porcelain", "--untracked-files=no", "--", ":/*.py")
        changed_files = _git(*status) if is_tracked else ""
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
        changed_files = ""
    suffix = "-dirty" if changed_files else ""
    return commit + suffix or os.environ.get("NEOBERT_COMMIT") or None


def _git(*arguments: str) -> str:
    """Return the output of a git command in the sources."""
    run = subprocess.run(
        ["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, timeout=10
    )
    return run.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
