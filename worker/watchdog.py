"""Who moves a counter is alive."""

import asyncio
import time
from collections.abc import Callable

from worker.failure import TreeError

START_SILENCE = 600.0
"""Seconds allowed between two start-up stages: one may be a download, a compilation or a graph capture."""


class Watchdog:
    """Raises `error`, a TreeError, from `watch` when `ticks` stays the same for longer than `limit` seconds.

    Only time in which this process itself ran is counted: after a pause of the whole machine (or a
    debugger) the engine gets its chance to tick first.
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
