"""Limits how many prompts are prefilled again after failures.

Retries add load to the remaining workers, which may then fail too. So retries are limited to a share of the
new requests, as in Finagle's RetryBudget: 20 % over 10 s, and 10 per second in any case. The requests of one
lost worker retry at once; a storm of retries is slowed down. Pure: the caller passes the time.
"""

from collections import deque

WINDOW_S = 10.0
SHARE = 0.2
FLOOR = 100
"""Retries per window that are always allowed, so that a cluster with little load retries at once."""


class RetryBudget:
    """Times are seconds of `time.monotonic()`, and never go back."""

    def __init__(self) -> None:
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def requested(self, now: float) -> None:
        """Counts a new request."""
        self._forget(now)
        self._requests.append(now)

    def take(self, now: float) -> bool:
        """Takes one retry from the budget. Returns False if none is left."""
        self._forget(now)
        if len(self._retries) >= max(FLOOR, int(SHARE * len(self._requests))):
            return False
        self._retries.append(now)
        return True

    def wait(self, now: float) -> float:
        """Seconds until the window frees a retry. New requests may free one earlier."""
        self._forget(now)
        return self._retries[0] + WINDOW_S - now if self._retries else 0.0

    def _forget(self, now: float) -> None:
        for times in (self._requests, self._retries):
            while times and times[0] <= now - WINDOW_S:
                times.popleft()
