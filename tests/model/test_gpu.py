"""Test `make gpu` without a GPU.

Its commands have valid options, a failed step does not stop the others, finished steps are not
repeated, and the result page compares the results with the targets. `make test-gpu` runs the
commands on the CPU with the packages of a new machine.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, memory, training
from benchmarks.gpu import targets
from benchmarks.measuring import option_parser
from neobert.throughput.options import OPTIONS


ROOT = Path(__file__).resolve().parents[2]
# Packages that a new GPU machine does not have.
ABSENT = "datasets mteb deepspeed flash_attn onnx onnxruntime tensorboard pandas pyarrow polars"
# Steps of gpu.sh in their order.
STEPS = "test_attention test_packing long variable lengths compiled memory training_short"
STEPS = [*STEPS.split(), "training_1024_4096"]


@pytest.fixture
def bare(tmp_path):
    """Return the environment variables of a process that cannot import the packages in `ABSENT`."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\n\nsys.modules.update(dict.fromkeys({ABSENT.split()!r}))\n"
    )
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def row(name, model, implementation, speed, **more_fields):
    """Return a row of throughput.json for one model and implementation."""
    fields = {"set": name, "model": model, "implementation": implementation, "real_tokens": 100}
    return {**fields, "tokens_per_second": speed, "seconds": [100 / speed] * 2, **more_fields}


# ------------------------------------------------------------------------------------------------
# Script


@pytest.fixture
def script(tmp_path):
    """Return a function that runs gpu.sh from another directory.

    Instead of Python, the script calls a program that only records its arguments. The function
    takes a part of the command that fails and the options of gpu.sh. It returns the exit code, the
    recorded commands and the output.
    """
    python = tmp_path / "python"
    calls = tmp_path / "calls"

    def run(failing_words, *options):
        python.write_text(
            f'#!/bin/sh\necho "$@" >> {calls}\ncase "$*" in *{failing_words}*) exit 3;; esac\n'
        )
        python.chmod(0o755)
        calls.unlink(missing_ok=True)

        command = ["bash", ROOT / "benchmarks" / "gpu.sh", *options]
        out = tmp_path / "out" / "".join(options)
        env = {**os.environ, "PYTHON": str(python), "OUT": str(out)}
        process = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        return process.returncode, calls.read_text().splitlines(), process.stdout + process.stderr

    return run


def test_only_failed_steps_are_repeated(script):
    """A failed step does not stop the others, and the next call repeats only the failed step."""
    code, calls, output = script("benchmarks.memory", "--rehearse")
    assert code == 1 and len(calls) == len(STEPS) + 1
    assert re.findall(r"^(\w+): exit code 0", output, re.M) == [s for s in STEPS if s != "memory"]
    assert "memory: exit code 3" in output

    code, calls, output = script("nothing", "--rehearse")
    assert code == 0 and [call.split()[1] for call in calls] == [
        "benchmarks.memory",
        "benchmarks.gpu",
    ]
    assert len(re.findall("done before", output)) == len(STEPS) - 1


def test_commands_accept_the_options_of_the_script(script):
    """The command parsers accept all options that gpu.sh passes.

    The memory and training benchmarks use the CPU with --rehearse, and the GPU without it.
    """
    options = {
        "neobert": OPTIONS["throughput"],
        "benchmarks.memory": option_parser("memory", "", memory.MemoryOptions),
        "benchmarks.training": option_parser("training", "", training.TrainingOptions),
    }

    for rehearse in (["--rehearse"], []):
        _, calls, _ = script("nothing", *rehearse)
        parsed_options = []
        for _, module, *words in map(shlex.split, calls):
            if module in options:
                parsed_options.append(options[module].read(words[words[:1] == ["throughput"] :]))

        assert len(parsed_options) == 7
        devices = {parsed.group.device for parsed in parsed_options if hasattr(parsed, "group")}
        assert devices == ({"cpu"} if rehearse else {"cuda"})


def test_missing_gpu_is_reported(script):
    """Without a GPU, gpu.sh fails with a message that suggests --rehearse."""
    code, _, output = script("is_available")
    assert code == 2 and "gpu.sh needs a GPU" in output and "--rehearse" in output


def test_script_runs_all_files_with_gpu_tests(script):
    """gpu.sh runs every test file that has tests marked `gpu`, except for this file."""
    marked_files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^@?.*pytest\.mark\.gpu\b", path.read_text(), re.M)
    }
    _, calls, _ = script("nothing", "--rehearse")
    listed_files = set(re.findall(r"^-m pytest .* (tests/\S+\.py)$", "\n".join(calls), re.M))
    assert marked_files - {"tests/model/test_gpu.py"} == listed_files, (
        "gpu.sh must list every file that has tests marked gpu."
    )


def test_commands_import_without_optional_packages(bare):
    """The modules of the commands can be imported without optional packages."""
    names = "benchmarks.gpu benchmarks.memory benchmarks.training neobert.throughput.command"
    code = "\n".join(f"import {name}" for name in names.split())
    run = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_gpu_tests_are_collected_without_optional_packages(bare):
    """pytest can collect the GPU tests without optional packages."""
    files = [f"tests/model/test_{name}.py" for name in ("attention", "packing")]
    options = "-m pytest -q -m gpu --collect-only -p no:cacheprovider".split()
    command = [sys.executable, *options, *files]
    run = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and re.search(r"^\d+/\d+ tests collected", run.stdout, re.M), (
        run.stdout[-1000:] + run.stderr[-1000:]
    )


# ------------------------------------------------------------------------------------------------
# Targets and result page


def test_targets_compare_the_best_results_of_each_model():
    """The table of targets compares the best result of each model.

    Results that were not measured are empty cells.
    """
    gemm_share = {"share_of_gemm": 0.4}
    rows = [
        row("4096", "neobert", "sdpa", 150.0, **gemm_share),
        row("4096", "modernbert-base", "sdpa", 90.0, **gemm_share),
        row("8192", "neobert", "sdpa", 100.0, **gemm_share),
        {"set": "8192", "model": "modernbert-base", "error": "x"},
        row("4096", "neobert", "compiled", 160.0, share_of_gemm=0.52),
        row("4096", "modernbert-base", "compiled", 100.0, **gemm_share),
        row("short", "neobert", "sdpa", 30.0, **gemm_share),
        row("short", "neobert", "padded", 10.0, **gemm_share),
    ]
    peaks = [{"length": 4096, "neobert": 19, "modernbert-base": 10}, {"length": 4096, "neobert": 5}]

    table = targets(rows, peaks)
    assert "| 4,096 tokens: best speedup over ModernBERT base | 1.47 | 1.60 | yes |" in table
    assert "| 8,192 tokens: best speedup over ModernBERT base | 1.91 |  |  |" in table, (
        "The cells of a missing result must be empty."
    )
    gemm = "4,096 tokens: fraction of the speed of a bf16 matrix product"
    assert f"| {gemm} | 0.5 | 0.52 | yes |" in table
    assert "| short: speedup of packed over padded | 1.4 | 3.00 | yes |" in table
    memory = "4,096 tokens: peak memory above the weights over ModernBERT base"
    assert f"| {memory} | at most 1.8 | 1.90 | no |" in table
    assert targets([], []).count("|  |  |") == 9


def test_page_contains_the_available_results(tmp_path, capsys):
    """The page contains the results that exist, and links to other pages.

    The command fails if a row has an error.
    """
    assert gpu.main([str(tmp_path)]) == 0, "The command must succeed without results."

    (tmp_path / "variable").mkdir()
    rows = [row("short", "neobert", kind, speed, share_of_gemm=0.4) for kind, speed in SPEEDS]
    result = {"environment": {"hardware": "an H100"}, "rows": rows}
    (tmp_path / "variable" / "throughput.json").write_text(json.dumps(result))
    (tmp_path / "memory.json").write_text(
        json.dumps({"rows": [{"length": 8192, "neobert": 3, "modernbert-base": 2}]})
    )
    (tmp_path / "memory.md").write_text("# Memory")

    assert gpu.main([str(tmp_path)]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "an H100" in page
    assert "| short: speedup of packed over padded | 1.4 | 2.00 | yes |" in page
    assert "over ModernBERT base | at most 1.8 | 1.50 | yes |" in page
    assert "- [memory.md](memory.md)" in page

    rows[0]["error"] = "out of memory"
    (tmp_path / "variable" / "throughput.json").write_text(json.dumps(result))
    assert gpu.main([str(tmp_path)]) == 1


SPEEDS = (("sdpa", 20.0), ("padded", 10.0))


def test_page_is_that_of_the_committed_results(tmp_path):
    """The page results/gpu/gpu.md is the one that `benchmarks.gpu` writes for these results."""
    folder = tmp_path / "gpu"
    shutil.copytree(ROOT / "results" / "gpu", folder)
    (folder / "gpu.md").unlink()
    assert gpu.main([str(folder)]) == 0
    page = (ROOT / "results" / "gpu" / "gpu.md").read_text()
    assert (folder / "gpu.md").read_text() == page
