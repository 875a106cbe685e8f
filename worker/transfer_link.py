"""The service's end of the socket to its transfer process: its port, its statistics, its drain."""

import asyncio
import contextlib
import socket
from collections import deque

import kv_transfer
from kv_transfer import Drain, Drained, Ready, StatsRequest, TransferStats
from worker.failure import TreeError

_MAX_MESSAGE = 1 << 16
_EXIT_SOON = 5.0
"""Seconds in which a process that closed its socket should be gone: how it ended says more."""


class TransferLink:
    """Owns `end`. One task calls `ready`, then `receive` until the worker ends; any may ask for
    statistics."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._asked: deque[asyncio.Future[TransferStats]] = deque()
        self._drained = asyncio.Event()
        self.reports = 0
        """Messages so far: it reports every second, so a standstill is a hung process."""

    async def ready(self) -> int:
        """Waits until it serves; the port of its lanes, 0 where it listens for none."""
        message = await self._receive()
        assert isinstance(message, Ready), f"too early: {message}"
        return message.port

    async def receive(self) -> None:
        """Takes what it sends. Raises TreeError when it closes its end."""
        while True:
            message = await self._receive()
            if isinstance(message, TransferStats):
                while self._asked:
                    asked = self._asked.popleft()
                    if not asked.done():
                        asked.set_result(message)
            elif isinstance(message, Drained):
                self._drained.set()

    async def stats(self) -> TransferStats:
        """What it answers from now on."""
        asked: asyncio.Future[TransferStats] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        await self._send(StatsRequest())
        return await asked

    async def drain(self, timeout: float) -> None:
        """Lets open transfers end, for as long as `timeout` seconds, and closes the lanes."""
        with contextlib.suppress(TimeoutError, OSError):
            await self._send(Drain(timeout))
            await asyncio.wait_for(self._drained.wait(), timeout + 1.0)

    def close(self) -> None:
        """The transfer process ends when this end is closed."""
        self._end.close()

    async def _send(self, message: StatsRequest | Drain) -> None:
        await asyncio.get_running_loop().sock_sendall(self._end, kv_transfer.encode(message))

    async def _receive(self) -> kv_transfer.FromTransfer:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._end, _MAX_MESSAGE)
        except ConnectionResetError:
            data = b""
        if not data:
            await asyncio.sleep(_EXIT_SOON)
            raise TreeError("the transfer process closed its socket, and lives")
        self.reports += 1
        return kv_transfer.decode_from_transfer(data)
