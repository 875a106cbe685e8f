"""How long tests wait for what must come."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
WITHIN = 100.0
"""Seconds. Only a test that hangs waits so long, on any machine: the error then says what never came. Pytest
ends a test after 600 s."""


async def within(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(WITHIN):
        return await awaitable


async def eventually(condition: Callable[[], object], seconds: float = WITHIN) -> None:
    """Waits for what no event tells, such as what another process does."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
