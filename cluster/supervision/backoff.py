"""Decides when a crashed process is restarted: soon after the first crash, with growing delays after more."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class RestartPolicy:
    """Exponential backoff that a healthy run resets, and a crash-loop detector.

    Pure: the caller passes the time. All times are seconds of `time.monotonic()`.
    """

    first_delay: float = 0.1
    max_delay: float = 30.0
    healthy_after: float = 30.0  # a run of this length resets the delay to `first_delay`
    loop_crashes: int = 5  # crashes within `loop_window` that make a crash loop
    loop_window: float = 120.0
    _crashes: deque[float] = field(default_factory=deque)
    _consecutive: int = 0

    def crashed(self, now: float, ran_for: float) -> float:
        """Records a crash at `now` after a run of `ran_for` seconds. Returns the delay before the restart."""
        self._crashes.append(now)
        self._consecutive = 1 if ran_for >= self.healthy_after else self._consecutive + 1
        doublings = min(self._consecutive - 1, 30)  # without a bound the power would overflow a float
        return min(self.first_delay * 2**doublings, self.max_delay)

    def crash_loop(self, now: float) -> bool:
        """Whether at least `loop_crashes` crashes happened in the window before `now`."""
        while self._crashes and now - self._crashes[0] > self.loop_window:
            self._crashes.popleft()
        return len(self._crashes) >= self.loop_crashes
