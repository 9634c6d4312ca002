"""Pins `make gpu`, which nobody can try before there is a GPU: every step runs in a rehearsal on
the CPU, failures and time limits end one step alone, finished steps stay, and the targets are told
from what was measured. `make test-gpu` rehearses it with the packages of a bare machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from neobert.benchmarks import gpu
from neobert.benchmarks.gpu import GPU_TESTS, STEPS, Step, targets
from neobert.common import memory
from neobert.common.errors import UserError


ROOT = Path(__file__).resolve().parent.parent
# What is not installed on a bare GPU machine.
ABSENT = "datasets mteb deepspeed flash_attn onnx onnxruntime tensorboard pandas pyarrow polars"
ABSENT = ABSENT.split()


@pytest.fixture(autouse=True)
def no_collecting(monkeypatch):
    """Half a second a time."""
    monkeypatch.setattr(memory, "gc", SimpleNamespace(collect=lambda: 0))


@pytest.fixture
def bare(tmp_path):
    """The environment of a process that has none of `ABSENT`."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\n\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n"
    )
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def row(name, model, implementation, speed, **more):
    run = {"set": name, "model": model, "implementation": implementation, "real_tokens": 100}
    return {**run, "tokens_per_second": speed, "seconds": [100 / speed] * 2, **more}


# ------------------------------------------------------------------------------------------------
# rehearsal


def test_the_files_with_gpu_tests_are_all_named():
    marked = {
        f"tests/{path.name}"
        for path in (ROOT / "tests").glob("test_*.py")
        if re.search(r"^@?.*pytest\.mark\.gpu\b", path.read_text(), re.M)
    }
    assert marked - {"tests/test_gpu.py"} == set(GPU_TESTS), (
        "a file with gpu tests would not run on a GPU"
    )


@pytest.mark.slow
def test_every_step_of_the_rehearsal(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_one():\n    pass\n\ndef test_other():\n    "
        "assert False\n"
    )
    monkeypatch.setattr(gpu, "GPU_TESTS", (str(tmp_path / "test_some.py"),))
    folder = tmp_path / "out"
    folder.mkdir()
    for name in STEPS:
        gpu.run_step(name, folder, True)
    steps = gpu.read_steps(folder)
    assert {name: (step["state"], step["error"]) for name, step in steps.items()} == {
        name: ("done", None) for name in STEPS
    }
    summary = steps["tests"]["found"][str(tmp_path / "test_some.py")]["summary"]
    assert "1 passed, 1 deselected" in summary
    compiled = {(row["set"], row["model"]) for row in steps["compiled"]["found"]}
    models = ("neobert", "modernbert-base")
    assert compiled == {(name, model) for name in ("2048", "4096", "8192") for model in models}
    assert set(steps["profile"]["found"]) == {"2048", "short"}
    assert len(steps["training"]["found"]) == 4
    gpu.write_page(folder, True)
    page = (folder / "gpu.md").read_text()
    assert page.startswith("# GPU: a rehearsal on the CPU, not a measurement\n")
    assert "| 8192 | modernbert-base | compiled |" in page
    assert not re.search(r"\| 1\.47 \|  \|", page), "a target was not measured"
    monkeypatch.setattr(gpu, "run_step", lambda *others: pytest.fail("it was done before"))
    assert gpu.main(["--rehearse", "--output", str(folder)]) == 0


@pytest.mark.slow
def test_a_bare_machine_can_collect_the_gpu_tests(bare):
    options = "-m pytest -q -m gpu --collect-only -p no:cacheprovider".split()
    command = [sys.executable, *options, *GPU_TESTS]
    run = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and re.search(r"^\d+/\d+ tests collected", run.stdout, re.M), (
        run.stdout[-1000:] + run.stderr[-1000:]
    )


def test_the_script_finds_the_package_from_anywhere(tmp_path, bare):
    """And imports nothing that a bare machine lacks."""
    env = {**bare, "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    run = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--help"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "--rehearse" in run.stdout, run.stderr
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------
# failures and limits


def test_a_step_that_fails_says_why_and_keeps_what_it_found(tmp_path, monkeypatch, capsys):
    def broken(save, folder, rehearse):
        save([{"model": "neobert", "length": 4096, "texts": 1, "bytes": 2**20}])
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setitem(STEPS, "memory", Step("Memory", 60, broken, gpu.page_of_memory))
    gpu.run_step("memory", tmp_path, True)
    step = gpu.read_steps(tmp_path)["memory"]
    assert step["state"] == "failed" and len(step["found"]) == 1
    assert step["error"] == "RuntimeError: an illegal memory access was encountered"
    assert "in broken" in capsys.readouterr().err, "nobody can ask the machine later where it was"
    gpu.write_page(tmp_path, True)
    assert "| neobert | 4,096 | 1 | 1 |" in (tmp_path / "gpu.md").read_text()


def test_a_step_that_takes_too_long_is_stopped(tmp_path, monkeypatch, capsys):
    """In its own process, which has not even imported torch by then; the rest goes on."""
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0)
    argv = ["--rehearse", "--output", str(tmp_path), "--seconds", "0.4", "--steps", "memory"]
    assert gpu.main(argv) == 1
    assert "memory: failed after 0 s it wrote nothing" in capsys.readouterr().out


def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="torch sees no GPU here; --rehearse"):
        gpu.main(["--output", str(tmp_path)])
    (tmp_path / "memory.json").write_text(json.dumps({"rehearsal": False, "state": "done"}))
    with pytest.raises(UserError, match="memory.json is measured on a GPU; give another --output"):
        gpu.main(["--rehearse", "--output", str(tmp_path)])


# ------------------------------------------------------------------------------------------------
# targets


def test_targets_are_told_from_the_best_of_each_model():
    share = {"share_of_gemm": 0.4}
    found = {
        "long": [
            row("4096", "neobert", "sdpa", 150.0, **share),
            row("4096", "modernbert-base", "sdpa", 90.0, **share),
            row("8192", "neobert", "sdpa", 100.0, **share),
            {"set": "8192", "model": "modernbert-base", "error": "x"},
        ],
        "compiled": [
            row("4096", "neobert", "compiled", 160.0, share_of_gemm=0.52),
            row("4096", "modernbert-base", "compiled", 100.0, **share),
        ],
        "variable": [
            row("short", "neobert", "sdpa", 30.0, **share),
            row("short", "neobert", "padded", 10.0, **share),
        ],
        "memory": [
            {"model": "neobert", "length": 4096, "bytes": 19},
            {"model": "modernbert-base", "length": 4096, "bytes": 10},
        ],
    }
    table = targets(found)
    assert "| fixed 4,096 over ModernBERT base, both at their best | 1.47 | 1.60 | yes |" in table
    assert "| fixed 8,192 over ModernBERT base, both at their best | 1.91 |  |  |" in table, (
        "what was not measured is empty"
    )
    assert "| share of the bf16 matrix-product rate at 4,096 | 0.5 | 0.52 | yes |" in table
    assert "| short: packed over padded | 1.4 | 3.00 | yes |" in table
    assert (
        "| peak memory above the weights over ModernBERT base, 4,096 | at most 1.8 | 1.90 | no |"
        in table
    )
    assert targets({}).count("|  |  |") == 9


def test_the_page_of_what_is_open_has_the_targets():
    text = (ROOT / "results" / "gpu_PENDING.md").read_text()
    assert targets({}) in text and "make gpu" in text
