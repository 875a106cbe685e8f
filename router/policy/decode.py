"""Chooses a decode worker by its load. `Fleet.choose_decode` also looks at what prefix caches have."""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.rpc import worker_pb2 as pb


class FreeCapacity(NamedTuple):
    """Free capacity of all decode workers together."""

    slots: float
    """Requests that fit into their batches."""
    positions: float
    """KV positions."""


@dataclass(slots=True)
class DecodeLoad:
    """The load of one decode worker: its last report, and what this router sent it since.

    Owned by the desk, while the worker is attached.

    Attributes:
        row: of the worker.
        blocks_free: as reported, less the blocks of later reservations of this router.
        running: requests that the worker has or will have. Those of other routers are as reported.
        full: the worker refused a reservation, and has not reported free capacity since.
        router_requests: those of `running` that this router sent.
        shared_prompts: prompts of this router of which the worker computes ranges.
        pool: in which it gets new decodes; None if it gets none.
    """

    row: int
    worker: str
    block_size: int
    blocks_total: int
    max_running: int
    blocks_free: int = 0
    running: int = 0
    full: bool = False
    router_requests: int = 0
    shared_prompts: int = 0
    pool: "DecodePool | None" = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, row: int, worker: str, described: pb.WorkerDescription) -> "DecodeLoad":
        """Of a worker without a report."""
        return cls(row, worker, described.block_size, described.num_blocks, described.max_num_seqs)

    def reported(self, *, blocks_free: int, running: int) -> None:
        self.blocks_free, self.full = blocks_free, False
        self.running = max(self.router_requests, running)  # the report misses requests that are on their way
        self._changed()

    def sent(self, tokens: int) -> None:
        """A reservation of `tokens` positions was sent. `ended` undoes it."""
        self.blocks_free -= self._blocks(tokens)
        self.running += 1
        self.router_requests += 1
        self._changed()

    def ended(self, tokens: int, *, full: bool = False) -> None:
        """`full`: the worker refused the reservation."""
        self.blocks_free += self._blocks(tokens)
        self.running -= 1
        self.router_requests -= 1
        self.full = full
        self._changed()

    def _changed(self) -> None:
        if self.pool is not None:
            self.pool.changed(self)

    @property
    def pressure(self) -> float:
        """The higher of two shares: KV blocks in use, and seats in use. 0 is idle, 1 is full.

        A worker that computes ranges of a split prompt counts as full: beside decodes its steps are shorter,
        and all other workers of that prompt wait for them."""
        if self.shared_prompts:
            return 1.0
        blocks = 1 - self.blocks_free / self.blocks_total if self.blocks_total else 1.0
        batch = self.running / self.max_running if self.max_running else 1.0
        return blocks if blocks > batch else batch

    @property
    def room(self) -> int:
        """Positions that a reservation may have; negative if none may be sent.

        One request more than the batch has slots may be sent. If the worker refuses it, its report tells the
        autoscaler that more capacity is needed.
        """
        if self.full or self.running > self.max_running:
            return -1
        return self.blocks_free * self.block_size

    def fits(self, tokens: int) -> bool:
        """Whether a reservation of `tokens` positions may be sent."""
        return self.room >= tokens

    @property
    def free(self) -> FreeCapacity:
        slots = max(0, self.max_running - self.running)
        return FreeCapacity(slots, max(0, self.blocks_free) * self.block_size)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


class DecodePool:
    """The loads of the workers that get new decodes, in the order of their room. So a choice looks only at
    workers with enough of it, however full the pool is.

    Attributes:
        free: of all workers.
        rows: of all workers, as a set of bits.
        block_size: the largest, so that cached tokens are not overestimated.
    """

    def __init__(self, loads: Iterable[DecodeLoad] = ()) -> None:
        self._loads: list[DecodeLoad] = []
        self._order: list[tuple[int, str]] = []  # room and name of each
        self._counted: dict[str, tuple[int, FreeCapacity]] = {}  # by name: room and part of `free`
        self._block_sizes: Counter[int] = Counter()
        self.free, self.rows, self.block_size = FreeCapacity(0, 0), 0, 1
        for load in loads:
            self.add(load)

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[DecodeLoad]:
        return iter(self._loads)

    @property
    def usage(self) -> float:
        """Share of the KV of all workers that is in use. 1 without a worker: nothing fits."""
        total = sum(load.blocks_total * load.block_size for load in self._loads)
        return 1 - self.free.positions / total if total else 1.0

    def add(self, load: DecodeLoad) -> None:
        load.pool = self
        self._insert(load)
        self._count(load, 1)

    def remove(self, load: DecodeLoad) -> None:
        load.pool = None
        self._delete(load)
        self._count(load, -1)

    def _count(self, load: DecodeLoad, change: int) -> None:
        self.rows ^= 1 << load.row
        self._block_sizes[load.block_size] += change
        self.block_size = max(+self._block_sizes, default=1)

    def changed(self, load: DecodeLoad) -> None:
        self._delete(load)
        self._insert(load)

    def _insert(self, load: DecodeLoad) -> None:
        room, free = self._counted[load.worker] = load.room, load.free
        place = bisect_left(self._order, (room, load.worker))
        self._order.insert(place, (room, load.worker))
        self._loads.insert(place, load)
        self.free = FreeCapacity(self.free.slots + free.slots, self.free.positions + free.positions)

    def _delete(self, load: DecodeLoad) -> None:
        room, free = self._counted.pop(load.worker)
        place = bisect_left(self._order, (room, load.worker))
        del self._order[place], self._loads[place]
        self.free = FreeCapacity(self.free.slots - free.slots, self.free.positions - free.positions)

    def choose(self, tokens: int, rng: random.Random, avoid: Collection[str] = ()) -> DecodeLoad | None:
        """Chooses a worker with capacity for a reservation of `tokens` positions, with `two_choices`.

        None: no worker seems to have capacity. Workers in `avoid`, which failed this request, are chosen only
        if there is no other.
        """
        first = bisect_left(self._order, (tokens, ""))
        if avoid and (allowed := [load for load in self._loads[first:] if load.worker not in avoid]):
            return two_choices(allowed, rng)
        return two_choices(self._loads, rng, first)


def two_choices(loads: Sequence[DecodeLoad], rng: random.Random, first: int = 0) -> DecodeLoad | None:
    """Chooses the less loaded of two random workers, from the `first` on. None: there is none.

    Loads are up to a second old. With the best of all workers, all routers would choose the same worker until
    the next report. The better of two random workers stays balanced with old data (Mitzenmacher 2001).
    """
    count = len(loads) - first
    if count < 2:
        return loads[first] if count else None
    one, other = int(rng.random() * count), int(rng.random() * (count - 1))  # `sample` takes 2 µs
    load, second = loads[first + one], loads[first + other + (other >= one)]
    return second if second.pressure < load.pressure else load


CACHED_PRESSURE = 0.1
"""How much more loaded a worker with a cached prefix may be than one without, as a share of its memory or
seats. Guards from crowds: the sessions of one document would all decode where it is, until that worker is
full."""
