"""Atomic outputs: a file or directory appears complete or not at all.

Files are written to `.NAME.tmp` and directories to `.NAME.tmp/` next to their destination, flushed
to disk and renamed. If the process is killed, `.NAME.tmp` remains and the next process that writes
NAME removes it. Existing directories are never replaced.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from .errors import UserError


LOCK = ".lock"


def check_folder(output: str | Path, name: str = "the output") -> None:
    """Check that a path is a directory or does not exist.

    Args:
        output: Path to check.
        name: Name of the option in the message.

    Raises:
        UserError: If `output` is a file.
    """
    if Path(output).exists() and not Path(output).is_dir():
        raise UserError(f"{name} must be a directory, and {output} is a file. Choose another name.")


def check_row_name(name: str) -> None:
    """Check that the name of a row in a table can also be that of a file or directory.

    Raises:
        UserError: If it cannot.
    """
    if not re.fullmatch(r"[\w.+-]*[\w+-][\w.+-]*", name):
        raise UserError(
            f"`name` must consist of letters, digits and . _ + -, got {name!r}. Pass another "
            "--name."
        )


def check_new(output: str | Path, name: str = "the output") -> None:
    """Check that a path does not exist, or is an empty directory.

    Args:
        output: Path to check.
        name: Name of the option in the message.

    Raises:
        UserError: If the path exists.
    """
    target = Path(os.path.realpath(output))
    # An empty directory is accepted, because `os.rename` replaces it.
    is_empty = target.is_dir() and not any(target.iterdir())
    if os.path.lexists(target) and not is_empty:
        raise UserError(
            f"{name} {output} already exists. Remove it (rm -r {output}), or choose another name."
        )


def check_disjoint(output: str | Path, *inputs: str | Path) -> None:
    """Check that an output neither contains an input nor is part of one.

    Raises:
        UserError: If one of the paths contains the other.
    """
    target = Path(os.path.realpath(output))
    for path in inputs:
        source = Path(os.path.realpath(path))
        if target == source or target in source.parents or source in target.parents:
            raise UserError(
                f"the output {output} and the input {path} must not contain each other. Choose "
                "another output."
            )


@contextlib.contextmanager
def new_folder(output: str | Path) -> Iterator[Path]:
    """Yield an empty directory that is renamed to `output` at the end of the block.

    After an exception the directory is removed, with the parent directories that were created.

    Raises:
        UserError: If `output` exists, or another process is writing it.
        OSError: If another process has created `output` in the meantime.
    """
    check_new(output)
    target = Path(os.path.realpath(output))
    temporary = _temporary_folder(output)
    # The innermost directory is the first one.
    missing_parents = [parent for parent in target.parents if not parent.exists()]
    # The lock keeps a second process from the temporary directory, and the operating system
    # releases it if this process is killed.
    with locked(temporary):
        try:
            # The files are one level below the lock file, which must not become part of the output.
            folder = temporary / "new"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield folder

            # The data must be on disk before the name appears: a directory that exists is
            # complete.
            for path in folder.rglob("*"):
                if path.is_file():
                    flush(path)
            os.rename(folder, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            # Directories that are not empty, such as that of the output, are kept.
            with contextlib.suppress(OSError):
                for parent in missing_parents:
                    parent.rmdir()


def remove_leftover(output: str | Path) -> None:
    """Remove the temporary directory of a process that was killed after it had renamed `output`."""
    shutil.rmtree(_temporary_folder(output), ignore_errors=True)


def _temporary_folder(output: str | Path) -> Path:
    target = Path(os.path.realpath(output))
    return target.with_name(f".{target.name}.tmp")


@contextlib.contextmanager
def new_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary file that is renamed to `path` at the end of the block.

    After an exception the file is removed. An existing file is replaced. Two processes must not
    write the same file at the same time.
    """
    # A link is kept, and its target is written.
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            # Without fsync, a crash of the machine could leave an empty file under the final name.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # A full disk is reported without the name of the file.
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def flush(path: str | Path) -> None:
    """Flush a file to disk, and give it the permissions that the umask allows.

    safetensors creates files that only their owner can read.
    """
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    # The umask can only be read by setting another one.
    umask = os.umask(0o022)
    os.umask(umask)
    # FAT, SMB and some FUSE file systems have no permissions.
    with contextlib.suppress(OSError):
        os.chmod(path, 0o666 & ~umask)


@contextlib.contextmanager
def locked(folder: str | Path, wait: bool = False) -> Iterator[None]:
    """Lock a directory for this process, and create it if necessary.

    The lock is released when the process ends, even if it is killed. The lock file remains.

    Args:
        folder: Directory.
        wait: Whether to wait for another process that has locked the directory.

    Raises:
        UserError: If another process has locked the directory, unless `wait` is True.
    """
    # The target of a link is created if necessary.
    Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(Path(folder) / LOCK).acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise UserError(
            f"{folder} is in use by another run. Wait until that run has ended, or choose another "
            "output."
        ) from None
    with lock:
        yield
