"""When to launch the next step while another is under way.

Early enough that the device never idles, but no earlier: a request that arrives after the launch waits one
step longer. A step that only decodes is expected to take the device as long as recent steps of its kind. For
a step with prompts the caller has an estimate. Scheduling and launching are expected to take the host as long
as recently.

The launch of a long prompt takes the host many milliseconds, since no graph has its kernels. If it would end
after the step under way, the tokens of that step would wait for it. Such a launch comes after these tokens.
The device hardly idles: it starts when the first kernel is launched.

Steps of prompts alone are not launched earlier than others. They may take 0.3 s, and a request from another
worker would wait for two of them.

Pure: callers pass times, in seconds of any clock.
"""

from collections import defaultdict
from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

from baton.steps.averages import Average

HOST_MARGIN = 1.25
"""Factor on the average time that the host takes for a launch."""
MARGIN_SECONDS = 0.0003
"""Added to that."""
EARLY = 0.8
"""Share of the expected time of a step with prompts after which the next one is due. Their times vary more
than those of steps that only decode."""
DECAY = 0.8
"""Factor on the weight of a past step or launch with each later one of its kind."""


class _UnderWay(NamedTuple):
    kind: Hashable | None
    since: float  # when the device can begin
    expected: float  # seconds if the kind is None; 0: not known
    share: float  # of the expected seconds, after which the next step should be launched


class Pace:
    """Learns how long steps and launches take. Callers report every launch and every landing, in order."""

    def __init__(self) -> None:
        self._device = defaultdict[Hashable, Average](partial(Average, DECAY))  # kind of step → its seconds
        self._host = Average(DECAY)  # seconds of a launch of decodes alone
        self._prompt_host = Average(DECAY)  # of a launch with prompts, in a graph
        self._slow_host = Average(DECAY)  # of a launch without a graph
        self._under_way: list[_UnderWay] = []

    def launched(
        self,
        kind: Hashable | None,
        began: float,
        now: float,
        *,
        slow: bool = False,
        expected: float = 0.0,
    ) -> None:
        """Notes that the host spent [began, now) on launching a step.

        Args:
            kind: steps of one kind take about equally long. None: the step has prompts, or no graph, and
                should take `expected` seconds.
            slow: no graph has its kernels. So the device begins with the first kernel.
        """
        host = self._prompt_host if kind is None else self._host
        (self._slow_host if slow else host).add(now - began)
        share = EARLY if kind is None else 1.0
        self._under_way.append(_UnderWay(kind, began if slow else now, expected, share))

    def landed(self, device_seconds: float, now: float) -> None:
        """Notes that the oldest step is over. The next step begins now, if it is launched already."""
        kind = self._under_way.pop(0).kind
        if kind is not None:
            self._device[kind].add(device_seconds)
        self._under_way = [step._replace(since=max(step.since, now)) for step in self._under_way]

    def due(self, *, slow: bool = False) -> float:
        """When to launch the step after the one under way. A time in the past means now. `slow`: no graph has
        the kernels of that step."""
        step = self._under_way[0]
        # A step with prompts mostly has another one behind it.
        host = self._prompt_host if step.kind is None else self._host
        early = step.share * self._expected(step)
        launch = HOST_MARGIN * (self._slow_host if slow else host).value + MARGIN_SECONDS
        return step.since + early - launch if early else step.since

    @property
    def ends(self) -> float:
        """When the step under way should end. If that is not known: when it began."""
        return self._under_way[0].since + self._expected(self._under_way[0])

    def _expected(self, step: _UnderWay) -> float:
        return step.expected if step.kind is None else self._device[step.kind].value

    def fits_slow_launch(self, now: float) -> bool:
        """Whether a launch without a graph would end before the step under way."""
        return now + HOST_MARGIN * self._slow_host.value <= self.ends
