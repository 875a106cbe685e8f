"""One of the processes of a router, as its supervisor sees it."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from baton.processes import ready_pipe
from baton.processes.children import Child
from baton.processes.forks import Forks
from baton.router.admission.keys import ApiKey
from baton.router.config import RouterConfig
from baton.router.processes.sockets import ControlClient

log = logging.getLogger(__name__)


_GIVEN = ("port", "grpc_port", "admin_port", "api_keys")
"""What a process is told of its configuration. It has the rest from before the helper was forked."""


def configured(config: RouterConfig, given: bytes, fds: Sequence[int]) -> RouterConfig:
    """The configuration of a process: what `RouterProcess.start` gives, in place of that in `config`."""
    start = msgspec.msgpack.decode(given)
    start["api_keys"] = msgspec.convert(start["api_keys"], tuple[ApiKey, ...])
    ready, control, keys, children = fds
    start |= {"ready_fd": ready, "control_fd": control, "keys_fd": keys, "forks_fd": children}
    return replace(config, id=os.urandom(16), **start)


class RouterProcess:
    """One process of the router, from its start to its end.

    Attributes:
        ready: its URL and addresses, once it listens.
        keys: the API keys that it has, or gets now.
        error: the error that it reported, or "".
        replies: its last reply to each command of `asked`.
    """

    def __init__(self, number: int, config: RouterConfig) -> None:
        self.number = number
        self.ready: Mapping[str, Any] | None = None
        self.keys = config.api_keys
        self.error = ""
        self.replies: dict[str, bytes] = {}
        self.pid = 0
        self._config = config
        self._questions: dict[str, asyncio.Task[None]] = {}
        self._client: ControlClient | None = None

    async def start(self, forks: Forks) -> None:
        """Raises OSError and HelperEnded."""
        config = self._config
        assert config.keys_fd is not None, "they share it"
        assert config.forks_fd is not None, "they share it"
        with contextlib.ExitStack() as undo:
            control, child_end = socket.socketpair()
            undo.callback(control.close)
            reader, writer = os.pipe()
            self._pipe = undo.enter_context(open(reader, "rb", 0))  # noqa: ASYNC230
            with child_end, open(writer, "wb"):  # noqa: ASYNC230
                start = {name: getattr(config, name) for name in _GIVEN} | {"process_number": self.number}
                fds = writer, child_end.fileno(), config.keys_fd, config.forks_fd
                forked = await forks.start(msgspec.msgpack.encode(start), fds)
            self.pid = forked.pid
            self._child = Child(f"router process {self.number}", forked)
            self._client = await ControlClient.connect(control, self.pid)
            undo.pop_all()
        self.ended = self._child.wait
        self.kill = self._child.kill

    async def follow(self, ready_fd: int | None) -> None:
        """Reads its ready pipe until it listens or the pipe ends. Passes its progress on to `ready_fd`."""

        def ready(line: Mapping[str, Any]) -> None:
            self.ready = line

        stage = ready_pipe.passes_on(ready_fd)
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
