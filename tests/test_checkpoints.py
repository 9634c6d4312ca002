"""Pins common/checkpoints.py with plain Trainers: manifests, damage and what is taken in its place,
SIGTERM, disks."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from neobert import __main__ as cli
from neobert.common import checkpoint_files, checkpoints
from neobert.common.errors import Stopped, UserError, is_disk_full
from neobert.common.runs import LOCK, locked


ROOT = Path(__file__).resolve().parent.parent


class Points(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.tensor([i / 64, 1 - i / 64])
        return {"x": x, "y": x.sum() + i % 3}


class Line(torch.nn.Module):
    """Dropout, so that the state of the random numbers counts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout = torch.nn.Linear(2, 1), torch.nn.Dropout(0.5)

    def forward(self, x, y):
        answer = self.linear(self.dropout(x))[:, 0]
        return {"loss": ((answer - y) ** 2).mean(), "logits": answer}


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


class After(At):
    """Does something after a step, when its checkpoint is complete."""

    def on_step_end(self, args, state, control, **kwargs):
        pass

    def on_step_begin(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)


def trainer(folder, *callbacks, model=None, **options):
    settings = {
        "max_steps": 12,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 3,
        "remove_unused_columns": False,
        **options,
    }
    arguments = TrainingArguments(output_dir=str(folder), label_names=["y"], **settings)
    made = Trainer(
        model=model or Line(),
        args=arguments,
        train_dataset=Points(),
        eval_dataset=Points(),
        callbacks=list(callbacks),
    )
    made.compute_metrics = lambda output: {"score": -abs(made.state.global_step - 4)}
    return made


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def weights(made):
    return {name: value.clone() for name, value in made.model.state_dict().items()}


def same(one, two):
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts, with the weights that it ends with."""
    folder = tmp_path_factory.mktemp("whole")
    made = trainer(folder)
    checkpoints.train(made)
    return folder, weights(made)


def test_a_manifest_has_size_and_digest_of_every_file_and_is_written_last(whole):
    folder, _ = whole
    assert list(checkpoint_files.checkpoints(folder)) == [2, 4, 6, 8, 10, 12]
    for step, path in checkpoint_files.checkpoints(folder).items():
        manifest = json.loads((path / checkpoint_files.MANIFEST).read_text())
        files = {
            file.name: file for file in path.iterdir() if file.name != checkpoint_files.MANIFEST
        }
        assert manifest["step"] == step and set(manifest["files"]) == set(files) >= {
            "optimizer.pt",
            "model.safetensors",
            "rng_state.pth",
        }
        for name, file in files.items():
            content = file.read_bytes()
            assert manifest["files"][name] == {
                "size": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }, name
        assert (path / checkpoint_files.MANIFEST).stat().st_mtime_ns >= max(
            file.stat().st_mtime_ns for file in files.values()
        )


def test_old_checkpoints_go_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    seen, write = [], checkpoint_files.write_manifest

    def watched(checkpoint, *given):
        seen.append(list(checkpoint_files.complete(tmp_path)))
        write(checkpoint, *given)

    monkeypatch.setattr(checkpoints, "write_manifest", watched)
    made = trainer(tmp_path, save_total_limit=2)
    checkpoints.train(made, keep_every=4)
    assert seen == [[], [2], [2, 4], [4, 6], [4, 6, 8], [4, 8, 10]], (
        "before each manifest all earlier ones must still be there"
    )
    assert list(checkpoint_files.checkpoints(tmp_path)) == [4, 8, 10, 12], (
        "the newest two and every fourth step's stay"
    )
    assert made.args.save_total_limit == 2, "Trainer's option must be given back"


def files_of(checkpoint):
    return sorted(path.name for path in checkpoint.iterdir())


@pytest.mark.parametrize("how", ["half", "gone", "changed"])
def test_damage_of_any_file_is_found_and_the_run_goes_on_from_the_one_before(
    whole, tmp_path, capsys, how
):
    complete, end = whole
    for name in files_of(complete / "checkpoint-12"):
        folder = tmp_path / name
        shutil.copytree(complete, folder)
        for later in (10, 12):
            shutil.rmtree(folder / f"checkpoint-{later}")
        file = folder / "checkpoint-8" / name
        content = file.read_bytes()
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes(
                content[: len(content) // 2]
                if how == "half"
                else bytes([content[0] ^ 1]) + content[1:]
            )
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert checkpoint_files.newest_complete(folder).name == "checkpoint-6", name
        line = capsys.readouterr().err
        assert (
            line.count("\n") == 1
            and "checkpoint-8 (" in line
            and "going on from checkpoint-6" in line
        ), line
        assert name in line or name == checkpoint_files.MANIFEST, line
        assert before == {
            path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }, "looking must change nothing"
        if name in ("optimizer.pt", "model.safetensors", checkpoint_files.MANIFEST):
            seen = []
            damaged = folder / "damaged-checkpoint-8"
            made = trainer(folder, At(7, lambda: seen.append(damaged.is_dir())))  # noqa: B023
            checkpoints.train(made)
            capsys.readouterr()
            assert seen == [True], "until the run has come as far again the damaged one must stay"
            assert same(weights(made), end), "the continued run must end as the uninterrupted one"
            # without it nothing says that the run made it
            kept = ["damaged-checkpoint-8"] * (name == checkpoint_files.MANIFEST)
            assert sorted(path.name for path in folder.glob("*checkpoint-*")) == sorted(
                [f"checkpoint-{s}" for s in range(2, 13, 2)] + kept
            )


def test_nothing_complete_begins_anew_and_deletes_nothing(tmp_path, capsys):
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"years of work")
    assert checkpoints.resume_point(tmp_path) is None
    line = capsys.readouterr().err.strip()
    assert line.endswith(
        "checkpoint-4 (it was not written to its end); there is no complete checkpoint, beginning "
        "anew"
    )
    assert (
        tmp_path / "damaged-checkpoint-4" / "model.safetensors"
    ).read_bytes() == b"years of work"
    assert (
        checkpoint_files.newest_complete(tmp_path / "absent") is None
        and not capsys.readouterr().err
    )


def test_a_checkpoint_without_the_optimizer_is_not_continued_from(tmp_path, capsys):
    checkpoints.train(trainer(tmp_path, save_only_model=True, max_steps=2))
    assert checkpoint_files.newest_complete(tmp_path) is None
    assert "checkpoint-2 (it has no state of the optimizer)" in capsys.readouterr().err


def test_sigterm_saves_stops_and_the_same_command_goes_on(whole, tmp_path):
    _, end = whole
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(
        Stopped,
        match="^stopped by SIGTERM after step 5 of 12, which is saved; the same command goes on$",
    ):
        checkpoints.train(trainer(tmp_path, At(5, sigterm)))
    assert signal.getsignal(signal.SIGTERM) is before
    assert (
        list(checkpoint_files.checkpoints(tmp_path)) == [2, 4, 5]
        and checkpoint_files.damage(tmp_path / "checkpoint-5") is None
    )
    made = trainer(tmp_path)
    checkpoints.train(made)
    assert made.state.global_step == 12 and same(weights(made), end)


def test_sigterm_where_trainer_has_a_handler_of_its_own(whole, tmp_path):
    """Trainer's enable_jit_checkpoint ends the training without telling the command that it is not
    finished."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="after step 5 of 12"):
        checkpoints.train(trainer(tmp_path, At(5, sigterm), enable_jit_checkpoint=True))
    assert signal.getsignal(signal.SIGTERM) == before, (
        "a handler that nobody serves any more would swallow the signal"
    )
    made = trainer(tmp_path, enable_jit_checkpoint=True)
    checkpoints.train(made)
    assert made.state.global_step == 12 and same(weights(made), whole[1])


def test_sigterm_in_the_last_step_is_not_the_end_either(whole, tmp_path):
    with pytest.raises(Stopped, match="step 12 of 12"):
        checkpoints.train(trainer(tmp_path, At(12, sigterm)))
    for _ in range(2):
        made = trainer(tmp_path, At(13, lambda: pytest.fail("a step after the last")))
        assert checkpoints.train(made).global_step == 12, (
            "the same command then has nothing left to train"
        )
        assert same(weights(made), whole[1]) and not made.is_in_train
    assert made.evaluate()["eval_loss"] > 0


def test_a_finished_run_that_keeps_its_best_weights_ends_with_them_again(tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "score",
        "load_best_model_at_end": True,
    }
    first, second = trainer(tmp_path, **options), trainer(tmp_path, **options)
    checkpoints.train(first)
    checkpoints.train(second)
    assert first.state.best_global_step == second.state.best_global_step == 4
    assert same(weights(first), weights(second))
    assert not same(weights(second), torch_weights(tmp_path / "checkpoint-12")) and same(
        weights(second), torch_weights(tmp_path / "checkpoint-4")
    )


def torch_weights(checkpoint):
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize("eval_steps, stops", [(3, 7), (1, 7)])
def test_sigterm_where_only_the_best_is_saved(tmp_path, eval_steps, stops):
    """An evaluation decides there whether a step is saved: the stop waits for a step without one,
    or goes without it."""
    options = {
        "save_strategy": "best",
        "eval_strategy": "steps",
        "eval_steps": eval_steps,
        "metric_for_best_model": "score",
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    with pytest.raises(Stopped, match=f"after step {stops} of 12"):
        checkpoints.train(trainer(tmp_path, At(6, sigterm), **options))
    best = {3: 3, 1: 4}[eval_steps]
    assert list(checkpoint_files.checkpoints(tmp_path)) == [best, stops], (
        "the best one so far must stay beside the newest"
    )
    made = trainer(tmp_path, **options)
    checkpoints.train(made)
    assert made.state.best_global_step == best


def test_a_command_that_is_stopped_exits_with_143(capsys):
    def stop():
        raise Stopped("stopped by SIGTERM after step 5")

    assert cli.guarded("neobert pretrain", stop) == 143
    assert capsys.readouterr().err == "neobert pretrain: stopped by SIGTERM after step 5\n"

    def other_process():
        raise Stopped("")

    assert cli.guarded("neobert pretrain", other_process) == 143 and not capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# what goes and what stays


def made_by_hand(folder, *names, complete=True):
    for name in names:
        (folder / name).mkdir()
        (folder / name / "optimizer.pt").write_text(name)
        if complete:
            checkpoint_files.write_manifest(folder / name, 0)


STRANGERS = (
    "checkpoint-best",
    "checkpoint-2-copy",
    "damaged-checkpoint-old",
    "damaged-checkpoint-2-copy",
    "my-checkpoint-2",
)


def test_a_checkpoint_has_the_rights_that_the_umask_leaves(tmp_path):
    """The library copies the model's code with the rights of its source."""
    before = os.umask(0o077)
    try:
        made_by_hand(tmp_path, "checkpoint-2", complete=False)
        (tmp_path / "checkpoint-2" / "optimizer.pt").chmod(0o644)
        checkpoint_files.write_manifest(tmp_path / "checkpoint-2", 2)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "checkpoint-2").iterdir()} == {0}


def test_what_is_forgotten(tmp_path):
    """What a user has beside the checkpoints stays."""
    made_by_hand(tmp_path, *(f"checkpoint-{step}" for step in (2, 4, 6, 8, 10)), *STRANGERS)
    made_by_hand(
        tmp_path, "damaged-checkpoint-4.1", "damaged-checkpoint-10", "damaged-checkpoint-12"
    )
    made_by_hand(tmp_path, "checkpoint-12", "damaged-checkpoint-3", complete=False)
    before = set(os.listdir(tmp_path))
    checkpoint_files.forget(tmp_path, 1, 4, str(tmp_path / "checkpoint-2"))
    assert before - set(os.listdir(tmp_path)) == {
        "checkpoint-6",
        "damaged-checkpoint-10",
        "damaged-checkpoint-4.1",
    }


def test_the_best_checkpoint_is_found_where_the_folder_was_moved(tmp_path):
    (tmp_path / "checkpoint-4").mkdir()
    state = SimpleNamespace(
        best_global_step=4,
        best_model_checkpoint="elsewhere/checkpoint-4",
        max_steps=9,
        global_step=6,
    )
    args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=1)
    callback = checkpoints.Checkpoints()
    callback.on_train_begin(args, state, None)
    callback.close()
    assert state.best_model_checkpoint == str(tmp_path / "checkpoint-4")


def test_a_manifest_cannot_name_what_is_outside_of_its_checkpoint(tmp_path):
    checkpoint = tmp_path / "out" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (tmp_path / "mine.txt").write_text("mine")
    files = {
        name: {"size": 4, "sha256": "0"} for name in ("../../mine.txt", str(tmp_path / "mine.txt"))
    }
    (checkpoint / checkpoint_files.MANIFEST).write_text(json.dumps({"step": 1, "files": files}))
    checkpoint_files.remove_checkpoint(checkpoint)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_checkpoint_that_is_half_removed_is_never_taken_and_goes_later(tmp_path, monkeypatch):
    made_by_hand(tmp_path, "checkpoint-2", "checkpoint-4")
    unlink = Path.unlink

    def killed(path, **options):
        if path.suffix == ".json":
            raise KeyboardInterrupt
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint_files.remove_checkpoint(tmp_path / "checkpoint-4")
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-1")
    assert checkpoints.resume_point(tmp_path) == tmp_path / "checkpoint-2"
    checkpoint_files.forget(tmp_path, None, 0)
    assert os.listdir(tmp_path) == ["checkpoint-2"]


def test_killed_while_a_checkpoint_is_written(whole, tmp_path, monkeypatch):
    """The half one says that the run made it, so it goes; a folder of the user under the name of
    the next one does not."""

    def killed(*given, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.train(trainer(tmp_path))
    assert "model.safetensors" in os.listdir(tmp_path / "checkpoint-2")
    assert checkpoints.resume_point(tmp_path) is None and os.listdir(tmp_path) == []

    def mine():
        (tmp_path / "checkpoint-4").mkdir()
        (tmp_path / "checkpoint-4" / "model.safetensors").write_text("mine")

    with pytest.raises(UserError, match="checkpoint-4 was not made by this run; move it"):
        checkpoints.train(trainer(tmp_path, At(3, mine)))
    assert files_of(tmp_path / "checkpoint-4") == ["model.safetensors"]


def test_a_finished_run_loses_its_checkpoints_and_nothing_else(tmp_path):
    made_by_hand(
        tmp_path,
        "checkpoint-2",
        "checkpoint-6",
        "damaged-checkpoint-4",
        "damaged-checkpoint-4.1",
        *STRANGERS,
    )
    (tmp_path / "eval").mkdir()
    (tmp_path / "checkpoint-6" / "notes.txt").write_text("mine")
    checkpoint_files.remove_checkpoints(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*STRANGERS, "checkpoint-6"]) and os.listdir(
        tmp_path / "checkpoint-6"
    ) == ["notes.txt"]
    for name in (*STRANGERS, "checkpoint-6"):
        shutil.rmtree(tmp_path / name)
    checkpoint_files.remove_checkpoints(tmp_path)
    assert not tmp_path.exists()


def test_a_second_damaged_checkpoint_of_one_step_stays_beside_the_first(tmp_path):
    for content in ("first", "second"):
        (tmp_path / "checkpoint-8").mkdir()
        (tmp_path / "checkpoint-8" / "model.safetensors").write_text(content)
        assert checkpoints.resume_point(tmp_path) is None
    assert (tmp_path / "damaged-checkpoint-8" / "model.safetensors").read_text() == "first"
    assert (tmp_path / "damaged-checkpoint-8.1" / "model.safetensors").read_text() == "second"


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.pt",
        "optimizer.bin",
        "optimizer_0/__0_0.distcp",
        "global_step8/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_the_optimizer_of_every_engine_counts_and_is_on_the_disk_before_the_manifest(
    tmp_path, monkeypatch, name
):
    file, synced, fsync = tmp_path / name, set(), os.fsync
    file.parent.mkdir(exist_ok=True)
    file.write_text("state")

    def noted(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    for _ in range(2):  # a step that is saved once more
        checkpoint_files.write_manifest(tmp_path, 8)
        assert file.stat().st_ino in synced and checkpoint_files.damage(tmp_path) is None
        synced.clear()


# ------------------------------------------------------------------------------------------------
# disks


def test_no_room_costs_neither_the_best_checkpoint_nor_those_that_are_kept_for_good(
    tmp_path, monkeypatch
):
    made_by_hand(tmp_path, *(f"checkpoint-{step}" for step in (2, 4, 6, 8, 10)))
    usage = shutil.disk_usage(tmp_path)
    arguments = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(best_model_checkpoint=str(tmp_path / "checkpoint-2"))
    for free, left in ((1 << 20, [2, 4, 6, 8, 10]), (10, [2, 4, 8, 10])):
        monkeypatch.setattr(
            checkpoints.shutil, "disk_usage", lambda folder, free=free: usage._replace(free=free)
        )
        checkpoints.Checkpoints(keep_every=4)._make_room(arguments, state)
        assert list(checkpoint_files.checkpoints(tmp_path)) == left


def test_a_small_disk_loses_older_checkpoints_before_the_next_is_written(tmp_path, monkeypatch):
    """Room for two checkpoints and a half, and three are to be kept."""
    usage = shutil.disk_usage(tmp_path)

    def almost_full(folder):
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        one = max(
            (
                sum(file.stat().st_size for file in path.iterdir())
                for path in checkpoint_files.checkpoints(folder).values()
            ),
            default=1,
        )
        return usage._replace(free=int(2.5 * one) - size)

    monkeypatch.setattr(checkpoints.shutil, "disk_usage", almost_full)
    most, write = [], checkpoint_files.write_manifest
    monkeypatch.setattr(
        checkpoints,
        "write_manifest",
        lambda *given: (most.append(len(checkpoint_files.checkpoints(tmp_path))), write(*given)),
    )
    checkpoints.train(trainer(tmp_path, save_total_limit=3))
    assert max(most) == 2, "a third checkpoint has no room beside two others"
    assert 12 in checkpoint_files.checkpoints(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
        OSError(errno.EDQUOT, "x"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
        RuntimeError("basic_ios::clear: iostream error"),
        RuntimeError(
            "[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing "
            "file data/0: file write failed"
        ),
    ],
)
def test_a_full_disk_is_one_sentence_and_costs_no_checkpoint(tmp_path, monkeypatch, error):
    save = torch.save

    def full(content, path, *args, **kwargs):
        if "checkpoint-6" in str(path):
            raise error
        save(content, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(
            UserError,
            match=(
                "the disk of .* is full .*; make room, and the same command goes on from "
                "checkpoint-4"
            ),
        ):
            checkpoints.train(trainer(tmp_path, save_total_limit=1))
    assert list(checkpoint_files.checkpoints(tmp_path)) == [4], (
        "what was half written must not take room"
    )
    checkpoints.train(trainer(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("megabytes", [0, 1, 64])
def test_torch_that_meets_a_full_disk_is_recognised(megabytes):
    """It says so in its own words, by the size of what it writes: the optimizer's file is the
    largest of a checkpoint."""
    with pytest.raises(Exception) as met:
        torch.save({"state": torch.zeros(megabytes << 18)}, "/dev/full")
    assert is_disk_full(met.value), met.value


def test_a_disk_that_is_full_after_a_checkpoint_costs_it_nothing(tmp_path):
    def full():
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("a cache could not be written") from error

    with pytest.raises(UserError, match="goes on from checkpoint-6"):
        checkpoints.train(trainer(tmp_path, After(6, full)))
    assert list(checkpoint_files.checkpoints(tmp_path)) == [2, 4, 6]
    seen = []
    checkpoints.train(trainer(tmp_path), before=seen.append)
    assert seen == [tmp_path / "checkpoint-6"]


def test_another_error_is_not_taken_for_a_full_disk(tmp_path):
    def broken():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        checkpoints.train(trainer(tmp_path, At(3, broken)))


@pytest.fixture
def package(tmp_path):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "neobert").symlink_to(ROOT)
    return {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "path"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


# ------------------------------------------------------------------------------------------------
# two processes

_TWO = r"""
import os, signal, sys, time
sys.path.insert(0, sys.argv[2])
from neobert.common import checkpoint_files, checkpoints
from neobert.common.runs import locked
from neobert.common.errors import Stopped, UserError
import test_checkpoints as tests

class SlowSave(tests.Trainer):
    def _save_rng_state(self, folder):
        if self.args.process_index == 1:
            time.sleep(0.3)
        super()._save_rng_state(folder)

tests.Trainer = SlowSave

def run(step, folder):
    made = tests.trainer(sys.argv[1], tests.At(step, lambda: made.args.process_index == 1 and tests.sigterm()), save_total_limit=1)

    def body():
        with checkpoints.lock_run(locked(folder)):
            checkpoints.train(made)
            if made.args.process_index == 0:
                made.save_model()

    try:
        code = body() or 0
    except Stopped as stopped:
        code = 143
        print(stopped, file=sys.stderr)
    except UserError as refused:
        code = 2
        print(refused, file=sys.stderr)
    except SystemExit as end:
        code = end.code
    with open(f"{sys.argv[1]}-{made.args.process_index}", "a") as file:
        file.write(f"code {code}, step {made.state.global_step}, {sorted(os.listdir(sys.argv[1]))}\n")

# Launches come one after another: the second begins when all processes of the first have given the folder free.
run(5, sys.argv[1])
time.sleep(2)
run(0, sys.argv[1])
time.sleep(2)
run(0, sys.argv[1] + "-locked")
os._exit(0)
"""  # noqa: E501


@pytest.mark.slow
def test_two_processes_agree_on_the_step_and_write_the_manifest_after_both(tmp_path, package):
    """SIGTERM reaches the second process alone, which is also the last to write its part."""
    (tmp_path / "two.py").write_text(_TWO)
    out = tmp_path / "out"
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(tmp_path / "two.py"),
    ]
    with locked(tmp_path / "out-locked"):
        done = subprocess.run(
            [*launch, str(out), str(ROOT / "tests")],
            env=package,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        stopped, ended, refused = (tmp_path / f"out-{rank}").read_text().splitlines()
        assert (
            stopped.startswith("code 143, step 5, ")
            and "checkpoint-5" in stopped
            and "model.safetensors" not in stopped
        )
        assert ended.startswith("code 0, step 12, ") and refused.startswith("code 2, step 0")
    assert done.stderr.count("stopped by SIGTERM after step 5 of 12") == 1, (
        "one sentence for all processes"
    )
    assert done.stderr.count("is in use by another run") == 1
    assert (
        list(checkpoint_files.checkpoints(out)) == [12]
        and checkpoint_files.damage(out / "checkpoint-12") is None
    )
    manifest = json.loads((out / "checkpoint-12" / checkpoint_files.MANIFEST).read_text())
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= set(manifest["files"])
    assert (out / "model.safetensors").exists() and not (out / LOCK).exists()
