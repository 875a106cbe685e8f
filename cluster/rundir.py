"""The private directory that holds everything a cluster leaves on disk.

It is locked (flock on the directory itself) for as long as its owner lives. So the next start can tell what
a killed one left behind, and removes it; and systemd-tmpfiles does not clean it away under a living cluster.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "baton."  # unlike the "baton-…" of a worker that was started alone
# The longest socket in it: a worker's. A socket's path must fit 107 bytes.
_LONGEST = PREFIX + "XXXXXXXX/baton-XXXXXXXX/engine"
MAX_PARENT = 107 - len(_LONGEST) - 1


class RunDir:
    """Owns the directory: made by `create`, gone after `remove`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, parent: Path | None) -> RunDir:
        """Makes a new one (mode 0700) in `parent`, by default the system's directory for temporary files.

        Not $XDG_RUNTIME_DIR: that disappears when its user logs out, and takes the sockets of a cluster
        started with nohup along. Raises ValueError when `parent` is too long for sockets in it.
        """
        if parent is None:
            parent = Path(tempfile.gettempdir())
            if len(os.fsencode(parent)) > MAX_PARENT:
                parent = Path("/tmp")
        parent = parent.absolute()
        if len(os.fsencode(parent)) > MAX_PARENT:
            raise ValueError(
                f"--run-dir {parent}: too long for local sockets in it; {MAX_PARENT} characters at most"
            )
        parent.mkdir(parents=True, exist_ok=True)
        remove_stale(parent)
        # Locked before it has the name that others look for.
        path = Path(tempfile.mkdtemp(prefix=".baton-", dir=parent))
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        final = parent / (PREFIX + path.name.removeprefix(".baton-"))
        path.rename(final)
        return cls(final, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale(parent: Path) -> None:
    """Removes run directories of ours whose owner is dead."""
    for path in parent.glob(PREFIX + "*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or another user's
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(lock)
