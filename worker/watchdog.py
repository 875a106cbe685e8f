"""A watchdog that detects a hung process by a counter that stands still."""

import asyncio
import time
from collections.abc import Callable

from worker.failure import TreeError

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
        self.limit = limit
        self._error = error

    async def watch(self) -> None:
        last, silent, checked = self._ticks(), 0.0, time.monotonic()
        while True:
            interval = min(1.0, self.limit / 4)
            await asyncio.sleep(interval)
            now = time.monotonic()
            elapsed, checked = min(now - checked, 2 * interval), now
            ticks = self._ticks()
            silent = silent + elapsed if ticks == last else 0.0
            last = ticks
            if silent > self.limit:
                raise self._error(f"{self._name} gave no sign of life for {silent:.1f} s")
