"""A simulated prefill worker: it computes one prompt after another and keeps an LRU cache of chunks."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.machine import Average
from baton.simulator.trace import Turn, hit_tokens

Speed = Callable[[int, int], float]
"""Takes the uncached and the cached tokens of one prompt. Returns the seconds that the prompt takes."""


@dataclass(slots=True)
class Queued:
    """A prompt in a worker's queue.

    Attributes:
        finished: called with the time, the worker and the prompt tokens that were cached.
    """

    turn: Turn
    arrived: float
    finished: Callable[[float, SimWorker, int], None]


class SimWorker:
    """`begin` returns when the prompt will be done. The owner of the clock calls `finish` at that time.

    Attributes:
        busy: seconds that it has computed.
        queue: prompts that have not begun.
    """

    def __init__(self, name: str, capacity: int, speed: Speed) -> None:
        """`capacity`: of the cache, in chunks."""
        self.name = name
        self.busy = 0.0
        self.queue: deque[Queued] = deque()
        self._changes: dict[int, bool] = {}  # chunk -> whether the cache has it now
        self._capacity = capacity
        self._speed = speed
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._running: Queued | None = None
        self._hit = 0
        self._tokens_per_s = Average()  # as in engine.core.meters

    @property
    def idle(self) -> bool:
        return self._running is None

    def cached(self, turn: Turn) -> int:
        return hit_tokens(turn, self._cache)

    def tokens_waiting(self) -> int:
        """Uncached tokens of all prompts, as the engine reports them.

        The running prompt counts as a whole.
        """
        running = [self._running] if self._running else []
        return sum(q.turn.tokens - self.cached(q.turn) for q in (*running, *self.queue))

    def tokens_per_s(self) -> float:
        return self._tokens_per_s.value

    def begin(self, now: float) -> float:
        """Begins the next prompt. Returns when it will be done.

        Evicts chunks to make room for the prompt, but none that the prompt shares.
        """
        queued = self._running = self.queue.popleft()
        chunks = queued.turn.chunks
        self._hit = self.cached(queued.turn)
        shared = [chunk for chunk in chunks if chunk in self._cache]
        for chunk in reversed(shared):  # the end of a prefix is evicted before its beginning
            self._cache.move_to_end(chunk)
        room = self._capacity - (len(chunks) - len(shared))
        while len(self._cache) > max(room, len(shared)):
            evicted, _ = self._cache.popitem(last=False)
            self._changes[evicted] = False
        seconds = self._speed(queued.turn.tokens - self._hit, self._hit)
        self.busy += seconds
        self._tokens_per_s.add(queued.turn.tokens - self._hit, seconds)
        return now + seconds

    def finish(self) -> tuple[Queued, int]:
        """Returns the prompt that is done, and the tokens of it that were cached."""
        queued, self._running = self._running, None
        assert queued is not None
        for chunk in reversed(queued.turn.chunks):
            if chunk not in self._cache:
                self._cache[chunk] = None
                self._changes[chunk] = True
            else:
                self._cache.move_to_end(chunk)
        return queued, self._hit

    def take_changes(self) -> tuple[list[int], list[int]]:
        """The chunks that the cache added and evicted since the last call."""
        changes, self._changes = self._changes, {}
        return [c for c, there in changes.items() if there], [c for c, there in changes.items() if not there]
