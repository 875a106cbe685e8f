"""`subprocess.Popen` for roles that a fork server starts."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from asyncio.streams import FlowControlMixin
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, AnyStr

from baton.processes.children import process_end

GATEWAY = "tests.forked.gateway"
KINDS = {
    "baton.bench.load.traffic.client_process": "loads",
    "baton.cluster.cli": "roles",
    "baton.cluster.check_model": "roles",
    "baton.cluster.engine_process": "roles",
    "baton.kv_transfer.process": "transfers",
    "baton.router.preparation.child": "roles",
    "baton.vllm_worker.engine_process": "roles",
    "tests.bench.mock_server": "loads",
    GATEWAY: "tests",
    "tests.decode_worker.engine_process": "roles",
    "tests.elastic_engine": "roles",
    "tests.ledger_engine": "roles",
    "tests.worker.eager_engine": "roles",
    "tests.worker.held_engine": "roles",
    "tests.worker.other_layout_engine": "roles",
    "tests.worker.other_pages_engine": "roles",
    "tests.worker.patient_engine": "roles",
    "tests.router.small_router": "roles",
    "tests.worker_process": "roles",
    "tests.vllm_worker.vllm_server": "roles",
    "baton.worker.engine_process.rank_process": "roles",
}
"""The fork server of each module. That of `roles` has torch."""
_BENCH = ["baton.cluster.cli", "bench"]
VLLM_PYTHON = str(Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python")
"""All that runs by it has a fork server of its own, which has vLLM."""
LAST = "baton.kv_transfer.process"
"""A worker starts no fork after its transfer process, unless its environment has the next variable."""
FORKS_AGAIN = "BATON_TEST_FORKS_AGAIN"
ENDS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that a program ignores if the process that starts it does."""
_AT_IMPORT = ("PYTHON", "LD_", "MALLOC_", "OMP_", "MKL_", "TORCH", "TRITON_", "SSL_", "HF_")
"""Variables that begin so change what an interpreter or an import does, but for these."""
_HARMLESS = ("PYTHONPATH", "PYTHONSAFEPATH", "LD_LIBRARY_PATH", "TORCHINDUCTOR_CACHE_DIR")
"""`ForkServer.fits` looks at the paths of Python. A fork has its libraries, and what it starts fresh gets the
third variable. Torch itself sets the last one when some models are first computed."""
_UNUSUAL = ("preexec_fn", "executable", "gid", "gids", "uid", "shell", "creationflags")
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
FreshPopen = subprocess.Popen
"""Never forks, wherever `forking` holds."""
_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # pyrefly: ignore[missing-attribute]


class ForkServer:
    """The handle of a fork server, which is a child of this process."""

    def __init__(self, requests: socket.socket, pid: int, env: Mapping[str, str] | None = None) -> None:
        """`env`: of the server."""
        env = os.environ if env is None else env
        self._environment = _at_import(env)
        self._paths = {os.path.realpath(path) for path in (*sys.path, *_python_paths(env))}
        self._requests = requests
        self._pid = pid

    @classmethod
    def fresh(cls, kind: str, env: Mapping[str, str]) -> ForkServer:
        python = sys.executable
        if kind.startswith("vllm"):
            python, env = VLLM_PYTHON, {**env, "VLLM_CONFIGURE_LOGGING": "0"}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [python, "-m", "tests.forked.server", kind, str(theirs.fileno())]
            process = FreshPopen(command, pass_fds=[theirs.fileno()], env=env)
        process.returncode = 0  # it ends with this process, or `close` waits for it
        return cls(ours, process.pid, env)

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether a fork has imported what a fresh process with this environment would."""
        paths = map(os.path.realpath, _python_paths(env))
        return _at_import(env) == self._environment and self._paths.issuperset(paths)

    def start(self, request: Mapping[str, Any], fds: Sequence[int]) -> int | None:
        """Returns the pid of a new child of this process, or None if the server has ended."""
        with adopting(), contextlib.suppress(OSError):
            socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
            return int(self._requests.recv(100) or 0) or None
        return None

    def close(self) -> None:
        """Ends the server."""
        self._requests.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


_one_at_a_time = threading.Lock()
_servers: dict[str, ForkServer] = {}
"""Of this process, by kind."""
_may_start = True


def kind_of(command: Sequence[str]) -> str | None:
    """The fork server of a command, which begins with what follows `-m`."""
    return "loads" if command[:2] == _BENCH else KINDS.get(command[0])


def _server_of(command: Sequence[str], env: Mapping[str, str]) -> ForkServer | None:
    """None: the process must be a fresh one."""
    if command[1:2] != ["-m"] or (kind := kind_of(command[2:])) is None:
        return None
    environment: Mapping[str, str] = os.environ
    if command[0] != sys.executable:
        if command[0] != VLLM_PYTHON:
            return None
        kind, environment = "vllm v2" if "VLLM_USE_V2_MODEL_RUNNER" in env else "vllm", env
    if kind not in _servers and _may_start:
        _servers[kind] = ForkServer.fresh(kind, environment)
    server = _servers.get(kind)
    return server if server is not None and server.fits(env) else None


def use(servers: Mapping[str, ForkServer]) -> None:
    """Gives this process these fork servers, in place of those that it has."""
    _servers.clear()
    _servers.update(servers)


def use_only(servers: Mapping[str, ForkServer]) -> None:
    """The same. It starts no other."""
    global _may_start
    _may_start = False
    use(servers)


def close() -> None:
    """Ends the fork servers of this process."""
    while _servers:
        _servers.popitem()[1].close()


class ForkedPopen(subprocess.Popen[AnyStr]):
    """Starts roles by the fork server of this process, and all else as `subprocess.Popen` does."""

    def _execute_child(self, *positional: Any, **named: Any) -> None:
        given = _EXECUTE.bind(self, *positional, **named).arguments
        with _one_at_a_time:
            forked = self._fork(given)
        if not forked:
            super()._execute_child(*positional, **named)  # pyrefly: ignore[missing-attribute]

    def _fork(self, given: Mapping[str, Any]) -> bool:
        """Returns False if the process must be a fresh one."""
        args = given["args"]
        single = isinstance(args, str | bytes | os.PathLike)
        command = [os.fsdecode(args)] if single else [*map(str, args)]
        env = dict(os.environ if given["env"] is None else given["env"])
        if any(given[name] for name in _UNUSUAL) or (server := _server_of(command, env)) is None:
            return False
        standard = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        fds = [number if fd == -1 else fd for number, fd in enumerate(standard)]
        pass_fds = sorted(given["pass_fds"])
        request = {
            "command": command[2:],
            "env": env,
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "session": given["start_new_session"],
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "ignored": [int(number) for number in ENDS if signal.getsignal(number) is signal.SIG_IGN],
            "numbers": [0, 1, 2, *pass_fds],
            "cpus": sorted(os.sched_getaffinity(0)),
        }
        if (pid := server.start(request, [*fds, *pass_fds])) is None:
            return False
        self.pid: int = pid
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # pyrefly: ignore[missing-attribute]
        if command[2] == LAST and not _may_start and FORKS_AGAIN not in os.environ:
            close()
        return True


def _python_paths(env: Mapping[str, str]) -> list[str]:
    return [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]


def _at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(_AT_IMPORT) and k not in _HARMLESS}


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """This process becomes the parent of its descendants that lose theirs."""
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class AsyncProcess:
    """What a router uses of `asyncio.subprocess.Process`. uvloop starts processes without `subprocess`."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.kill = popen.kill

    @classmethod
    async def start(cls, *command: str, stdin: int, stdout: int, env: Mapping[str, str]) -> AsyncProcess:
        process = cls(ForkedPopen(command, stdin=stdin, stdout=stdout, env=env))
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process._popen.stdout)
        transport, protocol = await loop.connect_write_pipe(FlowControlMixin, process._popen.stdin)
        process.stdout, process.stdin = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        return process

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    async def wait(self) -> int:
        if self._popen.poll() is None:
            await process_end(self._popen.pid)
        return self._popen.wait()


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Roles that this process starts are forks, until the end of the context."""
    import pytest  # the environment with vLLM does not have it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", ForkedPopen)
        yield
