"""The service's end of the socket to the transfer process: readiness, statistics and drain."""

import asyncio
import contextlib
import socket
from collections import deque

from baton.kv_transfer import spawn
from baton.kv_transfer.spawn import Drain, Drained, Ready, StatsRequest, TransferStats
from baton.worker.processes import TreeError

_EXIT_SOON = 5.0
"""Seconds for the transfer process to exit after it closed its socket. Its exit code is the better error."""


class TransferLink:
    """The connection to the transfer process. Owns `end`.

    One task calls `ready` and then `receive` until the worker ends. Any task may call `stats`.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._stats_answers: deque[asyncio.Future[TransferStats]] = deque()
        self._drained = asyncio.Event()
        self.reports = 0
        """Number of messages received. The process sends one every second, so a standstill means it hangs."""

    async def ready(self) -> int:
        """Waits until the process is ready. Returns the port of its KV lanes."""
        message = await self._receive()
        assert isinstance(message, Ready), f"unexpected message before Ready: {message}"
        return message.port

    async def receive(self) -> None:
        """Handles the messages of the process. Raises TreeError when it closes its end."""
        while True:
            message = await self._receive()
            if isinstance(message, TransferStats):
                while self._stats_answers:
                    answer = self._stats_answers.popleft()
                    if not answer.done():
                        answer.set_result(message)
            elif isinstance(message, Drained):
                self._drained.set()

    async def stats(self) -> TransferStats:
        """Asks for the statistics. Returns the next report."""
        answer: asyncio.Future[TransferStats] = asyncio.get_running_loop().create_future()
        self._stats_answers.append(answer)
        with contextlib.suppress(OSError):  # the process has ended: the watcher of its exit says so
            await self._send(StatsRequest())
        return await answer

    async def drain(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for open transfers to end, then closes the lanes."""
        with contextlib.suppress(TimeoutError, OSError):
            await self._send(Drain(timeout))
            async with asyncio.timeout(timeout + 1.0):
                await self._drained.wait()

    def close(self) -> None:
        """Closes the socket, which makes the transfer process exit. `stats` that wait raise TreeError."""
        self._end.close()
        for answer in self._stats_answers:
            if not answer.done():
                answer.set_exception(TreeError("the transfer process has ended"))
        self._stats_answers.clear()

    async def _send(self, message: StatsRequest | Drain) -> None:
        await asyncio.get_running_loop().sock_sendall(self._end, spawn.encode(message))

    async def _receive(self) -> spawn.FromTransfer:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._end, spawn.MAX_MESSAGE)
        except ConnectionResetError:
            data = b""
        if not data:
            await asyncio.sleep(_EXIT_SOON)
            raise TreeError("the transfer process closed its socket but did not exit")
        self.reports += 1
        return spawn.decode_from_transfer(data)
