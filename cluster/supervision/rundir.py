"""The run directory: a private directory for the sockets, logs and worker lists of one cluster.

Its owner holds a lock (flock on the directory itself) as long as it lives. An unlocked directory belongs to a
dead owner, and the next start removes it. The lock also keeps systemd-tmpfiles from removing it.
"""

import asyncio
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from baton.processes.children import Child, describe_exit
from baton.processes.keep import keep
from baton.processes.restarts import RestartPolicy
from baton.processes.spawn import spawn
from baton.system.directories import cannot_write, make_directory

log = logging.getLogger(__name__)

PREFIX = "baton."  # differs from the "baton-…" directory of a worker that was started alone
# The longest path in it is that of a worker's socket. The path of a socket has at most 107 bytes.
_LONGEST = PREFIX + "XXXXXXXX/baton-XXXXXXXX/engine"
MAX_PARENT = 107 - len(_LONGEST) - 1
RESTART_SECONDS = 1.0
"""Between two starts of the janitor."""
PATIENCE = 10.0  # seconds: until they are dead, roles may still write to the directory and hold its lock


class RunDir:
    """Owns one run directory: `create` makes it, `remove` removes it and everything in it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, parent: Path | None) -> Self:
        """Makes a run directory (mode 0700) in `parent`, by default in the system's temporary directory.

        $XDG_RUNTIME_DIR is no default: it disappears when the user logs out, and a cluster under nohup would
        lose its sockets. Raises ValueError if the path of `parent` is too long for sockets in it, or if no
        directory can be made there.
        """
        parent = default_parent(parent)
        if len(os.fsencode(parent)) > MAX_PARENT:
            raise ValueError(
                f"--advanced.run-dir {parent}: too long for the sockets in it; use at most {MAX_PARENT} "
                "characters"
            )
        try:
            make_directory("--advanced.run-dir", parent)
            remove_stale(parent)
            # Take the lock before the rename: another start removes unlocked directories of the final name.
            path = Path(tempfile.mkdtemp(prefix=".baton-", dir=parent))
        except OSError as error:
            raise ValueError(cannot_write("--advanced.run-dir", parent, error)) from error
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        final = parent / (PREFIX + path.name.removeprefix(".baton-"))
        path.rename(final)
        return cls(final, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def default_parent(parent: Path | None) -> Path:
    """The directory of run directories: the given one, else the system's temporary directory."""
    if parent is None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > MAX_PARENT:
            parent = Path("/tmp")  # noqa: S108 - mkdtemp makes a private directory in it
    return parent.absolute()


def remove_stale(parent: Path) -> None:
    """Removes this user's run directories in `parent` whose owner is dead."""
    for path in parent.glob(PREFIX + "*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # removed meanwhile, or of another user
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # its owner is alive
        finally:
            os.close(lock)


class Janitor:
    """A small process that removes the run directory if `baton serve` is killed.

    It waits for the end of `baton serve`. It ends no roles: the kernel kills them (PDEATHSIG).
    """

    def __init__(self, run_dir: Path, title: str) -> None:
        self._run_dir, self._title = run_dir, title
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        # Ctrl-C and SIGHUP of the terminal must not end the janitor.
        module = "baton.cluster.supervision.rundir"
        return spawn("-m", module, str(self._run_dir), self._title, session=True)

    async def keep(self) -> None:
        """Starts another process when the present one has ended, until cancelled."""

        async def live() -> tuple[float, str]:
            if self._process.returncode is not None:
                self._process = self._start()
            return 0.0, describe_exit(await Child(self._title, self._process).wait())

        def ended(why: str, delay: float) -> None:
            log.warning("%s %s; starting it again", self._title, why)

        await keep(live, RestartPolicy(RESTART_SECONDS, RESTART_SECONDS), asyncio.Event(), ended)

    def dismiss(self) -> None:
        """Ends the janitor without removing files. A signal also ends one that hangs."""
        with self._process:
            self._process.kill()


def main() -> None:
    import setproctitle

    setproctitle.setproctitle(sys.argv[2])
    sys.stdin.buffer.read()
    run_dir = Path(sys.argv[1])
    deadline = time.monotonic() + PATIENCE
    while run_dir.exists() and time.monotonic() < deadline:
        remove_stale(run_dir.parent)
        time.sleep(0.02)  # the kernel reports no event for the end of a process that is not our child


if __name__ == "__main__":
    main()
