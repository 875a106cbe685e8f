"""Keeps a process running."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from baton.processes.restarts import RestartPolicy


async def keep(
    live: Callable[[], Awaitable[tuple[float, str]]],
    policy: RestartPolicy,
    stopping: asyncio.Event,
    ended: Callable[[str, float], None],
) -> None:
    """Starts a process again and again, until `stopping`, or until `ended` raises.

    `live`: starts it, and waits for its end. Returns how many seconds it ran, and why it ended. `ended`: is
    told why, and of the seconds until the next start.
    """
    while not stopping.is_set():
        try:
            ran_for, why = await live()
        except OSError as error:  # the machine has no memory, process or descriptor left
            ran_for, why = 0.0, f"cannot be started: {error}"
        if stopping.is_set():
            return
        delay = policy.crashed(time.monotonic(), ran_for)
        ended(why, delay)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await stopping.wait()
