"""Pins what every published figure carries: the processor with its units, one environment line, one
way to write a result and one to draw it."""

import json
import re
from pathlib import Path

import pytest

from neobert.common import results
from neobert.common.results import (
    environment,
    environment_line,
    hardware,
    markdown_table,
    processor_units,
    shown,
    write_result,
)


XEON = """processor\t: 0
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu sse avx2 avx512f avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8
"""
EPYC = """model name\t: AMD EPYC 7763 64-Core Processor
flags\t\t: fpu sse avx2
"""
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd asimddp sve bf16 i8mm\n"


@pytest.mark.parametrize(
    ("cpuinfo", "units"),
    [
        (XEON, ["AVX2", "AVX-512", "VNNI", "AVX512-BF16", "AVX512-FP16", "AMX-BF16", "AMX-INT8"]),
        (EPYC, ["AVX2"]),
        (GRAVITON, ["SVE", "dot product", "i8mm", "bf16"]),
        ("", []),
    ],
)
def test_the_processor_is_named_with_its_units(cpuinfo, units, tmp_path, monkeypatch):
    """Whoever reads a bf16 or int8 figure must see whether the machine has the units for it."""
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(results, "Path", lambda path: tmp_path / "cpuinfo")
    monkeypatch.setattr(results.os, "cpu_count", lambda: 2)
    assert processor_units() == units
    if cpuinfo == XEON:
        assert hardware().startswith(
            "Intel(R) Xeon(R) Processor (family 6, model 207), 2 cores, AVX2, AVX-512, VNNI, "
        )
    if cpuinfo == EPYC:
        assert hardware().startswith("AMD EPYC 7763 64-Core Processor, 2 cores, AVX2")


def test_the_environment_line_says_all_that_the_environment_holds():
    full = {
        "command": "neobert throughput",
        "commit": "abc1234",
        "date": "2026-01-02 03:04 UTC",
        "hardware": "A CPU, 2 cores",
        "threads": 1,
    }
    full |= {
        "python": "3.12.1",
        "versions": {"torch": "2.13.0"},
        "dtype": ["float32", "bfloat16"],
        "batch_sizes": {"short": 8},
        "note": None,
    }
    assert environment_line(full) == (
        "`neobert throughput`, commit abc1234, 2026-01-02 03:04 UTC, A CPU, 2 cores, 1 thread, "
        "dtype float32, bfloat16, "
        "batch sizes short 8, torch 2.13.0"
    )
    assert environment_line({"hardware": "A CPU", "commit": None}) == "A CPU", (
        "what is not known is not printed"
    )


def test_a_copy_without_git_is_told_its_commit(monkeypatch):
    def no_git(*arguments, **options):
        raise OSError("git is not installed")

    monkeypatch.setattr(results.subprocess, "run", no_git)
    monkeypatch.delenv("NEOBERT_COMMIT", raising=False)
    assert environment()["commit"] is None
    monkeypatch.setenv("NEOBERT_COMMIT", "abc1234")
    assert environment(note="x")["commit"] == "abc1234" and environment(note="x")["note"] == "x"


def test_a_result_is_a_json_file_and_a_page(tmp_path):
    page = write_result(
        tmp_path / "new" / "speed.v2",
        "Speed",
        environment(dtype="float32"),
        {"rows": [1]},
        markdown_table(["a", "b"], [[1, None]]),
    )
    data = json.loads((tmp_path / "new" / "speed.v2.json").read_text())
    assert data["rows"] == [1] and data["environment"]["dtype"] == "float32", (
        "the figures and where they were measured"
    )
    assert (tmp_path / "new" / "speed.v2.md").read_text() == page
    assert (
        page.startswith("# Speed\n\n`") and "dtype float32" in page and page.endswith("| 1 |  |\n")
    )
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "speed.v2.json",
        "speed.v2.md",
    ], "nothing else is left there"


def test_every_result_is_in_the_index():
    """And every link of the index leads to a file."""
    folder = Path(__file__).resolve().parents[2] / "results"
    links = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text())
    pages = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    alone = {
        path.relative_to(folder).as_posix()
        for path in folder.glob("*.json")
        if not path.with_suffix(".md").exists()
    }
    assert sorted(links) == sorted((pages | alone) - {"README.md"})


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("/home/somebody/models/encoder", "models/encoder"),
        ("--model=/home/somebody/models/encoder", "--model=models/encoder"),
        ("runs/encoder", "runs/encoder"),
        ("org/encoder", "org/encoder"),
        ("--lr=1e-3", "--lr=1e-3"),
        ("/encoder", "/encoder"),
    ],
)
def test_a_result_does_not_tell_whose_machine_it_is_from(argument, expected):
    assert shown(argument) == expected
