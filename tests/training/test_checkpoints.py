"""Tests of neobert/training/checkpoints.py with a Trainer of a tiny model.

Resumed runs must end with weights that are identical bit for bit. Covers damaged checkpoints,
SIGTERM, the removal of old checkpoints, runs that diverge, and two processes.
"""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.plain_trainer import At, same, sigterm, trainer, weights
from safetensors.torch import load_file

from neobert.common.errors import Stopped, UserError
from neobert.common.output import locked
from neobert.training import checkpoints


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the directory and the final weights of a run without interruptions."""
    folder = tmp_path_factory.mktemp("whole")
    plain_trainer = trainer(folder)
    checkpoints.train(plain_trainer)
    return folder, weights(plain_trainer)


def test_killed_run_resumes_to_identical_weights(whole, tmp_path):
    """Check that a run that was killed twice resumes and ends with identical weights.

    The run is killed in steps 5 and 9, and while checkpoint 10 is written. The training time in the
    log includes the time before the interruptions.
    """

    class Killed(BaseException):
        pass

    def kill():
        raise Killed

    for step in (5, 9):
        with pytest.raises(Killed):
            checkpoints.train(trainer(tmp_path, At(step, kill)))

    # A process that is killed while it writes a checkpoint leaves no trainer_state.json.
    incomplete = tmp_path / "checkpoint-10"
    shutil.copytree(whole[0] / "checkpoint-10", incomplete)
    (incomplete / "trainer_state.json").unlink()

    plain_trainer = trainer(tmp_path)
    checkpoints.train(plain_trainer)

    assert same(weights(plain_trainer), whole[1])
    seconds = [entry["cpu_seconds"] for entry in plain_trainer.state.log_history if "loss" in entry]
    assert len(seconds) == 12
    assert seconds == sorted(seconds)
    assert checkpoints.training_time(plain_trainer)["seconds"] > 0


def test_newest_best_and_every_fourth_checkpoint_are_kept(tmp_path):
    """Check which checkpoints are kept by `save_total_limit`, `keep_every` and `best`."""
    plain_trainer = trainer(tmp_path, save_total_limit=2)
    checkpoints.train(plain_trainer, keep_every=4)
    assert list(checkpoints.checkpoints(tmp_path)) == [4, 8, 10, 12]
    assert plain_trainer.args.save_total_limit == 2, "Trainer's option must be restored"

    (tmp_path / "checkpoint-best").mkdir()
    # As in Trainer, only positive limits remove checkpoints.
    for limit in (None, 0, -1):
        checkpoints.remove_old(tmp_path, limit)
        assert list(checkpoints.checkpoints(tmp_path)) == [4, 8, 10, 12]
    checkpoints.remove_old(tmp_path, 1, best=8)
    assert list(checkpoints.checkpoints(tmp_path)) == [8, 12]
    assert (tmp_path / "checkpoint-best").exists(), (
        "the name is not that of a checkpoint of the run"
    )


HALF = ("model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth")
DAMAGE = [*((name, "half") for name in HALF), *((name, "gone") for name in HALF[:3])]


@pytest.mark.parametrize("name, how", DAMAGE)
def test_damaged_checkpoint_is_skipped(whole, tmp_path, caplog, name, how):
    """Check that a run resumes before a checkpoint with a truncated or missing file.

    The damaged checkpoint is removed, and the run ends with the same weights.
    """
    folder = tmp_path / "out"
    shutil.copytree(whole[0], folder)
    for later in (10, 12):
        shutil.rmtree(folder / f"checkpoint-{later}")
    file = folder / "checkpoint-8" / name
    content = file.read_bytes()
    file.unlink() if how == "gone" else file.write_bytes(content[: len(content) // 2])

    assert checkpoints.newest_checkpoint(folder) == (6, folder / "checkpoint-6")
    (message,) = caplog.messages
    assert "checkpoint-8 (" in message and message.endswith("Resuming from checkpoint-6.")
    assert checkpoints._step_to_resume(folder) == 6
    assert list(checkpoints.checkpoints(folder)) == [2, 4, 6], (
        "the damaged checkpoint must be removed"
    )

    plain_trainer = trainer(folder)
    checkpoints.train(plain_trainer)
    assert same(weights(plain_trainer), whole[1])


@pytest.mark.parametrize("content", [b"", b'{"consumed": 4, "sta', b"\xff\xfe"])
def test_damaged_position_of_a_stream_is_found(whole, tmp_path, content):
    """Check that a checkpoint with a damaged JSON file, such as stream_0.json, is not readable."""
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(whole[0] / "checkpoint-4", checkpoint)
    (checkpoint / "stream_0.json").write_text("{}")
    checkpoints.check_checkpoint(checkpoint)
    (checkpoint / "stream_0.json").write_bytes(content)
    with pytest.raises(ValueError, match="^stream_0.json: "):
        checkpoints.check_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "change, difference",
    [
        (lambda state: [], "Expected `object`, got `array`"),
        (lambda state: {}, "Object missing required field `.*`"),
        (
            lambda state: {**state, "global_step": "4"},
            r"Expected `int`, got `str` - at `\$.global_step`",
        ),
        (lambda state: {**state, "later": 1}, "this version of transformers has no key 'later'"),
        (lambda state: {**state, "stateful_callbacks": {}}, "Object missing .*`TrainerControl`.*"),
    ],
    ids=["list", "empty", "text", "unknown", "callbacks"],
)
def test_state_without_the_keys_of_trainer_is_damaged(whole, tmp_path, change, difference):
    """A trainer_state.json that Trainer cannot resume from is reported, and nothing is removed."""
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(whole[0] / "checkpoint-4", checkpoint)
    state = checkpoint / "trainer_state.json"
    state.write_text(json.dumps(change(json.loads(state.read_text()))))

    message = rf"must be readable, got checkpoint-4 \(trainer_state.json: {difference}\)"
    with pytest.raises(UserError, match=message):
        checkpoints.train(trainer(tmp_path))
    assert checkpoint.is_dir()


def test_checkpoint_is_kept_after_a_transient_error(whole, tmp_path, monkeypatch):
    """An error of a network file system stops the run, and removes no checkpoint."""
    folder = tmp_path / "out"
    shutil.copytree(whole[0], folder)
    before = list(checkpoints.checkpoints(folder))

    def unreadable(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(checkpoints, "check_checkpoint", unreadable)
    with pytest.raises(OSError, match="Stale file handle"):
        checkpoints._step_to_resume(folder)
    assert list(checkpoints.checkpoints(folder)) == before


def test_run_without_valid_checkpoint_starts_from_the_beginning(tmp_path, caplog):
    """Check that a run with a damaged checkpoint only starts from the beginning, with a warning."""
    assert checkpoints.newest_checkpoint(tmp_path / "absent") is None
    (tmp_path / "checkpoint-2").mkdir()
    assert checkpoints.newest_checkpoint(tmp_path) is None
    assert "There is no other checkpoint." in caplog.text


def test_complete_but_unreadable_checkpoints_are_not_removed(whole, tmp_path):
    """Check that a run whose complete checkpoints all lack a file stops, and removes none of them.

    A checkpoint that a killed process has left behind, with a missing or truncated last file, is
    removed, and the run starts from the beginning.
    """
    folder = tmp_path / "out"
    shutil.copytree(whole[0], folder)
    steps = list(checkpoints.checkpoints(folder))
    for path in folder.glob("checkpoint-*/optimizer.pt"):
        path.unlink()
    damage = r"\(the state of the optimizer is missing\)"
    message = f"must be readable, got checkpoint-2 {damage}, .* Restore their files, or remove"
    with pytest.raises(UserError, match=message):
        checkpoints.train(trainer(folder))
    assert list(checkpoints.checkpoints(folder)) == steps

    for step in steps[2:]:
        shutil.rmtree(folder / f"checkpoint-{step}")
    (folder / "checkpoint-2" / "trainer_state.json").unlink()
    (folder / "checkpoint-4" / "trainer_state.json").write_text('{"epoch": 0.')
    assert checkpoints._step_to_resume(folder) is None
    assert not checkpoints.checkpoints(folder)


@pytest.mark.parametrize("more", [{}, {"enable_jit_checkpoint": True}], ids=str)
def test_run_stopped_by_sigterm_resumes(whole, tmp_path, more):
    """Check that SIGTERM writes a checkpoint and ends the run, which can then be resumed.

    Trainer has its own handler with `enable_jit_checkpoint`, which would end the run as if it had
    finished.
    """
    before = signal.getsignal(signal.SIGTERM)
    message = "^stopped by SIGTERM after step 5 of 12. Run the same command again to resume from"
    with pytest.raises(Stopped, match=message):
        checkpoints.train(trainer(tmp_path, At(5, sigterm), **more))
    assert signal.getsignal(signal.SIGTERM) == before
    assert list(checkpoints.checkpoints(tmp_path)) == [2, 4, 5]

    plain_trainer = trainer(tmp_path, **more)
    checkpoints.train(plain_trainer)
    assert plain_trainer.state.global_step == 12 and same(weights(plain_trainer), whole[1])


def test_sigterm_in_the_last_step_resumes_without_another_step(whole, tmp_path):
    """Check that a run that was stopped after its last step is resumed without another step.

    Trainer itself would train one more step.
    """
    with pytest.raises(Stopped, match="step 12 of 12"):
        checkpoints.train(trainer(tmp_path, At(12, sigterm)))
    plain_trainer = trainer(tmp_path, At(13, lambda: pytest.fail("the run took another step")))
    checkpoints.train(plain_trainer)
    assert same(weights(plain_trainer), whole[1]) and not plain_trainer.is_in_train
    assert plain_trainer.evaluate()["eval_loss"] > 0


BEST = {"eval_strategy": "steps", "metric_for_best_model": "score", "load_best_model_at_end": True}


def test_best_weights_are_loaded_from_a_moved_directory(tmp_path):
    """Check that the best weights are loaded although the path in the saved state is outdated."""
    first = trainer(tmp_path / "one", eval_steps=2, **BEST)
    checkpoints.train(first)
    shutil.move(tmp_path / "one", tmp_path / "two")
    second = trainer(tmp_path / "two", eval_steps=2, **BEST)
    checkpoints.train(second)
    assert first.state.best_global_step == second.state.best_global_step == 4
    assert same(weights(first), weights(second))
    assert same(weights(second), load_file(tmp_path / "two/checkpoint-4/model.safetensors"))


@pytest.mark.parametrize("eval_steps", [3, 1])
def test_sigterm_with_save_strategy_best(tmp_path, eval_steps):
    """Check that a run with `save_strategy="best"` can be stopped and resumed.

    With this strategy, an evaluation decides whether a step is saved, so there may be no checkpoint
    of the last step. The resumed run has the same result as a run without interruptions.
    """
    options = {"save_strategy": "best", "eval_steps": eval_steps, "save_total_limit": 1, **BEST}
    uninterrupted = trainer(tmp_path / "whole", **options)
    checkpoints.train(uninterrupted)

    with pytest.raises(Stopped, match="after step 6 of 12"):
        checkpoints.train(trainer(tmp_path / "out", At(6, sigterm), **options))
    plain_trainer = trainer(tmp_path / "out", **options)
    checkpoints.train(plain_trainer)

    assert plain_trainer.state.best_global_step == uninterrupted.state.best_global_step
    assert same(weights(plain_trainer), weights(uninterrupted))


@pytest.mark.parametrize("what", ["loss", "weights"])
def test_diverged_run_stops_without_saving(tmp_path, what):
    """Check that a loss or a weight that is NaN ends the run before the next checkpoint.

    A weight that is set to NaN after step 5 affects the loss of step 6. After step 6, a checkpoint
    is due, and the weights are checked before they are saved.
    """
    plain_trainer = trainer(tmp_path, logging_nan_inf_filter=False)

    def spoil():
        plain_trainer.model.linear.weight.data.fill_(math.nan)

    plain_trainer.add_callback(At(5 if what == "loss" else 6, spoil))
    with pytest.raises(UserError, match=f"the run has diverged: the {what} .* learning_rate below"):
        checkpoints.train(plain_trainer)
    assert list(checkpoints.checkpoints(tmp_path)) == [2, 4]


# ------------------------------------------------------------------------------------------------
# Two processes

_TWO = r"""
import os, sys, time
sys.path[:0] = sys.argv[2:]
from neobert.common.errors import Stopped, UserError
from neobert.common.output import Output
from neobert.training import checkpoints
from helpers import plain_trainer as tests

class SlowSave(tests.PlainTrainer):
    def _save_optimizer_and_scheduler(self, folder):
        super()._save_optimizer_and_scheduler(folder)
        if self.args.process_index == 1:
            time.sleep(0.3)

tests.PlainTrainer = SlowSave

def run(step, folder):
    at = tests.At(step, lambda: plain_trainer.args.process_index == 1 and tests.sigterm())
    plain_trainer = tests.trainer(folder, at, save_total_limit=1)
    try:
        with checkpoints.claim(Output(folder, "test", {})):
            checkpoints.train(plain_trainer)
        code = 0
    except Stopped as stopped:
        code = 143
        print(stopped, file=sys.stderr)
    except UserError as refused:
        code = 2
        print(refused, file=sys.stderr)
    except SystemExit as end:
        code = end.code
    with open(f"{sys.argv[1]}-{plain_trainer.args.process_index}", "a") as file:
        file.write(f"code {code}, step {plain_trainer.state.global_step}\n")

# One after another: the second begins when all processes of the first have released the folder.
run(5, sys.argv[1])
time.sleep(1)
run(0, sys.argv[1])
time.sleep(1)
run(0, sys.argv[1] + "-locked")
os._exit(0)
"""


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step_and_share_the_lock(tmp_path):
    """Check that both processes stop after the same step if only the second one receives SIGTERM.

    The second process is also the last one to write its part of the checkpoint. A directory that
    another process has locked is rejected in both processes, with one message.
    """
    (tmp_path / "two.py").write_text(_TWO)
    out = tmp_path / "out"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    with locked(tmp_path / "out-locked"):
        process = subprocess.run(
            [*launch, str(tmp_path / "two.py"), str(out), str(ROOT), str(ROOT / "tests")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )

    assert process.returncode == 0, process.stderr[-3000:]
    for rank in range(2):
        assert (tmp_path / f"out-{rank}").read_text().splitlines() == [
            "code 143, step 5",
            "code 0, step 12",
            "code 2, step 0",
        ]
    assert process.stderr.count("stopped by SIGTERM after step 5 of 12") == 1
    assert process.stderr.count("is in use by another run") == 1

    assert list(checkpoints.checkpoints(out)) == [12]
    names = {path.name for path in (out / "checkpoint-12").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= names
