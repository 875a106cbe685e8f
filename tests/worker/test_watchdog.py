"""The watchdog."""

import asyncio
import itertools

import pytest

from worker.failure import TreeError
from worker.watchdog import Watchdog


async def test_a_counter_that_stands_still_raises() -> None:
    with pytest.raises(TreeError, match="the engine gave no sign of life for 0"):
        await asyncio.wait_for(Watchdog("the engine", lambda: 7, 0.2).watch(), 5)


async def test_a_counter_that_moves_raises_nothing() -> None:
    ticks = itertools.count()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Watchdog("the engine", lambda: next(ticks), 0.05).watch(), 0.5)
