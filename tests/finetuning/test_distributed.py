"""Test that training in two processes gives the result of one process.

The processes are started by torchrun, with gloo on the CPU. With the same global batch size,
`neobert glue` must give the evaluations and weights of a single process. `neobert contrastive` must
give the losses and weights of a single process with gradient accumulation.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.glue_runs import make_world  # noqa: F401
from helpers.jsonl import write_jsonl


pytest.importorskip("sentence_transformers")

from safetensors.torch import load_file

from neobert import cli


pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
WORDS = "river stone music paper table winter cold water hard rock sweet sound".split()


@pytest.fixture(scope="module")
def folder(world):
    """Return the directory of `world` with an additional file of pairs.

    A tenth of the 160 rows of SST-2 is held out. The others are exactly 9 batches of 16, so no
    process repeats rows to fill the last batch.
    """
    # Three rows share each positive. A global batch of 8 rows must not contain two of them, whether
    # it is computed in one process or in two.
    rows = [
        {"anchor": f"{word} number {i}", "positive": f"{i % 24} {word}"}
        for i, word in enumerate(WORDS * 6)
    ]
    write_jsonl(world / "pairs.jsonl", rows)
    return world


def both_ways(folder, name, arguments, single, double):
    """Run `neobert` in this process and in two processes, and return both output directories.

    Args:
        folder: Directory of the outputs.
        name: Prefix of the names of the outputs.
        arguments: Arguments of both runs.
        single: Additional arguments of the run in one process, before its output.
        double: Additional arguments of the run in two processes, before its output.
    """
    outputs = [folder / f"{name}-one", folder / f"{name}-two"]
    assert cli.main([*arguments, *single, str(outputs[0])]) == 0

    # torchrun needs a free port.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(ROOT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    run = subprocess.run(
        [*launcher, "--master_port", port, "-m", "neobert", *arguments, *double, str(outputs[1])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, f"neobert {name} failed in two processes:\n{run.stderr[-3000:]}"
    return outputs


def assert_same_weights(one, two, start):
    """Assert that two files of weights are equal up to rounding, and that training changed them.

    Args:
        one: File of the first run.
        two: File of the second run.
        start: File with the weights before training. Their names may have another prefix.
    """
    one = load_file(one)
    two = load_file(two)
    assert one.keys() == two.keys()
    embedding = next(name for name in one if name.endswith("encoder.weight"))
    moved = (one[embedding] - load_file(start)["model.encoder.weight"]).abs().max().item()
    assert moved > 1e-3, "Training did not change the weights, so the comparison is meaningless."

    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-2 * moved), f"{name} differs."


def test_glue_in_two_processes(folder):
    """`neobert glue` has the same evaluations and weights in one process and in two."""
    arguments = [
        *("glue", "--task", "sst2", "--model", str(folder / "model")),
        *("--data", str(folder / "data"), "--seeds", "1", "--num-train-epochs", "2"),
        *("--batch_size", "16", "--learning_rate", "3e-3", "--head-dropout", "0", "--output"),
    ]
    one, two = both_ways(folder, "glue", arguments, [], [])

    (first,), (second,) = (list(output.glob("*/sst2/*")) for output in (one, two))
    # The number of processes is not part of the settings, so a run can be resumed with another
    # number of processes.
    assert first.name == second.name

    results = [json.loads((run / "result.json").read_text()) for run in (first, second)]
    assert [result["environment"]["processes"] for result in results] == [1, 2]
    one, two = (result["evaluations"] for result in results)
    assert one[-1]["score"] > one[0]["score"], (
        "The score did not improve, so the comparison is meaningless."
    )
    assert one == two
    assert_same_weights(
        *(run / "best" / "model.safetensors" for run in (first, second)),
        folder / "model" / "model.safetensors",
    )


def test_contrastive_in_two_processes(folder):
    """Two processes give the losses and weights of one process with two accumulation steps."""
    arguments = [
        *("contrastive", "--model", str(folder / "model"), "--pairs", str(folder / "pairs.jsonl")),
        *("--max_steps", "6", "--use_cpu", "true", "--max_length", "32", "--logging_steps", "1"),
        *("--learning_rate", "1e-3", "--per_device_train_batch_size", "4"),
    ]
    single = ["--gradient_accumulation_steps", "2", "--output"]
    one, two = both_ways(folder, "contrastive", arguments, single, ["--output"])

    results = [json.loads((output / "result.json").read_text()) for output in (one, two)]
    assert [result["environment"]["processes"] for result in results] == [1, 2]
    losses = [[loss for _, loss in result["training"]["losses"]] for result in results]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert_same_weights(
        one / "model.safetensors", two / "model.safetensors", folder / "model" / "model.safetensors"
    )
