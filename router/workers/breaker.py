"""A worker that fails again and again is left out for a while, then tried with one attempt.

    closed ─ 3 failures in 30 s ─▶ open ─ 10 s ─▶ half-open ─ one probe ─▶ closed, if it is served
                                     ▲                            │
                                     └──────── it fails ──────────┘

The circuit breaker of M. Nygard, Release It! (2007). Pure: the caller brings the time.
"""

from collections import deque

FAILURES = 3
WINDOW_S = 30.0
OUT_S = 10.0
TOGETHER_S = 1.0
"""What fails within this time failed for one reason: a whole batch, say, or an engine and then its stream."""


class Breaker:
    """Of one worker. Times are seconds of `time.monotonic()`, and never go back."""

    __slots__ = ("_failures", "_out_until", "_probed", "_tripped")

    def __init__(self) -> None:
        self._failures: deque[float] = deque()
        self._tripped = self._probed = False
        self._out_until = 0.0

    def admits(self, now: float) -> bool:
        """Whether it may be given an attempt."""
        return not self._tripped or now >= self._out_until

    def out_for(self, now: float) -> float:
        """Seconds until it may be tried; 0 when it may be now."""
        return max(0.0, self._out_until - now) if self._tripped else 0.0

    def given(self, now: float) -> bool:
        """It was given an attempt. True: that is the probe, and it gets no other meanwhile. (For as long as a
        failure would put it out: a probe may be cancelled, and tell nothing.)"""
        if self._tripped and now >= self._out_until:
            self._out_until = now + OUT_S
            self._probed = True
            return True
        return False

    def worked(self) -> bool:
        """An attempt of it was served. True: it is taken back."""
        if not self._probed:
            return False
        self._tripped = self._probed = False
        self._failures.clear()
        return True

    def failed(self, now: float) -> bool:
        """An attempt of it failed, or all of it was lost. True: with this it is out."""
        if self._failures and now - self._failures[-1] < TOGETHER_S:
            return False
        while self._failures and self._failures[0] <= now - WINDOW_S:
            self._failures.popleft()
        self._failures.append(now)
        if not self._tripped and len(self._failures) < FAILURES:
            return False
        self._tripped, self._probed = True, False
        self._out_until = now + OUT_S
        return True
