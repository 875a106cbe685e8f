"""The other side of `child_pool`: the process that forks, the limits of its children, and their frames.

A child has its socket as stdin and stdout, and as descriptor `SHARED` a file in memory that the router reads
after each reply: pixels take the loop a third of the time there.
"""

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec
from setproctitle import setproctitle

from baton.processes.children import die_with_parent
from baton.router.child_pool import Answer, Defect, Error
from baton.router.errors import ApiError
from baton.system.logs import stack_without_text
from baton.system.memory import trim

_NICE = 5
"""A lower priority than the event loop, for machines with few cores."""
_LENGTH = struct.Struct("<I")
SHARED = 3


def fork_children(
    control: int, title: str, kinds: Mapping[str, Callable[[], None]], memory_bytes: int
) -> None:
    """Forks a child for each message of a router, until no router is there.

    `control`: a socket. A message is a kind of child, two sockets (that of the child, and one for its exit
    code), and a file that the child shares with the router. When the router ends the second socket, the child
    is killed. A child of another kind ends at once.
    `memory_bytes`: what a child may have at most beside what it shares with this process.
    """
    setproctitle(f"{title} forks")
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # for the router
        signal.signal(number, signal.SIG_IGN)
    commands, own_pid = socket.socket(fileno=control), os.getpid()
    alive: dict[int, tuple[int, socket.socket]] = {}  # pid → pidfd, and the socket for its exit code
    with selectors.DefaultSelector() as selector:
        selector.register(commands, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                pid, source = key.data or 0, key.fileobj
                if source is commands:
                    kind, fds, *_ = socket.recv_fds(commands, 64, 3)
                    if not kind:
                        return
                    requests, ends = (socket.socket(fileno=fd) for fd in fds[:2])
                    with requests, open(fds[2], "wb", buffering=0) as shared:
                        try:
                            pid = os.fork()
                        except OSError as error:  # no process is left: a later request may find one
                            _tell(ends, error.errno or 1)
                            continue
                        if not pid:
                            serve = kinds.get(kind.decode(), lambda: None)
                            child_title = f"{title} {kind.decode()}"
                            _become(own_pid, requests, shared.fileno(), child_title, serve, memory_bytes)
                    alive[pid] = pidfd, _ = os.pidfd_open(pid), ends
                    selector.register(pidfd, selectors.EVENT_READ, pid)
                    selector.register(ends, selectors.EVENT_READ, pid)
                elif pid in alive and source is alive[pid][1]:
                    selector.unregister(source)
                    os.kill(pid, signal.SIGKILL)
                elif pid in alive:
                    pidfd, ends = alive.pop(pid)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    selector.unregister(pidfd)
                    os.close(pidfd)
                    with contextlib.suppress(KeyError):  # the router wanted its end
                        selector.unregister(ends)
                    _tell(ends, code)


def _tell(ends: socket.socket, code: int) -> None:
    """Tells the router how a child has ended."""
    with ends, contextlib.suppress(OSError):
        ends.send(str(code).encode())


def _become(
    parent_pid: int,
    requests: socket.socket,
    shared: int,
    title: str,
    serve: Callable[[], None],
    memory_bytes: int,
) -> NoReturn:
    """In the new process."""
    code = 1
    try:
        setproctitle(title)
        # Without this, a busy child would notice the end of the router only after its request.
        die_with_parent(parent_pid)
        os.nice(_NICE)
        limit(memory_bytes)
        os.dup2(requests.fileno(), 0)
        os.dup2(requests.fileno(), 1)
        os.dup2(shared, SHARED)
        os.closerange(SHARED + 1, os.sysconf("SC_OPEN_MAX"))
        serve()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    os._exit(code)


def limit(memory_bytes: int) -> None:
    """Limits what this process may have beside what it has now. A lower limit before this one stays.

    If memory ends nevertheless, the kernel should end a child, and no process that serves."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    _, before = resource.getrlimit(resource.RLIMIT_AS)
    most = most if before == resource.RLIM_INFINITY else min(most, before)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def serve(answer: Callable[[bytes], bytes], cpu_seconds: float) -> None:
    """Answers requests with MessagePack until the router closes the pipe. A request that takes longer ends
    the process."""
    reply = str(os.getpid()).encode()
    while True:
        sys.stdout.buffer.write(_LENGTH.pack(len(reply)) + reply)
        sys.stdout.buffer.flush()
        if (request := read()) is None:
            return
        # The timer's signal ends the process even inside a library.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        reply = answered(answer, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del request  # the next one may come much later
        _give_memory_back()


def answered(answer: Callable[[bytes], bytes], request: bytes) -> bytes:
    """Returns the reply that `child_pool.read_answer` reads: the answer, or the error that was raised."""
    try:
        return msgspec.msgpack.encode(Answer(msgspec.Raw(answer(request))))
    except ApiError as error:
        message = error.message.encode(errors="backslashreplace").decode()
        return msgspec.msgpack.encode(Error(type(error).__name__, message, error.param))
    except MemoryError:
        sys.exit(1)  # the memory limit: the router refuses the request
    except Exception as error:  # noqa: BLE001  (a defect: the router logs it)
        return msgspec.msgpack.encode(Defect("\n".join(stack_without_text(error))))


def _give_memory_back() -> None:
    """Otherwise a child has 300 MiB more after some bodies of 16 MB, and 100 MiB after some grammars.

    An error and the values that it is about refer to each other, and the allocator keeps what is freed."""
    gc.collect()
    trim()


def read() -> bytes | None:
    """Returns the next frame. None: the router has closed the pipe, or ended within a frame."""
    head = sys.stdin.buffer.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    [size] = _LENGTH.unpack(head)
    frame = sys.stdin.buffer.read(size)
    return frame if len(frame) == size else None
