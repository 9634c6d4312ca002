"""Result files: every figure is written by a script, together with the environment it was measured
in."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from .constants import PACKAGE
from .errors import UserError
from .files import json_text, read_json, redacted_arguments, write_text


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

# What a result depends on beside the processor's name: (word in a result, flags of /proc/cpuinfo of
# which any one means it).
_UNITS = (
    ("AVX2", ("avx2",)),
    ("AVX-512", ("avx512f",)),
    ("VNNI", ("avx512_vnni", "avx_vnni")),
    ("AVX512-BF16", ("avx512_bf16",)),
    ("AVX512-FP16", ("avx512_fp16",)),
    ("AMX-BF16", ("amx_bf16",)),
    ("AMX-INT8", ("amx_int8",)),
    ("AMX-FP16", ("amx_fp16",)),
    ("SVE", ("sve",)),
    ("dot product", ("asimddp",)),
    ("i8mm", ("i8mm",)),
    ("bf16", ("bf16",)),
)


def environment(packages=(), **more):
    """What a reader needs to repeat a measurement: command, commit, date, hardware, threads,
    versions.

    Args:
        packages: distributions whose versions are told beside the usual ones.
        more: added as given: dtype, attention, settings.
    """
    import torch  # seconds, which the reading of results does without

    return {
        "command": _command(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {
            name: version for name in (*_PACKAGES, *packages) if (version := _version(name))
        },
        **more,
    }


def environment_line(environment):
    """One line of markdown: what was run, where, with what. `environment` may lack any field."""
    environment = dict(environment)
    command, commit = environment.pop("command", None), environment.pop("commit", None)
    date, machine = environment.pop("date", None), environment.pop("hardware", None)
    threads, versions = environment.pop("threads", None), environment.pop("versions", {})
    environment.pop("python", None)
    parts = [command and f"`{command}`", commit and f"commit {commit}", date, machine]
    parts.append(threads and f"{threads} thread{'s' if threads != 1 else ''}")
    for name, value in environment.items():
        if isinstance(value, dict):
            value = [f"{key} {item}" for key, item in value.items()]
        if isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        parts.append(value not in (None, "") and f"{name.replace('_', ' ')} {value}")
    parts += [f"{name} {version}" for name, version in versions.items()]
    return ", ".join(part for part in parts if part)


def write_result(output, title, environment, data, text):
    """Writes OUTPUT.json and OUTPUT.md, the common form of results: the figures, and the page that
    a person reads.

    Args:
        output: path without its ending.
        title: heading of the page.
        environment: as `environment()` returns it; "environment" in the JSON, a line under the
            page's heading.
        data: dictionary of JSON values.
        text: the page below that line, in markdown.
    Returns:
        the page.
    """
    page = f"# {title}\n\n{environment_line(environment)}.\n\n{text.strip()}\n"
    write_text(f"{output}.json", json_text({"environment": environment, **data}))
    write_text(f"{output}.md", page)
    return page


def hardware():
    """One line: the processor's model, its cores, its vector and matrix units, and the GPUs."""
    import torch

    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    family, model = _cpuinfo("cpu family"), _cpuinfo("model")
    if family and model:  # many names of rented machines say little
        name = f"{name} (family {family}, model {model})"
    parts = [", ".join([name, f"{os.cpu_count()} cores", *processor_units()])]
    parts += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return "; ".join(parts)


def processor_units():
    """The vector and matrix units that the processor says it has: AVX-512, VNNI, AVX512-BF16,
    AMX-BF16 and so on.

    A unit that is not named may still be there: AMX-FP16 is missing from many lists of flags. Empty
    where the system does not tell.
    """
    flags = set(_cpuinfo("flags").split()) | set(_cpuinfo("Features").split())
    return [name for name, any_of in _UNITS if flags & set(any_of)]


def _cpuinfo(field):
    """The first value of a field of /proc/cpuinfo, or ""."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":")[::2] for line in lines)
    return next((value.strip() for name, value in pairs if name.strip() == field), "")


def _command():
    program = Path(sys.argv[0]).name
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name not in (None, "__main__"):
        program = f"python -m {spec.name.removesuffix('.__main__')}"
    elif program.endswith(".py"):
        path = Path(sys.argv[0]).resolve()
        if path.is_relative_to(PACKAGE.parent):
            program = str(path.relative_to(PACKAGE.parent))
        program = f"python {program}"
    arguments = map(shown, redacted_arguments(sys.argv[1:]))
    return " ".join([program, *map(shlex.quote, arguments)])


def shown(argument):
    """An argument as results show it: of an absolute path the last two parts, which say what it is
    and not whose machine it is on."""
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    return (
        f"{option}{equals}{Path(*path.parts[-2:])}"
        if path.is_absolute() and len(path.parts) > 2
        else argument
    )


def _commit():
    """The commit of the sources, with "-dirty" where Python files differ from it. NEOBERT_COMMIT
    tells it for a copy without git."""

    def git(*arguments):
        run = subprocess.run(
            ["git", *arguments],
            cwd=PACKAGE,
            capture_output=True,
            text=True,
            timeout=10,
        )
        return run.stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/*.py")
    except (OSError, subprocess.TimeoutExpired):
        commit, changed = "", ""
    return (commit + ("-dirty" if changed else "")) or os.environ.get("NEOBERT_COMMIT") or None


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def markdown_table(header, rows):
    """A markdown table; cells are written with str(), None as an empty cell."""
    lines = [header, ["---"] * len(header), *rows]
    return (
        "\n".join(
            "| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |"
            for line in lines
        )
        + "\n"
    )


def earlier_result(path, *keys):
    """The JSON object in a result file that a command adds to, where it has all of `keys`; None for
    any other file, or none."""
    try:
        data = read_json(path)
    except UserError:
        return None
    return data if isinstance(data, dict) and set(keys) <= data.keys() else None


def check_result_files(folder, command, earlier, *names):
    """Raises UserError when a command that collects results in a folder would replace a file that
    it did not write.

    Args:
        earlier: its earlier results in `folder`; without them no file of these names may be there.
        names: of the files that it writes into `folder`.
    """
    for path in (Path(folder) / name for name in names):
        if not earlier and os.path.lexists(path):
            raise UserError(
                f"{path} was not made by neobert {command}, so it is not replaced; move it, or "
                "choose another folder"
            )


# ------------------------------------------------------------------------------------------------
# figures of the paper (arXiv 2502.19587v2) that tables set beside ours, marked as published

MTEB_TYPES = {
    "Classification": "Class",
    "Clustering": "Clust",
    "PairClassification": "PairClass",
    "Reranking": "Rerank",
    "Retrieval": "Retr",
    "STS": "STS",
    "Summarization": "Summ",
}

# Table 4: MTEB(eng, v1) after 2,000 steps of contrastive training; columns as in MTEB_TYPES, then
# the mean over the 56 tasks.
MTEB = {
    "BERT base": (60.6, 37.0, 71.5, 48.9, 28.3, 69.9, 31.1, 48.1),
    "RoBERTa base": (58.7, 36.7, 71.2, 49.8, 26.9, 71.8, 29.1, 47.7),
    "DeBERTaV3 base": (45.9, 15.2, 44.3, 39.0, 3.5, 42.2, 25.0, 26.9),
    "NomicBERT-2048": (55.0, 35.3, 69.0, 48.8, 30.5, 70.1, 30.1, 47.1),
    "ModernBERT base": (58.9, 38.1, 63.8, 48.5, 21.0, 66.2, 30.1, 45.0),
    "NeoBERT-4096": (61.6, 40.8, 76.2, 51.2, 31.6, 74.8, 30.7, 51.3),
    "BERT large": (59.8, 39.3, 70.9, 49.7, 29.6, 71.4, 31.2, 49.1),
    "RoBERTa large": (57.1, 39.3, 72.5, 51.3, 30.0, 71.7, 31.1, 48.9),
    "DeBERTaV3 large": (45.9, 16.4, 45.0, 40.8, 4.0, 40.1, 29.9, 27.1),
    "ModernBERT large": (62.4, 38.7, 65.5, 50.1, 23.1, 68.3, 27.8, 46.9),
}
MTEB_NOTE = (
    "Published rows: arXiv 2502.19587v2, Table 4, MTEB(eng, v1), one contrastive recipe of 2,000 "
    "steps for every backbone; "
    "the authors' code leaves CQADupstack and MSMARCO out of the averages it computes, ours does "
    "not."
)

# Table 3: dev sets of GLUE, one score a task in the order of GLUE_TASKS, then the mean.
GLUE_TASKS = ("MNLI", "QNLI", "QQP", "RTE", "SST", "MRPC", "CoLA", "STS")
GLUE = {
    "BERT base": (84.0, 90.5, 71.2, 66.4, 93.5, 88.9, 52.1, 85.8, 79.6),
    "RoBERTa base": (87.6, 92.8, 91.9, 78.7, 94.8, 90.2, 63.6, 91.2, 86.4),
    "GTE-en-8192 base": (86.7, 91.9, 88.8, 84.8, 93.3, 92.1, 57.0, 90.2, 85.6),
    "NomicBERT-2048": (86.0, 92.0, 92.0, 82.0, 93.0, 88.0, 50.0, 90.0, 84.0),
    "ModernBERT base": (89.1, 93.9, 92.1, 87.4, 96.0, 92.2, 65.1, 91.8, 88.5),
    "NeoBERT-1024": (88.9, 93.9, 90.7, 91.0, 95.8, 93.4, 64.8, 92.1, 88.8),
    "NeoBERT-4096": (89.0, 93.7, 90.7, 91.3, 95.6, 93.4, 66.2, 91.8, 89.0),
    "BERT large": (86.3, 92.7, 72.1, 70.1, 94.9, 89.3, 60.5, 86.5, 82.1),
    "RoBERTa large": (90.2, 94.7, 92.2, 86.6, 96.4, 90.9, 68.0, 92.4, 88.9),
    "DeBERTaV3 large": (91.9, 96.0, 93.0, 92.7, 96.9, 91.9, 75.3, 93.0, 91.4),
    "GTE-en-8192 large": (89.2, 93.9, 89.2, 88.1, 95.1, 93.5, 60.4, 91.4, 87.6),
    "ModernBERT large": (90.8, 95.2, 92.7, 92.1, 97.1, 91.7, 71.4, 92.8, 90.5),
}
GLUE_NOTE = (
    "Rows marked 'published' are Table 3 of arXiv 2502.19587: one seed, the best of all "
    "evaluations on the dev set, baselines copied "
    "from other papers (BERT's from the test server)."
)
