"""How much of its prefill a cluster may spend on repeating itself.

When much fails at once, every retry adds load to what is left, and that fails too. So re-prefills are a share
of what is new, as in Finagle's RetryBudget (20 % over 10 s, and 10 a second in any case): a lost worker's
batch goes on at once, a storm is held off. Pure: the caller brings the time.
"""

from collections import deque

WINDOW_S = 10.0
SHARE = 0.2
FLOOR = 100
"""Re-prefills in a window that are always there: a cluster that is asked little retries at once."""


class RetryBudget:
    """Times are seconds of `time.monotonic()`, and never go back."""

    def __init__(self) -> None:
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def requested(self, now: float) -> None:
        """A new request came."""
        self._forget(now)
        self._requests.append(now)

    def take(self, now: float) -> bool:
        """Spends one re-prefill, if there is one left."""
        self._forget(now)
        if len(self._retries) >= max(FLOOR, int(SHARE * len(self._requests))):
            return False
        self._retries.append(now)
        return True

    def wait(self, now: float) -> float:
        """Seconds until it is worth asking again, when `take` refused. (New requests may be earlier.)"""
        self._forget(now)
        return self._retries[0] + WINDOW_S - now if self._retries else 0.0

    def _forget(self, now: float) -> None:
        for times in (self._requests, self._retries):
            while times and times[0] <= now - WINDOW_S:
                times.popleft()
