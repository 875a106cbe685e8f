"""The KV memory of a simulated worker, in chunks of 64 tokens: what requests use, and what is cached.

    free ──take──▶ private ──publish──▶ shared, in use ──release──▶ shared, unused ──take──▶ evicted

A chunk that no request uses stays until its memory is needed. The least recently used one goes first, and of
a prefix the end before its beginning. Chunks in use are not evicted. A chunk of several requests counts once.
As in the engine, *copies* go before all others: chunks that another worker took from here and still has.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from baton.kv_names import CHUNK_TOKENS


@dataclass(slots=True)
class Lease:
    """The chunks that one request uses.

    Attributes:
        shared: names of the first chunks, which the cache knows.
        private: how many follow.
        cached: positions that were cached when the lease began.
    """

    shared: list[int]
    private: int
    cached: int


@dataclass
class KvMemory:
    """Owned by one worker.

    Attributes:
        capacity: chunks.
        added, evicted: names that entered and left the cache since the last report.
    """

    capacity: int
    added: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._private = 0
        self._used: Counter[int] = Counter()  # name → requests
        # The least recently used one first.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._unused_copies: OrderedDict[int, None] = OrderedDict()
        self._copies: set[int] = set()

    @property
    def free(self) -> int:
        """Chunks that no request uses."""
        return self.capacity - self._private - len(self._used)

    @property
    def spare(self) -> int:
        """The part of these that has nothing which only this worker has cached."""
        return self.free - len(self._unused)

    def __contains__(self, name: int) -> bool:
        return name in self._used or name in self._unused or name in self._unused_copies

    def cached(self, names: Sequence[int], most: int) -> int:
        """Positions that are cached of a prompt which begins with these names, at most so many."""
        return CHUNK_TOKENS * sum(1 for _ in takewhile(self.__contains__, names[: most // CHUNK_TOKENS]))

    def take(self, names: Sequence[int], positions: int, most_cached: int) -> Lease | None:
        """Takes the chunks of a request with so many positions, which begin with these names. None: they do
        not fit now. `most_cached`: positions that may come from the cache."""
        shared = list(takewhile(self.__contains__, names[: most_cached // CHUNK_TOKENS]))
        private = max(0, -(-positions // CHUNK_TOKENS) - len(shared))
        if self.free - sum(name not in self._used for name in shared) < private:
            return None
        for name in shared:
            self._use(name)
        self._private += private
        cached = len(self._used) + len(self._unused) + len(self._unused_copies)
        for _ in range(self._private + cached - self.capacity):
            name, _ = (self._unused_copies or self._unused).popitem(last=False)
            self._copies.discard(name)
            self.evicted.append(name)
        return Lease(shared, private, len(shared) * CHUNK_TOKENS)

    def publish(self, lease: Lease, names: Sequence[int]) -> None:
        """The first chunks of the request have their KV, and these names. A chunk that another request has
        published meanwhile becomes free."""
        for name in names[len(lease.shared) : len(lease.shared) + lease.private]:
            if name not in self:
                self.added.append(name)
            self._use(name)
            lease.shared.append(name)
            lease.private -= 1
            self._private -= 1

    def release(self, lease: Lease, *, handed_over: bool = False) -> None:
        """The request ends. What it has published stays cached. `handed_over`: another worker has it, too."""
        self._private -= lease.private
        (self._copies.update if handed_over else self._copies.difference_update)(lease.shared)
        for name in reversed(lease.shared):
            self._used[name] -= 1
            if not self._used[name]:
                del self._used[name]
                self._leave(name)

    def fetched(self, names: Iterable[int]) -> None:
        """Another worker took these chunks from here."""
        for name in names:
            if name in self:
                self._copies.add(name)
            if self._unused.pop(name, self) is None:
                self._leave(name)

    def only_here(self, names: Iterable[int]) -> None:
        """No other worker has these chunks any more."""
        for name in self._copies.intersection(names):
            self._copies.remove(name)
            if self._unused_copies.pop(name, self) is None:
                self._leave(name)

    def _leave(self, name: int) -> None:
        """No request uses the chunk."""
        (self._unused_copies if name in self._copies else self._unused)[name] = None

    def _use(self, name: int) -> None:
        self._unused.pop(name, None)
        self._unused_copies.pop(name, None)
        self._used[name] += 1

    def reported(self) -> tuple[list[int], list[int]]:
        """Returns what entered and what left the cache since the last call."""
        added, evicted, self.added, self.evicted = self.added, self.evicted, [], []
        return added, evicted
