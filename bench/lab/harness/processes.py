"""Starts processes, finds them by their titles, and kills, stops or disconnects them.

`spawn` starts `baton ROLE` as a child process without Ray. A `Server` is any server, by its command.
"""

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO, TextIO

import psutil

from baton.cluster.supervision.role_log import end_of
from baton.cluster.supervision.runner import BATON
from baton.processes import ready_pipe
from baton.system.python_path import python_path

POLL_S, STOP_S = 0.25, 60.0
KINDS = ("service", "engine", "transfer")
_CPUCLOCK_SCHED = 2  # part of the clock id of a process, see clock_getcpuclockid(3)
_PIDFD_GETFD = 438  # the same number on every architecture


def spawn(
    role: str, *flags: str, environment: Mapping[str, str], output: IO[bytes] | None = None
) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    """Starts `baton ROLE FLAGS`, as `processes.ready_pipe.start` does. `output` gets what the role prints."""
    return ready_pipe.start([*BATON, role, *flags], {**environment, **python_path()}, output=output)


class Server:
    """A server of this machine, until `stop`. Without a `log` it prints on stderr.

    The log begins with the variables and the command.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path | None, environment: Mapping[str, str]
    ) -> None:
        """`environment`: variables beside those of this process."""
        self.name, self.log = name, log
        with contextlib.ExitStack() as files:
            output: TextIO = sys.stderr
            if log is not None:
                output = files.enter_context(log.open("w"))
                variables = (f"{key}={value}" for key, value in environment.items())
                print(*variables, shlex.join(command), file=output, flush=True)
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **python_path(), **environment}, start_new_session=True,
            )  # fmt: skip

    def until_answers(self, url: str, deadline: float, body: bytes | None = None) -> None:
        """Waits until a request succeeds. Raises RuntimeError if the process ends before, or at `deadline`
        (time.monotonic())."""
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=POLL_S * 20) as answer:
                answer.read()
                return
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"{self.name} ended before it answered ({code}).{self._end_of_log()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not answer in time.{self._end_of_log()}")
            time.sleep(POLL_S)

    def _end_of_log(self) -> str:
        return " Its output is above." if self.log is None else f"\n{end_of(self.log)}"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def tree(service: int) -> dict[str, int]:
    """The running processes of a worker by kind, such as "engine" or "rank 1". `service` is the pid of its
    service process."""
    pids = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(service)
        for each in (process, *process.children()):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(each.cmdline())
                if title.startswith("baton: "):
                    # "baton: prefill 0 engine"
                    pids["service" if each is process else " ".join(title.split()[3:])] = each.pid
    return pids


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal. Does nothing if the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def cpu_seconds(pid: int) -> float:
    """CPU time so far of a process with all threads. The ticks of /proc are longer than what is measured."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def break_connections(pid: int, port: int) -> int:
    """Shuts down the TCP connections of a process to or from `port`. Returns their number.

    Copies each descriptor out of the process (pidfd_getfd), so both ends see what a broken network causes.
    Works for descendants, and for root with any process.
    """
    cut = 0
    pidfd = os.pidfd_open(pid)
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError), _borrowed(pidfd, int(entry)) as connection:
                ends = (connection.getsockname(), connection.getpeername())
                if any(end[1] == port for end in ends):
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
    finally:
        os.close(pidfd)
    return cut


def _borrowed(pidfd: int, fd: int) -> socket.socket:
    """A socket of this process for a descriptor of another one. Raises OSError if it is no TCP socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    try:
        borrowed = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    if borrowed.family not in (socket.AF_INET, socket.AF_INET6) or borrowed.type != socket.SOCK_STREAM:
        borrowed.close()
        raise OSError("not a TCP socket")
    return borrowed
