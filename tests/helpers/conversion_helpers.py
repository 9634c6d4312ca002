"""What the tests of conversion/ share: raw checkpoints, the command as a function and as a script,
and all bytes of a folder."""

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
    return command.main([str(argument) for argument in arguments])


def save(folder, state, **config):
    """A raw checkpoint with an optional configuration beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state), folder / "state_dict.pt")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def run_script(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        **kwargs,
    )


def digests(folder):
    """{relative path: content, or the target of a link} of everything below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def write_distributed(folder, engine):
    """Checkpoints of two processes in `folder`, by the engine itself: "deepspeed" (ZeRO 1 to 3) or
    "fsdp"."""
    writer = Path(__file__).with_name("write_distributed_checkpoints.py")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*start, str(writer), str(folder), engine]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    # A process that aborts prints where it was.
    environment["PYTHONFAULTHANDLER"] = "1"
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    return folder


def assert_same(checkpoint, reference):
    """A checkpoint holds just these tensors, bit for bit."""
    tensors = checkpoint.tensors
    assert tensors.keys() == reference.keys(), "the tensors' names are not those that were saved"
    for name, expected in reference.items():
        assert torch.equal(tensors[name].to(expected.dtype), expected), f"{name} is another one"
