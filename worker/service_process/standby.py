"""The standby of a worker: an engine process that is started before it is needed.

start ─▶ torch, weights ─▶ stands by ─▶ `take`: it maps and verifies KV, and serves
           │                 │
           └────────┬────────┘
                    ├─ it ends: another one is started, `MOST_ENDS` times
                    ├─ it cannot start, for example since it cannot share weights: none is started
                    └─ `renew`: it has old weights, or an old version of Baton; another one is started
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from baton.worker.processes import StandbyError, StartError
from baton.worker.service_process.tree import WorkerTree, discard

log = logging.getLogger(__name__)

MOST_ENDS = 3
"""Standbys that may end by themselves until one is taken or renewed: the next one would likely end, too."""


class Standby:
    """Keeps a tree whose engine process stands by. It is used inside the event loop.

    `start`, then `take` when the tree that serves has ended, and `start` again. `close` is the end."""

    def __init__(self, new_tree: Callable[[], WorkerTree]) -> None:
        """`new_tree` makes the next tree of the worker. It may raise ValueError or OSError."""
        self._new_tree = new_tree
        self.memory_bytes = 0
        """Of the standby alone, once it stands by."""
        self.state: Literal["starting", "ready", "ended"] = "starting"
        """`ended`: none is started before the next `start` or `renew`."""
        self.failure = ""
        """Why none is started, if the next engine process likely cannot start either."""
        self._tree: WorkerTree | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._outdated = asyncio.Event()
        self._settled = asyncio.Event()

    def start(self) -> None:
        """Starts a standby, and others in place of it."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())

    def renew(self) -> None:
        """The standby has old weights, or code of an old version: another one takes its place."""
        self._outdated.set()
        if self.state == "ended":
            self._keeping = asyncio.create_task(self._keep())
        if self.state != "starting":
            self._begin()

    async def settled(self) -> None:
        """Returns when the standby stands by, is needed, or will not come."""
        await self._settled.wait()

    async def take(self) -> WorkerTree | None:
        """The caller owns the tree from now on. Its engine process may be starting. None: there is none that
        is up to date."""
        await self._stop()
        tree, self._tree = self._tree, None
        if tree is not None and (tree.failure.done() or self._outdated.is_set()):
            await discard(tree)
            return None
        return tree

    async def close(self) -> None:
        """Ends the standby. No other one is started before the next `start` or `renew`."""
        if (tree := await self.take()) is not None:
            await discard(tree)
        self.state, self.memory_bytes = "ended", 0

    async def _stop(self) -> None:
        """A caller that is cancelled may call it again."""
        if (keeping := self._keeping) is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
            self._keeping = None
            if not keeping.cancelled():
                keeping.result()
        self._settled.set()

    def _begin(self) -> None:
        self.state, self.memory_bytes, self.failure = "starting", 0, ""
        self._settled.clear()

    async def _keep(self) -> None:
        ends, reason = 0, None
        while ends < MOST_ENDS:
            self._outdated.clear()
            self._begin()
            try:
                self._tree = tree = self._new_tree()
                tree.start_standby()
                await self._end(tree)
                reason = tree.failure.exception() if tree.failure.done() else None
            except (OSError, ValueError) as error:  # no descriptor is left, or no directory can be made
                reason = error
            if (ended := self._tree) is not None:
                self._tree = None
                await discard(ended)
            if self._outdated.is_set():
                ends = 0
                continue
            if isinstance(reason, StartError):
                log.warning("no engine process can stand by, so one will start when it is needed: %s", reason)
                break
            ends += 1
            log.warning("the standby has ended (%d of at most %d times): %s", ends, MOST_ENDS, reason)
        self.state = "ended"
        self.failure = "" if isinstance(reason, StandbyError) else str(reason)
        self._settled.set()

    async def _end(self, tree: WorkerTree) -> None:
        """Returns when the standby has ended, or is outdated."""
        events = [asyncio.create_task(event.wait()) for event in (self._outdated, tree.stands_by)]
        try:
            ends = {tree.failure, events[0]}
            await asyncio.wait({*ends, events[1]}, return_when=asyncio.FIRST_COMPLETED)
            if not any(end.done() for end in ends):
                self.memory_bytes = await asyncio.to_thread(lambda: tree.standby_bytes)
                self.state = "ready"
                self._settled.set()
                log.info("an engine process stands by, with %.2f GiB", self.memory_bytes / (1 << 30))
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
