"""Outputs of commands: nothing is ever removed that the same command did not make.

A folder that is written at once is made beside its place and takes its name when it is complete
(`new_folder`). Its manifest,
`<command>.json`, has size and time of every file. Only what carries the manifest, and holds nothing
else, may be replaced. It is moved away first and removed last. For folders that grow while a run
works see runs.py.
"""

import contextlib
import errno
import glob
import json
import os
import secrets
import shutil
from pathlib import Path

from .errors import UserError, listed
from .files import (
    TEXT_LIMIT,
    json_text,
    read_json,
    read_text,
    redacted,
    settle,
    write_json,
    write_text,
)
from .runs import OWNER, locked, own_folder, split_files, stamps


# ------------------------------------------------------------------------------------------------
# what a command may replace


def check_folder(path, name):
    """Raises UserError when the folder `path`, the value of argument `name`, cannot be made because
    it or one above it is a file."""
    for place in (Path(path), *Path(path).parents):
        if place.exists() and not place.is_dir():
            raise UserError(f"{name} must be a folder or a new name, but {place} is a file")


def earlier_result(path, *keys):
    """The JSON object in a result file, where it has all of `keys`; None for any other file, or
    none."""
    try:
        data = json.loads(read_text(path, 16 * TEXT_LIMIT))
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and set(keys) <= data.keys() else None


def check_result_files(folder, command, earlier, *names):
    """Raises UserError when `command` would replace a file that it did not write.

    Args:
        folder: may not be there yet.
        command: name of the command.
        earlier: its earlier results in `folder`; without them no file of these names may be there.
        names: of the files that the command writes into `folder`.
    """
    for path in (Path(folder) / name for name in names):
        if not earlier and os.path.lexists(path):
            raise UserError(
                f"{path} was not made by neobert {command}, so it is not replaced; move it, or "
                "choose another folder"
            )


def _is_same(path, other):
    """Whether two resolved paths are one place, under two names as well: on a disk that ignores
    case, or mounted twice."""
    try:
        return path == other or os.path.samefile(path, other)
    except OSError:
        return False


def check_apart(output, *inputs):
    """Raises UserError when the output is an input, holds one, or is inside of one; links are
    resolved first."""
    target = Path(os.path.realpath(output))
    for given in inputs:
        source = Path(os.path.realpath(given))
        if _is_same(target, source):
            raise UserError(f"the output {output} is the input {given} itself; choose another name")
        if any(_is_same(target, folder) for folder in source.parents):
            raise UserError(
                f"the output {output} holds the input {given}; choose a folder of its own"
            )
        if any(_is_same(source, folder) for folder in target.parents):
            raise UserError(
                f"the output {output} is inside the input {given}; choose a folder outside of it"
            )


def read_manifest(folder, command):
    """The manifest of a folder that `command` wrote: "files" {relative path: size and time} and its
    content; None for any other folder."""
    try:
        manifest = read_json(Path(folder) / f"{command}.json", 16 * TEXT_LIMIT)
    except UserError:
        return None
    ours = (
        isinstance(manifest, dict)
        and manifest.get("command") == command
        and isinstance(manifest.get("files"), dict)
    )
    return manifest if ours else None


def check_replaceable(folder, command):
    """Raises UserError unless `folder`, which is there, was written by `command`, and holds nothing
    else and nothing that was changed."""
    folder = Path(os.path.realpath(folder))
    manifest = read_manifest(folder, command)
    if manifest is None:
        raise UserError(
            f"{folder} was not written by neobert {command} (it has no {command}.json), so it is "
            "not replaced; remove it yourself"
        )
    known = {*split_files(folder, manifest["files"])[0], folder / f"{command}.json"}
    paths = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    foreign = [path.relative_to(folder) for path in paths if path not in known]
    if foreign:
        raise UserError(
            f"{folder} holds files that neobert {command} did not write, or that were changed "
            f"since: {listed(foreign, 5)}; "
            "it is not replaced: move them, or choose another output"
        )


# ------------------------------------------------------------------------------------------------
# complete folders, one rename


# A folder is made in a workplace beside it, `.<name>.writing-<random>`, which says whose it is, and
# which its process keeps locked.
_NEW, _OLD = "new", "old"


@contextlib.contextmanager
def _workplace(target, command):
    """A locked folder beside `target`, removed at the end unless it holds an earlier output."""
    place = target.with_name(f".{target.name}.writing-{secrets.token_hex(4)}")
    with locked(place):
        write_json(place / OWNER, {"command": command, "output": target.name})
        try:
            yield place
        finally:
            if not (place / _OLD).exists():
                shutil.rmtree(place, ignore_errors=True)


def recover(folder, command):
    """Cleans up after killed runs: deletes half-written folders beside `folder`, and restores an
    output that was moved away.

    Args:
        folder: an output, there or not.
        command: whose manifest it carries. Only folders are touched in which a run of it left its
            mark.
    """
    folder = Path(os.path.realpath(folder))
    for place in sorted(folder.parent.glob(f".{glob.escape(folder.name)}.writing-*")):
        with contextlib.suppress(UserError):  # its process is alive
            if own_folder(place, command=command, output=folder.name):
                with locked(place):
                    if (place / _OLD).exists() and not os.path.lexists(folder):
                        os.rename(place / _OLD, folder)
                    if not (place / _OLD).exists() or read_manifest(folder, command) is not None:
                        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def new_folder(output, command, replace=False, content=None):
    """An empty folder beside `output` that takes its name when the block ends well, and vanishes
    when it does not.

    Its parent is a workplace of this process, which vanishes with all that it holds.

    Args:
        output: may be a link, whose target is then written.
        command: whose manifest the folder gets.
        replace: whether an output of the same command may be replaced. It keeps its place until the
            new one is complete, and comes back if the last rename fails.
        content: of the manifest; what is added to it in the block counts.
    Raises:
        UserError: there is something at `output` that may not be replaced; also when it came
            meanwhile.
    """
    target = Path(os.path.realpath(output))
    recover(target, command)
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _workplace(target, command) as place:
            folder, old = place / _NEW, place / _OLD
            folder.mkdir()
            yield folder
            files = [
                path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
            ]
            for name in files:
                settle(folder / name)
            # Sizes are no secrets, though the file be called token.json.
            manifest = {
                "command": command,
                **redacted(content or {}),
                "files": stamps(folder, files),
            }
            write_text(folder / f"{command}.json", json_text(manifest))
            try:
                if target.is_dir() and any(target.iterdir()):
                    if not replace:
                        raise UserError(
                            f"{output} was written by another process meanwhile; nothing of it was "
                            "replaced"
                        )
                    check_replaceable(target, command)
                    os.rename(target, old)
                os.rename(folder, target)  # never overwrites a folder with files
                shutil.rmtree(old, ignore_errors=True)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise UserError(
                        f"{output} was written by another process meanwhile; nothing of it was "
                        "replaced"
                    ) from None
                raise
            finally:
                if old.exists() and not os.path.lexists(target):
                    os.rename(old, target)
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
