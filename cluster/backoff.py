"""When to start a crashed process again: at once the first time, later and later if it keeps dying."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class RestartPolicy:
    """Exponential backoff that forgets, and a crash-loop detector. Pure: the caller brings the time.

    All times are seconds of `time.monotonic()`.
    """

    first_delay: float = 0.1
    max_delay: float = 30.0
    healthy_after: float = 30.0  # a run this long was no crash loop: the next crash restarts at once again
    loop_crashes: int = 5  # this many crashes …
    loop_window: float = 120.0  # … within this time are a crash loop
    _crashes: deque[float] = field(default_factory=deque)
    _consecutive: int = 0

    def crashed(self, now: float, ran_for: float) -> float:
        """Notes a crash at `now` after a run of `ran_for` seconds; returns the wait before the next start."""
        self._crashes.append(now)
        self._consecutive = 1 if ran_for >= self.healthy_after else self._consecutive + 1
        doublings = min(self._consecutive - 1, 30)  # an exponent without bound would overflow one day
        return min(self.first_delay * 2**doublings, self.max_delay)

    def crash_loop(self, now: float) -> bool:
        """Whether so many crashes lie in the window before `now` that a restart is unlikely to help."""
        while self._crashes and now - self._crashes[0] > self.loop_window:
            self._crashes.popleft()
        return len(self._crashes) >= self.loop_crashes
