"""Files of a user: an output is written completely or not at all, and nothing is ever removed that the same command did not make.

A command marks what it writes: a folder by a manifest, `<command>.json`, with the digest of each file; a single file in its own metadata.
Only what carries the mark, and holds nothing else, may be replaced. It is moved away first and removed last.
"""

import contextlib
import fnmatch
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

from .errors import UserError, listed


# ------------------------------------------------------------------------------------------------------------------- secrets


HIDDEN = "<hidden>"
_SECRET_NAMES = {"token", "key", "apikey", "password", "passwd", "secret", "credential", "credentials"}
# What gives itself away under any name: tokens of the Hub, and passwords in addresses.
_SECRET_VALUES = re.compile(r"\bhf_[A-Za-z0-9]{16,}\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def _is_secret(name):
    """Whether an option or key is named as secrets are: `hub_token`, `--api-key`; not `tokens_per_batch`."""
    return not _SECRET_NAMES.isdisjoint(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name)).lower()))


def redacted(data):
    """`data` (of JSON types) with the text of secrets replaced: under keys named as secrets are, and what looks like one anywhere."""
    if isinstance(data, dict):
        return {k: HIDDEN if isinstance(v, str) and v and _is_secret(k) else redacted(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [redacted(value) for value in data]
    return _SECRET_VALUES.sub(HIDDEN, data) if isinstance(data, str) else data


def redacted_arguments(argv):
    """A command line with the values of options named as secrets are replaced: `--hub_token X`, `--api-key=X`."""
    output, hide = [], False
    for argument in argv:
        option, equals, _ = argument.partition("=")
        if hide and not argument.startswith("-"):
            output.append(HIDDEN)
        elif argument.startswith("-") and equals and _is_secret(option):
            output.append(f"{option}={HIDDEN}")
        else:
            output.append(redacted(argument))
        hide = argument.startswith("-") and not equals and _is_secret(argument)
    return output


# ------------------------------------------------------------------------------------------------------------------- writing


@contextlib.contextmanager
def new_file(path):
    """A binary file beside `path` that takes its name when the block ends well, by then on the disk, and vanishes when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.{socket.gethostname()}-{os.getpid()}-")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_left_overs(folder, name=""):
    """Removes what killed processes of this machine left of `new_file`, for files whose names begin with `name`."""
    owner = re.compile(rf"\.{re.escape(name)}.*\.{re.escape(socket.gethostname())}-(\d+)-\w+")
    for path in Path(folder).glob(".*"):
        match = owner.fullmatch(path.name)
        if match and not is_alive(int(match[1])):
            path.unlink(missing_ok=True)


def write_text(path, text):
    """Writes a file completely or not at all."""
    with new_file(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path, data):
    """Writes `data` as indented JSON, completely or not at all, without secrets (`redacted`)."""
    write_text(path, json.dumps(redacted(data), indent=1, ensure_ascii=False) + "\n")


def sha256(path):
    """SHA-256 of a file's content, 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256_in_blocks(file)


def _sha256_in_blocks(file):  # Python 3.10
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------- what a command may replace


def check_folder(path, name):
    """Raises UserError when the folder `path`, the value of argument `name`, cannot be made because it or one above it is a file."""
    for place in (Path(path), *Path(path).parents):
        if place.exists() and not place.is_dir():
            raise UserError(f"{name} must be a folder or a new name, but {place} is a file")


def check_apart(output, *inputs):
    """Raises UserError when the output is an input, holds one, or lies inside one; links are resolved first."""
    target = Path(os.path.realpath(output))
    for given in inputs:
        source = Path(os.path.realpath(given))
        if target == source:
            raise UserError(f"the output {output} is the input {given} itself; choose another name")
        if target in source.parents:
            raise UserError(f"the output {output} holds the input {given}; choose a folder of its own")
        if source in target.parents and source.is_dir():
            raise UserError(f"the output {output} lies inside the input {given}; choose a folder outside of it")


def write_manifest(folder, command, content=None):
    """Marks a finished folder as the output of `command`: `<command>.json` with `content` and the digest of every file.

    Args:
        folder: a folder of regular files.
        command: name of the command.
        content: more to keep in the manifest.
    """
    files = {str(path.relative_to(folder)): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    write_json(folder / f"{command}.json", {"command": command, **(content or {}), "files": files})


def _manifest(folder, command):
    try:
        manifest = json.loads((folder / f"{command}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("command") == command else None


def _matches(name, pattern):
    """Whether a relative path matches a pattern of as many parts, or lies below the folder of a pattern that ends in /**."""
    if pattern.endswith("/**"):
        return name.startswith(pattern[:-2])
    parts, patterns = name.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatch, parts, patterns))


def check_replaceable(folder, command, working_files=()):
    """Raises UserError unless `folder` is an output of `command` and holds nothing else.

    Args:
        folder: an existing folder.
        command: name of the command whose manifest it must carry.
        working_files: patterns of files that the command writes on its way, relative to the folder: "part-*.parquet", or "checkpoints/**".
    """
    manifest = _manifest(folder, command)
    if manifest is None:
        raise UserError(
            f"{folder} was not written by neobert {command} (it has no {command}.json), so it is not replaced; remove it yourself"
        )
    digests, foreign = manifest.get("files") or {}, []
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


def is_alive(pid):
    """Whether there is a process with this id on this machine."""
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sibling(folder, purpose):
    return folder.with_name(f".{folder.name}.{purpose}-{socket.gethostname()}-{os.getpid()}")


def recover(folder):
    """Puts right what killed processes of this machine left beside `folder`: half-written siblings go, a folder moved away comes back."""
    folder = Path(os.path.realpath(folder))
    for purpose in ("replaced", "writing"):
        prefix = f".{folder.name}.{purpose}-{socket.gethostname()}-"
        for path in folder.parent.glob(f".{glob.escape(folder.name)}.{purpose}-*"):
            pid = path.name.removeprefix(prefix)
            if not pid.isdigit() or (int(pid) != os.getpid() and is_alive(int(pid))):
                continue
            if purpose == "replaced" and not folder.exists():
                os.rename(path, folder)
            else:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def new_folder(output, command, replace=False):
    """An empty folder beside `output` that takes its name when the block ends well, and vanishes when it does not.

    Args:
        output: may be a link, whose target is then written.
        command: whose manifest the folder gets.
        replace: whether an output of the same command may be replaced. It keeps its place until the new one is complete, and comes back
            if the last rename fails.
    Raises:
        UserError: there is something at `output` that may not be replaced; also when it came meanwhile.
    """
    target = Path(os.path.realpath(output))
    recover(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder, old = _sibling(target, "writing"), _sibling(target, "replaced")
    folder.mkdir()
    try:
        yield folder
        write_manifest(folder, command)
        for path in folder.rglob("*"):
            if path.is_file():
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
        if target.is_dir() and any(target.iterdir()):
            if not replace:
                raise UserError(f"{output} was written by another process meanwhile; nothing of it was replaced")
            check_replaceable(target, command)
            os.rename(target, old)
        try:
            os.rename(folder, target)  # fails where another process was faster: a folder with files is never overwritten
        except BaseException:
            if old.exists() and not target.exists():
                os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------- folders that grow while a run works


def _aside(folder):
    return folder.with_name(f"{folder.name}.before-overwrite")  # a name that nobody else gives


def set_aside(folder, command, working_files=()):
    """Moves an output that is to be made anew to `<name>.before-overwrite`, where it stays until `remove_set_aside`.

    What an earlier run set aside is complete, and what lies at `folder` then is not: that one goes.

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
    removed = _sibling(folder, "writing")
    os.rename(folder, removed)
    shutil.rmtree(removed)


def remove_set_aside(folder, command, working_files=()):
    """Removes what `set_aside` kept, once the new output is complete."""
    aside = _aside(Path(os.path.realpath(folder)))
    if aside.is_dir():
        check_replaceable(aside, command, working_files)
        shutil.rmtree(aside)
