"""Both pools under a load that changes, with a policy that moves workers between them.

A worker shares its time equally between its prompts and its decodes. What it has goes on to its end when it
moves. Requests pass from prefill to decode in no time. As with real routers, prompts that queue hold no
decode memory; the simulator neglects what they hold while they are computed. Once a second the policy reads
the reports of all workers, and says how large each pool should be.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rpc import worker_pb2 as pb
from simulator.worker import Speed

TICK = 0.01
STATUS_INTERVAL = 1.0
SEATS = 256
KV_TOKENS = 500_000
"""What the blocks of a worker hold."""

Pool = Literal["prefill", "decode"]
Policy = Callable[[float, Mapping[Pool, Sequence[pb.WorkerStatus]]], Mapping[Pool, int]]
"""Takes the time and the reports of each pool. Returns the sizes that the pools should have."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests per second, and the tokens of each request."""

    rate: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Slo:
    """Most seconds to the first token, and from token to token as the mean of a request."""

    ttft: float
    ttit: float


@dataclass(slots=True)
class PoolsOutcome:
    """What was measured. `sizes`: (time, size of the prefill pool), at the start and after each flip."""

    requests: int = 0
    good: int = 0
    sizes: list[tuple[float, int]] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Share of the requests that met the SLO."""
        return self.good / self.requests


@dataclass(slots=True)
class _Request:
    arrived: float
    prompt: int
    output: int
    seconds: float  # of computing that its prompt still needs
    first: float = 0.0  # when it had its first token


class _Worker:
    def __init__(self, pool: Pool, prefill: Speed, step: Callable[[int], float]) -> None:
        self.pool: Pool = pool
        self.prompts: deque[_Request] = deque()
        self.decodes: list[tuple[float, int, _Request]] = []  # heap, by the value of `_steps` at their end
        self._prefill, self._step = prefill, step
        self._steps = 0.0
        self._order = itertools.count()
        self._prompt_tokens = 0

    def begin(self, request: _Request) -> None:
        """Begins to decode."""
        heapq.heappush(self.decodes, (self._steps + request.output - 1, next(self._order), request))

    def work(self, seconds: float) -> tuple[list[_Request], list[_Request]]:
        """Returns the requests whose prompts are done, and those that have all tokens."""
        share = seconds / 2 if self.prompts and self.decodes else seconds
        prefilled, ended = [], []
        left = share
        while self.prompts and left > 0:
            used = min(left, self.prompts[0].seconds)
            self.prompts[0].seconds -= used
            left -= used
            if self.prompts[0].seconds <= 0:
                prefilled.append(self.prompts.popleft())
                self._prompt_tokens += prefilled[-1].prompt
        if self.decodes:
            self._steps += share / self._step(len(self.decodes))
        while self.decodes and self.decodes[0][0] <= self._steps:
            ended.append(heapq.heappop(self.decodes)[2])
        return prefilled, ended

    def status(self) -> pb.WorkerStatus:
        waiting = sum(request.prompt for request in self.prompts)
        kv = sum(request.prompt + request.output for _, _, request in self.decodes)
        lengths = self.prompts[0].prompt if self.prompts else 1000
        return pb.WorkerStatus(
            requests_waiting=max(0, len(self.prompts) - 1),
            requests_running=len(self.decodes) + bool(self.prompts),
            tokens_waiting=waiting,
            blocks_total=1000,
            blocks_free=max(0, 1000 - 1000 * kv // KV_TOKENS),
            prefill_tokens_per_s=lengths / self._prefill(lengths, 0),
            step_seconds=self._step(len(self.decodes)) if self.decodes else 0.0,
            prompt_tokens=self._prompt_tokens,
        )


def simulate(
    load: Callable[[float], Load],
    policy: Policy,
    *,
    pools: Mapping[Pool, int],
    seconds: float,
    prefill: Speed,
    step: Callable[[int], float],
    slo: Slo,
    seed: int = 1,
) -> PoolsOutcome:
    """`load`: what arrives at a time. `pools`: the sizes at the start. `step`: seconds of a step by batch."""
    rng = random.Random(seed)
    workers = [_Worker(pool, prefill, step) for pool, size in pools.items() for _ in range(size)]
    outcome = PoolsOutcome(sizes=[(0.0, pools["prefill"])])
    waiting: deque[_Request] = deque()  # for a seat
    arrival = 0.0
    for tick in range(int(seconds / TICK)):
        now = tick * TICK
        while arrival <= now:
            asked = load(arrival)
            request = _Request(arrival, asked.prompt, asked.output, prefill(asked.prompt, 0))
            outcome.requests += 1
            queue = min(_of(workers, "prefill"), key=lambda w: sum(r.seconds for r in w.prompts))
            queue.prompts.append(request)
            arrival += rng.expovariate(asked.rate)
        for worker in workers:
            prefilled, ended = worker.work(TICK)
            for request in prefilled:
                request.first = now + TICK
            waiting += prefilled
            outcome.good += sum(_met(request, now + TICK, slo) for request in ended)
        while waiting:
            emptiest = min(_of(workers, "decode"), key=lambda w: len(w.decodes))
            if len(emptiest.decodes) >= SEATS:
                break
            emptiest.begin(waiting.popleft())
        if tick % int(STATUS_INTERVAL / TICK) == 0 and _flip(workers, policy(now, _reports(workers))):
            outcome.sizes.append((now, len(_of(workers, "prefill"))))
    return outcome


def _of(workers: Sequence[_Worker], pool: Pool) -> list[_Worker]:
    return [worker for worker in workers if worker.pool == pool]


def _met(request: _Request, ended: float, slo: Slo) -> bool:
    ttit = (ended - request.first) / (request.output - 1)
    return request.first - request.arrived <= slo.ttft and ttit <= slo.ttit


def _reports(workers: Sequence[_Worker]) -> dict[Pool, list[pb.WorkerStatus]]:
    return {
        "prefill": [worker.status() for worker in _of(workers, "prefill")],
        "decode": [worker.status() for worker in _of(workers, "decode")],
    }


def _flip(workers: Sequence[_Worker], wanted: Mapping[Pool, int]) -> bool:
    """Moves the worker with the least work if one pool should shrink and the other grow."""
    more = wanted["prefill"] - len(_of(workers, "prefill"))
    if not more or wanted["decode"] - len(_of(workers, "decode")) != -more:
        return False
    source, target = ("decode", "prefill") if more > 0 else ("prefill", "decode")
    moved = min(_of(workers, source), key=lambda w: (len(w.prompts), len(w.decodes)))
    moved.pool = target
    return True
