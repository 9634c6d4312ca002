"""Shared functions of the tests of the conversion: checkpoints, commands, and comparisons."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from neobert.conversion import command


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "convert_checkpoint.py"


def convert(*arguments):
    """Run the conversion command in this process and return its exit code."""
    return command.main([str(argument) for argument in arguments])


def save(folder, state, **config):
    """Write a raw checkpoint, and a config.json beside it if fields are passed."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state), folder / "state_dict.pt")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def run_script(*arguments, **kwargs):
    """Run convert_checkpoint.py in a new process and return the completed process."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        **kwargs,
    )


def digests(folder):
    """Return everything below a directory as {relative path: content}.

    The content is the bytes of a file, the target of a link, and False for a directory.
    """
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def write_distributed(folder, engine):
    """Write checkpoints of two processes with the engine itself, and return `folder`.

    Args:
        folder: Directory for the checkpoints.
        engine: "deepspeed" for checkpoints of ZeRO 1 to 3, or "fsdp".
    """
    writer = Path(__file__).with_name("write_distributed_checkpoints.py")

    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*start, str(writer), str(folder), engine]

    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    # A process that aborts prints its stack trace.
    environment["PYTHONFAULTHANDLER"] = "1"

    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr[-3000:]
    return folder


def assert_same(checkpoint, reference):
    """Assert that a checkpoint has exactly the reference's tensors, bit for bit."""
    tensors = checkpoint.tensors
    assert tensors.keys() == reference.keys(), "The tensor names differ from the saved ones."
    for name, expected in reference.items():
        assert torch.equal(tensors[name].to(expected.dtype), expected), (
            f"The tensor {name} differs from the saved one."
        )
