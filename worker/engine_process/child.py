"""The first actions of a child of the service process: set its title and timers, and tie its life to the
parent. And its last one."""

import logging
import os
import signal
import sys
from typing import NoReturn

import setproctitle

from baton.kv_transfer.spawn import die_with_parent
from baton.kv_transfer.wait import end_waits_on_time


def begin(title: str, parent_pid: int) -> None:
    """Makes this process die with its parent and ignore SIGINT and SIGTERM, and sets its title. Its waits end
    on time, since steps are launched at a time.

    Must be called before slow imports. The kernel sends SIGKILL when the parent's spawning thread ends, so
    the service spawns in its main thread. A milder signal would not end an engine inside a kernel launch. A
    parent that died before the call is detected by `parent_pid`. Ctrl-C and `kill -- -PGID` reach the whole
    process group, but only the service process orders the stop, by messages.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle.setproctitle(title)
    end_waits_on_time()


def end(code: int) -> NoReturn:
    """Ends the process at once, with this exit code. Logs and output streams are flushed first.

    Python would free each object of each module first, which takes torch some tenths of a second.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
