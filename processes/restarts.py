"""The life of a process that is kept running, and the delay before each start. Pure: callers give the time.

```
starting ─ready─▶ ready          starting, ready ─ended─▶ waiting ─delay over─▶ starting
ready ─replaced─▶ starting       any ─stop─▶ stopped
```
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["starting", "ready", "waiting", "stopped"]
Event = Literal["ready", "ended", "replaced", "delay over", "stop"]

TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    ("starting", "ready"): "ready",
    ("starting", "ended"): "waiting",
    ("starting", "stop"): "stopped",
    ("ready", "ended"): "waiting",
    ("ready", "replaced"): "starting",
    ("ready", "stop"): "stopped",
    ("waiting", "delay over"): "starting",
    ("waiting", "stop"): "stopped",
    ("stopped", "stop"): "stopped",
}
"""Other events cannot come in a phase."""


@dataclass
class RestartPolicy:
    """Exponential backoff that a healthy run resets, and a crash-loop detector.

    All times are seconds of `time.monotonic()`.
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
        while now - self._crashes[0] > self.loop_window:
            self._crashes.popleft()
        self._consecutive = 1 if ran_for >= self.healthy_after else self._consecutive + 1
        doublings = min(self._consecutive - 1, 30)  # without a bound the power would overflow a float
        return min(self.first_delay * 2**doublings, self.max_delay)

    def crash_loop(self, now: float) -> bool:
        """Whether at least `loop_crashes` crashes happened in the window before `now`."""
        return sum(now - crash <= self.loop_window for crash in self._crashes) >= self.loop_crashes
