"""Outputs of commands: nothing is ever removed that the same command did not make.

A command marks what it writes: a folder by a manifest, `<command>.json`, with the digest of each file; a single file in its own metadata.
Only what carries the mark, and holds nothing else, may be replaced. It is moved away first and removed last.
"""

import contextlib
import errno
import fnmatch
import glob
import json
import os
import shutil
import tempfile
from pathlib import Path

from .errors import UserError, listed
from .files import TEXT_LIMIT, json_text, read_json, read_text, redacted, sha256, write_text


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


# ------------------------------------------------------------------------------------------------- what a command may replace


def check_folder(path, name):
    """Raises UserError when the folder `path`, the value of argument `name`, cannot be made because it or one above it is a file."""
    for place in (Path(path), *Path(path).parents):
        if place.exists() and not place.is_dir():
            raise UserError(f"{name} must be a folder or a new name, but {place} is a file")


def earlier_result(path, *keys):
    """The JSON object in a result file, where it has all of `keys`; None for any other file, or none."""
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
            raise UserError(f"{path} was not made by neobert {command}, so it is not replaced; move it, or choose another folder")


def _is_same(path, other):
    """Whether two resolved paths are one place, under two names as well: on a disk that ignores case, or mounted twice."""
    try:
        return path == other or os.path.samefile(path, other)
    except OSError:
        return False


def check_apart(output, *inputs):
    """Raises UserError when the output is an input, holds one, or is inside of one; links are resolved first."""
    target = Path(os.path.realpath(output))
    for given in inputs:
        source = Path(os.path.realpath(given))
        if _is_same(target, source):
            raise UserError(f"the output {output} is the input {given} itself; choose another name")
        if any(_is_same(target, folder) for folder in source.parents):
            raise UserError(f"the output {output} holds the input {given}; choose a folder of its own")
        if any(_is_same(source, folder) for folder in target.parents):
            raise UserError(f"the output {output} is inside the input {given}; choose a folder outside of it")


def write_manifest(folder, command, content=None):
    """Marks a finished folder as the output of `command`: `<command>.json` with `content` and the digest of every file.

    Args:
        folder: a folder of regular files.
        command: name of the command.
        content: more to keep in the manifest.
    """
    files = {path.relative_to(folder).as_posix(): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    # A digest is no secret, though the file be called token.json.
    write_text(folder / f"{command}.json", json_text({"command": command, **redacted(content or {}), "files": files}))


def read_manifest(folder, command):
    """What `write_manifest` wrote in a folder: "files" {relative path: digest} and the content; None for any other folder."""
    try:
        manifest = read_json(folder / f"{command}.json", 16 * TEXT_LIMIT)
    except UserError:
        return None
    ours = isinstance(manifest, dict) and manifest.get("command") == command and isinstance(manifest.get("files"), dict)
    return manifest if ours else None


def _matches(name, pattern):
    """Whether a relative path matches a pattern of as many parts, or is below a folder of a pattern that ends in /**."""
    parts, patterns = name.split("/"), pattern.split("/")
    if patterns[-1] == "**":
        patterns.pop()
        parts = parts[: len(patterns)] if len(parts) > len(patterns) else []
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatch, parts, patterns))


def check_replaceable(folder, command, working_files=()):
    """Raises UserError unless `folder` is an output of `command` and holds nothing else.

    Args:
        folder: an existing folder.
        command: name of the command whose manifest it must carry.
        working_files: patterns of files that the command writes on its way, relative to the folder: "part-*.parquet", or "checkpoints/checkpoint-*/**".
    """
    manifest, foreign = read_manifest(folder, command), []
    if manifest is None:
        raise UserError(
            f"{folder} was not written by neobert {command} (it has no {command}.json), so it is not replaced; remove it yourself"
        )
    digests = manifest["files"]
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            foreign.append(name)
        elif path.is_dir() or name == f"{command}.json" or any(_matches(name, pattern) for pattern in working_files):
            continue
        elif name not in digests or digests[name] != sha256(path):
            foreign.append(name)
    if foreign:
        raise UserError(
            f"{folder} holds files that neobert {command} did not write, or that were changed since: {listed(foreign, 5)}; "
            "it is not replaced: move them, or choose another output"
        )


# ------------------------------------------------------------------------------------------------ complete folders, one rename


# A folder is made in a workplace beside it, `.<name>.writing-<random>`, which its process keeps locked while it lives.
_NEW, _OLD = "new", "old"


def _lock(place):
    """An open descriptor that keeps a workplace locked; None if another process has it, or where files cannot be locked."""
    if fcntl is None:
        return None
    try:
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(place)):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


@contextlib.contextmanager
def _workplace(target):
    """A locked folder beside `target`, removed at the end unless it holds an earlier output."""
    place = Path(tempfile.mkdtemp(prefix=f".{target.name}.writing-", dir=target.parent))
    lock = _lock(place)
    try:
        yield place
    finally:
        if not (place / _OLD).exists():
            shutil.rmtree(place, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def recover(folder, command):
    """Cleans up after killed runs: deletes half-written folders beside `folder`, and restores an output that was moved away.

    Args:
        folder: an output, there or not.
        command: whose manifest it carries.
    """
    folder = Path(os.path.realpath(folder))
    for place in sorted(folder.parent.glob(f".{glob.escape(folder.name)}.writing-*")):
        lock = _lock(place)
        if lock is None:
            continue
        old = place / _OLD
        if old.exists() and not os.path.lexists(folder):
            os.rename(old, folder)
        if not old.exists() or read_manifest(folder, command) is not None:
            shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def new_folder(output, command, replace=False, content=None):
    """An empty folder beside `output` that takes its name when the block ends well, and vanishes when it does not.

    Its parent is a workplace of this process, which vanishes with all that it holds.

    Args:
        output: may be a link, whose target is then written.
        command: whose manifest the folder gets.
        replace: whether an output of the same command may be replaced. It keeps its place until the new one is complete, and comes back
            if the last rename fails.
        content: of the manifest; what is added to it in the block counts.
    Raises:
        UserError: there is something at `output` that may not be replaced; also when it came meanwhile.
    """
    target = Path(os.path.realpath(output))
    recover(target, command)
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _workplace(target) as place:
            folder, old = place / _NEW, place / _OLD
            folder.mkdir()
            yield folder
            write_manifest(folder, command, content)
            for path in folder.rglob("*"):
                if path.is_file():
                    with open(path, "rb+") as file:
                        os.fsync(file.fileno())
            try:
                if target.is_dir() and any(target.iterdir()):
                    if not replace:
                        raise UserError(f"{output} was written by another process meanwhile; nothing of it was replaced")
                    check_replaceable(target, command)
                    os.rename(target, old)
                os.rename(folder, target)  # never overwrites a folder with files
                shutil.rmtree(old, ignore_errors=True)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise UserError(f"{output} was written by another process meanwhile; nothing of it was replaced") from None
                raise
            finally:
                if old.exists() and not os.path.lexists(target):
                    os.rename(old, target)
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


# ------------------------------------------------------------------------------------------- folders that grow while a run works


def _aside(folder):
    return folder.with_name(f"{folder.name}.before-overwrite")  # a name that nobody else gives


def set_aside(folder, command, working_files=()):
    """Moves an output that is to be made anew to `<name>.before-overwrite`, where it stays until `remove_set_aside`.

    What an earlier run set aside is complete, and what is at `folder` then is not: that one goes.

    Raises:
        UserError: it may not be replaced; see `check_replaceable`.
    """
    folder = Path(os.path.realpath(folder))
    check_replaceable(folder, command, working_files)
    aside = _aside(folder)
    if not aside.exists():
        os.rename(folder, aside)
        return
    check_replaceable(aside, command, working_files)
    with _workplace(folder) as place:
        os.rename(folder, place / _NEW)


def remove_set_aside(folder, command, working_files=()):
    """Removes what `set_aside` kept, once the new output is complete."""
    aside = _aside(Path(os.path.realpath(folder)))
    if aside.is_dir():
        check_replaceable(aside, command, working_files)
        shutil.rmtree(aside)
