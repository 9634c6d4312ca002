"""Files of a user: an output is written completely or not at all, and nothing is ever removed that the same command did not make.

A command marks what it writes: a folder by a manifest, `<command>.json`, with the digest of each file; a single file in its own metadata.
Only what carries the mark, and holds nothing else, may be replaced. It is moved away first and removed last.
"""

import contextlib
import errno
import fnmatch
import glob
import hashlib
import json
import math
import os
import re
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from .errors import UserError, listed, one_line


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


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


# ------------------------------------------------------------------------------------------------------------------- reading


TEXT_LIMIT = 4_000_000


def check_file(path):
    """Raises UserError unless `path` is a regular file: reading a pipe or a device may never end."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or one_line(error)})") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is not a file, but {'a folder' if stat.S_ISDIR(mode) else 'a pipe, socket or device'}")


def read_text(path, limit=TEXT_LIMIT):
    """The content of a regular UTF-8 file.

    Args:
        path: the file.
        limit: bytes that it may have.
    Raises:
        UserError: no regular file, larger than that, not readable or not UTF-8.
    """
    check_file(path)
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or one_line(error)})") from None
    if len(data) > limit:
        raise UserError(f"{path} has more than {limit:,} bytes, which is too large for what it should be")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({one_line(error)})") from None


def _check_depth(data, most=50):
    """Raises ValueError for lists and mappings inside of each other so deep that nobody wrote them by hand."""
    level = [data]
    for _ in range(most):
        level = [part for item in level if isinstance(item, (dict, list)) for part in (item.values() if isinstance(item, dict) else item)]
    if level:
        raise ValueError(f"nested more than {most} deep")


def read_json(path, limit=TEXT_LIMIT):
    """The content of a JSON file of at most `limit` bytes. UserError if it cannot be read, is nested too deep, or holds NaN, Infinity or 1e999."""

    def finite(text):
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text} is not a finite number")
        return value

    text = read_text(path, limit)
    try:
        data = json.loads(text, parse_constant=finite, parse_float=finite)
        _check_depth(data)
        return data
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({one_line(error)})") from None


# ------------------------------------------------------------------------------------------------------------------- writing


@contextlib.contextmanager
def new_path(path):
    """A file beside `path`, for what opens it by its name: it takes the name `path` when the block ends well, and vanishes when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.{socket.gethostname()}-{os.getpid()}-")
    os.close(handle)
    try:
        yield Path(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_file(path):
    """A binary file beside `path` that takes its name when the block ends well, by then on the disk, and vanishes when it does not."""
    with new_path(path) as temporary, open(temporary, "wb") as file:
        yield file


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
        file.write(bytes(text, "utf-8"))


def write_json(path, data):
    """Writes `data` as indented JSON, completely or not at all, without secrets (`redacted`)."""
    write_text(path, json.dumps(redacted(data), indent=1, ensure_ascii=False) + "\n")


# What safetensors calls a dtype: bytes of one number.
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def write_safetensors(path, layout, read, metadata=None):
    """Writes one safetensors file piece by piece: the library's `save_file` needs all tensors in memory.

    Args:
        path: the file.
        layout: {name: (dtype, shape)}, the dtype as safetensors names it: "F32", "F16", "BF16", ...
        read: function of a name that returns the tensor's numbers in row-major order as an iterable of bytes-like pieces.
        metadata: {text: text} for the file's header.
    Returns:
        dict with `file` (its name), `tensors`, `bytes` and `sha256`.
    Raises:
        ValueError: the pieces of a tensor have another size than its dtype and shape.
    """
    header = {"__metadata__": metadata} if metadata else {}
    # As the library: large numbers first, so that every tensor is aligned; then by name.
    names, offset = sorted(layout, key=lambda name: (-_DTYPE_BYTES[layout[name][0]], name)), 0
    for name in names:
        dtype, shape = layout[name]
        length = math.prod(shape) * _DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:

        def put(data):
            nonlocal size
            file.write(data)
            digest.update(data)
            size += memoryview(data).nbytes

        put(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            first = size
            for piece in read(name):
                put(piece)
            begin, end = header[name]["data_offsets"]
            if size - first != end - begin:
                raise ValueError(f"{name} has {size - first} bytes where its dtype and shape take {end - begin}")
    return {"file": Path(path).name, "tensors": len(names), "bytes": size, "sha256": digest.hexdigest()}


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
        if source.is_dir() and any(_is_same(source, folder) for folder in target.parents):
            raise UserError(f"the output {output} is inside the input {given}; choose a folder outside of it")


def write_manifest(folder, command, content=None):
    """Marks a finished folder as the output of `command`: `<command>.json` with `content` and the digest of every file.

    Args:
        folder: a folder of regular files.
        command: name of the command.
        content: more to keep in the manifest.
    """
    files = {str(path.relative_to(folder)): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    write_json(folder / f"{command}.json", {"command": command, **(content or {}), "files": files})


def read_manifest(folder, command):
    """What `write_manifest` wrote in a folder: "files" {relative path: digest} and the content; None for any other folder."""
    try:
        manifest = read_json(folder / f"{command}.json", 16 * TEXT_LIMIT)
    except UserError:
        return None
    ours = isinstance(manifest, dict) and manifest.get("command") == command and isinstance(manifest.get("files"), dict)
    return manifest if ours else None


def _matches(name, pattern):
    """Whether a relative path matches a pattern of as many parts, or is below the folder of a pattern that ends in /**."""
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
    """Puts right what killed processes left beside `folder`: half-written folders go, an output that was moved away comes back.

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
