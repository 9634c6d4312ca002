"""A lock of a folder that one run writes: a second run is refused while any process of the first is alive, also after a kill -9.

The lock is the system's (flock), so nothing stale ever has to be removed. Every process of a run holds it in the shared mode; a run begins by
taking it exclusively, which fails as long as one process of another run is left.
"""

import errno
import os
import socket
import sys
from pathlib import Path

from .errors import UserError, one_line
from .files import is_alive


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE = ".lock"
_NOT_HERE = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class FolderLock:
    """Holds `folder`/.lock until `release` or the end of the process and of those that it forked.

    Args:
        folder: is made if it is not there.
        joins: False for a run's first process, which needs the folder for its run alone; True for its other processes, which come after it.
    Raises:
        UserError: another run has the folder, with its process and host.
    """

    def __init__(self, folder, joins=False):
        self.path, self.file = Path(folder) / LOCK_FILE, None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            return self._go_without("this system has no file locks")
        while True:
            self.file = open(self.path, "a+", encoding="utf-8")
            try:
                if not joins:
                    fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self.file.truncate(0)
                fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._holder()
                self._close()
                raise UserError(f"{folder} is in use by {holder}; wait until that run has ended, or choose another folder") from None
            except OSError as error:
                self._close()
                if error.errno not in _NOT_HERE:
                    raise
                return self._go_without(one_line(error))
            if self._is_current():
                break
            self._close()  # the run before removed the file between the two lines above
        self.file.write(f"{os.getpid()} {socket.gethostname()}\n")
        self.file.flush()

    def _go_without(self, reason):
        print(f"{self.path.parent} cannot be locked ({reason}); do not start a second run there", file=sys.stderr)

    def _is_current(self):
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _holder(self):
        """A process that holds the lock, as a message names it: the first that is alive or on another host."""
        self.file.seek(0)
        lines = [line.split() for line in self.file.read().splitlines()]
        found = [(int(line[0]), line[1]) for line in lines if len(line) == 2 and line[0].isdigit()]
        here = socket.gethostname()
        alive = [(process, host) for process, host in found if host != here or is_alive(process)]
        return "process {} on {}".format(*(alive or found)[0]) if found else "another process"

    def _close(self):
        self.file.close()
        self.file = None

    def release(self):
        """Gives the folder free; the last process removes the file."""
        if self.file is None:
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path.unlink(missing_ok=True)
        except OSError:  # another process of the run still holds it
            pass
        self._close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.release()
