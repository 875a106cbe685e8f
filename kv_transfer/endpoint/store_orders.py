"""The orders of an engine to its store process, and the units of memory in which both keep objects."""

import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.device.pool import Event, Pool
from baton.kv_transfer.protocol.local_messages import (
    StoreAnswer,
    StoreLayout,
    StoreOpened,
    StoreOrder,
)
from baton.kv_transfer.shared_store import Units
from baton.kv_transfer.slices import Slice

Answer = Callable[[list[bool]], None]


class StoreOrders:
    """Owns the channel to the store process, and the units that this process does not have.

    Attributes:
        session: of the store process that is connected. 0: there is none.
        units: how objects lie in the units.
        pool: copies between these and the KV cache.
        free: the units that nothing uses.
    """

    def __init__(self, sock: socket.socket, units: Units, pool: Pool, describes: StoreLayout) -> None:
        self.channel = Channel(sock, StoreAnswer | StoreOpened)
        self.session = 0
        self.units, self.pool = units, pool
        self.free = list(range(units.count))
        self._describes = describes
        self._tickets = 0
        self._orders: dict[int, tuple[Sequence[int], Answer]] = {}
        # Copies that the device makes: when the event has passed, the functions are called.
        self._copies: deque[tuple[Event, Callable[[], object], Callable[[], None]]] = deque()
        self.channel.send(describes)

    def close(self) -> None:
        self.channel.sock.close()
        self.pool.close()

    @property
    def ready(self) -> bool:
        """Whether there is a store process, and it can take another order."""
        return bool(self.session) and not self.channel.full

    @property
    def copying(self) -> bool:
        return bool(self._copies)

    def order(
        self, then: Answer, names: Sequence[bytes], units: Sequence[int] = (), *,
        is_urgent: bool = False, is_put: bool = False,
    ) -> None:  # fmt: skip
        """`then` gets the answer: for each name whether it is there, and all False if the process ends. Or it
        gets an empty list, if the process ends and the order has no units."""
        self._tickets += 1
        self._orders[self._tickets] = units, then
        order = self.session, self._tickets, is_urgent, is_put, tuple(names), tuple(units)
        self.channel.send(StoreOrder(*order))

    def copy(self, started: tuple[Event, Callable[[], object]], then: Callable[[], None]) -> None:
        """Calls `then` when a copy is over. `started`: what the pool returned. The store process verifies
        objects, so its outcome is not needed."""
        self._copies.append((*started, then))

    def receive(self, probed: Callable[[float, float], None]) -> bool:
        """Takes what has come, and ends the copies that are over. `probed`: as in `SharedStore`. Returns
        whether there is another store process than before, or none: what was ordered has failed."""
        is_new = False
        while messages := self.channel.receive():
            for message in messages:
                match message:
                    case StoreOpened(_, waited, seconds) if seconds:
                        probed(waited, seconds)
                    case StoreOpened(session):
                        self._reset(session)
                        is_new = True
                    case StoreAnswer(ticket, done):
                        if (order := self._orders.pop(ticket, None)) is not None:  # else of the one before
                            order[1](done)
        self.channel.flush()
        while self._copies and self.pool.passed(self._copies[0][0]):
            _, outcome, then = self._copies.popleft()
            outcome()
            then()
        return is_new

    def _reset(self, session: int) -> None:
        self.session = session
        if not session:
            self.channel.send(self._describes)
        orders, self._orders = self._orders, {}
        for units, then in orders.values():
            then([False] * len(units))

    def staged(
        self, unit: int, section: int, chunk: int, table: Any, *, by_rank: bool = False
    ) -> list[Slice]:
        """The slices of an object. `by_rank`: those that each rank writes."""
        units, start, items = self.units, chunk * CHUNK_TOKENS, []
        for slot, piece in enumerate(units.objects[section], unit * units.slots):
            if piece.token_count:
                piece = replace(piece, token_start=start)
            of_ranks = units.of_ranks(piece) if by_rank else [piece]
            for number, each in enumerate(of_ranks, 1 if len(of_ranks) > 1 else 0):
                items.append(Slice(each, slot=slot + number * units.object_slots, table=table))
        return items
