"""The plan of a request: which workers compute it, and which one decodes. `planner` makes plans."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from baton.kv_names import CHUNK_TOKENS
from baton.router.policy.prefill_loads import PrefillWork
from baton.router.policy.prefixes import PrefixSource

Reason = Literal["short", "cached", "saturated", "no_prefill", "no_handover", "no_room", "no_decode"]
"""Why there is no handover. The last three: a prefill worker computes the prompt and decodes. The others: a
decode worker does. For `short`, `cached` and `saturated` see `placement`."""
REASONS: tuple[Reason, ...] = get_args(Reason)
_WHY: Mapping[Reason, str] = {
    "short": "on a decode worker: the prompt is short",
    "cached": "on a decode worker: it has most of the prompt in its cache",
    "saturated": "on a decode worker: a prefill worker and a handover would have taken longer",
    "no_prefill": "on a decode worker: there was no prefill worker",
    "no_handover": "on a prefill worker, though a decode worker had room: a handover costs more now "
    "(--advanced.no-overflow allows only handovers)",
    "no_room": "on a prefill worker: no decode worker had room",
    "no_decode": "on a prefill worker: the decode pool had lost its last worker",
}

Place = Literal["handover", "decode", "prefill", "split", "held", "one_token"]
"""A handover, a decode or prefill worker alone, several workers, or a prefill worker that has the KV already.
The last one: a prefill worker computes the only token that is needed now."""
Order = Literal["together", "prefill", "decode"]
"""What is submitted first, if no worker holds anything. The decode follows when the prompt starts, or the
prompt when the decode has reserved its memory."""


def why(reason: Reason, costs: Mapping[str, float]) -> str:
    """Says in words where one worker computes prompt and answer, and why. `costs`: of the last such plan."""
    known = ((name, cost) for name, cost in costs.items() if cost < math.inf)
    numbers = ", ".join(
        f"{'handover' if name == 'handover' else f'{name} worker'} {cost:.3f} s" for name, cost in known
    )
    return _WHY[reason] + (f"; costs of the last one: {numbers}" if "handover" in costs and numbers else "")


class Range(NamedTuple):
    """Positions [start, stop), computed by the worker of this row. The next range has another worker."""

    worker: int
    start: int
    stop: int


class Plan(NamedTuple):
    """Workers are named by their rows.

    Attributes:
        ranges: all positions of the prompt and the output so far. Empty: a worker has the KV already.
        decode: the worker that decodes. None: no decode worker is needed.
        cached: tokens of the first range that its worker has in its prefix cache.
        within: seconds in which the prompt should be computed. 0: it is in no hurry.
        encoding: seconds in which the worker of the first range encodes images.
        reason: why there is no handover. None: there is one, or none is needed.
        costs: the estimates, in seconds of a first token, with the harm to others. Infinite: not possible.
        waits: seconds in which each worker of a split begins steps, or waits for others.
        arrives: seconds until its KV has come to the worker that decodes. 0: not known.
        gap_cost: of the request, as in `EngineRequest`. 0: not known.
        source: another worker that has more of the prompt cached.
    """

    place: Place
    ranges: tuple[Range, ...] = ()
    decode: int | None = None
    cached: int = 0
    within: float = 0.0
    encoding: float = 0.0
    order: Order = "together"
    reason: Reason | None = None
    costs: Mapping[str, float] = MappingProxyType({})
    waits: Mapping[int, float] = MappingProxyType({})
    arrives: float = 0.0
    gap_cost: float = 0.0
    source: PrefixSource | None = None

    @property
    def inline(self) -> bool:
        """One worker computes the prompt and decodes, without a transfer."""
        return len(self.ranges) == 1 and self.ranges[0].worker == self.decode

    def work(self, worker: int, chunks: Sequence[int]) -> PrefillWork:
        """What this worker computes. `chunks`: of the prompt."""
        ranges = [part for part in self.ranges if part.worker == worker]
        cached = 0 if ranges[0].start else self.cached
        tokens = sum(part.stop - part.start for part in ranges) - cached
        seconds = self.within if len(self.ranges) == 1 else 0.0
        beside = self.waits.get(worker, 0.0) + (0.0 if ranges[0].start else self.encoding)
        names, shared = chunks[: ranges[-1].stop // CHUNK_TOKENS], len(self.ranges) > 1
        return PrefillWork(tokens, names, cached, seconds, beside, shared)

    def attributes(self) -> dict[str, str | float]:
        """The plan and its reasons, for a trace."""
        known = {f"baton.cost_s.{name}": cost for name, cost in self.costs.items() if cost < math.inf}
        ranges = " ".join(f"{part.worker}:{part.start}-{part.stop}" for part in self.ranges)
        return {"baton.place": self.place, "baton.ranges": ranges, **known}
