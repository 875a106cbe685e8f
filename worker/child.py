"""What a child of the service process does before anything else: it names itself and ties its life to the
parent's."""

import ctypes
import os
import signal
import sys

import setproctitle

_PR_SET_PDEATHSIG = 1


def begin(title: str, parent_pid: int) -> None:
    """Die with the parent, leave signals to it, carry a name. To be called before slow imports.

    SIGKILL, because an engine deep in a kernel would not notice anything milder. The signal follows the
    thread that spawned us, so the service spawns from its main thread. A parent that died before the call
    is noticed by its pid. A Ctrl-C reaches the whole foreground group and `kill -- -PGID` all of it, but
    how a worker stops is ordered by its service process alone; children hear of it by message.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle.setproctitle(title)
