"""One of the processes of a router, as its supervisor sees it."""

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from baton.processes.children import die_with_parent, process_end, report
from baton.router.config import RouterConfig
from baton.router.processes.sockets import ControlClient

log = logging.getLogger(__name__)


class RouterProcess:
    """One process of the router, from its start to its end.

    Attributes:
        ready: its URL and addresses, once it listens.
        keys: the API keys that it has, or gets now.
        error: the error that it reported, or "".
        known: its last reply to each command of `asked`.
    """

    def __init__(self, number: int, config: RouterConfig, run: Callable[[RouterConfig], int]) -> None:
        self.number = number
        self.ready: dict[str, Any] | None = None
        self.keys = config.api_keys
        self.error = ""
        self.replies: dict[str, bytes] = {}
        self._questions: dict[str, asyncio.Task[None]] = {}
        supervisor_end, child_end = socket.socketpair()
        reader, writer = os.pipe()
        with contextlib.ExitStack() as undo, child_end, open(writer, "wb"):
            undo.callback(supervisor_end.close)
            undo.callback(os.close, reader)
            fds = {"ready_fd": writer, "control_fd": child_end.fileno()}
            config = replace(config, id=os.urandom(16), process_number=number, **fds)
            self.pid = fork(config, run)
            undo.pop_all()
        self._control, self._pipe = supervisor_end, reader
        self._client: ControlClient | None = None
        self._reaped = False

    async def follow(self, ready_fd: int | None) -> None:
        """Reads its ready pipe until it listens or the pipe ends. Passes its progress on to `ready_fd`."""
        loop = asyncio.get_running_loop()
        self._client = await ControlClient.connect(self._control, self.pid)
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._pipe, "rb", 0)
        )
        with contextlib.closing(transport):
            while line := await reader.readline():
                message = json.loads(line)
                self.ready = message.get("ready")
                self.error = message.get("error", self.error)
                if "stage" in message:
                    report(ready_fd, message)

    async def ended(self) -> int:
        """Waits for its end. Returns the exit code."""
        await process_end(self.pid)
        _, status = os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222  (it is dead)
        self._reaped = True
        return os.waitstatus_to_exitcode(status)

    async def send(self, command: str) -> bytes:
        """Returns the reply. Raises ConnectionError if there is none. Kills a process that hangs."""
        if self.ready is None or self._client is None:
            raise ConnectionResetError("the process does not listen yet")
        try:
            return await self._client.send(command)
        except TimeoutError as error:
            log.error("process %d hangs and is killed", self.number)
            self.kill()
            raise ConnectionResetError("the process hangs") from error

    def asked(self, command: str) -> asyncio.Task[None]:
        """Sends a command, unless it waits for its reply already. The task ends with it in `replies`."""
        task = self._questions.get(command)
        if task is None or task.done():
            task = self._questions[command] = asyncio.create_task(self._ask(command))
        return task

    async def _ask(self, command: str) -> None:
        with contextlib.suppress(ConnectionError):
            self.replies[command] = await self.send(command)

    async def send_or_kill(self, command: str) -> None:
        """Sends `keys`, `drain` or `stop`. A process that does not listen yet is killed."""
        try:
            await self.send(command)
        except ConnectionError:
            self.kill()

    def kill(self) -> None:
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def fork(config: RouterConfig, run: Callable[[RouterConfig], int]) -> int:
    """Starts a process that shares the memory of this one, as far as neither changes it. Returns its pid."""
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a handler of the new process would tell this one
    try:
        parent_pid, pid = os.getpid(), os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    if not pid:
        _become(parent_pid, config, run)
    return pid


def _become(parent_pid: int, config: RouterConfig, run: Callable[[RouterConfig], int]) -> NoReturn:
    """In the new process. It never returns to the event loop, which is the supervisor's."""
    code = 1
    try:
        die_with_parent(parent_pid)
        asyncio._set_running_loop(None)
        gc.freeze()  # an object of the supervisor must not close a descriptor by its number
        open_fds = (config.ready_fd, config.control_fd, config.keys_fd, config.forks_fd)
        bounds = sorted(fd for fd in (2, *open_fds, os.sysconf("SC_OPEN_MAX")) if fd is not None)
        for low, high in itertools.pairwise(bounds):
            os.closerange(low + 1, high)
        code = run(config)
    except ValueError as error:  # a mistake of the user
        report(config.ready_fd, {"error": str(error)})
    except BaseException:
        log.exception("process %s", config.process_number)
    os._exit(code)
