"""Work of several tenants for one thread."""

import threading
from collections import deque
from collections.abc import Callable


class Turns:
    """A queue of work in which the tenant is next that has taken the least time. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[bytes, deque[Callable[[], None]]] = {}
        self._taken: dict[bytes, float] = {}  # seconds of CPU time, of tenants that are ahead of `_level`
        self._level = 0.0  # of the tenant that was served last

    def add(self, tenant: bytes, work: Callable[[], None]) -> None:
        with self._lock:
            if tenant not in self._waiting:
                # A tenant without work has no claim for the time before.
                self._taken = {name: taken for name, taken in self._taken.items() if taken > self._level}
                self._taken.setdefault(tenant, self._level)
                self._waiting[tenant] = deque()
            self._waiting[tenant].append(work)

    def charge(self, tenant: bytes, seconds: float) -> None:
        with self._lock:
            self._taken[tenant] = self._taken.get(tenant, self._level) + seconds

    def serve(self) -> None:
        """Does the next piece of work."""
        with self._lock:
            tenant = min(self._waiting, key=lambda name: self._taken.get(name, self._level))
            self._level = max(self._level, self._taken.get(tenant, 0.0))
            work = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        work()
