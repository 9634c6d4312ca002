"""Tests of the environment of a measurement: hardware, commit, versions and command line."""

import shutil
import subprocess

import pytest

from neobert.common import environment as module
from neobert.common.environment import (
    environment,
    environment_line,
    hardware,
    processor_units,
    shorten_path,
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


@pytest.fixture
def set_cpuinfo(tmp_path, monkeypatch):
    """Return a function that sets the content of /proc/cpuinfo on a machine with two cores."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(module, "Path", lambda _: path)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    return path.write_text


@pytest.mark.parametrize(
    ("cpuinfo", "units"),
    [
        (XEON, ["AVX2", "AVX-512", "VNNI", "AVX512-BF16", "AVX512-FP16", "AMX-BF16", "AMX-INT8"]),
        (EPYC, ["AVX2"]),
        (GRAVITON, ["SVE", "dot product", "i8mm", "bf16"]),
        ("", []),
    ],
)
def test_units_of_the_processor(cpuinfo, units, set_cpuinfo):
    set_cpuinfo(cpuinfo)
    assert processor_units() == units


@pytest.mark.parametrize(
    ("cpuinfo", "line"),
    [
        (XEON, "Intel(R) Xeon(R) Processor (family 6, model 207), 2 cores, AVX2, AVX-512, VNNI, "),
        (EPYC, "AMD EPYC 7763 64-Core Processor, 2 cores, AVX2"),
    ],
)
def test_hardware_names_the_processor_and_its_units(cpuinfo, line, set_cpuinfo):
    """Results in bfloat16 and int8 depend on the matrix units of the processor."""
    set_cpuinfo(cpuinfo)
    assert hardware().startswith(line)


def test_the_line_contains_every_known_field():
    """Check the line of a complete environment. Fields that are missing or None are omitted."""
    record = {
        "command": "neobert throughput",
        "commit": "abc1234",
        "date": "2026-01-02 03:04 UTC",
        "hardware": "A CPU, 2 cores",
        "threads": 1,
        "python": "3.12.1",
        "versions": {"torch": "2.13.0"},
        "dtype": ["float32", "bfloat16"],
        "batch_sizes": {"short": 8},
        "note": None,
    }

    assert environment_line(record) == (
        "`neobert throughput`, commit abc1234, 2026-01-02 03:04 UTC, A CPU, 2 cores, 1 thread, "
        "dtype float32, bfloat16, batch sizes short 8, torch 2.13.0"
    )
    assert environment_line({"hardware": "A CPU", "commit": None}) == "A CPU"
    assert environment_line({"threads": 2}) == "2 threads"


def test_commit_is_read_from_a_variable_without_git(monkeypatch):
    """Check that the commit is read from NEOBERT_COMMIT if git is not available."""

    def run_without_git(*arguments, **options):
        raise OSError("git is not installed")

    monkeypatch.setattr(module.subprocess, "run", run_without_git)
    monkeypatch.delenv("NEOBERT_COMMIT", raising=False)
    assert environment()["commit"] is None

    monkeypatch.setenv("NEOBERT_COMMIT", "abc1234")
    record = environment(note="x")
    assert record["commit"] == "abc1234"
    assert record["note"] == "x"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_of_another_repository_is_ignored(tmp_path, monkeypatch):
    """A package that is installed inside of another repository does not have its commit."""
    package = tmp_path / ".venv" / "site-packages" / "neobert"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "main.py").touch()
    # A hook of git sets these variables, and commits could need a signature.
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setattr(module, "PACKAGE", package)

    def git(*arguments):
        user = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", "-C", str(tmp_path), *user, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", "main.py")
    git("commit", "--quiet", "--message", "Add main.py")

    monkeypatch.delenv("NEOBERT_COMMIT", raising=False)
    assert environment()["commit"] is None
    # A changed file of the other repository does not count either.
    (tmp_path / "main.py").write_text("print()\n")
    monkeypatch.setenv("NEOBERT_COMMIT", "abc1234")
    assert environment()["commit"] == "abc1234"

    # A package that is part of the repository has its commit, and the variable has no effect.
    git("add", "--force", "--all")
    git("commit", "--quiet", "--message", "Add the package")
    commit = git("rev-parse", "--short", "HEAD")
    assert environment()["commit"] == commit
    (package / "__init__.py").write_text("import sys\n")
    assert environment()["commit"] == f"{commit}-dirty"


def test_versions_omit_missing_packages():
    """Packages that are not installed are omitted from the versions."""
    versions = environment(["pytest", "no-such-package"])["versions"]
    assert versions["pytest"] == pytest.__version__
    assert "torch" in versions
    assert "no-such-package" not in versions


def test_the_command_contains_neither_secrets_nor_local_paths(monkeypatch):
    argv = ["x.py", "--hub-token", "hf_secret", "--model=/home/somebody/models/encoder", "a b"]
    monkeypatch.setattr(module.sys, "argv", argv)
    monkeypatch.setattr(module.sys.modules["__main__"], "__spec__", None)
    command = "python x.py --hub-token '<hidden>' --model=models/encoder 'a b'"
    assert environment()["command"] == command


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("/home/somebody/models/encoder", "models/encoder"),
        ("--model=/home/somebody/models/encoder", "--model=models/encoder"),
        ("runs/encoder", "runs/encoder"),
        ("org/encoder", "org/encoder"),
        ("--lr=1e-3", "--lr=1e-3"),
        ("/encoder", "/encoder"),
    ],
)
def test_absolute_paths_are_shortened(argument, expected):
    assert shorten_path(argument) == expected
