"""Chooses a prefill worker. A policy is a pure function of a snapshot of the workers and a request.

`sticky` prefers the worker that has the prefix cached. `round_robin` is the smallest policy.
"""

import math
import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from baton.kv_names import ImageSpan
from baton.router.policy.chunk_index import Overlap

POINTS_PER_WORKER = 128
"""A worker's share of the sessions varies by 1/√128 = 9 %."""


MAX_ROWS = 1 << 14
_ARC_BITS = 8
_ROW = MAX_ROWS - 1
_STEPS = np.arange(1, POINTS_PER_WORKER + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class Ring:
    """Consistent hashing: all routers map a session to the same worker without communication.

    Points of all workers are on a circle of 64-bit hashes (Karger 1997). A worker's points depend only on its
    name, so a worker that joins or leaves moves only its own share of the sessions. The circle is cut into
    arcs: with 1,000 workers, each join moves only the few hundred points of the arcs beside its own.
    """

    def __init__(self) -> None:
        # Arrays, because the entries of lists are scattered in memory. The last bits of a point are its row.
        self._arcs = [array("Q") for _ in range(1 << _ARC_BITS)]
        self._new: dict[int, str] = {}  # names of workers whose points are in no arc yet, by row
        self._unsorted: set[int] = set()  # arcs whose last points are new
        self._size = 0

    def add(self, name: str, row: int) -> None:
        self._new[row] = name
        self._size += 1

    def remove(self, name: str, row: int) -> None:
        self._size -= 1
        if self._new.pop(row, None) is not None:
            return
        for point in _points([name], [row]).tolist():
            points = self._arc(point >> 64 - _ARC_BITS)
            del points[bisect_left(points, point)]

    def _arc(self, arc: int) -> "array[int]":
        """The points of an arc in order. They are sorted once for all workers that joined since."""
        if arc in self._unsorted:
            self._unsorted.remove(arc)
            self._arcs[arc] = array("Q", sorted(self._arcs[arc]))
        return self._arcs[arc]

    def _place_new(self) -> None:
        """Cuts the points of all workers that joined since into the arcs, at once."""
        points = np.sort(_points([*self._new.values()], [*self._new]))
        arcs = points >> np.uint64(64 - _ARC_BITS)
        begins = np.flatnonzero(arcs[1:] != arcs[:-1]) + 1
        filled, data, begin = arcs[[0, *begins]].tolist(), points.tobytes(), 0
        for arc, end in zip(filled, [*(points.itemsize * begins).tolist(), len(data)], strict=True):
            self._arcs[arc].frombytes(data[begin:end])
            begin = end
        self._unsorted.update(filled)
        self._new.clear()

    def walk(self, key: int) -> Iterator[int]:
        """Yields the row of every worker once, in the order of preference of a session with this key."""
        if self._new:
            self._place_new()
        first = key >> 64 - _ARC_BITS
        start = bisect_right(self._arc(first), key | _ROW)
        seen: set[int] = set()
        for arc in range(first, first + len(self._arcs) + 1):  # the first arc's beginning is last
            points = self._arc(arc % len(self._arcs))
            for place in range(start, len(points)):
                if (row := points[place] & _ROW) not in seen:
                    seen.add(row)
                    yield row
                    if len(seen) == self._size:
                        return
            start = 0


def _points(names: Sequence[str], rows: Sequence[int]) -> np.ndarray:
    """Returns uint64[names × POINTS_PER_WORKER]: of each worker, the first outputs of splitmix64 (Steele
    2014), seeded by its name, with its row."""
    seeds = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)
    x = seeds[:, None] + _STEPS
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) & np.uint64(~_ROW & (1 << 64) - 1)
    return (x | np.array(rows, np.uint64)[:, None]).ravel()


COMPARED = 3
"""Workers to compare in detail. No measured speed says how old the reports of other routers are. With 8,
routers with the same old reports choose the same worker: p99 of TTFT of 4 routers without decode workers
rises by 17 % (simulated). One router gains 2 %."""


@dataclass(slots=True)
class PrefillRequest:
    """What a plan must know of a request."""

    key: int
    """64-bit hash of the session."""
    tokens: int
    """Positions that need KV, including cached ones: the prompt and the output so far."""
    chunks: Sequence[int] = ()
    """Hints of the prompt's full 64-token chunks (`kv_names`). Output tokens may have none."""
    avoid: Collection[str] = ()
    """Workers to choose only if there is no other."""
    arrival: int = 0
    """Number of requests before it."""
    answer: int = 1
    """Output tokens that are expected to come still."""
    one_token: bool = False
    """The next token needs no decode worker: it is the last one, or the prompt is scored first."""
    interrupted: bool = False
    """An attempt of it ended before its time."""
    may_split: bool = False
    """Several workers may compute it."""
    images: Sequence[ImageSpan] = ()
    """Those of the prompt."""
    encoded_in: Sequence[float] = ()
    """Seconds until encoders have encoded each of these. Empty: there are none."""
    pair: tuple[str, str] | None = None
    """The addresses of the workers that must compute and decode it, to prove that KV gets to the second."""
    adapter: bytes = b""
    """The fingerprint of the adapter that is to compute it. Empty: the model alone."""
    version: str | None = None
    """Of the weights that are to compute it. None: all workers have the same."""


@dataclass(slots=True)
class PrefillSnapshot:
    """The prefill workers at the time of one choice, made by `PrefillLoads`. Arrays are indexed by row.

    A worker that must not be chosen has an infinite wait and nothing cached.
    """

    ring: Ring
    """All workers that take work, including avoided ones."""
    rows: np.ndarray
    """int64[n], n ≥ 1: the rows that may be chosen, in order of their workers' names."""
    speed: np.ndarray
    """float64, tokens/s."""
    cached: Overlap
    """The cached beginning of the request at each worker, as far as known."""
    load: Callable[[int], float]
    """Seconds in which the worker of a row copies to its device what it has cached below."""
    mean_prompt: float
    """Tokens that a prompt needed to compute lately."""
    now: float
    least_wait: np.ndarray
    wait_until: np.ndarray
    """float64: the wait is at least the first, in seconds, and lasts until the second."""
    moves: np.ndarray | None
    """float64: seconds until the adapter of the request is on the device. None: it needs none."""
    avoided: Collection[int]
    """Rows that must not be chosen."""

    @property
    def wait(self) -> np.ndarray:
        """float64, seconds: time to compute the uncached tokens that are ahead, at measured speed."""
        wait = np.maximum(self.least_wait, self.wait_until - self.now)
        if self.moves is not None:
            wait += self.moves
        if self.avoided:
            wait[list(self.avoided)] = np.inf
        return wait

    def wait_of(self, row: int) -> float:
        """That of one worker."""
        if row in self.avoided:
            return math.inf
        least, left = self.least_wait.item(row), self.wait_until.item(row) - self.now
        wait = left if left > least else least
        return wait if self.moves is None else wait + self.moves.item(row)

    def compared(self, chosen: int, suits: Callable[[int], bool], rng: random.Random) -> list[int]:
        """The rows to compare in detail: `chosen`, and others that suit; of many, some at random."""
        others = [row for row in self.rows.tolist() if row != chosen and suits(row)]
        return [chosen, *(others if len(others) < COMPARED else rng.sample(others, COMPARED - 1))]


PrefillPolicy = Callable[[PrefillSnapshot, PrefillRequest], int]
"""Returns the row of the chosen worker."""


def sticky(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    """Chooses the worker that has the session's prefix cached, unless computing it elsewhere is faster.

    1. Each session has a home worker, by consistent hashing with bounded loads (Mirrokni, Thorup,
       Zadimoghaddam 2018): the first worker on the ring, from the session's point on, with a wait of at most
       the mean. So sessions and their cached KV spread evenly, and new sessions avoid busy workers. A session
       whose home is busy goes to the next worker on the ring. That worker differs between sessions, so many
       routers with the same old loads do not all choose the same worker.
    2. Another worker is chosen only if it has the most of the prefix cached, and if it costs less:

           cost = wait + load + uncached tokens / speed        (seconds)

       `load` is the time to copy what the worker has below its device: in the memory or on the disk of its
       host. So a session stays at the worker that it went to, and requests of any session find a long
       document that is cached elsewhere.
    3. For each worker that has the prefix, the other worker must save as many tokens as a prompt computed
       lately, unless there is only one. A short prefix of many sessions, such as a system prompt, is soon
       computed at home too. If it attracted whole sessions, the caches of a few workers would overflow
       while others are idle: `bench.routing_sim` with 64 workers then has 71 % cache hits instead of 87 %. A
       document of thousands of tokens stays on few workers.
    """
    cached, home, bound = snapshot.cached, -1, -1.0
    for home in snapshot.ring.walk(request.key):
        if not (wait := snapshot.wait_of(home)):
            break
        if bound < 0:
            rows = snapshot.rows  # of equal waits the mean may be rounded down
            bound = float(np.add.reduce(snapshot.wait.take(rows))) / len(rows) * (1 + 1e-9)
        if wait <= bound:  # at least one worker is not above the mean
            break
    held = cached.of(home)
    if not (saved := cached.most - held):
        return home
    if cached.count > 1 and saved < cached.count * snapshot.mean_prompt:
        return home

    def cost(row: int, hit: int) -> float:
        return snapshot.wait_of(row) + snapshot.load(row) + (request.tokens - hit) / snapshot.speed.item(row)

    # Routers that see the same costs send different sessions to different ones of equal workers.
    costs = ((cost(row, cached.most), (row ^ request.key) & _ROW, row) for row in cached.holders())
    least, _, best = min(costs)
    return best if least < cost(home, held) else home


def round_robin(snapshot: PrefillSnapshot, request: PrefillRequest) -> int:
    """Chooses each worker in turn. For comparison, and for equal prompts without prefix caches."""
    return int(snapshot.rows[request.arrival % len(snapshot.rows)])


PREFILL_POLICIES: dict[str, PrefillPolicy] = {"sticky": sticky, "round-robin": round_robin}
