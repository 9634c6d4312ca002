"""The steps of `make gpu`, and the targets that they are measured against."""

import gc
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from ..common.constants import ROOT
from ..common.results import markdown_table
from . import memory, profile_forward, training
from .measuring import mib
from .options import ThroughputArguments
from .throughput import Benchmark
from .throughput_results import NOTE, ratio_table, ratios, row_table


# Files with tests marked `gpu`, one by one: collecting the others fails where datasets is not
# installed.
GPU_TESTS = ("tests/test_attention.py", "tests/test_packing.py")
# Padded tokens of a batch.
TOKENS = 131_072
# What a rehearsal on the CPU is cut to.
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "intermediate_size": 96,
}
TINY_TOKENS = 256


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        title: heading of its part of the page.
        limit: seconds after which it is stopped; what it found by then is kept.
        run: function of (what an earlier call found or None, save(found), output folder, whether it
            is a rehearsal).
        page: function of what was found; markdown.
    """

    title: str
    limit: float
    run: Callable
    page: Callable


# ------------------------------------------------------------------------------------------------
# tests


def run_tests(before, save, folder, rehearse):
    """`pytest -m gpu`, a process for each file, so that a broken CUDA context ends one file alone;
    the log is in gpu_tests.log."""
    # 5: all are skipped without a GPU
    found = dict(before or {})
    passed = (0, 5) if rehearse else (0,)
    with open(folder / "gpu_tests.log", "a", encoding="utf-8") as log:
        for name in GPU_TESTS:
            if found.get(name, {}).get("code") in passed:
                continue
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-m",
                "gpu",
                "-p",
                "no:cacheprovider",
                "--tb=short",
                name,
            ]
            run = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            log.write(f"$ {' '.join(command[1:])}\n{run.stdout}\n")
            log.flush()
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, flags=re.M)
            found[name] = {
                "code": run.returncode,
                "summary": run.stdout.strip().splitlines()[-1],
                "failed": failed,
            }
            save(found)
    broken = [name for name in GPU_TESTS if found[name]["code"] not in passed]
    if broken:
        raise RuntimeError(f"tests failed in {', '.join(broken)}, see gpu_tests.log")


def page_of_tests(found):
    return markdown_table(
        ["file", "summary", "failed"],
        [[name, f["summary"], ", ".join(f["failed"])] for name, f in found.items()],
    )


# ------------------------------------------------------------------------------------------------
# throughput


def throughput_step(sets, implementations, models=("neobert", "modernbert-base")):
    """`run` of a step that measures throughput; what it finds are rows of throughput.json."""

    def run(before, save, folder, rehearse):
        arguments = ThroughputArguments(
            output=str(folder),
            preset="gpu",
            device="cuda",
            models=list(models),
            implementations=list(implementations),
            sets=list(sets),
            search=False,
            max_batch=8 if rehearse else None,
            max_tokens=TINY_TOKENS if rehearse else TOKENS,
            repeats=2 if rehearse else 7,
            warmup=2,
        )
        rows = [row for row in (before or {}).get("rows", []) if not row.get("error")]
        benchmark = Benchmark(
            arguments,
            rows,
            TINY if rehearse else None,
            save=lambda data: save({"rows": data["rows"]}),
        )
        if benchmark.run():
            raise KeyboardInterrupt
        failed = [row for row in rows if row.get("error")]
        if failed:
            raise RuntimeError(
                f"{failed[0]['model']}/{failed[0]['implementation']} at {failed[0]['set']}: "
                f"{failed[0]['error']}"
            )

    return run


def page_of_throughput(found):
    rows = found["rows"]
    implementation = "sdpa" if any(row["implementation"] == "sdpa" for row in rows) else "compiled"
    parts = [
        row_table(rows),
        f"NeoBERT ({implementation}) over:",
        ratio_table(rows, implementation),
        NOTE,
    ]
    return "\n\n".join(part.strip() for part in parts)


# ------------------------------------------------------------------------------------------------
# memory


def run_memory(before, save, folder, rehearse):
    """Peak reserved memory of one forward beyond the weights, at the same batch."""
    rows = []
    for model in ("neobert", "modernbert-base"):
        for length in (4096, 8192):
            tokens, texts = (length // 32, 1) if rehearse else (length, 8)
            case = memory.Case(model, "sdpa", tokens, texts, 0, "cuda", torch.get_num_threads())
            rows.append(
                {
                    "model": model,
                    "length": length,
                    "texts": texts,
                    "bytes": case.measure(TINY if rehearse else None),
                }
            )
            save({"rows": rows})
            gc.collect()


def page_of_memory(found):
    lines = [
        [row["model"], f"{row['length']:,}", row["texts"], mib(row["bytes"])]
        for row in found["rows"]
    ]
    return markdown_table(["model", "length", "texts", "MiB above the weights (reserved)"], lines)


# ------------------------------------------------------------------------------------------------
# profile


def run_profile(before, save, folder, rehearse):
    """Where one packed forward spends its time: 16 x 2,048 tokens, and 64 short texts, which are
    bound by the host."""
    found = dict(before or {})
    for name, texts in (("2048", 16), ("short", 64)):
        if name not in found:
            layers, texts = (TINY["num_hidden_layers"], 2) if rehearse else (28, texts)
            given = profile_forward.ProfileArguments(
                set=name, texts=texts, layers=layers, device="cuda", dtype="bfloat16", repeats=5
            )
            result = profile_forward.profile_forward(given, TINY if rehearse else None)
            found[name] = {**result, "given": asdict(given)}
            save(found)


def page_of_profile(found):
    parts = [
        profile_forward.page(result, profile_forward.ProfileArguments(**result["given"]))
        for result in found.values()
    ]
    return "\n\n".join(part.strip() for part in parts)


# ------------------------------------------------------------------------------------------------
# training


def run_training(before, save, folder, rehearse):
    """Masked-LM steps in bf16 autocast: short texts packed against padded, then packed at 1,024 and
    4,096 tokens."""
    rows = list((before or {}).get("rows", []))
    done = {(row["name"], row["way"]) for row in rows}
    shape = (
        {"hidden": 64, "layers": 1, "tokens": 32, "steps": 1}
        if rehearse
        else {"hidden": 768, "layers": 28, "tokens": 16_384, "steps": 5}
    )
    for name, way in (
        ("short", "packed"),
        ("short", "padded"),
        ("1024", "packed"),
        ("4096", "packed"),
    ):
        if (name, way) not in done:
            case = training.Steps(way, name, "bfloat16", "cuda", torch.get_num_threads(), **shape)
            rows.append(training.summary(case, [case.measure()]))
            save({"rows": rows})
            gc.collect()


def page_of_training(found):
    return training.table(found["rows"])


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
    "training": Step("Training steps", 100, run_training, page_of_training),
}


# ------------------------------------------------------------------------------------------------
# targets


def targets(steps):
    """Markdown table of the targets with what was measured, empty where nothing was.

    Args:
        steps: {name: {"found": ...}} as gpu.json holds them.
    """
    rows = [
        row
        for name in ("long", "variable", "lengths", "compiled")
        for row in _rows(steps, name)
        if not row.get("error")
    ]
    lines = [
        [
            "fixed 4,096 over ModernBERT base, both at their best",
            "1.47",
            _over_modernbert(rows, "4096"),
        ],
        [
            "fixed 8,192 over ModernBERT base, both at their best",
            "1.91",
            _over_modernbert(rows, "8192"),
        ],
        ["share of the bf16 matrix-product rate at 2,048", "0.5", _share(rows, "2048")],
        ["share of the bf16 matrix-product rate at 4,096", "0.5", _share(rows, "4096")],
    ]
    for name in ("normal-256", "normal-4096", "short"):
        found = (
            ratios([row for row in rows if row["set"] == name]).get(name, {}).get("neobert/padded")
        )
        lines.append([f"{name}: packed over padded", "1.4", found and found["ratio"]])
    for length in (4096, 8192):
        peaks = {
            row["model"]: row["bytes"] for row in _rows(steps, "memory") if row["length"] == length
        }
        ours, theirs = peaks.get("neobert"), peaks.get("modernbert-base")
        lines.append(
            [
                f"peak memory above the weights over ModernBERT base, {length:,}",
                "at most 1.8",
                ours and theirs and ours / theirs,
            ]
        )
    table = []
    for what, least, value in lines:
        reached = value is not None and (
            value <= 1.8 if least.startswith("at most") else value >= float(least)
        )
        table.append(
            [
                what,
                least,
                "" if value is None else f"{value:.2f}",
                "" if value is None else "yes" if reached else "no",
            ]
        )
    return markdown_table(["bf16", "target", "measured", "reached"], table)


def _rows(steps, name):
    return (steps.get(name, {}).get("found") or {}).get("rows", [])


def _best(rows, name, model):
    """The fastest measured tokens per second of a model on a set, or None."""
    return max(
        (row["tokens_per_second"] for row in rows if (row["set"], row["model"]) == (name, model)),
        default=None,
    )


def _over_modernbert(rows, name):
    ours, theirs = _best(rows, name, "neobert"), _best(rows, name, "modernbert-base")
    return None if ours is None or theirs is None else ours / theirs


def _share(rows, name):
    return max(
        (row["share_of_gemm"] for row in rows if (row["set"], row["model"]) == (name, "neobert")),
        default=None,
    )
