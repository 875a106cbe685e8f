"""Estimates how many waiting tokens per second get their first token."""

import time
from collections import deque
from collections.abc import Callable

_SECONDS = 10.0


class DrainRate:
    """Mean over the last ten seconds in which tokens waited."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drained: deque[tuple[float, int]] = deque()
        self._total = 0
        self._busy_since = clock()

    def began(self) -> None:
        """Tokens wait from now on; none did before."""
        self._busy_since = self._clock()
        self._drained.clear()
        self._total = 0

    def add(self, tokens: int) -> None:
        now = self._clock()
        self._drained.append((now, tokens))
        self._total += tokens
        self._forget(now)

    def tokens_per_s(self) -> float:
        now = self._clock()
        self._forget(now)
        passed = min(_SECONDS, now - self._busy_since)
        return self._total / passed if passed > 0 else 0.0

    def _forget(self, now: float) -> None:
        while self._drained and self._drained[0][0] < now - _SECONDS:
            self._total -= self._drained.popleft()[1]
