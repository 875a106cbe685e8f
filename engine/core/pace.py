"""When to launch the next step while another is under way.

Early enough that the device never idles, but no earlier: a request that arrives after the launch waits one
step longer. A step is expected to take the device as long as recent steps of its kind. Scheduling and
launching are expected to take the host as long as recently.

The launch of a long prompt takes the host many milliseconds, since no graph has its kernels. If it would end
after the step under way, the tokens of that step would wait for it. Such a launch comes after these tokens.
The device hardly idles: it starts when the first kernel is launched.

Pure: callers pass times, in seconds of any clock.
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
        self._slow_host = 0.0  # of a launch without a graph
        # Kind, when the device can begin, seconds that it may take if steps of this kind are not known.
        self._under_way: list[tuple[Hashable | None, float, float]] = []

    def launched(
        self, kind: Hashable | None, began: float, now: float, *, slow: bool = False, expected: float = 0.0
    ) -> None:
        """Notes that the host spent [began, now) on launching a step. Steps of one kind take about equally
        long. None: their averages learn nothing from this step, and it should take `expected` seconds.
        `slow`: without a graph, so the device begins with the first kernel."""
        if kind is not None:
            self._host = _averaged(self._host, now - began)
        elif slow:
            self._slow_host = _averaged(self._slow_host, now - began)
        self._under_way.append((kind, began if slow else now, expected))

    def landed(self, device_seconds: float, now: float) -> None:
        """Notes that the oldest step is over. The next step begins now, if it is launched already."""
        kind, _, _ = self._under_way.pop(0)
        if kind is not None:
            before = self._device.get(kind, device_seconds)
            self._device[kind] = DECAY * before + (1 - DECAY) * device_seconds
        self._under_way = [(kind, max(since, now), expected) for kind, since, expected in self._under_way]

    @property
    def due(self) -> float:
        """When to launch the step after the one under way. A time in the past means now."""
        kind, since, _ = self._under_way[0]
        if kind is None or kind not in self._device:
            return since
        return since + self._device[kind] - HOST_MARGIN * self._host - MARGIN_SECONDS

    def fits_slow_launch(self, now: float) -> bool:
        """Whether a launch without a graph would end before the step under way."""
        kind, since, expected = self._under_way[0]
        ends = since + (expected if kind is None else self._device.get(kind, 0.0))
        return now + HOST_MARGIN * self._slow_host <= ends


def _averaged(average: float, value: float) -> float:
    return average + (1 - DECAY) * (value - average) if average else value
