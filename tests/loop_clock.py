"""The clock of an event loop. `asyncio.timeout` and `asyncio.sleep` read it, `time.monotonic` does not."""

import asyncio

import pytest


class Clock:
    """The time of the running event loop, which a test puts forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead = 0.0
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + self._ahead)

    async def forward(self, seconds: float) -> None:
        """What is due by then runs. Tasks that were made before begin at the time before."""
        for ahead in (0.0, seconds):
            self._ahead += ahead
            for _ in range(10):  # what is due wakes a task, and that another one
                await asyncio.sleep(0)
