"""Outputs that are made at once: complete or not there. What exists is never replaced.

A folder is made in `.NAME.tmp` beside its place, a file as `.NAME.tmp`, flushed to the disk and
renamed. A process that is killed leaves `.NAME.tmp`, which the next one that makes NAME clears.
"""

import contextlib
import os
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import UserError


LOCK = ".lock"


def check_folder(output, name="the output"):
    """Raises UserError when `output`, the value of the argument `name`, is a file."""
    if Path(output).exists() and not Path(output).is_dir():
        raise UserError(f"{name} {output} is a file; choose another name")


def check_new(output, name="the output"):
    """Raises UserError unless `output`, the value of the argument `name`, is not there, or is an
    empty folder."""
    place = Path(os.path.realpath(output))
    if os.path.lexists(place) and not (place.is_dir() and not any(place.iterdir())):
        raise UserError(
            f"{name} {output} is there already; remove it yourself (rm -r {output}), or choose "
            "another name"
        )


def apart(output, *inputs):
    """Raises UserError when the output is an input, is inside of one, or holds one."""
    place = Path(os.path.realpath(output))
    for path in inputs:
        source = Path(os.path.realpath(path))
        if place == source or place in source.parents or source in place.parents:
            raise UserError(
                f"the output {output} and the input {path} are in one another; choose an output "
                "elsewhere"
            )


@contextlib.contextmanager
def new_folder(output):
    """An empty folder that takes the place `output` when the block ends well, and vanishes when it
    does not.

    Raises:
        UserError: as `check_new`; another process is making it. OSError: something came meanwhile.
    """
    check_new(output)
    place = Path(os.path.realpath(output))
    work = place.with_name(f".{place.name}.tmp")
    with locked(work):
        try:
            folder = work / "new"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield folder
            for path in folder.rglob("*"):
                if path.is_file():
                    flush(path)
            os.rename(folder, place)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def new_file(path):
    """A binary file that takes the name `path` when the block ends well, and vanishes when it does
    not. One process at a time may make it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def flush(path):
    """Puts a file that is written on the disk, with the rights that the umask leaves: safetensors
    writes for its owner alone."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    umask = os.umask(0o022)
    os.umask(umask)
    with contextlib.suppress(OSError):  # FAT, SMB and some FUSE mounts know no rights
        os.chmod(path, 0o666 & ~umask)


@contextlib.contextmanager
def locked(folder):
    """Within it no other process has `folder`, which is made if it is not there. The lock ends with
    its process, also after a kill -9; its file stays."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(Path(folder) / LOCK).acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"{folder} is in use by another run; wait until it has ended, or choose another output"
        ) from None
    with lock:
        yield
