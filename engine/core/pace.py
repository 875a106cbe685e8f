"""When to launch the next step while another is under way.

Early enough that the device never idles, but no earlier: a request that arrives after the launch waits one
step longer. A step is expected to take the device as long as recent steps of its kind. Scheduling and
launching are expected to take the host as long as recently. Pure: callers pass times, in seconds of any
clock.
"""

from collections.abc import Hashable

HOST_MARGIN = 1.25
"""Factor on the average time that the host takes for a launch."""
MARGIN_SECONDS = 0.0003
"""Added to that."""
DECAY = 0.8
"""Weight of an average when a new value enters it."""


class Pace:
    """Learns how long steps and launches take. Callers report every launch and every landing, in order."""

    def __init__(self) -> None:
        self._device: dict[Hashable, float] = {}  # kind of step → average seconds of the device
        self._host = 0.0  # average seconds of a launch
        self._under_way: list[tuple[Hashable | None, float]] = []  # kind, when the device can begin

    def launched(self, kind: Hashable | None, began: float, now: float) -> None:
        """Notes that the host spent [began, now) on launching a step. Steps of one kind take about equally
        long. None: the averages learn nothing from this step."""
        if kind is not None:
            self._host += (1 - DECAY) * (now - began - self._host) if self._host else now - began
        self._under_way.append((kind, now))

    def landed(self, device_seconds: float, now: float) -> None:
        """Notes that the oldest step is over. The next step begins now, if it is launched already."""
        kind, _ = self._under_way.pop(0)
        if kind is not None:
            before = self._device.get(kind, device_seconds)
            self._device[kind] = DECAY * before + (1 - DECAY) * device_seconds
        self._under_way = [(kind, max(since, now)) for kind, since in self._under_way]

    @property
    def due(self) -> float:
        """When to launch the step after the one under way. A time in the past means now."""
        kind, since = self._under_way[0]
        if kind is None or kind not in self._device:
            return since
        return since + self._device[kind] - HOST_MARGIN * self._host - MARGIN_SECONDS
