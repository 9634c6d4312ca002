"""The one owner of an output folder: is this the same run as before, and what in the folder is its
own?

    run = Run(folder, "contrastive", settings)
    with run.claim(overwrite):
        if run.state == "finished": ...        # "new", "begun" or "finished"
        scratch = run.scratch()                # write the output here
        run.finish(run.move_in(scratch), steps=100)

A run marks its folder with a JSON file: what it is known by, and when it is finished the files that
it wrote, with size and time. What no marker names, or what was changed since, is the user's and is
never touched; links are never followed for writing. The folder is locked before anything in it is
looked at.
"""

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict, fields
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import UserError, listed, shortened
from .files import TEXT_LIMIT, read_json, redacted, settle, write_json


LOCK, OWNER = ".lock", ".neobert.json"
_ASIDE = ".before-overwrite"  # in the folder: the finished output that is being made anew


@contextlib.contextmanager
def locked(folder):
    """Within it no other run has `folder`, which is made if it is not there. The lock ends with its
    process, also after a kill -9.

    Raises:
        UserError: another run has it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or path.stat().st_size):
        raise UserError(
            f"{path} is not a lock that neobert made; move it, or choose another folder"
        )
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{folder} is in use by another run; wait until it has ended, or choose another folder"
        ) from None
    try:
        yield
    finally:
        # while it is held: whoever waits for it sees that the file is gone
        path.unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):
            folder.rmdir()  # nothing was written


# ------------------------------------------------------------------------------------------------
# what the marks of a run say


def stamps(folder, names):
    """{name: [bytes, time of the last change in ns]} of files in `folder`, as a marker keeps
    them."""
    found = {str(name): os.stat(Path(folder) / name) for name in sorted(map(str, names))}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def split_files(folder, files):
    """(own, changed): those of `files`, {name: stamp}, that are regular files in `folder` as they
    were written, and the others there."""
    folder, own, changed = Path(os.path.realpath(folder)), [], []
    for name, stamp in files.items():
        path = Path(os.path.normpath(folder / name))
        if folder in path.parents and os.path.lexists(path):
            regular = os.path.realpath(path) == str(path) and path.is_file()
            (own if regular and stamps(folder, [name])[name] == stamp else changed).append(path)
    return own, changed


def remove_files(folder, files):
    """Removes the own ones of `files` and the folders that they leave empty, `folder` itself
    too."""
    for path in split_files(folder, files)[0]:
        path.unlink(missing_ok=True)
        remove_empty(path.parent, folder)


def remove_empty(place, folder):
    """Removes `place` and the folders above it up to `folder`, as far as they are empty."""
    folder = Path(os.path.realpath(folder))
    with contextlib.suppress(OSError):
        while place == folder or folder in place.parents:
            place.rmdir()
            place = place.parent


def own_folder(path, **owner):
    """Whether `path` is a folder, and no link, whose `OWNER` file says this."""
    path = Path(path)
    if path.is_symlink() or not (path / OWNER).is_file():
        return False
    try:
        mark = read_json(path / OWNER)
    except UserError:
        return False
    return isinstance(mark, dict) and owner.items() <= mark.items()


def changed_settings(before, now):
    """Names of the settings that differ between two dicts."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _short(value):
    return shortened(repr(value), 60)


def run_settings(*options):
    """{name: value} of the options that a run is known by: all fields of these dataclasses but
    those with `free=True`."""
    known = {
        f.name for given in options for f in fields(given) if f.init and not f.metadata.get("free")
    }
    return {
        name: value for given in options for name, value in asdict(given).items() if name in known
    }


# ------------------------------------------------------------------------------------------------
# the run


class Run:
    """A command's run in an output folder.

    Args:
        folder: the output.
        command: name of the command.
        settings: what the run is known by.
        name: of the marker, `<command>.json` by default.
        key: under which the marker has the settings; None: among its other keys.
        takes: whether something of a name must not be there before the run begins; by default
            nothing may.
    Attributes:
        folder: where links lead, if it is one.
        settings: of JSON types and without secrets.
        state: after `inspect` and within `claim`: "new", "begun" (by a process that ended) or
            "finished".
        marker: content of the marker: "command", "run", the settings, and once it is finished
            "files" and what `finish` was given.
        before: the marker that is overwritten, {} if there is none.
    """

    def __init__(
        self, folder, command, settings, name=None, key="settings", takes=lambda name: True
    ):
        self.folder = Path(os.path.realpath(folder))
        self.command = command
        self.key = key
        self.takes = takes
        self.path = self.folder / (name or f"{command}.json")
        self.settings = json.loads(json.dumps(redacted(settings), default=str))
        self.state, self.marker, self.before = None, None, {}

    @property
    def id(self):
        """Sixteen hex digits: what one run writes, no other has."""
        return hashlib.sha256(
            json.dumps([self.command, self.settings], sort_keys=True).encode()
        ).hexdigest()[:16]

    def inspect(self, overwrite=False):
        """Sets `state` and `marker` by what the folder holds, and returns the state. Changes
        nothing.

        Args:
            overwrite: whether another run, or a finished one, is replaced; None for a command
                without this option.
        Raises:
            UserError: it holds something else, without `overwrite` another run, or with it files
                that were changed since.
        """
        self.state, self.marker, self.before = "new", self._read(self.path), {}
        if self.marker is None:
            found = (
                sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
            )
            # The second of them: a marker that is being written.
            others = [
                name
                for name in found
                if self.takes(name) and name != LOCK and not name.startswith(f".{self.path.name}.")
            ]
            if others:
                raise UserError(
                    f"{self.folder} holds other files ({listed(others, 3)}); choose another output"
                )
            return self.state
        changed = changed_settings(self._settings(self.marker), self.settings)
        if overwrite and (changed or "files" in self.marker):
            self.before, self.marker = self.marker, None
            if edited := split_files(self.folder, self.before.get("files", {}))[1]:
                names = listed((path.relative_to(self.folder) for path in edited), 5)
                raise UserError(
                    f"{self.folder} holds files that were changed since ({names}); move them, or "
                    "choose another output"
                )
        elif changed:
            before = self._settings(self.marker)
            told = (
                f"{name} {_short(before.get(name))}, now {_short(self.settings.get(name))}"
                for name in changed
            )
            raise UserError(
                f"{self.folder} holds a run with other settings ({listed(told, 5)}); give the "
                "same, or choose another output"
                + ("" if overwrite is None else ", or give --overwrite")
            )
        else:
            self.state = "finished" if "files" in self.marker else "begun"
        return self.state

    def _settings(self, marker):
        written = {"command", "run", "files", "moving"}
        return (
            marker.get(self.key, {})
            if self.key
            else {name: value for name, value in marker.items() if name not in written}
        )

    def _read(self, path):
        """The marker in a file, None where there is none."""
        if not os.path.lexists(path):
            return None
        marker = read_json(path, 16 * TEXT_LIMIT)
        ours = (
            isinstance(marker, dict) and marker.get("command") == self.command and "run" in marker
        )
        if (
            not ours
            or not isinstance(marker.get("files", {}), dict)
            or not isinstance(marker.get(self.key, {}), dict)
        ):
            raise UserError(
                f"{path} is damaged, or not of this version of neobert {self.command}; choose "
                "another output"
            )
        return marker

    @contextlib.contextmanager
    def claim(self, overwrite=False, begin=True):
        """Locks the folder, looks at it, and marks it, unless the command calls `begin` itself when
        its input is read.

        Raises:
            UserError: as `inspect`; another run has the folder.
        """
        with locked(self.folder):
            if self.inspect(overwrite) == "finished":
                self._remove_aside()  # its process was killed before it did
            if begin:
                self.begin()
            yield self

    def begin(self, **more):
        """Marks a new run, with `more`. The files of a finished run wait in `.before-overwrite`
        until this one is finished."""
        if self.state == "new":
            self._set_aside()
            self.mark(**more)

    def mark(self, **more):
        """Writes the marker of a run that has begun, with `more`."""
        settings = {self.key: self.settings} if self.key else self.settings
        self.marker = {"command": self.command, "run": self.id, **settings, **more}
        write_json(self.path, self.marker)

    def _set_aside(self):
        """Moves what the marker of a finished run names. Of an unfinished one the result goes: what
        was set aside before it is complete."""
        if "files" not in self.before:
            remove_files(self.folder, self.before.get("moving", {}))
            if own_folder(
                left := self._scratch_folder(self.before.get("run")), run=self.before.get("run")
            ):
                shutil.rmtree(left)
            return
        aside = self.folder / _ASIDE
        # else it was killed while it moved them
        if self._read(aside / self.path.name) != self.before:
            self._remove_aside()
            if aside.is_symlink() or (aside.exists() and any(aside.iterdir())):
                raise UserError(
                    f"{aside} holds files of somebody else; move it, or choose another output"
                )
            aside.mkdir(exist_ok=True)
            write_json(aside / self.path.name, self.before)
        for path in split_files(self.folder, self.before["files"])[0]:
            target = aside / path.relative_to(self.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            remove_empty(path.parent, self.folder)

    def _remove_aside(self):
        aside = self.folder / _ASIDE
        if not aside.is_symlink() and (marker := self._read(aside / self.path.name)):
            remove_files(aside, marker["files"])
            (aside / self.path.name).unlink()
            remove_empty(aside, self.folder)

    @property
    def scratch_folder(self):
        """Where `scratch` is."""
        return self._scratch_folder(self.id)

    def _scratch_folder(self, run):
        return self.folder / f".{self.command}-{run}"

    def scratch(self):
        """An empty folder in the output, of this run alone, whose mark says so. What a killed
        process of the run left there goes.

        Raises:
            UserError: there is something of that name that the run did not make.
        """
        path, owner = self.scratch_folder, {"command": self.command, "run": self.id}
        if own_folder(path, **owner):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            raise UserError(
                f"{path} was not made by neobert {self.command}; move it, and give the same "
                "command again"
            )
        path.mkdir()
        write_json(path / OWNER, owner)
        return path

    def move_in(self, scratch, *last):
        """Moves the files of `scratch` into the output, one by one; those named `last` at the end.
        Returns their names.

        Raises:
            UserError: there is one of these names that the run did not write. Then nothing was
                moved.
        """
        found = [
            path.relative_to(scratch).as_posix()
            for path in scratch.rglob("*")
            if path.is_file() and path.name != OWNER
        ]
        names = [*sorted(set(found) - set(last)), *(name for name in last if name in found)]
        written = {**self.marker.pop("files", {}), **self.marker.get("moving", {})}
        own = split_files(self.folder, written)[0]
        targets = {name: self.folder / name for name in names if self.folder / name not in own}
        if others := [
            name
            for name, path in targets.items()
            if os.path.lexists(path) or path.parent != Path(os.path.realpath(path.parent))
        ]:
            raise UserError(
                f"{self.folder} holds files that this run did not write ({listed(others, 3)}); "
                "move them, and give the same command again: nothing was lost"
            )
        for name in names:
            settle(scratch / name)
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        self.marker["moving"] = {**written, **stamps(scratch, names)}
        write_json(self.path, self.marker)
        for name in names:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(scratch / name, self.folder / name)
        shutil.rmtree(scratch)
        return names

    def finish(self, names, **content):
        """Marks the run as finished; then what it replaces goes.

        Args:
            names: of the files that it wrote, relative to the folder.
            content: more for the marker.
        """
        marker = {name: value for name, value in self.marker.items() if name != "moving"}
        self.marker = {**marker, **redacted(content), "files": stamps(self.folder, names)}
        write_json(self.path, self.marker)
        self._remove_aside()
        self.state = "finished"
