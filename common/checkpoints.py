"""Checkpoints of a Trainer's run: which of them are complete."""

import json
import shutil
from pathlib import Path


def last_whole_checkpoint(folder):
    """The newest checkpoint-<n> that was written to its end, or None; broken ones are deleted.

    Trainer writes trainer_state.json last.
    """
    found = sorted(Path(folder).glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    for path in reversed(found):
        try:
            json.loads((path / "trainer_state.json").read_text())
            return path
        except (OSError, ValueError):
            shutil.rmtree(path, ignore_errors=True)  # another process may be at it too
    return None
