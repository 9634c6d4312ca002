"""Tests of neobert/training/run.py.

A run is trained once and resumed after an interruption. A second process is rejected while the
first one trains the run, and only the main process of a run writes files.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.plain_trainer import At, PlainTrainer, same, sigterm, trainer, weights
from transformers import TrainingArguments

from neobert.common.errors import Stopped, UserError
from neobert.common.output import Output
from neobert.training.run import check_weights_are_complete, mixed_precision, run_once


ROOT = Path(__file__).resolve().parents[2]


def save(plain_trainer: PlainTrainer, folder: Path) -> dict:
    """Write a file to a directory, and return the number of steps as the result."""
    (folder / "weights.txt").write_text("final")
    return {"steps": plain_trainer.state.global_step}


def train(folder: Path, *callbacks: At) -> tuple[dict, PlainTrainer]:
    """Train 12 steps in a directory, and return the result and the trainer."""
    trainers = []

    def build() -> PlainTrainer:
        trainers.append(trainer(folder / "checkpoints", *callbacks))
        return trainers[0]

    result = run_once(
        Output(folder, "test", {"seed": 3}), build, save, checkpoint_folder=folder / "checkpoints"
    )
    return result, trainers[0]


def unexpected(*_: object) -> None:
    """Fail the test, as a function that must not be called."""
    pytest.fail("the function must not be called")


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files in a directory by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("method", ["FSDP", "ZeRO-3"])
def test_sharded_weights_are_refused_before_training(tmp_path, method):
    """Commands that evaluate and save in the main process alone need all weights there."""
    plain_trainer = trainer(tmp_path / "checkpoints")
    state = SimpleNamespace(
        deepspeed_plugin=SimpleNamespace(zero_stage=3) if method == "ZeRO-3" else None,
        fsdp_plugin=object() if method == "FSDP" else None,
    )
    plain_trainer.accelerator = SimpleNamespace(state=state)
    with pytest.raises(UserError, match=f"but {method} divides them. Use DDP"):
        check_weights_are_complete(plain_trainer)

    plain_trainer.saves_sharded_weights = True
    check_weights_are_complete(plain_trainer)


def test_finished_run_returns_its_result(tmp_path):
    """Check that a second call returns the result of a finished run and writes nothing.

    Other settings raise an error.
    """
    first, _ = train(tmp_path)
    assert first["steps"] == 12 and first["seconds"] > 0 and first["cpu_seconds"] > 0
    assert first["environment"]["dtype"] == "float32" and first["environment"]["processes"] == 1
    assert json.loads((tmp_path / "result.json").read_text()) == first
    before = files(tmp_path)
    assert {"result.json", "weights.txt"} <= set(before) and "run.json" not in before

    again = run_once(Output(tmp_path, "test", {"seed": 3}), unexpected, unexpected)
    assert again == first and files(tmp_path) == before

    with pytest.raises(UserError, match="contains a run with other settings"):
        run_once(Output(tmp_path, "test", {"seed": 4}), unexpected, unexpected)


def test_progress_is_not_printed_to_stdout(tmp_path, capsys):
    """Check that text that is printed during training appears on stderr."""
    train(tmp_path, At(3, lambda: print("a log record")))
    captured = capsys.readouterr()
    assert captured.out == "" and "a log record" in captured.err


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path):
    """Check that a stopped run resumes after its last step and ends with identical weights."""
    _, uninterrupted = train(tmp_path / "whole")

    with pytest.raises(Stopped):
        train(tmp_path / "out", At(5, sigterm))
    assert not (tmp_path / "out/result.json").exists()
    assert (tmp_path / "out/checkpoints/checkpoint-5").is_dir()

    first_steps = []
    result, resumed = train(
        tmp_path / "out", At(6, lambda: first_steps.append(6)), At(5, unexpected)
    )
    assert result["steps"] == 12 and first_steps == [6]
    assert same(weights(resumed), weights(uninterrupted))


def test_checkpoints_are_removed_and_logs_kept(tmp_path):
    """Check that a finished run has no checkpoints, and its TensorBoard logs are in `runs`."""
    log = tmp_path / "checkpoints/runs/today/events"

    def write_log() -> None:
        log.parent.mkdir(parents=True)
        log.write_text("log")

    train(tmp_path, At(3, write_log))
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "runs/today/events").read_text() == "log"

    # A process that was killed between the last file and the removal leaves checkpoints.
    (tmp_path / "checkpoints/checkpoint-12").mkdir(parents=True)
    output = Output(tmp_path, "test", {"seed": 3})
    run_once(output, unexpected, unexpected, checkpoint_folder=tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()


def test_output_in_use_is_rejected_before_loading(tmp_path):
    """Check that a directory in use is rejected before data and models are loaded."""

    def build() -> PlainTrainer:
        with pytest.raises(UserError, match="in use by another run"):
            run_once(Output(tmp_path, "test", {}), unexpected, unexpected)
        return trainer(tmp_path / "checkpoints", max_steps=1)

    assert run_once(Output(tmp_path, "test", {}), build, save)["steps"] == 1


def test_run_finished_by_another_process_is_not_repeated(tmp_path):
    """Check that the state of the run is read again after the directory has been claimed.

    The other process finishes the run between the first check and the claim.
    """
    train(tmp_path)

    class FinishedMeanwhile(Output):
        """Output whose state is "unfinished" in the first call of `state`."""

        looks = 0

        def state(self) -> str:
            self.looks += 1
            return "unfinished" if self.looks == 1 else super().state()

    output = FinishedMeanwhile(tmp_path, "test", {"seed": 3})
    assert run_once(output, unexpected, unexpected)["steps"] == 12


def test_on_resume_is_called_with_the_checkpoint_before_training(tmp_path):
    """Check that `on_resume` is called once, before Trainer loads the checkpoint."""
    with pytest.raises(Stopped):
        train(tmp_path, At(5, sigterm))
    calls = []

    class Resumed(PlainTrainer):
        def on_resume(self, checkpoint: Path) -> None:
            calls.append((checkpoint.name, self.state.global_step))

    plain_trainer = trainer(tmp_path / "checkpoints")
    plain_trainer.__class__ = Resumed
    run_once(Output(tmp_path, "test", {"seed": 3}), lambda: plain_trainer, save)
    assert calls == [("checkpoint-5", 0)]


@pytest.mark.parametrize(
    "bf16, fp16, name",
    [
        (False, False, "float32"),
        (True, False, "bfloat16 autocast"),
        (False, True, "float16 autocast"),
    ],
)
def test_mixed_precision_names_the_dtype(tmp_path, bf16, fp16, name):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    args.bf16 = bf16
    args.fp16 = fp16
    assert mixed_precision(args) == name


# ------------------------------------------------------------------------------------------------
# Two processes

_TWO = r"""
import os, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import torch
from helpers import plain_trainer
from neobert.common.errors import UserError
from neobert.common.output import Output
from neobert.training.checkpoints import on_main
from neobert.training.run import run_once

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
out = Path(sys.argv[1])
saved_by = []

def save(trainer, folder):
    assert folder.is_dir()
    saved_by.append(rank)
    if rank == 0:
        (folder / "model.txt").write_text("weights")
    return {"rank": rank}

def build():
    return plain_trainer.trainer(out / "checkpoints", max_steps=2)

result = run_once(Output(out, "test", {}), build, save, checkpoint_folder=out / "checkpoints")
assert result["rank"] == 0 and result["environment"]["processes"] == 2, result
assert saved_by == [rank]
assert on_main(lambda: {"rank": rank}) == {"rank": 0}
assert on_main(lambda: None) is None

def fail():
    raise UserError(f"refused in {rank}")

try:
    on_main(fail)
except UserError as error:
    end = str(error)
except SystemExit as error:
    end = f"exit {error.code}"
Path(f"{out}-{rank}").write_text(end)
torch.distributed.barrier()
os._exit(0)
"""


@pytest.mark.slow
def test_all_processes_save_and_the_main_process_writes(tmp_path):
    """Check that all processes call `save`, and the result is that of the main process.

    An error in the main process ends the other processes with exit code 2.
    """
    script = tmp_path / "two.py"
    script.write_text(_TWO)
    out = tmp_path / "out"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]

    process = subprocess.run(
        [*launch, str(script), str(out), str(ROOT), str(ROOT / "tests")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )

    assert process.returncode == 0, process.stderr[-3000:]
    names = {path.name for path in out.iterdir()}
    assert names - {".lock"} == {"model.txt", "result.json"}
    assert Path(f"{out}-0").read_text() == "refused in 0"
    assert Path(f"{out}-1").read_text() == "exit 2"
