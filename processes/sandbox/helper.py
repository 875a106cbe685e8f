"""The process that forks children, their limits, and how they read requests.

A child has its socket as stdin and stdout. As descriptor `SHARED` it may have a file in memory that its
caller reads after each reply: pixels take an event loop a third of the time there.
"""

import contextlib
import gc
import os
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from setproctitle import setproctitle

from baton.processes.children import become, die_with_parent
from baton.processes.forking import serve_forks
from baton.processes.limits import limit_memory
from baton.system.memory import trim

NICE = 5
"""A lower priority than that of callers, for machines with few cores."""
LENGTH = struct.Struct("<I")
SHARED = 3


def fork_children(
    control: int,
    title: str,
    kinds: Mapping[str, Callable[[], None]],
    memory_bytes: int,
    work: str = "forks",
) -> None:
    """Forks a child for each message of a caller, until no caller is there.

    `control`: a socket. A message is a kind of child, two sockets (that of the child, and one for its end),
    and perhaps a file that the child shares with its caller. When the caller ends the second socket, the
    child is killed. A child of another kind ends at once.
    `memory_bytes`: what a child may have at most beside what it shares with this process.
    `work`: for the title of this process.
    """
    die_with_parent()
    own_pid, alive = os.getpid(), set[int]()
    with selectors.DefaultSelector() as selector, socket.socket(fileno=control) as messages:

        def fork(kind: bytes, fds: list[int]) -> None:
            ends = socket.socket(fileno=fds.pop(1))
            try:
                if not (pid := os.fork()):
                    serve = kinds.get(kind.decode(), lambda: None)
                    child_title = f"{title} {kind.decode()}"
                    become(own_pid, partial(_limited, fds, child_title, serve, memory_bytes))
            except OSError as error:  # no process is left: a later request may find one
                _tell(ends, error.errno or 1)
                return
            alive.add(pid)
            pidfd = os.pidfd_open(pid)
            selector.register(pidfd, selectors.EVENT_READ, partial(ended, pid, pidfd, ends))
            selector.register(ends, selectors.EVENT_READ, partial(kill, pid, ends))

        def kill(pid: int, ends: socket.socket) -> None:
            """Its caller wants its end."""
            if pid in alive:
                selector.unregister(ends)
                os.kill(pid, signal.SIGKILL)

        def ended(pid: int, pidfd: int, ends: socket.socket) -> None:
            alive.remove(pid)
            _, status, usage = os.wait4(pid, 0)
            selector.unregister(pidfd)
            os.close(pidfd)
            with contextlib.suppress(KeyError):  # the caller wanted its end
                selector.unregister(ends)
            _tell(ends, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)

        serve_forks(messages, f"{title} {work}", fork, selector)


def _tell(ends: socket.socket, code: int, cpu_seconds: float = 0.0) -> None:
    """Tells the caller how a child has ended."""
    with ends, contextlib.suppress(OSError):
        ends.send(f"{code} {cpu_seconds}".encode())


def _limited(fds: Sequence[int], title: str, serve: Callable[[], None], memory_bytes: int) -> int:
    """In the new process. `fds`: the socket, and perhaps a file."""
    setproctitle(title)
    os.nice(NICE)
    limit_memory(memory_bytes)
    requests, *shared = fds
    os.dup2(requests, 0)
    os.dup2(requests, 1)
    for file in shared:
        os.dup2(file, SHARED)
    os.closerange(SHARED + len(shared), os.sysconf("SC_OPEN_MAX"))
    serve()
    return 0


def serve(answer: Callable[[bytes], bytes], cpu_seconds: float, *, once: bool = False) -> None:
    """Answers requests until the caller closes the socket. A request that takes longer ends the process.

    `once`: it ends after the first one."""
    _write(str(os.getpid()).encode())
    while (request := read()) is not None:
        # The timer's signal ends the process even inside a library.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        reply = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(reply)
        if once:
            return
        del request, reply  # the next request may come much later
        _give_memory_back()


def _write(reply: bytes) -> None:
    sys.stdout.buffer.write(LENGTH.pack(len(reply)) + reply)
    sys.stdout.buffer.flush()


def _give_memory_back() -> None:
    """Otherwise a child has 300 MiB more after some bodies of 16 MB, and 100 MiB after some grammars.

    An error and the values that it is about refer to each other, and the allocator keeps what is freed."""
    gc.collect()
    trim()


def read() -> bytes | None:
    """Returns the next frame. None: the caller has closed the socket, or ended within a frame."""
    head = sys.stdin.buffer.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    [size] = LENGTH.unpack(head)
    frame = sys.stdin.buffer.read(size)
    return frame if len(frame) == size else None
