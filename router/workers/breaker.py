"""Whether the attempts at a worker fail too often. Pure: no I/O and no clock."""

from collections import deque

FAILURES = 3
WINDOW_S = 30.0
OPEN_S = 10.0
TOGETHER_S = 1.0
"""Failures within this time count as one: they have one cause, such as a failed batch or a lost stream."""


class CircuitBreaker:
    """Keeps requests away from a worker that fails repeatedly, for a while. Then it gets one probe.

        closed ─ 3 failures in 30 s ─▶ open ─ 10 s ─▶ half-open ─ one probe ─▶ closed, if the probe succeeds
                                         ▲                            │
                                         └──────── the probe fails ───┘

    Times are seconds of `time.monotonic()`, and never go back. Source: M. Nygard, Release It! (2007).
    """

    __slots__ = ("_failures", "_open_until", "_probing", "_tripped")

    def __init__(self) -> None:
        self._failures: deque[float] = deque()
        self._tripped = self._probing = False
        self._open_until = 0.0

    def open_for(self, now: float) -> float:
        """Seconds until the worker may get an attempt; 0 if it may now."""
        return max(0.0, self._open_until - now) if self._tripped else 0.0

    def attempt_sent(self, now: float) -> bool:
        """Returns True if this attempt is the probe. The breaker is then open again, for OPEN_S at most.

        The limit is needed because a probe may be cancelled, and then gives no result.
        """
        if self._tripped and now >= self._open_until:
            self._open_until = now + OPEN_S
            self._probing = True
            return True
        return False

    def attempt_succeeded(self) -> bool:
        """Returns True if this closes the breaker."""
        if not self._probing:
            return False
        self._tripped = self._probing = False
        self._failures.clear()
        return True

    def attempt_failed(self, now: float) -> bool:
        """Counts a failed attempt or a lost stream. Returns True if this opens the breaker."""
        if self._failures and now - self._failures[-1] < TOGETHER_S:
            return False
        while self._failures and self._failures[0] <= now - WINDOW_S:
            self._failures.popleft()
        self._failures.append(now)
        if not self._tripped and len(self._failures) < FAILURES:
            return False
        self._tripped, self._probing = True, False
        self._open_until = now + OPEN_S
        return True
