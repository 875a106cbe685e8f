"""A watchdog that detects a hung process by a counter that stands still."""

import asyncio
import time
from collections.abc import Callable

from baton.worker.failure import TreeError

START_SILENCE = 600.0
"""Seconds allowed between two ticks during start-up, which may download, compile or capture graphs."""


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
