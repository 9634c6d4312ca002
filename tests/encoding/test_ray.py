"""Tests of examples/encode_ray.py on a local Ray cluster, of which a worker is killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


pytest.importorskip("ray")
pytest.importorskip("sentence_transformers")
import pyarrow
import pyarrow.parquet
from helpers.encode_runs import bits, embed, make_model_folder  # noqa: F401


pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
# Maximum time of a run in seconds, which is also sufficient on slow machines.
TIMEOUT = 900


def start(tmp_path, model_folder, *options):
    """Start the example as a process."""
    # By default Ray ends and replaces workers that take more than 60 seconds to start.
    timeout = {"RAY_worker_register_timeout_seconds": "600"}
    environment = {**os.environ, **timeout, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    script = [sys.executable, str(ROOT / "examples" / "encode_ray.py")]
    paths = [str(tmp_path / "corpus"), str(tmp_path / "out"), "--model", str(model_folder)]
    return subprocess.Popen(
        [*script, *paths, "--rows", "50", "--dtype", "float32", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def workers():
    """Return the process ids of the Ray workers, which are found by their titles."""
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
    return {int(line.split()[0]) for line in lines.splitlines() if "ray::encode_shard" in line}


def test_killed_worker_does_not_lose_or_duplicate_rows(tmp_path, model_folder):
    """The output of a run with a killed worker has the bytes of a run of one process.

    Running the command again encodes a missing part only.
    """
    (tmp_path / "corpus").mkdir()
    for number in range(6):
        texts = [f"text {number} {i} " + "word " * ((7 * i) % 40) for i in range(300)]
        table = pyarrow.table({"id": [300 * number + i for i in range(300)], "text": texts})
        pyarrow.parquet.write_table(table, tmp_path / "corpus" / f"{number}.parquet")

    workers_of_others = workers()
    process = start(tmp_path, model_folder, "--shards", "2")
    limit = time.monotonic() + TIMEOUT
    while not (parts := list((tmp_path / "out").glob("[0-9]*.parquet"))):
        assert time.monotonic() < limit and process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.02)

    assert len(parts) < 36 and (worker_ids := workers() - workers_of_others), "no worker is running"
    os.kill(min(worker_ids), signal.SIGKILL)

    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0 and "out: 1,800 texts; nothing new to encode" in output, output[
        -3000:
    ]

    embed(tmp_path / "corpus", tmp_path / "alone", model_folder, rows=50)
    assert bits(tmp_path / "out") == bits(tmp_path / "alone")
    assert pyarrow.parquet.read_table(tmp_path / "out")["id"].to_pylist() == list(range(1800))

    (tmp_path / "out" / "3-00002.parquet").unlink()
    output, _ = start(tmp_path, model_folder, "--shards", "2").communicate(timeout=TIMEOUT)
    assert re.search(r"\b50 texts in a shard; ", output), output[-3000:]
    assert re.search(r"\b0 texts in a shard; ", output), output[-3000:]
    assert bits(tmp_path / "out") == bits(tmp_path / "alone")
