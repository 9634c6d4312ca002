"""Single files of a user: read within bounds, written completely or not at all, without secrets."""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
from pathlib import Path

from .errors import UserError, one_line
from .folders import flush as settle
from .folders import new_file
from .secrets import HIDDEN, redacted, redacted_arguments  # noqa: F401


# ------------------------------------------------------------------------------------------------
# reading


TEXT_LIMIT = 4_000_000


def check_file(path):
    """Raises UserError unless `path` is a regular file: reading a pipe or a device may never
    end."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or one_line(error)})") from None
    if not stat.S_ISREG(mode):
        raise UserError(
            f"{path} is not a file, but "
            f"{'a folder' if stat.S_ISDIR(mode) else 'a pipe, socket or device'}"
        )


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
        raise UserError(
            f"{path} has more than {limit:,} bytes, which is too large for what it should be"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({one_line(error)})") from None


def _check_depth(data, most=50):
    """Raises ValueError for lists and mappings inside of each other so deep that nobody wrote them
    by hand."""
    level = [data]
    for _ in range(most):
        level = [
            part
            for item in level
            if isinstance(item, (dict, list))
            for part in (item.values() if isinstance(item, dict) else item)
        ]
    if level:
        raise ValueError(f"nested more than {most} deep")


def read_json(path, limit=TEXT_LIMIT):
    """The content of a JSON file of at most `limit` bytes. UserError if it cannot be read, is
    nested too deep, or holds NaN, Infinity or 1e999."""

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


# ------------------------------------------------------------------------------------------------
# writing


@contextlib.contextmanager
def new_path(path, check=None):
    """A file beside `path`, for what opens it by its name: it takes the name `path` when the block
    ends well, and vanishes when it does not.

    `check` is called before that: it may refuse what came to `path` meanwhile.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(
        f".{path.name}.{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    )
    # less what the umask takes
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
        settle(temporary)
        if check is not None:
            check()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


def remove_left_overs(folder, name=""):
    """Removes what killed processes of this machine left of `new_file`, for files whose names begin
    with `name`."""
    owner = re.compile(rf"\.{re.escape(name)}.*\.{re.escape(socket.gethostname())}-(\d+)-\w{{8}}")
    for path in Path(folder).glob(".*"):
        match = owner.fullmatch(path.name)
        if match and path.is_file() and not path.is_symlink() and not is_alive(int(match[1])):
            path.unlink(missing_ok=True)


def link_or_copy(source, path):
    """Gives a file a second name, `path`, on file systems that know such, or copies it there
    completely."""
    try:
        os.link(source, path)
    except OSError:
        with new_path(path) as temporary:
            shutil.copyfile(source, temporary)


def write_text(path, text):
    """Writes a file completely or not at all. Lone surrogates (file names that are not UTF-8) are
    written as escapes: "\\udce9"."""
    with new_file(path) as file:
        file.write(bytes(text, "utf-8", "backslashreplace"))


def json_text(data):
    """The one form of JSON files here: indented, characters as they are."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def write_json(path, data):
    """Writes `data` as `json_text`, completely or not at all, without secrets (`redacted`)."""
    write_text(path, json_text(redacted(data)))


# What safetensors calls a dtype: bytes of one number.
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


def write_safetensors(path, layout, read, metadata=None):
    """Writes one safetensors file piece by piece: the library's `save_file` needs all tensors in
    memory.

    Args:
        path: the file.
        layout: {name: (dtype, shape)}, the dtype as safetensors names it: "F32", "F16", "BF16", ...
        read: function of a name that returns the tensor's numbers in row-major order as an iterable
            of bytes-like pieces.
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
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + length],
        }
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
                raise ValueError(
                    f"{name} has {size - first} bytes where its dtype and shape take {end - begin}"
                )
    return {
        "file": Path(path).name,
        "tensors": len(names),
        "bytes": size,
        "sha256": digest.hexdigest(),
    }


def sha256(path):
    """SHA-256 of a file's content, 64 hex digits."""
    with open(path, "rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _sha256_in_blocks(file)
        )


def _sha256_in_blocks(file):  # Python 3.10
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
