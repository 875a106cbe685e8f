"""One of the processes of a router, as its supervisor sees it."""

import asyncio
import contextlib
import logging
import os
import pickle
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton.processes import ready_pipe
from baton.processes.children import Child, report
from baton.processes.spawn import spawn
from baton.router.api.jobs import SamplingDefaults
from baton.router.config import RouterConfig
from baton.router.processes.child import Given
from baton.router.processes.sockets import ControlClient

log = logging.getLogger(__name__)

MODULE = "baton.router.processes.child"


class RouterProcess:
    """One process of the router, from its start to its end.

    Attributes:
        ready: its URL and addresses, once it listens.
        keys: the API keys that it has, or gets now.
        error: the error that it reported, or "".
        replies: its last reply to each command of `asked`.
    """

    def __init__(
        self, number: int, config: RouterConfig, tokenizer: bytes, defaults: SamplingDefaults
    ) -> None:
        """`tokenizer`: as `ModelTokenizer.state`. Raises OSError."""
        self.number = number
        self.ready: Mapping[str, Any] | None = None
        self.keys = config.api_keys
        self.error = ""
        self.replies: dict[str, bytes] = {}
        self._questions: dict[str, asyncio.Task[None]] = {}
        self._client: ControlClient | None = None
        with contextlib.ExitStack() as undo:
            self._control, child_end = socket.socketpair()
            undo.callback(self._control.close)
            reader, writer = os.pipe()
            self._pipe = undo.enter_context(open(reader, "rb", 0))
            with child_end, open(writer, "wb"):
                fds = {"ready_fd": writer, "control_fd": child_end.fileno()}
                config = replace(config, id=os.urandom(16), process_number=number, read_api_keys=tuple, **fds)
                given = Given(os.getpid(), config, tokenizer, defaults)
                shared = (config.keys_fd, config.forks_fd)
                inherited = [*fds.values(), *(fd for fd in shared if fd is not None)]
                popen = spawn("-m", MODULE, given=pickle.dumps(tuple(given)), pass_fds=inherited)
            self._child = Child(f"router process {number}", popen)
            undo.pop_all()
        self.pid = popen.pid
        self.ended = self._child.wait
        self.kill = self._child.kill

    async def follow(self, ready_fd: int | None) -> None:
        """Reads its ready pipe until it listens or the pipe ends. Passes its progress on to `ready_fd`."""
        self._client = await ControlClient.connect(self._control, self.pid)

        def ready(line: Mapping[str, Any]) -> None:
            self.ready = line

        def stage(name: str, fraction: float) -> None:
            report(ready_fd, {"stage": name, "fraction": fraction})

        self.error = await ready_pipe.follow(self._pipe, ready, stage, self.kill)

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

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
