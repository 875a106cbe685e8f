"""Writes to the shared store what the prefix cache has and the store lacks."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer.endpoint.store_orders import StoreOrders
from baton.kv_transfer.shared_store.chunk_object import name_of, section_of

OFFERS = 1 << 14
"""Objects that wait to be written. One more replaces the oldest."""
SHARE = 0.01
"""Of the time in which requests run, how long the engine's thread may gather chunks to write."""
PAUSE = 10.0
"""Seconds without writes after one has failed: the store is full, for example. Then it is tried again."""


class Lent(NamedTuple):
    """KV or states that stay where they are until `release`."""

    block_ids: Sequence[int]
    """A block table up to the end of the chunk."""
    state_slot: int
    release: Callable[[], None]


LATER = Lent((), 0, lambda: None)
"""What `lend` returns for something that is there, while the pool has no room to keep it."""


class StoreOffers:
    """The objects that wait to be written, or are under way. Offers may take half of the units.

    Attributes:
        written, refused: objects that the store took, or did not.
    """

    def __init__(
        self,
        orders: StoreOrders,
        lend: Callable[[bytes, int, int], Lent | None],
        stored: Callable[[bytes], None],
    ) -> None:
        """`lend`: as in `SharedStore`. `stored` gets the labels of objects that the store has."""
        self.written = self.refused = 0
        self._orders = orders
        self._lend = lend
        self._stored = stored
        self._offers: OrderedDict[bytes, int] = OrderedDict()  # label → position in its prompt, in chunks
        self._lacking: deque[tuple[bytes, int]] = deque()  # offers that the store does not have
        self._asks = False  # what it has of some offers
        self._writing = 0  # units that offers have
        self._next_write = self._paused_until = 0.0  # time.monotonic()

    @property
    def due(self) -> bool:
        """Whether `turn` must be called soon, also if nothing comes from the store process."""
        return bool(self._lacking) and time.monotonic() >= self._paused_until

    @property
    def writes(self) -> bool:
        """Whether offers wait or are under way that the store will take."""
        wait = self._offers or self._lacking or self._writing or self._asks
        return bool(wait and self._orders.session) and time.monotonic() >= self._paused_until

    def resume(self) -> None:
        """There is another store: it has refused nothing yet."""
        self._paused_until = 0.0

    def turn(self, now: float, *, busy: bool) -> None:
        """Starts what is due. `busy`: as in `SharedStore.move`."""
        self._ask()
        if self._lacking and now >= max(self._next_write, self._paused_until):
            self._write(now, busy=busy)

    def offer(self, name: bytes, chunk: int) -> None:
        """The prefix cache has the object with this label, of a chunk at this position in its prompt."""
        self._offers[name] = chunk
        if len(self._offers) > OFFERS:
            self._offers.popitem(last=False)

    def _ask(self) -> None:
        """Asks which of the next offers the store lacks."""
        if self._asks or self._lacking or not self._offers:
            return
        some = [
            self._offers.popitem(last=False) for _ in range(min(len(self._offers), self._orders.units.count))
        ]

        def answered(exists: list[bool]) -> None:
            self._asks = False
            if not exists:  # the process has ended
                self._offers.update(some)
            for (name, chunk), known in zip(some, exists, strict=False):
                if known:
                    self._stored(name)
                else:
                    self._lacking.append((name, chunk))

        self._asks = True
        self._orders.order(answered, [name for name, _ in some])

    def _write(self, now: float, *, busy: bool) -> None:
        """Writes one object, if there is a unit for it and room to keep its blocks meanwhile."""
        if self._writing >= self._orders.units.count // 2 or not self._orders.free:
            return
        name, chunk = self._lacking.popleft()
        lent = self._lend(name_of(name), section_of(name), chunk)
        if lent is None:  # evicted meanwhile
            return
        if lent is LATER:
            self._lacking.append((name, chunk))
            self._next_write = now + (time.monotonic() - now) / SHARE
            return
        unit = self._orders.free.pop()
        self._writing += 1
        tokens = len(lent.block_ids) and (chunk + 1) * CHUNK_TOKENS
        pool = self._orders.pool
        table = pool.table(lent.block_ids, tokens, lent.state_slot)
        started = pool.gather(self._orders.staged(unit, section_of(name), chunk, table, by_rank=True))

        def gathered() -> None:
            lent.release()
            self._orders.order(written, [name], [unit], is_put=True)

        def written(done: list[bool]) -> None:
            self._orders.free.append(unit)
            self._writing -= 1
            if all(done):
                self.written += 1
                self._stored(name)
            else:
                self.refused += 1
                self._paused_until = time.monotonic() + PAUSE
                self.offer(name, chunk)

        self._orders.copy(started, gathered)
        if busy:
            self._next_write = now + (time.monotonic() - now) / SHARE
