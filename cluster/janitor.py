"""Cleans up after a `baton serve` that was killed: a small process that does nothing but wait for that.

Roles, GCS and raylet die with serve by themselves (PDEATHSIG). Ray's agents do not: they look for their
raylet for up to a minute. They are found by the files that they have open in the run directory, which is
private to one cluster, so nobody else's process can be among them. The directory goes with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster.rundir import remove_stale

PATIENCE = 10.0  # seconds of killing what may still be starting something
_PACKAGES = str(Path(__file__).parents[1])


class Janitor:
    """Held by serve. `dismiss` says that serve ends well and cleans up itself."""

    def __init__(self, run_dir: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.janitor", str(run_dir)],
            env=os.environ | {"PYTHONPATH": _PACKAGES, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            start_new_session=True,  # neither Ctrl-C nor the end of the terminal is meant for it
        )

    def dismiss(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody killed it
            self._process.communicate(b"ends well")


def inhabitants(run_dir: Path) -> list[int]:
    """Pids of this user's processes that have a file open in the directory, but for the caller."""
    prefix = f"{run_dir}/"
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if any(os.readlink(link).startswith(prefix) for link in (entry / "fd").iterdir()):
                found.append(int(entry.name))
        except OSError:
            continue  # gone, or another user's
    return found


def clean_up(run_dir: Path) -> None:
    """Kills who lives in the directory, until nobody does, and removes it."""
    deadline = time.monotonic() + PATIENCE
    while (pids := inhabitants(run_dir)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # they are not our children: no event tells of their end
    remove_stale(run_dir.parent)


def main() -> None:
    import setproctitle

    setproctitle.setproctitle("baton: janitor")
    if not sys.stdin.buffer.read():
        clean_up(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
