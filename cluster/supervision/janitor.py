"""Removes the run directory if `baton serve` is killed.

A small process that waits for the end of `baton serve`. It ends no roles: the kernel kills them (PDEATHSIG).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from baton.cluster.supervision.python_path import python_path
from baton.cluster.supervision.rundir import remove_stale

PATIENCE = 10.0  # seconds: until they are dead, roles may still write to the directory and hold its lock


class Janitor:
    """The handle that `baton serve` has of the janitor."""

    def __init__(self, run_dir: Path, title: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baton.cluster.supervision.janitor", str(run_dir), title],
            env=os.environ | python_path(),
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C and SIGHUP of the terminal must not end the janitor
        )

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
