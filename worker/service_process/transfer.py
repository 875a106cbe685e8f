"""A transfer process, as its service sees it: its arenas, its start and end, and the socket to it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine

from baton.kv_transfer import Heartbeat, TransferConfig, WorkerEnds, channel_pair
from baton.kv_transfer.spawn import (
    MAX_MESSAGE,
    FromTransfer,
    Ready,
    StatsRequest,
    TransferStats,
    WaitingTransfer,
    decode_from_transfer,
    encode,
)
from baton.processes.children import Child
from baton.worker.config import WorkerConfig
from baton.worker.processes import TreeError, dismiss

STOP_TIMEOUT = 5.0
"""Seconds that a process has to stop before it is killed."""
_EXIT_SOON = 5.0
"""Seconds for the transfer process to exit after it closed its socket. Its exit code is the better error."""


class Transfer:
    """A transfer process: that of KV, or the one of embeddings of images, which have another layout.

    One task calls `start` and then `receive` until the worker ends. Any task may call `stats`.

    Attributes:
        ends: the arenas that it shares with the engine.
        process: None until it is started.
        reports: number of messages received. The process sends one every second, so a standstill means that
            it hangs.
    """

    def __init__(self, config: WorkerConfig, kind: str, ranks: int) -> None:
        """`ranks`: of the engine that have arenas."""
        self.name = f"{config.name} {kind}"
        self.ends = WorkerEnds.create(config.kv_slots, config.kv_slot_bytes, ranks)
        try:
            self._end, self._far_end = channel_pair()
        except BaseException:
            self.ends.close()
            raise
        self._end.setblocking(False)
        self.process: Child | None = None
        self.reports = 0
        self._waiting: WaitingTransfer | None = None
        self._stats_answers: deque[asyncio.Future[TransferStats]] = deque()

    def spawn(self, heartbeat: Heartbeat) -> Child:
        """It waits for `start`."""
        sending, receiving = self.ends.transfer
        self._waiting = WaitingTransfer(
            sending=sending, receiving=receiving, heartbeat=heartbeat, service=self._far_end
        )
        self.process = Child(self.name, self._waiting.process)
        return self.process

    async def start(self, start: TransferConfig, secret: bytes) -> int:
        """Waits until the process is ready. Returns the port of its KV lanes."""
        assert self._waiting is not None, "it is spawned"
        self._waiting.start(start, secret)
        message = await self._receive()
        assert isinstance(message, Ready), f"unexpected message before Ready: {message}"
        return message.port

    async def receive(self) -> None:
        """Takes the reports of the process. Raises TreeError when it closes its end."""
        while True:
            stats = await self._receive()
            assert isinstance(stats, TransferStats), f"unexpected message after Ready: {stats}"
            while self._stats_answers:
                answer = self._stats_answers.popleft()
                if not answer.done():
                    answer.set_result(stats)

    async def stats(self) -> TransferStats:
        """Asks for the statistics. Returns the next report."""
        answer: asyncio.Future[TransferStats] = asyncio.get_running_loop().create_future()
        self._stats_answers.append(answer)
        try:
            with contextlib.suppress(OSError):  # the process has ended: the watcher of its exit says so
                await asyncio.get_running_loop().sock_sendall(self._end, encode(StatsRequest()))
            return await answer
        finally:
            dismiss(answer)

    async def watch(self, watcher: Coroutine[None, None, None]) -> None:
        """Runs `watcher` of this process. Returns early if the process has ended: the watcher of its exit
        says why."""
        try:
            await watcher
        except TreeError:
            if self.process is None or not self.process.has_ended:
                raise

    async def stop(self) -> None:
        """Closes its lanes, and waits for its exit."""
        if self.process is not None:
            self._close_socket()
            await self.process.end(STOP_TIMEOUT)

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.close()
        self._close_socket()
        self._far_end.close()
        self.ends.close()

    def _close_socket(self) -> None:
        """The transfer process then exits. `stats` that wait raise TreeError."""
        self._end.close()
        for answer in self._stats_answers:
            if not answer.done():
                answer.set_exception(TreeError("the transfer process has ended"))
        self._stats_answers.clear()

    async def _receive(self) -> FromTransfer:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._end, MAX_MESSAGE)
        except ConnectionResetError:
            data = b""
        if not data:
            await asyncio.sleep(_EXIT_SOON)
            raise TreeError("the transfer process closed its socket but did not exit")
        self.reports += 1
        return decode_from_transfer(data)
