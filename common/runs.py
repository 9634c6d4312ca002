"""The one owner of an output folder: is this the same run as before, and what in the folder is its own?

    run = Run(folder, "contrastive", settings)
    with run.claim(overwrite):
        if run.state == "finished": ...        # "new", "begun" or "finished"
        run.finish(["model.safetensors", ...], steps=100)

A run marks its folder with `<command>.json`: what it is known by, and when it is finished the names of the files that it wrote. What no
marker names is the user's and is never touched. The folder is locked before anything in it is looked at.
"""

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import UserError, listed
from .files import TEXT_LIMIT, read_json, redacted, write_json


LOCK = ".lock"
_ASIDE = ".before-overwrite"  # in the folder: the finished output that is being made anew


@contextlib.contextmanager
def locked(folder):
    """Within it no other run has `folder`, which is made if it is not there. The lock ends with its process, also after a kill -9.

    Raises:
        UserError: another run has it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    if path.is_symlink() or (path.exists() and path.stat().st_size):
        raise UserError(f"{path} is not a lock that neobert made; move it, or choose another folder")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"{folder} is in use by another run; wait until it has ended, or choose another folder") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever waits for it sees that the file is gone
        lock.release()
        with contextlib.suppress(OSError):
            folder.rmdir()  # nothing was written


def own_files(folder, names):
    """Those of `names`, paths relative to `folder`, that are regular files inside of it; a link or a folder of that name is the user's."""
    folder = Path(os.path.realpath(folder))
    for name in names:
        path = folder / name
        if folder in path.parents and path.is_file() and os.path.realpath(path) == str(path):
            yield path


class Run:
    """A command's run in an output folder.

    Attributes:
        folder: where links lead, if it is one.
        settings: what the run is known by, of JSON types and without secrets.
        state: within `claim`: "new", "begun" (by a process that ended) or "finished".
        marker: content of the marker: "command", "run", "settings", and once it is finished "files" and what `finish` was given.
    """

    def __init__(self, folder, command, settings):
        self.folder, self.command = Path(os.path.realpath(folder)), command
        self.settings = json.loads(json.dumps(redacted(settings), default=str))
        self.state, self.marker = None, None

    @property
    def path(self):
        return self.folder / f"{self.command}.json"

    @property
    def id(self):
        """Sixteen hex digits: what one run writes, no other has."""
        return hashlib.sha256(json.dumps([self.command, self.settings], sort_keys=True).encode()).hexdigest()[:16]

    def inspect(self, overwrite=False):
        """Sets `state` and `marker` by what the folder holds. Changes nothing.

        Raises:
            UserError: it holds something else, or without `overwrite` another run.
        """
        marker = self._read()
        if marker is None:
            others = [path.name for path in self.folder.iterdir() if path.name != LOCK] if self.folder.is_dir() else []
            if others:
                raise UserError(f"{self.folder} holds other files ({listed(others, 3)}); choose another output")
            self.state = "new"
            return
        before = marker["settings"]
        changed = [name for name in {**before, **self.settings} if before.get(name) != self.settings.get(name)]
        if overwrite and (changed or "files" in marker):
            self.state = "new"
        elif changed:
            raise UserError(
                f"{self.folder} holds a run with other settings ({listed(changed, 5)} differ); choose another output, or give --overwrite"
            )
        else:
            self.state, self.marker = "finished" if "files" in marker else "begun", marker

    def _read(self):
        """The marker in the folder, None where there is none."""
        if not os.path.lexists(self.path):
            return None
        marker = read_json(self.path, 16 * TEXT_LIMIT)
        if not isinstance(marker, dict) or marker.get("command") != self.command or not isinstance(marker.get("settings"), dict):
            raise UserError(f"{self.path} is damaged or not of neobert {self.command}; choose another output")
        return marker

    @contextlib.contextmanager
    def claim(self, overwrite=False):
        """Locks the folder and marks it. With `overwrite` the files of a finished run wait in `.before-overwrite` until this one is finished.

        Raises:
            UserError: as `inspect`; another run has the folder.
        """
        with locked(self.folder):
            self.inspect(overwrite)
            if self.state == "new":
                self._set_aside()
                self.mark()
            yield self

    def mark(self, **more):
        """Writes the marker of a run that has begun, with `more` that a continuation needs."""
        self.marker = {"command": self.command, "run": self.id, "settings": self.settings, **more}
        write_json(self.path, self.marker)

    def _set_aside(self):
        """Moves what the marker of a finished run names. An unfinished run leaves what was set aside before it, and its own marker goes."""
        marker = self._read()
        if marker is None or "files" not in marker:
            return
        self._remove_aside()
        for path in own_files(self.folder, [*marker["files"], self.path.name]):
            target = self.folder / _ASIDE / path.relative_to(self.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)

    def _remove_aside(self):
        aside = self.folder / _ASIDE
        if (aside / self.path.name).is_file():
            shutil.rmtree(aside)

    def finish(self, files, **content):
        """Marks the run as finished; then what it replaces goes.

        Args:
            files: names of the files that it wrote, relative to the folder.
            content: more for the marker.
        """
        self.marker = {**self.marker, **redacted(content), "files": sorted(map(str, files))}
        write_json(self.path, self.marker)
        self._remove_aside()
        self.state = "finished"
