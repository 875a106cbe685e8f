"""The child's side of `child_pool`: its limits, and the frames in its stdin and stdout."""

import os
import resource
import signal
import struct
import sys
from collections.abc import Callable

from setproctitle import setproctitle

from baton.machine.system import die_with_parent

_NICE = 5
"""A lower priority than the event loop, for machines with few cores."""
_LENGTH = struct.Struct("<I")


def limit(name: str, memory_bytes: int) -> None:
    """Names this process and limits it."""
    setproctitle(name)
    # Without this, a busy child would notice the end of the router only after its request.
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # for the router; this process ends with its stdin
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(reply: Callable[[bytes], bytes], cpu_seconds: float) -> None:
    """Replies to requests until the router closes the pipe. A request that takes longer ends the process."""
    answer = b""  # the first frame tells the router that this process is ready
    while True:
        sys.stdout.buffer.write(_LENGTH.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()
        if (request := read()) is None:
            return
        # The timer's signal ends the process even inside a library.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = reply(request)
        signal.setitimer(signal.ITIMER_PROF, 0)


def read() -> bytes | None:
    """Returns the next frame. None: the router has closed the pipe, or ended within a frame."""
    head = sys.stdin.buffer.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    [size] = _LENGTH.unpack(head)
    frame = sys.stdin.buffer.read(size)
    return frame if len(frame) == size else None
