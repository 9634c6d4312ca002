"""Output directory of a long-running command.

The directory identifies the run, records whether it has finished, and locks out other processes.

    output = Output("runs/mine", "contrastive", settings)
    if output.state() == "finished": ...
    with output.claim():                  # checkpoints and temporary files are written to it
        with output.final_files() as folder:
            model.save_pretrained(folder)
        output.finish(steps=100)

`run.json` identifies the run in progress. `result.json` is the last file of a run, and records that
the run has finished. Files of others are never replaced or removed.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from .errors import UserError, listed
from .files import read_json, redacted, write_json
from .folders import LOCK, check_folder, flush, locked


RUN = "run.json"
RESULT = "result.json"
_FINAL = ".final.tmp"


def is_record_of(command: str, content: Any) -> bool:
    """Return whether the content of a JSON file is the record of a run of a command."""
    # A file of another program may contain any JSON.
    if not isinstance(content, dict) or content.get("neobert") != command:
        return False
    return isinstance(content.get("settings"), dict)


def differences(previous: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the differences between two dicts as text, "seed 1, now 2", or "" if there is none."""
    changes = [
        f"{name} {previous.get(name)!r:.60}, now {settings.get(name)!r:.60}"
        for name in {**previous, **settings}
        if previous.get(name) != settings.get(name)
    ]
    return listed(changes, 5)


class Output:
    """Run of a command in its output directory.

    Args:
        folder: Output directory, which is created by `claim`.
        command: Name of the command.
        settings: Values that identify the run: options, and digests of the input.
        preexisting: Names of files that may exist before the run, such as `prepared`.

    Attributes:
        settings: The settings as JSON types, without secrets.
        result: Path of result.json, the last file.
    """

    def __init__(
        self,
        folder: str | Path,
        command: str,
        settings: Mapping[str, Any],
        preexisting: Iterable[str] = (),
    ) -> None:
        self.folder = Path(folder)
        self.command = command
        # The settings are compared with those of run.json, so they must have the types of JSON:
        # lists instead of tuples, and text instead of paths.
        self.settings: dict[str, Any] = json.loads(json.dumps(redacted(settings), default=str))
        self.result = self.folder / RESULT
        self.preexisting = {*preexisting, LOCK}

    def state(self) -> Literal["new", "unfinished", "finished"]:
        """Return the state of the run. The directory is not changed.

        Raises:
            UserError: If the directory contains other files, or files of a run with other settings.
        """
        check_folder(self.folder)
        # Temporary files of an interrupted run do not count: the next run replaces them.
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        names = {path.name for path in paths if not re.fullmatch(r"\..*\.tmp", path.name)}

        # A run has either record. Both have the same form, see `claim` and `finish`.
        record_path = self.result if self.result.name in names else self.folder / RUN
        record = read_json(record_path) if record_path.name in names else {}
        if is_record_of(self.command, record):
            changes = differences(record["settings"], self.settings)
            if not changes:
                return "finished" if record_path == self.result else "unfinished"
            # The other run ended before it had written anything.
            if not names - self.preexisting - {RUN}:
                return "new"
            raise UserError(
                f"{self.folder} contains a run with other settings ({changes}). Repeat its "
                "settings to resume it, remove the directory, or choose another output."
            )

        others = sorted(names - self.preexisting)
        if others:
            raise UserError(
                f"{self.folder} contains files that this command did not write "
                f"({listed(others, 3)}). Remove them, or choose another output directory."
            )
        return "new"

    @contextlib.contextmanager
    def claim(self) -> Iterator["Output"]:
        """Lock the directory, create it if necessary, and record the run.

        Raises:
            UserError: If another process uses the directory, or as in `state`.
        """
        # The first check avoids a lock file in a directory of other programs. The second one is
        # decisive: another process may have started the run in the meantime.
        self.state()
        with locked(self.folder):
            if self.state() == "new":
                write_json(self.folder / RUN, {"neobert": self.command, "settings": self.settings})
            yield self

    @property
    def final_files_folder(self) -> Path:
        """Directory that `final_files` yields."""
        return self.folder / _FINAL

    @contextlib.contextmanager
    def final_files(self) -> Iterator[Path]:
        """Yield an empty directory, whose files are moved into the output at the end of the block.

        After an exception no file is moved.
        """
        shutil.rmtree(self.final_files_folder, ignore_errors=True)
        self.final_files_folder.mkdir()
        yield self.final_files_folder

        # An interruption between two moves is harmless: the run is unfinished until `finish`, and
        # writes its final files again.
        for path in sorted(path for path in self.final_files_folder.rglob("*") if path.is_file()):
            flush(path)
            target = self.folder / path.relative_to(self.final_files_folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
        shutil.rmtree(self.final_files_folder)

    def finish(self, **content: Any) -> None:
        """Write the last file: the command, the settings, and `content`."""
        record = {"neobert": self.command, "settings": self.settings, **redacted(content)}
        # The name of the last file appears in a single step, with its complete content.
        write_json(self.folder / RUN, record)
        os.replace(self.folder / RUN, self.result)
