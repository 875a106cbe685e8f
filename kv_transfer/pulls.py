"""Memory that peers export, and the copies from it that are under way: for `ArenaReceiver`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_transfer.channel import ArrivedAt, ExportGone, ExportIn, Opened
from kv_transfer.peer_memory import TCP_ONLY, PeerMemory, Unreachable

if TYPE_CHECKING:
    from kv_transfer.device import Outcome, Pool, Staged

Ended = tuple[Sequence[ArrivedAt], list[bool]]
"""Slices that were read, and whether the generation and the checksum of each were right."""


@dataclass(slots=True, eq=False)
class _Source:
    """Memory that the peer of a session exports."""

    memory: PeerMemory
    pulls: int = 0  # under way
    gone: bool = False  # the session has ended


@dataclass(slots=True, eq=False)
class _Pull:
    source: _Source
    event: Any
    arrived: Sequence[ArrivedAt]
    outcome: Outcome


class Pulls:
    """Memory is closed when its session has ended and no copy from it is under way."""

    def __init__(self, pool: Pool, *, allowed: bool) -> None:
        self._pool = pool
        self._allowed = allowed
        self._sources: dict[int, _Source] = {}  # by session
        self._pulls: deque[_Pull] = deque()  # in stream order
        self._lost: list[Ended] = []  # slices that cannot be read any more

    def __bool__(self) -> bool:
        return bool(self._pulls or self._lost)

    def handle(self, message: ExportIn | ExportGone) -> list[Opened]:
        if isinstance(message, ExportGone):
            if source := self._sources.pop(message.session, None):
                source.gone = True
                self._close_unused(source)
            return []
        try:
            if not self._allowed:
                raise Unreachable(f"{TCP_ONLY} at the receiver")
            self._sources[message.session] = _Source(self._pool.open(message.export))
        except Unreachable as e:
            return [Opened(message.session, False, str(e))]
        return [Opened(message.session, True, message.export.kind)]

    def start(self, session: int, batch: Sequence[Staged], arrived: Sequence[ArrivedAt]) -> tuple[Any] | None:
        """Copies from the memory of a session. Returns the event after which all is in the pool. None: it
        cannot be read any more."""
        source = self._sources[session]
        try:
            event, outcome = self._pool.pull(source.memory, batch)
        except Unreachable:
            self._lost.append((arrived, [False] * len(arrived)))
            return None
        source.pulls += 1
        self._pulls.append(_Pull(source, event, arrived, outcome))
        return (event,)

    def ended(self) -> list[Ended]:
        ended, self._lost = self._lost, []
        while self._pulls and self._pool.passed(self._pulls[0].event):
            pull = self._pulls.popleft()
            ended.append((pull.arrived, pull.outcome()))
            pull.source.pulls -= 1
            self._close_unused(pull.source)
        return ended

    def close(self) -> None:
        """The pool is closed: no copy is under way."""
        for source in self._sources.values():
            source.memory.close()

    def _close_unused(self, source: _Source) -> None:
        if source.gone and source.pulls == 0:
            source.memory.close()
