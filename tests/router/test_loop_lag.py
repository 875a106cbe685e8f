"""The event loop's lag: how long a stall delays everything else."""

import asyncio
import time

from baton.router.server import observe_lag

STALL = 0.2


async def test_a_stall_of_the_event_loop_is_measured() -> None:
    observed: asyncio.Queue[float] = asyncio.Queue()
    measuring = asyncio.create_task(observe_lag(observed.put_nowait))
    await observed.get()
    time.sleep(STALL)  # noqa: ASYNC251 - the stall
    assert await observed.get() >= STALL / 2
    measuring.cancel()
