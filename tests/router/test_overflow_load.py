"""Overflow under an open loop: with the same arrivals, first tokens do not come later on the whole.

Simulates a prefill and a decode worker with the speed of an H200 with an 8B model, and the router's view of
them.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from bench.contract import percentile
from bench.load.traffic.arrivals import Arrivals
from engine.core.chunk_limit import ChunkLimit
from router.policy import ChunkOffer, PrefillLoads, PrefillRequest, PrefillWork, overflow

TOKENS, OUTPUT = 2000, 150
PREFILL = 0.0456
"""Seconds to prefill a prompt: 21.9 prompts per second."""
HANDOVER = 0.025
TOKEN = 45e-6
"""Seconds that one prompt token adds to a decode step."""
REPORT = 1.0
SECONDS = 10.0


@dataclass(eq=False)
class Asked:
    at: float
    left: int = TOKENS
    tokens: int = OUTPUT - 1
    """Prompt tokens that decode still computes."""


class Pair:
    """A prefill and a decode worker, and a router that hears of them once a second. `target`: decode's for a
    step, in seconds; None: nothing overflows.

    Attributes:
        ttft: seconds of each request, in order of their first tokens.
    """

    def __init__(self, target: float | None) -> None:
        self.ttft: list[float] = []
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._loads = PrefillLoads()
        self._row = self._loads.join("prefill", block_size=16, now=0.0)
        self._queue: deque[Asked] = deque()  # at prefill; the first one is being computed
        self._limit = None if target is None else ChunkLimit(target, 8192)
        self._offer = ChunkOffer(0, 0.0, 0.0)
        self._prompts: deque[Asked] = deque()  # at decode
        self._decoding: set[Asked] = set()
        self._stepping = False

    def run(self, rate: float, seed: int) -> None:
        times = itertools.takewhile(SECONDS.__gt__, Arrivals(kind="poisson", rate=rate).times(seed))
        for at in times:
            self._at(at, lambda at=at: self._arrive(Asked(at)))
        for at in range(round(SECONDS / REPORT)):
            self._at(at * REPORT, self._report)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _report(self) -> None:
        waiting, speed = TOKENS * len(self._queue), TOKENS / PREFILL
        self._loads.reported(self._row, tokens_waiting=waiting, tokens_per_s=speed, now=self._now)
        if (limit := self._limit) is not None:
            waiting = sum(asked.left for asked in self._prompts)
            self._offer = ChunkOffer(limit.fitting, limit.seconds, limit.step_seconds, waiting)

    def _arrive(self, asked: Asked) -> None:
        snapshot = self._loads.snapshot(PrefillRequest(key=1, tokens=TOKENS), self._now)
        assert snapshot is not None
        offer = self._offer
        if overflow(TOKENS, snapshot.seconds(PrefillRequest(key=1, tokens=TOKENS), self._row), [offer]):
            waiting = offer.waiting + TOKENS  # as `AttemptTable.prefill_tokens`
            self._offer = ChunkOffer(offer.tokens, offer.seconds, offer.step_seconds, waiting)
            self._prompts.append(asked)
            self._step()
        else:
            self._loads.sent(self._row, PrefillWork(TOKENS), self._now)
            self._queue.append(asked)
            if len(self._queue) == 1:
                self._at(self._now + PREFILL, self._prefilled)

    def _prefilled(self) -> None:
        asked = self._queue.popleft()
        self._loads.ended(self._row, PrefillWork(TOKENS), computed=True, now=self._now)
        self.ttft.append(self._now - asked.at)
        self._at(self._now + HANDOVER, lambda: self._join(asked))
        if self._queue:
            self._at(self._now + PREFILL, self._prefilled)

    def _join(self, asked: Asked) -> None:
        self._decoding.add(asked)
        self._step()

    def _step(self) -> None:
        if self._stepping or not (self._decoding or self._prompts):
            return
        self._stepping = True
        decodes, limit = list(self._decoding), self._limit
        chunk = 0
        if self._prompts and limit is not None:
            chunk = min(self._prompts[0].left, limit.tokens if decodes else TOKENS)
        seconds = (0.0042 + 75e-6 * len(decodes) if decodes else 0.0) + TOKEN * chunk
        self._at(self._now + seconds, lambda: self._stepped(decodes, chunk, seconds))

    def _stepped(self, decodes: list[Asked], chunk: int, seconds: float) -> None:
        self._stepping = False
        if self._limit is not None:
            self._limit.record(bool(decodes), chunk, seconds)
        for asked in decodes:
            asked.tokens -= 1
            if not asked.tokens:
                self._decoding.remove(asked)
        if chunk:
            asked = self._prompts[0]
            asked.left -= chunk
            if not asked.left:
                self._prompts.popleft()
                self.ttft.append(self._now - asked.at)
                self._decoding.add(asked)
        self._step()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("target", [0.0075, 0.012])
@pytest.mark.parametrize(("rate", "most"), [(12, 1.1), (22, 1.1), (26, 0.8)])
def test_with_the_same_arrivals_first_tokens_come_no_later(
    rate: float, most: float, target: float, seed: int
) -> None:
    """Where prefill has idle times, a wrong estimate costs little. Elsewhere decode shortens the queue."""
    alone, helped = Pair(None), Pair(target)
    for pair in (alone, helped):
        pair.run(rate, seed)
    assert len(helped.ttft) == len(alone.ttft)
    for share in (0.5, 0.99):
        assert percentile(helped.ttft, share) <= most * percentile(alone.ttft, share)
