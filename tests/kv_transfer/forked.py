"""Transfer processes that are forked from a process that has imported their modules.

A fresh interpreter needs an eighth of a second of CPU time, nearly all of it for imports, and the tests of
this package start hundreds. `Forked` stands for `subprocess.Popen` in `kv.spawn_transfer`: the arguments, the
descriptors, the environment and `main` are those of a fresh process. `test_process` and all tests of workers
have fresh processes.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kv_transfer.config import NIXL_WHEELS
from kv_transfer.parent import die_with_parent
from kv_transfer.process import __main__ as program
from kv_transfer.wait import wait

_MESSAGE = 1 << 18  # bytes, at most: the arguments and the environment
_MAX_FDS = 32


class Forked:
    """What tests use of `subprocess.Popen`. The parent is the server, which knows the exit code."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, pass_fds: Sequence[int], env: dict[str, str]
    ) -> None:
        assert stdin == subprocess.PIPE
        self._server = _server()
        theirs, ours = os.pipe()
        self.stdin = os.fdopen(ours, "wb")
        numbers = [0, 1, 2, *pass_fds]
        self.pid = self._server.start([*command], env, numbers, [theirs, 1, 2, *pass_fds])
        os.close(theirs)
        self._pidfd = os.pidfd_open(self.pid)
        self.returncode: int | None = None

    def send_signal(self, how: signal.Signals) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, how)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def poll(self) -> int | None:
        if self.returncode is None and wait([self._pidfd], 0):
            os.close(self._pidfd)
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not wait([self._pidfd], timeout):
            raise subprocess.TimeoutExpired("a transfer process", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code


class _Server:
    """The process to fork from. It ends with this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def start(self, command: list[str], env: dict[str, str], numbers: list[int], fds: list[int]) -> int:
        """Returns the pid. In the child, the descriptors have these numbers."""
        request = {"command": command, "env": env, "numbers": numbers}
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        return self._answer()

    def exit_code(self, pid: int) -> int:
        """Of a process that has ended."""
        self._socket.send(json.dumps({"ended": pid}).encode())
        return self._answer()

    def _answer(self) -> int:
        answer = self._socket.recv(100)
        assert answer, "the process to fork from has ended"
        return int(answer)


_server = functools.cache(_Server)


def _serve(requests: socket.socket) -> None:
    while True:
        packet, fds, _, _ = socket.recv_fds(requests, _MESSAGE, _MAX_FDS)
        if not packet:
            return
        request = json.loads(packet)
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            requests.close()
            os._exit(_run(request, fds, server))
        for fd in fds:
            os.close(fd)
        requests.send(str(pid).encode())


def _run(request: dict[str, Any], fds: list[int], server: int) -> int:
    """What a fresh interpreter does. Returns the exit code."""
    numbers = request["numbers"]
    free = max(*numbers, *fds) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    _, dash_m, module, *arguments = request["command"]
    assert (dash_m, module) == ("-m", "kv_transfer.process")
    arguments[arguments.index("--parent-pid") + 1] = str(server)
    sys.argv = [module, *arguments]
    try:
        return program.main()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _load_ucx() -> None:
    """NIXL's library takes 0.4 s when it is loaded. It starts no thread then, so a fork is safe."""
    for wheel in NIXL_WHEELS:
        if (found := find_spec(wheel)) is not None and found.origin is not None:
            for library in Path(found.origin).parents[1].glob(f"{wheel}.libs/libucs-*.so*"):
                ctypes.CDLL(str(library))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    _load_ucx()
    _serve(socket.socket(fileno=int(sys.argv[1])))
