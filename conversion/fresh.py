"""Runs a script of this folder in a process of its own, which knows neither this package nor the network, and ends in bounded time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from ..common.errors import UserError, one_line


SECONDS = 1800


def run_fresh(script, *arguments, scratch, what, seconds=SECONDS):
    """Runs `conversion/<script>`.

    Args:
        script: name of the file, or its path.
        arguments: for it.
        scratch: folder for all that the process writes on its way.
        what: the subject of the sentence when it fails.
        seconds: until it is stopped.
    Raises:
        UserError: it fails, is ended by a signal, or takes longer.
    """
    environment = {**os.environ, "HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    try:
        process = subprocess.run(
            [sys.executable, "-c", command, str(Path(__file__).parent / script), *map(str, arguments)],
            env={**environment, "TMPDIR": str(scratch)},
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{what}: not done after {seconds} seconds") from None
    if process.returncode < 0:
        raise UserError(f"{what}: the process was ended by {signal.Signals(-process.returncode).name}")
    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"{what}: {one_line(lines[-1], 400) if lines else f'exit code {process.returncode}'}")
