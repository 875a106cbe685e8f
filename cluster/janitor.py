"""Removes the run directory of a `baton serve` that was killed: a small process that only waits for that.

Every role dies with serve by itself (PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from cluster.rundir import remove_stale

PATIENCE = 10.0  # seconds in which a role that is being killed may still write to the directory
_PACKAGES = str(Path(__file__).parents[1])


class Janitor:
    """Held by serve. `dismiss` says that serve ends well and cleans up itself."""

    def __init__(self, run_dir: Path, title: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.janitor", str(run_dir), title],
            env=os.environ | {"PYTHONPATH": _PACKAGES, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            start_new_session=True,  # neither Ctrl-C nor the end of the terminal is meant for it
        )

    def dismiss(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the janitor was killed
            self._process.communicate(b"ends well")


def main() -> None:
    import setproctitle

    setproctitle.setproctitle(sys.argv[2])
    if sys.stdin.buffer.read():
        return
    run_dir = Path(sys.argv[1])
    deadline = time.monotonic() + PATIENCE
    while run_dir.exists() and time.monotonic() < deadline:
        remove_stale(run_dir.parent)
        time.sleep(0.02)  # no event tells of the end of a process that is not our child


if __name__ == "__main__":
    main()
