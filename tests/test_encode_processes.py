"""Pins `neobert encode` in several processes: two write what one writes, ranks share the parts of
one output evenly, and any process may die and be started again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest


pytest.importorskip("sentence_transformers")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from encode_runs import (
    cut_of,
    embed,
    make_corpus,  # noqa: F401
    make_model_folder,  # noqa: F401
    read_parquet,
    texts_of_many_lengths,
)

from neobert.common.errors import UserError
from neobert.embeddings import encode_workers
from neobert.embeddings.encode import main
from neobert.embeddings.encode_workers import Rank


@pytest.mark.slow
def test_two_processes_write_what_one_writes(corpus, model_folder, tmp_path):
    arguments = [
        str(corpus),
        "--model",
        str(model_folder),
        "--shard-rows",
        "16",
        "--dtype",
        "float32",
    ]
    assert main([arguments[0], str(tmp_path / "one.parquet"), *arguments[1:]]) == 0
    assert (
        main([arguments[0], str(tmp_path / "two.parquet"), *arguments[1:], "--processes", "2"]) == 0
    )
    one, two = read_parquet(tmp_path / "one.parquet"), read_parquet(tmp_path / "two.parquet")
    assert one[0]["id"].equals(two[0]["id"])
    np.testing.assert_allclose(one[1], two[1], atol=1e-5)


# ------------------------------------------------------------------------------------------------
# any process may die


def program(tmp_path, slow=0.0):
    """A script that runs `neobert encode` with its arguments and takes `slow` seconds more for each
    part."""
    path = tmp_path / "run.py"
    path.write_text(
        "import sys, time, torch, neobert.__main__ as cli\n"
        "from neobert.embeddings import encode_workers\n"
        "write = encode_workers.write_part\n"
        "def slowly(*part):\n"
        f"    time.sleep({slow}); write(*part)\n"
        "encode_workers.write_part = slowly\n"
        "if __name__ == '__main__':\n"
        "    torch.set_num_threads(1); sys.exit(cli.main(['encode', *sys.argv[1:]]))\n"
    )
    return [sys.executable, str(path)]


def start(command, rank=None, world=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if rank is not None:
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(condition, process, seconds=90):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "nothing happened"
        if process.poll() not in (None, 0):
            raise AssertionError(process.stdout.read()[-3000:])
        time.sleep(0.02)


def parts_of(folder):
    return sorted(path.name for path in folder.glob("part-*")) if folder.is_dir() else []


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(corpus, model_folder, tmp_path):
    """kill -9 leaves the parent no time to end its workers."""
    arguments = [
        str(corpus),
        str(tmp_path / "out"),
        "--model",
        str(model_folder),
        "--shard-rows",
        "1",
        "--processes",
        "2",
    ]
    process = start([*program(tmp_path, slow=1.0), *arguments])
    wait_for(lambda: parts_of(tmp_path / "out"), process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2, "vacuous: there are no workers"
    process.kill()
    process.wait()
    limit = time.monotonic() + 10
    while any(
        Path(f"/proc/{pid}").exists() and "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
        for pid in workers
    ):
        assert time.monotonic() < limit, "a worker outlives its parent"
        time.sleep(0.1)


def assert_same_parts(folder, alone):
    assert parts_of(folder) == parts_of(alone) and len(parts_of(folder)) == 14
    for name in parts_of(folder):
        one, shared = (pyarrow.parquet.read_table(path / name) for path in (alone, folder))
        assert one.equals(shared), f"{name} of the ranks is not, bit for bit, that of one process"


@pytest.mark.slow
def test_a_rank_is_killed_and_started_again_while_the_first_waits(corpus, model_folder, tmp_path):
    embed(corpus, tmp_path / "alone", model_folder, shard_rows=5)
    arguments = [
        str(corpus),
        str(tmp_path / "out"),
        "--model",
        str(model_folder),
        "--shard-rows",
        "5",
        "--dtype",
        "float32",
    ]
    ranks = [start([*program(tmp_path, slow=0.3), *arguments], rank, 2) for rank in range(2)]
    wait_for(lambda: "part-000008.parquet" in parts_of(tmp_path / "out"), ranks[1])
    ranks[1].kill()
    ranks[1].wait()
    assert len(parts_of(tmp_path / "out")) < 14, "vacuous: the killed rank had finished"
    again = start([*program(tmp_path), *arguments], 1, 2)
    assert again.wait(timeout=120) == 0, again.stdout.read()[-3000:]
    output, _ = ranks[0].communicate(timeout=120)
    assert (
        ranks[0].returncode == 0 and "parts of other ranks; start a rank that died again" in output
    ), output[-3000:]
    assert_same_parts(tmp_path / "out", tmp_path / "alone")
    finished = json.loads((tmp_path / "out" / "encode.json").read_text())
    assert finished["finished"]["rows"] == 70 and finished["environment"]["ranks"] == 2


def test_ranks_that_die_and_are_started_again(corpus, model_folder, tmp_path, monkeypatch):
    embed(corpus, tmp_path / "alone", model_folder, shard_rows=5)
    write, written = encode_workers.write_part, []

    def run(rank, dies_after=None, output="out"):
        def die(path, *rest):
            if len(written) == dies_after:
                raise KeyboardInterrupt
            written.append(path.name)
            write(path, *rest)

        written.clear()
        monkeypatch.setattr(encode_workers, "write_part", die)
        for name, value in (("RANK", rank), ("WORLD_SIZE", 3), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        try:
            return embed(corpus, tmp_path / output, model_folder, shard_rows=5)
        except KeyboardInterrupt:
            return None

    assert run(0, dies_after=1) is None  # after the plan
    assert run(2, dies_after=2) is None and len(parts_of(tmp_path / "out")) == 3
    own = run(1)["encoded_rows"]
    assert 0 < own < 35, "a rank does its own share"
    assert run(2)["encoded_rows"] + own < 70 and len(written) < 5, (
        "the rank that was started again made parts a second time"
    )
    assert run(0)["cut"] == cut_of(model_folder, texts_of_many_lengths(70)), (
        "the texts that other ranks cut are not counted"
    )
    assert_same_parts(tmp_path / "out", tmp_path / "alone")
    with pytest.raises(UserError, match="--overwrite is not possible with several ranks"):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=5, overwrite=True)
    # The same as one file: the last to come is the first rank.
    assert run(0, dies_after=0, output="one.parquet") is None
    run(1, output="one.parquet"), run(2, output="one.parquet"), run(0, output="one.parquet")
    assert np.array_equal(
        read_parquet(tmp_path / "one.parquet")[1],
        np.concatenate(
            [read_parquet(tmp_path / "alone" / n)[1] for n in parts_of(tmp_path / "alone")]
        ),
    )
    assert run(1, output="one.parquet")["finished"], (
        "a rank that is started after the end has nothing to do"
    )


def test_every_window_has_one_rank_and_ranks_are_even():
    sizes = np.random.default_rng(0).integers(1, 1000, 400)
    for world in (1, 3, 8, 500):
        shares = [Rank(rank, world).share(sizes) for rank in range(world)]
        assert sorted(sum(shares, [])) == list(range(400)), (
            f"{world} ranks: a window has no rank, or two"
        )
        assert all(share == list(range(share[0], share[-1] + 1)) for share in shares if share), (
            "a share is not of neighbours"
        )
        if world <= 8:
            loads = [sizes[share].sum() for share in shares]
            assert max(loads) - min(loads) <= 2 * 1000, f"{world} ranks: {loads}"


def test_ranks_of_torchrun_and_slurm(monkeypatch):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")  # in a batch script without srun
    assert Rank.from_environment() == Rank(0, 1, 0)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert Rank.from_environment() == Rank(5, 8, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Rank.from_environment() == Rank(2, 4, 0), "torchrun's numbers come first"
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(
        UserError,
        match="RANK=4 and WORLD_SIZE=4 must be the number of a process and of all processes",
    ):
        Rank.from_environment()
