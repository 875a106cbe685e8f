"""Chooses a decode worker: by its load, and by what its prefix cache has of the prompt."""

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.router.policy.chunk_index import ChunkIndex
from baton.router.policy.prefill import PrefillRequest


class FreeCapacity(NamedTuple):
    """Free capacity of all decode workers together."""

    slots: float
    """Requests that fit into their batches."""
    positions: float
    """KV positions."""


@dataclass(slots=True)
class DecodeLoad:
    """The load of one decode worker: its last report, and what this router sent it since.

    Owned by the connection to the worker, or by a simulated worker.

    Attributes:
        blocks_free: as reported, less the blocks of later reservations of this router.
        running: requests that the worker has or will have. Those of other routers are as reported.
        full: the worker refused a reservation, and has not reported free capacity since.
        own: the part of `running` that this router sent.
    """

    worker: str
    block_size: int
    blocks_total: int
    max_running: int
    blocks_free: int = 0
    running: int = 0
    full: bool = False
    own: int = 0

    def reported(self, *, blocks_free: int, running: int) -> None:
        self.blocks_free, self.full = blocks_free, False
        self.running = max(self.own, running)  # the report misses requests that are on their way

    def sent(self, tokens: int) -> None:
        """A reservation of `tokens` positions was sent. `ended` undoes it."""
        self.blocks_free -= self._blocks(tokens)
        self.running += 1
        self.own += 1

    def ended(self, tokens: int) -> None:
        self.blocks_free += self._blocks(tokens)
        self.running -= 1
        self.own -= 1
        self.full = False

    @property
    def pressure(self) -> float:
        """The higher of two shares: KV blocks in use, and seats in use. 0 is idle, 1 is full."""
        blocks = 1 - self.blocks_free / self.blocks_total if self.blocks_total else 1.0
        batch = self.running / self.max_running if self.max_running else 1.0
        return max(blocks, batch)

    def fits(self, tokens: int) -> bool:
        """Whether a reservation of `tokens` positions may be sent.

        One request more than the batch has slots may be sent. If the worker refuses it, its report tells the
        autoscaler that more capacity is needed.
        """
        if self.full or self.running > self.max_running:
            return False
        return self.blocks_free * self.block_size >= tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def free_capacity(loads: Iterable[DecodeLoad]) -> FreeCapacity:
    slots = positions = 0
    for load in loads:
        slots += max(0, load.max_running - load.running)
        positions += max(0, load.blocks_free) * load.block_size
    return FreeCapacity(slots, positions)


DRAWS = 4


def two_choices(
    loads: Sequence[DecodeLoad], *, tokens: int, rng: random.Random, avoid: Collection[str] = ()
) -> str | None:
    """Chooses the less loaded of two random workers with capacity for a reservation of `tokens` positions.

    Loads are up to a second old. With the best of all workers, all routers would choose the same worker until
    the next report. The better of two random workers stays balanced with old data (Mitzenmacher 2001).

    None: no worker seems to have capacity. Workers in `avoid`, which failed this request, are chosen only if
    there is no other.
    """

    # Unless the pool is nearly full, a few draws find capacity without a search through all workers.
    count = len(loads)
    for _ in range(DRAWS if count > 2 else 0):
        first, second = int(rng.random() * count), int(rng.random() * (count - 1))  # `sample` takes 2 µs
        pair = loads[first], loads[second + (second >= first)]
        drawn = [load for load in pair if load.fits(tokens) and load.worker not in avoid]
        if drawn:
            return min(drawn, key=lambda load: load.pressure).worker
    found = [load for load in loads if load.fits(tokens)]
    found = [load for load in found if load.worker not in avoid] or found
    if not found:
        return None
    drawn = found if len(found) <= 2 else rng.sample(found, 2)
    return min(drawn, key=lambda load: load.pressure).worker


CACHED_PRESSURE = 0.1
"""How much more loaded a worker with a cached prefix may be than one without."""


class DecodeCaches:
    """The prefix caches of the decode pool, which keep what was decoded: the turn before in a conversation.

    Owned by one router. Each worker has its row of `PrefillLoads`, in either pool.

    Attributes:
        loads: of all workers, by row.
    """

    def __init__(self, index: ChunkIndex) -> None:
        """`index`: the cached chunks of all workers, which `PrefillLoads` owns."""
        self.loads: dict[int, DecodeLoad] = {}
        self._index = index
        self._block_size = 1  # the largest, so that the cached tokens are not overestimated
        self._serving = 0  # a set of rows

    def join(self, row: int, load: DecodeLoad) -> None:
        """Adds a worker, which does not take work yet."""
        self.loads[row] = load
        self._block_size = max(self._block_size, load.block_size)

    def leave(self, row: int) -> None:
        self.serve(row, False)
        del self.loads[row]
        self._block_size = max((load.block_size for load in self.loads.values()), default=1)

    def serve(self, row: int, serving: bool) -> None:
        """Whether it takes new work of the decode pool."""
        bit = 1 << row
        self._serving = self._serving | bit if serving else self._serving & ~bit

    def candidates(self, chosen: int, request: PrefillRequest, rng: random.Random) -> list[tuple[int, int]]:
        """Returns the rows of workers that may prefill a prompt, each with its number of cached tokens.

        The first is `chosen`. The second, if there is one, has more cached than any other, and capacity.
        """
        if not len(self._index):
            return [(chosen, 0)]
        among = self._serving | 1 << chosen
        cached = self._index.overlap(request.chunks, request.tokens, self._block_size, among)
        found = [(chosen, cached.of(chosen))]
        if cached.of(chosen) < cached.most:
            rows = {self.loads[row].worker: row for row in cached.holders()}
            loads = [self.loads[row] for name, row in rows.items() if name not in request.avoid]
            if (best := two_choices(loads, tokens=request.tokens + 1, rng=rng)) is not None:
                found.append((rows[best], cached.most))
        return found

    def nearest(self, chosen: int, request: PrefillRequest, rng: random.Random) -> int:
        """Returns the row of the worker to decode a prompt: `chosen`, or the one with the most of it cached.

        The latter gets less KV, and shares its blocks. But it must not be much more loaded than `chosen`."""
        row, _ = self.candidates(chosen, request, rng)[-1]
        return row if self.loads[row].pressure <= self.loads[chosen].pressure + CACHED_PRESSURE else chosen
