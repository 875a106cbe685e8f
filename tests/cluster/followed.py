"""Follows a discovery, as a router does, and remembers all that it said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.router.discovery import Discovery
from tests.within import WITHIN


class Follower:
    """Use as an async context manager.

    Attributes:
        heard: every set of addresses, in order.
    """

    def __init__(self, discovery: Discovery) -> None:
        self.heard: list[frozenset[str]] = []
        self._discovery = discovery
        self._news = asyncio.Event()

    async def __aenter__(self) -> Follower:
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def until(self, *addresses: str) -> None:
        """Until just these are what it said last."""
        await self.until_true(lambda: self.heard[-1:] == [frozenset(addresses)])

    async def until_true(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN):
            while not condition():
                if self._task.done():
                    self._task.result()
                self._news.clear()
                await self._news.wait()

    async def _follow(self) -> None:
        try:
            async for addresses in self._discovery.watch():
                self.heard.append(addresses)
                self._news.set()
        finally:
            self._news.set()
