"""Child processes of the service process: their exit and signs of life, and the errors that end it."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from typing import Any

from baton.system.processes import process_end

START_SILENCE = 600.0
"""Seconds allowed between two ticks during start-up, which may download, compile or capture graphs."""


class StartError(Exception):
    """The worker cannot start because of a mistake that the user can correct. The message names it."""


class StandbyError(StartError):
    """A standby cannot start beside the engine process that serves. It can when that one has ended."""


class TreeError(Exception):
    """A process of the worker died, hung or sent a wrong message.

    The whole tree ends, and the supervisor starts the next incarnation.
    """


class EngineError(TreeError):
    """The engine process died or hung. An attempt of its last step may be the cause."""


class EngineRestart(EngineError):
    """The engine process runs well, and another one shall take its place."""


def dismiss(answer: asyncio.Future[Any]) -> None:
    """Nothing waits for this answer any more. An error that it may have is no error of the program."""
    if not answer.cancel() and not answer.cancelled():
        answer.exception()


class ChildProcess:
    """A child process that the running event loop watches."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name = name
        self._popen = popen
        self._exit = asyncio.ensure_future(self._reap())

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._exit.done()

    async def wait(self) -> int:
        """Returns the exit code, or minus the number of the signal that killed it. Many tasks may wait."""
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        """Sends SIGKILL, which also ends a stopped process. Does nothing if the process has ended."""
        if not self._exit.done():
            self._popen.kill()

    async def end(self, timeout: float) -> int:
        """Waits `timeout` seconds for the process to exit, then kills it. Returns the exit code."""
        try:
            async with asyncio.timeout(timeout):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()

    async def _reap(self) -> int:
        await process_end(self.pid)
        return self._popen.wait()


class Watchdog:
    """Raises `error` from `watch` when the value of `ticks` stays the same for longer than `limit` seconds.

    Counts only time in which this process itself ran. After a pause of the whole machine, the watched process
    can tick before the limit is reached.
    """

    def __init__(
        self, name: str, ticks: Callable[[], int], limit: float, error: type[TreeError] = TreeError
    ) -> None:
        self._name = name
        self._ticks = ticks
        self._limit = limit
        self._error = error
        self._silent = 0.0
        self._checked = 0.0  # time.monotonic()

    def restart(self, limit: float) -> None:
        """A new limit. What was allowed before does not count against it."""
        self._limit, self._silent, self._checked = limit, 0.0, time.monotonic()

    async def watch(self) -> None:
        last, self._checked = self._ticks(), time.monotonic()
        while True:
            interval = min(1.0, self._limit / 4)
            await asyncio.sleep(interval)
            now = time.monotonic()
            elapsed, self._checked = min(now - self._checked, 2 * interval), now
            ticks = self._ticks()
            self._silent = self._silent + elapsed if ticks == last else 0.0
            last = ticks
            if self._silent > self._limit:
                raise self._error(f"{self._name} gave no sign of life for {self._silent:.1f} s")
