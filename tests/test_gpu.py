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
import torch

from neobert.benchmarks import gpu, gpu_rehearsal, gpu_steps, throughput
from neobert.benchmarks.gpu_steps import GPU_TESTS, STEPS, targets
from neobert.common import memory
from neobert.common.errors import UserError


ROOT = Path(__file__).resolve().parent.parent
# What is not installed on a bare GPU machine.
ABSENT = (
    "datasets",
    "mteb",
    "deepspeed",
    "flash_attn",
    "onnx",
    "onnxruntime",
    "tensorboard",
    "pandas",
    "pyarrow",
    "polars",
)


@pytest.fixture
def in_this_process(monkeypatch):
    """Steps without a process of their own, which takes seconds to start; names of those that
    ran."""
    ran = []

    def run(name, folder, rehearse, limit):
        ran.append(name)
        try:
            gpu.run_step(name, folder, rehearse)
        except SystemExit:
            return False
        return True

    monkeypatch.setattr(gpu, "run_guarded", run)
    for module in (memory, gpu_steps, throughput):  # half a second a time
        monkeypatch.setattr(module, "gc", SimpleNamespace(collect=lambda: 0))
    return ran


@pytest.fixture
def bare(tmp_path):
    """The environment of a process that has none of `ABSENT`."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\n\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n"
    )
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }


def record_of(folder):
    return json.loads((folder / "gpu.json").read_text())


def row(name, model, implementation, speed, **more):
    seconds = [100 / speed] * 2
    return {
        "set": name,
        "model": model,
        "implementation": implementation,
        "tokens_per_second": speed,
        "seconds": seconds,
        "real_tokens": 100,
        **more,
    }


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
def test_every_step_of_the_rehearsal(tmp_path, in_this_process, monkeypatch):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_one():\n    pass\n\ndef test_other():\n    "
        "assert False\n"
    )
    monkeypatch.setattr(gpu_steps, "GPU_TESTS", (str(tmp_path / "test_some.py"),))
    (tmp_path / "before").mkdir()
    folder = tmp_path / "before" / "out"
    argv = ["--rehearse", "--output", str(folder)]
    gpu.main(argv)
    steps = record_of(folder)["steps"]
    assert {name: (step["state"], step["error"]) for name, step in steps.items()} == {
        name: ("done", "") for name in STEPS
    }
    assert (
        "1 passed, 1 deselected"
        in steps["tests"]["found"][str(tmp_path / "test_some.py")]["summary"]
    )
    for name in ("long", "variable", "lengths", "compiled"):
        assert not [r for r in steps[name]["found"]["rows"] if r.get("error")]
    compiled = {(r["set"], r["model"]) for r in steps["compiled"]["found"]["rows"]}
    assert compiled == {
        (name, model)
        for name in ("2048", "4096", "8192")
        for model in ("neobert", "modernbert-base")
    }
    assert (
        set(steps["profile"]["found"]) == {"2048", "short"}
        and len(steps["training"]["found"]["rows"]) == 4
    )
    page = (folder / "gpu.md").read_text()
    assert (
        page.startswith("# GPU: a rehearsal on the CPU, not a measurement\n")
        and "| 8192 | modernbert-base | compiled |" in page
    )
    assert not re.search(r"\| 1\.47 \|  \|", page), "a target was not measured"
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["gpu.json", "gpu.md", "gpu_tests.log"], (
        "few files, all in one folder, are easily copied from a rented machine"
    )
    in_this_process.clear()
    assert gpu.main(argv) == 0 and not in_this_process, "what is done is not done again"


def test_the_rehearsal_leaves_torch_as_it_was():
    before = torch.cuda.is_available(), torch.autocast, dict(gpu_rehearsal.measuring.GEMM_SIZES)
    with gpu_rehearsal.pretended_gpu():
        assert torch.cuda.is_available() and torch.randn(2, device="cuda").device.type == "cpu"
        assert torch.nn.Linear(2, 2).to("cuda").weight.device.type == "cpu"
        with torch.autocast("cuda", torch.bfloat16):
            assert (torch.randn(2, 2) @ torch.randn(2, 2)).dtype == torch.bfloat16
    assert before == (
        torch.cuda.is_available(),
        torch.autocast,
        dict(gpu_rehearsal.measuring.GEMM_SIZES),
    )


@pytest.mark.slow
def test_a_bare_machine_can_collect_the_gpu_tests(bare):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        *GPU_TESTS,
    ]
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


def test_a_step_that_fails_says_why_and_the_others_go_on(tmp_path, in_this_process, monkeypatch):
    def broken(before, save, folder, rehearse):
        save({"rows": [{"model": "neobert", "length": 4096, "texts": 1, "bytes": 2**20}]})
        raise RuntimeError("an illegal memory access was encountered")

    steps = {name: STEPS[name] for name in ("memory", "training")}
    steps["memory"] = gpu_steps.Step("Memory", 60, broken, gpu_steps.page_of_memory)
    for module in (gpu, gpu_steps):
        monkeypatch.setattr(module, "STEPS", steps)
    assert gpu.main(["--rehearse", "--output", str(tmp_path), "--steps", "memory", "training"]) == 1
    assert in_this_process == ["memory", "training"]
    found = record_of(tmp_path)["steps"]
    assert (
        found["memory"]["state"] == "failed"
        and found["memory"]["error"] == "RuntimeError: an illegal memory access was encountered"
    )
    assert "in broken" in found["memory"]["traceback"], (
        "nobody can ask the machine later where it was"
    )
    assert len(found["memory"]["found"]["rows"]) == 1, "what it had measured is kept"
    assert found["training"]["state"] == "done"
    in_this_process.clear()
    gpu.main(["--rehearse", "--output", str(tmp_path), "--steps", "memory", "training"])
    assert in_this_process == ["memory"], "the next call tries again what failed"


def test_a_step_in_its_own_process(tmp_path):
    """One that takes too long is stopped; one that dies is failed, with its error; both keep their
    place for the next call."""
    assert not gpu.run_guarded("memory", tmp_path, True, limit=0.5)
    assert record_of(tmp_path)["steps"]["memory"]["state"] == "partial"
    assert not gpu.run_guarded("memory", tmp_path / "real", False, limit=60), "there is no GPU here"
    entry = record_of(tmp_path / "real")["steps"]["memory"]
    # of torch without CUDA, of torch with it
    said = [word for word in ("CUDA", "NVIDIA driver") if word in entry["error"]]
    assert entry["state"] == "failed" and said and entry["seconds"] > 0


def test_no_step_begins_without_time(tmp_path, in_this_process, capsys):
    assert gpu.main(["--rehearse", "--output", str(tmp_path), "--seconds", "5"]) == 1
    assert not in_this_process and "tests: left for the next call" in capsys.readouterr().out


def test_measured_rows_are_handed_to_the_next_call(tmp_path):
    rows = [
        row("4096", "neobert", "sdpa", 1.0),
        {**row("4096", "modernbert-base", "sdpa", 1.0), "error": "out of memory"},
    ]
    seen = []
    run = gpu_steps.throughput_step(("4096",), ("sdpa",))
    with gpu_rehearsal.pretended_gpu():
        run({"rows": rows}, lambda found: seen.append(found), tmp_path, True)
    found = seen[-1]["rows"]
    assert found[0] == rows[0], "what was measured is not measured again"
    assert [(r["model"], "error" in r) for r in found[1:]] == [("modernbert-base", False)], (
        "what failed is tried again"
    )


def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="torch sees no GPU here; --rehearse"):
        gpu.main(["--output", str(tmp_path)])
    with pytest.raises(UserError, match="steps must be one of tests, long"):
        gpu.main(["--output", str(tmp_path), "--rehearse", "--steps", "all"])
    gpu.Record(tmp_path, True).update("memory", state="done")
    with pytest.raises(UserError, match="gpu.json is a rehearsal; give another --output"):
        gpu.Record(tmp_path, False)
    (tmp_path / "gpu.json").write_text("[]")
    with pytest.raises(UserError, match="gpu.json is not a result of this command"):
        gpu.Record(tmp_path, False)


# ------------------------------------------------------------------------------------------------
# targets


def test_targets_are_told_from_the_best_of_each_model():
    share = {"share_of_gemm": 0.4}
    steps = {
        "long": {
            "found": {
                "rows": [
                    row("4096", "neobert", "sdpa", 150.0, **share),
                    row("4096", "modernbert-base", "sdpa", 90.0, **share),
                    row("8192", "neobert", "sdpa", 100.0, **share),
                    {"set": "8192", "model": "modernbert-base", "error": "x"},
                ]
            }
        },
        "compiled": {
            "found": {
                "rows": [
                    row("4096", "neobert", "compiled", 160.0, share_of_gemm=0.52),
                    row("4096", "modernbert-base", "compiled", 100.0, **share),
                ]
            }
        },
        "variable": {
            "found": {
                "rows": [
                    row("short", "neobert", "sdpa", 30.0),
                    row("short", "neobert", "padded", 10.0),
                ]
            }
        },
        "memory": {
            "found": {
                "rows": [
                    {"model": "neobert", "length": 4096, "bytes": 19},
                    {"model": "modernbert-base", "length": 4096, "bytes": 10},
                ]
            }
        },
    }
    table = targets(steps)
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
