"""A prefill worker: one prompt after the other, and an LRU cache of chunks."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from bench.routing_sim.trace import Turn, hit_tokens

Speed = Callable[[int, int], float]
"""Seconds for so many uncached and cached tokens of one prompt."""


def h200(uncached: int, cached: int) -> float:
    """Llama-3.1-8B in bf16 on one H200, fitted to the bounds of docs/benchmarks.md: 49.8 ms for 2,000 tokens,
    210 ms for 8,000; at least the 4.1 ms in which the weights are read. 22.6 µs a token of GEMM, 1.15 ns a
    pair of attention.
    """
    pairs = uncached * (cached + uncached / 2)
    return max(4.1e-3, 22.6e-6 * uncached) + 1.15e-9 * pairs


def cpu(uncached: int, cached: int) -> float:
    """SmolLM2-135M in float32 on one core: 2.5 ms a token, 0.25 µs a pair of attention."""
    return max(20e-3, 2.5e-3 * uncached) + 0.25e-6 * uncached * (cached + uncached / 2)


SPEEDS: dict[str, Speed] = {"h200": h200, "cpu": cpu}


@dataclass(slots=True)
class Queued:
    turn: Turn
    arrived: float
    finished: Callable[[float, SimWorker, int], None]
    """Called with the time, the worker and the tokens that were cached."""


class SimWorker:
    """Tells what it does: `step` returns when its prompt is done. Whoever owns the clock calls `finish` then.

    Attributes:
        busy: seconds that it has computed.
        queue: not begun.
        changes: of the cache since they were last taken, as in `worker.cached_chunks`: chunk → whether it is
        there.
    """

    def __init__(self, name: str, capacity: int, speed: Speed) -> None:
        self.name = name
        self.busy = 0.0
        self.queue: deque[Queued] = deque()
        self.changes: dict[int, bool] = {}
        self._capacity = capacity
        self._speed = speed
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._running: Queued | None = None
        self._hit = 0
        self._computed_tokens = self._computing = 0.0  # running averages, as in engine.meters

    @property
    def idle(self) -> bool:
        return self._running is None

    @property
    def fill(self) -> float:
        return len(self._cache) / self._capacity

    def cached(self, turn: Turn) -> int:
        return hit_tokens(turn, self._cache)

    def tokens_waiting(self) -> int:
        """What the engine reports: uncached tokens, all of those of the prompt that it is at."""
        running = [self._running] if self._running else []
        return sum(q.turn.tokens - self.cached(q.turn) for q in (*running, *self.queue))

    def tokens_per_s(self) -> float:
        return self._computed_tokens / self._computing if self._computing else 0.0

    def begin(self, now: float) -> float:
        """The next prompt; when it will be done. Makes room for it, and keeps what it shares."""
        queued = self._running = self.queue.popleft()
        chunks = queued.turn.chunks
        self._hit = self.cached(queued.turn)
        shared = [chunk for chunk in chunks if chunk in self._cache]
        for chunk in reversed(shared):  # beginnings last: ends are given up first
            self._cache.move_to_end(chunk)
        room = self._capacity - (len(chunks) - len(shared))
        while len(self._cache) > max(room, len(shared)):
            evicted, _ = self._cache.popitem(last=False)
            self.changes[evicted] = False
        seconds = self._speed(queued.turn.tokens - self._hit, self._hit)
        self.busy += seconds
        self._computed_tokens = 0.9 * self._computed_tokens + queued.turn.tokens - self._hit
        self._computing = 0.9 * self._computing + seconds
        return now + seconds

    def finish(self) -> tuple[Queued, int]:
        """The prompt that is done, and how much of it had been cached."""
        queued, self._running = self._running, None
        assert queued is not None
        for chunk in reversed(queued.turn.chunks):
            if chunk not in self._cache:
                self._cache[chunk] = None
                self.changes[chunk] = True
            else:
                self._cache.move_to_end(chunk)
        return queued, self._hit

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Added and evicted."""
        changes, self.changes = self.changes, {}
        return [c for c, there in changes.items() if there], [c for c, there in changes.items() if not there]
