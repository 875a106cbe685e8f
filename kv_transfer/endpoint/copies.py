"""Memory that an engine exports, memory that its peers export, and copies into blocks that are under way."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.kv_transfer.peer_memory import PeerMemory, Unreachable
from baton.kv_transfer.protocol.local_messages import Exported, ExportGone, ExportIn, Opened
from baton.kv_transfer.protocol.messages import Export
from baton.kv_transfer.slices import ARENA, Slice

if TYPE_CHECKING:
    from baton.kv_transfer.device.pool import Outcome, Pool

Ended = tuple[Sequence[Slice], list[bool]]
"""Slices that were copied, and whether each was right."""


def exported(pool: "Pool", adopted: Export | None = None) -> Exported:
    """Makes the pool export slots of its own, or fill those that it adopts from the transfer process."""
    try:
        if adopted is None:
            return Exported(pool.export(), "")
        pool.adopt(adopted)
        return Exported(adopted, "")
    except Unreachable as e:
        return Exported(None, str(e))


@dataclass(slots=True, eq=False)
class _Source:
    """Memory that the peer of a session exports."""

    memory: PeerMemory
    copies: int = 0  # under way
    gone: bool = False  # the session has ended


@dataclass(slots=True, eq=False)
class _Copies:
    source: _Source | None  # None: the arena
    event: Any
    slices: Sequence[Slice]
    outcome: "Outcome"


class Copies:
    """For `Injector`. Memory is closed when its session has ended and no copy from it is under way."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._sources: dict[int, _Source] = {}  # by session
        self._opening: dict[int, str] = {}  # session → kind of memory that not all ranks have opened yet
        self._answers: list[Opened] = []
        self._copies: deque[_Copies] = deque()  # in stream order
        self._lost: list[Ended] = []  # slices that cannot be read any more

    def __bool__(self) -> bool:
        return bool(self._copies or self._lost or self._opening)

    def handle(self, message: ExportIn | ExportGone) -> None:
        """`opened` has the answer."""
        if isinstance(message, ExportGone):
            self._opening.pop(message.session, None)
            if source := self._sources.pop(message.session, None):
                source.gone = True
                self._close_unused(source)
            return
        try:
            self._sources[message.session] = _Source(self._pool.open(message.export, message.dtypes))
            self._opening[message.session] = message.export.kind
        except Unreachable as e:
            self._answers.append(Opened(message.session, False, str(e)))

    def opened(self) -> list[Opened]:
        """The answers that became known since the last call."""
        answers, self._answers = self._answers, []
        for session, kind in list(self._opening.items()):
            try:
                if not self._pool.opened(self._sources[session].memory):
                    continue
                answers.append(Opened(session, True, kind))
            except Unreachable as e:
                answers.append(Opened(session, False, str(e)))
                self._sources.pop(session).memory.close()
            del self._opening[session]
        return answers

    def start(self, slices: Sequence[Slice]) -> tuple[Any] | None:
        """Copies slices of one memory. Returns the event after which all is in the pool. None: it cannot be
        read any more."""
        source = None if slices[0].memory == ARENA else self._sources[slices[0].memory]
        try:
            event, outcome = self._pool.scatter(slices, source and source.memory)
        except Unreachable:
            self._lost.append((slices, [False] * len(slices)))
            return None
        if source:
            source.copies += 1
        self._copies.append(_Copies(source, event, slices, outcome))
        return (event,)

    def ended(self) -> list[Ended]:
        ended, self._lost = self._lost, []
        while self._copies and self._pool.passed(self._copies[0].event):
            copies = self._copies.popleft()
            ended.append((copies.slices, [remainder == 0 for remainder in copies.outcome()]))
            if copies.source:
                copies.source.copies -= 1
                self._close_unused(copies.source)
        return ended

    def close(self) -> None:
        """The pool is closed: no copy is under way."""
        for source in self._sources.values():
            source.memory.close()

    def _close_unused(self, source: _Source) -> None:
        if source.gone and source.copies == 0:
            source.memory.close()
