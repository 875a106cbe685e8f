"""When to launch the next step while one is under way: so early that the device never waits, and no earlier,
since who arrives after the launch waits for a step more. Pure: times are told, in seconds of any clock.

A step of the same kind takes the device about as long as the last one did, and the host needs about as long
to schedule and launch one as it did before.
"""

from collections.abc import Hashable

HOST_MARGIN = 1.25
"""Of the time that a launch takes on average; and on top of that:"""
MARGIN_SECONDS = 0.0003
DECAY = 0.8


class Pace:
    def __init__(self) -> None:
        self._device: dict[Hashable, float] = {}
        self._host = 0.0
        self._under_way: list[tuple[Hashable | None, float]] = []  # kind, when the device can begin

    def launched(self, kind: Hashable | None, began: float, now: float) -> None:
        """The host spent [began, now) on a step; None: how long such a one takes is not foreseeable, nor
        does it tell how long the host needs for another kind."""
        if kind is not None:
            self._host += (1 - DECAY) * (now - began - self._host) if self._host else now - began
        self._under_way.append((kind, now))

    def landed(self, device_seconds: float, now: float) -> None:
        """The oldest step is over; the next one has begun, or did when it was launched."""
        kind, _ = self._under_way.pop(0)
        if kind is not None:
            before = self._device.get(kind, device_seconds)
            self._device[kind] = DECAY * before + (1 - DECAY) * device_seconds
        self._under_way = [(kind, max(since, now)) for kind, since in self._under_way]

    @property
    def due(self) -> float:
        """When to launch behind the step that is under way. The past: now."""
        kind, since = self._under_way[0]
        if kind is None or kind not in self._device:
            return since
        return since + self._device[kind] - HOST_MARGIN * self._host - MARGIN_SECONDS
